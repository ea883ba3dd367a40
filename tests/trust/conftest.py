"""A judge's server for the commands of this room, and a way to type them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.judge_server import JudgeServer
from tests.judge_server.asking import KEYS
from tests.trust import commands


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """A judge on loopback, with the key of each provider in the environment."""
    for name in KEYS:
        monkeypatch.setenv(name, commands.KEY)
    with JudgeServer() as running:
        yield running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> commands.Run:
    """`ppo reward` with these words: its exit code and what it printed, out and err."""
    return partial(commands.run, capsys)


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_cli.trust.statistics.RESAMPLES", 100)
