"""How models mark what they think before they answer: one list, for judges and for policies.

A judge's reply may begin with one complete thought; a policy's response may hold several. The
marks are those of the models' chat templates.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Family(NamedTuple):
    """Regular expressions of the marks that open and close a thought."""

    opening: str
    closing: str


_NAMES = (
    *("think", "thinking", "thought", "thoughts", "reasoning"),
    *("seed:think", "longcat_think"),  # Seed-OSS, LongCat
)
THINK = 0  # its opening often stands in the prompt, so that only the closing is in the reply
FAMILIES = (
    *(Family(f"<{name}>", f"</{name}>") for name in _NAMES),
    Family(r"\[THINK\]", r"\[/THINK\]"),  # Magistral
    Family("◁think▷", "◁/think▷"),  # Kimi
    Family(r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),  # Kimi K3
    Family(r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # Sky-T1, OpenThinker
    Family(r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Cohere
    Family(r"<\|channel>thought\b", r"<channel\|>"),  # Gemma 4
    Family(r"<unused94>thought\b", "<unused95>"),  # MedGemma
    Family(  # gpt-oss
        r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary)[^<\n]{0,80}<\|message\|>",
        r"<\|channel\|>final\s?(?:<\|constrain\|>\w{1,20})?<\|message\|>",
    ),
    # gpt-oss and Gemma 4 decoded without their special tokens; of Gemma's nothing marks the end.
    Family(r"(?-i:\Aanalysis(?=[A-Z]))", "(?-i:assistantfinal)"),
    Family(r"(?-i:\Athought\n)", r"(?!)"),
)
MARKS = re.compile(
    "|".join(f"(?P<o{n}>{f.opening})|(?P<c{n}>{f.closing})" for n, f in enumerate(FAMILIES)), re.I
)


class UnfinishedThought(ValueError):
    """A text that opens a thought first thing and does not close it."""


def after_thought(text: str) -> str:
    """Return a reply without the one complete thought at its front; raises UnfinishedThought.

    A lone `</think>` on a line of its own, or any closing mark at the very front, ends a thought
    that was opened in the prompt; a mark right after an opening quotation mark ends none. Further
    marks are left for the caller to refuse.
    """
    text = text.strip()
    marks = MARKS.finditer(text)
    first = next(marks, None)
    if first is None:
        return text
    family, closes = _mark(first)
    if closes:
        alone = re.search(r"(?:^|\n)[ \t]*$", text[: first.start()]) and re.match(
            r"[ \t]*(?:\n|$)", text[first.end() :]
        )
        ends = not text[: first.start()].strip() or (family == THINK and alone)
        return text[first.end() :].strip() if ends else text
    if first.start():
        return text
    for mark in marks:
        quoted = re.search(r"\s[\"“‘`«「]\Z", text[max(0, mark.start() - 2) : mark.start()])
        if _mark(mark) == (family, True) and not quoted:
            return text[mark.end() :].strip()
    raise UnfinishedThought("the judge was still thinking when its reply ended")


def strip_reasoning(text: str) -> str:
    """Return what follows from reasoning blocks: the answer alone.

    Closed blocks go. After a lone closing mark (its opening stood in the prompt) only what
    follows counts; a text that opens a block first thing and never closes it is no answer.
    """
    kept: list[str] = []
    start, opened, family = 0, -1, -1
    for mark in MARKS.finditer(text):
        this, closing = _mark(mark)
        if opened < 0 and closing:
            kept, start = [], mark.end()
        elif opened < 0:
            kept.append(text[start : mark.start()])
            opened, family = mark.start(), this
        elif closing and this == family:
            opened, start = -1, mark.end()
    if opened < 0:
        kept.append(text[start:])
    elif "".join(kept).strip():
        kept.append(text[opened:])
    return "".join(kept).strip() if opened >= 0 or start else text


def _mark(found: re.Match[str]) -> tuple[int, bool]:
    """The number of a mark's family, and whether it closes."""
    name = str(found.lastgroup)
    return int(name[1:]), name[0] == "c"
