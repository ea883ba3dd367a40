"""Whether what a program printed, or a function returned, is what the row expects.

Runs inside the sandbox, on plain data only.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLOSE = 1e-6


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line without spaces at the ends, then word by word with decimals near."""
    left, right = _lines(printed), _lines(expected)
    if left == right:
        return True
    if len(left) != len(right):
        return False
    pairs = zip((line.split() for line in left), (line.split() for line in right), strict=True)
    return all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    one, other = _number(word), _number(expected)
    if one is None or other is None or not ("." in word or "." in expected):
        return False
    return _close(one, other)


def _number(word: str) -> int | float | None:
    if not word or not set(word) <= set("0123456789+-.eE") or len(word) > 400:
        return None
    try:
        number = float(word) if set(word) & set(".eE") else int(word)
    except ValueError:
        return None
    return number if _is_finite(number) else None


def _is_finite(number: float) -> bool:
    # An integer may be too long for math.isfinite.
    return abs(number) <= sys.float_info.max


def _close(value: float, expected: float) -> bool:
    """Compare within a tolerance that what was expected sets.

    A whole number leaves room for rounding errors only, or an estimate would pass for a count.
    What is not finite equals itself.
    """
    if value == expected or (value != value and expected != expected):
        return True
    if type(expected) is int:
        # Beyond, neighbours are the same float.
        return abs(expected) < 2**53 and abs(value - expected) <= CLOSE
    if not (_is_finite(value) and _is_finite(expected)):
        return False
    return abs(value - expected) <= CLOSE * max(1.0, abs(expected))


def same_value(value: Any, expected: Any) -> bool:
    """Compare as JSON would: tuples are lists, decimals may be near; one result may be wrapped."""
    if _same(value, expected):
        return True
    return type(expected) is list and len(expected) == 1 and _same(value, expected[0])


def _same(value: Any, expected: Any) -> bool:
    if type(value) in (list, tuple) and type(expected) in (list, tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_same(a, b) for a, b in pairs)
    if type(value) is dict and type(expected) is dict:
        named = {str(key): item for key, item in value.items()}
        wanted = {str(key): item for key, item in expected.items()}
        # Keys that are different and read the same stay two.
        return (
            len(value) == len(wanted) == len(named)
            and named.keys() == wanted.keys()
            and all(_same(named[k], wanted[k]) for k in named)
        )
    if float in (type(value), type(expected)) and {type(value), type(expected)} <= {int, float}:
        return _close(value, expected)
    return type(value) is type(expected) and bool(value == expected)
