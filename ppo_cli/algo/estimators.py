"""Advantage estimators and policy losses: the declaration of each, by name; other names of algo/.

A declaration says where the formula is, as an entry point does (MODULE:NAME), and which inputs it
needs, so that `config/` knows these without torch. A new one is a function in advantages.py or
losses.py and its declaration here. Those of packages and files (plugins.py) are declared by the
parameters of their functions. Every formula gets its inputs by the names of its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_cli.plugins import Declarations, inputs_of

# Inputs by name of an estimator and of a policy loss from a package or file. docs/plugins.md
# describes them.
ESTIMATOR_INPUTS = (
    "token_rewards_BT", "mask_BT", "piece_BT", "group_B", "values_BT", "baseline_B", "parts_BK",
    "weights", "gamma", "lam", "lam_alpha", "critic_lam", "gamma_turn", "gamma_piece", "lam_piece",
    "whiten", "norm_by_std",
)  # fmt: skip
LOSS_INPUTS = (
    "new_logprobs_BT", "old_logprobs_BT", "log_ratio_BT", "ratio_BT", "advantages_BT", "mask_BT",
    "clip_low", "clip_high", "dual_clip",
)  # fmt: skip


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: where its formula is, and what it needs besides token rewards.

    `critic`: values; `grouped`: the other responses to the prompt; `baseline`: the score of a
    greedy response to the prompt; `parts`: named parts of the reward, and not the token rewards;
    `pieces`: it compares rewards of pieces of the responses. `scales`: it divides by a deviation,
    unless norm_adv_by_std_in_grpo is false. `discounts`: per token. `summary` is for `ppo explain`.
    """

    formula: str
    summary: str
    critic: bool = False
    grouped: bool = False
    baseline: bool = False
    parts: bool = False
    pieces: bool = False
    scales: bool = False
    discounts: bool = False

    @property
    def compares_rewards(self) -> bool:
        """Whether it subtracts or divides by statistics of other responses' rewards.

        By default the KL is in the loss then, as in the recipes of verl and TRL.
        """
        return not (self.critic or self.baseline)

    @property
    def uses_places(self) -> bool:
        """Whether it matters to it where in a response a reward is."""
        return self.critic or self.pieces or not (self.grouped or self.parts or self.baseline)


def _declare_estimator(name: str) -> Estimator:
    inputs = inputs_of("estimators", name, ESTIMATOR_INPUTS)
    return Estimator(
        name, "From a package or file.", critic="values_BT" in inputs, grouped="group_B" in inputs,
        baseline="baseline_B" in inputs, parts="parts_BK" in inputs, pieces="piece_BT" in inputs,
        discounts="gamma" in inputs,
    )  # fmt: skip


_ADVANTAGES, _PIECES = "ppo_cli.algo.advantages:", "ppo_cli.algo.piece_estimators:"
# Values of `algorithm.adv_estimator`; the names are verl's.
ESTIMATORS = Declarations(_declare_estimator, {
    "gae": Estimator(
        _ADVANTAGES + "gae", "A critic predicts the reward at each token.", critic=True,
        discounts=True),
    "grpo": Estimator(
        _ADVANTAGES + "grpo", "Score minus the prompt's mean, divided by its spread.",
        grouped=True, scales=True),
    "reinforce_plus_plus": Estimator(
        _ADVANTAGES + "reinforce_plus_plus", "Discounted reward, normalized over the batch.",
        discounts=True),
    "reinforce_plus_plus_baseline": Estimator(
        _ADVANTAGES + "reinforce_plus_plus_baseline",
        "Score minus the prompt's mean, normalized over the batch.", grouped=True),
    "rloo": Estimator(
        _ADVANTAGES + "rloo", "Score minus the mean of the prompt's other responses.",
        grouped=True),
    "rloo_vectorized": Estimator(
        _ADVANTAGES + "rloo_vectorized", "rloo, where a lone response gets 0.", grouped=True),
    "remax": Estimator(
        _ADVANTAGES + "remax", "Score minus that of a greedy response to the prompt.",
        baseline=True),
    "opo": Estimator(
        _ADVANTAGES + "opo", "Score minus the prompt's mean, weighted by length.", grouped=True),
    "gpg": Estimator(
        _ADVANTAGES + "gpg", "Score minus the prompt's mean, scaled up for scores of 0.",
        grouped=True),
    "gdpo": Estimator(
        _ADVANTAGES + "gdpo", "grpo for each part of the reward, then a sum.",
        grouped=True, parts=True, scales=True),
    "piece_group": Estimator(
        _PIECES + "piece_group",
        "Scores from a piece on, minus their mean at that piece of the prompt's responses.",
        grouped=True, pieces=True, scales=True),
    "piece_batch": Estimator(
        _PIECES + "piece_batch",
        "Scores from a piece on, minus their mean at that piece of all responses.",
        pieces=True, scales=True),
    "piece_grpo": Estimator(
        _PIECES + "piece_grpo",
        "grpo's advantage plus the piece's reward minus the mean of the prompt's pieces.",
        grouped=True, pieces=True, scales=True),
    "process_grpo": Estimator(
        _PIECES + "process_grpo",
        "Rewards of pieces normalized over the prompt's pieces, summed from a piece on.",
        grouped=True, pieces=True),
})  # fmt: skip


