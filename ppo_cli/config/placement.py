"""Which devices do what: the grammar of `--placement`, and the placement of a run.

`--placement` is written as follows:

    train:0-5,rollout:6-7,reward:5        ranges and single numbers
    train:0-5,rollout:6,judge:7           a judge that the run starts (type local)
    train:0-3,6,rollout:4,5,7             a number without a role belongs to the role before it

Numbers count GPUs over all nodes (with 8 per node, node 1 starts at 8). On the CPU they count
slots; a slot is a place for one process. GPUs are counted without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Final, Literal, get_args

from ppo_cli.config.mixture import Judge, judges_of, models_of
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.schema.run import Config, Sleep, Transfer
from ppo_cli.errors import did_you_mean, plural
from ppo_cli.machine.device_record import is_proven
from ppo_cli.machine.gpus import Gpu, list_gpus


def gpu_count(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of NVIDIA GPUs that a process with this environment may use."""
    return len(list_gpus(environ))


def visible_gpus(gpus: int | None = None) -> int:
    """Return a number of visible GPUs, or where it is None, that of this process."""
    return gpu_count() if gpus is None else gpus


Role = Literal["train", "rollout", "reward", "judge"]
Roles = dict[Role, tuple[int, ...]]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
# `3` or `0-5`.
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def read_placement(text: str) -> Roles:
    """Return the sorted devices of each role; ValueError says what is wrong with the text."""
    # A role holds for all numbers up to the next role: `train:0-3,5,rollout:6`.
    devices_of: dict[Role, list[int]] = {}
    role: Role | None = None
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, colon, numbers = piece.rpartition(":")
        if colon:
            role = _parse_role(name.strip())
        if role is None:
            how = "write ROLE:DEVICES for each role, such as train:0-5,rollout:6-7"
            how = f"write train:{piece}" if _RANGE.fullmatch(piece) else how
            raise ValueError(f"'{piece}' comes before any role; {how}")
        devices_of.setdefault(role, []).extend(_parse_range(numbers.strip()))
    # A device may have several roles, but each only once.
    for name, devices in devices_of.items():
        twice = sorted({device for device in devices if devices.count(device) > 1})
        if twice:
            raise ValueError(f"device {twice[0]} is named twice for {name}; name it once")
    return {name: tuple(sorted(devices)) for name, devices in devices_of.items()}


def format_devices(devices: tuple[int, ...]) -> str:
    """Write device numbers as `read_placement` takes them: `0-5,7`."""
    # Group consecutive numbers into ranges.
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _parse_role(name: str) -> Role:
    """Return the role of this name; ValueError for another word."""
    for role in ROLES:
        if name == role:
            return role
    near = did_you_mean(name, ROLES) or " Roles are train, rollout, reward and judge."
    raise ValueError(f"there is no role '{name}'.{near}")


