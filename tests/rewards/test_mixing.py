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
from ppo_cli.records import Part, PlacedReward, Prompt, Rollout, Score
from ppo_cli.rewards.mixture import GATE_CLOSED, MixedRound, ScalingState, describe_round, mix


def part(name: str, weight: float = 1.0, scaling: str = "none", **more: Any) -> MixPart:
    kind = name if name in ("judge", "model") else "rule"
    return MixPart(name=name, kind=kind, weight=weight, scaling=scaling, **more)


def rollouts(count: int, n: int = 1) -> list[Rollout]:
    made = []
    for i in range(count):
        prompt = Prompt(f"p{i // n:04d}", "", (), "", (1,))
        ids = tuple(range(i % 7 + 1))
        made.append(Rollout(prompt, i % n, ids, np.zeros(len(ids), np.float32), "abc", "stop"))
    return made


def columns(**values: list[float | None]) -> list[dict[str, Score]]:
    rows = zip(*values.values(), strict=True)
    return [
        {n: Score(v) if v is not None else Score.failed("timeout")
         for n, v in zip(values, row, strict=True)}
        for row in rows
    ]  # fmt: skip


def totals(mixed: MixedRound) -> list[float | None]:
    return [s.value for s in mixed.scores]


def test_raw_parts_are_weighed_and_summed() -> None:
    parts = [part("a", 0.5), part("b", 0.25), part("c", -1.0)]
    given = columns(a=[1.0, 2.0], b=[4.0, 0.0], c=[0.5, -0.5])
    mixed = mix(parts, rollouts(2), given, "train", ScalingState())
    assert totals(mixed) == pytest.approx([1.0, 1.5])
    assert mixed.scores[0].parts == {"a": Part(1.0, 1.0), "b": Part(4.0, 4.0), "c": Part(0.5, 0.5)}


def test_each_fixed_scaling_by_hand() -> None:
    parts = [
        part("a", scaling="affine", mean=20.0, std=4.0),
        part("b", scaling="sigmoid", mean=1.0, std=2.0),
        part("c", clip=0.5),
    ]
    given = columns(a=[26.0], b=[3.0], c=[-7.0])
    mixed = mix(parts, rollouts(1), given, "train", ScalingState())
    scaled = {name: p.scaled for name, p in mixed.scores[0].parts.items()}
    assert scaled == pytest.approx({"a": 1.5, "b": 1 / (1 + math.exp(-1)), "c": -0.5})


def test_zscore_learns_over_the_run_and_equals_the_moments_of_everything_seen() -> None:
    random.seed(0)
    rounds = [[random.gauss(20, 5) for _ in range(16)] for _ in range(5)]
    memory, seen = ScalingState(), []
    for values in rounds:
        mixed = mix([part("a", scaling="zscore")], rollouts(16), columns(a=values), "train", memory)
        memory, seen = mixed.state, seen + values
        expected = [(v - fmean(seen)) / pstdev(seen) for v in values]
        assert totals(mixed) == pytest.approx(expected, rel=1e-12)


def test_running_scales_are_the_same_bits_after_json_and_in_any_order() -> None:
    random.seed(1)
    values = [random.gauss(0, 1e3) for _ in range(64)]
    before = Moments.from_values(values[:40])
    again = Moments.from_state(json.loads(json.dumps(before.state_dict())))
    assert again == before
    shuffled = random.sample(values[40:], 24)
    assert before.merge(Moments.from_values(values[40:])) == again.merge(
        Moments.from_values(shuffled)
    )


def test_a_round_that_does_not_vary_comes_to_zero() -> None:
    for scaling in ("zscore", "group"):
        parts = [part("a", scaling=scaling)]
        mixed = mix(parts, rollouts(4, 2), columns(a=[1.0] * 4), "train", ScalingState())
        assert totals(mixed) == [0.0] * 4


