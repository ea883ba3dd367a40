"""A run on the CPU has jemalloc from its first moment, and nobody else gets it from there.

Its imports pause the garbage collector.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.allocator import find_jemalloc, pause_garbage_collection
from ppo_cli.cli.app import main

# What a process has after it asked, and what its children will.
PROBE = """
import json, os, sys
from pathlib import Path
from ppo_cli.allocator import has_jemalloc, start_with_jemalloc
start_with_jemalloc()
loaded = "libjemalloc" in Path("/proc/self/maps").read_text()
assert has_jemalloc() == loaded
left = [n for n in ("LD_PRELOAD", "MALLOC_CONF", "PPO_ALLOCATOR") if n in os.environ]
print(json.dumps([loaded, left, sys.argv[1:], os.getpid()]))
"""

# Resident MiB after each of several rounds of many blocks, which lie end to end when all are free.
ROUNDS = """
import json, random
from pathlib import Path
import numpy
from ppo_cli.allocator import start_with_jemalloc
start_with_jemalloc()
dice, found = random.Random(0), []
for _ in range(4):
    blocks = [numpy.ones(dice.randrange(9_000, 18_000)) for _ in range(3_000)]
    del blocks
    status = Path("/proc/self/status").read_text()
    found.append(int(status.split("VmRSS:")[1].split()[0]) >> 10)
print(json.dumps(found))
"""

needs_jemalloc = pytest.mark.skipif(
    find_jemalloc({}) is None, reason="no jemalloc for this machine"
)


def probe(code: str = PROBE, **variables: str) -> tuple[list[Any], int]:
    clean = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "MALLOC_CONF")}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "some", "words"], env=clean | variables,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    output, _ = process.communicate(timeout=300)
    probed: list[Any] = json.loads(output)
    return probed, process.pid


@needs_jemalloc
def test_the_process_goes_on_with_jemalloc_and_its_children_without() -> None:
    allocator, pid = probe()
    assert allocator == [True, [], ["some", "words"], pid]


@needs_jemalloc
def test_small_blocks_take_what_many_of_them_left_in_one_piece() -> None:
    first, *later = probe(ROUNDS)[0]
    assert first > 250 and max(later) < 1.2 * first


@needs_jemalloc
@pytest.mark.parametrize(
    "variables", [{"PPO_ALLOCATOR": "system"}, {"MALLOC_CONF": "narenas:1"}], ids=str
)
def test_what_the_environment_asks_for_stays(variables: dict[str, str]) -> None:
    allocator, _ = probe(**variables)
    assert allocator[:2] == [False, list(variables)]


@needs_jemalloc
def test_a_library_that_cannot_be_loaded_is_done_without(tmp_path: Path) -> None:
    """The loader says so on stderr, and the process goes on."""
    allocator, _ = probe(PPO_ALLOCATOR="jemalloc", LD_PRELOAD=str(tmp_path / "none.so"))
    assert allocator[:2] == [False, []]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["train", "--no_such_flag"], 1), (["eval", "--no_such_flag"], 1), (["train", "--help"], 0),
        (["train", "--dry-run", "--no_such_flag"], 0), (["plan", "--no_such_flag"], 0),
        (["show", "train"], 0),
    ],
)  # fmt: skip
def test_commands_that_compute_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, args: list[str], expected: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr("ppo_cli.allocator.start_with_jemalloc", lambda: calls.append(None))
    monkeypatch.setattr(sys, "argv", ["ppo", *args])
    main()
    assert len(calls) == expected
    main(args)  # called by other code, which keeps its process
    assert len(calls) == expected


def test_garbage_is_collected_again_after_imports_that_fail() -> None:
    with pytest.raises(ImportError), pause_garbage_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
