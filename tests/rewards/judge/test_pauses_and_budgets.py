"""A judge that asks for long pauses, or does not tell what its calls took, holds nobody up."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.rewards.judge.cache import VerdictCache
from ppo_cli.rewards.judge.calls import JudgeError, Usage, Verdict, estimate_tokens, worst_case
from ppo_cli.rewards.judge.client import JudgeClient
from ppo_cli.rewards.judge.costs import Ledger
from ppo_cli.rewards.remote.limits import Limits
from tests.judge_server import JudgeServer
from tests.judge_server.clients import ask_all, ask_for, free, questions, run


@pytest.mark.usefixtures("short_waits")
@pytest.mark.parametrize(("hint", "concurrency"), [(3600, 1), ("99999999999", 32)])
def test_no_pause_outlives_the_patience(
    server: JudgeServer, hint: int | str, concurrency: int
) -> None:
    server.fail(429, retry_after=hint)

    async def work(client: JudgeClient) -> list[Any]:
        return [*await ask_all(client, questions(10)), *await ask_all(client, [ask_for("late")])]

    began = time.monotonic()
    answers = run(server, work, concurrency=concurrency, outage_wait=1.0)
    assert {type(answer) for answer in answers} == {Interrupted}
    assert "did not answer for 1 s" in str(answers[-1]) and "(last: http_429" in str(answers[-1])
    assert time.monotonic() - began < 120.0  # the pause asked for is an hour
    assert server.count < 80  # of 10 questions; each tries again a few times at most


@pytest.mark.parametrize(
    ("pause", "sentence", "seconds"),
    [
        (30, r"The judge asked for a pause; going on in (\d+) s\.", 30),
        (
            3600,
            r"The judge asked for a pause of 3,600 s \(http_429.*; trying again in 1,(\d+) s, "
            "for up to 30 min more",
            770,
        ),
    ],
)
def test_a_pause_is_shown_and_closing_does_not_wait_for_it(
    server: JudgeServer, pause: int, sentence: str, seconds: int
) -> None:
    server.fail(429, times=1, retry_after=pause)

    async def work(client: JudgeClient) -> tuple[str, float, list[Any]]:
        tasks = [asyncio.create_task(client.ask(ask_for("slow")))]
        while client.waiting_for() is None:
            await asyncio.sleep(0.02)
        tasks += [asyncio.create_task(client.ask(q)) for q in questions(5)]
        await asyncio.sleep(0.1)
        shown, began = client.waiting_for() or "", time.monotonic()
        await client.close(20.0)
        took = time.monotonic() - began
        return shown, took, await asyncio.gather(*tasks, return_exceptions=True)

    shown, took, answers = run(server, work)
    shown_seconds = re.match(sentence, shown)
    assert shown_seconds and seconds - 20 <= int(shown_seconds[1]) <= seconds
    assert took < 18.0  # closing may take 20 s
    assert {type(answer) for answer in answers} == {Interrupted} and server.count == 1


def test_bad_requests_on_all_texts_open_the_breaker_and_are_not_kept(
    server: JudgeServer, cache: VerdictCache
) -> None:

    async def work(client: JudgeClient) -> tuple[list[Any], list[Any]]:
        await client.ask(ask_for("fine"))
        server.fail(400, times=11)  # those of the eight at once, then probes
        during = await ask_all(client, questions(30))
        return during, await ask_all(client, questions(30))

    during, after = run(server, work, cache=cache, concurrency=8)
    lost = [answer for answer in during if isinstance(answer, JudgeError)]
    assert 0 < len(lost) <= 4
    assert {error.cause for error in lost} == {"bad_request"}
    assert {type(a) for a in (*after, *(a for a in during if a not in lost))} == {Verdict}


def test_a_budget_holds_with_a_server_that_tells_no_usage(server: JudgeServer) -> None:
    server.fail("no_usage")
    ledger = Ledger(None, budget_usd=None, budget_tokens=2000)

    async def work(client: JudgeClient) -> list[Any]:
        return await ask_all(client, questions(100))

    answers = run(server, work, ledger=ledger, concurrency=4)
    done = [answer for answer in answers if isinstance(answer, Verdict)]
    usage = ledger.total.usage
    assert 0 < len(done) < 20
    assert sum(isinstance(answer, Interrupted) for answer in answers) == 100 - len(done)
    assert 1500 < usage.input + usage.output <= 2000
    assert done[0].usage.input == worst_case(ask_for("number 0")).input
    assert done[0].usage.output == 64


BOOKED = {"cut": True, 503: True, 429: False, "down": False}


@pytest.mark.parametrize(("fault", "booked"), BOOKED.items())
def test_a_failed_call_is_booked_when_it_may_have_been_billed(
    server: JudgeServer, fault: str | int, booked: bool
) -> None:
    # A connection that was never made costs nothing.
    server.pause() if fault == "down" else server.fail(fault, times=1)
    ledger = free()

    async def work(client: JudgeClient) -> JudgeError:
        client._limits = Limits(timeout=0.5)
        with pytest.raises(JudgeError) as met:
            await client.probe(ask_for("x"))
        return met.value

    error = run(server, work, ledger=ledger)
    assert ("ConnectionRefused" in str(error)) is (fault == "down")
    assert ledger.total.usage == (worst_case(ask_for("x")) if booked else Usage())
    assert ledger.total.calls == 1


def test_a_long_text_is_measured_once_however_many_tries(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def counting(text: str) -> int:
        measured.append(text)
        return estimate_tokens(text)

    monkeypatch.setattr("ppo_cli.rewards.judge.calls.estimate_tokens", counting)
    server.fail("cut", times=3)
    ledger = Ledger(None, budget_usd=None, budget_tokens=10**6)
    question = ask_for("measured once")
    verdict = run(server, lambda client: client.ask(question), ledger=ledger)
    assert verdict.calls == 4
    assert measured == [question.system, question.user]
    measured.clear()
    run(server, lambda client: client.ask(ask_for("never measured")))
    assert measured == []
