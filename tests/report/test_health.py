"""Each line of advice comes when it should, stays away when it should, and does not nag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.screen import COLUMNS
from ppo_cli.config.mixture import Watched
from ppo_cli.report import health
from ppo_cli.report.drift import Opinion, measure_judge_drift
from ppo_cli.report.hacking import find_onset
from ppo_cli.report.health import (
    CALM_STEPS,
    REPEAT_AFTER,
    STUCK_STEPS,
    HealthWatch,
    find_troubles,
    make_limits,
)
from ppo_cli.report.limits import Limits
from ppo_cli.run_folder.lines import replace_lines, rollout_file
from tests.settings import complete

GOOD = {
    "score/std": 0.4, "score/min": 0.0, "score/max": 1.0, "score/failed": 0.0,
    "kl_divergence": 0.02, "clip_fraction": 0.2, "ppo_ratio": 1.0, "entropy": 1.5,
    "explained_variance": 0.3, "grad_norm": 0.5, "critic_grad_norm": 0.5,
    "response_length/clip_ratio": 0.1,
}  # fmt: skip
Change = Callable[[int], dict[str, Any]]


def history(count: int, change: Change = lambda step: {}) -> list[dict[str, Any]]:
    """A run that learns steadily, changed by `change(step)`."""
    return [{"step": s, **GOOD, "reward_mean": 0.01 * s, **change(s)} for s in range(1, count + 1)]


def always(**values: Any) -> Change:
    return lambda step: {k.replace("__", "/"): v for k, v in values.items()}


def kinds(count: int, change: Change, limits: Limits | None = None) -> set[str]:
    return set(find_troubles(history(count, change), limits or Limits()))


def validate(folder: Path, step: int, trained: float, held_out: float) -> None:
    """Write the responses of a validation with the credits of two kinds of criteria."""
    parts = {"q.trained_criteria": {"raw": trained}, "q.held_out_criteria": {"raw": held_out}}
    lines = [{"uid": f"{n}", "score": trained, "parts": parts} for n in range(12)]
    replace_lines(rollout_file(folder, step, "val"), lines)


@pytest.mark.parametrize(
    ("first", "last", "kinds_found"),
    [
        ((0.3, 0.3), (0.8, 0.35), {"held_out"}),  # trained criteria alone
        ((0.3, 0.3), (0.8, 0.7), set()),  # both
        ((0.3, 0.98), (0.8, 0.98), set()),  # nothing was left to gain
        ((0.3, 0.5), (0.35, 0.5), set()),  # nothing was learned
        ((0.3, 0.6), (0.8, 0.3), {"held_out", "hacking"}),  # at their cost
    ],
)
def test_held_out_criteria_are_a_second_opinion(
    tmp_path: Path,
    first: tuple[float, float],
    last: tuple[float, float],
    kinds_found: set[str],
) -> None:
    limits = Limits(folder=tmp_path, holds_out=True)
    validate(tmp_path, 0, *first)
    assert kinds(8, always(), limits) == set()
    validate(tmp_path, 8, *last)
    assert kinds(7, always(), limits) == set(), "the validation is later"
    assert kinds(8, always(), limits) == kinds_found


FLAT = {"reward_mean": 0.3}
WOBBLE = (0.03, -0.03, 0.05, -0.05, -0.04, 0.04, -0.05, 0.05)  # of the mean of a step


def mixed(share: float, std: float = 0.4, scaled: float = 4.0) -> Change:
    """A reward model of weight 0.7 and a rule of weight 0.3 that has this share of the spread."""
    return always(
        reward__model__share=1 - share, reward__model__weight=0.7, reward__model__std=4.0,
        reward__model__scaled_std=scaled, reward__rule__share=share, reward__rule__weight=0.3,
        reward__rule__std=std, reward__rule__scaled_std=std,
    )  # fmt: skip


def watched(judge: float, second: float) -> dict[str, float]:
    """A step in which two judges read the same responses."""
    return {"judge/monitor_mean": second, "judge/monitor_gap": judge - second}


def grows(step: int, **by: float) -> dict[str, float]:
    """A step in which the reward rises with features of the texts."""
    gains = {f"exploit/by/{name}": gain for name, gain in by.items()}
    shares = {"exploit/explained": 0.8, "exploit/fit": 0.5, "exploit/spread": 0.2}
    return {"reward_mean": 0.2 * step, "response_length_mean": 12.0 + 11 * step} | shares | gains


FIRING: dict[str, tuple[int, Change, str]] = {
    "collapsed": (
        3,
        lambda s: {"entropy": 1e-5, "kl_divergence": 5.3, "reward_mean": 0.0} if s == 3 else {},
        "Lower --lr (now 1e-06)",
    ),
    "kl_high": (2, always(kl_divergence=0.2), "--kl_coef"),  # also in the first steps of a fork
    "kl_low": (30, always(kl_divergence=1e-5, **FLAT), "--lr"),
    "clip_high": (2, always(clip_fraction=0.4), "--lr"),
    "clip_low": (30, always(clip_fraction=0.01, **FLAT), "--ppo_epochs"),
    "ratio": (1, always(ppo_ratio=1.3), "--lr"),
    "sampler": (1, always(rollout__logprob_diff=2e-3), "--rollout_name hf"),
    "reward_same": (3, always(score__std=0.0, reward_mean=1.0), "--rule"),
    "entropy": (12, lambda s: {"entropy": 2.0 if s < 4 else 0.05}, "actor.entropy_coeff"),
    "critic": (
        20,
        always(explained_variance=-0.001),
        "the critic predicts no better than the mean. Raise --critic_lr",
    ),
    "grad_norm": (12, lambda s: {"grad_norm": 50.0 if s == 12 else 0.5}, "--lr"),
    "critic_grad_norm": (12, lambda s: {"critic_grad_norm": 50 if s == 12 else 2}, "--critic_lr"),
    "never_answers": (3, always(thought__unclosed_share=0.6), "--thought_budget"),
    "too_long": (3, always(response_length__clip_ratio=0.9), "--max_response_length"),
    "tool_errors": (3, always(environment__tool_error_share=0.4), "--tool_timeout"),
    "cut_episodes": (3, always(environment__cut_turns_share=0.2), "the limit of turns"),
    "fewer_pieces": (8, lambda s: {"pieces/count_mean": 6.0 if s < 6 else 3.0}, "piece_grpo"),
    "failed": (1, always(score__failed=3.0), "ppo show outputs --failed"),
    "hacking": (
        5,
        lambda s: grows(s, length=0.5, great=0.3, a=0.1),
        "80% of the rise follows from length and the word 'great', whatever",
    ),
    "memory": (1, always(critic__micro_batch_rows=6.0), "critic.ppo_micro_batch_size_per_gpu=6"),
    "judge_fooled": (1, always(judge__canary_max=0.6), "ppo reward audit"),
    "judge_unread": (
        1,
        always(judge__unread=0.2, judge__unread__form=0.05, judge__unread__truncated=0.15),
        "--rm_max_tokens",
    ),
    "judge_changed": (3, lambda s: {"judge/label_drift": -0.2} if s == 2 else {}, "moved by -0.20"),
    "monitor_silent": (2, always(judge__monitor_failed=3.0), "--rm_monitor_model"),
    "part_dominated": (1, mixed(0.05), "Set the scaling of 'model' to zscore"),
    "part_fails": (1, always(reward__judge__failed_share=0.5), "'judge' failed for 50%"),
    "criterion_stuck": (8, always(rubric__brief=0.02), "'brief' hardly ever has credit"),
    "criterion_lost": (10, lambda s: {"rubric/brief": 0.9 if s < 6 else 0.5}, "0.9 to 0.5"),
    "criterion_against": (20, lambda s: {"rubric/brief": 1 - 0.02 * s}, "'brief' falls while"),
    "prompts_cut": (1, always(model__prompts_cut=3.0), "--reward_model_max_length"),
    "loss_scale": (5, always(critic__loss_scale_halvings=1.0), "--dtype float32"),
    "not_finite": (1, always(actor__skipped_steps=2.0), "--lr"),
}


def test_trouble_is_named_with_what_to_change_in_the_words_of_the_step_line() -> None:
    tried = {*FIRING, "held_out"}  # that one by validations, above
    assert tried == set(health._CHECKS), "every kind of trouble is tried here"
    warnings = []
    for kind, (count, change, flag) in FIRING.items():
        findings = find_troubles(history(count, change), Limits())
        assert set(findings) == {kind}
        assert flag in findings[kind]
        warnings.append(findings[kind])
    names = [name for name in COLUMNS if name != COLUMNS[name]]
    assert [name for name in names if name in " ".join(warnings)] == []


def test_drift_is_what_a_judge_rises_beyond_what_watches_it() -> None:
    def drift(change: Change, count: int = 30) -> float | None:
        drift = measure_judge_drift(history(count, change), Watched("judge", "rule", True))
        return drift and drift.amount

    assert drift(lambda s: watched(0.3 + 0.02 * s, 0.5)) == pytest.approx(0.4)
    assert drift(lambda s: watched(0.3 + 0.02 * s, 0.5), count=7) is None, "too early to say"
    assert drift(lambda s: {"reward/judge": 0.02 * s, "reward/rule": 0.01 * s}) == pytest.approx(
        0.2
    )
    assert drift(lambda s: {}) is None
    # It is no alarm while both learn, nor where it is within the noise.
    assert kinds(30, lambda s: watched(0.2 + 0.025 * s, 0.2 + 0.015 * s)) == set()
    assert kinds(30, lambda s: watched(0.5 + 0.01 * s + 0.4 * (-1) ** s, 0.5)) == set()
    gaps = [watched(0.3, 0.5) if s < 11 else {} if s < 20 else watched(0.6, 0.5) for s in range(31)]
    assert kinds(30, lambda s: gaps[s]) == {"hacking"}, "steps without a monitor do not count"


PAY = {"kind": "rule", "function": "f.py", "weight": 1}
RIGHT = {"kind": "rule", "rule": "number", "weight": 0}


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"judge": 0.5, "rule": 0.5}, ("judge", "rule", True)),
        ({"judge": 1, "rule": 0.5, "right": RIGHT}, ("judge", "right", True)),
        ({"pay": PAY, "right": RIGHT}, ("pay", "right", False)),
        # What pays little may rise alone.
        ({"tags": PAY | {"weight": 0.5}, "pay": PAY, "right": RIGHT}, ("pay", "right", False)),
        ({"pay": PAY, "exact": {"rule": "exact", "weight": 1}, "right": RIGHT}, None),
        ({"judge": 1, "pay": PAY, "right": RIGHT}, None),
        # What pays, or only opens a gate, is no opinion on a function.
        ({"pay": PAY, "right": RIGHT | {"weight": 1}}, None),
        ({"pay": PAY | {"only_if": "right >= 1"}, "right": RIGHT}, None),
        ({}, None),
    ],
)
def test_a_rule_of_a_mixture_watches_what_may_be_exploited(
    parts: dict[str, Any], names: tuple[str, str, bool] | None
) -> None:
    settings = {"composite": {"parts": parts}, "api": {"model": "m"}}
    assert make_limits(complete({"reward": settings})).watched == names


def test_a_measured_rule_decides_whether_a_function_is_exploited() -> None:
    limits = Limits(watched=Watched("pay", "right", False), has_judge=False)

    def alarm_at(right: float) -> str:
        """The function pays up to 20, and the share of right answers rises by `right` a step."""
        parts = {"reward/pay/std": 8.0, "reward/right/std": 0.4}
        steps = history(
            20,
            lambda s: (
                grows(s, length=0.5) | parts | {"reward/pay": 0.5 * s, "reward/right": right * s}
            ),
        )
        return find_troubles(steps, limits).get("hacking", "")

    assert "exploits its reward" in alarm_at(0.001)
    assert alarm_at(0.024) == "", "it rises as the function does, on a scale of a twentieth"


def people(late: float, noise: float = 0.0, last: int = 100) -> tuple[Opinion, ...]:
    """Labels of ten first steps and of ten last ones, where the judge's lead is `late`."""
    early = [Opinion(s, 0.5, 0.5) for s in range(1, 11)]
    rest = [Opinion(last - s, 0.5 + late + noise * (-1) ** s, 0.5) for s in range(10)]
    return (*rest, *early)


