"""String functions of the rules: find an answer in a reply, read it, compare it.

Nothing here evaluates an expression, so no input can make it slow.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

LAST_CHARS = 300
LONGEST_NUMBER = 60

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_SIGNED = rf"(?:(?<![\w)\]}}])[-+])?\$?(?:{_NUMBER})(?:/\d+)?%?"
_ANY_NUMBER = re.compile(rf"(?<![\d.])(?:{_SIGNED})(?!\d)")
_HASHES = re.compile(rf"####[\s*$\\]*([-+]?\s?\$?(?:{_NUMBER})(?:/\d+)?%?)")
_PLAIN_NUMBER = re.compile(rf"([-+]?)({_NUMBER})(?:/(\d+))?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# An escaped brace is a sign, not a bracket.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\.,;]+)")
_CHOICE = re.compile(
    r"(?<![A-Za-z])(?:\(([A-J])\)|\[([A-J])\]|([B-HJ]|[AI](?=[.):]|\s*$)))(?![A-Za-z'])"
)
_LONE_CHOICE = re.compile(r"[(\[]?([A-Ja-j])[)\]]?[.:]?")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}"
)
_VULGAR_FRACTION = re.compile(r"(?<=\d)[¼-¾⅐-⅞]")
_SIGNS = str.maketrans({"⁄": "/", "−": "-", "﹣": "-", "–": "-", "’": "'", "“": '"', "”": '"'})
_DROPPED = re.compile(
    r"\\left|\\right|\\[!,;:]|\\ |~|\$|\\displaystyle|\^\s*\{?\\circ\}?|\\%|%|°|\s+"
)


def clean(text: str) -> str:
    """Return text with full-width characters, typographic minus signs and quotes made plain."""
    spaced = _VULGAR_FRACTION.sub(lambda match: f" {match.group()}", text)
    return unicodedata.normalize("NFKC", spaced).translate(_SIGNS)


def accepted(ground_truth: Any) -> list[str]:
    """Return the accepted answers as text: a list stands for several, None for none."""
    several = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    return [str(one) for one in several if one is not None and str(one).strip()]


def find_boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{…} whose braces balance, or None."""
    starts = {match.end() for match in _BOX.finditer(text)}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.end())
        elif match.group() == "}" and opened:
            start = opened.pop()
            if start in starts and (last is None or start > last[0]):
                last = (start, match.start())
    if last is not None:
        return text[last[0] : last[1]].strip()
    bare = _BARE_BOX.findall(text)
    return str(bare[-1]) if bare else None


def find_after_hashes(text: str) -> str | None:
    """Return the number after the last `####` in the last 300 characters, or None."""
    found = _HASHES.findall(clean(text[-LAST_CHARS:]))
    return str(found[-1]).strip() if found else None


def find_last_number(text: str) -> str | None:
    """Return the last number in the text as it is written, or None."""
    found = None
    for match in _ANY_NUMBER.finditer(clean(text)):
        found = match.group().strip()
    return found


def find_first_number(text: str) -> str | None:
    """Return the first number in the text as it is written, or None."""
    match = _ANY_NUMBER.search(clean(text))
    return match.group().strip() if match else None


def find_choice(text: str) -> str | None:
    """Return the last choice letter A-J that stands alone; bracketed ones come first.

    "A" and "I" inside a sentence are words, not choices.
    """
    found = _CHOICE.findall(clean(text))
    bracketed = [a or b for a, b, _ in found if a or b]
    bare = [letter for _, _, letter in found if letter]
    letters = bracketed or bare
    return letters[-1] if letters else None


def read_choice(text: str) -> str | None:
    """Return the letter when the whole text is one choice such as `B`, `(b)` or `B.`."""
    match = _LONE_CHOICE.fullmatch(unwrap_text(clean(text)).strip(" $"))
    return match.group(1).upper() if match else None


def read_number(text: str) -> Fraction | None:
    """Read a whole text as one number: `1,234.50`, `$5`, `72.`, `50%` (as 50), `1/2`."""
    plain = clean(text).strip().replace("\\$", "").replace("$", "").replace("\\%", "%")
    plain = re.sub(r"^([-+]) ", r"\1", plain.strip()).rstrip(".").rstrip("% ").rstrip(".")
    match = _PLAIN_NUMBER.fullmatch(plain)
    if match is None or len(plain) > LONGEST_NUMBER:
        return None
    sign, size, below = match.groups()
    if below is not None and int(below) == 0:
        return None
    value = Fraction(size.replace(",", "")) / int(below or 1)
    return -value if sign == "-" else value


def unwrap_text(text: str) -> str:
    r"""Return LaTeX with \text{…} and its kin replaced by what they hold."""
    return _TEXT_COMMAND.sub(r"\1", text)


def normalise_maths(text: str) -> str:
    """Return an answer stripped of everything that is only looks, for comparing as text."""
    plain = unwrap_text(clean(text)).strip().rstrip(".")
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _DROPPED.sub("", plain)


def normalise_words(text: str) -> str:
    """Return text in lower case, spaces made single, without an ending full stop."""
    return " ".join(clean(text).casefold().split()).rstrip(".。").rstrip()


def contains_answer(text: str, answer: str) -> bool:
    """Say whether the answer stands in the text, not inside a longer word or number."""
    wanted = normalise_words(answer)
    if not wanted:
        return False
    before = r"(?<![a-z0-9])(?<!\d[.,])" if wanted[0].isascii() and wanted[0].isalnum() else ""
    after = r"(?![a-z0-9])(?![.,]\d)" if wanted[-1].isascii() and wanted[-1].isalnum() else ""
    return re.search(before + re.escape(wanted) + after, normalise_words(text)) is not None


def repetition(text: str, size: int = 4) -> float:
    """Return the share of word n-grams that have been said before, 0 to 1."""
    words: Sequence[str] = normalise_words(text).split()
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
