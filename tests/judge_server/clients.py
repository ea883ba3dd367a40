"""Ask the loopback judge many things through a client with limits, a ledger and a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ppo_cli.rewards.judge.cache import VerdictCache
from ppo_cli.rewards.judge.calls import Question, Scale
from ppo_cli.rewards.judge.client import JudgeClient
from ppo_cli.rewards.judge.costs import Ledger
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.remote.limits import Limits
from tests.judge_server.server import JudgeServer
from tests.settings import complete_judge

T = TypeVar("T")


class ManualClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask_for(word: str, **changes: Any) -> Question:
    text = f"Judge this answer: {word}."
    return Question("You are strict.", text, text, Scale(1, 10), max_tokens=64, **changes)


def questions(count: int) -> list[Question]:
    return [ask_for(f"number {n}") for n in range(count)]


def free() -> Ledger:
    """A ledger without a budget."""
    return Ledger(None, budget_usd=None, budget_tokens=None)


def run(
    server: JudgeServer,
    work: Callable[[JudgeClient], Awaitable[T]],
    *,
    cache: VerdictCache | None = None,
    ledger: Ledger | None = None,
    **limits: Any,
) -> T:
    """Run `work` with a client of the given limits on a new event loop."""
    api = complete_judge(type="openai", model="m", base_url=server.url("openai"))
    provider = build_provider(api, environ={"OPENAI_API_KEY": "for-the-loopback"})
    client = JudgeClient(provider, limits=Limits(**limits), ledger=ledger or free(), cache=cache)

    async def run_and_close() -> T:
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run_and_close())


async def ask_all(client: JudgeClient, questions: list[Question]) -> list[Any]:
    return await asyncio.gather(*map(client.ask, questions), return_exceptions=True)
