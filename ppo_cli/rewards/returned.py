"""What a reward function is given, and what it may return: a number, a dict, placed rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppo_cli.records import Part, PlacedReward, Score

TOKENS = "token_rewards"
STEPS = "step_rewards"
ENDS = ("offset", "end")
VALUES = ("value", "score", "reward")
LARGEST = 1e30  # beyond this the sums and squares of scores are no numbers any more


@dataclass(frozen=True)
class Call:
    """One response to score."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


def read_placed(form: str, value: Any) -> tuple[PlacedReward, ...]:
    """Read one of the two forms; ValueError says in words what is wrong."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise ValueError(f"{form} is {type(value).__name__}, not a list")
    if form == TOKENS:
        return tuple(
            PlacedReward(place, _number(f"{form}[{place - 1}]", item), "token")
            for place, item in enumerate(items, start=1)
        )
    return tuple(_step(f"{form}[{place}]", item) for place, item in enumerate(items))


def read_bare_list(value: list[Any]) -> tuple[PlacedReward, ...]:
    """Read a list that was returned by itself: of numbers by token, of pairs by step."""
    is_pairs = isinstance(value[0], Mapping | list | tuple)
    return read_placed(STEPS if is_pairs else TOKENS, value)


def _step(where: str, item: Any) -> PlacedReward:
    if isinstance(item, Mapping):
        end, value = _first(item, ENDS), _first(item, VALUES)
    elif isinstance(item, list | tuple) and len(item) == 2:
        end, value = item
    else:
        raise ValueError(f"{where} is neither a pair (offset, value) nor a dict with both")
    place = _number(f"{where} offset", end)
    if place != int(place):
        raise ValueError(f"{where} offset {place:g} is not a whole number of characters")
    return PlacedReward(int(place), _number(where, value))


def _first(item: Mapping[Any, Any], names: Sequence[str]) -> Any:
    return next((item[name] for name in names if name in item), None)


def _number(where: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, str | bytes) or not abs(number) <= LARGEST:
        raise ValueError(f"{where} is {value!r}, not a finite number of a usable size"[:200])
    return number


LONGEST_TEXT = 2000
DEEPEST = 6


class CannotScore(Exception):
    """A rule has no way to score this row; the message becomes the failure."""


def read_returned(value: Any) -> Score:
    """Read a float, int, bool, numpy number, list of placed rewards or dict; never raises.

    A dict has `score`, or `token_rewards` or `step_rewards` (see `placed`), whose sum is the
    score where none is given.
    """
    try:
        if isinstance(value, list) and value:
            return _summed(read_bare_list(value))
        if isinstance(value, Mapping):
            return _read_mapping(value)
    except ValueError as problem:
        return Score.failed(f"returned {problem}")
    return Score(*_finite(value, "returned"))


def _read_mapping(value: Mapping[Any, Any]) -> Score:
    steps = tuple(
        one
        for form in (TOKENS, STEPS)
        if value.get(form) is not None
        for one in read_placed(form, value[form])
    )
    if "score" not in value and not steps:
        keys = ", ".join(repr(k) for k in list(value)[:8]) or "nothing"
        if value.get(TOKENS) is not None or value.get(STEPS) is not None:
            keys += ", which is empty"
        return Score.failed(f"returned a dict without 'score' (it has {keys})")
    parts: dict[str, Part] = {}
    info: dict[str, Any] = {}
    for key, item in value.items():
        if key in ("score", TOKENS, STEPS) or (key == "reason" and isinstance(item, str)):
            continue
        number, problem = _finite(item, "")
        if number is not None or problem.strip() in ("nan", "inf", "-inf"):
            parts[str(key)] = Part(number, None)
        else:
            info[str(key)] = as_plain(item)
    reason = value.get("reason")
    text = reason[:LONGEST_TEXT] if isinstance(reason, str) else ""
    if "score" not in value:
        return _summed(steps, reason=text, parts=parts, info=info)
    score, failure = _finite(value["score"], "returned score")
    return Score(score, failure, text, parts, info, steps if score is not None else ())


def _summed(steps: tuple[PlacedReward, ...], **said: Any) -> Score:
    """The score of placed rewards that come without one: their sum."""
    return Score(math.fsum(step.value for step in steps), steps=steps, **said)


def as_plain(value: Any, depth: int = 0) -> Any:
    """Return a value that JSON can hold; long texts are cut, strange objects become text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if depth < DEEPEST and isinstance(value, Mapping):
        return {str(k): as_plain(v, depth + 1) for k, v in value.items()}
    if depth < DEEPEST and isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(v, depth + 1) for v in value]
    number, _ = _finite(value, "")
    return _safe_repr(value) if number is None else number


def describe_error(error: BaseException) -> str:
    """Return `ValueError: text` for an error, its text cut and on one line."""
    try:
        text = " ".join(str(error).split())[:300]
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _finite(value: Any, verb: str) -> tuple[float | None, str]:
    """Return the number, or None and what is wrong with it."""
    if value is None:
        return None, f"{verb} None; is a `return` missing?"
    if isinstance(value, (str, bytes)):
        return None, f"{verb} text {value[:40]!r}, not a number"
    try:
        number = float(value.item()) if hasattr(value, "item") else float(value)
    except OverflowError:
        return None, f"{verb} a number too large for a float"
    except Exception:
        return None, f"{verb} {type(value).__name__}, not a number"
    if not abs(number) <= LARGEST:
        return None, f"{verb} {number}" + (", too large" if math.isfinite(number) else "")
    return number, ""


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)[:LONGEST_TEXT]
    except Exception:
        return f"<{type(value).__name__}>"
