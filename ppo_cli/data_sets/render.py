"""Rows to token ids: the chat template renders text, the text is tokenised once.

Rendering and tokenising are two steps on purpose: a rendered template already holds its
special tokens, so the tokenizer must not add a second BOS. A prompt that is used raw (no
template) gets the special tokens that the tokenizer puts in front of any text.
"""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ppo_cli.data_sets.files import RowError, RowProblem
from ppo_cli.data_sets.rows import Row
from ppo_cli.errors import DataError, first_line
from ppo_cli.records import Message

CHUNK = 1024
TEMPLATE_S = 10.0  # templates take milliseconds
TEMPLATE_BYTES = 2**30


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    chat_template: Any
    eos_token_id: int | None
    all_special_tokens: list[str]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render messages."""
        ...

    def __call__(self, text: Any, **options: Any) -> Any:
        """Tokenise a list of texts."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of token ids."""
        ...


@dataclass(frozen=True)
class Rendered:
    """A row with its messages, the text that the model reads, and that text's token ids."""

    row: Row
    messages: tuple[Message, ...]
    text: str
    token_ids: tuple[int, ...]
    control_words: tuple[str, ...]


@dataclass(frozen=True)
class Renderer:
    """How prompts become text; refuses what the tokenizer cannot do."""

    tokenizer: Tokenizer
    system_prompt: str | None = None
    apply_chat_template: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse arguments that the chat template does not read: they would change nothing."""
        template = str(self.tokenizer.chat_template) if self.uses_template else ""
        unread = [name for name in self.template_arguments if name not in template]
        if unread:
            why = "the chat template does not use it" if self.uses_template else self.why_raw
            raise DataError(f"data.apply_chat_template_kwargs.{unread[0]} has no effect: {why}.")

    @property
    def uses_template(self) -> bool:
        """Tell whether prompts go through a chat template."""
        return self.apply_chat_template and bool(self.tokenizer.chat_template)

    @property
    def why_raw(self) -> str:
        """Say why prompts are used raw."""
        if not self.apply_chat_template:
            return "data.apply_chat_template is false"
        return "the tokenizer has no chat template"

    def render(self, rows: Sequence[Row]) -> tuple[list[Rendered], list[RowProblem]]:
        """Render and tokenise the rows; those that the template refuses become problems."""
        words = control_words(self.tokenizer)
        done: list[tuple[Row, tuple[Message, ...], str]] = []
        problems: list[RowProblem] = []
        for row in rows:
            try:
                messages = self.messages_of(row)
                done.append((row, messages, self.text_of(row, messages)))
            except RowError as error:
                problems.append(RowProblem(row.place, error.column, str(error)))
        ids = self.tokenise([text for _, _, text in done])
        rendered = [
            Rendered(row, messages, text, token_ids, find_words(messages, words))
            for (row, messages, text), token_ids in zip(done, ids, strict=True)
        ]
        return rendered, problems

    def messages_of(self, row: Row) -> tuple[Message, ...]:
        """Return the messages of a row, the system prompt in front when it has none."""
        prompt = row.prompt
        given = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        if self.system_prompt is None or given[0]["role"] in ("system", "developer"):
            return given
        return ({"role": "system", "content": self.system_prompt}, *given)

    def text_of(self, row: Row, messages: tuple[Message, ...]) -> str:
        """Return the text that the model continues."""
        if self.uses_template:
            return self.fill_template(messages)
        if not isinstance(row.prompt, str):
            raise RowError(
                "prompt",
                f"is a message list, but {self.why_raw}; use text prompts, or a model whose "
                "tokenizer has a chat template",
            )
        if self.system_prompt is not None:
            raise RowError(
                "prompt",
                f"cannot take data.system_prompt, because {self.why_raw}; "
                "unset it or write it into the prompts",
            )
        return row.prompt

    def fill_template(self, messages: tuple[Message, ...]) -> str:
        """Apply the chat template; its refusal (roles, order) is the row's problem.

        A template is a program of whoever made the model: it gets TEMPLATE_S of time and
        TEMPLATE_BYTES of memory, and a DataError ends it that needs more.
        """
        conversation = [dict(message) for message in messages]
        try:
            with bounded():
                text = str(
                    self.tokenizer.apply_chat_template(
                        conversation,
                        tokenize=False,
                        add_generation_prompt=True,
                        **self.template_arguments,
                    )
                )
        except (MemoryError, TimeoutError) as error:
            raise DataError(
                f"The chat template of the tokenizer needs more than {TEMPLATE_S:g} s or "
                f"{TEMPLATE_BYTES // 2**20} MiB for one prompt: it does not end. Correct it in the "
                "model's folder, or go without: data.apply_chat_template=false."
            ) from error
        except Exception as error:
            raise RowError(
                "prompt", f"the chat template refuses it: {first_line(error)}"
            ) from error
        if not text.strip():
            raise RowError("prompt", "the chat template makes an empty text of it")
        return text

    def tokenise(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of the texts, in chunks; a trailing EOS of raw text is cut."""
        ids: list[tuple[int, ...]] = []
        raw = not self.uses_template
        for start in range(0, len(texts), CHUNK):
            chunk = list(texts[start : start + CHUNK])
            found = self.tokenizer(chunk, add_special_tokens=raw, verbose=False)["input_ids"]
            ids.extend(tuple(map(int, row)) for row in found)
        # A model cannot continue after its own end mark; some tokenizers add one to raw text.
        eos = self.tokenizer.eos_token_id
        return [self.without_eos(row, eos) if raw else row for row in ids]

    def without_eos(self, token_ids: tuple[int, ...], eos: int | None) -> tuple[int, ...]:
        """Return the ids without the end mark that the tokenizer put behind them."""
        return token_ids[:-1] if len(token_ids) > 1 and token_ids[-1] == eos else token_ids


@contextmanager
def bounded() -> Iterator[None]:
    """Raise TimeoutError or MemoryError where the work within takes too much.

    Both limits are the process's own. Only the main thread can be interrupted; a system that does
    not report how much memory is mapped limits the time alone.
    """

    def ring(*_: object) -> None:
        raise TimeoutError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if usual[0] == resource.RLIM_INFINITY or usual[0] > mapped + TEMPLATE_BYTES:
            resource.setrlimit(resource.RLIMIT_AS, (mapped + TEMPLATE_BYTES, usual[1]))
    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, usual)


def control_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the words that this tokenizer turns into control tokens wherever they occur."""
    words = set(tokenizer.all_special_tokens)
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    words.update(str(token) for token in added.values() if token.special)
    return tuple(sorted(word for word in words if word.strip()))


def find_words(messages: tuple[Message, ...], words: Sequence[str]) -> tuple[str, ...]:
    """Return the control words that somebody wrote into the contents of the messages."""
    text = "\n".join(str(message["content"]) for message in messages)
    return tuple(word for word in words if word in text)
