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
from tests.rewards.code.attacks import listen, was_called
from tests.rewards.tables import read_blocks

CORPUS = Path(__file__).parent / "attacks_more.jsonl"
VICTIM = read_blocks("code/programs")["victim"]
ORPHANS_COME_HERE = 36  # PR_SET_CHILD_SUBREAPER


class World:
    """What an attack aims at: listeners, a process and a folder of files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "secret").write_text("secret")
        (folder / "secret").chmod(0o600)
        self.port, self.name, self.listeners = listen(stack, f"{folder}/stream")
        self.victim = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", VICTIM],
                stdout=subprocess.PIPE,
                env={**os.environ, "ATTACK_SECRET": "ATTACK_SECRET"},
                start_new_session=True,
            )
        )
        stack.callback(self.victim.kill)
        assert self.victim.stdout is not None
        assert self.victim.stdout.readline() == b"ready\n"
        os.set_blocking(self.victim.stdout.fileno(), False)
        self._before = self._look()

    def fill(self, code: str) -> str:
        """Tell the attack where its targets are."""
        names = f"PORT = {self.port}; NAME = {self.name!r}; FOLDER = {str(self.folder)!r}"
        return f"```python\n{names}; VICTIM = {self.victim.pid}\n{code}\n```"

    def list_changes(self) -> list[str]:
        """Return what an attack has reached."""
        assert self.victim.stdout is not None
        before, now = self._before, self._look()
        changes = [f"{k}: {before[k]}, now {now[k]}" for k in now if now[k] != before[k]]
        if signals := self.victim.stdout.read():
            changes.append(f"the victim got {signals!r}")
        return changes + [f"{listener} was called" for listener in self.listeners
                          if was_called(listener)]  # fmt: skip

    def _look(self) -> dict[str, Any]:
        process = Path(f"/proc/{self.victim.pid}")
        stat = process.joinpath("stat").read_text().rsplit(")", 1)[1].split()
        files = ("limits", "oom_score_adj", "comm", "coredump_filter")
        return {
            **{name: (process / name).read_text() for name in files},
            "group, nice, policy": (stat[2], stat[16], stat[38]),
            "processors": os.sched_getaffinity(self.victim.pid),
            "folder": sorted((path.name, path.stat()) for path in self.folder.iterdir()),
        }


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
    for number, line in enumerate(CORPUS.read_text().splitlines()):
        attack = json.loads(line)
        name = f"{attack['group']}/{attack['name']}"
        response = world.fill(attack["code"])
        yield {**row, "name": name, "response": response, "ground_truth": attack["ground_truth"]}
        if number % 4 == 3:
            right = f"```python\ndef g(n):\n    return n * {number}\n```"
            truth = f"assert g(4) == {4 * number}\nassert g(9) == {9 * number}"
            yield {**row, "name": "honest", "response": right, "ground_truth": truth}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bwrap", "sandlock"])
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
