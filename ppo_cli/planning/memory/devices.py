"""Bytes of a run on each kind of device, by role, from each model's config.json and the settings.

Counted for the largest micro-batch with rows of the greatest length. Weights, gradients and moments
(except AdamW8bit's) are float32; activations have the computing precision. Memory of libraries and
drivers is not counted: RESERVE is left free for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from typing import Any

from ppo_cli.config.mixture import Judge, models_of
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import read_config
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.models.shape import FLOAT, Device, Shape
from ppo_cli.config.models.weight_files import read_json, weight_files
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config, Data, Rollout, Trainer
from ppo_cli.errors import ConfigError, ModelError
from ppo_cli.machine import processor
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import user_path
from ppo_cli.planning.memory.model import ModelBytes, ModelOnRank, RoleBytes, count_wide_head
from ppo_cli.planning.memory.publishing import publish_bytes
from ppo_cli.planning.placement import Placement, data_ranks, placement_of

PREFILL_TOKENS = 16_384  # of one forward pass of the hf sampler
# Activations are kept if a step with them needs at most this share of the memory: the estimate may
# be wrong, and other programs may need memory too.
AMPLE = 0.5
RESERVE = 0.1  # share of a device that must stay free for a run to fit
# The CUDA context of one process with the kernels of its libraries, or NCCL's buffers for one group
# of ranks. Part of RESERVE; on small GPUs it is more than RESERVE and must be free all the same.
CONTEXT_BYTES = 512 << 20
GIB = 1 << 30
AWAKE = ("rollout", "publishing")  # phases in which samplers work
# Float32 copies of a chunk's logits when a token is sampled.
DRAWN_LOGITS = 4


@dataclass(frozen=True)
class DeviceNeeds:
    """Bytes on one kind of device: its capacity, and the needs of each phase and each role.

    `asleep`: weights of a sampler that stay while it sleeps; `phases` does not include them.
    vLLM starts only if its share of the device, `vllm_share`, has space for `vllm_least`: its
    weights and the cache of one row.
    """

    name: str
    capacity: int | None
    roles: Mapping[str, RoleBytes]
    phases: Mapping[str, int]
    contexts: int = 0  # number of CUDA contexts and NCCL groups
    asleep: int = 0
    vllm_least: int = 0
    vllm_share: int = 0

    @property
    def phase(self) -> str:
        """The phase that needs most memory."""
        return max(self.phases, key=self._total)

    @property
    def needed(self) -> int:
        """Bytes in that phase."""
        return self._total(self.phase)

    def _total(self, phase: str) -> int:
        return self.phases[phase] + (0 if phase in AWAKE else self.asleep)

    @property
    def fits(self) -> bool | None:
        """Whether the needs and the free reserve fit; None if the capacity is unknown."""
        if self.capacity is None:
            return None
        return self.needed <= self.capacity - self.left_free and self.vllm_starts

    @property
    def vllm_starts(self) -> bool:
        """Whether vLLM's share of the device is enough; True without vLLM."""
        return self.vllm_least <= self.vllm_share

    @property
    def left_free(self) -> int:
        """Bytes that must stay free for libraries, drivers and errors of the estimate."""
        return max(int(RESERVE * (self.capacity or 0)), self.contexts * CONTEXT_BYTES)

    def facts(self) -> dict[str, Any]:
        """Return everything for `ppo plan --json`, where the capacity is called `there`."""
        fields = {"there" if name == "capacity" else name: v for name, v in asdict(self).items()}
        return fields | {"phase": self.phase, "needed": self.needed, "fits": self.fits}


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a run's models; `rewards`: the reward models that it hosts itself."""

    actor: Shape
    critic: Shape
    reference: Shape
    rewards: tuple[Shape, ...] = ()


