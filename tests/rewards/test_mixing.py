"""Parts of a round on one scale: hand-worked numbers, and what may not change them."""

from __future__ import annotations

import json
import math
import random
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import pytest

from ppo_cli.config.mixture import MixPart, read_condition
from ppo_cli.moments import Moments, correlation
from ppo_cli.records import Part, PlacedReward, Rollout, Score
from ppo_cli.rewards.base import RoundKind
from ppo_cli.rewards.mixture import GATE_CLOSED, MixedRound, ScalingState, describe_round, mix
from tests.rewards.scoring import rollouts_of


def part(name: str, weight: float = 1.0, scaling: str = "none", **settings: Any) -> MixPart:
    kind = name if name in ("judge", "model") else "rule"
    return MixPart(name=name, kind=kind, weight=weight, scaling=scaling, **settings)


def rollouts(count: int, n: int = 1) -> list[Rollout]:
    """Rollouts of different lengths, `n` to a prompt."""
    return rollouts_of(*("x" * (i % 7 + 1) for i in range(count)), n=n)


def mixed(
    parts: list[MixPart],
    kind: RoundKind = "train",
    state: ScalingState | None = None,
    n: int = 1,
    **columns: list[Any],
) -> MixedRound:
    """Mix a round of these columns: numbers, None for a failure, or scores as they are."""

    def as_score(cell: Any) -> Score:
        if isinstance(cell, Score):
            return cell
        return Score.failed("timeout") if cell is None else Score(cell)

    cells = zip(*columns.values(), strict=True)
    rows = [dict(zip(columns, map(as_score, row), strict=True)) for row in cells]
    return mix(parts, rollouts(len(rows), n), rows, kind, state or ScalingState())


def totals(round_: MixedRound) -> list[float | None]:
    return [score.value for score in round_.scores]


def metrics_of(round_: MixedRound) -> dict[str, float]:
    return describe_round(round_.columns, rollouts(len(round_.scores)))


def test_raw_parts_are_weighted_and_summed() -> None:
    parts = [part("a", 0.5), part("b", 0.25), part("c", -1.0)]
    round_ = mixed(parts, a=[1.0, 2.0], b=[4.0, 0.0], c=[0.5, -0.5])
    assert totals(round_) == pytest.approx([1.0, 1.5])
    assert round_.scores[0].parts == {"a": Part(1.0, 1.0), "b": Part(4.0, 4.0), "c": Part(0.5, 0.5)}


def test_each_fixed_scaling_by_hand() -> None:
    parts = [
        part("a", scaling="affine", mean=20.0, std=4.0),
        part("b", scaling="sigmoid", mean=1.0, std=2.0),
        part("c", clip=0.5),
    ]
    (score,) = mixed(parts, a=[26.0], b=[3.0], c=[-7.0]).scores
    scaled = {name: part.scaled for name, part in score.parts.items()}
    assert scaled == pytest.approx({"a": 1.5, "b": 1 / (1 + math.exp(-1)), "c": -0.5})


def test_zscore_learns_over_the_run_and_equals_the_moments_of_all_scores() -> None:
    random.seed(0)
    state, scores = ScalingState(), []
    for _ in range(5):
        values = [random.gauss(20, 5) for _ in range(16)]
        round_ = mixed([part("a", scaling="zscore")], state=state, a=values)
        state, scores = round_.state, scores + values
        expected = [(value - fmean(scores)) / pstdev(scores) for value in values]
        assert totals(round_) == pytest.approx(expected, rel=1e-12)


def test_running_moments_are_the_same_bits_after_json_and_in_any_order() -> None:
    random.seed(1)
    values = [random.gauss(0, 1e3) for _ in range(64)]
    before, after = Moments.from_values(values[:40]), Moments.from_values(values[40:])
    restored = Moments.from_state(json.loads(json.dumps(before.state_dict())))
    shuffled = Moments.from_values(random.sample(values[40:], 24))
    assert restored == before
    assert before.merge(after) == restored.merge(shuffled)


@pytest.mark.parametrize("scaling", ["zscore", "group"])
def test_scores_that_differ_only_by_rounding_come_to_zero(scaling: str) -> None:
    parts = [part("a", scaling=scaling)]
    assert totals(mixed(parts, n=2, a=[1.0] * 4)) == [0.0] * 4
    assert totals(mixed(parts, n=4, a=[20.000001, 20.000002] * 2)) == [0.0] * 4


@pytest.mark.parametrize(("clip", "largest"), [(None, 5.0), (2.0, 2.0), (100.0, math.sqrt(199))])
def test_the_first_hit_of_a_rare_rule_is_clipped(clip: float | None, largest: float) -> None:
    round_ = mixed([part("a", scaling="zscore", clip=clip)], a=[1.0] + [0.0] * 199)
    assert max(value or 0.0 for value in totals(round_)) == pytest.approx(largest)


def test_group_scaling_is_by_prompt_with_divisor_n_minus_1() -> None:
    round_ = mixed([part("a", scaling="group")], n=2, a=[1.0, 3.0, 10.0, 10.0])
    half = 1 / math.sqrt(2)
    assert totals(round_) == pytest.approx([-half, half, 0, 0], abs=1e-5)


