"""Advantage estimators and policy losses: the declaration of each, by name.

A declaration says where the formula is, as an entry point does (MODULE:NAME), and which inputs it
needs, so that `config/` knows these without torch. A new one is a function in advantages.py or
losses.py and its declaration here. Those of packages and files (plugins.py) are declared by the
parameters of their functions. Every formula gets its inputs by the names of its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_cli.plugins import Declarations, inputs_of

# Inputs by name of an estimator and of a policy loss from a package or file. docs/plugins.md
# describes them.
ESTIMATOR_INPUTS = (
    "token_rewards_BT", "mask_BT", "group_B", "values_BT", "baseline_B", "parts_BK", "weights",
    "gamma", "lam", "lam_alpha", "critic_lam", "gamma_turn", "whiten", "norm_by_std",
)  # fmt: skip
LOSS_INPUTS = (
    "new_logprobs_BT", "old_logprobs_BT", "log_ratio_BT", "ratio_BT", "advantages_BT", "mask_BT",
    "clip_low", "clip_high", "dual_clip",
)  # fmt: skip


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: where its formula is, and what it needs besides token rewards.

    `critic`: values; `grouped`: the other responses to the prompt; `baseline`: the score of a
    greedy response to the prompt; `parts`: named parts of the reward, and not the token rewards.
    `summary` is for `ppo explain`.
    """

    formula: str
    summary: str
    critic: bool = False
    grouped: bool = False
    baseline: bool = False
    parts: bool = False


def _declare_estimator(name: str) -> Estimator:
    inputs = inputs_of("estimators", name, ESTIMATOR_INPUTS)
    return Estimator(
        name, "From a package or file.", critic="values_BT" in inputs, grouped="group_B" in inputs,
        baseline="baseline_B" in inputs, parts="parts_BK" in inputs,
    )  # fmt: skip


# Values of `algorithm.adv_estimator`; the names are verl's.
ESTIMATORS = Declarations(_declare_estimator, {
    "gae": Estimator(
        "ppo_cli.algo.advantages:gae", "A critic predicts the reward at each token.", critic=True
    ),
    "grpo": Estimator(
        "ppo_cli.algo.advantages:grpo", "Score minus the prompt's mean, divided by its spread.",
        grouped=True,
    ),
    "reinforce_plus_plus": Estimator(
        "ppo_cli.algo.advantages:reinforce_plus_plus",
        "Discounted reward, normalized over the batch.",
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "ppo_cli.algo.advantages:reinforce_plus_plus_baseline",
        "Score minus the prompt's mean, normalized over the batch.", grouped=True,
    ),
    "rloo": Estimator(
        "ppo_cli.algo.advantages:rloo", "Score minus the mean of the prompt's other responses.",
        grouped=True,
    ),
    "rloo_vectorized": Estimator(
        "ppo_cli.algo.advantages:rloo_vectorized", "rloo, where a lone response gets 0.",
        grouped=True,
    ),
    "remax": Estimator(
        "ppo_cli.algo.advantages:remax", "Score minus that of a greedy response to the prompt.",
        baseline=True,
    ),
    "opo": Estimator(
        "ppo_cli.algo.advantages:opo", "Score minus the prompt's mean, weighted by length.",
        grouped=True,
    ),
    "gpg": Estimator(
        "ppo_cli.algo.advantages:gpg", "Score minus the prompt's mean, scaled up for scores of 0.",
        grouped=True,
    ),
    "gdpo": Estimator(
        "ppo_cli.algo.advantages:gdpo", "grpo for each part of the reward, then a sum.",
        grouped=True, parts=True,
    ),
})  # fmt: skip


@dataclass(frozen=True)
class PolicyLossKind:
    """A policy loss: where its formula is, and how the settings apply to it.

    `clips`: clip_ratio_low and clip_ratio_high; `around_one`: these are a range around a ratio of
    1, not two separate bounds. `dual` and `truncates`: clip_ratio_c, as the bound of losses with a
    negative advantage, or of the ratio. `chooses`: the place of the function that chooses tokens of
    the whole mini-batch by covariance. `per_sequence`: always averaged over sequences;
    `geometric_weight`: a sequence has the geometric mean of its importance weights. `summary`: for
    `ppo explain`.
    """

    formula: str
    summary: str
    clips: bool = True
    around_one: bool = True
    dual: bool = False
    truncates: bool = False
    chooses: str = ""
    per_sequence: bool = False
    geometric_weight: bool = False

    @property
    def bounds(self) -> bool:
        """Whether the loss reads clip_ratio_c."""
        return self.dual or self.truncates


def _declare_loss(name: str) -> PolicyLossKind:
    inputs = inputs_of("losses", name, LOSS_INPUTS)
    clips = not {"clip_low", "clip_high"}.isdisjoint(inputs)
    return PolicyLossKind(
        name, "From a package or file.", clips=clips, around_one=False, dual="dual_clip" in inputs
    )


# Values of `actor.policy_loss.loss_mode`; `geo_mean` is GMPO.
POLICY_LOSSES = Declarations(_declare_loss, {
    "vanilla": PolicyLossKind(
        "ppo_cli.algo.losses:vanilla", "PPO's clipped surrogate; with gae, PPO with a critic.",
        dual=True,
    ),
    "dppo_tv": PolicyLossKind(
        "ppo_cli.algo.losses:dppo_tv", "Bounds a total variation.", around_one=False,
        truncates=True,
    ),
    "dppo_kl": PolicyLossKind(
        "ppo_cli.algo.losses:dppo_kl", "Bounds a KL, not the ratio.", around_one=False,
        truncates=True,
    ),
    "gspo": PolicyLossKind(
        "ppo_cli.algo.losses:gspo",
        "Clips ratios of responses; use loss_agg_mode=seq-mean-token-mean.",
    ),
    "sapo": PolicyLossKind(
        "ppo_cli.algo.losses:sapo", "A soft gate instead of clipping.", clips=False,
        per_sequence=True,
    ),
    "cispo": PolicyLossKind(
        "ppo_cli.algo.losses:cispo", "Clips the ratio as a weight; all tokens learn.",
        around_one=False,
    ),
    "gpg": PolicyLossKind(
        "ppo_cli.algo.losses:gpg", "The policy gradient, without ratio and clipping.", clips=False
    ),
    "clip_cov": PolicyLossKind(
        "ppo_cli.algo.losses:clip_cov", "Leaves out tokens that cost most entropy.",
        chooses="ppo_cli.algo.losses:draw_by_covariance",
    ),
    "kl_cov": PolicyLossKind(
        "ppo_cli.algo.losses:kl_cov", "KL on tokens that cost most entropy.", clips=False,
        chooses="ppo_cli.algo.losses:take_largest_covariance",
    ),
    "geo_mean": PolicyLossKind(
        "ppo_cli.algo.losses:geo_mean", "GMPO: geometric mean.", around_one=False,
        per_sequence=True, geometric_weight=True,
    ),
})  # fmt: skip
