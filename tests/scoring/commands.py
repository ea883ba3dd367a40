"""`ppo` as users type it: in this process, or in a separate one that gets a signal.

The conftest of each room that types it imports the fixtures.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ppo_cli.cli.app import main
from tests.forked import PPO, Forked
from tests.judge_server import JudgeServer
from tests.judge_server.asking import KEYS
from tests.marks import quick_only
from tests.scoring.scripted import write_rows
from tests.waiting import wait_until

KEY = "sk-only-for-tests-1234"
PROVIDERS = ("openai", "claude", "gemini")
# For tests in which providers differ by the form of their files alone.
ONE_QUICK = quick_only(PROVIDERS, "openai")


def run_reward(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `ppo reward ARGS`."""
    code = main(["reward", *args])
    out, err = capsys.readouterr()
    return code, out, err


class Outcome(NamedTuple):
    """What a command printed."""

    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        """What `--json` printed."""
        summary: dict[str, Any] = json.loads(self.out)
        return summary

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        """The checks of an audit by their names."""
        return {check["name"]: check for check in self.summary["checks"]}


class Bench:
    """A folder, a judge on loopback, and the commands that are typed there."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], server: JudgeServer, folder: Path
    ) -> None:
        self.server, self.folder, self._capsys = server, folder, capsys

    def ppo(self, *args: str, code: int = 0) -> Outcome:
        """Type a command that must end with this exit code."""
        actual = main(list(args))
        outcome = Outcome(*self._capsys.readouterr())
        assert actual == code, outcome.err or outcome.out
        assert "Traceback" not in outcome.err
        return outcome

    def reward(self, *args: str, code: int = 0) -> Outcome:
        """Type `ppo reward ARGS`, which must end with this exit code."""
        return self.ppo("reward", *args, code=code)

    def signal_when(self, ready: Callable[[], bool], number: signal.Signals, *args: str) -> Forked:
        """Run `ppo ARGS` as a process, send it a signal when `ready` holds, wait for its end."""
        process = Forked(PPO, args, os.environ, folder=self.folder)
        wait_until(lambda: ready() or process.poll() is not None, 300)
        assert process.poll() is None, process.output()
        process.send_signal(number)
        process.wait(300)
        return process

    def write(self, *rows: dict[str, Any]) -> str:
        """Write rows to the file of the folder that is scored; returns its path."""
        return write_rows(self.folder / "a.jsonl", *rows)

    def sums(self, count: int, first: int = 10) -> str:
        """Write responses to sums; those to odd numbers are right."""
        rows = [
            {"prompt": f"{n} + 1 = ?", "ground_truth": f"{n + 1}", "good": bool(n % 2),
             "response": f"It is {n + n % 2}."}
            for n in range(first, first + count)
        ]  # fmt: skip
        return self.write(*rows)

    def scored(self) -> list[dict[str, Any]]:
        """The rows of that file with their scores."""
        return read(self.folder / "a.scored.jsonl")

    def judge(self, kind: str = "openai", cache: str = "verdicts.db") -> list[str]:
        """Flags of a judge that asks the server and remembers its verdicts in the folder."""
        return [
            *("--rm_api_type", kind, "--rm_model", "a-judge", "--rm_base_url"),
            *(self.server.url(kind), "--rm_cache", str(self.folder / cache)),
            *("--rm_prompt_preset", "math"),
        ]

    def priced(self, kind: str, cache: str = "v.db") -> list[str]:
        """Flags of a judge alone, with a price."""
        price = ("--rm_price_input", "1", "--rm_price_output", "2")
        return ["--use_api_reward", *price, *self.judge(kind, cache)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """A judge on loopback, with the key of each provider in the environment."""
    for name in KEYS:
        monkeypatch.setenv(name, KEY)
    with JudgeServer() as running:
        yield running


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], server: JudgeServer, tmp_path: Path) -> Bench:
    return Bench(capsys, server, tmp_path)


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_cli.estimates.RESAMPLES", 100)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
