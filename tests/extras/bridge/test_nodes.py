"""The scripts of several nodes, run with a stand-in for python that notes what it is asked.

test_ray_of_nodes.py runs the script of one node with the real Ray.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ppo_cli.config.resolve import resolve
from ppo_cli.extras.bridge.folder import node_scripts, write_folder
from ppo_cli.extras.bridge.overrides import build_overrides
from ppo_cli.extras.bridge.rewards import KEYS_FILE, ROW, RewardServer
from tests.extras.bridge.settled import settled
from tests.judge_server.server import JudgeServer, digest

PYTHON = """#!/bin/bash
case "$*" in
    *ray.nodes*) ls "$BOARD" | grep -c -e head -e joined; exit 0 ;;
    *importlib*) exit 0 ;;
    *secrets*) echo -n token; exit 0 ;;
    *socket*) echo 1; exit 0 ;;
    *ppo_cli.reaper*)
        words="$*"
        echo "$NODE ray ${words#*ray.scripts.scripts }" >> "$BOARD/calls"
        trap '[ "$NODE" != 0 ] || rm -f "$BOARD/head"; exit 0' TERM
        [ "$NODE" != 0 ] || touch "$BOARD/head"
        [ -e "$BOARD/head" ] || exit 1
        [ "$NODE" = 0 ] || touch "$BOARD/joined_$NODE"
        echo "Ray runtime started."
        while [ -e "$BOARD/head" ]; do /bin/sleep 0.1; done
        exit 0 ;;