def test_validations_are_comparable_and_teach_nothing() -> None:
    parts = [part("a", scaling="zscore")]
    first = mixed(parts, "validation", a=[0.0, 1.0, 2.0, 3.0])
    trained = mixed(parts, state=first.state, a=[50.0, 60.0])
    assert trained.state.running["a"].count == 2
    later = mixed(parts, "validation", trained.state, a=[1.0, 2.0, 3.0, 4.0])
    assert later.state == trained.state
    gain = [b - a for a, b in zip(totals(first), totals(later), strict=True)]  # type: ignore
    assert gain == pytest.approx([1 / pstdev([0, 1, 2, 3])] * 4)


@pytest.mark.parametrize(
    ("scaling", "centre", "spread"),
    [("zscore", 4.0, pstdev([1, 3, 5, 7])), ("group", 2.0, math.sqrt(2))],
)
def test_greedy_baselines_are_scaled_like_the_step_and_teach_nothing(
    scaling: str, centre: float, spread: float
) -> None:
    parts = [part("a", scaling=scaling), part("b", 0.5, scaling)]
    step = mixed(parts, n=2, a=[1.0, 3.0, 5.0, 7.0], b=[10.0, 30.0, 50.0, 70.0])
    greedy = mixed(parts, "baseline", step.state, a=[2.0, 50.0], b=[20.0, 50.0])
    assert greedy.state == step.state
    assert totals(greedy)[0] == pytest.approx(1.5 * (2.0 - centre) / spread, abs=1e-6)


def test_a_reward_model_around_20_and_a_rule_of_0_or_1_count_by_their_weights() -> None:
    random.seed(2)
    parts = [part("model", 0.7, "zscore"), part("rule", 0.3, "zscore")]
    state = ScalingState()
    for _ in range(20):
        model = [random.gauss(20, 4) for _ in range(128)]
        rule = [float(random.random() < 0.3) for _ in range(128)]
        round_ = mixed(parts, state=state, model=model, rule=rule)
        state = round_.state
    metrics = metrics_of(round_)
    assert [state.running[name].count for name in ("model", "rule")] == [2560, 2560]
    assert metrics["reward/model/share"] == pytest.approx(0.7, rel=0.1)
    assert metrics["reward/rule/share"] == pytest.approx(0.3, rel=0.1)
    assert metrics["reward/rule/weight"] == pytest.approx(0.3)


def test_the_share_of_a_part_uses_the_size_of_its_weight() -> None:
    parts = [part("rule", 1.0), part("length", -3.0)]
    metrics = metrics_of(mixed(parts, rule=[0.0, 1.0] * 2, length=[1.0, 1.0, 0.0, 0.0]))
    for name, share in (("rule", 0.25), ("length", 0.75)):
        assert metrics[f"reward/{name}/share"] == pytest.approx(share)
        assert metrics[f"reward/{name}/weight"] == pytest.approx(share)


def test_a_spread_from_rounding_is_none() -> None:
    for pair in ([0.1 + 0.2 - 0.3, 0.0], [1e6, 1e6 + 1e-4]):
        assert not Moments.from_values(pair).varies
    for pair in ([0.0, 1e-4], [1e6, 1e6 + 10.0]):
        assert Moments.from_values(pair).varies


def test_without_scaling_one_part_drowns_the_other_and_the_metrics_say_so() -> None:
    model, rule = [15.0, 25.0, 20.0, 22.0], [0.0, 1.0, 0.0, 1.0]
    metrics = metrics_of(mixed([part("model", 0.7), part("rule", 0.3)], model=model, rule=rule))
    assert metrics["reward/rule/share"] < 0.1
    lengths = [len(rollout.token_ids) for rollout in rollouts(4)]
    for name, other in (("correlation/model/rule", rule), ("model/length_correlation", lengths)):
        expected = np.corrcoef(model, other)[0, 1]
        assert metrics[f"reward/{name}"] == pytest.approx(expected)


def test_a_failed_part_fails_the_sample_and_is_in_no_scale() -> None:
    parts = [part("a", scaling="zscore"), part("b", 2.0)]
    round_ = mixed(parts, a=[1.0, 3.0, None], b=[0.0, None, 5.0])
    assert totals(round_) == [pytest.approx(-1.0), None, None]
    assert [score.failure for score in round_.scores] == ["", "b: timeout", "a: timeout"]
    assert round_.state.running["a"] == Moments.from_values([1.0, 3.0])


def test_renormalising_lets_the_others_share_the_weight() -> None:
    parts = [part("a", 0.6, on_failure="renormalise"), part("b", 0.4, on_failure="renormalise")]
    round_ = mixed(parts, a=[1.0, None, None], b=[1.0, 0.5, None])
    assert totals(round_) == [pytest.approx(1.0), pytest.approx(0.5), None]
    # A penalty has a weight too: 0.6 + 0.1 share the 0.3 of the failed part.
    parts = [part("a", 0.6), part("toxic", -0.1), part("b", 0.3, on_failure="renormalise")]
    round_ = mixed(parts, a=[1.0], toxic=[2.0], b=[None])
    assert totals(round_) == [pytest.approx((0.6 - 0.2) / 0.7)]
    # A part that is only measured fails alone; one that opens a gate fails the response.
    for gate, total in ((None, 1.0), ("right >= 1", None)):
        parts = [part("a", only_if=gate), part("right", 0.0)]
        assert totals(mixed(parts, a=[1.0], right=[None])) == [total]


