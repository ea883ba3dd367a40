"""What the nodes of a run tell about themselves, and what does not fit between two of them.

`nodes.py` exchanges these facts before a model is loaded. Settings travel as digests only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ppo_cli
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.run import Config, Trainer
from ppo_cli.digests import digest_text
from ppo_cli.machine.versions import installed_version
from ppo_cli.planning.resolved import Resolved

# Settings that may differ between nodes. The numbers of nodes and GPUs are compared as facts.
# Only node 0 calls judges, so the keys of providers on other nodes do not matter.
NODE_KEYS = frozenset(
    f"trainer.{name}"
    for name in ("node_rank", "master_addr", "master_port", "nnodes", "n_gpus_per_node")
) | frozenset(f"reward.api.monitor.{name}" for name in ("type", "model", "required"))
PACKAGES = ("ray", "torch", "vllm")
ABSENT = "none"
MAX_KEYS_IN_MESSAGE = 6
# Field of `NodeFacts` -> its name in messages.
VERSIONS = {"ppo": "ppo-cli", "code": "ppo-cli code", "python": "Python", **dict.fromkeys(PACKAGES)}


@dataclass(frozen=True)
class NodeFacts:
    """One node: who it is, what it has, and digests of its settings. `trouble` stops its work."""

    rank: int
    nnodes: int
    host: str
    address: str
    gpus: int
    wanted_gpus: int
    ppo: str
    code: str
    python: str
    ray: str
    torch: str
    vllm: str
    slurm_job: str
    settings: Mapping[str, str]
    trouble: str = ""

    @property
    def label(self) -> str:
        """The node in messages: `node 1 (host-b, 10.0.0.2)`."""
        place = self.host if self.host == self.address else f"{self.host}, {self.address}"
        return f"node {self.rank} ({place})"


def read_facts(raw: Mapping[str, Any]) -> NodeFacts:
    """Read facts from their JSON object; another version of ppo-cli may lack some of them."""
    numbers = {"rank", "nnodes", "gpus", "wanted_gpus"}
    defaults = {
        field.name: 0 if field.name in numbers else {} if field.name == "settings" else ""
        for field in fields(NodeFacts)
    }
    return NodeFacts(**{name: raw.get(name, default) for name, default in defaults.items()})


def collect_facts(
    resolved: Resolved, environ: Mapping[str, str], host: str, address: str
) -> NodeFacts:
    """Collect the facts of this node. Versions are read without importing the packages.

    Nodes compare what was set: what is chosen may differ between them.
    """
    trainer = resolved.config.trainer
    return NodeFacts(
        rank=trainer.node_rank or 0,
        nnodes=trainer.nnodes,
        host=host,
        address=address,
        gpus=len(resolved.machine.gpus),
        wanted_gpus=trainer.n_gpus_per_node,
        ppo=ppo_cli.__version__,
        code=_digest_code(),
        python=f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}",
        **{name: installed_version(name) or ABSENT for name in PACKAGES},
        slurm_job=environ.get("SLURM_JOB_ID", ""),
        settings=digest_settings(resolved.requested),
    )


def run_key(trainer: Trainer) -> str:
    """Return a digest of the run's name and folder, which all its nodes share."""
    return _digest(
        ["ppo run", trainer.output_dir, trainer.project_name, trainer.experiment_name], 32
    )


def digest_settings(config: Config) -> dict[str, str]:
    """Return a short digest of each setting that all nodes must share."""
    salt = run_key(config.trainer)
    return {
        key: _digest([salt, key, value_of(config, key)], 8)
        for key in table()
        if key not in NODE_KEYS
    }


def compare_facts(head: NodeFacts, node: NodeFacts) -> list[str]:
    """Return what does not fit between node 0 and another node, a sentence for each difference."""
    # Ranks and jobs, then versions, GPUs and settings: a sentence each.
    who, problems = node.label, []
    if node.nnodes != head.nnodes:
        problems.append(f"{who} was started with NNODES={node.nnodes}, node 0 with {head.nnodes}.")
    elif node.rank >= head.nnodes:
        problems.append(
            f"{who}: NODE_RANK {node.rank} does not exist: node 0 has NNODES={head.nnodes}, so 0 "
            f"to {head.nnodes - 1}."
        )
    if node.slurm_job and head.slurm_job and node.slurm_job != head.slurm_job:
        problems.append(
            f"{who} is of the SLURM job {node.slurm_job}, node 0 of {head.slurm_job}: set another "
            "MASTER_PORT for one of the two jobs."
        )
    for part, name in VERSIONS.items():
        expected, actual = getattr(head, part), getattr(node, part)
        # Another version of ppo-cli has other code anyway.
        if expected != actual and not (part == "code" and node.ppo != head.ppo):
            problems.append(
                f"{who} has {_describe_version(name or part, actual)}, node 0 has "
                f"{_describe_version(name or part, expected)}: install the same on both."
            )
    if node.wanted_gpus != head.wanted_gpus:
        problems.append(
            f"{who} was started with N_GPUS={node.wanted_gpus}, node 0 with "
            f"N_GPUS={head.wanted_gpus}: set the same on every node."
        )
    # Another version has other settings anyway.
    keys = [
        key
        for key in {**head.settings, **node.settings}
        if head.settings.get(key) != node.settings.get(key)
    ]
    if keys and node.ppo == head.ppo:
        unnamed = len(keys) - MAX_KEYS_IN_MESSAGE
        shown = ", ".join(keys[:MAX_KEYS_IN_MESSAGE]) + (
            f" and {unnamed} more" if unnamed > 0 else ""
        )
        problems.append(f"{who} was started with other settings: {shown}.")
    return problems


def check_node(node: NodeFacts) -> list[str]:
    """Return what one node lacks by itself, without a comparison with the others."""
    if node.gpus >= node.wanted_gpus:
        return []
    return [
        f"{node.label} shows {node.gpus} GPUs, but N_GPUS is {node.wanted_gpus}; see nvidia-smi "
        "and CUDA_VISIBLE_DEVICES there."
    ]


def describe_node(node: NodeFacts) -> str:
    """Return the line about a node that node 0 shows at the start."""
    gpus = f"{node.wanted_gpus} of {node.gpus} GPUs" if node.gpus else "no GPU"
    versions = f"ray {node.ray}, torch {node.torch}, vllm {node.vllm}"
    return f"{node.label}: {gpus}, ppo-cli {node.ppo}, Python {node.python}, {versions}"


def _describe_version(name: str, version: str) -> str:
    return f"no {name}" if version == ABSENT else f"{name} {version}"


def _digest_code() -> str:
    """Return a digest of the installed source, which differs between commits of one version."""
    root = Path(ppo_cli.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(os.fsencode(path.relative_to(root)) + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _digest(parts: list[Any], length: int) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return digest_text(text, length)
