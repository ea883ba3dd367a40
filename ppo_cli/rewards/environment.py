"""The reward that an environment gave: the sum over the turns of an episode, placed at their ends.

The parts of a turn's reward are added up by name; a training step sees each turn's reward at the
turn's last token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import Future

from ppo_cli.records import Part, PlacedReward, Rollout, Score
from ppo_cli.rewards.base import Reward, resolved


class EnvironmentReward(Reward):
    """Returns the rewards that the turns of an episode have already."""

    name = "environment"

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Add up the rewards of an episode."""
        return resolved(add_rewards(rollout))

    def close(self) -> None:
        """Does nothing: the environments belong to who made them."""


def add_rewards(rollout: Rollout) -> Score:
    """Return the score of an episode: the sum of its turns' rewards, with the parts by name.

    An episode that a limit ended before it had a reward has no score.
    """
    if rollout.lacks_reward:
        return Score.failed(
            f"the limit of {rollout.ended} ended the episode before a reward; the environment's "
            "method finish can give one",
        )
    sums: dict[str, list[float]] = defaultdict(list)
    for turn in rollout.turns:
        for name, value in turn.rewards.items():
            sums[name].append(value)
    totals = {name: math.fsum(values) for name, values in sums.items()}
    steps = tuple(
        PlacedReward(turn.end, math.fsum(turn.rewards.values()), "token")
        for turn in rollout.turns
        if turn.rewards
    )
    return Score(
        math.fsum(totals.values()),
        parts={name: Part(total, None) for name, total in totals.items()},
        steps=steps,
    )
