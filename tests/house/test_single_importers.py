"""A file that one neighbour alone imports joins that neighbour, unless it stands for itself.

A file stands for itself when another process runs it, when it is one of several variants behind a
declaration, or when it is a separate idea.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tests.house.test_floors import own_imports

MOST = 28
STANDS = {
    "callables": "how functions and rows become files; library is what is offered in Python",
    "cli.bridge": "a separate command: runs on verl",
    "cli.reward": "a separate group of commands; a run at its start audits as one of them does",
    "cli.reward_tables": "how results look; reward is the commands",
    "cluster.engine": "the engine itself; driver_process is the process around it",
    "cluster.node_facts": "what is compared; nodes is how nodes meet",
    "engine.sharding.tensor_parallel": "another way to split a model than load's pieces",
    "engine.training.experts": "what routers do; with it, actor_critic holds two ideas",
    "engine.simulation.counters": "counters for any code; benchmarks use them on other trainers",
    "engine.simulation.device": "the device itself; with it, steps holds two ideas",
    "environments.worker": "a separate program, in the environment's process",
    "environments.calls": "what families write; chat is how conversations become tokens",
    "library": "what is offered in Python; the package itself has to stay quick to import",
    "report.page.rollouts": "reads and chooses responses; the server only sends them",
    "rewards.algebra": "what sympy compares, in workers; rules stays free of it",
    "rewards.code.probe": "a separate program, inside the sandbox",
    "rewards.judge.providers.claude": "one provider of several, behind their declarations",
    "rewards.judge.providers.gemini": "one provider of several, behind their declarations",
    "rewards.environment": "one kind of reward of several, which registry builds",
    "rewards.mixture": "the mixture itself; registry builds rewards of every kind",
    "rewards.pool": "a process pool with kill; function is the user's file",
    "secret_patterns": "what keys look like; redact is how they are removed",
    "self_test.checks.kernels": "one check of several, behind their declarations",
    "self_test.checks.samplers": "one check of several, behind their declarations",
    "self_test.declarations": "where a check is declared; runner is how checks run",
    "tinker.models": "models and their calls; server is HTTP, sessions and files",
    "rewards.models.protocols": "how requests look; served is the client and the reward",
    "rewards.remote.admission": "when calls may leave; client is what happens to one of them",
}


def single_importers(sources: Mapping[str, str]) -> dict[str, str]:
    """Module -> the one that imports it, where that is the only one and lies beside it."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, source in sources.items():
        for name in own_imports(source) & sources.keys() - {module}:
            importers[name].add(module)
    return {
        module: min(by)
        for module, by in sorted(importers.items())
        if len(by) == 1 and min(by).rpartition(".")[0] == module.rpartition(".")[0]
    }


def test_a_file_with_one_importer_beside_it_joins_it(modules: dict[str, str]) -> None:
    single = single_importers(modules)
    problems = [
        f"{module} is imported by {by} alone: fold it into that, or say in STANDS why it stands"
        for module, by in single.items()
        if module not in STANDS
    ]
    problems += [
        f"{module}: take it off the list" for module in sorted(STANDS.keys() - single.keys())
    ]
    assert not problems, "\n".join(problems)
    assert len(STANDS) <= MOST


def test_single_importers_are_seen() -> None:
    both = "from ppo_cli.a import c\ndef f():\n    from ppo_cli.a.b import x"
    assert single_importers({"a.b": "", "a.c": "", "a.d": both}) == {"a.b": "a.d", "a.c": "a.d"}
    assert single_importers({"a.b": "", "e.d": "import ppo_cli.a.b"}) == {}
    assert single_importers({"a.b": "", "a.c": both, "a.d": both})["a.c"] == "a.d"
