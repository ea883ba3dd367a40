"""One written value of a verdict: a number, perhaps over the scale's own end, and nothing else."""

from __future__ import annotations

import math
import re
from typing import Any

from ppo_cli.rewards.judge.exchange import Scale

NUMBER = r"-?(?:0|[1-9][0-9]{0,5})(?:\.[0-9]{1,6})?"
# "/10", "out of 10", "points", "分", and the end of the scale once more in brackets.
_OVER = rf"\s*(?:/|\bout\s+of\b)\s*({NUMBER}|ten|five)"
_UNIT = r"\s*(?:points?\b|分|点|점)"
_OF = r"(?:out\s+of|of|max(?:imum)?:?|/|満点|满分|滿分|总分)"
_BRACKET = rf"\s*\(\s*{_OF}\s*({NUMBER})\s*(?:分|点|points?)?\s*\)"
_VALUE = re.compile(
    rf"({NUMBER}|[a-z]+|[零一二三四五六七八九十])(?:{_OVER})?(?:{_UNIT})?(?:{_BRACKET})?"
)
_RANGE = re.compile(
    rf"(?:between\s+)?{NUMBER}\s*(?:[-–—~～]|\bto\b|\bor\b|\band\b|至|到|或)\s*{NUMBER}(?![0-9-])",
    re.I,
)
_ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_WORDS = {word: n for n, word in enumerate(_ENGLISH)} | {
    word: n for n, word in enumerate("零一二三四五六七八九十")
}


class Unreadable(Exception):
    """Why no score can be taken from a reply; `cause` is the word for metrics."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def within(value: float, scale: Scale) -> float:
    """Return a value that lies on the scale; anything else is refused, never clamped."""
    if not math.isfinite(value):
        raise Unreadable("unparsed", f"the score is {value}")
    if not scale.low <= value <= scale.high:
        raise Unreadable("out_of_range", f"the score {value:g} is outside {scale}")
    if 0 < value < 1 and scale.low <= 0 and scale.high >= 10:
        raise Unreadable("ambiguous", f"{value:g} may be a share of {scale} or a score on it")
    return float(value)


def read_json_value(value: Any, scale: Scale) -> float:
    """Read the value of a "score" key: a number, or a string that holds only a score."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Unreadable("unparsed", f'"score" is {type(value).__name__}, not a number')
    if isinstance(value, str):
        number, _, _ = read_written_value(value.strip(), scale)
        return number
    if isinstance(value, int) and abs(value) > 10**12:
        raise Unreadable("out_of_range", f"the score is far outside {scale}")
    return within(float(value), scale)


def read_written_value(text: str, scale: Scale) -> tuple[float, str, bool]:
    """Read a value at the start of `text`: number, what follows, whether the scale was named."""
    if is_range(text):
        raise Unreadable("ambiguous", f"{text[:40]!r} is a range, not a score")
    found = _VALUE.match(text.casefold())
    if not found or not _ends_clean(text[found.end() :]):
        raise Unreadable("unparsed", f"{text[:40]!r} is not a score")
    written, over, bracket = found.groups()
    number = _WORDS.get(written) if not re.match(r"[-0-9]", written) else float(written)
    if number is None:
        raise Unreadable("unparsed", f"{text[:40]!r} is not a score")
    for end in (over, bracket):
        if end is not None and float(_WORDS.get(end, end)) != scale.high:
            raise Unreadable("unparsed", f"{text[:40]!r} is on another scale than {scale}")
    rest = text[found.end() :]
    return within(float(number), scale), rest, bool(over or bracket)


def number_of(word: str) -> int:
    """Return the value of a number word, English or Chinese."""
    return _WORDS[word.casefold()]


def read_number(text: str) -> float | None:
    """Return a number in digits, None when the text is no number after all."""
    try:
        return float(text)
    except ValueError:
        return None


def is_range(text: str) -> bool:
    """Say whether a text starts with two numbers of which either may be meant."""
    return _RANGE.match(text) is not None


def _ends_clean(rest: str) -> bool:
    # What touches the number must not be part of it: 8%, 8½, 8e1, 8,5, 1.2.3, 8/x
    return not re.match(r"[\w%‰^/⁄+*~?°–-]|[.,:][0-9]|\s*[%‰/⁄]", rest)
