"""Turn rows into prompts that are ready for sampling, and order them for training.

The chat template renders text, then the text is tokenised. These are two steps on purpose: rendered
text already contains its special tokens, so the tokenizer must not add a second BOS. A raw prompt
(no template) gets the special tokens that the tokenizer puts before any text.
"""

from __future__ import annotations

import copy
import hashlib
import json
import resource
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ppo_cli.data_sets.files import Place, RowError, RowProblem, raise_problems
from ppo_cli.data_sets.frames import find_frame, keeps_contents
from ppo_cli.data_sets.row_sets import RowSet, list_notes
from ppo_cli.data_sets.rows import Row, RowPrompt, prompt_of
from ppo_cli.data_sets.words import WordCounts, open_words
from ppo_cli.errors import DataError, first_line, plural
from ppo_cli.machine.memory import own_memory
from ppo_cli.records import Message, Prompt
from ppo_cli.thoughts import find_open_mark
from ppo_cli.waits import run_in_thread

CHUNK = 1024  # texts that are tokenised at once
CHUNK_CHARACTERS = 1 << 20  # of them; a token takes a hundred times the memory of a character
MAX_FRAMES = 500  # that are kept
TEMPLATE_S = 10.0  # limit for one prompt or a chunk; templates usually take milliseconds
TEMPLATE_BYTES = 2**30  # limit of additional memory for one prompt


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    name_or_path: str
    chat_template: Any
    eos_token_id: int | None
    all_special_tokens: list[str]
    is_fast: bool
    backend_tokenizer: Any  # of a fast one

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render messages."""
        ...

    def __call__(self, text: Any, **options: Any) -> Any:
        """Tokenise a list of texts."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of token ids."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids."""
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
    """Renders prompts as text and tokenises them."""

    tokenizer: Tokenizer
    system_prompt: str | None = None
    apply_chat_template: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    vocabulary_size: int | None = None  # tokens that the model has embeddings for

    def __post_init__(self) -> None:
        """Raise DataError for arguments that the chat template does not use."""
        template = str(self.tokenizer.chat_template) if self.uses_template else ""
        unread = [name for name in self.template_arguments if name not in template]
        if unread:
            why = "the chat template does not use it" if self.uses_template else self.why_raw
            raise DataError(f"data.apply_chat_template_kwargs.{unread[0]} has no effect: {why}.")

    @property
    def uses_template(self) -> bool:
        """Whether a chat template is applied to prompts."""
        return self.apply_chat_template and bool(self.tokenizer.chat_template)

    @property
    def why_raw(self) -> str:
        """Why prompts are used raw."""
        if not self.apply_chat_template:
            return "data.apply_chat_template is false"
        return "the tokenizer has no chat template"

    @property
    def check_flags(self) -> list[str]:
        """Flags with which `ppo data check` renders rows in the same way."""
        # The same model, system prompt and template.
        flags = ["--model", self.tokenizer.name_or_path]
        flags += ["--system_prompt", self.system_prompt] if self.system_prompt is not None else []
        return flags if self.apply_chat_template else [*flags, "--raw"]

    def render(self, rows: Sequence[Row]) -> tuple[list[Rendered], list[RowProblem]]:
        """Render and tokenise rows; rows that the template refuses become problems."""
        # First the texts, then all token ids, then the checks that need both.
        tokens = control_words(self.tokenizer)
        done: list[tuple[Row, str]] = []
        problems: list[RowProblem] = []
        for row, text in zip(rows, self.fill([row.prompt for row in rows]), strict=True):
            if isinstance(text, RowError):
                problems.append(RowProblem(row.place, text.column, str(text)))
            else:
                done.append((row, text))
        # Tokenised together: a fast tokenizer uses all cores.
        ids = self.tokenise([text for _, text in done])
        rendered: list[Rendered] = []
        for (row, text), token_ids in zip(done, ids, strict=True):
            if unknown := self.find_unknown(token_ids):
                problems.append(RowProblem(row.place, "prompt", unknown))
            else:
                messages = self.messages_of(row.prompt)
                control = find_control_words(messages, tokens)
                rendered.append(Rendered(row, messages, text, token_ids, control))
        return rendered, problems

    def fill(self, prompts: Sequence[RowPrompt]) -> list[str | RowError]:
        """Return the texts that the model continues; an error for what the template refuses."""
        texts: list[str | RowError] = []
        for start in range(0, len(prompts), CHUNK):
            if framed := self.fill_frames(prompts[start : start + CHUNK]):
                texts += framed
                continue
            chunk = [(p, self.messages_of(p)) for p in prompts[start : start + CHUNK]]
            opened = all(prompt for prompt, _ in chunk)  # not by an environment
            if opened and (together := self.fill_templates([m for _, m in chunk])):
                texts += together
                continue
            for prompt, messages in chunk:
                try:
                    texts.append(self.text_of(prompt, messages))
                except RowError as error:
                    texts.append(error)
        return texts

    def fill_frames(self, prompts: Sequence[RowPrompt]) -> list[str]:
        """Put prompts into the frames of their roles; nothing if the template has none for one."""
        texts: list[str] = []
        for prompt in prompts if self.keeps_contents else ():
            roles, contents = ("user",), (prompt,)
            if not isinstance(prompt, str):
                # Other keys than the role and the content have values of the row.
                if any(len(message) > 2 for message in prompt):
                    return []
                roles = tuple([message["role"] for message in prompt])
                contents = tuple([message["content"] for message in prompt])
            if roles and roles not in self.frames and len(self.frames) < MAX_FRAMES:
                self.frames[roles] = find_frame(
                    lambda messages: self.fill_template(self.messages_of(tuple(messages))), roles
                )
            frame = self.frames.get(roles)
            if frame is None or not prompt:
                return []
            texts.append(frame % contents)
        return texts

    @cached_property
    def frames(self) -> dict[tuple[str, ...], str | None]:
        """What the template puts around contents, by the roles of messages."""
        return {}

    @cached_property
    def keeps_contents(self) -> bool:
        """Whether trials show what the template does with any content."""
        template = self.tokenizer.chat_template if self.uses_template else None
        module = getattr(self.tokenizer.apply_chat_template, "__module__", "")
        if not isinstance(template, str) or module != "transformers.tokenization_utils_base":
            return False
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            with limit_template():
                return keeps_contents(_compile_jinja_template(template).environment.parse(template))
        except Exception:  # which `fill_template` explains
            return False

    def measure(self, blocks: Iterable[Sequence[RowPrompt]]) -> Iterator[list[int | RowError]]:
        """Yield the numbers of tokens of blocks of prompts; an error for one that is refused.

        While the texts of a block are tokenised, those of the next are rendered. Texts whose words
        are counted do not need the tokenizer's threads.
        """
        counted: Future[list[int | RowError]] | None = None
        for prompts in blocks:
            texts: list[str | int | RowError] = [*self.fill(prompts)]
            if (word_counts := self.words) is not None:
                counts = [word_counts.count(t) if isinstance(t, str) else None for t in texts]
                texts = [t if n is None else n for t, n in zip(texts, counts, strict=True)]
            if counted is not None:
                yield counted.result()
            counted = run_in_thread(partial(self.count_tokens, texts))
            # Not under the limit of memory of a template.
            if any(len(text) > CHUNK_CHARACTERS for text in texts if isinstance(text, str)):
                wait([counted])
        if counted is not None:
            yield counted.result()

    def count_tokens(self, texts: Sequence[str | int | RowError]) -> list[int | RowError]:
        """Return the number of tokens of each text, or why the model cannot read it.

        What is not a text is returned as it is.
        """
        plain = [text for text in texts if isinstance(text, str)]
        counts: list[int | RowError] = []
        if self.counts_only:
            # Without offsets and lists of ids, which take a third of the time.
            self.tokenise(plain[:1])  # neither cuts nor pads texts from now on
            encode = self.tokenizer.backend_tokenizer.encode_batch_fast
            for chunk in split_chunks(plain):
                counts += map(len, encode(chunk, add_special_tokens=False))
        else:
            for ids in self.tokenise(plain):
                unknown = self.find_unknown(ids)
                counts.append(RowError("prompt", unknown) if unknown else len(ids))
        following = iter(counts)
        return [next(following) if isinstance(text, str) else text for text in texts]

    @cached_property
    def words(self) -> WordCounts | None:
        """The tokenizer's numbers of tokens of words, if they add up to those of texts."""
        return open_words(self.tokenizer.backend_tokenizer) if self.counts_only else None

    @cached_property
    def counts_only(self) -> bool:
        """Whether texts can be counted without their token ids."""
        return self.uses_template and self.reads_all_tokens and self.tokenizer.is_fast

    @cached_property
    def reads_all_tokens(self) -> bool:
        """Whether the model has an embedding for each token of the tokenizer."""
        size = self.vocabulary_size
        return size is None or max(self.tokenizer.get_vocab().values()) < size

    def find_unknown(self, token_ids: tuple[int, ...]) -> str:
        """Return why the model cannot read these tokens; "" if it has an embedding for each."""
        largest = max(token_ids, default=-1)
        if self.vocabulary_size is None or largest < self.vocabulary_size:
            return ""
        token = self.tokenizer.decode([largest], skip_special_tokens=False)
        return (
            f"it holds {token} (token {largest}), which the model has no embedding for: its "
            f"vocab_size is {self.vocabulary_size}"
        )

    def messages_of(self, prompt: RowPrompt) -> tuple[Message, ...]:
        """Return the messages of a row, after the system prompt if the row has none."""
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        # A row's system message wins.
        has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        if self.system_prompt is None or has_system:
            return messages
        return ({"role": "system", "content": self.system_prompt}, *messages)

    def text_of(self, prompt: RowPrompt, messages: tuple[Message, ...]) -> str:
        """Return the text that the model continues, "" for a row that an environment opens."""
        if not prompt:
            return ""
        if self.uses_template:
            try:
                return self.fill_template(messages)
            except RowError as error:
                self.blame_system_message(prompt, messages, error)
                raise
        # Without a template only text prompts are possible.
        if not isinstance(prompt, str):
            advice = "text prompts, or a model whose tokenizer has a chat template"
            if self.tokenizer.chat_template:
                advice = "data.apply_chat_template=true, or text prompts"
            raise RowError("prompt", f"is a message list, but {self.why_raw}: use {advice}")
        if self.system_prompt is not None:
            raise DataError(
                f"--system_prompt (data.system_prompt) cannot be used, because {self.why_raw}: "
                "leave it out, or write its text into the prompts."
            )
        return prompt

    def blame_system_message(
        self, prompt: RowPrompt, messages: tuple[Message, ...], error: RowError
    ) -> None:
        """Raise an error about the system message if the template accepts the rest without it."""
        if messages[0]["role"] not in ("system", "developer") or len(messages) < 2:
            return
        try:
            self.fill_template(messages[1:])
        except RowError:
            return
        # The system message is that of the setting, or that of the row.
        if messages is not prompt:
            raise DataError(
                f"--system_prompt (data.system_prompt): {error}. The model takes the prompts "
                "without it: leave --system_prompt out, write its text into the prompts, or "
                "use a model whose template takes system messages."
            ) from error
        raise RowError(
            "prompt",
            f"{error}. It takes the row without its system message: move that text into the "
            "first user message, or use a model whose template takes system messages",
        ) from error

    def fill_templates(self, conversations: Sequence[Sequence[Message]]) -> Sequence[str]:
        """Apply the chat template to many conversations, under one limit of time and memory.

        Returns nothing if that fails for any reason, or if a text is blank: `text_of` says which
        row is at fault, and why.
        """
        if not self.uses_template:
            return ()
        copies = [[dict(message) for message in messages] for messages in conversations]
        try:
            with limit_template():
                # Several templates by name are taken as they are.
                if isinstance(self.tokenizer.chat_template, str):
                    flatten_globals(self.tokenizer.chat_template)
                texts = self.tokenizer.apply_chat_template(
                    copies, tokenize=False, add_generation_prompt=True, **self.template_arguments
                )
        except Exception:
            return ()
        complete = isinstance(texts, list) and len(texts) == len(copies)
        return texts if complete and all(isinstance(t, str) and t.strip() for t in texts) else ()

    def fill_template(self, messages: Sequence[Message], *, continued: bool = True) -> str:
        """Apply the chat template; a refusal (roles, order) is a RowError.

        `continued`: the assistant's next message follows, otherwise the last one is complete. A
        template is a program by the author of the model: DataError if it takes more than
        TEMPLATE_S of time or TEMPLATE_BYTES of memory.
        """
        # Templates may change the messages that they get.
        conversation = [dict(message) for message in messages]
        try:
            with limit_template():
                text = str(
                    self.tokenizer.apply_chat_template(
                        conversation,
                        tokenize=False,
                        add_generation_prompt=continued,
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
            from jinja2 import TemplateSyntaxError  # loaded with the first template anyway

            if isinstance(error, TemplateSyntaxError):
                raise DataError(
                    "The chat template of the tokenizer is not a valid template "
                    f"({first_line(error)}). Correct chat_template.jinja in the model's folder, or "
                    "go without: data.apply_chat_template=false."
                ) from error
            raise RowError(
                "prompt", f"the chat template refuses it: {first_line(error)}"
            ) from error
        if not text.strip():
            raise RowError("prompt", "the chat template renders it as an empty text")
        return text

    def tokenise(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of texts; a trailing EOS of raw text is removed."""
        ids: list[tuple[int, ...]] = []
        # Rendered text already has its special tokens.
        raw = not self.uses_template
        for chunk in split_chunks(texts):
            # Attention masks, which nobody reads, take as long as the tokens.
            encoded = self.tokenizer(
                chunk, add_special_tokens=raw, return_attention_mask=False, verbose=False
            )
            ids.extend(map(tuple, encoded["input_ids"]))
        # Some tokenizers append EOS to raw text, after which a model does not continue.
        eos = self.tokenizer.eos_token_id
        return [self.without_eos(row, eos) if raw else row for row in ids]

    def without_eos(self, token_ids: tuple[int, ...], eos: int | None) -> tuple[int, ...]:
        """Return the ids without the EOS that the tokenizer appended."""
        return token_ids[:-1] if len(token_ids) > 1 and token_ids[-1] == eos else token_ids


def split_chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield CHUNK texts or fewer, with CHUNK_CHARACTERS or one text at most."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        if chunk and (len(chunk) == CHUNK or size + len(text) > CHUNK_CHARACTERS):
            yield chunk
            chunk, size = [], 0
        chunk.append(text)
        size += len(text)
    if chunk:
        yield chunk


def flatten_globals(template: Any) -> None:
    """Let Jinja copy a template's globals from a dictionary for each text.

    It keeps them as a chain of dictionaries: to copy these takes longer than to render most texts.
    """
    with suppress(ImportError):  # it is not part of transformers' interface
        from transformers.utils.chat_template_utils import _compile_jinja_template

        compiled = _compile_jinja_template(template)  # kept by transformers
        compiled.globals = dict(compiled.globals)


@contextmanager
def limit_template() -> Iterator[None]:
    """Raise TimeoutError or MemoryError if the code inside takes too much time or memory.

    Both are limits of the process, and neither applies outside the main thread. On a system that
    does not report the mapped memory only the time is limited.
    """

    # Python's regular expressions and Jinja run in the main thread: SIGALRM ends them.
    def ring(*_: object) -> None:
        raise TimeoutError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # The address space may grow by TEMPLATE_BYTES, unless a lower limit is set.
    usual = resource.getrlimit(resource.RLIMIT_AS)
    if memory := own_memory():
        limit = memory[0] + TEMPLATE_BYTES
        if usual[0] == resource.RLIM_INFINITY or usual[0] > limit:
            with suppress(OSError, ValueError):  # above the hard limit
                resource.setrlimit(resource.RLIMIT_AS, (limit, usual[1]))
    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, usual)


def control_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the texts that this tokenizer turns into control tokens anywhere in a text."""
    tokens = set(tokenizer.all_special_tokens)
    # Also special tokens that were added later.
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    tokens.update(str(token) for token in added.values() if token.special)
    return tuple(sorted(word for word in tokens if word.strip()))


def find_control_words(messages: tuple[Message, ...], tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the control tokens that the contents of messages contain as text."""
    text = "\n".join(str(message["content"]) for message in messages)
    return tuple(word for word in tokens if word in text)


NO_TEMPLATE = "The model's tokenizer has no chat template: prompts are used as plain text."
Truncation = Literal["error", "left", "right"]


@dataclass(frozen=True)
class PromptSet:
    """Prompts; `notes` are sentences that the user should read once."""

    prompts: Sequence[Prompt]
    notes: tuple[str, ...]


def render_prompts(
    sets: Sequence[RowSet],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    truncation: Truncation = "error",
    filter_overlong: bool = False,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
    vocabulary_size: int | None = None,
) -> PromptSet:
    """Render and tokenise rows; DataError with all rows that are refused or too long."""
    renderer = Renderer(
        tokenizer, system_prompt, apply_chat_template, template_arguments or {}, vocabulary_size
    )
    items: list[tuple[str, Rendered]] = []
    problems: list[RowProblem] = []
    for rows, label in zip(sets, unique_labels(sets), strict=True):
        rendered, refused = renderer.render(rows.rows)
        problems.extend(refused)
        items.extend((f"{label}:{item.row.place.number}", item) for item in rendered)
    raise_problems(problems, renderer.check_flags)
    notes = list_notes(sets)
    if hit := [item for _, item in items if item.control_words]:
        notes += describe_control_words(len(hit), hit[0].row.place, hit[0].control_words)
    notes += describe_template([item for _, item in items], renderer)
    long = [item for _, item in items if len(item.token_ids) > max_prompt_length]
    if long:
        lengths = [len(item.token_ids) for item in long]
        notes += limit_lengths(
            long[0].row.place, lengths, len(items), limit=max_prompt_length,
            truncation=truncation, filter_overlong=filter_overlong,
        )  # fmt: skip
    if filter_overlong:
        items = [pair for pair in items if len(pair[1].token_ids) <= max_prompt_length]
    prompts = build_prompts(items, tokenizer, max_prompt_length, truncation)
    return PromptSet(tuple(prompts), tuple(notes))


def describe_control_words(count: int, first: Place, tokens: Sequence[str]) -> list[str]:
    """Return a note on prompts whose text has control tokens."""
    return [
        f"{plural(count, 'prompt')} with text that the model reads as control tokens, first "
        f"{first}: {', '.join(tokens)}."
    ]


def describe_template(items: Sequence[Rendered], renderer: Renderer) -> list[str]:
    """Return notes on a template that is missing, or that leaves the system prompt out."""
    notes, system = [], renderer.system_prompt
    # Some templates drop the system message: compare without white space.
    if system and renderer.uses_template:
        squeezed = "".join(system.split())
        unread = (item for item in items if item.text and item.messages[0]["content"] == system)
        if (item := next(unread, None)) and squeezed not in "".join(item.text.split()):
            notes.append("The chat template leaves --system_prompt out: the model never reads it.")
    if renderer.apply_chat_template and not renderer.uses_template:
        notes.append(NO_TEMPLATE)
    return notes


def unique_labels(sets: Sequence[RowSet]) -> list[str]:
    """Return a short unique name for each source: its stem, and more of its path if necessary."""
    forms: list[list[str]] = []
    for rows in sets:
        path = Path(rows.source)
        forms.append([rows.label, path.name, "/".join(path.parts[-2:]), rows.source])
    # Longer forms for repeated labels, then numbers.
    labels = [form[0] for form in forms]
    for level in range(1, 4):
        labels = [
            form[level] if labels.count(label) > 1 else label
            for form, label in zip(forms, labels, strict=True)
        ]
    seen: dict[str, int] = {}
    for index, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        labels[index] = label if seen[label] == 1 else f"{label}#{seen[label]}"
    return labels


def limit_lengths(
    first: Place, lengths: Sequence[int], total: int, *, limit: int, truncation: Truncation,
    filter_overlong: bool, among: str = "",
) -> list[str]:  # fmt: skip
    """Return a note on the prompts over the limit; DataError if they, or all, are refused.

    `first` is the place of the first one, `lengths` has theirs. `among` says of which rows they
    are, if not of all.
    """
    count, longest = len(lengths), max(lengths)
    if not filter_overlong and truncation == "error":
        raise DataError(
            f"{first}: the prompt has {lengths[0]} tokens, the limit is {limit} "
            f"({plural(count, 'such row')}{among}, the longest has {longest}). Raise "
            "--max_prompt_length, drop them with data.filter_overlong_prompts=true, or cut them "
            "with data.truncation=left (keeps the end) or right (keeps the start)."
        )
    if filter_overlong and count == total:
        raise DataError(
            f"All {total} prompts are longer than {limit} tokens (the longest has {longest}) "
            "and were dropped. Raise --max_prompt_length."
        )
    if filter_overlong:
        return [f"{count} of {total} prompts are longer than {limit} tokens and were dropped."]
    part = "end" if truncation == "left" else "start"
    return [f"{count} of {total} prompts were cut to {limit} tokens; their {part} was kept."]


def build_prompts(
    items: Sequence[tuple[str, Rendered]], tokenizer: Tokenizer, limit: int, truncation: Truncation
) -> list[Prompt]:
    """Build prompts from uids and rendered rows; those over the limit are cut."""
    prompts: list[Prompt] = []
    for uid, item in items:
        text, ids = item.text, item.token_ids
        # The text has to match the ids that the model gets.
        if len(ids) > limit:
            ids = ids[-limit:] if truncation == "left" else ids[:limit]
            text = str(tokenizer.decode(list(ids), skip_special_tokens=False))
        row = prompt_of("", item.row)
        prompts.append(
            replace(
                row, uid=uid, messages=item.messages, rendered=text, token_ids=ids,
                opened=find_open_mark(text),
            )
        )  # fmt: skip
    return prompts


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return a short hash of the prompts in order: uids, token ids, data sources, ground truths.

    `run_identity` digests their extra_info and columns separately.
    """
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        # One JSON line for each prompt, so that no two lists collide.
        truth = json.dumps(prompt.ground_truth, sort_keys=True, default=str)
        parts = [prompt.uid, list(prompt.token_ids), prompt.data_source, truth]
        digest.update(json.dumps(parts).encode("utf-8") + b"\n")
    return digest.hexdigest()


class PromptOrder:
    """Endless batches of prompt indices: seeded, full, resumable at any batch.

    An epoch has `size // batch_size` full batches. Prompts that do not fit start the next epoch: no
    prompt appears twice in an epoch, and none is left out twice in a row. The order is the same on
    every machine: seed and epoch shuffle it, after the prompts that the last epoch held over.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        """Start at the first batch of epoch 0."""
        if batch_size < 1:
            raise DataError(f"The batch size is {batch_size}; it must be at least 1.")
        if size < batch_size:
            raise DataError(
                f"{size} prompts cannot fill a batch of {batch_size}. Lower --batch_size "
                f"(data.train_batch_size) to {size} or less, or give more prompts."
            )
        self.size, self.batch_size = size, batch_size
        self.seed, self.shuffle, self.fingerprint = seed, shuffle, fingerprint
        self._epoch, self._position = 0, 0
        self._held_over: list[int] = []
        self._order = self._draw()

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch."""
        return self.size // self.batch_size

    @property
    def batches_taken(self) -> int:
        """Number of batches taken so far."""
        return self._epoch * self.steps_per_epoch + self._position // self.batch_size

    def take(self) -> list[int]:
        """Return the indices of the next batch, which is always full."""
        # The rest of this epoch is the start of the next one.
        if self._position + self.batch_size > self.size:
            self._held_over = self._order[self._position :]
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._draw()
        start, self._position = self._position, self._position + self.batch_size
        return self._order[start : self._position]

    def peek(self, ahead: int = 1) -> list[int]:
        """Return the batch of the `ahead`-th next call of `take`, without taking it."""
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}; it must be at least 1")
        later = copy.copy(self)  # shallow: `take` replaces its lists and does not change them
        return [later.take() for _ in range(ahead)][-1]

    def _draw(self) -> list[int]:
        """Return the order of this epoch, the held-over prompts first."""
        # Without shuffling the next epoch continues after the last prompt.
        first = self._held_over[0] if self._held_over else 0
        order = [*range(first, self.size), *range(first)]
        if self.shuffle:
            # Sorting raw PCG64 words: numpy promises these, not `permutation`, across releases.
            random_keys = np.random.PCG64([self.seed, self._epoch]).random_raw(self.size)
            order = np.argsort(random_keys, kind="stable").tolist()
        reserved = set(self._held_over)
        return self._held_over + [index for index in order if index not in reserved]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, JSON-serialisable."""
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
            "epoch": self._epoch,
            "position": self._position,
            "held_over": list(self._held_over),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; DataError if the prompts or the seed are different."""
        # Positions are only valid for the same prompts in the same order.
        if state["size"] != self.size or state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"The prompts changed since the checkpoint: it saw {state['size']}, now there are "
                f"{self.size}{', with other contents' * (state['size'] == self.size)}. Resume with "
                "the same data files, model and prompt settings, or start again: --resume never."
            )
        for name, now in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != now:
                raise DataError(
                    f"The checkpoint was made with {name} {state[name]}, this run asks for {now}. "
                    f"Give the same {name}, or start again with --resume never."
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._held_over = [int(index) for index in state["held_over"]]
        self._order = self._draw()