def _parse_range(text: str) -> range:
    """Return the device numbers in `3` or `0-5`; ValueError for another text."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a device; write a number or a range, such as 0-5")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"the range {text} goes backwards; write {last}-{first}")
    return range(first, last + 1)


def default_gpus(visible: int, sampler: int, tensor: int) -> int:
    """Return how many GPUs of a node are used by default.

    One, or as many as one sampler and one split of each layer (`sampler`, `tensor` GPUs) need.
    """
    return min(visible, math.lcm(sampler, tensor))


def gpus_per_node(config: Config, gpus: int | None = None) -> int:
    """Return how many GPUs of each node the run uses.

    That is trainer.n_gpus_per_node if set, 0 with num_workers, and otherwise one, or as many as one
    sampler and one tensor-parallel group of learners need, but at most the visible ones.
    `gpus` is the number visible here; None counts them.
    """
    # As set; otherwise none with worker processes, and by default what one sampler needs.
    configured = config.trainer.n_gpus_per_node
    if configured is not None:
        return configured
    # Worker processes exclude GPUs.
    if config.trainer.num_workers:
        return 0
    span = config.rollout.tensor_model_parallel_size
    return default_gpus(visible_gpus(gpus), span, config.trainer.tensor_parallel_size)


def engine_name(config: Config, gpus: int | None = None) -> Literal["local", "ray"]:
    """Return where the work runs: one process when it can do the job, else Ray."""
    trainer = config.trainer
    if trainer.engine is not None:
        return "local" if trainer.engine == "local" else "ray"
    per_node = gpus_per_node(config, gpus)
    # Anything that one process on one device cannot do.
    several = (
        per_node > 1
        or trainer.nnodes > 1
        or (trainer.num_workers or 1) > 1
        or (per_node == 0 and (config.rollout.num_samplers or 1) > 1)
        or config.rollout.name == "vllm"  # vLLM needs a separate process
        or trainer.placement is not None
        or trainer.async_steps > 0
    )
    return "ray" if several else "local"


def has_package(name: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(name) is not None


def sampler_name(config: Config, gpus: int | None = None) -> Literal["hf", "vllm"]:
    """Return the sampler: vllm when Ray runs on GPUs and vLLM is installed, unless it is set."""
    if config.rollout.name is not None:
        return "vllm" if config.rollout.name == "vllm" else "hf"
    # vLLM is only chosen where it can run: in a separate process on a GPU.
    may = engine_name(config, gpus) == "ray" and gpus_per_node(config, gpus) > 0
    return "vllm" if may and has_package("vllm") else "hf"


def publishes_adapter(config: Config) -> bool:
    """Return whether samplers receive the LoRA adapter alone."""
    return config.model.lora_rank > 0 and not config.model.lora_merge


def weight_transfer(config: Config, gpus: int | None = None) -> Transfer:
    """Return how new weights reach the samplers.

    Unset, only a way that the self-test has proven on these GPUs is used: others may hang.
    """
    if config.rollout.weight_transfer != "auto":
        return config.rollout.weight_transfer
    # The fastest way is used if it is proven; copies through host memory always work.
    way = fastest_transfer(config, gpus)
    works = way == "memory" or is_proven("transfer_ipc" if way == "ipc" else "transfer_nccl")
    return way if works else "memory"


def fastest_transfer(config: Config, gpus: int | None = None) -> Transfer:
    """Return the way that `auto` uses once the self-test has proven it."""
    sends_weights = sampler_name(config, gpus) == "vllm" and not publishes_adapter(config)
    if not sends_weights or gpus_per_node(config, gpus) == 0:
        return "memory"
    # Shared GPUs exchange handles (IPC), separate ones use NCCL; a mixture can do neither.
    ways: dict[str, Transfer] = {"all": "ipc", "none": "nccl", "some": "memory"}
    return ways[shared_samplers(config)]


def sleep_mode(config: Config) -> Sleep:
    """Return where vLLM's weights are while a shared GPU trains.

    Unset, they are discarded only where the self-test has proven that an engine samples correctly
    after it gets its weights again. Whether they can stay on the GPU is decided by the memory plan,
    which then sets `keep`.
    """
    if config.rollout.sleep != "auto":
        return config.rollout.sleep
    return "discard" if not publishes_adapter(config) and is_proven("sleep") else "offload"


def expands_segments(config: Config) -> bool:
    """Return whether CUDA's allocator uses expandable segments, which IPC shares slowly."""
    return weight_transfer(config) != "ipc" and is_proven("expandable_segments")


def shared_samplers(config: Config) -> Literal["all", "some", "none"]:
    """Return how many of the sampling devices also train; ValueError as in `train_devices`."""
    if config.trainer.placement is None:
        # Async samplers have their own devices; otherwise all share.
        return "none" if config.trainer.async_steps else "all"
    roles = read_placement(config.trainer.placement)
    train, rollout = {*roles.get("train", ())}, {*roles.get("rollout", ())}
    if not train & rollout:
        return "none"
    return "all" if rollout <= train else "some"


def train_devices(config: Config, gpus: int | None = None) -> tuple[int, ...]:
    """Return the devices that train, numbered over all nodes: GPUs, or slots on the CPU.

    ValueError says why a placement cannot be read.
    """
    trainer = config.trainer
    if engine_name(config, gpus) == "local":
        return (0,)
    if trainer.placement is not None:
        return read_placement(trainer.placement).get("train", ())
    # Without a placement: worker slots, or all GPUs but those that only sample.
    all_gpus = gpus_per_node(config, gpus) * trainer.nnodes
    if all_gpus == 0:
        return tuple(range(trainer.num_workers or trainer.nnodes))
    return tuple(
        range(all_gpus - (_count_sampling_gpus(config, all_gpus) if trainer.async_steps else 0))
    )