@dataclass(frozen=True)
class PolicyLossKind:
    """A policy loss: where its formula is, and how the settings apply to it.

    `clips`: clip_ratio_low and clip_ratio_high; `around_one`: these are a range around a ratio of
    1, not two separate bounds. `dual` and `truncates`: clip_ratio_c, as the bound of losses with a
    negative advantage, or of the ratio. `chooses`: the place of the function that chooses tokens of
    the whole mini-batch by covariance. `per_sequence`: always averaged over sequences;
    `aggregation`: how it is averaged otherwise, unless actor.loss_agg_mode is set.
    `geometric_weight`: a sequence has the geometric mean of its importance weights.
    `to_sampler`: the ratio is to the sampler, not to the policy before the update. `summary`: for
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
    to_sampler: bool = False
    aggregation: AggregationMode = "token-mean"

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


_LOSSES = "ppo_cli.algo.losses:"
# Values of `actor.policy_loss.loss_mode`; `geo_mean` is GMPO.
POLICY_LOSSES = Declarations(_declare_loss, {
    "vanilla": PolicyLossKind(
        _LOSSES + "vanilla", "PPO's clipped surrogate; with gae, PPO with a critic.", dual=True),
    "dppo_tv": PolicyLossKind(
        _LOSSES + "dppo_tv", "Bounds a total variation.", around_one=False, truncates=True),
    "dppo_kl": PolicyLossKind(
        _LOSSES + "dppo_kl", "Bounds a KL, not the ratio.", around_one=False, truncates=True),
    "gspo": PolicyLossKind(
        _LOSSES + "gspo", "Clips ratios of responses, each of which counts once.",
        aggregation="seq-mean-token-mean"),
    "sapo": PolicyLossKind(
        _LOSSES + "sapo", "A soft gate instead of clipping.", clips=False, per_sequence=True),
    "cispo": PolicyLossKind(
        _LOSSES + "cispo", "Clips the ratio as a weight; all tokens learn.", around_one=False),
    "dis": PolicyLossKind(
        _LOSSES + "dis", "Masks tokens whose ratio to the sampler leaves the range (SAO).",
        to_sampler=True),
    "gpg": PolicyLossKind(
        _LOSSES + "gpg", "The policy gradient, without ratio and clipping.", clips=False),
    "clip_cov": PolicyLossKind(
        _LOSSES + "clip_cov", "Leaves out tokens that cost most entropy.",
        chooses=_LOSSES + "draw_by_covariance"),
    "kl_cov": PolicyLossKind(
        _LOSSES + "kl_cov", "KL on tokens that cost most entropy.", clips=False,
        chooses=_LOSSES + "take_largest_covariance"),
    "geo_mean": PolicyLossKind(
        _LOSSES + "geo_mean", "GMPO: geometric mean.", around_one=False, per_sequence=True,
        geometric_weight=True),
})  # fmt: skip

# verl's names; seq-mean-token-sum-norm is Dr. GRPO's (arXiv 2503.20783).
AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]  # fmt: skip
# Schulman's estimators by two names each; with + the gradient is that of k2.
KlKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
