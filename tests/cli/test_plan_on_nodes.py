"""`ppo plan` under SLURM: it plans the nodes that `ppo train` would use, and says where from."""

from __future__ import annotations

import json

import pytest

from ppo_cli.cli.app import main

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "a-[1-2]",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.fixture(autouse=True)
def a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("NNODES", "NODE_RANK", "MASTER_ADDR", "N_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


def test_the_nodes_of_a_step_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--preset", "embedded"]) == 0
    plan = json.loads(capsys.readouterr().out)
    values = {key: tuple(entry.values()) for key, entry in plan["values"].items()}
    assert values["trainer.nnodes"] == (2, "env SLURM_NNODES")
    assert values["trainer.node_rank"] == (1, "env SLURM_NODEID")
    assert values["trainer.master_addr"] == ("a-1", "env SLURM_JOB_NODELIST")
    assert values["trainer.n_gpus_per_node"] == (8, "env SLURM_GPUS_ON_NODE")
    assert plan["placement"]["learner_ranks"] == 16
    assert sum("no GPU is visible" in note for note in plan["notes"]) == 1


@pytest.mark.parametrize(("memory", "count"), [((), 1), (("--device_memory", "24GB"), 0)])
def test_gpus_elsewhere_need_not_be_here(
    memory: tuple[str, ...], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--json", "--preset", "embedded", "--n_gpus", "1", *memory]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert sum("no GPU is visible" in note for note in notes) == count


def test_what_is_said_outright_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--preset", "embedded", "--n_gpus", "4"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["trainer.n_gpus_per_node"] == {"value": 4, "origin": "flag --n_gpus"}
    assert values["trainer.nnodes"]["origin"] == "env SLURM_NNODES"