def sampled_prompts(data: Data, placement: Placement) -> int:
    """Count the prompts of one sampler: a prompt's rows are not split over samplers."""
    return -(-data.gen_batch_size // max(1, len(placement.rollout)))


def sampled_rows(rollout: Rollout, prompts: int) -> int:
    """Count the rows of these prompts that a sampler processes at once."""
    return min(rollout.max_num_seqs, prompts * rollout.n)


def count_vllm(rollout: Rollout, longest: int, shape: Shape, width: int) -> tuple[int, int]:
    """Return the bytes of vLLM's weights on one of its devices, and of the cache of one row."""
    span = rollout.tensor_model_parallel_size
    token = 2 * width * max(shape.keys // span, shape.queries // shape.heads)
    return width * shape.parameters() // span, token * shape.layers * longest


def _count_rewards(reward: Reward, shapes: Iterable[Shape], gpu: bool) -> ModelBytes:
    """Count all reward models that the run hosts, each with its batch."""
    weights = states = rest = 0
    local = [m.settings for m in models_of(reward) if not is_url(str(m.settings.path))]
    for settings, shape in zip(local, shapes, strict=False):
        width = 2 if settings.dtype == "bfloat16" else FLOAT
        model_bytes = width * shape.parameters(head=False)
        weights += model_bytes
        rest += 0 if settings.offload and gpu else model_bytes
        batch = settings.batch_tokens * width * (3 * shape.inner + 4 * shape.hidden)
        states = max(states, batch + model_bytes - (0 if settings.offload and gpu else model_bytes))
    return ModelBytes(RoleBytes(parameters=weights, activations=states), rest, 0, states)


@dataclass(frozen=True)
class RunNeeds:
    """The needs of a run; in `config` nothing is unset."""

    config: Config
    shapes: ModelShapes
    machine: Machine

    @cached_property
    def _placement(self) -> Placement:
        return placement_of(self.config)

    @cached_property
    def _capacity(self) -> int | None:
        return device_memory(self.config.trainer, self.machine)

    @cached_property
    def _device(self) -> Device:
        """How a learner rank computes."""
        config = self.config
        gpu, rows = config.trainer.n_gpus_per_node > 0, data_ranks(config)
        ranks, size = self._placement.ranks, config.actor.fsdp_config.fsdp_size
        frees = ranks > 1 and config.model.enable_gradient_checkpointing
        return Device(
            half=config.model.dtype != "float32",
            gpu=gpu,
            shards=rows if size == -1 else min(size, rows),
            tensor=ranks // rows,
            packed=config.model.packing is not False,
            keeps_freed=not (gpu or frees),
            compiled=config.model.compile_layers,
        )

    @cached_property
    def _works(self) -> dict[str, ModelBytes]:
        """The bytes of actor, critic and reference on a learner rank, each by itself."""
        config, device, shapes = self.config, self._device, self.shapes
        sharding = config.actor.fsdp_config
        mini = config.actor.ppo_mini_batch_size
        models = {"actor": ModelOnRank(config, device, shapes.actor, config.actor, mini, sharding)}
        if config.uses_critic:
            mini, spread = config.critic.ppo_mini_batch_size, config.critic.fsdp_config
            models["critic"] = ModelOnRank(
                config, device, shapes.critic, config.critic, mini, spread
            )
        if config.uses_reference and not config.shares_reference:
            spread = config.reference_sharding
            models["reference"] = ModelOnRank(config, device, shapes.reference, None, 0, spread)
        return {name: model.count() for name, model in models.items()}

    @property
    def _longest(self) -> int:
        """The tokens of the longest row."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    def _count_sampler(self) -> ModelBytes:
        """Count a sampler on one of its devices: vLLM claims a share of it, ours only its needs."""
        config, shape, device = self.config, self.shapes.actor, self._device
        longest = self._longest
        all_prompts = sampled_prompts(config.data, self._placement)
        rows = sampled_rows(config.rollout, all_prompts)
        if config.rollout.name == "vllm":
            weights, least = count_vllm(config.rollout, longest, shape, device.width)
            share = config.rollout.gpu_memory_utilization
            claimed = int(share * (self._capacity or 0)) if device.gpu else 0
            cache = max(least, claimed - weights) if device.gpu else least * rows
            return ModelBytes(RoleBytes(parameters=weights, kv_cache=cache), 0, 0, weights + cache)
        # The hf sampler: one process samples with the actor's weights, others have a copy.
        alone = config.trainer.engine == "local"
        resident = 0 if alone else (device.width if device.gpu else FLOAT) * shape.parameters()
        layer = 2 * device.width * shape.keys * rows * longest
        # A step copies one layer's cache; on a GPU masked attention repeats keys for all heads.
        cache = layer * (shape.layers + 1)
        if shape.keys < shape.queries and device.gpu:
            cache += layer * shape.queries // shape.keys
        # Linear layers are cast to half precision once a rollout, unless they are frozen in it.
        frozen = device.gpu and (not alone or config.model.lora_rank > 0)
        casts = device.half and not frozen
        cast = 2 * (shape.layers * shape.layer + shape.embedding) if casts else 0
        logits = DRAWN_LOGITS * FLOAT * shape.vocabulary * rows
        logits += count_wide_head(config.model, shape, device)
        prompts = min(all_prompts, rows) * config.data.max_prompt_length
        prefill = min(prompts, max(PREFILL_TOKENS, config.data.max_prompt_length))
        states = prefill * device.width * (3 * shape.inner + 4 * shape.hidden)
        share_of_role = RoleBytes(resident + cast, 0, 0, states, logits, cache)
        return ModelBytes(share_of_role, resident, 0, cast + cache + max(logits, states))

    def learner_phases(self) -> dict[str, int]:
        """Return the bytes on a learner rank in each phase, without samplers and reward models."""
        config, works = self.config, self._works
        rest = sum(work.rest for work in works.values())
        recomputes = not config.algorithm.rollout_correction.bypass_mode
        annotating = [work for name, work in works.items() if name != "actor" or recomputes]
        annotation = max((work.annotate for work in annotating), default=0)
        # The sampler of a single process needs the actor's weights on the device.
        read_by_sampler = works["actor"].fetched if config.trainer.engine == "local" else 0
        phases = {
            "rollout": rest + read_by_sampler,
            "annotation": rest + sum(work.fetched for work in annotating) + annotation,
        }
        updates = {f"update of the {name}": rest + work.update for name, work in works.items()}
        if "reference" in works and "actor.kl_loss_type" in config.full_kls:
            updates["update of the actor"] += works["reference"].fetched
        return phases | {phase: size for phase, size in updates.items() if size > rest}

    def devices(self) -> tuple[DeviceNeeds, ...]:
        """Count the needs of each kind of device."""
        config, shapes, device = self.config, self.shapes, self._device
        placement, capacity = self._placement, self._capacity
        sampler, phases = self._count_sampler(), self.learner_phases()
        rewards = _count_rewards(config.reward, shapes.rewards, device.gpu)
        shares = {name: work.share for name, work in self._works.items()}
        learners_rest = sum(work.rest for work in self._works.values())
        if shapes.rewards:
            phases["scoring"] = learners_rest
        other_roles = {"sampler": sampler.share} | (
            {"reward model": rewards.share} if shapes.rewards else {}
        )
        # Without GPUs all roles share the memory of their node.
        if not device.gpu:
            node = _count_cpu_node(
                placement,
                phases,
                shares | other_roles,
                sampler,
                rewards,
                capacity,
            )
            return (node,)
        # Which roles share the GPUs that train.
        training = {*placement.train}
        shared = placement.alone or training & {
            d for sampler_gpus in placement.rollout for d in sampler_gpus
        }
        scored = training & {*placement.reward} or placement.alone
        vllm = config.rollout.name == "vllm"
        awake = sampler.share.parameters if vllm else 0  # in addition to its bytes at rest
        started = {}
        if vllm and capacity is not None:
            started["vllm_least"] = sum(
                count_vllm(config.rollout, self._longest, shapes.actor, device.width)
            )
            started["vllm_share"] = int(config.rollout.gpu_memory_utilization * capacity)
        if not placement.alone:
            published = publish_bytes(config.model, config.rollout, shapes.actor, device)
            phases["publishing"] = learners_rest + published.learner
        # The GPUs that train, with the sampler and the reward model if they share them.
        asleep = awake if shared and config.rollout.sleep == "keep" else 0
        places = []
        if shared:
            phases = {name: need + sampler.rest for name, need in phases.items()}
            phases["rollout"] += sampler.update
            shares["sampler"] = sampler.share
        if shared and not placement.alone:
            # With transfer "memory" the learner has finished before the sampler's weights wake up.
            wakes = awake + published.sampler
            alone = published.learner if config.rollout.weight_transfer == "memory" else 0
            phases["publishing"] += max(0, wakes - alone)
        if shapes.rewards and scored:
            phases = {name: need + rewards.rest for name, need in phases.items()}
            phases["scoring"] += rewards.update
            shares["reward model"] = rewards.share
        # A sampling process has a separate context; learner ranks and weight transfer are groups.
        processes = 1 + (bool(shared) and not placement.alone) + bool(shapes.rewards and scored)
        groups = (len(placement.train) > 1) + (not placement.alone)
        contexts, starts = processes + groups, started if shared else {}
        places.append(
            DeviceNeeds("a GPU that trains", capacity, shares, phases, contexts, asleep, **starts)
        )
        # GPUs that only sample, and GPUs that only score.
        if placement.rollout and not shared:
            need = {"rollout": sampler.rest + sampler.update}
            need["publishing"] = (
                need["rollout"] + published.sampler
            )  # the cache is not freed meanwhile
            share = {"sampler": sampler.share}
            places.append(DeviceNeeds("a GPU that samples", capacity, share, need, **started))
        if shapes.rewards and not scored:
            need = {"scoring": rewards.rest + rewards.update}
            places.append(
                DeviceNeeds("a GPU that scores", capacity, {"reward model": rewards.share}, need)
            )
        return tuple(places)

    def host(self) -> DeviceNeeds | None:
        """Count the host memory of the fullest node with GPUs; None if the run uses no GPU.

        Counted are offloaded weights, gradients and moments; a checkpoint, whose float32 copies
        are written while the run continues; sleeping samplers; the loading of a model by the first
        rank. Processes, their libraries and Ray's object store are not counted: RESERVE is for
        them.
        """
        config, shapes, device = self.config, self.shapes, self._device
        placement = self._placement
        if not placement.devices_per_node:
            return None
        nodes, ranks = placement.nodes, len(placement.train)
        learners, samplers = -(-ranks // nodes), -(-len(placement.rollout) // nodes)
        # Offloaded parts of all roles, added field by field.
        columns = zip(*(astuple(work.host) for work in self._works.values()), strict=True)
        away = RoleBytes(*(learners * sum(column) for column in columns))
        pieces = device.shards * device.tensor  # further ranks have copies of these
        saved = pieces * sum(work.trained for work in self._works.values()) // nodes
        checkpoint = RoleBytes(parameters=saved, moments=2 * saved)
        # Training: offloaded parts, and a checkpoint that is being written.
        shares = {"offloaded": away, "checkpoint": checkpoint}
        always = sum(astuple(away)) + sum(astuple(checkpoint))
        phases = {"training": always}
        weights = device.width * shapes.actor.parameters()
        if (
            config.rollout.name == "vllm"
            and placement.sleepers
            and config.rollout.sleep == "offload"
        ):
            phases["training"] += samplers * weights
            shares["sleeping samplers"] = RoleBytes(parameters=samplers * weights)
        if not placement.alone:
            phases["publishing"] = (
                always + publish_bytes(config.model, config.rollout, shapes.actor, device).host
            )
        # The first rank loads one model at a time.
        used = (shapes.actor, *([shapes.critic] if config.uses_critic else ()))
        phases["loading"] = sum(astuple(away)) + FLOAT * max(shape.parameters() for shape in used)
        name = "the host's memory" if nodes == 1 else "the memory of a node"
        capacity = self.machine.host_bytes if self.machine.gpus else None
        return DeviceNeeds(
            name, capacity, {k: v for k, v in shares.items() if any(astuple(v))}, phases
        )


def _count_cpu_node(
    placement: Placement, phases: Mapping[str, int], shares: Mapping[str, RoleBytes],
    sampler: ModelBytes, rewards: ModelBytes, capacity: int | None,
) -> DeviceNeeds:  # fmt: skip
    """Add up the processes of the fullest node; `roles` of the result shows one of each."""
    nodes = placement.nodes
    learners, samplers = -(-placement.ranks // nodes), -(-len(placement.rollout) // nodes)
    always = samplers * sampler.rest + rewards.rest
    totals = {name: learners * need + always for name, need in phases.items()}
    totals["rollout"] += samplers * sampler.update
    if "scoring" in totals:
        totals["scoring"] += rewards.update
    return DeviceNeeds("this machine" if nodes == 1 else "a node", capacity, shares, totals)


def counted_models(config: Config) -> list[str]:
    """Return the folders or hub names of the models that take memory in a run, each once."""
    rewards = [str(model.settings.path) for model in models_of(config.reward)]
    hosted = [path for path in rewards if not is_url(path)]
    return list(dict.fromkeys([*config.training_models.values(), *hosted]))


def read_shapes(config: Config) -> ModelShapes | tuple[str, ...]:
    """Read the shapes of all models from their config.json, or return the unreadable paths.

    A critic or a reference that the run does not use has the shape of the actor.
    """
    rewards = [str(model.settings.path) for model in models_of(config.reward)]
    shapes = {path: Shape.from_config(read_config(path)) for path in counted_models(config)}
    if unread := tuple(path for path, shape in shapes.items() if shape is None):
        return unread
    readable = {path: shape for path, shape in shapes.items() if shape is not None}
    if config.model.attn_implementation == "eager":
        readable = {path: replace(shape, scores=True) for path, shape in readable.items()}
    actor, critic, reference = (
        readable[config.training_models.get(key, config.model.path)]
        for key in ("model.path", "critic.model.path", "ref.path")
    )
    return ModelShapes(
        actor, critic, reference, tuple(readable[p] for p in rewards if p in readable)
    )


def device_memory(trainer: Trainer, machine: Machine) -> int | None:
    """Return the bytes of the smallest GPU that is used, or of the machine without GPUs.

    None: the run uses GPUs and the machine has none.
    """
    per_node = trainer.n_gpus_per_node
    if not per_node:
        return machine.host_bytes
    if machine.gpu_bytes is not None:
        return machine.gpu_bytes
    return min((gpu.memory_bytes for gpu in machine.gpus[:per_node]), default=None)


def read_memory_size(text: str) -> int:
    """Return the bytes of a size such as 80GB; ConfigError for another text."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG])(i?)B", text.strip(), re.IGNORECASE)
    if size is None or not float(size[1]):
        raise ConfigError(f"--device_memory {text} is not a size: write 80GB, or 24564MiB.")
    unit = (1024 if size[3] else 1000) ** ("MG".index(size[2].upper()) + 2)
    return int(float(size[1]) * unit)


KV_GB = 1  # GiB of the KV cache of a judge's server on the CPU
OVERHEAD = 2 * GIB  # of its processes, measured with vLLM 0.32


def count_judge_server(
    judge: Judge | None, placement: Placement, trainer: Trainer, machine: Machine
) -> DeviceNeeds | None:
    """Count the judge's server on one of its devices; None if its weights are not here."""
    if judge is None or not judge.settings.model:
        return None
    folder = user_path(model_folder(judge.settings.model))
    try:
        weights = sum(file.stat().st_size for file in weight_files(folder))
    except (ModelError, OSError):
        weights = 0
    if not weights:
        return None
    capacity = device_memory(trainer, machine)
    if not trainer.n_gpus_per_node:
        if (
            not processor.has_bfloat16()
            and read_json(folder / "config.json").get("dtype") == "bfloat16"
        ):
            weights = weights * FLOAT // 2
        share = RoleBytes(parameters=weights, kv_cache=KV_GB * GIB)
        need = weights + KV_GB * GIB + OVERHEAD
        return DeviceNeeds("the judge's server", capacity, {"judge": share}, {"judging": need})
    devices = placement.judge or judge.settings.local.devices
    shard = weights // max(1, len(devices))
    claimed = int(judge.settings.local.gpu_memory_utilization * capacity) if capacity else shard
    share = RoleBytes(parameters=shard, kv_cache=max(0, claimed - shard))
    return DeviceNeeds(
        "a GPU of the judge", capacity, {"judge": share}, {"judging": max(shard, claimed)}
    )
