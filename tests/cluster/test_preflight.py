"""Facts of nodes, and what does not fit between two of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from ppo_cli.cluster.preflight import (
    NodeFacts,
    compare,
    describe,
    different_keys,
    facts_here,
    fingerprint,
    own_problems,
    read_facts,
    run_key,
)
from ppo_cli.config.schema.run import Config

HEAD = NodeFacts(0, 2, "host-a", 10, 8, 8, "1.0", "3.11", "2.60.0", "2.13.0", "0.32.0")
OTHER = replace(HEAD, rank=1, host="host-b", pid=11)
WHO = "node 1 (host-b, 10.0.0.2)"


def config(**trainer: Any) -> Config:
    return Config.model_validate({"trainer": trainer})


def told(node: NodeFacts, different: list[str] | None = None) -> list[str]:
    return compare(HEAD, node, different or [], WHO)


def test_equal_nodes_fit() -> None:
    assert told(OTHER) == []
    assert own_problems(OTHER, WHO) == []


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("ppo", "1.1", "ppo-cli 1.1, node 0 has ppo-cli 1.0"),
        ("python", "3.12", "Python 3.12, node 0 has Python 3.11"),
        ("ray", "2.59.0", "ray 2.59.0, node 0 has ray 2.60.0"),
        ("torch", "2.12.0", "torch 2.12.0"),
        ("vllm", "none", "has no vllm, node 0 has vllm 0.32.0"),
        ("nnodes", 3, "NNODES=3, node 0 with 2"),
        ("wanted_gpus", 4, "N_GPUS=4, node 0 with N_GPUS=8"),
    ],
)
def test_each_difference_is_one_sentence(part: str, value: Any, words: str) -> None:
    said = told(replace(OTHER, **{part: value}))
    assert len(said) == 1
    assert words in said[0]
    assert said[0].startswith(f"{WHO} ")


def test_all_differences_are_told() -> None:
    assert len(told(replace(OTHER, ray="1", torch="1"), ["actor.optim.lr"])) == 3


def test_other_settings_are_named() -> None:
    mine = fingerprint(config(nnodes=2))
    theirs = fingerprint(
        Config.model_validate({"trainer": {"nnodes": 2}, "actor": {"optim": {"lr": 3e-5}}})
    )
    assert different_keys(mine, theirs) == ["actor.optim.lr"]
    assert told(OTHER, different_keys(mine, theirs)) == [
        "node 1 (host-b, 10.0.0.2) was started with other settings: actor.optim.lr."
    ]


def test_many_other_settings_are_counted() -> None:
    assert told(OTHER, [f"k{n}" for n in range(9)])[0].endswith("k4, k5 and 3 more.")


def test_a_nodes_own_keys_do_not_count() -> None:
    one = fingerprint(config(nnodes=2, node_rank=0, n_gpus_per_node=8))
    two = fingerprint(config(nnodes=2, node_rank=1, master_addr="x", n_gpus_per_node=4))
    assert one == two


def test_strange_keys_are_named_safely() -> None:
    assert different_keys({}, {"a\x1bb": 1}) == ["a b"]  # type: ignore[dict-item]
    assert different_keys({"seed": "1"}, {}) == ["seed"]


def test_the_fingerprint_tells_no_value() -> None:
    text = str(fingerprint(Config.model_validate({"model": {"path": "secret-model"}})))
    assert "secret-model" not in text
    assert len(text) < 40_000


def test_another_run_has_another_key() -> None:
    assert run_key(config()) == run_key(config(seed=7))
    assert run_key(config()) != run_key(config(output_dir="elsewhere"))


def test_too_few_gpus_are_named() -> None:
    said = own_problems(replace(OTHER, gpus=4), WHO)
    assert "shows 4 GPUs, but N_GPUS is 8" in said[0]


def test_a_node_without_ray_is_named() -> None:
    assert "has no ray" in own_problems(replace(OTHER, ray="none"), WHO)[0]


def test_facts_travel() -> None:
    assert read_facts(asdict(OTHER)) == OTHER
    assert read_facts({**asdict(OTHER), "host": "a\nb" + "x" * 500}) is not None


@pytest.mark.parametrize(
    "change", [{"rank": -1}, {"rank": "1"}, {"gpus": True}, {"host": 3}, {"pid": 2**40}]
)
def test_facts_that_are_none(change: dict[str, Any]) -> None:
    assert read_facts({**asdict(OTHER), **change}) is None
    assert read_facts([]) is None


def test_facts_of_this_machine() -> None:
    facts = facts_here(config(nnodes=2, num_workers=2), {"CUDA_VISIBLE_DEVICES": ""}, 1, "here")
    assert (facts.rank, facts.nnodes, facts.gpus, facts.wanted_gpus) == (1, 2, 0, 0)
    assert facts.torch[0].isdigit()
    assert "no GPU" in describe(facts, "node 1")


def test_gpus_that_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppo_cli.cluster.preflight.gpu_count", lambda environ: 8)
    for given, wanted in (({"n_gpus_per_node": 4}, 4), ({}, 1), ({"tensor_parallel_size": 2}, 2)):
        assert facts_here(config(**given), {}, 0, "here").wanted_gpus == wanted
