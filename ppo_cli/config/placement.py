"""Which devices train, sample and score: what `--placement` says, or what suits the run.

Devices are GPUs, numbered over all nodes, or slots (places for a process) on the CPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ppo_cli.config.derived import (
    Roles,
    data_ranks,
    engine_name,
    gpus_per_node,
    learner_ranks,
    numbered,
    read_placement,
    sampler_name,
    train_devices,
    weight_transfer,
)
from ppo_cli.config.known_models import is_url
from ppo_cli.config.mixture import models_of
from ppo_cli.config.schema import Config


@dataclass(frozen=True)
class Placement:
    """Who works where; without GPUs (`devices_per_node` 0) the numbers are slots.

    Each entry of `rollout` holds the devices of one sampler. `reward` are the devices of the
    reward models that the run hosts itself, empty where there is none. `alone`: one process
    does it all.
    """

    nodes: int
    devices_per_node: int
    train: tuple[int, ...]
    rollout: tuple[tuple[int, ...], ...]
    reward: tuple[int, ...]
    alone: bool = False

    @property
    def sleepers(self) -> tuple[int, ...]:
        """The samplers, by number, that use a device that trains: they sleep while it does."""
        train = {*self.train}
        return tuple(i for i, devices in enumerate(self.rollout) if train & {*devices})

    def node_of(self, device: int) -> int | None:
        """Return the node that has a GPU; None on the CPU, where slots are on no node yet."""
        return device // self.devices_per_node if self.devices_per_node else None


def placement_of(config: Config, gpus: int | None = None) -> Placement:
    """Work out who works where; `gpus` are those visible on this node, None looks."""
    per_node, nodes = gpus_per_node(config, gpus), config.trainer.nnodes
    if engine_name(config, gpus) == "local":
        return Placement(1, min(1, per_node), (0,), ((0,),), (), alone=True)
    span = config.rollout.tensor_model_parallel_size
    if config.trainer.placement is not None:
        roles = read_placement(config.trainer.placement)
    else:
        roles = _usual(config, train_devices(config, gpus), per_node * nodes)
    train, rollout = roles.get("train", ()), roles.get("rollout", ())
    reward = roles.get("reward") or _reward_devices(config, train, rollout, per_node)
    samplers = tuple(rollout[at : at + span] for at in range(0, len(rollout), span))
    return Placement(nodes, per_node, train, samplers, reward)


def _usual(config: Config, train: tuple[int, ...], gpus: int) -> Roles:
    """Place roles that nobody placed: all GPUs do both, or, on the CPU, each has its own slot."""
    first = len(train)
    if gpus == 0:
        slots = range(first, first + (config.rollout.num_samplers or 1))
        return {"train": train, "rollout": tuple(slots)}
    return {
        "train": train,
        "rollout": tuple(range(first, gpus)) if config.trainer.async_steps else train,
    }


def _reward_devices(
    config: Config, train: tuple[int, ...], rollout: tuple[int, ...], per_node: int
) -> tuple[int, ...]:
    """Give reward models the last GPU that trains, or the first slot that is free."""
    if not hosts_reward(config):
        return ()
    return train[-1:] if per_node else (max((*train, *rollout)) + 1,)


def hosts_reward(config: Config) -> bool:
    """Tell whether a reward model runs on this machine's devices: no server, not set to `cpu`."""
    return any(
        not is_url(str(model.settings.path)) and model.settings.device != "cpu"
        for model in models_of(config.reward)
    )


def describe(placement: Placement) -> list[str]:
    """Say who works where, in sentences."""
    if placement.alone:
        where = "the GPU" if placement.devices_per_node else "the CPU"
        return [f"one process on {where} trains and samples"]
    said = [f"{_learners(placement)}, {_samplers(placement)}"]
    if placement.reward:
        said.append(f"reward models on {_devices(placement, placement.reward)}{_beside(placement)}")
    if idle := _idle(placement):
        said.append(f"{_devices(placement, idle)} {'does' if len(idle) == 1 else 'do'} nothing")
    if placement.nodes > 1 and placement.devices_per_node:
        said.append(", ".join(_nodes(placement)))
    elif placement.nodes > 1:
        said.append(f"the slots are spread over {placement.nodes} nodes")
    return said


def _learners(placement: Placement) -> str:
    train = placement.train
    return f"{_count(len(train), 'learner rank')} on {_devices(placement, train)}"


