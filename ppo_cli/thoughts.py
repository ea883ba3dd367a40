"""Thoughts of reasoning models: the marks of all families, and how to find and remove thoughts.

Used by rules and judges, which only read answers, for judges' replies, by the samplers, for
lengths in tokens, and by the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

# Tokens, and those before them in prompt and response -> the text of the former.
Detokenize = Callable[[Sequence[int], Sequence[int]], str]


class Family(NamedTuple):
    """Regular expressions of a family's opening and closing marks.

    `prompted`: the chat template opens the thought, so a reply only has the closing mark.
    `nests`: each closing mark ends one opening mark, instead of all of them.
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
    # gpt-oss and Gemma 4 decoded without special tokens; nothing marks the end of Gemma's.
    Family(r"(?-i:\Aanalysis(?=[A-Z]))", "(?-i:assistantfinal)"),
    Family(r"(?-i:\Athought\n)", r"(?!)"),
)  # fmt: skip
_EACH = "|".join(f"(?P<o{n}>{f.opening})|(?P<c{n}>{f.closing})" for n, f in enumerate(FAMILIES))
# The lookahead has all first characters of marks: otherwise about fifty branches would be tried at
# each character.
MARKS = re.compile(rf"(?=[<\[◁]|\A|(?-i:assistantfinal))(?:{_EACH})", re.I)
# Every mark contains one of `_SIGNS`, or is one of `_FRONTS` at the start of the text.
_SIGNS, _FRONTS = ("<", "[", "◁", "assistantfinal"), ("analysis", "thought")
_TAG = re.compile(r"<\w")  # other marks are special tokens, which do not occur in a sentence
_QUOTED = re.compile(r"(?:\s|\A)[\"“‘`«「]\Z")
NO_ANSWER = "the thought was not closed: there is no answer"
LONGEST_OPENING = 200  # characters at the end of a prompt, trailing whitespace included


class UnfinishedThought(ValueError):
    """A text that starts with a thought and does not close it."""


class Span(NamedTuple):
    """Start and end of a thought in a text, marks included; `closed`: it has a closing mark."""

    start: int
    end: int
    closed: bool


def find_open_mark(rendered: str) -> str:
    """Return the opening mark at the end of a prompt with its whitespace, or ""."""
    marks = list(MARKS.finditer(rendered, max(0, len(rendered) - LONGEST_OPENING)))
    if not marks or _parse_mark(marks[-1])[1] or rendered[marks[-1].end() :].strip():
        return ""
    return rendered[marks[-1].start() :]


def find_thoughts(text: str, *, cut: bool = False) -> list[Span]:
    """Return the thoughts of a response; an unclosed last one extends to the end.

    All text before a lone closing mark is a thought, opened in the prompt. A mark right after an
    opening quotation mark does not count, and neither does an unclosed tag within a sentence. The
    first closing mark ends a thought, because models that mention `<think>` rarely write its end.
    If the response was `cut`, more marks may follow, so each closing mark only ends the newest
    opening.
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


def strip_reasoning(text: str) -> str:
    """Return the answer without thoughts; "" if there are only thoughts."""
    return remove_thoughts(text, find_thoughts(text))


def remove_thoughts(text: str, spans: Sequence[Span]) -> str:
    """Return a text without these spans, stripped if there was one."""
    if not spans:
        return text
    ends = [0, *(span.end for span in spans)]
    starts = [*(span.start for span in spans), len(text)]
    return "".join(text[a:b] for a, b in zip(ends, starts, strict=True)).strip()


def split_strictly(text: str) -> tuple[str, str] | None:
    """Return (thought, answer) of a response with exactly one closed thought at its start.

    None for any other response, also for one with further marks.
    """
    marks = list(MARKS.finditer(text))
    if len(marks) != 2 or text[: marks[0].start()].strip():
        return None
    opening, closing = marks
    if (_parse_mark(opening)[1], _parse_mark(closing)) != (False, (_parse_mark(opening)[0], True)):
        return None
    return text[opening.end() : closing.start()], text[closing.end() :]


def count_shared(text: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


@lru_cache(maxsize=2**18)
def decode_piece(decode: Detokenize, token_id: int) -> str:
    """Return the text of a token after another one, where no decoder drops its space."""
    return decode([token_id], [token_id])


def count_tokens(
    opened: str, text: str, token_ids: Sequence[int], decode: Detokenize, *, cut: bool
) -> int:
    """Return the number of tokens of a response before its answer; 0 if it has no thought.

    The answer starts at the first character after the last thought. The search runs from the end,
    because answers are short. `opened` is the prompt's opening mark (`find_open_mark`).
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

    # Double the number of last tokens until they contain the answer, then bisect.
    size = 1
    while size < len(token_ids) and not is_enough(size):
        size *= 2
    low, high = (size // 2 if answer_length else 0), min(size, len(token_ids))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return len(token_ids) - low


def strip_leading_thought(text: str) -> str:
    """Return a judge's reply without the complete thought at its start.

    A closing mark alone on a line (of a family whose template opens thoughts), or any at the very
    start, ends a thought that was opened in the prompt. A mark right after an opening quotation
    mark does not count. Further marks are left to the caller. Raises UnfinishedThought.
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
    # This check is twenty times as fast as the pattern.
    if not text.startswith(_FRONTS) and not any(sign in text for sign in _SIGNS):
        return iter(())
    return (mark for mark in MARKS.finditer(text) if not _is_quoted(text, mark))


def _is_quoted(text: str, mark: re.Match[str]) -> bool:
    start = mark.start()
    return _QUOTED.search(text[max(0, start - 2) : start]) is not None


def _parse_mark(match: re.Match[str]) -> tuple[int, bool]:
    """Return the index of a mark's family, and whether the mark closes a thought."""
    name = str(match.lastgroup)
    return int(name[1:]), name[0] == "c"
