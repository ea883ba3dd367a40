"""What a response must not get away with: each attack is a 0 with a reason, and leaves no trace."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from string import Template
from typing import Any

import pytest

from ppo_cli.records import Score
from ppo_cli.rewards.code import channel
from ppo_cli.rewards.code.sandboxes import Sandbox
from tests.rewards.code.attacks import World, read_attacks

RunCode = Callable[..., Score]
MakeSandbox = Callable[[str], Sandbox]
HERE = Path(__file__).parent
TESTS = {
    "test": "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(4) == 16\n"
    "    assert abs(candidate(5) - 25) < 1 and math.fabs(candidate(6) - 36) < 1\n"
    "    for n in range(7, 9):\n        assert [candidate(n)] == [n * n], 'squares'\n",
    "entry_point": "solve",
    "prompt": "import math\ndef solve(n):\n    '''Return the square of n.'''\n",
}
WALLS = ["bwrap", "sandlock"]
ALL = [*WALLS, pytest.param("none", marks=pytest.mark.slow)]
RIGHT = "def solve(n): return n * n"
# In this process, where attacks look for it.
SECRETS = ctypes.create_string_buffer(b"secrets!")

OUTSIDE, ENDLESS, TRICKS, FILES = map(read_attacks, ("outside", "endless", "tricks", "files"))


def _attack_all(attacks: dict[str, tuple[str, str]], run: Callable[[str], Score]) -> list[str]:
    """Return the attacks that were not a 0 for the reason that was due, with what they were."""
    with ThreadPoolExecutor(2) as pool:
        scores = pool.map(lambda attack: run(attack[0]), attacks.values())
    return [
        f"{name}: {score}"
        for (name, (_, reason)), score in zip(attacks.items(), scores, strict=True)
        if (score.value, score.failure) != (0.0, "") or not re.search(reason or ".", score.reason)
    ]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The world that must stay as it is, where the path of a socket is short enough."""
    monkeypatch.setenv("PPO_SECRET", "key")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))
        yield World(Path(folder) / "outside", stack)


def _fill(text: str, world: World) -> str:
    """Tell an attack where its targets are."""
    return Template(text).substitute({
        "FOLDER": world.folder, "HOME": Path.home(), "FILES": len(os.listdir(Path.home())),
        "PID": os.getpid(), "PORT": world.port, "SOCKET": world.folder / "stream",
        "ABSTRACT": world.name, "HARNESS": channel.__file__, "ADDRESS": ctypes.addressof(SECRETS),
    })  # fmt: skip


@pytest.mark.parametrize("name", ["bwrap", "sandlock", "none"])
@pytest.mark.usefixtures("no_trace")
def test_an_honest_answer_gets_its_score(
    name: str, run_code: RunCode, make_sandbox: MakeSandbox
) -> None:
    score = run_code(RIGHT, TESTS, make_sandbox(name))
    assert (score.value, score.failure, score.reason) == (1.0, "", "")
    assert (score.info["passed"], score.info["total"], score.info["sandbox"]) == (4, 4, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", WALLS)
@pytest.mark.usefixtures("no_trace")
def test_nothing_gets_out(
    name: str, run_code: RunCode, make_sandbox: MakeSandbox, world: World
) -> None:
    sandbox = make_sandbox(name)
    attacks = {key: (_fill(code, world), note) for key, (code, note) in OUTSIDE.items()}
    assert _attack_all(attacks, lambda code: run_code(code, TESTS, sandbox)) == []
    assert world.list_changes() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("attacks", "limits"),
    [(ENDLESS, {"timeout": 2.5, "cpu_seconds": 1}), (TRICKS, {"score": "share", "cpu_seconds": 2})],
    ids=["endless", "tricks"],
)
@pytest.mark.usefixtures("no_trace")
def test_nothing_goes_on_for_ever_and_no_trick_fools_the_judge(
    name: str, attacks: Any, limits: Any, run_code: RunCode, make_sandbox: MakeSandbox
) -> None:
    sandbox = make_sandbox(name)
    assert _attack_all(attacks, lambda code: run_code(code, TESTS, sandbox, **limits)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", WALLS)
@pytest.mark.usefixtures("no_trace")
def test_files_break_nothing_and_harm_no_neighbour(
    name: str, run_code: RunCode, make_sandbox: MakeSandbox
) -> None:
    sandbox = make_sandbox(name)
    neighbours: list[Score] = []

    def run(code: str) -> Score:
        score = run_code(code, TESTS, sandbox, timeout=4.0)
        neighbours.append(run_code(RIGHT, TESTS, sandbox))
        return score

    assert _attack_all(FILES, run) == []
    assert [score for score in neighbours if score.value != 1.0] == []


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="Linux only; a disk takes minutes")
def test_files_are_counted_where_no_file_system_can_be_made() -> None:
    """A machine that allows no namespaces, as most containers do."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ended = subprocess.run(
            [sys.executable, str(HERE / "without_namespaces.py")],
            env={**os.environ, "TMPDIR": folder, "PYTHONPATH": str(HERE.parents[2])},
            capture_output=True, text=True,
        )  # fmt: skip
        assert (ended.stdout, ended.stderr) == ("", "")
        assert os.listdir(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    ["file_of_others", "write_outside", "overwrite", "tcp", "udp", "unix_socket", "delete"],
)
def test_the_same_attacks_work_without_a_sandbox(
    attack: str, run_code: RunCode, make_sandbox: MakeSandbox, world: World
) -> None:
    code = _fill(OUTSIDE[attack][0], world).replace("os.remove(", "os.path.exists(")
    assert run_code(code, TESTS, make_sandbox("none")).value == 1.0