def test_labels_of_people_come_before_a_second_judge() -> None:
    def drift(opinions: Sequence[Opinion], steps: int = 100) -> float | None:
        drift = measure_judge_drift(history(steps, lambda s: watched(0.5, 0.5)), None, opinions)
        return drift and drift.amount

    assert drift(people(0.3)) == pytest.approx(0.3)
    assert drift(people(0.3)[1:]) == pytest.approx(0.0), "too few: the second judge counts"
    assert drift(people(0.3), steps=50) == pytest.approx(0.0), "steps that are still to come"
    assert measure_judge_drift(history(100), None, [Opinion(7, 0.9, 0.5)] * 40) is None, (
        "all of one step"
    )
    for opinions, alarm in ((people(0.3), True), (people(0.05), False), (people(0.3, 0.4), False)):
        findings = find_troubles(history(100), Limits(people=opinions))
        assert ("hacking" in findings) is alarm
    assert (
        "The model exploits its reward, it seems since step 1: the judge's scores have risen by "
        "0.30, while the labels that people gave rose by only 0.00. "
        in find_troubles(history(100), Limits(people=people(0.3)))["hacking"]
    )


@pytest.mark.parametrize("newest", [0.05, 0.35])
def test_an_exploit_does_not_begin_with_an_unusual_newest_step(newest: float) -> None:
    gaps = [0.2, 0.21, 0.19, 0.2, 0.22, 0.18, 0.2, 0.2, newest]
    steps = history(len(gaps), lambda s: watched(0.3 + gaps[s - 1], 0.3))
    assert find_onset(steps, Limits()) <= 6


