"""From annotations and scores to advantages: failed scores touch nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ppo_cli.algo.batch import AnnotatedBatch, Batch, build_batch
from ppo_cli.config.schema.run import Config
from ppo_cli.records import Prompt, Rollout, Score, Scored
from ppo_cli.step.shaping import ShapedStep, shape_step


def rollouts(lengths: list[int], n: int = 1) -> list[Rollout]:
    created = []
    for b, length in enumerate(lengths):
        prompt = Prompt(f"p{b // n}", "", (), "", tuple(range(1, 4)))
        logprobs = np.full(length, -1.0, dtype=np.float32)
        created.append(Rollout(prompt, b % n, tuple(range(length)), logprobs, "", "stop"))
    return created


def annotate(created: list[Rollout], seed: int = 0) -> AnnotatedBatch:
    batch = build_batch(created, 0)
    torch.manual_seed(seed)
    shape = batch.response_mask_BT.shape
    return AnnotatedBatch(
        **{n: getattr(batch, n) for n in Batch.__dataclass_fields__},
        old_logprobs_BT=torch.full(shape, -1.0),
        entropy_BT=torch.rand(shape),
        ref_logprobs_BT=torch.full(shape, -1.5),
        full_kl_BT=None,
        values_BT=torch.randn(shape),
    )


def score_all(created: list[Rollout], values: list[float | None]) -> list[Scored]:
    return [
        Scored(r, Score(v) if v is not None else Score.failed("timeout"))
        for r, v in zip(created, values, strict=True)
    ]


def shape(
    created: list[Rollout], values: list[float | None], kl_coef: float = 0.0, *,
    annotated: AnnotatedBatch | None = None, placed: Any = (), **algorithm: object,
) -> ShapedStep:  # fmt: skip
    """Shape a step of these rollouts and scores with these settings of the algorithm."""
    config = Config.model_validate({"algorithm": algorithm})
    annotated = annotated or annotate(created)
    return shape_step(config, annotated, score_all(created, values), kl_coef, None, placed)


def test_the_score_sits_on_the_last_token_and_the_kl_on_each() -> None:
    step = shape(rollouts([3, 1]), [1.0, 0.5], 0.1)
    expected = torch.tensor([[-0.05, -0.05, 0.95], [0.45, 0.0, 0.0]])
    torch.testing.assert_close(step.batch.token_rewards_BT, expected)
    assert step.metrics["kl/penalty"] == pytest.approx(0.5)
    assert step.metrics["kl_divergence"] == pytest.approx(np.exp(-0.5) - 1 + 0.5)


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus", "opo"])
def test_a_failed_score_enters_no_advantage_and_no_statistic(estimator: str) -> None:
    """The run without the row and the run with the row failed agree on all other rows."""
    created, values = rollouts([3, 2, 4, 1, 2, 3], n=3), [1.0, 0.0, None, 0.0, 0.5, 1.0]
    annotated, keep = annotate(created), torch.tensor([0, 1, 3, 4, 5])
    with_failed = shape(created, values, 0.1, annotated=annotated, adv_estimator=estimator)
    without = shape(
        [created[i] for i in keep], [values[i] for i in keep], 0.1,
        annotated=annotated.rows(keep), adv_estimator=estimator,
    )  # fmt: skip
    torch.testing.assert_close(with_failed.batch.advantages_BT[keep], without.batch.advantages_BT)
    for name in ("advantages_BT", "returns_BT", "loss_mask_BT"):
        assert not getattr(with_failed.batch, name)[2].any(), name
    assert with_failed.metrics == pytest.approx(without.metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("target, error", [(0.1, 0.2), (0.45, 0.5 / 0.45 - 1), (9.0, -0.2)])
def test_adaptive_kl_moves_towards_its_target_by_the_rows_with_a_score(
    target: float, error: float
) -> None:
    created, scores = rollouts([3] * 8), [1.0, None, 1.0, 1.0, None, 1.0, 1.0, 1.0]
    for kind, growth in (("adaptive", 1 + error * 6 / 100), ("fixed", 1.0)):
        control = {"type": kind, "target_kl": target, "horizon": 100, "kl_coef": 7.0}
        step = shape(created, scores, 0.2, kl_ctrl=control)
        assert step.next_kl_coef == pytest.approx(0.2 * growth)
        assert step.metrics["kl/coef"] == 0.2
        plain = shape(created, scores, 0.2, kl_ctrl={"type": kind}, use_kl_in_reward=False)
        assert plain.next_kl_coef == 0.2 and not plain.batch.token_rewards_BT[:, :-1].any()
        assert "kl_divergence" in plain.metrics and "kl/coef" not in plain.metrics


def test_the_penalty_is_of_the_kind_that_is_set() -> None:
    created = rollouts([2])
    for kind, each in (("k2", [0.125] * 2), ("abs", [0.5] * 2), ("full", [0.7, 0.9])):
        annotated = annotate(created)
        if kind == "full":
            annotated = replace(annotated, full_kl_BT=torch.tensor([each]))
        batch = shape(created, [0.0], 0.2, annotated=annotated, kl_penalty=kind).batch
        torch.testing.assert_close(batch.token_rewards_BT, -0.2 * torch.tensor([each]))


def test_gamma_lambda_and_whitening_are_those_of_the_settings() -> None:
    """Two tokens: A2 = r - V2, A1 = gamma V2 - V1 + gamma lam A2."""
    created = rollouts([2])
    v1, v2 = annotate(created).values_BT[0].tolist()
    gae = {"use_kl_in_reward": False, "gamma": 0.5, "lam": 0.25}
    batch = shape(created, [1.0], whiten_advantages=False, **gae).batch
    second = 1.0 - v2
    first = 0.5 * v2 - v1 + 0.125 * second
    torch.testing.assert_close(batch.advantages_BT, torch.tensor([[first, second]]))
    torch.testing.assert_close(batch.returns_BT, torch.tensor([[first + v1, second + v2]]))
    white = shape(created, [1.0], **gae).batch.advantages_BT
    assert white.mean().abs() < 1e-6 and white.std() == pytest.approx(1.0, abs=1e-5)
    grpo = {"use_kl_in_reward": False, "adv_estimator": "grpo"}
    for by_std, limit in ((True, 1 / np.sqrt(2)), (False, 1.0)):
        grouped = rollouts([1, 1], n=2)
        batch = shape(grouped, [3.0, 1.0], norm_adv_by_std_in_grpo=by_std, **grpo).batch
        assert batch.advantages_BT.flatten().tolist() == pytest.approx([limit, -limit], rel=1e-5)


def test_importance_weights_correct_the_sampler() -> None:
    created = rollouts([2])
    annotated = annotate(created)
    annotated.old_logprobs_BT[0] = torch.tensor([-1.0 + np.log(1.5), -1.0 + np.log(9.0)])
    for settings, expected in (
        ({}, [1.0, 1.0]),
        ({"rollout_is": "token"}, [1.5, 2.0]),
        ({"rollout_is": "token", "rollout_is_threshold": 4.5}, [1.5, 4.5]),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, [1.5 / 1.75, 2.0 / 1.75]),
        ({"rollout_is": "sequence", "rollout_is_threshold": 20.0}, [13.5, 13.5]),
    ):
        step = shape(created, [1.0], annotated=annotated, rollout_correction=settings)
        torch.testing.assert_close(step.batch.is_weight_BT, torch.tensor([expected]))
        assert step.metrics["rollout/is_weight_mean"] == pytest.approx(sum(expected) / 2)
        assert step.metrics["rollout/logprob_diff_max"] == pytest.approx(np.log(9.0), rel=1e-5)
    limits = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.3_2.0"}
    step = shape(created, [1.0], annotated=annotated, rollout_correction=limits)
    assert step.batch.loss_mask_BT.tolist() == [[True, False]]  # exp(k1): 0.667 and 0.111
    assert step.metrics["rollout/rejected_share"] == 0.5
    assert step.batch.scores_B.tolist() == [1.0]
    stale = Config.model_validate({"trainer": {"async_steps": 1}})  # by token, unless set
    step = shape_step(stale, annotated, score_all(created, [1.0]), 0.0, None)
    torch.testing.assert_close(step.batch.is_weight_BT, torch.tensor([[1.5, 2.0]]))


def test_statistics_are_of_the_tokens_that_count() -> None:
    """Two rows of two and one tokens by hand; a third whose score failed is in none of them."""
    created = rollouts([2, 1, 2])
    annotated = replace(
        annotate(created),
        entropy_BT=torch.tensor([[0.2, 0.4], [0.9, 5.0], [7.0, 7.0]]),
        values_BT=torch.tensor([[0.1, 0.4], [0.3, 9.0], [8.0, 8.0]]),
    )
    annotated.old_logprobs_BT[0, 1] = -1.5
    annotated.old_logprobs_BT[2] = -4.0
    gae = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False, "use_kl_in_reward": False}
    step = shape(created, [1.0, 0.0, None], annotated=annotated, **gae)
    output = {
        "entropy": 0.5, "advantages/mean": (0.9 + 0.6 - 0.3) / 3, "advantages/max": 0.9,
        "advantages/min": -0.3, "returns/mean": 2 / 3, "rewards/token_sum_mean": 0.5,
        "rollout/logprob_diff": 0.5 / 3, "rollout/logprob_diff_max": 0.5,
        "rollout/mismatch_kl": (np.exp(-0.5) - 1 + 0.5) / 3, "rollout/is_weight_mean": 1.0,
        "values/mean": 0.8 / 3,
        # The returns 1, 1, 0 less the values, and alone: variances of 0.9, 0.6, -0.3 and of them.
        "explained_variance": 1 - np.var([0.9, 0.6, -0.3]) / np.var([1.0, 1.0, 0.0]),
    }  # fmt: skip
    assert {name: step.metrics[name] for name in output} == pytest.approx(output, rel=1e-5)
    agreed = replace(annotated, sampler_logprobs_BT=annotated.old_logprobs_BT)
    fewer = shape(created, [1.0, 0.0, None], annotated=agreed, **gae)
    assert {n for n in step.metrics if n.startswith("rollout/")} == (
        step.metrics.keys() - fewer.metrics.keys()
    )


def test_rewards_within_a_response_add_up_and_a_failed_score_takes_them_along() -> None:
    placed = [[(0, 0.25), (0, 0.5), (2, 1.0)], [(0, 3.0)]]
    step = shape(rollouts([3, 2]), [2.0, None], placed=placed, use_kl_in_reward=False)
    expected = torch.tensor([[0.75, 0.0, 1.25], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(step.batch.token_rewards_BT, expected)


def test_without_any_score_the_kl_coefficient_stays() -> None:
    control = {"type": "adaptive", "target_kl": 0.1, "horizon": 100}
    step = shape(rollouts([3, 2]), [None, None], 0.2, kl_ctrl=control)
    assert step.next_kl_coef == 0.2 and step.metrics == {}
    assert not step.batch.advantages_BT.any()
    assert bool(step.batch.token_rewards_BT.isfinite().all())
