"""Neighbours that never answer, in real runs: each row of the table in docs/scaling.md ends."""

from __future__ import annotations

import gzip
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ppo_cli.errors import EXIT_RESUMABLE, EXIT_STOPPED
from ppo_cli.processes.reaper import descendants
from tests.forked import PPO, ROOT, Forked
from tests.judge_server import JudgeServer
from tests.judge_server.faults import Fault
from tests.waiting import wait_until

HANGS = '''
import os, time
from pathlib import Path

def hang(*args, **kwargs):
    Path(os.environ["DESK"], "waiting").touch()
    time.sleep(600)

compute_score = init = hang  # `init` is that of a logger's package

def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    hang()
'''
# Packages that a user has installed.
PROGRAM = f"import os, sys; sys.path.insert(0, os.environ['DESK']); {PPO}"
EMBEDDED = "--preset embedded --batch_size 4 --mini_batch_size 4 --rollout_n 2"
JUDGE = f"{EMBEDDED} --use_api_reward --rm_api_type openai --rm_model m reward.api.timeout=600"
SAVED, AT_ONCE = {EXIT_RESUMABLE}, {-signal.SIGTERM}
# Row of the table, flags, how often SIGTERM comes until the run ends, and its exit codes: a wait in
# a step saves first, one before any step has nothing to save.
ROWS = [
    ("judge", f"{JUDGE} --rm_base_url {{judge}}", 1, SAVED),
    ("judge", f"{JUDGE} --rm_base_url {{hole}}/v1", 1, AT_ONCE),
    ("reward server", f"{EMBEDDED} --reward_model {{hole}}/classify", 1, AT_ONCE),
    ("reward function", f"{EMBEDDED} --reward_function {{desk}}/hangs.py reward.timeout=600", 1,
     AT_ONCE),
    ("`--rm_place FILE.py:FUNCTION`", f"{JUDGE} --rm_base_url {{hole}}/v1 "
     "--rm_place {desk}/hangs.py:hang", 1, AT_ONCE),
    ("environment, tools, MCP", f"{EMBEDDED} --preset embedded-tools --tools "
     "{desk}/hangs.py:multiply environment.timeout=600", 1, SAVED),
    ("store", f"{EMBEDDED} trainer.store=s3://bucket/a", 1, AT_ONCE),
    ("Ray's head, other nodes", f"{EMBEDDED} --engine ray --num_workers 2 --nnodes 2 --node_rank 1 "
     "--master_addr 127.0.0.1 --master_port {port}", 1, AT_ONCE),
    ("Ray's workers", f"{EMBEDDED} --engine ray --num_workers 1 {{stopped}}", 2, {EXIT_STOPPED}),
    ("W&B, MLflow and other loggers", f"{EMBEDDED} --logger trackio", 1, SAVED),
    ("files of rows", f"{EMBEDDED} --train_files {{bomb}}", 1, AT_ONCE),
]  # fmt: skip


def write_bomb(path: Path) -> Path:
    """Write 8 GB of text in 8 MB."""
    path.write_bytes(gzip.compress(bytes(1 << 26)) * 128)
    return path


def stop_workers(run: int) -> int:
    """Stop the processes in which Ray runs a part of a run; returns their number."""
    stopped = 0
    for pid in descendants(run):
        with suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(pid, signal.SIGSTOP)
                stopped += 1
    return stopped


def test_each_row_of_the_table_has_a_run() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    table = page.partition("| wait | bound | then |")[2].partition("\n\n")[0]
    rows = set(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))
    # That of the address space ends at the start: tests/cli/test_app.py.
    assert rows == {row for row, *_ in ROWS} | {"address space (`ulimit -v`)"}


@pytest.mark.slow
@pytest.mark.parametrize(("row", "flags", "signals", "codes"), ROWS)
def test_sigterm_ends_a_run_whose_neighbour_is_silent(
    row: str, flags: str, signals: int, codes: set[int], tmp_path: Path
) -> None:
    for name in ("hangs.py", "trackio.py"):
        (tmp_path / name).write_text(HANGS)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        JudgeServer() as judge,
        ExitStack() as connections,
    ):
        port = silent.getsockname()[1]
        hole = f"http://127.0.0.1:{port}"
        bomb = tmp_path / "rows.jsonl.gz"
        words = flags.format(
            desk=tmp_path, hole=hole, port=port, bomb=bomb, judge=judge.url("openai"), stopped=""
        ).split()
        environ = os.environ | {
            "PYTHONPATH": str(ROOT), "DESK": str(tmp_path), "OPENAI_API_KEY": "loopback",
            "AWS_ENDPOINT_URL": hole, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        }  # fmt: skip
        if "{bomb}" in flags:
            write_bomb(bomb)
        out = ["--output_dir", str(tmp_path / "out"), "--test_freq", "-1"]
        process = Forked(PROGRAM, ["train", *words, *out], environ)

        def is_reading() -> bool:
            return any(file.resolve() == bomb for file in Path(f"/proc/{process.pid}/fd").iterdir())

        try:
            if "{judge}" in flags or "{stopped}" in flags:
                wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), 300)
            if "{judge}" in flags:
                judge.state.faults.append(Fault("hang"))
                wait_until(lambda: judge.state.in_flight > 0, 300)
            elif "{stopped}" in flags:
                assert stop_workers(process.pid)
            elif "{bomb}" in flags:
                wait_until(is_reading, 300)
            elif "{desk}" in flags or "--logger" in flags:
                wait_until((tmp_path / "waiting").exists, 300)
            else:
                silent.settimeout(300)
                connections.enter_context(silent.accept()[0])
            for _ in range(signals):
                process.send_signal(signal.SIGTERM)
                time.sleep(1)
            output = "".join(process.communicate(timeout=300))
        except (AssertionError, subprocess.TimeoutExpired):
            pytest.fail(f"{row}: {process.output()}")
        finally:
            process.kill()
    assert process.returncode in codes, output
    assert codes != SAVED or "o on with: " in output, output