def _samplers(placement: Placement) -> str:
    rollout = tuple(device for sampler in placement.rollout for device in sampler)
    count, span = len(placement.rollout), len(placement.rollout[0]) if placement.rollout else 0
    what = _count(count, "sampler")
    if placement.devices_per_node and (span > 1 or count > 1):
        what += f" of {_count(span, 'GPU')}"
    if rollout == placement.train:
        kind = "GPU" if placement.devices_per_node else "slot"
        return f"{what} on the same {kind}{'s' if len(rollout) > 1 else ''} (asleep while training)"
    return f"{what} on {_devices(placement, rollout)}{_asleep(placement)}"


def _asleep(placement: Placement) -> str:
    """Say which samplers share devices with the learner, where not all devices are shared."""
    sleepers, count = placement.sleepers, len(placement.rollout)
    if not sleepers:
        return ""
    if len(sleepers) == count:
        return f" ({'shares' if count == 1 else 'share'} with training, asleep meanwhile)"
    devices = tuple(device for i in sleepers for device in placement.rollout[i])
    one = len(sleepers) == 1
    return (
        f" ({'that' if one else 'those'} on {_devices(placement, devices)} "
        f"{'shares' if one else 'share'} with training, asleep meanwhile)"
    )


def _beside(placement: Placement) -> str:
    """Say with whom the reward models share devices; they never sleep."""
    reward = {*placement.reward}
    others = {
        "training": {*placement.train},
        "sampling": {device for sampler in placement.rollout for device in sampler},
    }
    shared = [
        f"{numbered(tuple(sorted(reward & used)))} with {what}"
        for what, used in others.items()
        if reward & used
    ]
    return f" (shares {' and '.join(shared)})" if shared else ""


def _idle(placement: Placement) -> tuple[int, ...]:
    busy = {*placement.train, *placement.reward, *(d for s in placement.rollout for d in s)}
    every = range(placement.nodes * placement.devices_per_node)
    return tuple(device for device in every if device not in busy)


def _nodes(placement: Placement) -> list[str]:
    size = placement.devices_per_node
    spans = (tuple(range(node * size, (node + 1) * size)) for node in range(placement.nodes))
    return [f"node {node} has {_devices(placement, span)}" for node, span in enumerate(spans)]


def _devices(placement: Placement, devices: tuple[int, ...]) -> str:
    kind = "GPU" if placement.devices_per_node else "CPU slot"
    return f"{kind}{'s' if len(devices) > 1 else ''} {numbered(devices)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class PlanPart:
    """A part of a plan: sentences for people, and for programs what JSON takes."""

    sentences: tuple[str, ...]
    facts: dict[str, Any]


def device_plan(config: Config, gpus: int | None = None) -> PlanPart:
    """Lay out who works where; `gpus` are those visible on this node, None looks."""
    placement = placement_of(config, gpus)
    engine, sampler = engine_name(config, gpus), sampler_name(config, gpus)
    said = describe(placement)
    if engine == "ray":
        said += [*_layout(config, gpus), f"the sampler is {sampler}, the processes are Ray's"]
    if sampler == "vllm":
        said.append(f"new weights travel by {weight_transfer(config, gpus)}")
    facts = {
        "engine": engine,
        **asdict(placement),
        "sleepers": placement.sleepers,
        "sampler": sampler,
        "learner_ranks": learner_ranks(config, gpus),
        "data_ranks": data_ranks(config, gpus),
        "sentences": tuple(said),
    }
    return PlanPart(tuple(said), facts)


def _layout(config: Config, gpus: int | None) -> list[str]:
    """Tell how several ranks hold the models and share the rows."""
    ranks, rows = learner_ranks(config, gpus), data_ranks(config, gpus)
    tensor, size = config.trainer.tensor_parallel_size, config.actor.fsdp_config.fsdp_size
    shards = rows if size == -1 else size
    said = []
    if shards > 1:
        said.append(f"each model is sharded over {shards} ranks")
    if tensor > 1:
        said.append(f"each layer is split over {tensor} ranks")
    if shards < rows:
        said.append(f"there are {rows // shards} copies of each model")
    if 1 < rows < ranks:
        said.append(f"{rows} groups of ranks share the rows")
    elif rows > 1:
        said.append(f"{rows} ranks share the rows")
    return [", ".join(said)] if said else []