def test_the_first_hit_of_a_rare_rule_is_not_all_there_is() -> None:
    given = columns(a=[1.0] + [0.0] * 199)
    for clip, most in ((None, 5.0), (2.0, 2.0), (100.0, math.sqrt(199))):
        parts = [part("a", scaling="zscore", clip=clip)]
        mixed = mix(parts, rollouts(200), given, "train", ScalingState())
        assert max(v or 0.0 for v in totals(mixed)) == pytest.approx(most)


def test_group_scaling_is_by_prompt_with_divisor_n_minus_1() -> None:
    parts = [part("a", scaling="group")]
    given = columns(a=[1.0, 3.0, 10.0, 10.0])
    mixed = mix(parts, rollouts(4, 2), given, "train", ScalingState())
    assert totals(mixed) == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 0, 0], abs=1e-5)


def test_validations_compare_with_each_other_and_teach_nothing() -> None:
    parts = [part("a", scaling="zscore")]
    first = mix(parts, rollouts(4), columns(a=[0.0, 1.0, 2.0, 3.0]), "validation", ScalingState())
    trained = mix(parts, rollouts(2), columns(a=[50.0, 60.0]), "train", first.state)
    assert trained.state.running["a"].count == 2
    later = mix(parts, rollouts(4), columns(a=[1.0, 2.0, 3.0, 4.0]), "validation", trained.state)
    assert later.state == trained.state
    gain = [b - a for a, b in zip(totals(first), totals(later), strict=True)]
    assert gain == pytest.approx([1 / pstdev([0, 1, 2, 3])] * 4)


def test_greedy_baselines_are_scaled_like_the_step_and_teach_nothing() -> None:
    for scaling in ("zscore", "group"):
        parts = [part("a", scaling=scaling), part("b", 0.5, scaling)]
        given = columns(a=[1.0, 3.0, 5.0, 7.0], b=[10.0, 30.0, 50.0, 70.0])
        step = mix(parts, rollouts(4, 2), given, "train", ScalingState())
        given = columns(a=[2.0, 50.0], b=[20.0, 50.0])
        greedy = mix(parts, rollouts(2), given, "baseline", step.state)
        assert greedy.state == step.state
        centre, spread = (4.0, pstdev([1, 3, 5, 7])) if scaling == "zscore" else (2.0, math.sqrt(2))
        assert totals(greedy)[0] == pytest.approx(1.5 * (2.0 - centre) / spread, abs=1e-6)


def test_a_reward_model_around_20_and_a_rule_of_0_or_1_move_the_total_by_their_weights() -> None:
    random.seed(2)
    parts = [part("model", 0.7, "zscore"), part("rule", 0.3, "zscore")]
    memory = ScalingState()
    for _ in range(20):
        model = [random.gauss(20, 4) for _ in range(128)]
        rule = [float(random.random() < 0.3) for _ in range(128)]
        mixed = mix(parts, rollouts(128), columns(model=model, rule=rule), "train", memory)
        memory = mixed.state
        metrics = describe_round(mixed.columns, rollouts(128))
    assert {name: one.count for name, one in memory.running.items()} == {
        "model": 2560,
        "rule": 2560,
    }
    assert metrics["reward/model/share"] == pytest.approx(0.7, rel=0.1)
    assert metrics["reward/rule/share"] == pytest.approx(0.3, rel=0.1)
    assert metrics["reward/rule/weight"] == pytest.approx(0.3)


def test_the_share_of_a_part_goes_by_the_size_of_its_weight() -> None:
    parts = [part("rule", 1.0), part("length", -3.0)]
    given = columns(rule=[0.0, 1.0, 0.0, 1.0], length=[1.0, 1.0, 0.0, 0.0])
    metrics = describe_round(
        mix(parts, rollouts(4), given, "train", ScalingState()).columns, rollouts(4)
    )
    for name, share in (("rule", 0.25), ("length", 0.75)):
        assert metrics[f"reward/{name}/share"] == pytest.approx(share)
        assert metrics[f"reward/{name}/weight"] == pytest.approx(share)