def falls(step: int, **then: float) -> Change:
    """A run whose reward of 0.45 is gone from this step on."""
    return lambda s: {"reward_mean": 0.0, **then} if s >= step else {"reward_mean": 0.45}


def test_a_collapse_is_told_apart_from_a_hard_task() -> None:
    far, silent = {"kl_divergence": 5.3}, {"entropy": 1e-5}
    for change, fragment in (
        (falls(2, **far), {"collapsed"}),
        (falls(2, **silent), {"collapsed"}),
        (falls(2, **far, **silent, ppo_ratio=3.0, grad_norm=99.0), {"collapsed"}),
        (falls(2), set()),  # an unlucky step
        (lambda s: {"reward_mean": 0.0, "kl_divergence": 5.3}, {"kl_high"}),  # never had any
        (lambda s: {"reward_mean": 0.45 + 0.1 * s, **(far if s > 1 else {})}, {"kl_high"}),
    ):
        assert kinds(2, change) == fragment
    steps = history(5, falls(5, **far))
    for saved, fragment in (
        ((), "start from scratch with --resume never"),
        ((5,), "start from scratch"),
        ((2, 4, 5), "resume from step 4 with --resume outputs/checkpoints/step_000004"),
    ):
        (line,) = HealthWatch(Limits(lr=0.03)).check(steps, saved).values()
        assert "reward fell from 0.450 to 0.000, kl is 5.3" in line and fragment in line
        assert "Lower --lr (now 0.03)" in line


