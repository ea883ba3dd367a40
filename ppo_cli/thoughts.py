"""Thoughts of models that reason before they answer: their marks, and what is left without them.

One table for all who meet them: rules and judges, which read answers alone, the reading of a
judge's reply, the sampler's text, lengths in tokens, and the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# Tokens, and those before them in prompt and response -> the text of the former.
Detokenize = Callable[[Sequence[int], Sequence[int]], str]


class Family(NamedTuple):
    """Regular expressions of the marks that open and close a thought.

    `prompted`: chat templates open it themselves, so that a reply has the closing mark alone.
    `nests`: each closing mark ends one opening, rather than all of them.
    """

    opening: str
    closing: str
    prompted: bool = False
    nests: bool = True


def _tag(name: str, *, prompted: bool = False) -> Family:
    return Family(f"<{name}>", f"</{name}>", prompted)


FAMILIES = (
    # Qwen3 to 3.6, DeepSeek-R1 to V3.2, GLM-4.5 to 5, Kimi K2 Thinking, MiniMax-M2, Nemotron,
    # SmolLM3, Granite 3.3, Hunyuan, EXAONE 4
    _tag("think", prompted=True),
    _tag("thought", prompted=True),  # EXAONE Deep
    *map(_tag, ("thinking", "thoughts", "reasoning")),
    _tag("seed:think", prompted=True),  # Seed-OSS
    _tag("longcat_think", prompted=True),  # LongCat
    Family(r"\[THINK\]", r"\[/THINK\]"),  # Magistral
    Family("◁think▷", "◁/think▷"),  # Kimi-VL
    Family(r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>", prompted=True),  # Kimi K3
    Family(r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # Sky-T1, OpenThinker
    Family(r"<\|START_THINKING\|>", r"<\|END_THINKING\|>", prompted=True),  # Cohere
    Family(r"<\|channel>thought\b", r"<channel\|>"),  # Gemma 4
    Family(r"<unused94>thought\b", "<unused95>"),  # MedGemma
    Family(  # gpt-oss
        r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)[^<\n]{0,80}"
        r"(?:<\|constrain\|>\w{1,20})?<\|message\|>",
        r"(?:<\|start\|>assistant)?<\|channel\|>final\s?(?:<\|constrain\|>\w{1,20})?<\|message\|>",
        nests=False,
    ),
    # gpt-oss and Gemma 4 decoded without their special tokens; of Gemma's nothing marks the end.
    Family(r"(?-i:\Aanalysis(?=[A-Z]))", "(?-i:assistantfinal)"),
    Family(r"(?-i:\Athought\n)", r"(?!)"),
)  # fmt: skip
_EACH = "|".join(f"(?P<o{n}>{f.opening})|(?P<c{n}>{f.closing})" for n, f in enumerate(FAMILIES))
# How every mark begins: without it, some fifty branches would be tried at each character.
MARKS = re.compile(rf"(?=[<\[◁]|\A|(?-i:assistantfinal))(?:{_EACH})", re.I)
# Each mark has one of the first, or one of the others at the front of the text.
_SIGNS, _FRONTS = ("<", "[", "◁", "assistantfinal"), ("analysis", "thought")
_TAG = re.compile(r"<\w")  # other marks are special tokens, which nobody writes in a sentence
_QUOTED = re.compile(r"(?:\s|\A)[\"“‘`«「]\Z")
NO_ANSWER = "the thought was not closed: there is no answer"
LONGEST_OPENING = 200  # characters at the end of a prompt, with the blanks behind it


class UnfinishedThought(ValueError):
    """A text that opens a thought first thing and does not close it."""


class Span(NamedTuple):
    """A thought's place in a text, marks included, in characters; `closed`: by its mark."""

    start: int
    end: int
    closed: bool


def find_open_mark(rendered: str) -> str:
    """The mark, with the blanks behind it, that a prompt ends with; empty where none is open."""
    marks = list(MARKS.finditer(rendered, max(0, len(rendered) - LONGEST_OPENING)))
    if not marks or _parse_mark(marks[-1])[1] or rendered[marks[-1].end() :].strip():
        return ""
    return rendered[marks[-1].start() :]


