"""The estimators of advantages by name, and what each needs: no torch, so that settings know them.

A new one is a row here, and its function in advantages.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimator:
    """What an estimator reads beside token rewards and masks.

    `critic`: values; `grouped`: the other responses to the prompt; `baseline`: the score of a
    greedy response to the prompt.
    """

    critic: bool = False
    grouped: bool = False
    baseline: bool = False


ESTIMATORS = {
    "gae": Estimator(critic=True),
    "grpo": Estimator(grouped=True),
    "reinforce_plus_plus": Estimator(),
    "reinforce_plus_plus_baseline": Estimator(grouped=True),
    "rloo": Estimator(grouped=True),
    "rloo_vectorized": Estimator(grouped=True),
    "remax": Estimator(baseline=True),
    "opo": Estimator(grouped=True),
}