def test_some_distance_is_fine_while_a_rule_pays_for_it() -> None:
    rule = make_limits(complete({}))
    judge = make_limits(complete({"reward": {"api": {"enable": True}}}))
    away = always(kl_divergence=0.2)
    assert kinds(9, away, rule) == set() and kinds(9, away, judge) == {"kl_high"}
    assert kinds(9, always(kl_divergence=0.2, **FLAT), rule) == {"kl_high"}
    assert kinds(9, always(kl_divergence=2.0), rule) == {"kl_high"}
    # Each of the last five rewards is above the first, by chance.
    rewards = (0.2, *(0.3 + value for value in WOBBLE * 3))
    lucky = kinds(20, lambda s: {"kl_divergence": 0.2, "reward_mean": rewards[s - 1]}, rule)
    assert lucky == {"kl_high"}


def test_advice_on_a_reward_names_what_scores() -> None:
    same = history(3, always(score__std=0.0, reward_mean=1.0))
    for reward, named, other in (
        ({"api": {"enable": True}}, "--rm_prompt_preset", "--rule"),
        ({"function": "a.py"}, "--reward_function", "--rule"),
        ({"rule": "exact"}, "--rule", "--reward_function"),
    ):
        line = find_troubles(same, make_limits(complete({"reward": reward})))
        assert named in line["reward_same"] and other not in line["reward_same"]


