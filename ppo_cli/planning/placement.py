"""The placement of a run: which devices do what, from settings in which nothing is unset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ppo_cli.config.device_roles import Roles, format_devices, read_placement
from ppo_cli.config.mixture import Judge, judges_of, models_of
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config, Trainer
from ppo_cli.errors import plural
from ppo_cli.machine.machine import Machine


def shared_samplers(trainer: Trainer) -> Literal["all", "some", "none"]:
    """Return how many of the sampling devices also train; ValueError as in `placement_of`."""
    if trainer.placement is None:
        # Async samplers have their own devices; otherwise all share.
        return "none" if trainer.async_steps else "all"
    roles = read_placement(trainer.placement)
    train, rollout = {*roles.get("train", ())}, {*roles.get("rollout", ())}
    if not train & rollout:
        return "none"
    return "all" if rollout <= train else "some"


@dataclass(frozen=True)
class Placement:
    """Which devices do what; without GPUs (`devices_per_node` 0) the numbers are slots.

    Each entry of `rollout` has the devices of one sampler. `reward` has the devices of the reward
    models that the run hosts; empty without one. `alone`: one process does everything.
    """

    nodes: int
    devices_per_node: int
    train: tuple[int, ...]
    rollout: tuple[tuple[int, ...], ...]
    reward: tuple[int, ...]
    alone: bool = False
    judge: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return max(1, len(self.train))

    @property
    def sleepers(self) -> tuple[int, ...]:
        """Numbers of the samplers on a device that trains; they sleep while it trains."""
        # A sampler sleeps if any of its devices trains.
        train = {*self.train}
        return tuple(i for i, devices in enumerate(self.rollout) if train & {*devices})

    def node_of(self, device: int) -> int | None:
        """Return the node that has a GPU; None on the CPU, where slots are on no node yet."""
        return device // self.devices_per_node if self.devices_per_node else None


def data_ranks(config: Config) -> int:
    """Return how many ranks share the rows of a mini-batch."""
    return max(1, placement_of(config).ranks // config.trainer.tensor_parallel_size)


def placement_of(config: Config) -> Placement:
    """Return which devices do what.

    Whether these devices exist is not checked. Raises ValueError as `read_placement` does.
    """
    trainer, rollout = config.trainer, config.rollout
    per_node, span = trainer.n_gpus_per_node, rollout.tensor_model_parallel_size
    if trainer.engine == "local":
        return Placement(1, min(1, per_node), (0,), ((0,),), (), alone=True)
    # Roles as placed, or by default.
    if trainer.placement is not None:
        roles = read_placement(trainer.placement)
    else:
        group = trainer.tensor_parallel_size * max(1, config.actor.fsdp_config.fsdp_size)
        roles = _default_roles(trainer, rollout.num_samplers or 1, span, group)
    train, sampling = roles.get("train", ()), roles.get("rollout", ())
    # Without a place of their own, reward models get the last GPU that trains, or the first free
    # slot.
    reward = roles.get("reward", ())
    if not reward and hosts_reward(config.reward, per_node):
        reward = train[-1:] if per_node else (max((*train, *sampling)) + 1,)
    # Consecutive devices form a sampler.
    samplers = tuple(sampling[at : at + span] for at in range(0, len(sampling), span))
    return Placement(
        trainer.nnodes, per_node, train, samplers, reward, judge=roles.get("judge", ())
    )


def _default_roles(trainer: Trainer, samplers: int, span: int, group: int) -> Roles:
    """Place roles without --placement: GPUs do both; on the CPU each process has its own slot.

    A sampler has `span` GPUs. GPUs that train must divide into groups of `group` ranks.
    """
    gpus = trainer.n_gpus_per_node * trainer.nnodes
    if gpus == 0:
        first = trainer.num_workers or trainer.nnodes
        return {"train": (*range(first),), "rollout": (*range(first, first + samplers),)}
    if not trainer.async_steps:
        return {"train": (*range(gpus),), "rollout": (*range(gpus),)}
    # Async samplers have their own GPUs: a quarter in whole samplers, or the next larger number
    # that leaves full groups of ranks, if there is one.
    start = max(span, gpus // 4 // span * span)
    fitting = (n for n in range(start, gpus, span) if (gpus - n) % group == 0)
    first = gpus - min(next(fitting, start), gpus)
    return {"train": (*range(first),), "rollout": (*range(first, gpus),)}


def hosts_reward(reward: Reward, gpus: int) -> bool:
    """Return whether a reward model runs on this run's devices: not served, on a GPU if it has."""
    return any(
        not is_url(str(model.settings.path)) and not (gpus and model.settings.device == "cpu")
        for model in models_of(reward)
    )


