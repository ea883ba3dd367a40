"""The formats of reward models: how a conversation becomes tokens.

A format is one class, which `heads.py` names together with the network that reads it;
`reward.model.template` replaces it. Only control words of the template become control tokens,
never those in a prompt or a response.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoTokenizer

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import ModelError, RewardError, first_line
from ppo_cli.records import Message
from ppo_cli.rewards.models.base import Encoded, Format, TooLong

SYSTEM_ROLES = ("system", "developer")
SPEAKERS = {"user": "Human", "assistant": "Assistant"}


def select_messages(settings: ModelReward, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages that the settings show: with or without system, all or the last turn."""
    system = tuple(m for m in messages if m["role"] in SYSTEM_ROLES)
    if settings.turns == "last":
        questions = [m for m in messages if m["role"] == "user"] or list(messages)
        return (*(system if settings.system_prompt == "keep" else ()), *questions[-1:])
    if settings.system_prompt == "drop":
        return tuple(m for m in messages if m["role"] not in SYSTEM_ROLES)
    return tuple(messages)


def shorter_conversations(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the conversation without its oldest turn, without its two oldest, …

    System messages stay, and the first other message is always a user's.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] not in SYSTEM_ROLES]
    for first in turns[1:]:
        if messages[first]["role"] == "user":
            yield [m for i, m in enumerate(messages) if i >= first or m["role"] in SYSTEM_ROLES]


def question_of(messages: Sequence[Message]) -> str:
    """Return a conversation as one question, for models that read only question and answer.

    A single message is returned unchanged. Several turns have the speakers' names of HH-RLHF; a
    system message comes first, without a name.
    """
    system = [str(m["content"]) for m in messages if m["role"] in SYSTEM_ROLES]
    turns = [m for m in messages if m["role"] not in SYSTEM_ROLES]
    if len(turns) == 1:
        return "\n\n".join([*system, str(turns[0]["content"])])
    named = [f"{SPEAKERS.get(m['role'], m['role'])}: {m['content']}" for m in turns]
    return "\n\n".join([*system, *named])


# Characters that may mark a broken control word: Unicode's private use area.
MARKS = tuple(map(chr, range(0xE000, 0xE100)))  # Unicode's private use area
# <think>, </think> and their relatives: models write them as part of the answer.
REASONING = re.compile(r"</?\w*think\w*>")
# Texts to find out whether a tokenizer treats the start of a text like any other place.
PROBES = ("hello", " hello", "\nhello", "(a) b", "Was 3 + 4 = 7?\n\n So it\tis. \n")


class ControlToken(Exception):
    """A text that this tokenizer turns into a control token in any case."""


class PlainText:
    """A tokenizer that keeps control words of contents as plain text.

    `template_text` is a rendered template: added tokens in it count as control words even if they
    are not declared special, except reasoning marks, which belong to the text.
    """

    def __init__(self, tokenizer: Any, template_text: str = "") -> None:
        self.tokenizer = tokenizer
        self._ids = _control_words(tokenizer, template_text)
        # The unknown token may appear in any text.
        self._control_ids = frozenset(self._ids.values()) - {tokenizer.unk_token_id}
        # Words whose tokens include the white space before or after them.
        tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._eats_before = frozenset(str(token) for token in tokens if token.lstrip)
        self._eats_after = frozenset(str(token) for token in tokens if token.rstrip)
        longest_first = sorted(self._ids, key=lambda word: (-len(word), word))
        either = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._word = re.compile(either)
        self._anywhere = re.compile(f"(?={either})")
        # A control word to put in front of text that is not at the start of a sample.
        self._anchor = next(
            (w for w in longest_first if w not in self._eats_after and self.count(w) == 1), ""
        )
        self._borders_are_free = all(
            self._tokenise_after_anchor(probe) == self._tokenise(probe) for probe in PROBES
        )

    def break_words(self, texts: Sequence[str]) -> tuple[list[str], str]:
        """Insert a mark into every control word of the texts; returns the texts and the mark.

        The mark is empty if there are no control words.
        """
        if not any(self._word.search(text) for text in texts):
            return list(texts), ""
        # The mark must not occur in the texts, because all its occurrences are removed later.
        written = set().union(*texts)
        mark = next((mark for mark in MARKS if mark not in written), None)
        if mark is None:
            raise ControlToken("the sample contains all of Unicode's private characters")
        return [self._break_text(text, mark) for text in texts], mark

    def encode(self, text: str, mark: str = "") -> tuple[int, ...]:
        """Tokenise a rendered template whose contents were returned by `break_words`."""
        # Usual case: the contents hold no control words, so the whole text is tokenised in one
        # call. The ids are trusted only if they hold exactly the template's control tokens.
        if not mark:
            ids = self._tokenise(text)
            if self._count_controls(ids) == self.count(text):
                return tuple(ids)
        return self.encode_in_pieces(text, mark)

    def encode_untrusted(self, text: str) -> tuple[int, ...]:
        """Tokenise one text without a template, none of whose words are control words."""
        (broken,), mark = self.break_words([text])
        return self.encode(broken, mark)

    def encode_in_pieces(self, text: str, mark: str = "") -> tuple[int, ...]:
        """Tokenise control words and the text between them separately."""
        ids: list[int] = []
        for between, word in self._split_at_words(text):
            if between:
                ids += self._tokenise_without_controls(between, mark, at_start=not ids)
            if word:
                ids.append(self._ids[word])
        return tuple(ids)

    def check(self, text: str) -> None:
        """Raise RewardError if tokenising this harmless text in pieces changes the ids."""
        if self.encode_in_pieces(text) != tuple(self._tokenise(text)):
            raise RewardError(
                "The reward model's tokenizer reads a text in pieces differently from the whole, "
                "so control tokens in responses could not be excluded. Use another "
                "reward.model.tokenizer, a fast one (tokenizer.json) where there is one."
            )

    def count(self, text: str) -> int:
        """Count the control words in a text that become control tokens."""
        return sum(self._ids[word] in self._control_ids for word in self._word.findall(text))

    def _break_text(self, text: str, mark: str) -> str:
        """Insert the mark after the first character of each control word."""
        parts, done = [], 0
        # A lookahead also finds words that overlap; each is broken after its first character.
        for match in self._anywhere.finditer(text):
            parts.append(text[done : match.start() + 1])
            done = match.start() + 1
        return mark.join([*parts, text[done:]])

    def _split_at_words(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield pairs of a text and the control word after it; the last one has no word."""
        # Some added tokens swallow white space around them, so the text between loses it here too.
        done, eaten = 0, False
        for match in self._word.finditer(text):
            word = match.group()
            between = text[done : match.start()]
            between = between.lstrip() if eaten else between
            yield (between.rstrip() if word in self._eats_before else between), word
            done, eaten = match.end(), word in self._eats_after
        yield (text[done:].lstrip() if eaten else text[done:]), ""

    def _tokenise_without_controls(self, text: str, mark: str, *, at_start: bool) -> list[int]:
        """Tokenise text between the template's control words; returns no control tokens.

        `mark` is the character that `break_words` inserted into control words of contents; it does
        not come out. `at_start`: nothing precedes the text.
        """
        # At best in one call without special tokens; otherwise in pieces around each mark.
        if self._borders_are_free:
            unmarked = text.replace(mark, "") if mark else text
            ids = self._tokenise(unmarked, split_special_tokens=True)
            if not self._count_controls(ids):
                return ids
        ids = []
        for piece in text.split(mark) if mark else [text]:
            ids += self._tokenise_piece(piece, at_start=at_start and not ids)
        return ids

    def _tokenise_piece(self, text: str, *, at_start: bool) -> list[int]:
        """Tokenise text without control words; halve it while a control token still appears.

        A tokenizer that normalises (full-width letters, upper case) finds control words that the
        text does not contain literally.
        """
        if not text:
            return []
        alone = at_start or self._borders_are_free
        ids = self._tokenise(text) if alone else self._tokenise_after_anchor(text)
        if not self._count_controls(ids):
            return ids
        if len(text) == 1:
            raise ControlToken(f"{text!r} is a control token of the reward model's tokenizer")
        half = len(text) // 2
        first = self._tokenise_piece(text[:half], at_start=at_start)
        return first + self._tokenise_piece(text[half:], at_start=False)

    def _tokenise_after_anchor(self, text: str) -> list[int]:
        """Tokenise text as after a control word, not as at the start of a text."""
        ids = self._tokenise(self._anchor + text)
        return ids[1:] if self._anchor else ids

    def _count_controls(self, ids: Sequence[int]) -> int:
        return sum(token in self._control_ids for token in ids)

    def _tokenise(self, text: str, **options: Any) -> list[int]:
        encoding = self.tokenizer(text, add_special_tokens=False, verbose=False, **options)
        return [int(token) for token in encoding["input_ids"]]


def _control_words(tokenizer: Any, template_text: str) -> dict[str, int]:
    """Return the control words of a tokenizer (see PlainText) with their ids."""
    control_words = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False))
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        text = str(token)
        marks_turns = text in template_text and not REASONING.fullmatch(text)
        # Special tokens, and tokens that the template uses to separate turns.
        if token.special or marks_turns:
            control_words[text] = int(token_id)
    # Single characters and white space occur in ordinary text.
    return {word: token for word, token in control_words.items() if len(word) > 1 and word.strip()}


class TextFormat(ABC):
    """A format whose sample is one text; `prompts_cut` counts the shortened prompts."""

    def __init__(self, plain: PlainText, settings: ModelReward, max_length: int) -> None:
        self.plain = plain
        self.max_length = max_length
        self.prompts_cut = 0
        self._settings = settings
        self._bos = plain.tokenizer.bos_token_id

    @abstractmethod
    def render(self, messages: Sequence[Message], response: str) -> str:
        """Return the sample as the text that the model was trained on."""

    def encode(self, messages: Sequence[Message], response: str) -> Encoded:
        """Encode one sample; raises TooLong."""
        chosen = select_messages(self._settings, messages)
        ids = self.ids_of(chosen, response)
        if len(ids) > self.max_length:
            ids = self._cut_prompt(chosen, response)
            self.prompts_cut += 1
        return Encoded(ids)

    def ids_of(self, messages: Sequence[Message], response: str) -> tuple[int, ...]:
        """Return the token ids of a sample of any length."""
        # Control words are broken before the template is rendered, and mended when tokenised.
        contents = [str(message["content"]) for message in messages]
        (*broken, answer), mark = self.plain.break_words([*contents, response])
        pairs = zip(messages, broken, strict=True)
        text = self.render([{**m, "content": content} for m, content in pairs], answer)
        return self.finish(self.plain.encode(text, mark))

    def finish(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Keep one BOS if the template and the tokenizer wrote several."""
        while self._bos is not None and ids[:2] == (self._bos, self._bos):
            ids = ids[1:]
        return ids

    def _cut_prompt(self, messages: Sequence[Message], response: str) -> tuple[int, ...]:
        """Return the ids of a sample whose prompt is cut until it fits; raises TooLong."""
        # Drop the oldest turns first; the last question is cut only if that is not enough.
        for fewer in shorter_conversations(messages):
            ids = self.ids_of(fewer, response)
            if len(ids) <= self.max_length:
                return ids
            messages = fewer
        return self._cut_question(messages, response)

    def _cut_question(self, messages: Sequence[Message], response: str) -> tuple[int, ...]:
        """Cut as few characters as possible from the start of the last question."""
        # Binary search of the first start that fits.
        low, high = 0, len(str(messages[-1]["content"])) if messages else 0
        least = len(self._ids_from(messages, response, high))
        if least > self.max_length:
            raise too_long(len(self.plain.encode_untrusted(response)), least, self.max_length)
        while low < high:  # `high` fits
            middle = (low + high) // 2
            if len(self._ids_from(messages, response, middle)) <= self.max_length:
                high = middle
            else:
                low = middle + 1
        return self._ids_from(messages, response, high)

    def _ids_from(self, messages: Sequence[Message], response: str, start: int) -> tuple[int, ...]:
        """Return the ids with the last question cut to its characters from `start` on."""
        if not messages:
            return self.ids_of(messages, response)
        last = messages[-1]
        shorter = {**last, "content": str(last["content"])[start:]}
        return self.ids_of([*messages[:-1], shorter], response)


def too_long(response: int, sample: int, max_tokens: int) -> TooLong:
    """Return the error of a response that is too long; `sample` has its shortest prompt."""
    return TooLong(
        f"response of {response} tokens ({sample} with what must surround it), "
        f"model reads {max_tokens}"
    )


# A sample for the check that a chat template shows both question and answer.
QUESTION, ANSWER = "Is 17 a prime number?", "Yes: nothing but 1 and 17 divides it."


class ChatFormat(TextFormat):
    """Renders the response as an assistant's message of the chat template."""

    def __init__(self, tokenizer: Any, settings: ModelReward, max_length: int) -> None:
        self._path = path = settings.path or ""
        if not tokenizer.chat_template:
            raise RewardError(
                f"The tokenizer of the reward model {path} has no chat template. Set "
                "reward.model.template to the text that it was trained on, with {prompt} and "
                "{response} in it, or reward.model.tokenizer to a tokenizer with a template."
            )
        self.tokenizer = tokenizer
        # A template that drops the question or the response would give meaningless scores.
        sample = self.render([{"role": "user", "content": QUESTION}], ANSWER)
        if QUESTION not in sample or ANSWER not in sample:
            raise RewardError(
                f"The chat template of the reward model {path} leaves out the question or the "
                "response. Set reward.model.template to a text with {prompt} and {response}."
            )
        super().__init__(PlainText(tokenizer, sample), settings, max_length)
        self.plain.check(sample)

    def render(self, messages: Sequence[Message], response: str) -> str:
        """Apply the chat template; RewardError when it refuses the conversation."""
        conversation = [dict(message) for message in messages]
        conversation.append({"role": "assistant", "content": response})
        try:
            return self._apply(conversation)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RewardError(self._refusal(conversation, error)) from error

    def _apply(self, conversation: list[dict[str, Any]]) -> str:
        text = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=False
        )
        return str(text)

    def _refusal(self, conversation: list[dict[str, Any]], error: Exception) -> str:
        """Return the message for a conversation that the chat template refuses.

        Tries the conversation without system messages, to name the setting that helps.
        """
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = (
            f"The chat template of the reward model {self._path} refuses a conversation: {reason}."
        )
        # Try the conversation without its system message, to name the setting that helps.
        rest = [m for m in conversation if m["role"] not in SYSTEM_ROLES]
        if len(rest) == len(conversation):
            roles = ", ".join(m["role"] for m in conversation)
            return (
                f"{message} Its roles are {roles}; reward.model.turns=last shows the last question."
            )
        try:
            self._apply(rest)
        except (TemplateError, TypeError, ValueError, KeyError):
            return f"{message} It also refuses it without the system message."
        return (
            f"{message} It does not support system messages: set reward.model.system_prompt=drop."
        )


# The text that Starling-RM's authors trained on, and the places that a template has.
STARLING = "<s>[INST] {prompt} </s> [/INST] {response}</s>"
PLACE = re.compile(r"\{(prompt|response)\}")


class LiteralFormat(TextFormat):
    """A text with {prompt} and {response}; braces in the contents are not replaced.

    `_before` and `_after` are the tokens that the tokenizer adds around any text.
    """

    def __init__(
        self, tokenizer: Any, template: str, settings: ModelReward, max_length: int
    ) -> None:
        self._template = template
        self._before, self._after = _added_tokens(tokenizer)
        sample = self._fill_template("a", "b")
        super().__init__(PlainText(tokenizer, sample), settings, max_length)
        self.plain.check(sample)

    def render(self, messages: Sequence[Message], response: str) -> str:
        """Return the template with question and response."""
        return self._fill_template(question_of(messages), response)

    def _fill_template(self, prompt: str, response: str) -> str:
        values = {"prompt": prompt, "response": response}
        return PLACE.sub(lambda place: values[place[1]], self._template)


class StarlingFormat(LiteralFormat):
    """The prompt that Starling-RM was trained on, with <s> and </s> as BOS and EOS.

    In training this text was tokenised like any other text, so Llama 2's tokenizer put another
    BOS in front of <s>; both stay.
    """

    def __init__(self, tokenizer: Any, settings: ModelReward, max_length: int) -> None:
        super().__init__(tokenizer, STARLING, settings, max_length)
        ids = self.plain.encode(self._fill_template("a", "b"))
        if ids[0] != tokenizer.bos_token_id or ids.count(tokenizer.eos_token_id) != 2:
            raise RewardError(
                "Starling's prompt begins with <s> and has two </s>, but they are not BOS and EOS "
                "of this tokenizer. Set reward.model.tokenizer to that of Llama 2."
            )

    def finish(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Add the tokens that the tokenizer adds around any text."""
        return self._before + ids + self._after


class TemplateFormat(LiteralFormat):
    """The user's template, with the BOS and EOS that the tokenizer adds around any text.

    Those that the template already contains are not added again.
    """

    def __init__(self, tokenizer: Any, settings: ModelReward, max_length: int) -> None:
        super().__init__(tokenizer, settings.template or "", settings, max_length)

    def finish(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Add the tokenizer's BOS and EOS around the ids."""
        ids = super().finish(ids)
        if ids[: len(self._before)] != self._before:
            ids = self._before + ids
        if self._after and ids[-len(self._after) :] != self._after:
            ids += self._after
        return ids


def _added_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer adds before and after any text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    # Find where the plain text starts in the ids: what surrounds it are the added tokens.
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return tuple(full[:start]), tuple(full[start + len(bare) :])


# Pairs that the found layout must reproduce: plain, with punctuation, with white space at the ends.
SAMPLES = (("a", "b"), ("Is 17 a prime number?", "Yes: nothing divides it. "), (" c\n", "d d"))

Kinds = tuple[int, ...]


@dataclass(frozen=True)
class _Layout:
    """The ids around question and answer, and the type ids of all five sections."""

    before: Kinds
    between: Kinds
    after: Kinds
    types: tuple[Kinds, int, Kinds, int, Kinds] | None

    def join(self, question: Kinds, answer: Kinds) -> Encoded:
        """Return the sample of a question and an answer."""
        ids = self.before + question + self.between + answer + self.after
        if self.types is None:
            return Encoded(ids)
        before, of_question, between, of_answer, after = self.types
        spread = (of_question,) * len(question) + between + (of_answer,) * len(answer)
        return Encoded(ids, before + spread + after)


class PairFormat:
    """As `tokenizer(question, answer)`; a question that is too long is cut from the left."""

    def __init__(self, tokenizer: Any, settings: ModelReward, max_length: int) -> None:
        self.plain = PlainText(tokenizer)
        self.max_length = max_length
        self.prompts_cut = 0
        self._settings = settings
        self._tokenizer = tokenizer
        self._layout = self._find_layout()
        # The layout must reproduce the tokenizer's own pairs.
        for question, answer in SAMPLES:
            expected = self._tokenizer(question, answer)
            sample = self._layout.join(
                self.plain.encode_untrusted(question), self.plain.encode_untrusted(answer)
            )
            if sample.ids != tuple(expected["input_ids"]):
                raise _build_layout_error()

    def encode(self, messages: Sequence[Message], response: str) -> Encoded:
        """Encode one sample; raises TooLong."""
        shown = select_messages(self._settings, messages)
        question = self.plain.encode_untrusted(question_of(shown))
        answer = self.plain.encode_untrusted(response)
        # Only the question is cut; an answer that does not fit by itself is refused here.
        least = len(self._layout.join((), answer).ids)
        if least > self.max_length:
            raise too_long(len(answer), least, self.max_length)
        room = self.max_length - least
        if len(question) > room:
            question = question[len(question) - room :]
            self.prompts_cut += 1
        return self._layout.join(question, answer)

    def _find_layout(self) -> _Layout:
        """Return the ids and type ids that the tokenizer puts around a question and an answer.

        They are found by searching both texts in a sample pair. Raises RewardError if they are not
        there.
        """
        first, second = (self.plain.encode_untrusted(text) for text in SAMPLES[0])
        encoding = self._tokenizer(*SAMPLES[0])
        ids = tuple(encoding["input_ids"])
        question_start = _find_ids(ids, first, 0)
        # Where each text starts and ends in the ids of the pair.
        two = _find_ids(ids, second, question_start + len(first))
        end = two + len(second)
        after = question_start + len(first)
        types = None
        if "token_type_ids" in encoding:
            of = tuple(encoding["token_type_ids"])
            types = of[:question_start], of[question_start], of[after:two], of[two], of[end:]
        return _Layout(ids[:question_start], ids[after:two], ids[end:], types)


def _find_ids(ids: Kinds, part: Kinds, start: int) -> int:
    for place in range(start, len(ids) - len(part) + 1):
        if ids[place : place + len(part)] == part:
            return place
    raise _build_layout_error()


def _build_layout_error() -> RewardError:
    return RewardError(
        "The reward model's tokenizer joins a question and an answer in an unknown way. "
        "Set reward.model.template to a text with {prompt} and {response} instead."
    )


# Builds a format from a tokenizer, the settings, and the most tokens of a sample.
FormatClass = Callable[[Any, ModelReward, int], Format]


def format_for(
    tokenizer: Any, settings: ModelReward, max_length: int, usual: FormatClass = ChatFormat
) -> Format:
    """Return the user's format or the model's own; RewardError if the tokenizer does not fit."""
    limit = min(settings.max_length or max_length, max_length)
    return (usual if settings.template is None else TemplateFormat)(tokenizer, settings, limit)


# Errors of loaders for files that are missing, incomplete, or of another kind.
DAMAGED = (OSError, ValueError, KeyError, ImportError, RuntimeError, EOFError, SafetensorError)


def load_part(loader: Any, source: str | None, what: str, advice: str) -> Any:
    """Load a tokenizer or a config; ModelError with `what` failed and the `advice`."""
    try:
        return loader.from_pretrained(source, trust_remote_code=False)
    except DAMAGED as error:
        raise ModelError(f"{what}: {first_line(error)}. {advice}") from error


def served_format(settings: ModelReward) -> TextFormat:
    """Return the format of a served model: the tokenizer's chat template, or the user's."""
    what = f"The tokenizer {settings.tokenizer} (reward.model.tokenizer) does not load"
    advice = "Give a folder, or a name on the hub."
    tokenizer = load_part(AutoTokenizer, settings.tokenizer, what, advice)
    named = settings.model_copy(update={"path": settings.tokenizer})
    format_class = ChatFormat if settings.template is None else TemplateFormat
    return format_class(tokenizer, named, settings.max_length or NO_LIMIT)


NO_LIMIT = 2**30  # the server has its own
