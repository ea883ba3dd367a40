"""The files of a judge's calls: what each took, and, before it is sent, what it takes at most.

`judge_calls.jsonl` has a line for each call when it is over. Beside it, `judge_calls.in_flight`
has one for each that was sent since no other was in flight; those whose id is not in the first
file are still in flight, or were when their process was killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

IN_FLIGHT = "in_flight"
UPPER_BOUND = "upper bound"

Lines = Iterable[dict[str, Any]]


def in_flight_file(calls: Path) -> Path:
    """The file of the calls in flight beside that of the calls."""
    return calls.with_suffix(f".{IN_FLIGHT}")


def all_calls(sent: Lines, over: Lines) -> list[dict[str, Any]]:
    """Return the calls that are over, then those in flight at their worst case.

    The lines of `sent` are to be read first: one that ends meanwhile is in both.
    """
    calls = [line for line in over if "usd" in line]
    ended = {line.get("id") for line in calls}
    return calls + [line for line in sent if "usd" in line and line.get("id") not in ended]
