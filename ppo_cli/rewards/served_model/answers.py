"""From the body of a reply to one Row a sample: a finite number that was sent, or a failure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.providers.error_words import is_page, read_words
from ppo_cli.rewards.returned import LARGEST
from ppo_cli.rewards.served_model.exchange import Kind, Row, ServerFault

EXCERPT = 200


def read_json(body: str) -> Any:
    """Parse a reply; raises ServerFault with what came instead of JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        what = "a web page" if is_page(body) else "something that is not JSON"
        said = read_words(body)[:EXCERPT]
        words = f"the reply is {what}: {said}" if said else "the reply is empty"
        raise ServerFault(Kind.DOWN, "bad_body", words) from None


def unreadable(words: str) -> ServerFault:
    """Build the fault of a JSON reply that holds no scores."""
    return ServerFault(Kind.UNREADABLE, "bad_body", words)


def as_list(value: Any, count: int, where: str) -> list[Any]:
    """Return a list of exactly `count` items, or raise ServerFault."""
    if not isinstance(value, list):
        raise unreadable(f"{where} should be a list, but is {shown(value)}")
    if len(value) != count:
        raise unreadable(f"{where} has {len(value)} items for {count} samples")
    return value


def in_order(value: Any, count: int, where: str) -> list[dict[str, Any]]:
    """Items of `value` by their `index`, each of 0 … count-1 exactly once."""
    items = as_list(value, count, where)
    placed: dict[int, dict[str, Any]] = {}
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise unreadable(f"{where} has an item without a usable index: {shown(item)}")
        placed[index] = item
    if len(placed) != count:
        raise unreadable(f"{where} has several items of one index")
    return [placed[index] for index in range(count)]


def row_of(value: Any) -> Row:
    """Read one score."""
    number = finite(value)
    if number is None:
        return Row(None, f"no number: the server's score is {shown(value)}")
    return Row(number, outputs=(number,))


def weighed(values: Any, weights: Sequence[float]) -> Row:
    """Read one score off a head with one row, or with several and a weight for each."""
    if not isinstance(values, list) or not values:
        return Row(None, f"no number: the server's outputs are {shown(values)}")
    if len(values) != max(1, len(weights)):
        raise RewardError(_wrong_head(len(values), len(weights)))
    numbers = [finite(value) for value in values]
    if not weights:
        return row_of(values[0])
    if any(number is None for number in numbers):
        return Row(None, f"no number: the server's outputs are {shown(values)}")
    kept = tuple(number for number in numbers if number is not None)
    total = sum(weight * number for weight, number in zip(weights, kept, strict=True))
    return Row(total, outputs=kept) if math.isfinite(total) else row_of(total)


def finite(value: Any) -> float | None:
    """Return a JSON number as a float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST else None


def shown(value: Any) -> str:
    """A short form of a value for a message."""
    text = repr(value)
    return text if len(text) <= EXCERPT else f"{text[: EXCERPT - 1]}…"


def _wrong_head(rows: int, weights: int) -> str:
    if not weights:
        return (
            f"The served reward model has {rows} outputs, and nothing says how they make a score. "
            "Give one weight for each with reward.model.outputs (for good/bad classes: [-1, 1])."
        )
    return (
        f"reward.model.outputs has {weights} weights, but the served reward model gives "
        f"{rows} outputs. Give one weight for each."
    )
