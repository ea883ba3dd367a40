"""From annotations and scores to a train batch: token rewards, KL penalty, advantages.

Also every statistic of the batch that a user reads; rows whose score failed are in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_cli.algo.advantages import compute_advantages, place_scores
from ppo_cli.algo.batch import AnnotatedBatch, TrainBatch
from ppo_cli.algo.kl import KLController, build_controller, mean_kl, penalise, token_kl
from ppo_cli.algo.mismatch import compute_mismatch, importance_weights
from ppo_cli.algo.tokens import masked_mean, masked_sum
from ppo_cli.config.effective import rollout_is
from ppo_cli.config.schema import Config
from ppo_cli.config.training import Algorithm
from ppo_cli.placing import Placed
from ppo_cli.records import Scored
from ppo_cli.report.metrics import explained_variance


@dataclass(frozen=True, eq=False)
class ShapedStep:
    """A batch ready for updates, the statistics of it, and the next KL coefficient."""

    batch: TrainBatch
    metrics: dict[str, float]
    next_kl_coef: float


def shape_step(
    config: Config,
    annotated: AnnotatedBatch,
    scored: Sequence[Scored],
    kl_coef: float,
    baselines: Sequence[float | None] | None,
    placed: Sequence[Sequence[Placed]] = (),
) -> ShapedStep:
    """Join scores to an annotated batch (same order) and estimate advantages.

    `baselines` has the greedy score of each row's prompt, for remax; a row whose baseline
    failed is left out like one whose score failed. `placed` has each row's rewards within the
    response; what they leave of the score goes to the last token.
    """
    algorithm = config.algorithm
    scores_B, valid_B = _scores(scored, baselines)
    mask_BT = annotated.response_mask_BT & valid_B[:, None]
    inner_BT = _inner(placed, mask_BT)
    rest_B = scores_B - inner_BT.sum(1)
    rewards_BT = inner_BT + place_scores(rest_B, annotated.response_len_B, mask_BT)
    kl_BT, metrics, next_kl_coef = _kl(algorithm, annotated, mask_BT, kl_coef)
    if kl_BT is not None:
        rewards_BT = penalise(rewards_BT, kl_BT, mask_BT, kl_coef)
    advantages_BT, returns_BT = compute_advantages(
        algorithm.adv_estimator,
        token_rewards_BT=rewards_BT,
        values_BT=annotated.values_BT,
        mask_BT=mask_BT,
        group_B=annotated.group_B,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        whiten=algorithm.whiten_advantages,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        baseline_B=_baseline_tensor(baselines),
    )
    batch = TrainBatch(
        **{name: getattr(annotated, name) for name in AnnotatedBatch.__dataclass_fields__},
        scores_B=scores_B,
        valid_B=valid_B,
        token_rewards_BT=rewards_BT,
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
        is_weight_BT=_importance(config, annotated, mask_BT),
    )
    return ShapedStep(batch, metrics | _statistics(batch), next_kl_coef)


def _scores(
    scored: Sequence[Scored], baselines: Sequence[float | None] | None
) -> tuple[Tensor, Tensor]:
    values = [s.score.value for s in scored]
    if baselines is not None:
        values = [None if b is None else v for v, b in zip(values, baselines, strict=True)]
    valid_B = torch.tensor([v is not None for v in values])
    return torch.tensor([0.0 if v is None else float(v) for v in values]), valid_B


def _inner(placed: Sequence[Sequence[Placed]], mask_BT: Tensor) -> Tensor:
    """Rewards within the responses at their tokens; none where a token does not count."""
    inner_BT = torch.zeros(mask_BT.shape)
    for row, places in enumerate(placed):
        for token, value in places:
            inner_BT[row, token] += value
    return torch.where(mask_BT, inner_BT, 0.0)


def _baseline_tensor(baselines: Sequence[float | None] | None) -> Tensor | None:
    if baselines is None:
        return None
    return torch.tensor([0.0 if b is None else float(b) for b in baselines])


def controller(algorithm: Algorithm, kl_coef: float) -> KLController:
    """The controller of the KL coefficient, at its present value."""
    k = algorithm.kl_ctrl
    return build_controller(k.type, kl_coef, k.target_kl, k.horizon)


def _kl(
    algorithm: Algorithm, batch: AnnotatedBatch, mask_BT: Tensor, kl_coef: float
) -> tuple[Tensor | None, dict[str, float], float]:
    """Penalty per token, its metrics, and the coefficient of the next step."""
    if batch.ref_logprobs_BT is None:
        return None, {}, kl_coef
    if not bool(mask_BT.any()):  # no row has a score: there is nothing to measure
        return None, {}, kl_coef
    k3_BT = token_kl(batch.old_logprobs_BT, batch.ref_logprobs_BT, "k3")
    metrics = {"kl_divergence": float(mean_kl(k3_BT, mask_BT))}
    if not algorithm.use_kl_in_reward:
        return None, metrics, kl_coef
    kl_BT = batch.full_kl_BT
    if kl_BT is None:
        kl_BT = token_kl(batch.old_logprobs_BT, batch.ref_logprobs_BT, algorithm.kl_penalty)
    current = float(mean_kl(kl_BT, mask_BT))
    metrics |= {"kl/penalty": current, "kl/coef": kl_coef}
    sequences = int(mask_BT.any(1).sum())
    return kl_BT, metrics, controller(algorithm, kl_coef).update(current, sequences).coef


def _importance(config: Config, batch: AnnotatedBatch, mask_BT: Tensor) -> Tensor:
    correction, level = config.algorithm.rollout_correction, rollout_is(config)
    if level is None:
        return torch.ones_like(batch.old_logprobs_BT)
    return importance_weights(
        batch.old_logprobs_BT,
        batch.sampler_logprobs_BT,
        mask_BT,
        level=level,
        threshold=correction.rollout_is_threshold,
        normalize=correction.rollout_is_batch_normalize,
    )


def _statistics(batch: TrainBatch) -> dict[str, float]:
    mask_BT = batch.loss_mask_BT
    if not bool(mask_BT.any()):
        return {}
    gap = compute_mismatch(batch.old_logprobs_BT, batch.sampler_logprobs_BT, mask_BT)
    count = float(gap.token_count)
    metrics = {
        "entropy": float(masked_mean(batch.entropy_BT, mask_BT)),
        "advantages/mean": float(masked_mean(batch.advantages_BT, mask_BT)),
        "advantages/max": float(batch.advantages_BT[mask_BT].max()),
        "advantages/min": float(batch.advantages_BT[mask_BT].min()),
        "returns/mean": float(masked_mean(batch.returns_BT, mask_BT)),
        "rewards/token_sum_mean": float(
            masked_sum(batch.token_rewards_BT, mask_BT) / mask_BT.any(1).sum()
        ),
        "rollout/logprob_diff": float(gap.abs_diff_sum) / count,
        "rollout/logprob_diff_max": float(gap.abs_diff_max),
        "rollout/mismatch_kl": float(gap.k3_kl_sum) / count,
        "rollout/is_weight_mean": float(masked_mean(batch.is_weight_BT, mask_BT)),
    }
    if batch.values_BT is not None:
        values, returns = batch.values_BT[mask_BT].numpy(), batch.returns_BT[mask_BT].numpy()
        metrics["values/mean"] = float(values.mean())
        metrics["explained_variance"] = explained_variance(returns, values)
    return metrics