def test_a_closed_gate_counts_as_the_lowest_of_the_round_and_never_above_0() -> None:
    parts = [part("format"), part("judge", 1.0, "zscore", only_if="format >= 1")]
    columns = {"format": [1.0, 1.0, 0.0], "judge": [0.2, 0.6, GATE_CLOSED]}
    round_ = mixed(parts, **columns)
    assert totals(round_) == pytest.approx([0.0, 2.0, -1.0])
    assert round_.scores[2].parts["judge"] == Part(None, pytest.approx(-1.0))
    assert metrics_of(round_)["reward/judge/gated_share"] == 1 / 3
    raw = mixed([parts[0], part("judge")], **columns)
    assert totals(raw) == pytest.approx([1.2, 1.6, 0.0])
    parts = [part("format", 0.1), part("toxic", -1.0, only_if="format >= 1")]
    penalty = mixed(parts, format=[0.0, 1.0, 1.0], toxic=[GATE_CLOSED, 1.0, 7.0])
    assert totals(penalty) == pytest.approx([-7.0, -0.9, -6.9])


def test_a_rule_that_nothing_fulfils_at_first_counts_when_something_does() -> None:
    parts = [part("rule", scaling="zscore"), part("other", only_if="rule >= 1", scaling="zscore")]
    state, means = ScalingState(), []
    for right in (0.0, 0.5, 1.0):
        other = Score(1.0) if right else GATE_CLOSED
        round_ = mixed(parts, "validation", state, rule=[right, 0.0], other=[other, GATE_CLOSED])
        state = round_.state
        means.append(fmean(value for value in totals(round_) if value is not None))
    assert means == pytest.approx([0.0, 0.25, 0.5])


def test_an_imputed_value_teaches_nothing_and_stays_marked() -> None:
    imputed = Score(100.0, imputed="batch mean")
    round_ = mixed([part("a", scaling="zscore")], a=[1.0, 3.0, imputed])
    assert round_.state.running["a"].count == 2
    assert [score.judged for score in round_.scores] == [True, True, False]


def test_steps_are_scaled_by_the_slope_of_their_part() -> None:
    curved = Score(0.001, steps=(PlacedReward(1, 5.0), PlacedReward(2, -4.999)))
    (score,) = mixed([part("a", scaling="sigmoid")], a=[curved]).scores
    assert [step.value for step in score.steps] == pytest.approx([1.25, -1.25], abs=1e-3)
    parts = [part("a", 0.5, "affine", mean=1.0, std=4.0), part("b", 0.5)]
    a = Score(5.0, steps=(PlacedReward(2, 4.0),))
    b = Score(1.0, steps=(PlacedReward(1, 1.0, "token"),))
    (score,) = mixed(parts, a=[a], b=[b]).scores
    assert score.value == pytest.approx(1.0)
    assert score.steps == (PlacedReward(2, 0.5), PlacedReward(1, 0.5, "token"))
    parts.append(part("c", -1.0, on_failure="renormalise"))
    (score,) = mixed(parts, a=[a], b=[b], c=[None]).scores
    assert score.value == pytest.approx(2.0)
    assert score.steps == (PlacedReward(2, 1.0), PlacedReward(1, 1.0, "token"))


def test_reports_of_a_part_are_kept_below_its_name() -> None:
    inner = {"model": Part(1.0, 1.0), "model.honesty": Part(0.3, None), "tone": Part(0.1, None)}
    reported = Score(1.0, reason="fine", parts=inner, info={"seconds": 2})
    (score,) = mixed([part("model")], model=[reported]).scores
    assert set(score.parts) == {"model", "model.honesty", "model.tone"}
    assert score.reason == "model: fine"
    assert score.facts["mixture"] == {"model": {"seconds": 2}}


@pytest.mark.parametrize(
    ("text", "raw", "holds"),
    [("format >= 1", 1.0, True), ("f<0.5", 0.5, False), ("a.b-c != -2e1", -20.0, False),
     ("x==0", 0.0, True), ("x > 0", 0.0, False), ("x <= 3", 3.0, True)],
)  # fmt: skip
def test_conditions(text: str, raw: float, holds: bool) -> None:
    assert read_condition(text).holds(raw) is holds


@pytest.mark.parametrize("text", ["", "format", "format >= high", "1 >= 1", "a >= nan", "a => 1"])
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError, match="write PART >= NUMBER"):
        read_condition(text)


def test_correlation_needs_two_that_vary() -> None:
    assert correlation([1.0, 1.0], [0.0, 2.0]) is None
    assert correlation([1.0], [1.0]) is None
    assert correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
