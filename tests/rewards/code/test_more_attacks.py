"""A corpus of attacks, scored by the command that users run, with honest answers between them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.rewards.code.sandboxes import Sandbox
from tests.rewards.code.attacks import World

CORPUS = Path(__file__).parent / "attacks_more.jsonl"
ORPHANS_COME_HERE = 36  # PR_SET_CHILD_SUBREAPER


@pytest.fixture
def orphans() -> Iterator[Callable[[], list[str]]]:
    """Return a way to list the processes that outlived the command that started them."""
    libc = ctypes.CDLL(None)
    libc.prctl(ORPHANS_COME_HERE, 1, 0, 0, 0)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())

    def find() -> list[str]:
        # What has been killed may take a moment to end.
        until = time.monotonic() + 30
        while True:
            started = set(children.read_text().split()) - before
            orphans_ = [pid for pid in started if os.waitpid(int(pid), os.WNOHANG)[0] == 0]
            if not orphans_ or time.monotonic() > until:
                break
            time.sleep(0.1)
        commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in orphans_]
        for pid in orphans_:
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)
        return commands

    yield find
    libc.prctl(ORPHANS_COME_HERE, 0, 0, 0, 0)


def _list_rows(world: World) -> Iterator[dict[str, Any]]:
    """Make the rows of the corpus, and an honest one after every four."""
    row = {"prompt": "Solve it.", "data_source": "code"}
    targets = f"PORT = {world.port}; NAME = {world.name!r}; FOLDER = {str(world.folder)!r}"
    targets += f"; VICTIM = {world.victim.pid}"
    for number, line in enumerate(CORPUS.read_text().splitlines()):
        attack = json.loads(line)
        name = f"{attack['group']}/{attack['name']}"
        response = f"```python\n{targets}\n{attack['code']}\n```"
        yield {**row, "name": name, "response": response, "ground_truth": attack["ground_truth"]}
        if number % 4 == 3:
            right = f"```python\ndef g(n):\n    return n * {number}\n```"
            truth = f"assert g(4) == {4 * number}\nassert g(9) == {9 * number}"
            yield {**row, "name": "honest", "response": right, "ground_truth": truth}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("bwrap", marks=pytest.mark.weekly), "sandlock"])
def test_no_attack_of_the_corpus_gets_through(
    name: str,
    make_sandbox: Callable[[str], Sandbox],
    orphans: Callable[[], list[str]],
    tmp_path: Path,
) -> None:
    make_sandbox(name)  # skips the test where it does not start
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source, scored = tmp_path / "attacks.jsonl", tmp_path / "scored.jsonl"
    with ExitStack() as stack:
        world = World(tmp_path / "world", stack)
        rows = list(_list_rows(world))
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = f"--rule code --code_sandbox {name} --out {scored} reward.code.timeout=3".split()
        command = [sys.executable, "-m", "ppo_cli", "reward", "score", str(source), *options]
        environment = {**os.environ, "TMPDIR": str(temporary), "ATTACK_SECRET": "ATTACK_SECRET"}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=800
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        changes = world.list_changes()
    got = [json.loads(line) for line in scored.read_text().splitlines()]

    def as_due(row: dict[str, Any]) -> bool:
        right = row["score"] == 1.0
        return right if row["name"] == "honest" else row["score"] == 0 and bool(row["reason"])

    wrong = [row for row in got if not as_due(row)]
    assert len(got) == len(rows)
    assert (wrong, changes, orphans(), os.listdir(temporary)) == ([], [], [], [])
