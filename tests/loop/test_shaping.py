"""From annotations and scores to advantages: penalties, scales, rewards on tokens, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest
import torch

from ppo_cli.algo.batch import AnnotatedBatch, build_batch
from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.schema.reward import Shaping
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.errors import RewardError
from ppo_cli.estimates import repeated_share
from ppo_cli.moments import Moments
from ppo_cli.records import Part, PlacedReward, Prompt, Rollout, Score, Scored, Turn
from ppo_cli.step.shaping import (
    ShapedStep,
    overlong_share,
    place_steps,
    shape_scores,
    shape_step,
)
from ppo_cli.thoughts import Detokenize
from tests.loop.scripted import annotate_batch, scored
from tests.settings import complete


def rollouts(lengths: list[int], n: int = 1) -> list[Rollout]:
    created = []
    for b, length in enumerate(lengths):
        prompt = Prompt(f"p{b // n}", "", (), "", tuple(range(1, 4)))
        logprobs = np.full(length, -1.0, dtype=np.float32)
        created.append(Rollout(prompt, b % n, tuple(range(length)), logprobs, "", "stop"))
    return created


def annotate(created: list[Rollout]) -> AnnotatedBatch:
    batch = annotate_batch(build_batch(created, 0), ref=-1.5)
    generator = torch.Generator().manual_seed(0)
    shape = batch.response_mask_BT.shape
    entropy_BT, values_BT = (draw(shape, generator=generator) for draw in (torch.rand, torch.randn))
    return replace(batch, entropy_BT=entropy_BT, values_BT=values_BT)


def score_all(created: list[Rollout], values: list[float | None]) -> list[Scored]:
    return [
        Scored(r, Score(v) if v is not None else Score.failed("timeout"))
        for r, v in zip(created, values, strict=True)
    ]


def shape(
    created: list[Rollout], values: list[float | None], kl_coef: float = 0.0, *,
    annotated: AnnotatedBatch | None = None, placed: Any = (), critic_lam: float | None = None,
    **algorithm: object,
) -> ShapedStep:  # fmt: skip
    """Shape a step of these rollouts and scores with these settings of the algorithm."""
    config = complete({"algorithm": algorithm})
    annotated = annotated or annotate(created)
    scores = score_all(created, values)
    return shape_step(config, annotated, scores, kl_coef, None, placed, critic_lam)


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


GROUPED = [name for name, declared in ESTIMATORS.items() if declared.grouped]


@pytest.mark.parametrize("estimator", [*GROUPED, "piece_batch"])
def test_groups_compare_scores_and_the_kl_is_added_unscaled(estimator: str) -> None:
    """At token t the advantage of the scores, minus kl_coef times the KL of t and later tokens."""
    lengths, values = [3, 1, 2, 4], [1.0, 0.0, 0.5, 0.5]
    annotated = annotate(created := rollouts(lengths, n=2))
    gap_BT = torch.rand(4, 4, generator=torch.Generator().manual_seed(1))
    annotated = replace(annotated, ref_logprobs_BT=annotated.old_logprobs_BT - gap_BT)
    made: dict[str, Any] = {"annotated": annotated, "adv_estimator": estimator}
    made |= {"gdpo_reward_keys": ["score"]} if estimator == "gdpo" else {}
    plain, both = (
        shape(created, values, 0.3, use_kl_in_reward=kl, **made).batch for kl in (False, True)
    )
    later_BT = torch.zeros(4, 4)
    for b, length in enumerate(lengths):
        for t in range(length):
            later_BT[b, t] = gap_BT[b, t:length].sum()
    for name in ("advantages_BT", "returns_BT"):
        expected = getattr(plain, name) - 0.3 * later_BT
        torch.testing.assert_close(getattr(both, name), expected, atol=1e-5, rtol=1e-5)
    rewards_BT = plain.token_rewards_BT - 0.3 * gap_BT * plain.loss_mask_BT
    torch.testing.assert_close(both.token_rewards_BT, rewards_BT)


@pytest.mark.parametrize(
    ("values", "estimators"),
    [
        ([0.7] * 4, [*GROUPED, "reinforce_plus_plus"]),
        # The same numbers, added in another order or kept in 32 bits.
        ([0.3, 0.1 + 0.2, 0.5, 0.5 + 1e-7], [name for name in GROUPED if name != "gpg"]),
        ([1000.0, 1000.0001, 1000.0, 1000.0], [*GROUPED, "reinforce_plus_plus"]),
    ],
)
def test_scores_that_differ_only_by_rounding_teach_nothing(
    values: list[float | None], estimators: list[str]
) -> None:
    """By default the KL, which differs between the responses, is in the loss."""
    for estimator in estimators:
        keys = {"gdpo_reward_keys": ["score"]} if estimator == "gdpo" else {}
        step = shape(rollouts([3, 1, 2, 4], n=2), values, 0.3, adv_estimator=estimator, **keys)
        assert step.metrics["advantages/max"] < 1e-3, estimator
        assert step.metrics["advantages/min"] > -1e-3, estimator


@pytest.mark.parametrize("target, error", [(0.1, 0.2), (0.45, 0.5 / 0.45 - 1), (9.0, -0.2)])
def test_adaptive_kl_moves_towards_its_target_by_the_rows_with_a_score(
    target: float, error: float
) -> None:
    created = rollouts([3, 2, 1, 3, 3, 2, 1, 3])
    scores = [1.0, None, 1.0, 1.0, None, 1.0, 1.0, 1.0]
    for kind, growth in (("adaptive", 1 + error * 6 / 100), ("fixed", 1.0)):
        control = {"type": kind, "target_kl": target, "horizon": 100, "kl_coef": 7.0}
        step = shape(created, scores, 0.2, kl_ctrl=control)
        assert step.next_kl_coef == pytest.approx(0.2 * growth)
        # This step still has the coefficient that it began with.
        assert float(step.batch.token_rewards_BT[0, 0]) == pytest.approx(-0.2 * 0.5, rel=1e-4)
        assert step.metrics["kl/coef"] == 0.2
        plain = shape(created, scores, 0.2, kl_ctrl={"type": kind}, use_kl_in_reward=False)
        assert plain.next_kl_coef == 0.2 and plain.batch.token_rewards_BT.sum() == 6
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


def test_actor_and_critic_have_the_lambdas_of_their_settings() -> None:
    """Two tokens: A1 = V2 - V1 + lam A2. The length 2 gives lam = 1 - 1 / (0.8 * 2) = 0.375."""
    created = rollouts([2])
    v1, v2 = annotate(created).values_BT[0].tolist()
    plain = {"use_kl_in_reward": False, "gamma": 1.0, "lam": 0.25, "whiten_advantages": False}
    for settings, actor, critic in (
        ({}, 0.25, 0.25),
        ({"critic_lam": 1.0}, 0.25, 1.0),
        ({"lam_alpha": 0.8}, 0.375, 0.25),
        ({"lam_alpha": 0.8, "critic_lam": 0.5}, 0.375, 0.5),
    ):
        batch = shape(created, [1.0], **plain, **settings).batch
        first = v2 - v1 + actor * (1.0 - v2)
        target = v2 + critic * (1.0 - v2)
        torch.testing.assert_close(batch.advantages_BT, torch.tensor([[first, 1.0 - v2]]))
        torch.testing.assert_close(batch.returns_BT, torch.tensor([[target, 1.0]]))


def test_group_means_and_the_weight_of_the_score_change_the_rewards() -> None:
    created = rollouts([1, 2, 1], n=3)
    rewards = {"use_kl_in_reward": False, "lam": 1.0, "whiten_advantages": False}
    rewards |= {"subtract_group_mean": True, "score_coef": 2.0}
    batch = shape(created, [1.0, 0.0, 0.5], **rewards).batch
    assert batch.returns_BT[:, 0].tolist() == pytest.approx([1.0, -1.0, 0.0], abs=1e-6)
    # The log-ratio to the reference is the whole reward: 0.5 nats a token, weight 1.
    taught = shape(created, [1.0, 0.0, 0.5], 1.0, score_coef=0.0).batch
    expected = torch.tensor([[-0.5, 0.0], [-0.5, -0.5], [-0.5, 0.0]])
    torch.testing.assert_close(taught.token_rewards_BT, expected)
    assert taught.scores_B.tolist() == [1.0, 0.0, 0.5]


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
    for range_, kept in (("0.3_1.2", [True, False]), ("0.7_1.2", [False, False])):
        limits = {"rollout_rs": "token_k1", "rollout_rs_threshold": range_}
        step = shape(created, [1.0], annotated=annotated, rollout_correction=limits)
        assert step.batch.loss_mask_BT.tolist() == [kept]  # exp(k1): 0.667 and 0.111
        assert step.metrics["rollout/rejected_share"] == 1 - sum(kept) / 2
    assert step.batch.scores_B.tolist() == [1.0]
    single = annotate(rollouts([1]))
    single.old_logprobs_BT[:] = 8.0
    for score, share in ((1.0, 1.0), (None, 0.0)):
        step = shape(rollouts([1]), [score], annotated=single, rollout_correction=limits)
        assert step.metrics["rollout/rejected_share"] == share
    stale = complete({"trainer": {"async_steps": 1}})  # by token, unless set
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
    settings: Any = {"use_kl_in_reward": False, "score_coef": 2.0}
    step = shape(rollouts([3, 2]), [2.0, None], placed=placed, **settings)
    expected = torch.tensor([[1.5, 0.0, 2.5], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(step.batch.token_rewards_BT, expected)


def test_remax_compares_whole_scores() -> None:
    created, placed = rollouts([3, 2]), [[(0, 0.5), (2, 0.5)], [(0, 1.0)]]
    config = complete({"algorithm": {"adv_estimator": "remax", "use_kl_in_reward": False}})
    whole, parts = (
        shape_step(config, annotate(created), score_all(created, [1.0, 1.0]), 0.0, [0.25, 0.5], at)
        for at in ((), placed)
    )
    torch.testing.assert_close(parts.batch.advantages_BT, whole.batch.advantages_BT)
    assert parts.batch.advantages_BT.tolist() == [[0.75, 0.75, 0.75], [0.5, 0.5, 0.0]]


def test_pieces_are_counted_in_rows_with_a_score_if_the_judge_scores_them() -> None:
    created, placed = rollouts([4, 3, 4]), [[(1, 0.5), (3, 0.5)], [(2, 1.0)], []]
    scores = score_all(created, [1.0, 1.0, None])
    for place, count in (("sentence", 1.5), ("criterion", None), (None, None)):
        config = complete({"reward": {"api": {"place": place}}})
        step = shape_step(config, annotate(created), scores, 0.0, None, placed)
        assert step.metrics.get("pieces/count_mean") == count
    step = shape_step(complete({"reward": {"api": {"place": "line"}}}), annotate(created), scores,
                      0.0, None, [[], [], []])  # fmt: skip
    assert "pieces/count_mean" not in step.metrics


def test_what_a_score_has_besides_its_pieces_is_no_reward_of_the_last_one() -> None:
    """Scores scaled by 2 around 0.75 have the advantages of raw ones, times 2."""
    created, ends = rollouts([4, 4, 4], n=3), [[1, 3], [0], [2, 3]]
    rewards = [[0.25, 0.25], [1.0], [0.0, 0.75]]
    rows = [
        Scored(r, Score(sum(values), steps=tuple(
            PlacedReward(end + 1, value, "token") for end, value in zip(row, values, strict=True)
        ))) for r, row, values in zip(created, ends, rewards, strict=True)
    ]  # fmt: skip
    settings = Shaping(normalize="batch")
    scaled = shape_scores(settings, 9, rows, None, Moments()).scored
    config = complete({"algorithm": {
        "adv_estimator": "piece_group", "norm_adv_by_std_in_grpo": False,
    }})  # fmt: skip
    raw, normalised = (
        shape_step(
            config, annotate(created), of, 0.0, None,
            [[(s.end - 1, s.value) for s in sample.score.steps] for sample in of],
        ).batch.advantages_BT
        for of in (rows, scaled)
    )  # fmt: skip
    std = pstdev([0.5, 1.0, 0.75])
    torch.testing.assert_close(normalised, raw / std)
    # At the second piece: scores 0.5 and 1.5, and the whole score 1 of the response without one.
    assert raw[0, 3] == pytest.approx(0.5 - (0.5 + 1.0 + 1.5) / 3)


def test_a_row_without_a_part_that_the_estimator_needs_is_masked() -> None:
    created = rollouts([2, 2, 1, 1], n=4)
    parts = [{"a": Part(x, None)} if x is not None else {} for x in (1.0, None, 0.0, float("nan"))]
    scores = [Scored(r, Score(1.0, parts=p)) for r, p in zip(created, parts, strict=True)]
    scores[3] = Scored(created[3], Score(None, "it is NaN", parts=parts[3]))
    for estimator, baselines, valid in (
        ("gdpo", None, [True, False, True, False]), ("grpo", None, [True] * 3 + [False]),
        ("remax", [0.5, None, 0.5, 0.5], [True, False, True, False]),
    ):  # fmt: skip
        config = complete({"algorithm": {"adv_estimator": estimator, "gdpo_reward_keys": ["a"]}})
        batch = shape_step(config, annotate(created), scores, 0.0, baselines).batch
        assert batch.valid_B.tolist() == valid and not batch.advantages_BT[1].any()
        assert bool(batch.advantages_BT.isfinite().all())
        first, last = batch.advantages_BT[0, 0], batch.advantages_BT[2, 0]
        assert (first > last) if estimator == "gdpo" else first == last
    config = complete({"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["x"]}})
    scores[0] = Scored(created[0], Score(1.0, parts={name: Part(1.0, None) for name in "dbca"}))
    with pytest.raises(RewardError, match="no score has such a part; there are a, b, c, d"):
        shape_step(config, annotate(created), scores, 0.0, None)


@pytest.mark.parametrize("estimator", ["gae", "gdpo"])
def test_without_any_score_the_kl_coefficient_stays(estimator: str) -> None:
    settings: Any = {"adv_estimator": estimator, "gdpo_reward_keys": ["a"]}
    settings |= {"kl_ctrl": {"type": "adaptive", "target_kl": 0.1, "horizon": 100}}
    step = shape(rollouts([3, 2]), [None, None], 0.2, **settings)
    assert step.next_kl_coef == 0.2 and step.metrics == {}
    assert not step.batch.advantages_BT.any()
    assert bool(step.batch.token_rewards_BT.isfinite().all())


def penalise(rows: list[Scored], *, moments: Moments | None = None, **settings: Any) -> Any:
    return shape_scores(Shaping(**settings), 100, rows, None, moments or Moments())


def values(rows: Any) -> list[float | None]:
    return [first.score.value for first in rows]


def test_everything_is_off_unless_asked_for() -> None:
    rows = [scored(1.0, range(100), "length"), scored(None)]
    done = penalise(rows)
    assert values(done.scored) == [1.0, None]
    assert done.metrics == {}
    assert list(done.logged) == rows


@pytest.mark.parametrize(
    ("length", "share"), [(1, 0.0), (80, 0.0), (85, 0.25), (90, 0.5), (100, 1.0), (120, 1.0)]
)
def test_the_over_long_share_grows_over_the_buffer(length: int, share: float) -> None:
    assert overlong_share(length, 100, 20) == pytest.approx(share)


@pytest.mark.parametrize(
    ("ids", "n", "share"),
    [((1, 2, 3), 2, 0.0), ((1, 1, 1, 1), 1, 0.75), ((1, 2, 1, 2, 1), 2, 0.5), ((1,), 4, 0.0)],
)
def test_repetition_is_the_share_of_n_grams_seen_before(
    ids: tuple[int, ...], n: int, share: float
) -> None:
    assert repeated_share(ids, n) == pytest.approx(share)


def test_penalties_add_up_are_logged_and_leave_the_given_score_as_it_is() -> None:
    first = scored(1.0, range(90), "length").rollout, Score(1.0, info={"cached": True})
    rows = [Scored(*first), scored(0.5, (7, 7, 7, 7)), scored(None)]
    done = penalise(
        rows, overlong_buffer=20, overlong_penalty=2.0, missing_eos_penalty=0.5,
        repetition_penalty=4.0, repetition_ngram=1,
    )  # fmt: skip
    assert values(done.scored) == [pytest.approx(1.0 - 1.0 - 0.5), pytest.approx(0.5 - 3.0), None]
    assert values(done.logged) == [1.0, 0.5, None]
    effects = {"overlong": -1.0, "missing_eos": -0.5, "repetition": 0.0, "reward": -0.5}
    assert done.logged[0].score.info == {"cached": True, "shaping": effects}
    assert done.metrics["shaping/overlong_mean"] == pytest.approx(-0.5)
    assert done.metrics["shaping/missing_eos_share"] == 0.5
    assert done.metrics["shaping/repetition_mean"] == pytest.approx(-1.5)
    assert done.metrics["shaping/reward_mean"] == pytest.approx(-1.5)


def test_what_an_environment_wrote_counts_in_no_length_and_in_no_place() -> None:
    """Two turns of two tokens, and between them a reply of six."""
    turns = (Turn(0, 2, "", {}), Turn(8, 10, "", {}))
    episode = replace(scored(1.0, (1, 2, *(7,) * 6, 3, 4)).rollout, turns=turns)
    done = penalise([Scored(episode, Score(1.0))], overlong_buffer=96, answer_budget=4)
    assert values(done.scored) == [1.0]
    annotated = annotate([episode])
    critic = shape([episode], [1.0], annotated=annotated).critic
    assert [row[:2] for row in critic["positions"][:4]] == [[1, 1], [1, 1], [1, 2], [0, 0]]
    assert annotated.values_BT is not None
    values_of_turns = annotated.values_BT[annotated.response_mask_BT].sort().values
    means = [mean for _, mean, _ in critic["tenths"]]
    assert means == pytest.approx(values_of_turns.tolist(), rel=1e-3)


def test_batch_normalisation_and_then_the_clip() -> None:
    done = penalise([scored(1.0), scored(5.0), scored(None)], normalize="batch")
    assert values(done.scored) == [-1.0, 1.0, None]
    assert (done.metrics["shaping/mean"], done.metrics["shaping/std"]) == (3.0, 2.0)
    assert done.moments == Moments()
    same = penalise([scored(4.0), scored(4.0)], normalize="batch")
    assert values(same.scored) == [0.0, 0.0]
    clipped = penalise([scored(5.0), scored(-0.5), scored(-9.0)], reward_clip=2.0)
    assert values(clipped.scored) == [2.0, -0.5, -2.0]


def test_running_normalisation_goes_on_with_what_it_saw() -> None:
    first = penalise([scored(1.0), scored(3.0)], normalize="running")
    second = penalise([scored(8.0), scored(0.0)], normalize="running", moments=first.moments)
    seen = [1.0, 3.0, 8.0, 0.0]
    expected = [(v - fmean(seen)) / pstdev(seen) for v in (8.0, 0.0)]
    assert values(second.scored) == pytest.approx(expected)
    lowered = penalise([scored(1.0, range(90))], overlong_buffer=20, normalize="running")
    assert lowered.moments == Moments.from_values([0.5])


def test_steps_keep_their_share_and_baselines_take_the_same_scale() -> None:
    """Spread 2 about 3: everything is halved, the rewards within a response too."""
    first = Scored(scored(5.0).rollout, Score(5.0, steps=(PlacedReward(1, 3.0, "token"),)))
    done = shape_scores(
        Shaping(normalize="batch"), 100, [first, scored(1.0)], [scored(2.0)], Moments()
    )
    assert values(done.scored) == [1.0, -1.0]
    assert done.scored[0].score.steps == (PlacedReward(1, 1.5, "token"),)
    assert values(done.baselines) == [-0.5]


def test_baselines_are_penalised_like_samples_and_teach_nothing() -> None:
    rows, greedy = [scored(1.0), scored(3.0)], [scored(9.0, range(90)), scored(None)]
    for normalize, expected in (("off", 8.5), ("batch", 6.5), ("running", 6.5)):
        settings = Shaping(overlong_buffer=20, normalize=normalize)
        done = shape_scores(settings, 100, rows, greedy, Moments())
        assert values(done.baselines) == [pytest.approx(expected), None]
        assert done.metrics["shaping/reward_mean"] == pytest.approx(2.0 * (normalize == "off"))
    assert done.moments == Moments.from_values([1.0, 3.0])
    plain = shape_scores(Shaping(), 100, rows, greedy, Moments())
    assert values(plain.baselines) == [9.0, None]


def test_a_value_put_in_for_want_of_a_verdict_is_scaled_and_teaches_nothing() -> None:
    rows = [scored(1.0), scored(3.0), Scored(scored(0.0).rollout, Score(9.0, imputed="slow"))]
    assert not rows[2].score.judged
    for normalize in ("batch", "running"):
        assert values(penalise(rows, normalize=normalize).scored) == [-1.0, 1.0, 7.0]


def test_each_setting_alone_is_on_and_is_told_of_the_rows_with_a_score() -> None:
    """What failed is in no mean and no share; the clip looks at both signs, after scaling."""
    rows = [scored(4.0, (5, 5, 5, 5), "length", 3), scored(-4.0), scored(1.0), scored(None, (1, 1))]
    expected = [
        ({"overlong_buffer": 97}, {"overlong_mean": -1 / 97 / 3, "overlong_share": 1 / 3}),
        ({"missing_eos_penalty": 3.0}, {"missing_eos_mean": -1.0, "missing_eos_share": 1 / 3}),
        (
            {"repetition_penalty": 2.0, "repetition_ngram": 1},
            {"repetition_mean": -0.5, "repetition_share": 1 / 3},
        ),
        (  # one response thinks for 3 tokens of its 4; the other two answer with 3 each
            {"thought_budget": 2, "answer_budget": 2, "budget_penalty": 3.0},
            {
                "thought_budget_mean": -0.5,
                "thought_budget_share": 1 / 3,
                "answer_budget_mean": -1.0,
                "answer_budget_share": 2 / 3,
            },
        ),
        ({"reward_clip": 2.0}, {"clipped_share": 2 / 3, "reward_mean": 1 / 3}),
        ({"reward_clip": 4.0}, {"clipped_share": 0.0}),
        ({"normalize": "batch", "reward_clip": 1.2}, {"clipped_share": 1 / 3, "mean": 1 / 3}),
    ]
    for settings, output in expected:
        metrics = penalise(rows, **settings).metrics
        result = {name: metrics.get(f"shaping/{name}") for name in output}
        assert result == pytest.approx(output), settings


@pytest.fixture
def decode(tokenizer: Any) -> Detokenize:
    return partial(decode_text, tokenizer)


def answer(tokenizer: Any, text: str) -> Rollout:
    ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    prompt = Prompt("0", "", (), "", (1,))
    message = decode_text(tokenizer, ids, (1,))
    return Rollout(prompt, 0, ids, np.zeros(len(ids), np.float32), message, "stop")


def test_a_step_ends_on_the_token_of_its_last_character(tokenizer: Any, decode: Any) -> None:
    rollout = answer(tokenizer, "one. two.")
    steps = [PlacedReward(4, 0.5), PlacedReward(9, 1.0), PlacedReward(1, 2.0)]
    assert place_steps(rollout, steps, decode) == [(3, 0.5), (8, 1.0), (0, 2.0)]
    # In an episode it is a character of the last turn, even if an earlier turn reads the same.
    turns = tuple(Turn(start, start + 10, rollout.text, {}) for start in (0, 10))
    episode = replace(rollout, token_ids=rollout.token_ids * 2, turns=turns)
    assert place_steps(episode, steps, decode) == [(13, 0.5), (18, 1.0), (10, 2.0)]


def test_characters_of_several_tokens_are_counted_as_characters(
    tokenizer: Any, decode: Any
) -> None:
    rollout = answer(tokenizer, "añb")  # ñ is two bytes, so two tokens here
    assert rollout.text == "añb" and len(rollout.token_ids) == 5
    [(index, _)] = place_steps(rollout, [PlacedReward(3, 1.0)], decode)
    assert index == 3


def test_half_a_character_may_read_as_several_signs() -> None:
    """Byte fallback shows a sign for each byte until the character is whole."""
    pieces = [b"\xf0", b"\x9f", b"\x98", b"\x80", b"a"]

    def decode(ids: Sequence[int], context: Sequence[int]) -> str:
        raw = b"".join(pieces[i] for i in ids)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(raw)

    prompt = Prompt("0", "", (), "", (1,))
    rollout = Rollout(prompt, 0, (0, 1, 2, 3, 4), np.zeros(5, np.float32), "\U0001f600a", "stop")
    steps = [PlacedReward(1, 1.0), PlacedReward(2, 2.0)]
    assert place_steps(rollout, steps, decode) == [(3, 1.0), (4, 2.0)]


def test_token_places_are_counted_from_1(tokenizer: Any, decode: Any) -> None:
    rollout = answer(tokenizer, "abc")
    steps = [PlacedReward(i, float(i), "token") for i in (1, 4)]
    assert place_steps(rollout, steps, decode) == [(0, 1.0), (3, 4.0)]
