"""The client in virtual time, before servers that refuse calls: how near to the ideal it is.

Each call takes 3 ms of the event loop's own time, as with an SDK: many calls at once delay what is
heard of the first ones.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Usage, Verdict
from ppo_cli.rewards.judge.client import JudgeClient
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.limits import Limits
from tests.judge_server.clients import free, questions
from tests.rewards.virtual_time import VirtualLoop


@dataclass
class Bucket:
    """`rate` calls a second, `burst` saved up at most."""

    rate: float
    burst: float

    def __post_init__(self) -> None:
        self.level, self.at = self.burst, 0.0

    def wait(self, now: float, under_way: int) -> float:
        self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1.0:
            return (1.0 - self.level) / self.rate
        self.level -= 1.0
        return 0.0


@dataclass
class Slots:
    """`most` calls under way."""

    most: int

    def wait(self, now: float, under_way: int) -> float:
        return 0.1 if under_way >= self.most else 0.0


@dataclass
class Windows:
    """`calls` in every `seconds`."""

    seconds: float
    calls: int

    def __post_init__(self) -> None:
        self.began, self.used = 0.0, 0

    def wait(self, now: float, under_way: int) -> float:
        if now >= self.began + self.seconds:
            self.began, self.used = now, 0
        self.used += 1
        return self.began + self.seconds - now if self.used > self.calls else 0.0


HINTS: Mapping[str, Callable[[float], float | None]] = {
    "seconds": lambda wait: float(math.ceil(wait)), "exact": lambda wait: wait,
    "none": lambda wait: None,
}  # fmt: skip


class Server:
    """A provider whose server answers after `latency` seconds, or turns the call away at once."""

    name, model, identity = "made up", "m", "i"
    busy_s = 0.0015  # of the event loop, before and after a call

    def __init__(self, limit: Any, latency: float, hint: str) -> None:
        self.limit, self.latency, self.hint = limit, latency, HINTS[hint]
        self.under_way = self.refused = 0

    async def ask(self, question: Question, *, timeout: float) -> Reply:
        loop: Any = asyncio.get_running_loop()
        loop.now += self.busy_s
        await asyncio.sleep(0.002)
        wait = self.limit.wait(loop.time(), self.under_way)
        if wait:
            self.refused += 1
            await asyncio.sleep(0.002)
            loop.now += self.busy_s
            raise JudgeError(Failure.RETRYABLE, "http_429", "slow down", status=429,
                             retry_after=self.hint(wait))  # fmt: skip
        self.under_way += 1
        try:
            await asyncio.sleep(self.latency)
        finally:
            self.under_way -= 1
        await asyncio.sleep(0.002)
        loop.now += self.busy_s
        return Reply('{"reason": "x", "score": 5}', Usage(10, 10))

    def dropped(self) -> Mapping[str, str]:
        return {}

    async def close(self) -> None:
        return None


SERVERS: tuple[tuple[Callable[[], Any], int, float, str, float], ...] = (
    *((lambda: Bucket(50, 20), 600, 0.1, hint, 11.7) for hint in ("seconds", "none")),
    (lambda: Bucket(50, 20), 600, 2.0, "seconds", 13.6),
    (lambda: Bucket(10, 200), 350, 0.1, "seconds", 15.1),
    (lambda: Bucket(10, 1), 150, 0.3, "none", 15.2),
    (lambda: Windows(60.0, 100), 150, 0.1, "seconds", 60.1),
    (lambda: Windows(60.0, 100), 150, 0.1, "none", 60.1),
    (lambda: Windows(10.0, 200), 700, 0.1, "none", 30.1),
    *((lambda slots=slots: Slots(slots), 16 * slots, 0.5, "seconds", 8.0)  # type: ignore[misc]
      for slots in (1, 4, 16, 64)),
)  # fmt: skip


@pytest.mark.slow
def test_no_call_is_lost_and_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = []
    for make, calls, latency, hint, ideal in SERVERS:
        loop, server = VirtualLoop(), Server(make(), latency, hint)
        monkeypatch.setattr("time.monotonic", loop.time)
        monkeypatch.setattr(random, "uniform", random.Random(0).uniform)
        try:
            seconds, verdicts = loop.run_until_complete(judge(server, calls))
        finally:
            loop.close()
        ratio = seconds / ideal
        if verdicts < calls or ratio > 1.15 or server.refused > calls + 60:
            missed.append((vars(server.limit), hint, verdicts, ratio, server.refused / calls))
    assert missed == []


async def judge(server: Server, calls: int) -> tuple[float, int]:
    """Seconds until all answers are in, and how many of them are verdicts."""
    loop = asyncio.get_running_loop()
    client = JudgeClient(server, limits=Limits(concurrency=128), ledger=free(), cache=None)
    began = loop.time()
    answers = await asyncio.gather(*map(client.ask, questions(calls)))
    await client.close()
    return loop.time() - began, sum(isinstance(answer, Verdict) for answer in answers)
