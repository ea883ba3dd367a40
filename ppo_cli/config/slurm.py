"""What SLURM says of a node: its rank, the number of nodes, the first node's address, its GPUs.

Only what is not set otherwise (NNODES, NODE_RANK, MASTER_ADDR, N_GPUS) is read from SLURM, and
only inside a step (`srun`), where each node runs the line once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ppo_cli.errors import ConfigError

# Variables of a node, by the names that ppo reads, and the settings that they set.
KEYS = {
    "NNODES": "trainer.nnodes",
    "NODE_RANK": "trainer.node_rank",
    "MASTER_ADDR": "trainer.master_addr",
    "N_GPUS": "trainer.n_gpus_per_node",
}
# A limit for short forms such as a-[1-999999999], which would fill the memory.
MOST_HOSTS = 100_000
# How to start one process per node, for the messages.
_SRUN = "srun --ntasks-per-node=1 ./train.sh …"


@dataclass(frozen=True)
class NodeVariables:
    """Variables to add to the environment, and the origin of each for messages."""

    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def node_variables(environ: Mapping[str, str], set_keys: Collection[str] = ()) -> NodeVariables:
    """Read the node from SLURM; `set_keys` are the keys that flags or files have set already."""
    # Without NNODES, ranks of a launcher would each start a whole run.
    env = {name: text.strip() for name, text in environ.items() if text.strip()}
    if "NNODES" not in env and "trainer.nnodes" not in set_keys:
        _refuse_ranks(env)
    slurm = _read_slurm_step(env)
    missing = {
        name: value
        for name, value in slurm.items()
        if name not in env and KEYS[name] not in set_keys
    }
    return NodeVariables(
        {name: value for name, (value, _) in missing.items()},
        {name: f"env {origin}" for name, (_, origin) in missing.items()},
    )


def slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of the SLURM step or job in the order of their node ids, if any."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if not listed:
        return []
    with contextlib.suppress(ConfigError):
        return expand_hosts(listed)
    return []


def expand_hosts(listed: str) -> list[str]:
    """Expand SLURM's short form: `a-[1-3,05],b` is a-1 a-2 a-3 a-05 b."""
    hosts: list[str] = []
    for item in _split_hosts(listed):
        hosts += _expand_item(item, listed)
        if len(hosts) > MOST_HOSTS:
            raise ConfigError(f"the node list '{listed[:80]}' names more than {MOST_HOSTS} hosts.")
    return hosts


def outside_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a SLURM job of several nodes, and the command runs outside a step."""
    return _parse_count(_first_variable(environ, _NODES)[0]) > 1 and not environ.get(
        "SLURM_STEP_ID", ""
    )


# The number of nodes, from the step to the job: a step may use fewer nodes than its job.
_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def _read_slurm_step(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return variable -> (value, origin) of a SLURM step on several nodes; {} elsewhere."""
    nodes, origin = _first_variable(env, _NODES)
    # Outside a step there is no node id, and nothing to read.
    if env.get("SLURM_NODEID") is None or not nodes:
        return {}
    _refuse_tasks(env)
    # NNODES wins over SLURM's count; a run on one node needs no variables.
    if _parse_count(env.get("NNODES", nodes)) <= 1:
        return {}
    variables = {"NNODES": (nodes, origin), "NODE_RANK": (env["SLURM_NODEID"], "SLURM_NODEID")}
    # The first host of the list has node id 0.
    hosts = slurm_hosts(env)
    if hosts:
        variables["MASTER_ADDR"] = (hosts[0], "SLURM_JOB_NODELIST")
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdecimal():
        variables["N_GPUS"] = (gpus, "SLURM_GPUS_ON_NODE")
    return variables


def _refuse_tasks(env: Mapping[str, str]) -> None:
    """Raise ConfigError for a SLURM step that starts the command several times on a node."""
    in_step = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    outside = (
        env.get("SLURM_NTASKS_PER_NODE", "1") if _parse_count(env.get("SLURM_NNODES")) > 1 else "1"
    )
    tasks = max((_parse_count(part) for part in (in_step or outside).split(",")), default=1)
    local = _parse_count(env.get("SLURM_LOCALID"))
    if tasks > 1 or local > 0:
        many = f"{tasks} times" if tasks > 1 else f"several times (SLURM_LOCALID {local})"
        raise ConfigError(
            f"srun starts this line {many} on each node, but ppo is started once per node, and "
            f"starts what it needs on each GPU by itself: {_SRUN}"
        )


def _refuse_ranks(env: Mapping[str, str]) -> None:
    """Raise ConfigError for a start by torchrun, which would start a whole run in each rank."""
    world = _parse_count(env.get("WORLD_SIZE"))
    if world < 2 or "RANK" not in env:
        return
    seen = " ".join(
        f"{name}={env[name][:20]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in env
    )
    if "LOCAL_RANK" in env:
        mend = "leave the launcher out, and say N_GPUS=8, and NNODES=2 NODE_RANK=0 for more nodes."
    else:
        mend = f"if those count nodes, say NNODES={world} NODE_RANK={env['RANK'][:20]} instead."
    raise ConfigError(
        f"{seen} are set as by torchrun, while NNODES is not: ppo is started once per node, not "
        f"once a GPU; {mend}"
    )


def _first_variable(env: Mapping[str, str], names: Collection[str]) -> tuple[str, str]:
    return next(((env[n], n) for n in names if env.get(n, "").strip()), ("", ""))


def _parse_count(text: str | None) -> int:
    """Return the number at the start of `4(x2)`; 0 where there is none."""
    match = re.match(r"\s*(\d{1,9})", text or "")
    return int(match.group(1)) if match else 0


def _split_hosts(listed: str) -> list[str]:
    """Split at the commas outside brackets."""
    return [item for item in re.split(r",(?![^\[]*\])", listed) if item.strip()]


def _expand_item(item: str, listed: str) -> list[str]:
    """Expand one item of a node list, such as `a-[1-3]x[1-2]`."""
    # A prefix, numbers in brackets, and a rest that may have brackets again.
    match = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", item.strip())
    if match is None:
        if "[" in item or "]" in item:
            raise ConfigError(f"the node list '{listed[:80]}' cannot be read.")
        return [item.strip()]
    before, numbers, after = match.groups()
    rests = _expand_item(after, listed) if after else [""]
    return [f"{before}{n}{rest}" for n in _expand_numbers(numbers, listed) for rest in rests]


def _expand_numbers(text: str, listed: str) -> list[str]:
    """Expand `1-3,05` to texts; zeros in front stay."""
    numbers: list[str] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal()) or int(high) - int(low) > MOST_HOSTS:
            raise ConfigError(f"the node list '{listed[:80]}' cannot be read.")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers
