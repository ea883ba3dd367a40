"""Score a round of rollouts with any reward, as the loop does."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import Reward, RoundKind


def score_all(
    reward: Reward, rollouts: Sequence[Rollout], kind: RoundKind = "train", seconds: float = 300.0
) -> list[Score]:
    futures = [reward.submit(rollout) for rollout in rollouts]
    reward.end_round(kind)
    return [future.result(seconds) for future in futures]
