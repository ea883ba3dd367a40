"""What is told of a judge in training: metrics of a step, worthless replies, a second judge."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Rollout
from ppo_cli.report import health
from ppo_cli.rewards.judge.calls import JudgeError, Question, Scale, Usage
from ppo_cli.rewards.judge.client import Counters
from ppo_cli.rewards.judge.costs import Ledger, SharedLedger, Spending
from ppo_cli.rewards.judge.monitor import Canaries, LabelledCheck, Monitor, call_metrics
from ppo_cli.rewards.judge.prices import Price
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.limits import Limits
from tests.judge_server import JudgeServer
from tests.judge_server.asking import KEYS
from tests.rewards.scoring import number_of, score_all, sum_rollout
from tests.settings import complete_judge
from tests.waiting import wait_until

Make = Callable[..., JudgeReward]
PRICES = "prices:\n  claude:\n    judge-2: {input: 3.0, output: 5.0, cached_input: 1.0}\n"


def measured(reward: JudgeReward, enough: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Metrics added up until there is enough of them: nobody waits for canaries and monitors."""
    total: Counter[str] = Counter()
    wait_until(lambda: total.update(reward.pop_metrics()) or enough(total))
    return dict(total)


def test_rates_of_a_step_come_from_its_counts() -> None:
    metrics = call_metrics(
        Counters(
            calls=16, retried=3, verdicts=4, cached=5, shared=1, refused=2,
            unread=Counter(form=1, truncated=2), errors=Counter(http_503=3, timeout=1),
            latencies=[7.0, 1.0, 2.0, 3.0, 6.0, 5.0, 4.0], concurrency=8, open_seconds=2.5,
        )
    )  # fmt: skip
    expected = {
        "calls": 16, "error_rate": 0.25, "unread": 0.3, "refusals": 2, "retries": 3, "cached": 6,
        "cache_hits": 0.6, "concurrency": 8, "outage_s": 2.5, "errors/http_503": 3,
        "errors/timeout": 1, "unread/form": 0.1, "unread/truncated": 0.2, "latency_p50_s": 4.0,
        "latency_p95_s": 6.7,
    }  # fmt: skip
    assert metrics == pytest.approx({f"judge/{name}": value for name, value in expected.items()})


def test_canaries_are_due_once_in_so_many_steps() -> None:
    canaries = Canaries(every=3)
    due = []
    for step in (1, 3, 3, 2, 4, 6, 3, 6, 9):
        canaries.begin_step(step)
        due.append(canaries.due)
    assert due == [False, True, False, False, False, True, False, False, True]
    never = Canaries(every=0)
    never.begin_step(0)
    assert not never.due


def test_canaries_without_a_verdict_are_counted_once(server: JudgeServer, judge_of: Make) -> None:
    server.score = lambda system, user: 10 if "It is" in user else "no number"
    reward = judge_of(prompt_preset="math", cache="off", canary_every=1)
    reward.begin_step(1)
    assert score_all(reward, [sum_rollout(1)])[0].value == 1.0
    metrics = measured(reward, lambda metrics: metrics.get("judge/canary_failed", 0) >= 4)
    assert metrics["judge/canary_failed"] == 4 and "judge/canary_max" not in metrics
    assert "judge/canary_failed" not in reward.pop_metrics()


@pytest.fixture
def opened() -> Iterator[Make]:
    """Rewards by their settings, closed in the end."""
    with ExitStack() as stack:
        keys = KEYS | {"OTHER_KEY": "k2"}
        yield lambda api, **other: stack.enter_context(
            closing(JudgeReward(api.model_copy(update={"canary_every": 0}), environ=keys | other))
        )


def watched(server: JudgeServer, folder: Path, **changes: object) -> ApiReward:
    """A judge at `openai` whose every response is read at `claude`, too."""
    (folder / "prices.yaml").write_text(PRICES, encoding="utf-8")
    monitor = {
        "type": "claude", "model": "judge-2", "base_url": server.url("claude"),
        "key_env": "OTHER_KEY", "share": 1.0,
    }  # fmt: skip
    usual = {
        "enable": True, "type": "openai", "model": "judge-1", "base_url": server.url("openai"),
        "prompt_preset": "math", "cache": str(folder / "c.sqlite"), "monitor": monitor,
        "price_input": 1.0, "price_output": 2.0, "prices": str(folder / "prices.yaml"),
    }  # fmt: skip
    return complete_judge(**(usual | changes))


