"""The scripts of several nodes, run with a stand-in for python that notes what it is asked.

test_ray_of_nodes.py runs the script of one node with the real Ray.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ppo_cli.extras.migrate.bridge.folder import node_scripts
from ppo_cli.extras.migrate.bridge.rewards import KEYS_FILE, ROW, RewardServer
from tests.extras.migrate.bridge.settled import settled, write_judged_run
from tests.judge_server.server import JudgeServer, digest
from tests.waiting import wait_until

PYTHON = """#!/bin/bash
case "$*" in
    *ray.nodes*) ls "$BOARD" | grep -c -e head -e joined; exit 0 ;;
    *importlib*) exit 0 ;;
    *secrets*) echo -n token; exit 0 ;;
    *socket*) echo 1; exit 0 ;;
    *ppo_cli.processes.reaper*)
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
Process = subprocess.Popen[str]
OTHERS = (1, 2, 3)


class Nodes:
    """The folder of a run on four nodes, whose scripts run as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._processes = folder, list[Process]()
        config = settled("trainer.nnodes=4", "trainer.n_gpus_per_node=8")
        (folder / "bin").mkdir()
        scripts = node_scripts(config.trainer, config.reward) | {
            "bin/python": PYTHON,
            "bin/sleep": SLEEP,
        }
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "overrides").write_text('trainer.nnodes=4\ntrainer.experiment_name="a b"\n')
        (folder / "calls").touch()

    def start(self, rank: int, **environ: str) -> Process:
        """Run the script of a node."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHON"))}
        variables |= {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "BOARD": str(self.folder),
            "NODE": str(rank), "MASTER_ADDR": "10.0.0.1", "NODE_TIMEOUT": "20", **environ,
        }  # fmt: skip
        process = subprocess.Popen(
            ["bash", str(self.folder / f"node_{rank}.sh")], env=variables, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def touch(self, *names: str) -> None:
        """Make files by which nodes that do not run say that they have joined."""
        for name in names:
            (self.folder / name).touch()

    def lines(self) -> list[str]:
        """What the stand-in was asked, in order, each with the rank of the node."""
        return (self.folder / "calls").read_text().splitlines()

    def calls(self, fragment: str) -> list[int]:
        """Numbers of the lines with this text."""
        return [number for number, line in enumerate(self.lines()) if fragment in line]

    def wait_for_training(self) -> None:
        wait_until(lambda: self.calls("main_ppo"))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    created = Nodes(tmp_path)
    yield created
    created.close()


def finish(process: Process) -> tuple[int, str]:
    """Exit code and errors of a script that ends by itself."""
    errors = process.communicate(timeout=300)[1]
    return process.returncode, errors


@pytest.mark.parametrize("late", [False, True])
def test_four_nodes_meet_train_once_and_end(nodes: Nodes, late: bool) -> None:
    others = [nodes.start(rank) for rank in OTHERS] if late else []
    if late:
        # Each finds nobody yet.
        wait_until(lambda: all(nodes.calls(f"{rank} ray start --block") for rank in OTHERS))
    head = nodes.start(0)
    others = others or [nodes.start(rank) for rank in OTHERS]
    assert [finish(process)[0] for process in (head, *others)] == [0, 0, 0, 0]
    (submitted,) = nodes.calls("0 python -m verl.trainer.main_ppo")
    (opened,) = nodes.calls("--head --node-ip-address=10.0.0.1 --port=6379")
    joined = [nodes.calls(f"{rank} ray start --block") for rank in OTHERS]
    assert all(opened < tries[-1] < submitted for tries in joined)
    assert any(len(tries) > 1 for tries in joined) or not late
    (read,) = nodes.calls(f"0 python -m ppo_cli bridge read {nodes.folder}")
    assert submitted < read and not (nodes.folder / "head").exists()
    lines = nodes.lines()
    assert all("--address=10.0.0.1:6379" in lines[tries[-1]] for tries in joined)
    assert 'trainer.nnodes=4 trainer.experiment_name="a b"' in lines[submitted]
    assert f'VERL_FILE_LOGGER_PATH="{nodes.folder}/verl/metrics_' in lines[submitted]


@pytest.mark.slow
def test_a_node_that_never_comes_ends_the_wait_with_a_sentence(nodes: Nodes) -> None:
    head = nodes.start(0, NODE_TIMEOUT="3")
    others = [nodes.start(1), nodes.start(2)]
    code, errors = finish(head)
    assert [code, *(finish(process)[0] for process in others)] == [3, 0, 0]
    assert "After 3 s only 3 of 4 nodes have joined 10.0.0.1:6379." in errors
    assert "MASTER_ADDR=10.0.0.1" in errors and "NODE_TIMEOUT" in errors
    assert nodes.calls("main_ppo") == []
    assert not (nodes.folder / "head").exists()


def test_a_head_that_never_comes_ends_the_wait_with_a_sentence(nodes: Nodes) -> None:
    code, errors = finish(nodes.start(2, NODE_TIMEOUT="1"))
    assert code == 3
    assert "After 1 s there is no Ray head to join at 10.0.0.1:6379. Start node_0.sh" in errors


def test_without_the_address_of_node_0_nothing_starts(nodes: Nodes) -> None:
    code, errors = finish(nodes.start(1, MASTER_ADDR=""))
    assert code != 0 and "set MASTER_ADDR to the address of node 0" in errors
    assert nodes.calls("ray") == []


def test_a_reward_that_must_stop_ends_the_run_as_resumable(nodes: Nodes) -> None:
    others = [nodes.start(rank) for rank in OTHERS]
    head = nodes.start(0, TRAINS="60")
    nodes.wait_for_training()
    (nodes.folder / "stopped").write_text("The budget is used up.\n")
    code, errors = finish(head)
    assert code == 3 and "The budget is used up." in errors
    assert [finish(process)[0] for process in others] == [0, 0, 0]


@pytest.mark.slow
def test_a_second_start_of_the_folder_leaves_the_first_alone(nodes: Nodes) -> None:
    nodes.touch("joined_1", "joined_2", "joined_3")
    head = nodes.start(0, TRAINS="3")
    nodes.wait_for_training()
    token = nodes.folder / ".ray_token"
    written = token.stat().st_mtime_ns
    code, errors = finish(nodes.start(0))
    assert code == 2 and "is already running in" in errors
    assert token.stat().st_mtime_ns == written
    assert finish(head)[0] == 0
    assert finish(nodes.start(0))[0] == 0


def test_on_a_cluster_that_exists_no_ray_is_started(nodes: Nodes) -> None:
    nodes.touch("head", "joined_1", "joined_2", "joined_3")
    assert finish(nodes.start(0, RAY_ADDRESS="10.0.0.9:6379"))[0] == 0
    assert nodes.calls("ray start") == []
    assert len(nodes.calls("main_ppo")) == 1


def test_the_server_reads_keys_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "")
    rows = [{"prompt": "1 + 1?", "ground_truth": "2"}]
    few = ("rollout.n=1", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1")
    with JudgeServer(score=lambda system, user: 10) as judge:
        key = "reward.api.key_env=OPENAI_API_KEY"
        write_judged_run(tmp_path, rows, judge.url("openai"), key, *few)
        (tmp_path / KEYS_FILE).write_text("OPENAI_API_KEY=a=b\n")
        (row,) = pq.read_table(tmp_path / "data/train.parquet").to_pylist()
        server = RewardServer(str(tmp_path), str(tmp_path))
        output = asyncio.run(server.score(row["extra_info"][ROW], "It is 2."))
        server._reward.close()  # type: ignore[union-attr]
        server._scores.close()
    assert output["score"] == 1.0 and not (tmp_path / KEYS_FILE).exists()
    assert judge.calls[0].key_digest == digest("a=b")
