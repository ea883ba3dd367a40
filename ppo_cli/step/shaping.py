"""Turn scores and annotations into a train batch: penalties, token rewards, KL, advantages.

Also computes the metrics of the batch; rows with a failed score are in none of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ppo_cli.algo.advantages import (
    compute_advantages,
    place_scores,
    subtract_group_means,
    sum_to_go,
)
from ppo_cli.algo.batch import AnnotatedBatch, TrainBatch
from ppo_cli.algo.critic_fit import explained_variance, measure_critic
from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.algo.kl import (
    accepted_tokens,
    adapt_coef,
    compute_mismatch,
    importance_weights,
    mean_kl,
    penalise,
    token_kl,
)
from ppo_cli.algo.pieces import number_pieces, share_among_pieces
from ppo_cli.algo.tokens import masked_mean, masked_sum
from ppo_cli.config.schema.algorithm import Algorithm, RolloutCorrection
from ppo_cli.config.schema.reward import Shaping
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import RewardError
from ppo_cli.estimates import repeated_share
from ppo_cli.moments import Affine, Moments, clip, standardise
from ppo_cli.records import PlacedReward, Rollout, Score, Scored
from ppo_cli.thoughts import Detokenize

Placed = tuple[int, float]  # index of a response token, and its reward


def place_steps(
    rollout: Rollout, steps: Sequence[PlacedReward], decode: Detokenize
) -> list[Placed]:
    """Return the token index, from 0, and the value of each placed reward.

    `decode` is the sampler's detokenizer. A place in characters means the first token after which
    the decoded text contains everything up to there.
    """
    placed: list[Placed] = []
    for step in steps:
        index = step.end - 1 if step.unit == "token" else _token_at(rollout, step.end, decode)
        placed.append((min(max(index, 0), len(rollout.token_ids) - 1), step.value))
    return placed


def _token_at(rollout: Rollout, end: int, decode: Detokenize) -> int:
    """Find the token by bisection: once a prefix of the text is complete, it stays complete.

    Comparing lengths would not do: a part of a character may decode to several characters.
    """
    # The text of an episode is that of its last turn.
    start = rollout.turns[-1].start if rollout.turns else 0
    target, ids = rollout.text[:end], rollout.token_ids[start:]
    context = (*rollout.prompt.token_ids, *rollout.token_ids[:start])
    return start + bisect_left(
        range(len(ids)), True, key=lambda i: decode(ids[: i + 1], context)[:end] == target
    )


@dataclass(frozen=True)
class ShapedScores:
    """Scores for the update (`scored`, `baselines`), for the log, and moments for the next step."""

    scored: tuple[Scored, ...]
    baselines: tuple[Scored, ...] | None
    logged: tuple[Scored, ...]
    metrics: dict[str, float]
    moments: Moments


def shape_scores(
    settings: Shaping,
    longest: int,
    scored: Sequence[Scored],
    baselines: Sequence[Scored] | None,
    moments: Moments,
) -> ShapedScores:
    """Shape the scores of a step; `longest` is max_response_length in tokens.

    Greedy baselines use the same scale but do not change it.
    """
    # Penalties first, then one scale for all samples, then normalisation and clipping.
    penalties = [compute_penalties(settings, sample.rollout, longest) for sample in scored]
    lowered = [_apply_penalties(s, t) for s, t in zip(scored, penalties, strict=True)]
    if settings.normalize == "running":
        moments = moments.merge(_judged_moments(lowered))
    scale = _compute_scale(settings, lowered, moments)
    ready = tuple(_normalise_and_clip(settings, sample, scale) for sample in lowered)
    greedy = None if baselines is None else tuple(
        _normalise_and_clip(settings, _apply_penalties(b, penalty), scale)
        for b in baselines
        for penalty in [compute_penalties(settings, b.rollout, longest)]
    )  # fmt: skip
    if not _is_shaping_enabled(settings):
        return ShapedScores(tuple(scored), greedy, tuple(scored), {}, moments)
    # The log keeps the original score, with the effects next to it.
    logged = tuple(
        _add_shaping_info(sample, t, r.score.value)
        for sample, t, r in zip(scored, penalties, ready, strict=True)
    )
    metrics = _shaping_metrics(settings, penalties, lowered, ready, scale)
    return ShapedScores(ready, greedy, logged, metrics, moments)


def compute_penalties(settings: Shaping, rollout: Rollout, longest: int) -> dict[str, float]:
    """The configured penalties by name, each at most 0."""
    penalties: dict[str, float] = {}
    length = rollout.policy_tokens
    # Length: the penalty grows over the last tokens before the limit.
    if settings.overlong_buffer is not None:
        share = overlong_share(length, longest, settings.overlong_buffer)
        penalties["overlong"] = -settings.overlong_penalty * share
    if settings.missing_eos_penalty is not None:
        cut = rollout.finish_reason == "length"
        penalties["missing_eos"] = -settings.missing_eos_penalty if cut else 0.0
    if settings.repetition_penalty is not None:
        share = repeated_share(rollout.policy_ids, settings.repetition_ngram)
        penalties["repetition"] = -settings.repetition_penalty * share
    # Budgets of thought and answer: no penalty up to the budget, the full one at twice the budget.
    thought = rollout.thought_tokens
    budgets = {
        "thought": (thought, settings.thought_budget),
        "answer": (length - thought, settings.answer_budget),
    }
    for name, (tokens, budget) in budgets.items():
        if budget is not None:
            share = overlong_share(tokens, 2 * budget, budget)
            penalties[f"{name}_budget"] = -settings.budget_penalty * share
    return penalties


def overlong_share(length: int, longest: int, buffer: int) -> float:
    """How far a length is into the last `buffer` tokens before `longest`: 0 to 1.

    Soft overlong punishment (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13), negated.
    """
    return min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


def _is_shaping_enabled(settings: Shaping) -> bool:
    """Return whether any penalty, the normalisation or the clipping is on."""
    penalties = (
        settings.overlong_buffer, settings.missing_eos_penalty, settings.repetition_penalty,
        settings.thought_budget, settings.answer_budget,
    )  # fmt: skip
    return settings.normalize != "off" or any(
        value is not None for value in (*penalties, settings.reward_clip)
    )


def _apply_penalties(sample: Scored, penalties: Mapping[str, float]) -> Scored:
    value = sample.score.value
    if value is None or not penalties:
        return sample
    return Scored(sample.rollout, replace(sample.score, value=value + sum(penalties.values())))


def _judged_moments(scored: Sequence[Scored]) -> Moments:
    # Values that --rm_on_failure batch_mean imputed do not count.
    return Moments.from_values(s.score.value for s in scored if s.score.judged)


def _compute_scale(settings: Shaping, scored: Sequence[Scored], running: Moments) -> Affine:
    if settings.normalize == "off":
        return Affine()
    return standardise(running if settings.normalize == "running" else _judged_moments(scored))


def _normalise_and_clip(settings: Shaping, sample: Scored, scale: Affine) -> Scored:
    """Normalise and clip a score; clipping does not change the rewards at inner tokens."""
    value = sample.score.value
    if value is None:
        return sample
    # Inner rewards are only scaled: the centre is subtracted once, from the whole score.
    value = clip(scale.of(value), settings.reward_clip)
    steps = tuple(PlacedReward(s.end, scale.slope * s.value, s.unit) for s in sample.score.steps)
    return Scored(sample.rollout, replace(sample.score, value=value, steps=steps))


def _add_shaping_info(
    sample: Scored, penalties: Mapping[str, float], final: float | None
) -> Scored:
    """The original score, with penalties and final reward in its info."""
    effects = {**penalties, "reward": final}
    info = {**sample.score.info, "shaping": effects}
    return Scored(sample.rollout, replace(sample.score, info=info))


def _shaping_metrics(
    settings: Shaping,
    penalties: Sequence[Mapping[str, float]],
    lowered: Sequence[Scored],
    ready: Sequence[Scored],
    scale: Affine,
) -> dict[str, float]:
    """Return the `shaping/…` metrics over the rows with a score."""
    # Means over the rows with a score.
    rows = [i for i, s in enumerate(ready) if s.score.value is not None]
    if not rows:
        return {}
    metrics: dict[str, float] = {}
    # Every row has the same penalties, so the first one has the names.
    for name in penalties[0]:
        values = [penalties[i][name] for i in rows]
        metrics[f"shaping/{name}_mean"] = sum(values) / len(rows)
        metrics[f"shaping/{name}_share"] = sum(v < 0 for v in values) / len(rows)
    if settings.normalize != "off":
        metrics["shaping/mean"] = scale.centre
        metrics["shaping/std"] = 1 / scale.slope if scale.slope else 0.0
    if settings.reward_clip is not None:
        # Count clipped rewards before clipping: afterwards they look like any value at the limit.
        scaled = [scale.of(lowered[i].score.number) for i in rows]
        cut = sum(abs(x) > settings.reward_clip for x in scaled)
        metrics["shaping/clipped_share"] = cut / len(rows)
    metrics["shaping/reward_mean"] = sum(ready[i].score.number for i in rows) / len(rows)
    return metrics


@dataclass(frozen=True, eq=False)
class ShapedStep:
    """A batch ready for updates, its metrics, the critic's fit, and the next KL coefficient."""

    batch: TrainBatch
    metrics: dict[str, float]
    critic: dict[str, Any]
    next_kl_coef: float