def test_a_monitor_is_compared_and_paid_at_its_own_price(
    opened: Make, server: JudgeServer, tmp_path: Path
) -> None:
    times: Counter[str] = Counter()

    def opinion(system: str, user: str) -> int:
        """The same text is given n by the first judge, and 8 - n by the second."""
        times[user] += 1
        number = number_of(user)
        return number if times[user] == 1 else 8 - number

    server.score = opinion
    rollouts = [sum_rollout(number) for number in (1, 2, 3)]
    reward = opened(watched(server, tmp_path))
    reward.attach(tmp_path)
    scores = score_all(reward, rollouts)
    assert [score.value for score in scores] == pytest.approx([0.0, 1 / 9, 2 / 9])
    wait_until(lambda: all(score.facts["monitor"] is not None for score in scores))
    assert [score.facts["monitor"] for score in scores] == pytest.approx([6 / 9, 5 / 9, 4 / 9])
    assert [score.facts["monitor_gap"] for score in scores] == pytest.approx([6 / 9, 4 / 9, 2 / 9])
    metrics = reward.pop_metrics()
    assert metrics["judge/monitor_mean"] == pytest.approx(5 / 9)
    assert metrics["judge/monitor_gap"] == pytest.approx(1 / 9 - 5 / 9)
    assert metrics["judge/monitor_correlation"] == pytest.approx(-1.0)
    assert "judge/monitor_failed" not in metrics
    written = (tmp_path / "judge_calls.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in written.splitlines()]
    paid = [line for line in lines if line["provider"] == "claude"]
    whose = Counter((line["provider"], line["model"]) for line in lines)
    assert whose == {("openai", "judge-1"): 3, ("claude", "judge-2"): 3}
    cost = sum(
        3 * (line["input"] - line["cached_input"]) + line["cached_input"] + 5 * line["output"]
        for line in paid
    )
    assert metrics["judge/monitor_cost_usd"] == pytest.approx(cost / 1e6)
    assert sum(line["usd"] for line in paid) == pytest.approx(cost / 1e6)
    assert metrics["judge/cost_usd"] == pytest.approx(sum(line["usd"] for line in lines))
    assert reward.pop_metrics() == {}
    # Both verdicts are in the cache now; the responses are compared all the same.
    score_all(reward, rollouts)
    second = measured(reward, lambda metrics: "judge/monitor_gap" in metrics)
    assert server.count == 6 and "judge/monitor_cost_usd" not in second


def labelled(count: int = 16) -> list[tuple[Rollout, float]]:
    """Right answers with label 1 and wrong ones with label 0, by turns."""
    texts = [f"It is {n + 1 + n % 2}." for n in range(count)]
    return [(sum_rollout(n, response=text), float(n % 2 == 0)) for n, text in enumerate(texts)]


def held_out(opened: Make, server: JudgeServer, folder: Path, **changes: object) -> JudgeReward:
    monitor = {"labels": "l.jsonl", "labels_every": 3}
    reward = opened(watched(server, folder, monitor=monitor, **changes))
    reward.set_labelled({"l.jsonl": labelled()})
    return reward


def read_at(reward: JudgeReward, step: int) -> dict[str, float]:
    reward.begin_step(step)
    return measured(reward, lambda metrics: "judge/label_failed" in metrics)


@pytest.mark.parametrize("changes", [False, True], ids=["the same judge", "another judge"])
def test_labelled_responses_tell_when_the_judge_behind_a_name_changes(
    opened: Make, server: JudgeServer, tmp_path: Path, changes: bool
) -> None:
    def harsh(system: str, user: str) -> int:
        """Gives 10 to right answers and 1 to others; later 5 and 1."""
        number = number_of(user)
        return (5 if changes and server.count > 20 else 10) if f"is {number + 1}." in user else 1

    server.score = harsh
    reward = held_out(opened, server, tmp_path)
    first = read_at(reward, 1)
    assert first["judge/label_gap"] == first["judge/label_drift"] == 0.0
    assert first["judge/label_correlation"] == pytest.approx(1.0)
    assert (first["judge/calls"], server.count) == (16, 16) and first["judge/cost_usd"] > 0
    reward.begin_step(1)
    reward.begin_step(2)
    state = json.loads(json.dumps(reward.state_dict()))
    reward.close()
    reward = held_out(opened, server, tmp_path)
    reward.load_state_dict(state)
    reward.begin_step(2)
    assert server.count == 16, "a run that goes on has read them before"
    late = read_at(reward, 3)
    assert server.count == 32, "past the cache"
    later = read_at(reward, 6)
    lines = [{"step": step, **metrics} for step, metrics in enumerate((first, late, later), 1)]
    trouble = health.find_troubles(lines, health.Limits())
    if changes:
        assert later["judge/label_drift"] == pytest.approx(0.5 * (4 / 9 - 1))
        assert later["judge/label_gap"] == pytest.approx(later["judge/label_drift"])
        assert "judge_changed" in trouble
    else:
        assert later["judge/label_drift"] == later["judge/label_noise"] == 0.0
        assert trouble == {}


def test_each_labelled_response_is_compared_with_its_own_first_score() -> None:
    """Labels 1, 0, 1, 0; the third response has no verdict at first."""
    readings = (0.5, 0.0, None, 0.2), (0.7, 0.1, 0.9, 0.2), (None,) * 4
    scores = iter([score for reading in readings for score in reading])

    async def judge(rollout: Rollout) -> float:
        if (score := next(scores)) is None:
            raise JudgeError(Failure.UNPARSED, "form", "no number")
        return score

    check = LabelledCheck(labelled(4), judge, Scale(1, 10), every=3)
    first, second, third = (asyncio.run(check.read()) or check.pop_metrics() for _ in readings)
    agreement = second.pop("judge/label_correlation")
    assert agreement == pytest.approx(np.corrcoef([1, 0, 1, 0], [0.7, 0.1, 0.9, 0.2])[0, 1])
    for metrics, failed, gap, moved in (
        (first, 1, (0.7 - 1) / 3, [0.0] * 3), (second, 0, (1.9 - 2) / 4, [0.2, 0.1, 0.0, 0.0])
    ):  # fmt: skip
        output = {
            "failed": failed, "gap": gap, "drift": fmean(moved),
            "noise": pstdev(moved) / len(moved) ** 0.5,
        }  # fmt: skip
        found = {name: metrics[f"judge/label_{name}"] for name in output}
        assert found == pytest.approx(output, abs=1e-9)
    assert third == {"judge/label_failed": 4.0} and check.pop_metrics() == {}


def test_readings_fail_in_silence_and_stay_out_of_validations(
    opened: Make, server: JudgeServer, tmp_path: Path
) -> None:
    server.fail("refusal", times=10**6)
    reward = held_out(opened, server, tmp_path, budget_tokens=3000)
    reward.begin_step(1)
    reward.end_round("validation")
    labelled = reward._labelled
    wait_until(lambda: labelled is not None and labelled._metrics)
    assert "judge/label_failed" not in reward.pop_metrics()
    reward.end_round()
    metrics = reward.pop_metrics()
    assert metrics["judge/label_failed"] == 16 and "judge/label_gap" not in metrics


def test_the_share_of_a_monitor_is_chosen_by_prompt_sample_and_text() -> None:
    def chosen(share: float, rollouts: Sequence[Rollout]) -> list[bool]:
        settings = {"type": "openai", "model": "second", "share": 1.0}
        api = complete_judge(type="openai", model="first", monitor=settings)
        book = Ledger(None, budget_usd=None, budget_tokens=None)
        monitor = Monitor(api, environ=KEYS, ledger=book, cache=None)
        monitor._share = share
        return [monitor.wants(row) for row in rollouts]

    kinds = (
        [sum_rollout(n, response="same") for n in range(1000)],
        [sum_rollout(1, sample=n, response="same") for n in range(1000)],
        [sum_rollout(1, response=f"text {n}") for n in range(1000)],
    )
    for rollouts in kinds:
        assert 200 < sum(chosen(0.25, rollouts)) < 300
        assert chosen(0.25, rollouts) == chosen(0.25, rollouts)
    assert not any(chosen(0.0, kinds[0])) and all(chosen(1.0, kinds[0]))


@pytest.mark.parametrize(("concurrency", "expected_calls"), [(4, 4), (64, 8)])
def test_a_monitor_is_asked_little_at_once_and_never_given_up(
    server: JudgeServer, tmp_path: Path, concurrency: int, expected_calls: int
) -> None:
    api = watched(server, tmp_path, concurrency=concurrency, timeout=7.0, max_rpm=30)
    limits, book = Limits.of(api), Ledger(None, budget_usd=None, budget_tokens=None)
    monitor = Monitor(api, environ=KEYS | {"OTHER_KEY": "k"}, ledger=book, cache=None)
    assert monitor._client is not None
    expected = replace(limits, concurrency=expected_calls, outage_wait=float("inf"))
    assert monitor._client._limits == expected
    assert monitor._patience == 14.0


@pytest.mark.slow
def test_a_monitor_that_does_not_answer_is_counted_and_changes_no_reward(
    opened: Make, server: JudgeServer, tmp_path: Path
) -> None:
    server.fail("refusal", paths=("/v1/messages",), times=1)
    server.fail("hang", paths=("/v1/messages",))
    reward = opened(watched(server, tmp_path, timeout=2.0))
    assert [s.value for s in score_all(reward, [sum_rollout(1), sum_rollout(2)])] == [1.0, 1.0]
    metrics = measured(reward, lambda metrics: metrics.get("judge/monitor_failed", 0) >= 2)
    assert metrics["judge/monitor_failed"] == 2 and "judge/monitor_mean" not in metrics
    assert "judge/monitor_failed" not in reward.pop_metrics()
    assert metrics["judge/calls"] == 2, "the counts of a step are those of the judge that rewards"


def test_the_start_tries_the_monitor(opened: Make, server: JudgeServer, tmp_path: Path) -> None:
    notes: list[str] = []
    reward = opened(watched(server, tmp_path))
    server.fail(503, paths=("/v1/messages",), times=1)
    reward.start([sum_rollout(1).prompt], tell=notes.append)
    assert len(notes) == 1 and "monitoring judge gave no verdict yet" in notes[0]
    server.fail(401, paths=("/v1/messages",), times=1)
    with pytest.raises(RewardError, match=r"monitoring judge cannot be used.*OTHER_KEY"):
        reward.start([sum_rollout(1).prompt])


@pytest.mark.parametrize("key", ["k2", "", "k 2"], ids=["stale", "no", "mangled"])
def test_a_second_judge_that_nobody_asked_for_ends_no_run(
    opened: Make, server: JudgeServer, tmp_path: Path, key: str
) -> None:
    notes: list[str] = []
    monitor = watched(server, tmp_path).monitor.model_copy(update={"required": False})
    api = watched(server, tmp_path, monitor=monitor.model_dump())
    server.fail(401, paths=("/v1/messages",), times=1)
    reward = opened(api, OTHER_KEY=key)
    reward.start([sum_rollout(1).prompt], tell=notes.append)
    assert len(notes) == 1 and "second judge" in notes[0] and "OTHER_KEY" in notes[0]
    assert [s.value for s in score_all(reward, [sum_rollout(1), sum_rollout(2)])] == [1.0, 1.0]
    told_of = reward.pop_metrics()
    assert not {"judge/monitor_mean", "judge/monitor_failed"} & told_of.keys()
    assert reward._monitor is not None and not reward._monitor.wants(sum_rollout(3))
    if key != "k2":
        with pytest.raises(RewardError, match="OTHER_KEY"):
            opened(watched(server, tmp_path), OTHER_KEY=key)


def test_a_guest_counts_for_itself_and_for_the_whole() -> None:
    book = Ledger(Price(1.0, 1.0, None, "test"), budget_usd=0.01, budget_tokens=None)
    shared_ledger = SharedLedger(book, Price(1000.0, 2000.0, None, "test"), "claude", "judge-2")
    question = Question("", "x", "x", Scale(1, 10), max_tokens=1)

    async def send(usage: Usage) -> None:
        reservation = await shared_ledger.reserve(question)
        assert book.reserved_usd == pytest.approx((reservation.tokens - 1) * 1e-3 + 2e-3)
        reservation.settle(usage, "ok")

    with pytest.raises(Interrupted, match="used up"):
        asyncio.run(send(Usage(3, 1)))
    book.budget_usd = 1.0
    asyncio.run(send(Usage(3, 1)))
    assert (
        shared_ledger.pop_spending() == book.total == Spending(1, Usage(3, 1), pytest.approx(0.005))
    )
    assert shared_ledger.pop_spending() == Spending()