def describe_placement(placement: Placement) -> list[str]:
    """Return sentences about which devices do what."""
    size = placement.devices_per_node
    if placement.alone:
        return [f"one process on {'the GPU' if size else 'the CPU'} trains and samples"]

    def on(devices: Sequence[int]) -> str:
        kind = "GPU" if size else "CPU slot"
        return f"{kind}{'s' if len(devices) > 1 else ''} {format_devices(tuple(devices))}"

    # Who trains and who samples.
    rollout = tuple(device for sampler in placement.rollout for device in sampler)
    samplers = plural(len(placement.rollout), "sampler")
    if size:
        samplers += f" of {plural(len(rollout) // len(placement.rollout), 'GPU')}"
    asleep = tuple(device for i in placement.sleepers for device in placement.rollout[i])
    sentences = [
        f"{plural(len(placement.train), 'learner rank')} on {on(placement.train)}, "
        f"{samplers} on {on(rollout)}"
        + (f" (asleep on {on(asleep)} while training)" if asleep else "")
    ]
    if placement.reward:  # these never sleep
        shared = [
            f"{format_devices(both)} with {what}"
            for what, used in (("training", placement.train), ("sampling", rollout))
            if (both := tuple(device for device in placement.reward if device in used))
        ]
        beside = f" (shares {' and '.join(shared)})" if shared else ""
        sentences.append(f"reward models on {on(placement.reward)}{beside}")
    if placement.judge and size:
        sentences.append(f"the judge's server on {on(placement.judge)}")
    # Devices without work.
    busy = {*placement.train, *placement.reward, *placement.judge, *rollout}
    if idle := [device for device in range(placement.nodes * size) if device not in busy]:
        sentences.append(f"{on(idle)} {'is' if len(idle) == 1 else 'are'} not used")
    # Several nodes.
    if placement.nodes > 1 and size:
        spans = [range(node * size, (node + 1) * size) for node in range(placement.nodes)]
        sentences.append(
            ", ".join(f"node {node} has {on(span)}" for node, span in enumerate(spans))
        )
    elif placement.nodes > 1:
        sentences.append(f"the slots are spread over {placement.nodes} nodes")
    return sentences


@dataclass(frozen=True)
class PlanPart:
    """A part of a plan: sentences for people, and facts for programs.

    `details` are sentences about how this machine computes, which only --debug shows.
    """

    sentences: tuple[str, ...]
    facts: dict[str, Any]
    details: tuple[str, ...] = ()


def plan_devices(config: Config, machine: Machine, why: Mapping[str, str]) -> PlanPart:
    """Return the plan of devices, engine, sampler and numbers of ranks.

    It has sentences for people and facts for programs. `why` has the reasons of decided settings.
    """
    placement, sampler = placement_of(config), config.rollout.name
    rows = data_ranks(config)
    # The engine of a package settles as Ray does.
    engine = "local" if config.trainer.engine == "local" else "ray"
    # Sentences for people.
    sentences = [
        *describe_placement(placement),
        *_describe_gpus(machine, placement.devices_per_node),
    ]
    if engine == "ray":
        sentences += [
            *_describe_ranks(
                placement.ranks,
                rows,
                config.trainer.tensor_parallel_size,
                config.actor.fsdp_config.fsdp_size,
            ),
            f"the sampler is {sampler}, the processes are Ray's",
        ]
    if sampler == "vllm":
        sentences.append(f"new weights are sent by {config.rollout.weight_transfer}")
    correction = config.algorithm.rollout_correction
    reason = why.get("algorithm.rollout_correction.rollout_is", "as set")
    cap = f", at most {correction.rollout_is_threshold:g}"
    sentences.append(
        f"importance weights between sampler and trainer: {correction.rollout_is}"
        f"{'' if correction.rollout_is == 'off' else cap} ({reason})"
    )
    # The same for programs.
    facts = {
        "engine": engine,
        **asdict(placement),
        "sleepers": placement.sleepers,
        "gpus": [gpu.name for gpu in machine.gpus[: placement.devices_per_node]],
        "sampler": sampler,
        "learner_ranks": placement.ranks,
        "data_ranks": rows,
        "sentences": tuple(sentences),
    }
    return PlanPart(tuple(sentences), facts)


def _describe_gpus(machine: Machine, used: int) -> list[str]:
    """Name the GPUs of this node that are used, with their memory."""
    gpus = machine.gpus[:used]
    # Equal GPUs are named once, different ones each.
    shown = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.3g} GiB" for gpu in gpus]
    if len(set(shown)) < 2:
        return [f"{plural(len(gpus), 'GPU')} here: {name}" for name in shown[:1]]
    every = "; ".join(f"GPU {number} is {name}" for number, name in enumerate(shown))
    return [f"{every} (memory is planned for the smallest)"]


def _describe_ranks(ranks: int, rows: int, tensor: int, size: int) -> list[str]:
    """Say how several ranks hold the models; `rows` of them share the rows, `size` a shard group.

    `tensor` ranks split each layer.
    """
    # Sharding, tensor parallelism, copies, and who shares the rows.
    shards = rows if size == -1 else size
    parts = []
    if shards > 1:
        parts.append(f"each model is sharded over {shards} ranks")
    if tensor > 1:
        parts.append(f"each layer is split over {tensor} ranks")
    if shards < rows:
        parts.append(f"there are {rows // shards} copies of each model")
    if 1 < rows < ranks:
        parts.append(f"{rows} groups of ranks share the rows")
    elif rows > 1:
        parts.append(f"{rows} ranks share the rows")
    return [", ".join(parts)] if parts else []


def local_judge(reward: Reward) -> Judge | None:
    """Return the judge that the run starts, if there is one."""
    return next((j for j in judges_of(reward) if j.settings.type == "local"), None)