def shape_step(
    config: Config,
    annotated: AnnotatedBatch,
    scored: Sequence[Scored],
    kl_coef: float,
    baselines: Sequence[float | None] | None,
    placed: Sequence[Sequence[Placed]] = (),
    critic_lam: float | None = None,
) -> ShapedStep:
    """Add scores to an annotated batch (same order) and estimate advantages.

    `baselines` has the greedy score of each row's prompt, for ReMax; a row whose baseline failed
    is masked like one whose score failed. `placed` has each row's rewards within the response,
    whose places are the ends of its pieces; the rest of the score goes to the last token, or in
    equal shares to all pieces if they are compared. For ReMax all of it goes to the last token.
    `critic_lam` is the lambda of the critic's
    targets; None: that of the advantages.
    """
    # Which rows count: those with a score, a baseline and all parts that the estimator needs.
    algorithm = config.algorithm
    estimator = ESTIMATORS[algorithm.adv_estimator]
    scores_B, valid_B = _score_tensors(scored, baselines)
    parts_BK = None
    if estimator.parts:
        parts_BK, found_B = _part_tensors(algorithm.gdpo_reward_keys, scored)
        valid_B = valid_B & found_B
    mask_BT = annotated.response_mask_BT & valid_B[:, None]
    # Rewards of tokens: placed rewards, the rest at the last token, weighted, minus the KL penalty.
    inner_BT = _place_inner_rewards(placed, mask_BT)
    if (
        estimator.baseline
    ):  # the score of a whole response, which no part of one is to be compared with
        inner_BT = torch.zeros_like(inner_BT)
    rest_B = scores_B - inner_BT.sum(1)
    piece_BT = number_pieces(
        [[token for token, _ in row] for row in placed] or [()] * len(mask_BT), mask_BT.shape[1]
    )
    rest_BT = (
        share_among_pieces(rest_B, mask_BT, piece_BT)
        if estimator.pieces
        else place_scores(rest_B, annotated.response_len_B, mask_BT)
    )
    rewards_BT = algorithm.score_coef * (inner_BT + rest_BT)
    kl_BT, metrics, next_kl_coef = _compute_kl(algorithm, annotated, mask_BT, kl_coef)
    relative_BT = rewards_BT
    if kl_BT is not None:
        rewards_BT = penalise(rewards_BT, kl_BT, mask_BT, kl_coef)
    # Only scores are compared with others. A KL in the rewards is added to the advantages, as in
    # OpenRLHF: otherwise grpo would divide it by its own spread where all scores are equal.
    compared = estimator.grouped or estimator.pieces
    if not compared:
        relative_BT = rewards_BT
    if algorithm.subtract_group_mean and annotated.values_BT is not None:
        relative_BT = subtract_group_means(rewards_BT, mask_BT, annotated.group_B)
    advantages_BT, returns_BT = compute_advantages(
        algorithm.adv_estimator,
        token_rewards_BT=relative_BT,
        mask_BT=mask_BT,
        piece_BT=piece_BT,
        values_BT=annotated.values_BT,
        group_B=annotated.group_B,
        baseline_B=None if baselines is None else torch.tensor([float(b or 0) for b in baselines]),
        parts_BK=parts_BK,
        critic_lam=critic_lam,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        lam_alpha=algorithm.lam_alpha,
        gamma_turn=config.environment.gamma_turn,
        gamma_piece=algorithm.gamma_piece,
        lam_piece=algorithm.lam_piece,
        whiten=algorithm.whiten_advantages,
        norm_by_std=algorithm.norm_adv_by_std_in_grpo,
        weights=algorithm.gdpo_reward_weights or None,
    )
    if compared and kl_BT is not None:
        kl_to_go_BT = sum_to_go(kl_coef * kl_BT, mask_BT)
        advantages_BT, returns_BT = advantages_BT - kl_to_go_BT, returns_BT - kl_to_go_BT
    # The batch, with importance weights of the sampler's log-probs and rejected tokens masked.
    batch = TrainBatch(
        **{name: getattr(annotated, name) for name in AnnotatedBatch.__dataclass_fields__},
        scores_B=scores_B,
        valid_B=valid_B,
        token_rewards_BT=rewards_BT,
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
        is_weight_BT=_compute_importance_weights(algorithm.rollout_correction, annotated, mask_BT),
    )
    # Rejected tokens count in rewards and advantages, but not in losses and `_step_metrics`.
    if limits := algorithm.rollout_correction.rejections():
        old_BT, sampler_BT = annotated.old_logprobs_BT, annotated.sampler_logprobs_BT
        kept_BT = accepted_tokens(old_BT, sampler_BT, annotated.response_mask_BT, limits)
        rejected = mask_BT & ~kept_BT
        metrics["rollout/rejected_share"] = float(rejected.sum() / mask_BT.sum().clamp_min(1))
        batch = replace(batch, response_mask_BT=kept_BT)
    # Not of turns or tokens that a function rewards, nor of quotations and faults of rules: those
    # that are gone have none.
    place, faults = config.reward.api.place, config.reward.rule_place
    if any(placed) and (estimator.pieces or place) and place != "criterion" and not faults:
        counts_B = piece_BT.amax(1) + 1
        metrics["pieces/count_mean"] = float(masked_mean(counts_B.double(), valid_B))
    critic = {}
    if batch.values_BT is not None:
        # Positions count the policy's tokens: those of an environment move behind them.
        order_BT = (~annotated.response_mask_BT).long().argsort(dim=1, stable=True)
        columns = (batch.values_BT, batch.returns_BT, batch.loss_mask_BT)
        critic = measure_critic(*(x_BT.gather(1, order_BT).numpy() for x_BT in columns))
    return ShapedStep(batch, metrics | _step_metrics(batch), critic, next_kl_coef)