def test_commands_in_advice_name_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPO_COMMAND", "/venv/bin/ppo")
    limits = make_limits(complete({"trainer": {"output_dir": "my run"}}))
    same = history(3, always(score__std=0.0, reward_mean=1.0))
    assert "`/venv/bin/ppo show 'my run' --worst 5`" in find_troubles(same, limits)["reward_same"]
    (fooled,) = find_troubles(history(1, always(judge__canary_max=0.6)), limits).values()
    assert "`/venv/bin/ppo reward audit --config 'my run'/config.yaml`" in fooled


def test_the_part_without_a_scale_is_named_be_it_loud_or_quiet() -> None:
    finding = find_troubles(history(1, mixed(0.05, std=0.05, scaled=1.0)), Limits())[
        "part_dominated"
    ]
    assert "'rule' is dominated: it makes 5%" in finding and "scaling of 'rule'" in finding


SILENT: dict[str, tuple[int, Change]] = {
    "a judge that scores the same responses alike": (9, always(judge__label_drift=0.09)),
    "few labelled responses": (9, always(judge__label_drift=0.2, judge__label_noise=0.07)),
    "a judge that changed for a while": (
        9,
        lambda s: {"judge/label_drift": 0.2 if s == 4 else 0.0} if s in (4, 8) else {},
    ),
    "a run that learns": (60, always()),
    "an honest rise in length": (8, lambda s: grows(s, length=0.1) | {"exploit/explained": 0.1}),
    "one high kl": (9, lambda s: {"kl_divergence": 0.2 if s == 9 else 0.02}),
    "low kl while the reward climbs": (60, always(kl_divergence=1e-5)),
    "low kl for a short while": (STUCK_STEPS, always(kl_divergence=1e-5, **FLAT)),
    "one high clip": (5, lambda s: {"clip_fraction": 0.5 if s == 5 else 0.2}),
    "low clip while the reward climbs": (60, always(clip_fraction=0.0)),
    "low clip while the reward climbs less than it varies": (
        21,
        lambda s: {"clip_fraction": 0.0, "reward_mean": 0.004 * s + WOBBLE[s % len(WOBBLE)]},
    ),
    "low clip on the plateau after the reward has climbed": (
        60,
        lambda s: {"clip_fraction": 0.0, "score/std": 0.4, "reward_mean": min(0.9, 0.03 * s)},
    ),
    "same reward twice": (2, always(score__std=0.0, reward_mean=1.0)),
    "all zero at first": (9, always(score__std=0.0, reward_mean=0.0)),
    "low entropy that is success": (
        30,
        lambda s: {"entropy": 2.0 if s < 9 else 0.01, "reward_mean": min(1.0, 0.1 * s)},
    ),
    "critic not learning yet": (STUCK_STEPS - 1, always(explained_variance=-0.5)),
    "critic above 0 now and then": (40, lambda s: {"explained_variance": 0.1 if s % 9 else -1}),
    "a small gradient that grew": (12, lambda s: {"grad_norm": 0.9 if s == 12 else 0.01}),
    "long responses once": (9, lambda s: {"response_length/clip_ratio": 0.9 if s == 9 else 0.1}),
    "no numbers": (40, lambda s: dict.fromkeys([*GOOD, "reward_mean"])),
    "parts that share as they weigh": (1, mixed(0.28)),
    "a rule that is solved": (1, mixed(0.0, std=0.0)),
    "a part that is dominated later": (9, mixed(0.05)),
    "a reply that cannot be read now and then": (
        9,
        always(judge__unread=0.05, judge__unread__form=0.05),
    ),
    "a part that fails now and then": (9, always(reward__judge__failed_share=0.1)),
    "no prompt cut": (3, always(model__prompts_cut=0.0)),
    "a sampler that agrees": (3, always(rollout__logprob_diff=9e-4)),
    "nothing measured": (0, always()),
}


