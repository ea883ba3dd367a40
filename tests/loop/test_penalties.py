"""Shaping of scores: off by default, hand-worked when on."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest

from ppo_cli.config.schema.reward import Shaping
from ppo_cli.moments import Moments
from ppo_cli.records import FinishReason, PlacedReward, Prompt, Rollout, Score, Scored
from ppo_cli.step.shaping import overlong_share, repeated_share, shape_scores


def scored(
    value: float | None, ids: Any = (1, 2, 3), finish: FinishReason = "stop", thought: int = 0
) -> Scored:
    ids = tuple(ids)
    prompt = Prompt("0", "", (), "", (1,))
    zeros = np.zeros(len(ids), np.float32)
    rollout = Rollout(prompt, 0, ids, zeros, "", finish, thought_tokens=thought)
    return Scored(rollout, Score.failed("timeout") if value is None else Score(value))


def shape(rows: list[Scored], *, moments: Moments | None = None, **settings: Any) -> Any:
    return shape_scores(Shaping(**settings), 100, rows, None, moments or Moments())


def values(rows: Any) -> list[float | None]:
    return [first.score.value for first in rows]


def test_everything_is_off_unless_asked_for() -> None:
    rows = [scored(1.0, range(100), "length"), scored(None)]
    done = shape(rows)
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
    rows = [scored(1.0, range(90), "length"), scored(0.5, (7, 7, 7, 7)), scored(None)]
    done = shape(
        rows, overlong_buffer=20, overlong_penalty=2.0, missing_eos_penalty=0.5,
        repetition_penalty=4.0, repetition_ngram=1,
    )  # fmt: skip
    assert values(done.scored) == [pytest.approx(1.0 - 1.0 - 0.5), pytest.approx(0.5 - 3.0), None]
    assert values(done.logged) == [1.0, 0.5, None]
    assert done.logged[0].score.info["shaping"] == {
        "overlong": -1.0, "missing_eos": -0.5, "repetition": 0.0, "reward": -0.5,
    }  # fmt: skip
    assert done.metrics["shaping/overlong_mean"] == pytest.approx(-0.5)
    assert done.metrics["shaping/missing_eos_share"] == 0.5
    assert done.metrics["shaping/repetition_mean"] == pytest.approx(-1.5)
    assert done.metrics["shaping/reward_mean"] == pytest.approx(-1.5)


def test_batch_normalisation_and_then_the_clip() -> None:
    done = shape([scored(1.0), scored(3.0), scored(None)], normalize="batch")
    assert values(done.scored) == [-1.0, 1.0, None]
    assert (done.metrics["shaping/mean"], done.metrics["shaping/std"]) == (2.0, 1.0)
    assert done.moments == Moments()
    same = shape([scored(4.0), scored(4.0)], normalize="batch")
    assert values(same.scored) == [0.0, 0.0]
    clipped = shape([scored(5.0), scored(-0.5), scored(-9.0)], reward_clip=2.0)
    assert values(clipped.scored) == [2.0, -0.5, -2.0]


def test_running_normalisation_goes_on_with_what_it_saw() -> None:
    first = shape([scored(1.0), scored(3.0)], normalize="running")
    second = shape([scored(8.0), scored(0.0)], normalize="running", moments=first.moments)
    seen = [1.0, 3.0, 8.0, 0.0]
    expected = [(v - fmean(seen)) / pstdev(seen) for v in (8.0, 0.0)]
    assert values(second.scored) == pytest.approx(expected)


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
        assert values(shape(rows, normalize=normalize).scored) == [-1.0, 1.0, 7.0]


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
        metrics = shape(rows, **settings).metrics
        result = {name: metrics.get(f"shaping/{name}") for name in output}
        assert result == pytest.approx(output), settings
