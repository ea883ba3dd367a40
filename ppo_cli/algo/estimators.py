"""Advantage estimators and policy losses by name, and the inputs that each needs.

Without torch, so that `config/` can import it. A new one is a row here and a function in
advantages.py or losses.py; or a function of a package or file (plugins.py), whose parameters say
which inputs it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_cli.plugins import Declarations, inputs_of

# Inputs by name of an estimator and of a policy loss from a package or file. docs/plugins.md
# describes them.
ESTIMATOR_INPUTS = (
    "token_rewards_BT", "mask_BT", "group_B", "values_BT", "baseline_B", "parts_BK", "weights",
    "gamma", "lam", "critic_lam", "gamma_turn", "whiten", "norm_by_std",
)  # fmt: skip
LOSS_INPUTS = (
    "new_logprobs_BT", "old_logprobs_BT", "advantages_BT", "mask_BT", "clip_low", "clip_high",
    "dual_clip",
)  # fmt: skip


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


def _declare_estimator(name: str) -> Estimator:
    inputs = inputs_of("estimators", name, ESTIMATOR_INPUTS)
    return Estimator(
        "From a package or file.", critic="values_BT" in inputs, grouped="group_B" in inputs,
        baseline="baseline_B" in inputs, parts="parts_BK" in inputs,
    )  # fmt: skip


# Values of `algorithm.adv_estimator`; the names are verl's.
ESTIMATORS = Declarations(_declare_estimator, {
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
})  # fmt: skip


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


def _declare_loss(name: str) -> PolicyLossKind:
    inputs = inputs_of("losses", name, LOSS_INPUTS)
    clips = not {"clip_low", "clip_high"}.isdisjoint(inputs)
    return PolicyLossKind(
        "From a package or file.", clips=clips, around_one=False, dual="dual_clip" in inputs
    )


# Values of `actor.policy_loss.loss_mode`; `geo_mean` is GMPO.
POLICY_LOSSES = Declarations(_declare_loss, {
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
})  # fmt: skip