def test_a_spread_that_rounding_makes_is_none() -> None:
    around_zero, around_million = [0.1 + 0.2 - 0.3, 0.0], [1e6, 1e6 + 1e-4]
    assert (
        not Moments.from_values(around_zero).varies
        and not Moments.from_values(around_million).varies
    )
    assert Moments.from_values([0.0, 1e-4]).varies and Moments.from_values([1e6, 1e6 + 10.0]).varies


def test_without_scaling_one_part_drowns_the_other_and_the_metrics_say_so() -> None:
    parts = [part("model", 0.7), part("rule", 0.3)]
    given = columns(model=[15.0, 25.0, 20.0, 22.0], rule=[0.0, 1.0, 0.0, 1.0])
    metrics = describe_round(
        mix(parts, rollouts(4), given, "train", ScalingState()).columns, rollouts(4)
    )
    assert metrics["reward/rule/share"] < 0.1
    assert metrics["reward/correlation/model/rule"] == pytest.approx(
        np.corrcoef([15, 25, 20, 22], [0, 1, 0, 1])[0, 1]
    )
    lengths = [len(r.token_ids) for r in rollouts(4)]
    assert metrics["reward/model/length_correlation"] == pytest.approx(
        np.corrcoef([15, 25, 20, 22], lengths)[0, 1]
    )


def test_a_failed_part_fails_the_sample_and_its_value_is_in_no_scale() -> None:
    parts = [part("a", scaling="zscore"), part("b", 2.0)]
    given = columns(a=[1.0, 3.0, None], b=[0.0, None, 5.0])
    mixed = mix(parts, rollouts(3), given, "train", ScalingState())
    assert totals(mixed) == [pytest.approx(-1.0), None, None]
    assert [s.failure for s in mixed.scores] == ["", "b: timeout", "a: timeout"]
    assert mixed.state.running["a"] == Moments.from_values([1.0, 3.0])


def test_renormalising_lets_the_others_share_the_weight() -> None:
    parts = [part("a", 0.6, on_failure="renormalise"), part("b", 0.4, on_failure="renormalise")]
    given = columns(a=[1.0, None, None], b=[1.0, 0.5, None])
    mixed = mix(parts, rollouts(3), given, "train", ScalingState())
    assert totals(mixed) == [pytest.approx(1.0), pytest.approx(0.5), None]
    # A penalty has a weight too: 0.6 + 0.1 take over the 0.3 of the part that is lost.
    parts = [part("a", 0.6), part("toxic", -0.1), part("b", 0.3, on_failure="renormalise")]
    given = columns(a=[1.0], toxic=[2.0], b=[None])
    mixed = mix(parts, rollouts(1), given, "train", ScalingState())
    assert totals(mixed) == [pytest.approx((0.6 - 0.2) / 0.7)]


def test_a_closed_gate_counts_as_the_lowest_of_the_round_and_never_above_0() -> None:
    parts = [part("format"), part("judge", 1.0, "zscore", only_if="format >= 1")]
    given = columns(format=[1.0, 1.0, 0.0], judge=[0.2, 0.6, 0.0])
    given[2]["judge"] = GATE_CLOSED
    mixed = mix(parts, rollouts(3), given, "train", ScalingState())
    assert totals(mixed) == pytest.approx([0.0, 2.0, -1.0])
    assert mixed.scores[2].parts["judge"] == Part(None, pytest.approx(-1.0))
    assert describe_round(mixed.columns, rollouts(3))["reward/judge/gated_share"] == 1 / 3
    raw = mix([parts[0], part("judge")], rollouts(3), given, "train", ScalingState())
    assert totals(raw) == pytest.approx([1.2, 1.6, 0.0])