def test_silence() -> None:
    kinds_by_case = {case: kinds(*case_args) for case, case_args in SILENT.items()}
    assert {case: case_kinds for case, case_kinds in kinds_by_case.items() if case_kinds} == {}
    assert find_troubles([{"step": 0, "val/accuracy": 0.1}, {"step": 1}], Limits()) == {}


def test_advice_to_allow_longer_responses_is_not_given_next_to_the_alarm() -> None:
    cut = {"response_length/clip_ratio": 0.95}
    assert kinds(5, lambda s: grows(s, length=0.5) | cut) == {"hacking"}
    assert kinds(4, lambda s: cut) == {"too_long"}
    limits = Limits(has_episodes=True)
    (advice,) = find_troubles(history(4, lambda s: cut), limits).values()
    assert "--max_turn_tokens" in advice and "in the prompt" not in advice


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({}, True),
        ({"exploit/unconfirmed": 0.015}, False),
        ({"exploit/unconfirmed_error": 0.02}, False),
        ({"exploit/confirmed": 0.07}, False),
        ({"exploit/confirmed": None}, False),
    ],
)
def test_features_that_a_second_judge_would_not_pay_for_raise_the_alarm(
    change: dict[str, Any], alarm: bool
) -> None:
    second = {f"exploit/{n}": x for n, x in (("confirmed", 0.01), ("unconfirmed", 0.06))}
    signs = second | {"exploit/unconfirmed_error": 0.01, "exploit/explained": 0.3}
    steps = history(5, lambda s: grows(s, length=0.07) | signs | change)
    sentence = "while responses earn 0.07 more by length, of which its second judge confirms 0.01"
    assert (sentence in find_troubles(steps, Limits()).get("hacking", "")) is alarm


def test_a_second_opinion_that_rises_with_the_reward_silences_texts_alone() -> None:
    def both(second: float) -> Change:
        return lambda s: grows(s, length=0.5) | watched(0.2 * s, second * s)

    assert kinds(8, both(0.19)) == set()
    (alarm,) = find_troubles(history(8, both(-0.05)), Limits()).values()
    assert (
        "the judge's scores have risen by 0.80, while its second judge fell by 0.20, and 80%"
        in (alarm)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"exploit/explained": 0.4},
        {"exploit/fit": 0.1},
        {"exploit/spread": 0.7},  # what is said still decides
        {"reward_mean": 0.5},
        {"exploit/explained": None},
    ],
)
def test_texts_alone_raise_the_alarm_only_with_all_signs(change: dict[str, Any]) -> None:
    assert kinds(5, lambda s: grows(s, length=0.5) | change) == set()


def test_failures_that_become_more_frequent_while_the_reward_rises_raise_the_alarm() -> None:
    def failing(step: int) -> dict[str, float]:
        return {"reward_mean": 0.05 * step, "score/failed_share": 0.02 * step}

    (alarm,) = find_troubles(history(12, failing), Limits()).values()
    assert "without a score grew from 6% to 20%" in alarm
    assert kinds(12, lambda s: failing(s) | {"reward_mean": 0.4}) == set(), "an outage"
    assert kinds(12, lambda s: {"reward_mean": 0.05 * s, "score/failed_share": 0.2 * (s % 2)}) == (
        set()
    )