def _score_tensors(
    scored: Sequence[Scored], baselines: Sequence[float | None] | None
) -> tuple[Tensor, Tensor]:
    """Return the scores (B,), 0 for failed ones, and which rows are valid."""
    values = [s.score.value for s in scored]
    # A row without its baseline has no advantage in ReMax.
    if baselines is not None:
        values = [None if b is None else v for v, b in zip(values, baselines, strict=True)]
    valid_B = torch.tensor([v is not None for v in values])
    return torch.tensor([0.0 if v is None else float(v) for v in values]), valid_B


def _part_tensors(names: Sequence[str], scored: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """Parts of the scores by name (B, K), and which rows have all of them.

    Raises RewardError if no row has one of them.
    """
    raw = [[_part_value(s.score, name) for name in names] for s in scored]
    # A part that no row has is a wrong name, not a failed score.
    for k, name in enumerate(names):
        judged = [i for i, s in enumerate(scored) if s.score.value is not None]
        if judged and all(raw[i][k] is None for i in judged):
            available = sorted({part for i in judged for part in scored[i].score.parts})
            raise RewardError(
                f"algorithm.gdpo_reward_keys names '{name}', but no score has such a part; there "
                f"{'are ' + ', '.join(available) if available else 'are none'}. Let the reward "
                "function return it next to score, as a number, or correct the name."
            )
    found_B = torch.tensor([None not in row for row in raw])
    return torch.tensor([[float(x or 0) for x in row] for row in raw]), found_B


def _part_value(score: Score, name: str) -> float | None:
    """Return the raw value of a named part; None if it is missing."""
    if name in score.parts:
        return score.parts[name].raw
    return score.value if name == "score" else None


def _place_inner_rewards(placed: Sequence[Sequence[Placed]], mask_BT: Tensor) -> Tensor:
    """Rewards within the responses (B, T), at their tokens; 0 at masked tokens."""
    inner_BT = torch.zeros(mask_BT.shape)
    for row, places in enumerate(placed):
        # Several rewards at one token add up.
        for token, value in places:
            inner_BT[row, token] += value
    return torch.where(mask_BT, inner_BT, 0.0)


def _compute_kl(
    algorithm: Algorithm, batch: AnnotatedBatch, mask_BT: Tensor, kl_coef: float
) -> tuple[Tensor | None, dict[str, float], float]:
    """KL penalty per token (None without), its metrics, and the coefficient of the next step."""
    # Without a row with a score there is nothing to measure.
    if batch.ref_logprobs_BT is None or not bool(mask_BT.any()):
        return None, {}, kl_coef
    # The metric is always the k3 estimate, independent of the penalty's own.
    k3_BT = token_kl(batch.old_logprobs_BT, batch.ref_logprobs_BT, "k3")
    metrics = {"kl_divergence": float(mean_kl(k3_BT, mask_BT))}
    if not algorithm.use_kl_in_reward:
        return None, metrics, kl_coef
    kl_BT = batch.full_kl_BT
    if kl_BT is None:
        kl_BT = token_kl(batch.old_logprobs_BT, batch.ref_logprobs_BT, algorithm.kl_penalty)
    # The penalty, and the coefficient moved towards the target KL.
    current = float(mean_kl(kl_BT, mask_BT))
    metrics |= {"kl/penalty": current, "kl/coef": kl_coef}
    ctrl = algorithm.kl_ctrl
    if ctrl.type == "adaptive":
        sequences = int(mask_BT.any(1).sum())
        kl_coef = adapt_coef(
            kl_coef, current, sequences, target=ctrl.target_kl, horizon=ctrl.horizon
        )
    return kl_BT, metrics, kl_coef


def _compute_importance_weights(
    correction: RolloutCorrection, batch: AnnotatedBatch, mask_BT: Tensor
) -> Tensor:
    """Return the importance weights (B, T) for the sampler's mismatch; 1 if off."""
    level = correction.rollout_is
    if level == "off":
        return torch.ones_like(batch.old_logprobs_BT)
    return importance_weights(
        batch.old_logprobs_BT,
        batch.sampler_logprobs_BT,
        mask_BT,
        level=level,
        threshold=correction.rollout_is_threshold,
        lower=correction.rollout_is_threshold_lower,
        normalize=correction.rollout_is_batch_normalize,
    )


def _step_metrics(batch: TrainBatch) -> dict[str, float]:
    """Return metrics of the batch over its unmasked tokens."""
    mask_BT = batch.loss_mask_BT
    if not bool(mask_BT.any()):
        return {}
    metrics = {
        "entropy": float(masked_mean(batch.entropy_BT, mask_BT)),
        "advantages/mean": float(masked_mean(batch.advantages_BT, mask_BT)),
        "advantages/max": float(batch.advantages_BT[mask_BT].max()),
        "advantages/min": float(batch.advantages_BT[mask_BT].min()),
        "returns/mean": float(masked_mean(batch.returns_BT, mask_BT)),
        "rewards/token_sum_mean": float(
            masked_sum(batch.token_rewards_BT, mask_BT) / mask_BT.any(1).sum()
        ),
    }
    # Sampler against trainer: the mismatch that truncated importance sampling corrects.
    if batch.measures_sampler:
        gap = compute_mismatch(batch.old_logprobs_BT, batch.sampler_logprobs_BT, mask_BT)
        count = float(gap.token_count)
        metrics |= {
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