def _count_sampling_gpus(config: Config, gpus: int) -> int:
    """Return how many GPUs only sample: about a quarter, in whole samplers.

    The other GPUs divide into groups of training ranks, if any such number exists.
    """
    span = config.rollout.tensor_model_parallel_size
    # The GPUs that train must divide into groups of ranks.
    group = config.trainer.tensor_parallel_size * max(1, config.actor.fsdp_config.fsdp_size)
    # A quarter in whole samplers, then the next larger number that leaves full groups.
    start = max(span, gpus // 4 // span * span)
    fitting = (n for n in range(start, gpus, span) if (gpus - n) % group == 0)
    return min(next(fitting, start), gpus)


def learner_ranks(config: Config, gpus: int | None = None) -> int:
    """Return how many processes train."""
    return max(1, len(train_devices(config, gpus)))


def data_ranks(config: Config, gpus: int | None = None) -> int:
    """Return how many ranks share the rows of a mini-batch."""
    return max(1, learner_ranks(config, gpus) // config.trainer.tensor_parallel_size)


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
    def sleepers(self) -> tuple[int, ...]:
        """Numbers of the samplers on a device that trains; they sleep while it trains."""
        # A sampler sleeps if any of its devices trains.
        train = {*self.train}
        return tuple(i for i, devices in enumerate(self.rollout) if train & {*devices})

    def node_of(self, device: int) -> int | None:
        """Return the node that has a GPU; None on the CPU, where slots are on no node yet."""
        return device // self.devices_per_node if self.devices_per_node else None


def placement_of(config: Config, gpus: int | None = None) -> Placement:
    """Return which devices do what; `gpus` is the number visible on this node, None counts them.

    Whether these devices exist is not checked. Raises ValueError as `read_placement` does.
    """
    per_node, nodes = gpus_per_node(config, gpus), config.trainer.nnodes
    if engine_name(config, gpus) == "local":
        return Placement(1, min(1, per_node), (0,), ((0,),), (), alone=True)
    # Roles as placed, or by default; reward models get a device when nothing names one.
    span = config.rollout.tensor_model_parallel_size
    if config.trainer.placement is not None:
        roles = read_placement(config.trainer.placement)
    else:
        roles = _default_roles(config, train_devices(config, gpus), per_node * nodes)
    train, rollout = roles.get("train", ()), roles.get("rollout", ())
    reward = roles.get("reward") or _choose_reward_devices(config, train, rollout, per_node)
    # Consecutive devices form a sampler.
    samplers = tuple(rollout[at : at + span] for at in range(0, len(rollout), span))
    return Placement(nodes, per_node, train, samplers, reward, judge=roles.get("judge", ()))


def _default_roles(config: Config, train: tuple[int, ...], gpus: int) -> Roles:
    """Place roles without --placement: GPUs do both; on the CPU each process has its own slot."""
    # The CPU's samplers follow the slots that train; async samplers have the GPUs that do not
    # train.
    first = len(train)
    if gpus == 0:
        slots = range(first, first + (config.rollout.num_samplers or 1))
        return {"train": train, "rollout": tuple(slots)}
    return {
        "train": train,
        "rollout": tuple(range(first, gpus)) if config.trainer.async_steps else train,
    }


def _choose_reward_devices(
    config: Config, train: tuple[int, ...], rollout: tuple[int, ...], per_node: int
) -> tuple[int, ...]:
    """Give reward models the last GPU that trains, or the first free slot."""
    if not hosts_reward(config):
        return ()
    return train[-1:] if per_node else (max((*train, *rollout)) + 1,)


def hosts_reward(config: Config) -> bool:
    """Return whether a reward model runs on this machine's devices: not served, not on `cpu`."""
    return any(
        not is_url(str(model.settings.path)) and model.settings.device != "cpu"
        for model in models_of(config.reward)
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


def plan_devices(config: Config, gpus: int | None = None) -> PlanPart:
    """Return the plan of devices, engine, sampler and numbers of ranks.

    It has sentences for people and facts for programs. `gpus` is the number visible here; None
    counts them.
    """
    placement = placement_of(config, gpus)
    engine, sampler = engine_name(config, gpus), sampler_name(config, gpus)
    # Sentences for people.
    sentences = [
        *describe_placement(placement),
        *_describe_gpus(list_gpus()[: placement.devices_per_node]),
    ]
    if engine == "ray":
        sentences += [
            *_describe_ranks(config, gpus),
            f"the sampler is {sampler}, the processes are Ray's",
        ]
    if sampler == "vllm":
        sentences.append(f"new weights are sent by {weight_transfer(config, gpus)}")
    # The same for programs.
    facts = {
        "engine": engine,
        **asdict(placement),
        "sleepers": placement.sleepers,
        "sampler": sampler,
        "learner_ranks": learner_ranks(config, gpus),
        "data_ranks": data_ranks(config, gpus),
        "sentences": tuple(sentences),
    }
    return PlanPart(tuple(sentences), facts)


def _describe_gpus(gpus: Sequence[Gpu]) -> list[str]:
    """Name the GPUs of this node that are used, with their memory."""
    # Equal GPUs are named once, different ones each.
    shown = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.3g} GiB" for gpu in gpus]
    if len(set(shown)) < 2:
        return [f"{plural(len(gpus), 'GPU')} here: {name}" for name in shown[:1]]
    every = "; ".join(f"GPU {number} is {name}" for number, name in enumerate(shown))
    return [f"{every} (memory is planned for the smallest)"]


def _describe_ranks(config: Config, gpus: int | None) -> list[str]:
    """Say how several ranks hold the models and share the rows."""
    ranks, rows = learner_ranks(config, gpus), data_ranks(config, gpus)
    tensor, size = config.trainer.tensor_parallel_size, config.actor.fsdp_config.fsdp_size
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


def local_judge(config: Config) -> Judge | None:
    """Return the judge that the run starts, if there is one."""
    return next((j for j in judges_of(config.reward) if j.settings.type == "local"), None)


def judge_devices(config: Config, gpus: int | None = None) -> tuple[int, ...]:
    """Return the GPUs of the judge that the run starts; empty on the CPU."""
    try:
        placed: Placement = placement_of(config, gpus)
    except ValueError:  # reported where placements are checked
        return ()
    judge = local_judge(config)
    return placed.judge or (judge.settings.local.devices if judge else ())
