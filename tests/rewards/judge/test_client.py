"""The client end to end: a loopback judge behind the official SDK, on a real event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.rewards.judge.cache import VerdictCache
from ppo_cli.rewards.judge.calls import JudgeError, Usage, Verdict, worst_case
from ppo_cli.rewards.judge.client import Counters, JudgeClient
from ppo_cli.rewards.judge.costs import Ledger, Reservation
from ppo_cli.rewards.judge.prices import Price
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.limits import QueueSlot
from tests.judge_server import JudgeServer
from tests.judge_server.clients import ask_all, ask_for, free, questions, run

POISON = "poison"


def test_a_key_that_the_judge_sends_back_is_not_passed_on(
    server: JudgeServer, tmp_path: Path, cache: VerdictCache
) -> None:
    key = "for-the-loopback"  # of a variable that `redact` does not know by its name
    written = "".join(f"\\u{ord(char):04x}" for char in key)
    heard = []
    for number, secret in enumerate((key, written)):
        server.score = lambda *_, secret=secret: f'{{"reason": "Bearer: {secret}", "score": 7}}'
        question = ask_for(f"number {number}")
        heard.append(run(server, lambda client: client.ask(question), cache=cache))  # noqa: B023
    cache.close()
    assert [verdict.value for verdict in heard] == [7, 7]
    assert key not in repr(heard)
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"Bearer: ***" in content and key.encode() not in content


def verdicts(answers: list[Any]) -> list[Verdict]:
    assert [a for a in answers if not isinstance(a, Verdict)] == []
    return answers


def asked_texts(server: JudgeServer) -> Counter[str]:
    return Counter(call.body["messages"][-1]["content"] for call in server.calls)


def test_a_third_of_the_calls_failing_loses_nothing(server: JudgeServer) -> None:
    for kind, share in ((500, 0.1), (503, 0.1), ("cut", 0.05), ("html", 0.08)):
        server.fail(kind, share=share)
    server.state.latency = 0.05

    async def work(client: JudgeClient) -> tuple[list[Any], Any]:
        answers = await ask_all(client, questions(100))
        return answers, client.pop_counters()

    answers, counters = run(server, work, concurrency=64)
    assert len(verdicts(answers)) == counters.verdicts == 100
    assert counters.open_seconds == 0.0
    assert sum(counters.errors.values()) > 10
    assert counters.calls == server.count == 100 + sum(counters.errors.values())


@pytest.mark.slow
def test_an_outage_costs_time_but_no_verdict(server: JudgeServer) -> None:
    server.state.latency = 0.3  # or all is over before the judge goes away

    async def work(client: JudgeClient) -> tuple[list[Any], str, Any, Any]:
        tasks = [asyncio.create_task(client.ask(q)) for q in questions(40)]
        await asyncio.wait(tasks[:1])
        await asyncio.to_thread(server.pause)
        down, sentence = time.monotonic(), ""
        while time.monotonic() < down + (1.5 if sentence else 12.0):
            await asyncio.sleep(0.1)
            sentence = client.waiting_for() or sentence
        await asyncio.to_thread(server.resume)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return answers, sentence, client.pop_counters(), client.pop_counters()

    answers, sentence, counters, nothing = run(
        server, work, concurrency=32, timeout=20, deadline=20
    )
    assert len(verdicts(answers)) == 40
    assert server.state.answered <= 72  # with those cut off on their way back
    assert "The judge does not answer (connection" in sentence
    assert counters.open_seconds > 0.3 and counters.concurrency >= 1
    assert nothing == Counters(concurrency=counters.concurrency)


def test_a_poisoned_text_ends_alone(server: JudgeServer) -> None:
    def score(system: str, user: str) -> str | int:
        return "no number" if POISON in user else 7

    server.score = score

    async def work(client: JudgeClient) -> tuple[list[Any], Any]:
        answers = await ask_all(client, [ask_for(POISON), *questions(20)])
        return answers, client.pop_counters()

    (bad, *good), counters = run(server, work, concurrency=4)
    assert isinstance(bad, JudgeError) and bad.kind is Failure.UNPARSED
    assert "(3 calls in " in str(bad)
    assert bad.usage.input > 0
    assert [v.value for v in verdicts(good)] == [7.0] * 20
    assert (counters.unread, counters.verdicts) == ({"form": 3}, 20)
    repeated = [t for t in asked_texts(server) if POISON in t]
    assert len(repeated) == 2 and any("ONE JSON object" in text for text in repeated)


def test_a_cut_answer_gets_more_room_in_request_and_budget(server: JudgeServer) -> None:
    server.fail("truncated", times=2)
    reserved: list[Usage] = []

    class Noting(Ledger):
        async def reserve(self, *args: Any, **kwargs: Any) -> Reservation:
            reserved.append(worst_case(args[0]))
            return await super().reserve(*args, **kwargs)

    ledger = Noting(None, budget_usd=None, budget_tokens=5000)
    verdict = run(server, lambda client: client.ask(ask_for("long")), ledger=ledger)
    rooms = [call.body["max_tokens"] for call in server.calls]
    assert rooms == [worst.output for worst in reserved] == [64, 128, 256]
    assert verdict.calls == 3
    assert reserved[0].input < reserved[1].input  # the reminder


def test_a_refusal_is_final_and_kept(server: JudgeServer, cache: VerdictCache) -> None:
    server.fail("refusal")

    async def work(client: JudgeClient) -> list[Any]:
        twice = [await ask_all(client, [ask_for("no")]) for _ in range(2)]
        return [*twice[0], *twice[1], client.pop_counters()]

    first, second, counters = run(server, work, cache=cache)
    assert first.kind is second.kind is Failure.REFUSED
    assert server.count == 1
    assert (counters.refused, counters.cached, counters.verdicts) == (1, 1, 0)


def test_each_try_may_wait_twice_as_long_as_the_one_before(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[float] = []

    def uniform(low: float, high: float) -> float:
        longest.append(high)
        return low

    monkeypatch.setattr("ppo_cli.rewards.remote.client.random.uniform", uniform)
    server.fail(500, times=6)
    verdicts(run(server, lambda client: ask_all(client, [ask_for("well")])))
    assert longest == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_deadline_ends_a_verdict_only_while_the_judge_answers_others(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_cli.rewards.remote.client.random.uniform", lambda low, high: 0.02)
    server.fail(500, times=4)
    assert run(server, lambda client: client.ask(ask_for("alone")), deadline=0.001).calls == 5

    async def ask_another(client: JudgeClient) -> list[Any]:
        answered_others = asyncio.Event()

        async def back_off(seconds: float) -> None:
            await answered_others.wait()

        monkeypatch.setattr(client._admission, "back_off", back_off)
        call = asyncio.create_task(client.ask(ask_for("one")))
        while not server.count:
            await asyncio.sleep(0.005)
        other = await client.ask(ask_for("other"))
        server.fail(500)
        answered_others.set()
        return [other, *await asyncio.gather(call, return_exceptions=True)]

    server.reset()
    server.fail(500, times=1)
    other, ended = run(server, ask_another, deadline=0.001)
    assert other.calls == 1
    assert isinstance(ended, JudgeError) and ended.cause == "http_500"
    assert "(2 calls in " in str(ended)


def test_a_long_pause_uses_up_a_quarter_of_a_verdicts_time(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_cli.rewards.remote.client.random.uniform", lambda low, high: 500.0)
    server.fail(500, said="stubborn")

    async def ask_others(client: JudgeClient) -> JudgeError:
        async def back_off(seconds: float) -> None:
            await client.ask(ask_for(f"call {server.count}"))

        monkeypatch.setattr(client._admission, "back_off", back_off)
        with pytest.raises(JudgeError) as ended:
            await client.ask(ask_for("stubborn"))
        return ended.value

    assert run(server, ask_others, deadline=400.0).cause == "http_500"
    assert server.state.count - server.state.answered == 4


def test_the_time_of_a_verdict_begins_with_its_first_call(server: JudgeServer) -> None:
    server.state.latency = 0.3

    async def work(client: JudgeClient) -> tuple[list[Any], float]:
        began = time.monotonic()
        return await ask_all(client, questions(3)), time.monotonic() - began

    queued, took = run(server, work, concurrency=1)
    times = [verdict.latency_s for verdict in verdicts(queued)]
    assert sum(times) <= took, "waiting for a place is not in it"
    server.reset()
    server.fail(500, times=2, retry_after=0.2)  # the client draws its pause from 0 on
    tried = run(server, lambda client: client.ask(ask_for("stumbles")))
    assert tried.calls == 3 and tried.latency_s > 0.6, "all its tries are"


def test_tokens_a_minute_are_kept(server: JudgeServer) -> None:
    async def work(client: JudgeClient) -> tuple[list[Verdict], float]:
        began = time.monotonic()
        done = verdicts(await ask_all(client, questions(30)))
        return done, time.monotonic() - began

    done, took = run(server, work, max_tpm=30_000)
    used = sum(v.usage.input + v.usage.output for v in done)
    assert used / took <= 1.3 * 500


def test_a_reply_tells_how_long_the_next_one_may_be(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    async def work(client: JudgeClient) -> list[Verdict]:
        enter = client._admission.enter

        async def note(slot: QueueSlot) -> None:
            counted.append(slot.tokens)
            await enter(slot)

        monkeypatch.setattr(client._admission, "enter", note)
        return [await client.ask(ask_for(text)) for text in ("one", "two")]

    first, _ = run(server, work, max_tpm=100_000)
    assert counted[0] - counted[1] == 64 - first.usage.output


def test_equal_questions_share_one_call(server: JudgeServer, cache: VerdictCache) -> None:
    server.state.latency = 0.1

    async def work(client: JudgeClient) -> tuple[list[Any], Verdict, Verdict, Any]:
        many = await ask_all(client, [ask_for("same")] * 50)
        stored = await client.ask(ask_for("same"))
        vote = await client.ask(ask_for("same", vote=1))
        return many, stored, vote, client.pop_counters()

    paid = Ledger(Price(1.0, 2.0, None, "test"), budget_usd=None, budget_tokens=None)
    many, stored, vote, counters = run(server, work, cache=cache, ledger=paid)
    assert sorted(v.cached for v in verdicts(many)) == [False] + [True] * 49
    assert sum(v.usage.input for v in many) == vote.usage.input
    assert sum(v.calls for v in many) == 1 and sum("shared" in v.info for v in many) == 49
    assert sum(v.cost_usd for v in many) == pytest.approx(vote.cost_usd) != 0.0
    assert stored.cached and not vote.cached
    assert (counters.calls, counters.shared, counters.cached) == (2, 49, 1)
    assert server.count == 2


def test_fresh_verdicts_are_calls_of_their_own(server: JudgeServer, cache: VerdictCache) -> None:

    async def work(client: JudgeClient) -> None:
        await client.ask(ask_for("same"))
        await asyncio.gather(*(client.ask(ask_for("same"), fresh=True) for _ in range(3)))
        await client.ask(ask_for("new"), fresh=True)
        await client.ask(ask_for("new"))

    run(server, work, cache=cache)
    assert server.count == 6


def test_one_asker_may_leave_and_the_last_one_ends_the_call(server: JudgeServer) -> None:
    server.state.latency = 2.0

    async def work(client: JudgeClient) -> Verdict:
        leaving, staying = (asyncio.create_task(client.ask(ask_for("same"))) for _ in range(2))
        alone = asyncio.create_task(client.ask(ask_for("alone")))
        while server.count < 2:
            await asyncio.sleep(0.02)
        for task in (leaving, alone):
            task.cancel()
        gone = await asyncio.gather(leaving, alone, return_exceptions=True)
        assert {type(g) for g in gone} == {asyncio.CancelledError}
        return await staying

    assert run(server, work, concurrency=2).value >= 1


def test_a_slow_call_is_hedged_and_both_are_paid(server: JudgeServer) -> None:
    server.fail("hang", times=1)
    ledger = free()

    async def work(client: JudgeClient) -> tuple[Verdict, Any]:
        return await client.ask(ask_for("slow")), client.pop_counters()

    verdict, counters = run(server, work, ledger=ledger, hedge_after=0.2, timeout=20)
    assert verdict.latency_s < 20.0
    assert counters.calls == verdict.calls == 2
    assert ledger.total.calls == 2
    assert ledger.total.usage.output > 64  # the worst case of the one that was cancelled
    assert ledger.reserved_tokens == 0


def test_a_verdict_counts_the_tokens_of_all_its_tries(server: JudgeServer) -> None:
    replies = iter(["Rather good, I would say.", '{"reason": "As told.", "score": 7}'])
    server.score = lambda *_: next(replies)
    ledger = Ledger(Price(1.0, 2.0, None, "test"), budget_usd=None, budget_tokens=None)
    verdict = run(server, lambda client: client.ask(ask_for("twice")), ledger=ledger)
    assert (verdict.value, verdict.calls) == (7, 2)
    assert verdict.usage == ledger.total.usage
    assert verdict.cost_usd == pytest.approx(ledger.total.usd) != 0.0


def test_a_call_without_usage_is_booked_by_what_the_tokenizer_has_made(server: JudgeServer) -> None:
    ledger = Ledger(None, budget_usd=None, budget_tokens=10**6, model="m")

    async def work(client: JudgeClient) -> None:
        earlier = await ledger.reserve(ask_for("same"))
        earlier.settle(Usage(1000, 1), "ok")
        await client.ask(ask_for("same"))

    server.fail("no_usage")
    run(server, work, ledger=ledger)
    assert ledger.total.usage.input == pytest.approx(2000, abs=1)


@pytest.mark.usefixtures("short_waits")
def test_a_wrong_key_stops_the_run_and_never_masks(server: JudgeServer) -> None:
    server.keys = {"another"}
    answers = run(server, lambda client: ask_all(client, questions(10)), concurrency=4)
    assert {type(answer) for answer in answers} == {Interrupted}
    assert "rejects every request (http_401" in str(answers[0])
    assert server.count <= 4 + 3


@pytest.mark.usefixtures("short_waits")
def test_a_single_fatal_answer_costs_nothing(server: JudgeServer) -> None:
    server.fail(401, times=1, after=5)
    verdicts(run(server, lambda client: ask_all(client, questions(20)), concurrency=4))


def test_closing_waits_for_what_is_paid(server: JudgeServer, cache: VerdictCache) -> None:
    server.state.latency = 0.4

    async def work(client: JudgeClient) -> list[Any]:
        tasks = [asyncio.create_task(client.ask(q)) for q in questions(20)]
        while server.count < 3:
            await asyncio.sleep(0.02)
        await client.close(20.0)
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = run(server, work, cache=cache, concurrency=3)
    kinds = Counter(type(answer) for answer in answers)
    assert kinds == {Verdict: server.count, Interrupted: 20 - server.count}


def test_loop_thread_runs_cancels_and_ends() -> None:
    loop, ended = LoopThread("test-judge"), list[str]()

    async def sleep(seconds: float) -> float:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return seconds

    assert loop.call(sleep(0.05), timeout=60) == 0.05
    with pytest.raises(TimeoutError):
        loop.call(sleep(60), timeout=0.05)
    slow, quick = loop.submit(sleep(60)), loop.submit(sleep(0.05))
    assert quick.result(60) == 0.05
    loop.close()
    loop.close()
    assert slow.cancelled() and ended == ["cancelled"] * 2
