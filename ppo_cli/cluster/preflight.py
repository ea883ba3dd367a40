"""What each node tells of itself before a model is loaded, and what does not fit together."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Annotated, Any

import pydantic
import pydantic.dataclasses

import ppo_cli
from ppo_cli.cluster.addresses import words
from ppo_cli.config.placement import gpu_count, gpus_per_node
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.digests import digest_text

# What a node may have for itself, and what is compared by number below.
# Only node 0 asks judges; which keys of providers the others have decides nothing.
OWN_KEYS = frozenset(
    f"trainer.{name}"
    for name in ("node_rank", "master_addr", "master_port", "nnodes", "n_gpus_per_node")
) | frozenset(f"reward.api.monitor.{name}" for name in ("type", "model", "required"))
_PACKAGES = ("ray", "torch", "vllm")
_ABSENT = "none"
MOST_KEYS_NAMED = 6


Count = Annotated[int, pydantic.Field(strict=True, ge=0, lt=2**31)]
Text = Annotated[
    str, pydantic.Field(strict=True), pydantic.AfterValidator(lambda said: words(said, 80))
]


@pydantic.dataclasses.dataclass(frozen=True)
class NodeFacts:
    """One node, as it tells of itself."""

    rank: Count
    nnodes: Count
    host: Text
    pid: Count
    gpus: Count
    wanted_gpus: Count
    ppo: Text
    python: Text
    ray: Text
    torch: Text
    vllm: Text


def facts_here(config: Config, environ: Mapping[str, str], rank: int, host: str) -> NodeFacts:
    """Gather the facts of this node; no package is imported for it."""
    gpus = gpu_count(environ)
    return NodeFacts(
        rank=rank,
        nnodes=config.trainer.nnodes,
        host=host,
        pid=os.getpid(),
        gpus=gpus,
        wanted_gpus=gpus_per_node(config, gpus),
        ppo=ppo_cli.__version__,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: _version(name) for name in _PACKAGES},
    )


def read_facts(raw: object) -> NodeFacts | None:
    """Read facts that came over the wire; None where they are not facts."""
    try:
        return pydantic.TypeAdapter(NodeFacts).validate_python(raw)
    except pydantic.ValidationError:
        return None


def run_key(config: Config) -> str:
    """Return what tells this run from another, without telling anything of it."""
    trainer = config.trainer
    named = [trainer.output_dir, trainer.project_name, trainer.experiment_name]
    return _digest(["ppo run", *named], 32)


def fingerprint(config: Config) -> dict[str, str]:
    """Return a short digest of every setting that the nodes must share."""
    salt = run_key(config)
    return {
        key: _digest([salt, key, value_of(config, key)], 8)
        for key in table()
        if key not in OWN_KEYS
    }


def different_keys(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the settings in which two fingerprints differ, by name."""
    known = {key for key in theirs if key in ours}
    other = [words(key, 60) for key in theirs if key not in ours]
    changed = [key for key in ours if key not in known or ours[key] != theirs[key]]
    return [*changed, *other]


def compare(head: NodeFacts, node: NodeFacts, different: Iterable[str], who: str) -> list[str]:
    """Return what does not fit between node 0 and another, which the texts call `who`."""
    said = []
    if node.nnodes != head.nnodes:
        said.append(f"{who} was started with NNODES={node.nnodes}, node 0 with {head.nnodes}.")
    names = {"ppo": "ppo-cli", "python": "Python", "ray": "ray", "torch": "torch", "vllm": "vllm"}
    for part, name in names.items():
        here, there = getattr(head, part), getattr(node, part)
        if here != there:
            said.append(
                f"{who} has {_having(name, there)}, node 0 has {_having(name, here)}: "
                "install the same on both."
            )
    if node.wanted_gpus != head.wanted_gpus:
        said.append(
            f"{who} was started with N_GPUS={node.wanted_gpus}, node 0 with "
            f"N_GPUS={head.wanted_gpus}: every node gives as many."
        )
    keys = list(different)
    if keys:
        more = len(keys) - MOST_KEYS_NAMED
        shown = ", ".join(keys[:MOST_KEYS_NAMED]) + (f" and {more} more" if more > 0 else "")
        said.append(f"{who} was started with other settings: {shown}.")
    return said


def own_problems(node: NodeFacts, who: str) -> list[str]:
    """Return what one node lacks by itself."""
    said = []
    if node.ray == _ABSENT:
        said.append(f"{who} has no ray: pip install ray there.")
    if node.gpus < node.wanted_gpus:
        said.append(
            f"{who} shows {node.gpus} GPUs, but N_GPUS is {node.wanted_gpus}; see nvidia-smi and "
            "CUDA_VISIBLE_DEVICES there."
        )
    return said


def describe(node: NodeFacts, label: str) -> str:
    """Return the one line that a node gets in the report."""
    gpus = f"{node.wanted_gpus} of {node.gpus} GPUs" if node.gpus else "no GPU"
    versions = f"ray {node.ray}, torch {node.torch}, vllm {node.vllm}"
    return f"{label}: {gpus}, ppo-cli {node.ppo}, Python {node.python}, {versions}"


def _having(name: str, version: str) -> str:
    return f"no {name}" if version == _ABSENT else f"{name} {version}"


def _version(package: str) -> str:
    names = (package, f"{package}-cpu") if package == "vllm" else (package,)
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return _ABSENT


def _digest(parts: list[Any], length: int) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return digest_text(text, length)
