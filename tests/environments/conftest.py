"""Environment files and pools of real processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.environments.pool import EnvironmentPool
from tests.settings import complete_environment

ROW = {
    "prompt": "Guess.", "messages": [{"role": "user", "content": "Guess."}],
    "ground_truth": "7", "data_source": "guess", "extra_info": {}, "seed": 3,
}  # fmt: skip
# What the policy's message says, the environment does.
GAME = """
import os, re, struct, subprocess, sys, threading, time

def write_answer(data, times=1, number=None):
    # The first socket is the channel of the answers.
    n = min(n for n in range(3, 999) if "socket" in os.path.realpath(f"/dev/fd/{n}"))
    if number is not None:
        data = struct.pack("<4sIQ", b"\\0ppo", len(data), number) + data
    for _ in range(times):
        os.write(n, data)

class Game:
    def __init__(self, start=0):
        self.turn = start

    def reset(self, row):
        print("a print", row["ground_truth"])
        sys.__stdout__.write('{"id": 0, "result": 1}\\n')
        sys.__stdout__.flush()
        if row["prompt"] == "die at once":
            os._exit(9)
        return row["prompt"]

    def step(self, message):
        self.turn += 1
        text = message["content"]
        names = dict(globals(), reply=f"turn {self.turn}")
        if text.startswith("do "):
            exec(text[3:], names)
        return names["reply"], self.turn == 3, {"guess": 0.5}

    def close(self):
        print("closed after", self.turn)
"""


@pytest.fixture
def game(tmp_path: Path) -> Path:
    """An environment whose step runs `do CODE` and is done after three turns."""
    file = tmp_path / "game.py"
    file.write_text(GAME)
    return file


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EnvironmentPool]]:
    """Start a pool of one process with these settings."""
    pools = []

    def start_pool(**settings: Any) -> EnvironmentPool:
        config = complete_environment(**{"num_workers": 1, "timeout": 20.0, **settings})
        pools.append(EnvironmentPool(config, tmp_path / "logs"))
        pools[-1].start()
        return pools[-1]

    yield start_pool
    for pool in pools:
        pool.close()


def find_python(name: str) -> Path:
    """The Python of the virtual environment that has a package of environments, or skip."""
    root = Path(__file__).resolve().parents[2]
    python = Path(os.environ.get(f"{name.upper()}_PYTHON", root / f".venv-{name}/bin/python"))
    if not python.exists():
        pytest.skip(f"needs {name} in .venv-{name}, or {name.upper()}_PYTHON=PATH")
    return python
