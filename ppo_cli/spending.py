"""The files of a judge's calls: the cost of each, and its upper bound before it is sent.

`judge_calls.jsonl` has a line for each finished call. `judge_calls.in_flight`, next to it, has a
line for each call that was sent since the last time that none was in flight. Calls whose id is not
in the first file are in flight, or were when their process was killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Suffix of the file of calls in flight, and the word for a cost that is only bounded.
IN_FLIGHT = "in_flight"
UPPER_BOUND = "upper bound"

Lines = Iterable[dict[str, Any]]


def in_flight_file(calls: Path) -> Path:
    """Return the file of the calls in flight for a file of finished calls."""
    return calls.with_suffix(f".{IN_FLIGHT}")


def merge_calls(sent: Lines, over: Lines) -> list[dict[str, Any]]:
    """Return the finished calls, then those in flight at their upper bound.

    Read the lines of `sent` first: a call that finishes meanwhile is in both files.
    """
    # Lines without a price are of other kinds.
    calls = [line for line in over if "usd" in line]
    ended = {line.get("id") for line in calls}
    return calls + [line for line in sent if "usd" in line and line.get("id") not in ended]
