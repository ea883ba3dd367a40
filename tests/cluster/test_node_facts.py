"""Facts of nodes, and what does not fit between two of them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cluster import node_facts
from ppo_cli.cluster.node_facts import (
    NodeFacts,
    check_node,
    collect_facts,
    compare_facts,
    describe_node,
    digest_settings,
    read_facts,
    run_key,
)
from ppo_cli.config.schema.run import Config
from tests.settings import complete, resolved

HEAD = NodeFacts(
    0, 2, "host-a", "10.0.0.1", 8, 8, "1.0", "c0de", "3.11.7", "2.60.0", "2.13.0", "0.32.0", "7", {}
)
NODE = replace(HEAD, rank=1, host="host-b", address="10.0.0.2")


def config(**sections: Any) -> Config:
    return complete(sections)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({}, None),
        ({"slurm_job": ""}, None),
        ({"slurm_job": "8"}, "SLURM job 8, node 0 of 7"),
        ({"ppo": "1.1", "code": "0ther", "settings": {"a": "1"}}, "ppo-cli 1.1, node 0 has ppo"),
        ({"code": "0ther"}, "ppo-cli code 0ther"),
        ({"python": "3.12.1"}, "Python 3.12.1, node 0 has Python 3.11.7"),
        ({"ray": "2.59.0"}, "ray 2.59.0, node 0 has ray 2.60.0"),
        ({"torch": "2.12.0"}, "torch 2.12.0"),
        ({"vllm": "none"}, "has no vllm, node 0 has vllm 0.32.0"),
        ({"nnodes": 3, "rank": 2}, "NNODES=3, node 0 with 2"),
        ({"rank": 2}, "NODE_RANK 2 does not exist"),
        ({"wanted_gpus": 4}, "N_GPUS=4, node 0 with N_GPUS=8"),
        ({"settings": {"a.b": "1"}}, "other settings: a.b."),
        ({"settings": {f"k{n}": "" for n in range(9)}}, "k4, k5 and 3 more."),
    ],
)
def test_each_difference_is_one_sentence(changes: dict[str, Any], fragment: str | None) -> None:
    node = replace(NODE, **changes)
    problems = compare_facts(HEAD, node)
    assert len(problems) == (fragment is not None)
    assert all(
        fragment in text and text.startswith(f"{node.label}") for text in problems if fragment
    )


def test_settings_are_compared_without_their_values() -> None:
    trainer = {"nnodes": 2, "node_rank": 0, "n_gpus_per_node": 8}
    settings = config(trainer=trainer, model={"path": "secret-model"})
    digests = digest_settings(settings)
    assert "secret-model" not in str(digests)
    other = {"nnodes": 2, "node_rank": 1, "master_addr": "x", "n_gpus_per_node": 4}
    assert digest_settings(config(trainer=other, model={"path": "secret-model"})) == digests
    changed = digest_settings(
        config(trainer=trainer, model={"path": "secret-model"}, actor={"optim": {"lr": 3e-5}})
    )
    assert [key for key in digests if digests[key] != changed[key]] == ["actor.optim.lr"]
    assert run_key(config().trainer) == run_key(config(trainer={"seed": 7}).trainer)
    assert run_key(config().trainer) != run_key(config(trainer={"output_dir": "elsewhere"}).trainer)


def test_too_few_gpus_are_named() -> None:
    assert check_node(HEAD) == []
    assert "shows 4 GPUs, but N_GPUS is 8" in check_node(replace(NODE, gpus=4))[0]


def test_facts_of_this_machine_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(trainer={"nnodes": 2, "num_workers": 2, "node_rank": 1})
    facts = collect_facts(resolved(settings), {}, "here", "here")
    assert (facts.rank, facts.nnodes, facts.gpus, facts.wanted_gpus) == (1, 2, 0, 0)
    assert facts.torch[0].isdigit() and facts.label == "node 1 (here)"
    assert "no GPU" in describe_node(facts)
    assert read_facts(json.loads(json.dumps(asdict(facts)))) == facts
    assert read_facts({"rank": 1, "ppo": "0.0"}).ppo == "0.0"  # of an older version
    monkeypatch.setattr(node_facts.ppo_cli, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "changed.py").write_text("1")
    assert collect_facts(resolved(settings), {}, "here", "here").code != facts.code
