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

    `clips`: clip_ratio_low and clip_ratio_high; `around_one`: these are a range around a ratio of
    1, not two separate bounds. `dual` and `truncates`: clip_ratio_c, as the bound of losses with a
    negative advantage, or of the ratio. `chooses`: a mask of tokens chosen by covariance over the
    whole mini-batch. `per_sequence`: always averaged over sequences.
    """

    clips: bool = True
    around_one: bool = True
    dual: bool = False
    truncates: bool = False
    chooses: bool = False
    per_sequence: bool = False

    @property
    def bounds(self) -> bool:
        """Whether the loss reads clip_ratio_c."""
        return self.dual or self.truncates


# Values of `actor.policy_loss.loss_mode`; `geo_mean` is GMPO.
POLICY_LOSSES = {
    "vanilla": PolicyLossKind(dual=True),
    "dppo_tv": PolicyLossKind(around_one=False, truncates=True),
    "dppo_kl": PolicyLossKind(around_one=False, truncates=True),
    "gspo": PolicyLossKind(),
    "sapo": PolicyLossKind(clips=False, per_sequence=True),
    "cispo": PolicyLossKind(around_one=False),
    "gpg": PolicyLossKind(clips=False),
    "clip_cov": PolicyLossKind(chooses=True),
    "kl_cov": PolicyLossKind(clips=False, chooses=True),
    "geo_mean": PolicyLossKind(around_one=False, per_sequence=True),
}
