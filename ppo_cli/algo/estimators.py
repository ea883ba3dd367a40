"""Advantage estimators and policy losses by name, and the inputs that each needs.

Without torch, so that `config/` can import it. A new one is a row here and a function in
advantages.py or losses.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimator:
    """The inputs of an estimator besides token rewards and masks.

    `critic`: values; `grouped`: the other responses to the prompt; `baseline`: the score of a
    greedy response to the prompt; `parts`: named parts of the reward, and not the token rewards.
    """

    critic: bool = False
    grouped: bool = False
    baseline: bool = False
    parts: bool = False


# Values of `algorithm.adv_estimator`; the names are verl's.
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
    """The inputs of a policy loss besides log-probs and advantages.

    `clips`: clip_ratio_low and clip_ratio_high; `dual`: clip_ratio_c; `chooses`: a mask of tokens
    chosen by covariance over the whole mini-batch.
    """

    clips: bool = True
    dual: bool = False
    chooses: bool = False


# Values of `actor.policy_loss.loss_mode`; `geo_mean` is GMPO.
POLICY_LOSSES = {
    "vanilla": PolicyLossKind(dual=True),
    "gspo": PolicyLossKind(),
    "cispo": PolicyLossKind(),
    "gpg": PolicyLossKind(clips=False),
    "clip_cov": PolicyLossKind(chooses=True),
    "kl_cov": PolicyLossKind(clips=False, chooses=True),
    "geo_mean": PolicyLossKind(),
}
