"""Pairs out of scored responses: what `ppo reward score` writes, and the rollouts of a run.

Of the responses to one prompt each is paired with every one that scored lower.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from ppo_cli.data_sets.files import Record, Records, name_type
from ppo_cli.data_sets.messages import as_plain, read_plain, read_prompt
from ppo_cli.data_sets.problems import Place, RowError, RowProblem
from ppo_cli.records import Message

RESPONSE, SCORE = "response", "score"
Better = tuple[Place, tuple[Message, ...], str, str]
Group = list[tuple[float, Place, str]]


def is_scored(names: Sequence[str]) -> bool:
    """Tell whether the columns of a file are those of scored responses."""
    return {RESPONSE, SCORE} <= set(names)


def rank(raw: Records, prompt: str) -> tuple[list[Better], list[RowProblem], str]:
    """Return (place, messages, better, worse) of a file, its bad rows, and what was found."""
    groups: dict[str, tuple[tuple[Message, ...], Group]] = {}
    problems = list(raw.problems)
    unscored = 0
    for place, record in raw.records:
        try:
            messages, response, score = read_scored(record, prompt)
        except RowError as error:
            problems.append(RowProblem(place, error.column, str(error)))
            continue
        if score is None:
            unscored += 1
            continue
        key = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)
        groups.setdefault(key, (messages, []))[1].append((score, place, response))
    found = [pair for messages, group in groups.values() for pair in rank_group(messages, group)]
    told = f"{raw.source}: {len(found)} pairs out of scored responses to {len(groups)} prompts"
    lost = f", {unscored} without a score left out" if unscored else ""
    return found, problems, f"{told}{lost}."


def rank_group(messages: tuple[Message, ...], group: Group) -> list[Better]:
    """Pair the responses to one prompt; the same text counts once, equal scores make no pair."""
    once = {response: (score, place) for score, place, response in reversed(group)}
    ordered = sorted(once.items(), key=lambda item: -item[1][0])
    return [
        (place, messages, better, worse)
        for (better, (high, place)), (worse, (low, _)) in combinations(ordered, 2)
        if high > low
    ]


def read_scored(record: Record, prompt: str) -> tuple[tuple[Message, ...], str, float | None]:
    """Return the prompt, the response and the score of a row; None for a score that failed."""
    given = read_prompt(record.get(prompt), prompt)
    messages = ({"role": "user", "content": given},) if isinstance(given, str) else given
    response = read_plain(record.get(RESPONSE), RESPONSE)
    if not isinstance(response, str):
        raise RowError(RESPONSE, f"is {name_type(response)}, not text")
    return messages, response, read_score(as_plain(record.get(SCORE)))


def read_score(value: Any) -> float | None:
    """Return a score; null is one that failed."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(SCORE, f"is {value!r}, not a number")
    return float(value)
