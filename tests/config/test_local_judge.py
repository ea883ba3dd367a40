"""A judge that the run starts: where it may stand, what it lacks, what it takes of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ppo_cli.config.device_roles import read_placement
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.findings.judge_server import (
    judge_server_remarks,
    missing_for_judge_server,
    vllm_python,
)
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.memory.devices import DeviceNeeds, count_judge_server
from ppo_cli.planning.placement import (
    describe_placement,
    local_judge,
    placement_of,
)
from ppo_cli.planning.resolved import Resolved
from tests.config.settling import settle
from tests.settings import CPU, complete

ROOT = Path(__file__).resolve().parents[2]
ON = "reward.api.enable=true reward.api.type=local reward.api.model="
GPUS = "trainer.n_gpus_per_node=8 trainer.placement="


def resolve(overrides: str, machine: Machine = CPU) -> Resolved:
    return settle(*overrides.split(), machine=machine)


def test_a_placement_gives_the_judge_its_gpus() -> None:
    assert read_placement("train:0-5,rollout:6,judge:7")["judge"] == (7,)
    placed = resolve(f"{ON}embedded {GPUS}train:0-4,rollout:5,judge:6-7").config
    assert complete(placed).reward.api.local.devices == (6, 7)
    assert "the judge's server on GPUs 6-7" in describe_placement(placement_of(placed))


def test_what_it_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PPO_VLLM_PYTHON": "/py"}
    assert missing_for_judge_server(Scene(resolve(f"{ON}embedded"), environ)) == []
    assert missing_for_judge_server(Scene(resolve(f"{ON}Qwen/Qwen3-8B"), environ)) == []
    monkeypatch.chdir(tmp_path)
    (lost,) = missing_for_judge_server(Scene(resolve(f"{ON}."), environ))
    assert "no model folder" in lost
    monkeypatch.setattr("ppo_cli.planning.findings.judge_server.find_spec", lambda name: None)
    judge = tmp_path / "bin" / "python"
    assert vllm_python({"PPO_JUDGE_VENV": str(tmp_path)}) is None
    (lost,) = missing_for_judge_server(
        Scene(resolve(f"{ON}embedded"), {"PPO_JUDGE_VENV": str(tmp_path)})
    )
    assert "scripts/setup judge" in lost
    judge.parent.mkdir()
    judge.touch()
    assert vllm_python({"PPO_JUDGE_VENV": str(tmp_path)}) == str(judge)


def test_the_environment_of_setup_is_found_in_the_checkout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ROOT / ".venv-judge" / "bin" / "python"  # as scripts/local_judge.sh has it
    monkeypatch.setattr("ppo_cli.planning.findings.judge_server.find_spec", lambda name: None)
    monkeypatch.setattr(Path, "exists", lambda path: path == made)
    assert vllm_python({}) == str(made)


def test_its_memory_is_counted_and_one_that_does_not_fit_is_refused() -> None:
    def count(model: str) -> DeviceNeeds | None:
        config = resolve(f"{ON}{model}").config
        judge = local_judge(config.reward)
        return count_judge_server(judge, placement_of(config), config.trainer, CPU)

    place = count("embedded")
    assert place is not None and place.fits
    assert place.needed > place.roles["judge"].parameters > 1_000_000
    assert count("Qwen/Qwen3-8B") is None, "its weights are not here"
    small = resolve(f"{ON}embedded", replace(CPU, host_bytes=1 << 30))
    (message,) = missing_for_judge_server(Scene(small, {"PPO_VLLM_PYTHON": "/py"}))
    assert "needs about 3 GiB on each of its devices, which have 1 GiB" in message


def test_a_judge_that_is_the_trained_model_is_warned_of() -> None:
    same = resolve(f"{ON}embedded").config
    assert "likes its own mistakes" in next(judge_server_remarks(same.reward, "embedded"))
    other = resolve(f"{ON}Qwen/Qwen3-8B").config
    assert not list(judge_server_remarks(other.reward, "embedded"))
