"""The placed rewards of a response as rows of text, in the page's colours on a terminal."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ppo_cli.cli.screen import ABOVE, BELOW, BOLD, PLAIN

MAX_PASSAGES = 60


def list_passages(line: Mapping[str, Any]) -> list[str]:
    """Return a row for each passage of a response with reward, advantage and text.

    A passage ends at a reward, or where the advantage changes. [] where the tokens were not kept,
    are damaged, or are not those of the text, which may hide a secret; and with less than two
    rewards or places.
    """
    details, text = line.get("token_details") or {}, line.get("response")
    text = details.get("text", text)
    try:
        lengths = [int(length) for length in str(details.get("lengths", "")).split()]
        rewards = decode_numbers(details.get("reward", 0.0), len(lengths))
        advantages = decode_numbers(details.get("advantage", 0.0), len(lengths))
    except (struct.error, TypeError, ValueError):  # a damaged file
        return []
    if not lengths or not isinstance(text, str) or sum(lengths) != len(text):
        return []
    # A piece that earns nothing is a piece.
    if len(line.get("places") or ()) < 2 and sum(reward != 0 for reward in rewards) < 2:
        return []
    ends = [
        k + 1
        for k in range(len(lengths))
        if k + 1 == len(lengths) or rewards[k] != 0 or advantages[k] != advantages[k + 1]
    ]
    if len(ends) > MAX_PASSAGES:  # advantages of single tokens
        ends = [end for end in ends if rewards[end - 1] != 0]
    rows = list(_format_rows(text, [0, *accumulate(lengths)], ends, rewards, advantages))
    excess = len(rows) - MAX_PASSAGES
    return rows[:MAX_PASSAGES] + [f"… and {excess} more, on the page"] * (excess > 0)


def decode_numbers(field: Any, count: int) -> Sequence[float]:
    """Return the numbers of tokens: base64 of float16, or one number that all share."""
    if not isinstance(field, str):
        return [float(field)] * count
    return struct.unpack(f"<{count}e", base64.b64decode(field))


def _format_rows(
    text: str,
    offsets: Sequence[int],
    ends: Sequence[int],
    rewards: Sequence[float],
    advantages: Sequence[float],
) -> Iterator[str]:
    largest = [max(abs(x) for x in numbers) or 1.0 for numbers in (rewards, advantages)]
    for start, end in zip([0, *ends], ends, strict=False):
        reward, advantage = sum(rewards[start:end]), advantages[end - 1]
        passage = " ".join(text[offsets[start] : offsets[end]].split())
        yield (
            f"{_colour(f'{reward:+.2f}', reward / largest[0])}  "
            f"{_colour(f'{advantage:+.2f}', advantage / largest[1])}  "
            f"{_colour(passage, advantage / largest[1])}"
        )


def _colour(text: str, share: float) -> str:
    """Mark a text as the page colours a number, which is `share` of the largest one."""
    if not share:
        return text
    return f"{BELOW if share < 0 else ABOVE}{BOLD * (abs(share) >= 0.5)}{text}{PLAIN}"