def test_a_penalty_behind_a_closed_gate_is_not_a_present() -> None:
    parts = [part("format", 0.1), part("toxic", -1.0, only_if="format >= 1")]
    given = columns(format=[0.0, 1.0, 1.0], toxic=[0.0, 1.0, 7.0])
    given[0]["toxic"] = GATE_CLOSED
    mixed = mix(parts, rollouts(3), given, "train", ScalingState())
    assert totals(mixed) == pytest.approx([-7.0, -0.9, -6.9])


def test_a_rule_that_nothing_fulfils_at_first_counts_when_something_does() -> None:
    parts = [part("rule", scaling="zscore"), part("other", only_if="rule >= 1", scaling="zscore")]
    memory, means = ScalingState(), []
    for right in (0.0, 0.5, 1.0):
        given = columns(rule=[right, 0.0], other=[1.0, 0.0])
        given[1]["other"] = GATE_CLOSED
        given[0]["other"] = Score(1.0) if right else GATE_CLOSED
        mixed = mix(parts, rollouts(2), given, "validation", memory)
        memory = mixed.state
        means.append(fmean(v for v in totals(mixed) if v is not None))
    assert means == pytest.approx([0.0, 0.25, 0.5])


@pytest.mark.parametrize("scaling", ["zscore", "group"])
def test_rounding_of_equal_scores_is_no_spread(scaling: str) -> None:
    given = columns(a=[20.000001, 20.000002, 20.000001, 20.000002])
    mixed = mix([part("a", scaling=scaling)], rollouts(4, 4), given, "train", ScalingState())
    assert totals(mixed) == [0.0] * 4


def test_steps_on_a_curve_take_its_slope_where_the_score_lies() -> None:
    given = columns(a=[0.001])
    steps = (PlacedReward(1, 5.0), PlacedReward(2, -4.999))
    given[0]["a"] = Score(0.001, steps=steps)
    score = mix([part("a", scaling="sigmoid")], rollouts(1), given, "train", ScalingState()).scores[
        0
    ]
    assert [s.value for s in score.steps] == pytest.approx([1.25, -1.25], abs=1e-3)


def test_a_value_put_in_for_want_of_a_verdict_teaches_nothing_and_stays_marked() -> None:
    given = columns(a=[1.0, 3.0, 100.0])
    given[2]["a"] = Score(100.0, imputed="batch mean")
    mixed = mix([part("a", scaling="zscore")], rollouts(3), given, "train", ScalingState())
    assert mixed.state.running["a"].count == 2
    assert not mixed.scores[2].judged and mixed.scores[0].judged


def test_steps_are_scaled_with_their_part() -> None:
    parts = [part("a", 0.5, "affine", mean=1.0, std=4.0), part("b", 0.5)]
    given = columns(a=[5.0], b=[1.0])
    given[0]["a"] = Score(5.0, steps=(PlacedReward(2, 4.0),))
    given[0]["b"] = Score(1.0, steps=(PlacedReward(1, 1.0, "token"),))
    score = mix(parts, rollouts(1), given, "train", ScalingState()).scores[0]
    assert score.value == pytest.approx(1.0)
    assert score.steps == (PlacedReward(2, 0.5), PlacedReward(1, 0.5, "token"))
    given[0]["c"] = Score.failed("timeout")
    parts.append(part("c", -1.0, on_failure="renormalise"))
    score = mix(parts, rollouts(1), given, "train", ScalingState()).scores[0]
    assert score.value == pytest.approx(2.0)
    assert score.steps == (PlacedReward(2, 1.0), PlacedReward(1, 1.0, "token"))


def test_reports_of_a_part_are_kept_below_its_name() -> None:
    given = columns(model=[1.0])
    inner = {"model": Part(1.0, 1.0), "model.honesty": Part(0.3, None), "tone": Part(0.1, None)}
    given[0]["model"] = Score(1.0, reason="fine", parts=inner, info={"seconds": 2})
    score = mix([part("model")], rollouts(1), given, "train", ScalingState()).scores[0]
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
