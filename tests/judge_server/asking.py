"""Ask the loopback judge one thing through a real provider, as the tests of several rooms do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.judge.providers.base import SdkProvider
from tests.judge_server.server import JudgeServer
from tests.settings import complete_judge

T = TypeVar("T")
Ask = Callable[..., Reply | JudgeError]
SECRET = "sk-loopback-0123456789abcdef"
KEYS = dict.fromkeys(
    ("OPENAI_API_KEY", "DASHSCOPE_API_KEY", "GEMINI_API_KEY", "ANTHROPIC_API_KEY"), SECRET
)
# The wires of the server, each with the provider that speaks it.
WIRES = {
    "openai": "openai",
    "claude": "claude",
    "gemini": "gemini",
    "dashscope": "dashscope",
    "dashscope-compatible": "dashscope",
}
_NONCE = "0123456789abcdef"


def make_question(
    response: str = "The answer is 42.", truth: str = "42", **changes: Any
) -> Question:
    """A question in the form of the templates, the data fenced with a nonce."""
    blocks = {"response": response, "ground_truth": truth}
    user = "\n".join(f"<{k}-{_NONCE}>\n{v}\n</{k}-{_NONCE}>" for k, v in blocks.items())
    return Question("You are a careful judge. Answer in JSON.", user, "id", Scale(1, 10), **changes)


def judge_at(server: JudgeServer, wire: str, **changes: Any) -> SdkProvider:
    """A provider that asks the loopback server over one wire."""
    options = {name: changes.pop(name) for name in ("environ", "flags") if name in changes}
    model = changes.pop("model", "judge-model")
    api = judge_api(WIRES[wire], model, server.url(wire), **changes)
    return build_provider(api, **{"environ": KEYS} | options)


def judge_api(
    kind: str, model: str = "m", base_url: str | None = None, **changes: Any
) -> ApiReward:
    """Settings of a judge at one provider."""
    return complete_judge(**({"type": kind, "model": model, "base_url": base_url} | changes))


def on_a_loop(provider: SdkProvider, work: Callable[[SdkProvider], Awaitable[T]]) -> T:
    """Do something with a provider on a new event loop, and close it there."""

    async def run() -> T:
        try:
            return await work(provider)
        finally:
            await provider.close()
            await provider.close()

    return asyncio.run(run())


async def attempt(
    provider: SdkProvider, question: Question | None, timeout: float
) -> Reply | JudgeError:
    """Ask; an error is the answer, too."""
    try:
        return await provider.ask(question or make_question(), timeout=timeout)
    except JudgeError as error:
        return error


def ask_once(
    provider: SdkProvider, question: Question | None = None, *, timeout: float = 10.0
) -> Reply | JudgeError:
    """The reply to one question, or the error that came instead."""

    return on_a_loop(provider, lambda judge: attempt(judge, question, timeout))
