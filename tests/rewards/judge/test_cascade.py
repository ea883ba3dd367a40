"""A cascade of two judges on loopback: who is asked about what, who pays, and what is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.mixture import cheaper_judge, other_judge
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import ConfigError, Interrupted, RewardError
from ppo_cli.records import Score
from ppo_cli.rewards.judge.cascade import CascadeReward, Doubt, fit_correction
from ppo_cli.run_folder.folder import paid_calls
from tests.config.settling import problems, settle
from tests.judge_server import JudgeServer
from tests.judge_server.server import digest
from tests.rewards.scoring import number_of, score_all, sum_rollout
from tests.settings import complete_judge
from tests.waiting import wait_until

Make = Callable[..., CascadeReward]
SMALL_KEY, STRONG_KEY = "sk-small-0123456789abcdef", "sk-strong-0123456789abcdef"


@pytest.fixture
def cheap() -> Iterator[JudgeServer]:
    with JudgeServer(seed=3) as running:
        yield running


@pytest.fixture
def make(judge_of: Make, cheap: JudgeServer) -> Make:
    """Build cascades: the cheaper judge at `cheap` with its own key, the judge at `server`."""

    def build(*, small: dict[str, Any] | None = None, **changes: Any) -> CascadeReward:
        settings = {
            "type": "openai", "model": "small", "base_url": cheap.url("openai"),
            "key_env": "SMALL_KEY", "price_input": 1.0, "price_output": 2.0,
        } | (small or {})  # fmt: skip
        usual = {
            "prompt_preset": "math", "key_env": "STRONG_KEY", "price_input": 10.0,
            "price_output": 20.0, "judges": {"small": settings},
        }  # fmt: skip
        changes["cascade"] = {"model": "small"} | changes.get("cascade", {})
        environ = {"SMALL_KEY": SMALL_KEY, "STRONG_KEY": STRONG_KEY}
        return judge_of(kind=CascadeReward, environ=environ, **(usual | changes))

    return build


def unsure_of(*numbers: int) -> Callable[[str, str], int]:
    """A judge that gives 5 of 10 to the questions about these numbers, and 10 to others."""
    return lambda system, user: 5 if any(f"What is {n} +" in user for n in numbers) else 10


def test_the_judge_is_asked_where_the_cheaper_one_is_unsure(
    make: Make, server: JudgeServer, cheap: JudgeServer, tmp_path: Path
) -> None:
    cheap.score, server.score = unsure_of(2), lambda system, user: 1
    reward = make(name="strict")
    reward.attach(tmp_path)
    sure, unsure = score_all(reward, [sum_rollout(1), sum_rollout(2)])
    assert (sure.value, unsure.value, cheap.count, server.count) == (1.0, 0.0, 2, 1)
    assert sure.info["decided_by"] == "small (openai)" and not sure.info["escalated"]
    assert unsure.info["decided_by"] == "judge-1 (openai)" and unsure.info["escalated"]
    assert (sure.info["cheap_score"], sure.info["judge_calls"]) == (1.0, 1)
    assert unsure.info["cheap_score"] == pytest.approx(4 / 9) and unsure.info["judge_calls"] == 2
    assert unsure.info["cheap_reason"] and "cheap_reason" not in sure.info
    # Each judge got its own key, and both are counted.
    assert {call.key_digest for call in cheap.calls} == {digest(SMALL_KEY)}
    assert {call.key_digest for call in server.calls} == {digest(STRONG_KEY)}
    metrics = reward.pop_metrics()
    counts = {"calls": 3, "cheap_calls": 2, "strong_calls": 1, "escalated": 0.5, "cheap_failed": 0}
    assert {name: metrics[f"judge/{name}"] for name in counts} == counts
    costs = [metrics[f"judge/{judge}_cost_usd"] for judge in ("cheap", "strong")]
    bills = [sum(call["usd"] for call in paid_calls(tmp_path) if call["model"] == model)
             for model in ("small", "judge-1")]  # fmt: skip
    assert costs == pytest.approx(bills) and sum(costs) == pytest.approx(metrics["judge/cost_usd"])
    paid = sum(score.info["cost_usd"] for score in (sure, unsure))
    assert paid == pytest.approx(metrics["judge/cost_usd"]) and reward.pop_metrics() == {}
    assert (tmp_path / "judge_calls_strict.jsonl").exists()
    # Both verdicts are in the cache.
    score_all(make(), [sum_rollout(1), sum_rollout(2)])
    assert (cheap.count, server.count) == (2, 1)
    # Another judge is asked, which makes the score a new one.
    for changes, counts in (({"model": "judge-2"}, (2, 2)), ({"small": {"model": "s2"}}, (3, 2))):
        (newer,) = score_all(make(**changes), [sum_rollout(2)])
        assert not newer.info["cached"] and newer.info["latency_s"] > 0
        assert (cheap.count, server.count) == counts


def test_the_spread_of_votes_or_probabilities_shows_doubt(
    make: Make, server: JudgeServer, cheap: JudgeServer
) -> None:
    votes = iter([9, 9, 10, 2, 9, 10])
    cheap.score = lambda system, user: next(votes)
    calm, torn = (
        score_all(make(small={"votes": 3}), [sum_rollout(number)])[0] for number in (1, 2)
    )
    assert not calm.info["escalated"] and calm.info["cheap_spread"] < 0.06
    assert calm.value == pytest.approx((28 / 3 - 1) / 9)
    assert torn.info["escalated"] and torn.info["cheap_spread"] > 0.15 and torn.value == 1.0
    # A decision endpoint says itself how sure it is.
    cheap.score = lambda system, user: 9
    small = {"mode": "decision", "votes": 2}  # two equal votes, each of them a little unsure
    reward = make(small=small, cascade={"model": "small", "spread": 0.5})
    (score,) = score_all(reward, [sum_rollout(3)])
    assert 0 < score.info["cheap_spread"] < 0.5 and not score.info["escalated"]
    request = json.dumps(cheap.calls[-1].body)
    assert "decision" in cheap.calls[-1].path or "decision" in request
    # It writes nothing, so the request says nothing about the form of an answer.
    assert "from 1 (worst) to 10 (best)" in request and "JSON" not in request


def test_the_noise_of_a_cascade_is_that_of_the_judge(
    make: Make, server: JudgeServer, cheap: JudgeServer
) -> None:
    cheap.score = unsure_of(2)
    levels = iter((1, 1, 4))
    server.score = lambda system, user: next(levels)
    reward = make(noise_responses=2)
    reward.begin_step(1)
    score_all(reward, [sum_rollout(1), sum_rollout(2)])
    metrics = reward.pop_metrics()
    assert metrics["judge/noise"] == pytest.approx(3 / 9 / 3**0.5)
    assert (metrics["judge/noise_responses"], cheap.count, server.count) == (1, 2, 3)


def test_a_cheaper_judge_that_fails_is_unsure(
    make: Make, server: JudgeServer, cheap: JudgeServer
) -> None:
    cheap.fail("refusal", times=2)
    reward = make()
    score, _ = score_all(reward, [sum_rollout(1), sum_rollout(2)])
    assert score.value == 1.0 and score.info["escalated"] and score.info["cheap_score"] is None
    assert "refusal" in score.info["cheap_reason"] or "judge this" in score.info["cheap_reason"]
    metrics = reward.pop_metrics()
    assert (metrics["judge/cheap_failed"], metrics["judge/escalated"]) == (2, 1)
    score_all(reward, [sum_rollout(1, "")])  # without a call, nothing is escalated
    assert reward.pop_metrics()["judge/escalated"] == 0


def test_the_cheaper_score_never_stands_in_for_the_judge(
    make: Make, server: JudgeServer, cheap: JudgeServer
) -> None:
    cheap.score = unsure_of(1)
    server.score = lambda system, user: "no number"
    masked, sure = score_all(make(max_failure_rate=1.0), [sum_rollout(1), sum_rollout(2)])
    assert masked.value is None and masked.failure.startswith("form") and sure.value == 1.0
    assert masked.info["cheap_score"] == pytest.approx(4 / 9) and masked.info["escalated"]
    # Nor is an imputed mean the judge's: it is no pair.
    reward = make(max_failure_rate=1.0, on_failure="batch_mean")
    imputed, sure = score_all(reward, [sum_rollout(1), sum_rollout(2)])
    assert imputed.imputed and imputed.value == 1.0 and reward.state_dict()["pairs"] == []
    # A judge without a verdict is asked again; the cheaper one, whose verdict is there, is not.
    replies = iter(["no number"] * 3 + [1])
    server.score = lambda system, user: next(replies)
    calls = cheap.count
    reward = make(cache="off", max_failure_rate=0.0)
    scores = score_all(reward, [sum_rollout(n) for n in (1, 2)])
    assert [s.value for s in scores] == [0.0, 1.0] and cheap.count == calls + 2


def test_what_a_second_judge_costs_is_not_the_cost_of_the_judge(
    make: Make, server: JudgeServer, cheap: JudgeServer, tmp_path: Path
) -> None:
    (tmp_path / "prices.yaml").write_text("prices: {openai: {watch: {input: 3, output: 5}}}")
    cheap.score = unsure_of(1)
    monitor = {"model": "watch", "base_url": server.url("openai"), "share": 1.0}
    reward = make(monitor=monitor, prices=str(tmp_path / "prices.yaml"))
    reward.attach(tmp_path)
    score_all(reward, [sum_rollout(1)])
    wait_until(lambda: [call["outcome"] for call in paid_calls(tmp_path)] == ["ok"] * 3)
    metrics = reward.pop_metrics()
    bills = {call["model"]: call["usd"] for call in paid_calls(tmp_path)}
    costs = {"small": "cheap", "judge-1": "strong", "watch": "monitor"}
    assert {m: metrics[f"judge/{cost}_cost_usd"] for m, cost in costs.items()} == (
        pytest.approx(bills)
    )


def test_the_judge_is_asked_before_other_cheaper_verdicts_are_in(
    make: Make, server: JudgeServer, cheap: JudgeServer
) -> None:
    cheap.score = unsure_of(1)
    # The second answer of the cheaper judge never comes.
    cheap.fail("hang", after=1)
    reward = make(concurrency=1)
    futures = [reward.submit(sum_rollout(number)) for number in (1, 2)]
    assert futures[0].result(20).value == 1.0 and not futures[1].done()
    assert server.count == 1


def test_both_judges_spend_from_one_budget(
    make: Make, server: JudgeServer, cheap: JudgeServer, tmp_path: Path
) -> None:
    cheap.score = unsure_of(*range(1, 200, 3))
    limit = 0.2
    reward = make(budget_usd=limit, small={"max_tokens": 50}, max_tokens=50)
    reward.attach(tmp_path)
    with pytest.raises(Interrupted, match=r"budget of \$0.2 is used up"):
        score_all(reward, [sum_rollout(number) for number in range(1, 200)])
    reward.close()
    text = (tmp_path / "judge_calls.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["model"] for line in lines} == {"small", "judge-1"}
    assert 0.5 * limit < sum(line["usd"] for line in lines) <= limit
    assert len(lines) == cheap.count + server.count
    with pytest.raises(RewardError, match="further judge's model other, which is not known"):
        make(budget_usd=1.0, cascade={"model": "openai/other"})


def test_empty_replies_are_shown_to_both_judges(
    make: Make, server: JudgeServer, cheap: JudgeServer
) -> None:
    # The cheaper judge is fooled, and its score would count.
    cheap.score, server.score = lambda system, user: 10, lambda system, user: 1
    reward = make(canary_every=1, scoring_prompt="{prompt} {response} Score 1-10.")
    reward.begin_step(1)
    score_all(reward, [sum_rollout(1)])
    wait_until(lambda: cheap.count == 5 and server.count == 4)
    wait_until(lambda: reward.pop_metrics().get("judge/canary_max") == 1.0)


def test_no_key_reaches_a_file(make: Make, server: JudgeServer, tmp_path: Path) -> None:
    server.fail(401, message=f"Incorrect API key provided: {STRONG_KEY}")
    reward = make(cascade={"model": "small", "band": "0-1"})
    reward.attach(tmp_path)
    with pytest.raises(RewardError) as failure:
        reward.start([sum_rollout(1).prompt])
    texts = [str(failure.value), *(f.read_text("utf-8", "replace") for f in tmp_path.glob("*"))]
    assert not any(key in text for text in texts for key in (SMALL_KEY, STRONG_KEY))


def test_settings_that_a_further_judge_does_not_have_are_those_of_the_judge() -> None:
    api = ApiReward.model_validate(
        {
            "type": "openai", "model": "large", "base_url": "http://h/v1", "key_env": "MINE",
            "price_input": 1.0, "price_output": 2.0, "votes": 3, "prompt_preset": "math",
            "budget_usd": 5.0, "cascade": {"model": "small"}, "monitor": {"model": "m"},
            "judges": {"a": {"type": "claude", "model": "c", "votes": 1}, "b": "gemini/g", "c": 5,
                       "d": {"vote": 1, "max_rpm": "x"}, "e": {"type": "claude"}},
        }
    )  # fmt: skip
    small = cheaper_judge(api)
    assert small is not None
    assert (small.model, small.base_url, small.key_env) == ("small", "http://h/v1", "MINE")
    assert (small.votes, small.prompt_preset, small.budget_usd) == (3, "math", 5.0)
    assert small.price_input is None and small.cascade.model is None and not small.monitor.model
    other = other_judge(api, "a")
    assert (other.type, other.model, other.votes) == ("claude", "c", 1)
    assert other.base_url is None and other.key_env is None
    assert other_judge(api, "b").type == "gemini" and other_judge(api, "b").model == "g"
    assert other_judge(api, "Org/model").model == "Org/model"
    for name, problem in {"c": "not a group", "d": "no such setting", "e": "no model"}.items():
        with pytest.raises(ConfigError, match=problem):
            other_judge(api, name)


@pytest.mark.parametrize("changes", [{"mode": "decision"}, {"reasoning": "keep"}, {"place": None}])
def test_with_places_all_judges_score_the_same_pieces(changes: dict[str, Any]) -> None:
    api = complete_judge(place="line", judges={"a": {"model": "s", **changes}})
    with pytest.raises(ConfigError, match=f"judges.a.{next(iter(changes))} differs"):
        other_judge(api, "a")


def test_a_band_has_both_ends_and_a_missing_spread_is_doubt() -> None:
    band = Doubt(band=(0.2, 0.8))
    near = 0.2 - 1e-12, 0.8 + 1e-12  # rounding is no distance
    assert all(band.applies(x, None) for x in near) and Doubt(0.1).applies(1.0, 0.1 - 1e-12)
    assert [band.applies(x, None) for x in (0.19, 0.2, 0.8, 0.81, None)] == [
        False, True, True, False, True,
    ]  # fmt: skip
    spread = Doubt(spread=0.1)
    assert [spread.applies(1.0, x) for x in (0.09, 0.1, None)] == [False, True, True]


@pytest.mark.parametrize(
    ("names", "judge"),
    [
        ("small,gpt-5.1", {"type": "openai", "model": "gpt-5.1"}),
        ("small, claude/claude-opus-4-8", {"type": "claude", "model": "claude-opus-4-8"}),
        ("small,strong", {"type": "gemini", "model": "large", "temperature": 0.5, "votes": 3}),
    ],
)
def test_one_flag_names_both_judges(names: str, judge: dict[str, Any]) -> None:
    judges = "{small: {type: openai, model: s}, strong: {type: gemini, model: large, votes: 3, "
    overrides = [f"reward.api.judges={judges}temperature: 0.5}}}}", "reward.api.enable=true"]
    if judge["type"] == "openai":
        overrides.append("reward.api.type=openai")
    keys = {f"{name}_API_KEY": "key" for name in ("OPENAI", "CLAUDE", "GOOGLE")}
    resolved = settle(f"reward.api.cascade.model={names}", *overrides, env=keys)
    api = resolved.config.reward.api
    assert {name: getattr(api, name) for name in judge} == judge
    assert api.cascade.model == "small"


def test_a_flag_that_names_another_judge_than_the_settings_is_refused() -> None:
    (problem,) = problems("reward.api.cascade.model=a,b", "reward.api.enable=true",
                          "reward.api.model=other")  # fmt: skip
    assert "names b as the judge, but reward.api.model is other" in problem


def test_the_cheaper_score_is_corrected_from_pairs(
    make: Make, server: JudgeServer, cheap: JudgeServer
) -> None:
    """From the second step on, once there are enough pairs; saved and loaded with the run."""

    def level(user: str) -> int:
        return number_of(user) % 4

    # The cheaper judge gives 4 to 7 where the judge gives 1 to 7; it is sure of a 9.
    cheap.score = lambda system, user: 9 if "What is 99 " in user else 4 + level(user)
    server.score = lambda system, user: 1 + 2 * level(user)
    reward, sure = make(), sum_rollout(99)
    reward.begin_step(1)
    first = score_all(reward, [sum_rollout(number) for number in range(60)])
    assert score_all(reward, [sure])[0].value == pytest.approx(8 / 9) and not any(
        score.value is None for score in first
    )
    state = json.loads(json.dumps(reward.state_dict()))
    assert len(state["pairs"]) == 60 and state["correction"] == [1.0, 0.0]
    resumed = make()
    resumed.load_state_dict(state)
    for run in (reward, resumed):
        run.begin_step(2)
        # y = 2 x - 2/3 on [0, 1], cut off at 1.
        assert run.state_dict()["correction"] == pytest.approx([2.0, -2 / 3])
        (corrected,) = score_all(run, [sure], "baseline")
        assert corrected.value == 1.0 and corrected.info["cheap_score"] == pytest.approx(8 / 9)
        # Validations are compared with earlier ones.
        assert score_all(run, [sure], "validation")[0].value == pytest.approx(8 / 9)
    # A run that goes on within a step has the correction of that step.
    later = make()
    later.load_state_dict(reward.state_dict())
    assert later.state_dict() == reward.state_dict()
    assert score_all(later, [sure])[0].value == 1.0
    metrics = reward.pop_metrics()
    assert metrics["judge/cheap_offset"] == pytest.approx(-2 / 3)
    assert metrics["judge/cheap_scale"] == pytest.approx(2.0)
    # The newest pairs count, those of a step by prompt.
    resumed.load_state_dict({"pairs": [(0.0, k / 500) for k in range(500)]})
    score_all(resumed, [sum_rollout(3)], "validation")
    score_all(resumed, [sum_rollout(2), sum_rollout(1)])
    oldest, *_, first_pair, last_pair = resumed.state_dict()["pairs"]
    assert oldest == (0.0, 2 / 500) and len(resumed.state_dict()["pairs"]) == 500
    assert (*first_pair, *last_pair) == pytest.approx((4 / 9, 2 / 9, 5 / 9, 4 / 9))


def test_pieces_share_the_corrected_score_and_criteria_stay(make: Make, tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.json"
    rubric.write_text('[{"text": "It greets."}, {"text": "It insults.", "fault": true}]')
    rows = {"pairs": [(k / 60, 0.2 + k / 120) for k in range(60)]}
    lines, quoted = make(place="line"), make(place="criterion", rubric=str(rubric))
    for reward in (lines, quoted):
        reward.load_state_dict(rows)
        reward.begin_step(2)
    assert quoted.state_dict()["correction"] == (1.0, 0.0)
    score = Score(1.0, info={"pieces": [1.0, 0.5]})
    corrected = lines._correct(lines._correction, score, sum_rollout(1, "One.\nTwo."))
    assert corrected.value == pytest.approx(0.7)
    assert [step.value for step in corrected.steps] == pytest.approx([0.7 * 2 / 3, 0.7 / 3])


def test_a_correction_removes_the_offset_of_a_cheaper_judge() -> None:
    """Simulated: offset +0.08 and noise; what it decides comes near the judge's scores."""
    dice, drawn = random.Random(3), []
    for _ in range(4000):
        quality = dice.betavariate(2, 2)
        strong, cheap = (
            min(max(quality + dice.gauss(offset, noise), 0.0), 1.0)
            for offset, noise in ((0.0, 0.08), (0.08, 0.18))
        )
        drawn.append((cheap, strong))
    unsure = [pair for pair in drawn if Doubt(band=(0.2, 0.8)).applies(pair[0], None)]
    slope, offset = fit_correction(unsure[:500])
    decided = [pair for pair in drawn if pair not in set(unsure)]
    before = sum(cheap - strong for cheap, strong in decided) / len(decided)
    after = sum(
        min(max(offset + slope * cheap, 0.0), 1.0) - strong for cheap, strong in decided
    ) / len(decided)
    assert abs(after) < 0.05 < 0.08 < before
    assert fit_correction(unsure[:49]) == (1.0, 0.0)
    # Without spread it is an offset alone, and not where the judges contradict each other.
    assert fit_correction([(0.5, 0.1)] * 50) == pytest.approx((1.0, -0.4))
    assert fit_correction([(0.0, 1.0), (1.0, 0.0)] * 30) == (1.0, 0.0)
    # By hand: b = 2, e² = (52 * 0.04 / 50) / (52 * 0.01) = 0.08, t² = 0.01; means 0.5 and 0.6.
    noisy = [(x, 2 * x - 0.4 + noise) for x in (0.4, 0.6) for noise in (-0.2, 0.2)] * 13
    assert fit_correction(noisy) == pytest.approx((10 / 9, 0.6 - 5 / 9))


def test_few_pairs_hardly_move_the_sure_scores_of_an_unbiased_judge() -> None:
    """Simulated: 50 pairs in a narrow band, with noise that makes least squares steep or flat."""
    dice, moved = random.Random(5), list[float]()
    for _ in range(100):
        cheap = [dice.uniform(0.4, 0.6) for _ in range(50)]
        slope, offset = fit_correction([(x, x + dice.gauss(0.0, 0.15)) for x in cheap])
        moved += (offset, offset + slope - 1.0)
    assert sum(abs(x) < 0.05 for x in moved) > 0.9 * len(moved) and max(map(abs, moved)) < 0.1
