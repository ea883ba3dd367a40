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

CORPUS = Path(__file__).parent / "attacks_more.jsonl"
VICTIM = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, lambda number, frame: print("signal", number, flush=True))
    except (OSError, ValueError): pass
print("ready", flush=True)
while True: time.sleep(60)
"""
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
        now = self._look()
        before = self._before
        changed = [
            f"{key}: {before[key]}, now {now[key]}" for key in now if now[key] != before[key]
        ]
        if heard := self.victim.stdout.read():
            changed.append(f"the victim got {heard!r}")
        return changed + [f"{one} was called" for one in self.listeners if was_called(one)]

    def _look(self) -> dict[str, Any]:
        process = Path(f"/proc/{self.victim.pid}")
        told = process.joinpath("stat").read_text().rsplit(")", 1)[1].split()
        files = ("limits", "oom_score_adj", "comm", "coredump_filter")
        return {
            **{name: (process / name).read_text() for name in files},
            "group": told[2],
            "nice": told[16],
            "policy": told[38],
            "processors": os.sched_getaffinity(self.victim.pid),
            "folder": sorted((one.name, one.stat()) for one in self.folder.iterdir()),
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
            left = []
            for pid in set(children.read_text().split()) - before:
                if os.waitpid(int(pid), os.WNOHANG)[0] == 0:
                    left.append(pid)
            if not left or time.monotonic() > until:
                break
            time.sleep(0.1)
        told = [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)
        return told

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
        command = [
            sys.executable,
            "-m",
            "ppo_cli",
            "reward",
            "score",
            str(source),
            "--rule",
            "code",
        ]
        command += ["--code_sandbox", name, "--out", str(scored), "reward.code.timeout=3"]
        environment = {**os.environ, "TMPDIR": str(temporary), "ATTACK_SECRET": "ATTACK_SECRET"}
        told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
        assert told.returncode == 0, told.stdout + told.stderr
        changes = world.list_changes()
    got = [json.loads(line) for line in scored.read_text().splitlines()]

    def as_due(row: dict[str, Any]) -> bool:
        right = row["score"] == 1.0
        return right if row["name"] == "honest" else row["score"] == 0 and bool(row["reason"])

    wrong = [
        f"{row['name']}: {row['score']} {row['failure']} {row['reason']}"
        for row in got
        if not as_due(row)
    ]
    assert len(got) == len(rows)
    assert (wrong, changes, orphans(), os.listdir(temporary)) == ([], [], [], [])