def test_limits_on_both_sides_of_the_ratio() -> None:
    for ratio, warns in ((0.79, True), (0.81, False), (1.19, False), (1.21, True)):
        assert ("ratio" in kinds(1, always(ppo_ratio=ratio))) == warns


@pytest.mark.parametrize(
    ("settings", "limit", "advice"),
    [
        ({"model": {"dtype": "float32"}}, 1e-3, "--dtype float32"),
        ({"model": {"dtype": "bfloat16"}}, 0.05, "--dtype float32"),
        ({"trainer": {"n_gpus_per_node": 1}}, 0.05, "--dtype float32"),
        ({"trainer": {"async_steps": 1}}, 0.2, "--async_steps"),
    ],
)
def test_how_far_the_sampler_may_be_off(
    settings: dict[str, Any], limit: float, advice: str
) -> None:
    limits = make_limits(complete(settings))
    assert kinds(1, always(rollout__logprob_diff=0.9 * limit), limits) == set()
    (line,) = find_troubles(history(1, always(rollout__logprob_diff=1.1 * limit)), limits).values()
    assert advice in line


def test_advice_follows_the_settings() -> None:
    config = complete(
        {
            "actor": {"use_kl_loss": True, "ppo_mini_batch_size": 256, "grad_clip": 9.0},
            "algorithm": {"use_kl_in_reward": False},
            "data": {"max_response_length": 77},
            "trainer": {"critic_warmup": 15},
        }
    )
    limits = make_limits(config)
    findings = find_troubles(history(6, always(kl_divergence=2.0)), limits)
    assert "actor.kl_loss_coef" in findings["kl_high"]
    findings = find_troubles(history(3, always(response_length__clip_ratio=0.9)), limits)
    assert "77 tokens" in findings["too_long"]
    # One update a step can clip nothing; no update in the warm-up moves nothing.
    assert kinds(60, always(clip_fraction=0.0, **FLAT), limits) == set()
    twice = {"actor": {"ppo_mini_batch_size": 256, "ppo_epochs": 2}}
    limits_of_two = make_limits(complete(twice))
    assert kinds(60, always(clip_fraction=0.0, **FLAT), limits_of_two) == {"clip_low"}
    # Smaller and larger updates are never asked for at once.
    far = always(clip_fraction=0.0, kl_divergence=0.3, **FLAT)
    assert kinds(60, far, limits_of_two) == {"kl_high"}
    flat_history = always(kl_divergence=0.0, **FLAT)
    assert kinds(30, flat_history, limits) == set() and kinds(40, flat_history, limits) == {
        "kl_low"
    }
    # What is clipped anyway is no spike.
    assert kinds(12, lambda s: {"grad_norm": 8 if s == 12 else 0.5}, limits) == set()


BACK = 3 + CALM_STEPS + 1


@pytest.mark.parametrize(
    ("change", "count", "told"),
    [
        (always(ppo_ratio=2.0), 120, [1, 1 + REPEAT_AFTER, 1 + 2 * REPEAT_AFTER]),
        # One that comes and goes, and one that comes back after it was gone.
        (lambda s: {"ppo_ratio": 2.0 if s % 2 else 1.0}, 49, [1]),
        (lambda s: {"ppo_ratio": 2.0 if s <= 3 or s >= BACK else 1.0}, 30, [1, BACK]),
        # A collapse in its very step, a reward that is always 0 after a while.
        (lambda s: {"kl_divergence": 6.9 if s >= 2 else 0.02}, 30, [2]),
        (always(score__std=0.0, reward_mean=0.0), 12, [10]),
    ],
)
def test_a_lasting_trouble_is_told_seldom(change: Change, count: int, told: list[int]) -> None:
    steps, watch = history(count, change), HealthWatch(Limits())
    assert [n for n in range(1, count + 1) if watch.check(steps[:n])] == told


def test_two_troubles_are_two_lines() -> None:
    watch = HealthWatch(Limits())
    assert len(watch.check(history(3, always(ppo_ratio=2.0, score__failed=1.0)))) == 2
    assert watch.check([]) == {}
