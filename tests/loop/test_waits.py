"""Neighbours that never answer, in real runs: each row of the table in docs/scaling.md ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

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

compute_score = hang

def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    hang()
'''
# Row of the table -> flags; a wait in a step saves first, one before any step has nothing to save.
IN_A_STEP = {
    "environment, tools, MCP": "--preset embedded-tools --tools {desk}/hangs.py:multiply "
    "environment.timeout=600",
    "judge": "--preset embedded --use_api_reward --rm_api_type openai --rm_model m "
    "--rm_base_url {judge} reward.api.timeout=600",
}
AT_THE_START = {
    "reward function": "--preset embedded --reward_function {desk}/hangs.py reward.timeout=600",
    "judge": IN_A_STEP["judge"].replace("{judge}", "{hole}/v1"),
    "store": "--preset embedded trainer.store=s3://bucket/a",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "flags", "codes"),
    [
        *((row, flags, {3}) for row, flags in IN_A_STEP.items()),
        *((row, flags, {-signal.SIGTERM}) for row, flags in AT_THE_START.items()),
    ],
)
def test_sigterm_ends_a_run_whose_neighbour_is_silent(
    row: str, flags: str, codes: set[int], tmp_path: Path
) -> None:
    assert f"| {row} |" in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    (tmp_path / "hangs.py").write_text(HANGS)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        JudgeServer() as judge,
        ExitStack() as connections,
    ):
        hole = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = flags.format(desk=tmp_path, hole=hole, judge=judge.url("openai")).split()
        sizes = ["--batch_size", "4", "--mini_batch_size", "4", "--rollout_n", "2"]
        environ = os.environ | {
            "PYTHONPATH": str(ROOT), "DESK": str(tmp_path), "OPENAI_API_KEY": "loopback",
            "AWS_ENDPOINT_URL": hole, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        }  # fmt: skip
        out = ["--output_dir", str(tmp_path / "out"), "--test_freq", "-1"]
        process = Forked(PPO, ["train", *words, *sizes, *out], environ)
        try:
            if "{judge}" in flags:
                wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), 300)
                judge.state.faults.append(Fault("hang"))
                wait_until(lambda: judge.state.in_flight > 0, 60)
            elif "{desk}" in flags:
                wait_until((tmp_path / "waiting").exists, 300)
            else:
                silent.settimeout(300)
                connections.enter_context(silent.accept()[0])
            process.send_signal(signal.SIGTERM)
            output = "".join(process.communicate(timeout=60))
        except subprocess.TimeoutExpired:
            pytest.fail(f"{row}: SIGTERM did not end the run")
        finally:
            process.kill()
    assert process.returncode in codes, output
    assert process.returncode < 0 or "o on with: " in output, output
