"""Estimators of advantages and policy losses by name, and what each needs.

No torch, so that settings know them. A new one is a row here, and its function in advantages.py
or losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimator:
    """What an estimator reads beside token rewards and masks.

    `critic`: values; `grouped`: the other responses to the prompt; `baseline`: the score of a
    greedy response to the prompt; `parts`: named parts of the reward, and not the token rewards.
    """

    critic: bool = False
    grouped: bool = False
    baseline: bool = False
    parts: bool = False


ESTIMATORS = {
    "gae": Estimator(critic=True),
    "grpo": Estimator(grouped=True),
    "reinforce_plus_plus": Estimator(),
    "reinforce_plus_plus_baseline": Estimator(grouped=True),
    "rloo": Estimator(grouped=True),
    "rloo_vectorized": Estimator(grouped=True),
    "remax": Estimator(baseline=True),
    "opo": Estimator(grouped=True),
    "gpg": Estimator(grouped=True),
    "gdpo": Estimator(grouped=True, parts=True),
}


@dataclass(frozen=True)
class PolicyLossKind:
    """What a policy loss reads beside log-probs and advantages.

    `clips`: clip_ratio_low and clip_ratio_high; `dual`: clip_ratio_c; `chooses`: tokens that are
    held back, chosen by covariance over the whole mini-batch.
    """

    clips: bool = True
    dual: bool = False
    chooses: bool = False


POLICY_LOSSES = {
    "vanilla": PolicyLossKind(dual=True),
    "gspo": PolicyLossKind(),
    "cispo": PolicyLossKind(),
    "gpg": PolicyLossKind(clips=False),
    "clip_cov": PolicyLossKind(chooses=True),
    "kl_cov": PolicyLossKind(clips=False, chooses=True),
    "geo_mean": PolicyLossKind(),
}
