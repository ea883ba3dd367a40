"""`ppo reward` as users type it: in this process, or in a separate one that Ctrl-C stops.

The conftest of each room that types it imports the fixtures.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import main
from tests.forked import PPO, Forked
from tests.judge_server import JudgeServer
from tests.judge_server.asking import KEYS

Run = Callable[..., tuple[int, str, str]]
KEY = "sk-only-for-tests-1234"


def run_reward(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `ppo reward ARGS`."""
    code = main(["reward", *args])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`ppo reward` with the arguments of the call: exit code, output, errors."""
    return partial(run_reward, capsys)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """A judge on loopback, with the key of each provider in the environment."""
    for name in KEYS:
        monkeypatch.setenv(name, KEY)
    with JudgeServer() as running:
        yield running


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_cli.scoring.statistics.RESAMPLES", 100)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def judge_at(server: JudgeServer, folder: Path) -> list[str]:
    """Flags of a judge that asks a server and remembers its verdicts in a folder."""
    return [
        *("--rm_api_type", "openai", "--rm_model", "a-judge"),
        *("--rm_base_url", server.url("openai"), "--rm_cache", str(folder / "verdicts.db")),
        *("--rm_prompt_preset", "math"),
    ]


def priced_judge(server: JudgeServer, kind: str, cache: Path) -> list[str]:
    """Flags of a judge of one kind, with a price."""
    return [
        *("--use_api_reward", "--rm_api_type", kind, "--rm_model", "a-judge"),
        *("--rm_base_url", server.url(kind), "--rm_cache", str(cache)),
        *("--rm_prompt_preset", "math", "--rm_price_input", "1", "--rm_price_output", "2"),
    ]


def score_until_ctrl_c(
    server: JudgeServer, file: str, *flags: str, calls: int
) -> list[dict[str, Any]]:
    """Score a file, press Ctrl-C after some calls, and return the rows that it left."""
    server.state.latency = 0.1
    args = ["reward", "score", file, *flags, "--rm_concurrency", "1"]
    process = Forked(PPO, args, os.environ, folder=Path(file).parent, merged=False)
    waited = time.monotonic() + 300
    while server.count < calls and time.monotonic() < waited:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 3, err
    assert "Stopped by Ctrl-C." in err
    assert "Traceback" not in err
    return read(Path(file).with_suffix(".scored.jsonl"))