esac
echo "$NODE python $*" >> "$BOARD/calls"
case "$*" in *main_ppo*) exec /bin/sleep "${TRAINS:-0.3}" ;; esac
"""
SLEEP = "#!/bin/bash\nexec /bin/sleep 0.1\n"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def board(tmp_path: Path) -> Path:
    config = settled("trainer.nnodes=4", "trainer.n_gpus_per_node=8")
    for name, text in node_scripts(config).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "overrides").write_text('trainer.nnodes=4\ntrainer.experiment_name="a b"\n')
    (tmp_path / "bin").mkdir()
    for name, text in {"python": PYTHON, "sleep": SLEEP}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "calls").touch()
    return tmp_path


@pytest.fixture
def start(board: Path) -> Iterator[Start]:
    begun: list[subprocess.Popen[str]] = []

    def begin(rank: int, **environ: str) -> subprocess.Popen[str]:
        around = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHON"))}
        around |= {
            "PATH": f"{board / 'bin'}:{os.environ['PATH']}", "BOARD": str(board),
            "NODE": str(rank), "MASTER_ADDR": "10.0.0.1", "NODE_TIMEOUT": "20", **environ,
        }  # fmt: skip
        begun.append(
            subprocess.Popen(
                ["bash", str(board / f"node_{rank}.sh")],
                env=around,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        )
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate()


def calls(board: Path, args: str) -> list[int]:
    """Where in the log a call stands that has these words."""
    lines = (board / "calls").read_text().splitlines()
    return [number for number, line in enumerate(lines) if args in line]


@pytest.mark.parametrize("late", [False, True])
def test_four_nodes_meet_train_once_and_end(board: Path, start: Start, late: bool) -> None:
    others = [start(rank) for rank in (1, 2, 3)] if late else []
    if late:
        time.sleep(1.0)  # they find nobody yet
    head = start(0)
    others = others or [start(rank) for rank in (1, 2, 3)]
    assert [process.wait(30) for process in (head, *others)] == [0, 0, 0, 0]
    (submitted,) = calls(board, "0 python -m verl.trainer.main_ppo")
    (opened,) = calls(board, "--head --node-ip-address=10.0.0.1 --port=6379")
    joined = [calls(board, f"{rank} ray start --block") for rank in (1, 2, 3)]
    assert all(opened < tries[-1] < submitted for tries in joined)
    assert any(len(tries) > 1 for tries in joined) or not late
    (read,) = calls(board, f"0 python -m ppo_cli bridge read {board}")
    assert submitted < read and not (board / "head").exists()
    lines = (board / "calls").read_text().splitlines()
    assert all("--address=10.0.0.1:6379" in lines[tries[-1]] for tries in joined)
    line = lines[submitted]
    assert 'trainer.nnodes=4 trainer.experiment_name="a b"' in line
    assert f'VERL_FILE_LOGGER_PATH="{board}/verl/metrics_' in line


def test_a_node_that_never_comes_ends_the_wait_with_a_sentence(board: Path, start: Start) -> None:
    head = start(0, NODE_TIMEOUT="3")
    others = [start(1), start(2)]
    assert head.wait(30) == 3
    assert [process.wait(30) for process in others] == [0, 0]
    assert head.stderr is not None
    output = head.stderr.read()
    assert "After 3 s only 3 of 4 nodes have joined 10.0.0.1:6379." in output
    assert "MASTER_ADDR=10.0.0.1" in output and "NODE_TIMEOUT" in output
    assert calls(board, "main_ppo") == []
    assert not (board / "head").exists()


def test_a_head_that_never_comes_ends_the_wait_with_a_sentence(board: Path, start: Start) -> None:
    node = start(2, NODE_TIMEOUT="1")
    assert node.wait(30) == 3
    assert node.stderr is not None
    output = node.stderr.read()
    assert "After 1 s there is no Ray head to join at 10.0.0.1:6379. Start node_0.sh" in output


def test_without_the_address_of_node_0_nothing_starts(board: Path, start: Start) -> None:
    node = start(1, MASTER_ADDR="")
    assert node.wait(30) != 0 and calls(board, "ray") == []
    assert node.stderr is not None
    assert "set MASTER_ADDR to the address of node 0" in node.stderr.read()


def test_a_reward_that_must_stop_ends_the_run_as_resumable(board: Path, start: Start) -> None:
    others = [start(rank) for rank in (1, 2, 3)]
    head = start(0, TRAINS="60")
    ends = time.monotonic() + 20
    while not calls(board, "main_ppo"):
        assert time.monotonic() < ends
        time.sleep(0.05)
    (board / "stopped").write_text("The budget is used up.\n")
    assert head.wait(30) == 3
    assert head.stderr is not None and "The budget is used up." in head.stderr.read()
    assert [process.wait(30) for process in others] == [0, 0, 0]


def test_a_second_start_of_the_folder_leaves_the_first_alone(board: Path, start: Start) -> None:
    for name in ("joined_1", "joined_2", "joined_3"):
        (board / name).touch()
    head = start(0, TRAINS="3")
    ends = time.monotonic() + 20
    while not calls(board, "main_ppo"):
        assert time.monotonic() < ends
        time.sleep(0.05)
    token = (board / ".ray_token").stat()
    second = start(0)
    assert second.wait(30) == 2
    assert second.stderr is not None and "is already running in" in second.stderr.read()
    assert (board / ".ray_token").stat().st_mtime_ns == token.st_mtime_ns
    assert head.wait(30) == 0
    assert start(0).wait(30) == 0


def test_on_a_cluster_that_exists_no_ray_is_started(board: Path, start: Start) -> None:
    for name in ("head", "joined_1", "joined_2", "joined_3"):
        (board / name).touch()
    head = start(0, RAY_ADDRESS="10.0.0.9:6379")
    assert head.wait(30) == 0
    assert calls(board, "ray start") == []
    assert len(calls(board, "main_ppo")) == 1


def test_the_reward_server_takes_its_key_from_the_file_that_the_script_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "ground_truth": "2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    with JudgeServer(score=lambda system, user: 10) as judge:
        overrides = [
            "model.path=embedded", f"data.train_files={tmp_path}/rows.jsonl", "rollout.n=1",
            "trainer.engine=verl", "trainer.n_gpus_per_node=1", "data.train_batch_size=1",
            "actor.ppo_mini_batch_size=1", "reward.api.enable=true", "reward.api.type=openai",
            "reward.api.model=m", f"reward.api.base_url={judge.url('openai')}",
            "reward.api.key_env=OPENAI_API_KEY", "reward.api.cache=off",
        ]  # fmt: skip
        resolved = resolve(flags={}, preset=None, config_files=[], overrides=overrides, environ={})
        write_folder(tmp_path, resolved, build_overrides(resolved.config))
        (tmp_path / KEYS_FILE).write_text("OPENAI_API_KEY=a=b\n")
        (row,) = pq.read_table(tmp_path / "data/train.parquet").to_pylist()
        server = RewardServer(str(tmp_path), str(tmp_path))
        output = asyncio.run(server.score(row["extra_info"][ROW], "It is 2."))
        assert server._reward is not None
        server._reward.close()
        server._scores.close()
    assert output["score"] == 1.0 and not (tmp_path / KEYS_FILE).exists()
    assert judge.calls[0].key_digest == digest("a=b")
