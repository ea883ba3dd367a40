"""Episodes with a split history as training rows: one row for each turn, with its own prompt.

The reward of a turn's row is that of the turn and, discounted, those of the turns after it: the
rows of an episode share nothing else, so an estimator cannot carry a reward from row to row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ppo_cli.records import Rollout, Scored
from ppo_cli.step.shaping import Placed


def split_turns(rollout: Rollout) -> list[Rollout]:
    """Return a rollout for each turn of an episode whose history is split; else the rollout."""
    if not rollout.turns or not rollout.turns[0].context:
        return [rollout]
    return [
        replace(
            rollout,
            prompt=replace(rollout.prompt, token_ids=turn.context),
            token_ids=rollout.token_ids[turn.start : turn.end],
            sampler_logprobs=rollout.sampler_logprobs[turn.start : turn.end],
            entropies=None
            if rollout.entropies is None
            else rollout.entropies[turn.start : turn.end],
            text=turn.text,
            turns=(),
        )
        for turn in rollout.turns
    ]


def split_scores(
    sample: Scored, rows: Sequence[Rollout], placed: Sequence[Placed], gamma_turn: float
) -> list[tuple[Scored, list[Placed]]]:
    """Return each of `rows` (see `split_turns`) with its score, and the rewards placed in that row.

    What a score has besides placed rewards belongs to the last turn. A row's value is
    r_k + gamma_turn r_k+1 + gamma_turn^2 r_k+2 + …
    """
    value = sample.score.value
    if len(rows) == 1 or value is None:
        return [(Scored(row, sample.score), list(placed)) for row in rows]
    inside = [
        [(token - turn.start, x) for token, x in placed if turn.start <= token < turn.end]
        for turn in sample.rollout.turns
    ]
    rewards = [sum(x for _, x in places) for places in inside]
    rewards[-1] += value - sum(rewards)
    # From the last turn to the first.
    to_go, values = 0.0, list[float]()
    for reward in reversed(rewards):
        to_go = reward + gamma_turn * to_go
        values.append(to_go)
    return [
        (Scored(row, replace(sample.score, value=total, steps=())), places)
        for row, total, places in zip(rows, reversed(values), inside, strict=True)
    ]