def find_thoughts(text: str, *, cut: bool = False) -> list[Span]:
    """The thoughts of a response; only the last may be open, then it goes on to the end.

    Before a lone closing mark all is thought: its opening stood in the prompt. A mark right after
    an opening quotation mark is none. An opening within a sentence, never closed, is a mention.
    Within a thought the first closing mark ends it, for a model that writes of `<think>` seldom
    writes its end; where the response was `cut` there may be more to come, and each closing mark
    ends only the newest of the openings.
    """
    spans: list[Span] = []
    start, family, depth, before = -1, -1, 0, 0
    for mark in _marks(text):
        this, closing = _parse_mark(mark)
        if start < 0 and closing:
            spans = [Span(0, mark.end(), True)]
        elif start < 0:
            start, family, depth = mark.start(), this, 1
        elif this == family and not closing:
            depth += cut and FAMILIES[this].nests and bool(text[before : mark.start()].strip())
        elif this == family:
            depth -= 1
            if not depth:
                spans.append(Span(start, mark.end(), True))
                start = -1
        before = mark.end()
    if start >= 0:
        line = text[text.rfind("\n", 0, start) + 1 : start]
        if spans or not line.strip() or not _TAG.match(text, start):
            spans.append(Span(start, len(text), False))
    return spans


def strip_reasoning(text: str, *, cut: bool = False) -> str:
    """Return the answer alone, without thoughts; empty where a thought is all there is."""
    return remove_thoughts(text, find_thoughts(text, cut=cut))


def remove_thoughts(text: str, spans: Sequence[Span]) -> str:
    """A text without its thoughts, and without blanks at its ends where there was one."""
    if not spans:
        return text
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), len(text)]
    return "".join(text[a:b] for a, b in zip(ends, starts, strict=True)).strip()


def split_strictly(text: str) -> tuple[str, str] | None:
    """Thought and answer of a response that is one closed thought at its front and an answer.

    None for any other, also for one that has a mark more.
    """
    marks = list(MARKS.finditer(text))
    if len(marks) != 2 or text[: marks[0].start()].strip():
        return None
    opening, closing = marks
    if (_parse_mark(opening)[1], _parse_mark(closing)) != (False, (_parse_mark(opening)[0], True)):
        return None
    return text[opening.end() : closing.start()], text[closing.end() :]


def count_tokens(
    opened: str, text: str, token_ids: Sequence[int], decode: Detokenize, *, cut: bool
) -> int:
    """Tokens of a response up to its answer; 0 where it has no thought.

    The rest, from the first sign behind the last thought on, is the answer's. It is looked for
    from the end, as answers are short. `opened` is what the prompt ends with, see `find_open_mark`.
    """
    spans = find_thoughts(opened + text, cut=cut)
    if not spans:
        return 0
    if not spans[-1].closed:
        return len(token_ids)
    answer_length = len((opened + text)[spans[-1].end :].strip())

    def is_enough(size: int) -> bool:
        start = len(token_ids) - size
        return len(decode(token_ids[start:], token_ids[:start]).strip()) >= answer_length

    size = 1
    while size < len(token_ids) and not is_enough(size):
        size *= 2
    low, high = (size // 2 if answer_length else 0), min(size, len(token_ids))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return len(token_ids) - low


def strip_leading_thought(text: str) -> str:
    """Return a judge's reply without the one complete thought at its front.

    A lone closing mark on a line of its own, of a family that templates open, or any at the very
    front, ends a thought that was opened in the prompt; a mark right after an opening quotation
    mark ends none. Further marks are left for the caller to refuse. Raises UnfinishedThought.
    """
    text = text.strip()
    marks = MARKS.finditer(text)
    first = next(marks, None)
    if first is None:
        return text
    family, closes = _parse_mark(first)
    if closes:
        alone = re.search(r"(?:^|\n)[ \t]*$", text[: first.start()]) and re.match(
            r"[ \t]*(?:\n|$)", text[first.end() :]
        )
        ends = not text[: first.start()].strip() or (FAMILIES[family].prompted and alone)
        return text[first.end() :].strip() if ends else text
    if first.start():
        return text
    for mark in marks:
        if _parse_mark(mark) == (family, True) and not _is_quoted(text, mark):
            return text[mark.end() :].strip()
    raise UnfinishedThought("the judge was still thinking when its reply ended")


def _marks(text: str) -> Iterator[re.Match[str]]:
    # Twenty times as fast as the pattern.
    if not text.startswith(_FRONTS) and not any(sign in text for sign in _SIGNS):
        return iter(())
    return (mark for mark in MARKS.finditer(text) if not _is_quoted(text, mark))


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    start = mark.start()
    return _QUOTED.search(text[max(0, start - 2) : start]) is not None


def _parse_mark(match: re.Match[str]) -> tuple[int, bool]:
    """The number of a mark's family, and whether it closes."""
    name = str(match.lastgroup)
    return int(name[1:]), name[0] == "c"
