"""One loopback judge for the tests of a file, and providers that have answered once already."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import Question, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from tests.judge_server import JudgeServer
from tests.judge_server.asking import WIRES, Ask, attempt, judge_at


@pytest.fixture(scope="module")
def shared_server() -> Iterator[JudgeServer]:
    with JudgeServer() as server:
        yield server


@pytest.fixture
def server(shared_server: JudgeServer) -> JudgeServer:
    shared_server.reset()
    return shared_server


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    """Each wire in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def ask(shared_server: JudgeServer) -> Iterator[Ask]:
    """Ask judges that live on one event loop, each of which has answered once."""
    loop = asyncio.new_event_loop()
    judges: dict[str, SdkProvider] = {}

    def run(wire: str, question: Question | None = None, timeout: float = 10.0) -> Any:
        return loop.run_until_complete(attempt(judges[wire], question, timeout))

    for wire in WIRES:
        judges[wire] = judge_at(shared_server, wire)
        assert isinstance(run(wire), Reply)
    yield run
    for judge in judges.values():
        loop.run_until_complete(judge.close())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
