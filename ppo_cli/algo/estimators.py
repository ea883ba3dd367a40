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
    `summary` is for `ppo explain`.
    """

    summary: str
    critic: bool = False
    grouped: bool = False
    baseline: bool = False
    parts: bool = False


# Values of `algorithm.adv_estimator`; the names are verl's.
ESTIMATORS = {
    "gae": Estimator("A critic predicts the reward at each token.", critic=True),
    "grpo": Estimator("Score minus the prompt's mean, divided by its spread.", grouped=True),
    "reinforce_plus_plus": Estimator("Discounted reward, normalized over the batch."),
    "reinforce_plus_plus_baseline": Estimator(
        "Score minus the prompt's mean, normalized over the batch.", grouped=True
    ),
    "rloo": Estimator("Score minus the mean of the prompt's other responses.", grouped=True),
    "rloo_vectorized": Estimator("rloo, where a lone response gets 0.", grouped=True),
    "remax": Estimator("Score minus that of a greedy response to the prompt.", baseline=True),
    "opo": Estimator("Score minus the prompt's mean, weighted by length.", grouped=True),
    "gpg": Estimator("Score minus the prompt's mean, scaled up for scores of 0.", grouped=True),
    "gdpo": Estimator("grpo for each part of the reward, then a sum.", grouped=True, parts=True),
}


@dataclass(frozen=True)
class PolicyLossKind:
    """The inputs of a policy loss besides log-probs and advantages.

    `clips`: clip_ratio_low and clip_ratio_high; `around_one`: these are a range around a ratio of
    1, not two separate bounds. `dual` and `truncates`: clip_ratio_c, as the bound of losses with a
    negative advantage, or of the ratio. `chooses`: a mask of tokens chosen by covariance over the
    whole mini-batch. `per_sequence`: always averaged over sequences. `summary`: for `ppo explain`.
    """

    summary: str
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
    "vanilla": PolicyLossKind("PPO's clipped surrogate; with gae, PPO with a critic.", dual=True),
    "dppo_tv": PolicyLossKind("Bounds a total variation.", around_one=False, truncates=True),
    "dppo_kl": PolicyLossKind("Bounds a KL, not the ratio.", around_one=False, truncates=True),
    "gspo": PolicyLossKind("Clips ratios of responses; use loss_agg_mode=seq-mean-token-mean."),
    "sapo": PolicyLossKind("A soft gate instead of clipping.", clips=False, per_sequence=True),
    "cispo": PolicyLossKind("Clips the ratio as a weight; all tokens learn.", around_one=False),
    "gpg": PolicyLossKind("The policy gradient, without ratio and clipping.", clips=False),
    "clip_cov": PolicyLossKind("Leaves out tokens that cost most entropy.", chooses=True),
    "kl_cov": PolicyLossKind("KL on tokens that cost most entropy.", clips=False, chooses=True),
    "geo_mean": PolicyLossKind("GMPO: geometric mean.", around_one=False, per_sequence=True),
}
