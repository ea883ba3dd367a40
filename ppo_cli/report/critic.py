"""How well a critic predicts returns, by position in the response and by predicted value.

The loop measures each step (algo/critic_fit.py), the tracker writes a line to critic.jsonl, and
`pool_steps` adds up lines for the page and `ppo show`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_cli.run_folder.lines import CRITIC_FILE, read_steps

MIN_RESPONSES = 8  # with fewer, an explained variance is noise: the tokens of one share its score
MIN_VARIANCE = 1e-12  # of returns; below, they differ by rounding


def pool_steps(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return explained variance by position, and mean return by tenth of the values, of some steps.

    `positions` has (tokens such as 3-4, number of tokens, explained variance). Squares are added
    up before they are divided, so a step counts by its tokens and by the variance of its returns.
    A bucket is left out if its returns do not vary, or with fewer than MIN_RESPONSES responses.
    `tenths` has (tokens, mean value, mean return).
    """
    positions = []
    for bucket in range(max(len(line["positions"]) for line in lines)):
        rows = [line["positions"][bucket] for line in lines if bucket < len(line["positions"])]
        responses, tokens, of_returns, of_errors = map(sum, zip(*rows, strict=True))
        if responses >= MIN_RESPONSES and of_returns > MIN_VARIANCE * tokens:
            positions.append((name_bucket(bucket), tokens, 1 - of_errors / of_returns))
    tenths = []
    for tenth in range(max(len(line["tenths"]) for line in lines)):
        rows = [line["tenths"][tenth] for line in lines if tenth < len(line["tenths"])]
        if tokens := sum(row[0] for row in rows):
            means = [sum(row[0] * row[i] for row in rows) / tokens for i in (1, 2)]
            tenths.append((tokens, *means))
    steps = [line["step"] for line in lines]
    name = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return {"name": name, "positions": positions, "tenths": tenths}


def name_bucket(bucket: int) -> str:
    """Return the tokens of a bucket, counted from 1: `1`, `2`, `3-4`, `5-8` …"""
    last = 2**bucket
    return str(last) if bucket < 2 else f"{last // 2 + 1}-{last}"


def describe_critic(run_dir: Path) -> list[dict[str, Any]]:
    """Return the fit of the first and of the last tenth of a run's steps; empty without a critic.

    A run of one step has one.
    """
    lines = [x for x in read_steps(run_dir / CRITIC_FILE) if {"positions", "tenths"} <= x.keys()]
    few = max(1, len(lines) // 10)
    ends = [lines[:few], lines[-few:]] if len(lines) > 1 else [lines]
    return [pool_steps(end) for end in ends if end]
