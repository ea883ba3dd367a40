"""What a run holds in memory, role by role, from each model's config.json and the settings.

Counted at the largest micro-batch with every row as long as it may be. Weights, gradients and
moments (but AdamW8bit's) are float32; activations are in the computing precision. What libraries
and drivers take for themselves is not counted: RESERVE is left for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ppo_cli.config.derived import (
    compute_dtype,
    critic_mini_batch,
    critic_path,
    gen_batch,
    uses_critic,
    uses_reference,
    why_recompute_logprobs,
)
from ppo_cli.config.machine import processor
from ppo_cli.config.machine.gpus import has_bfloat16, list_gpus
from ppo_cli.config.memory.model import Model, Share, Work
from ppo_cli.config.memory.publishing import publish_bytes
from ppo_cli.config.mixture import models_of
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import read_config
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.models.shape import FLOAT, Device, Shape
from ppo_cli.config.models.weight_files import read_json, weight_files
from ppo_cli.config.placement import (
    data_ranks,
    engine_name,
    gpus_per_node,
    judge_devices,
    local_judge,
    placement_of,
    sampler_name,
    sleep_mode,
    weight_transfer,
)
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, ModelError

PREFILL_TOKENS = 16_384  # of one forward pass of the hf sampler
# Activations are kept when a step with them needs at most this share of the memory: an estimate
# may be wrong, and others may need some too.
AMPLE = 0.5
RESERVE = 0.1  # share of a device that the count must leave free to fit
# Of RESERVE: the CUDA context of one process with the kernels of its libraries, or NCCL's buffers
# for one group of ranks. Small GPUs must leave as much free even where it is more than RESERVE.
CONTEXT_BYTES = 512 << 20
GIB = 1 << 30
AWAKE = ("rollout", "publishing")  # phases in which samplers work
# Float32 copies of a chunk's logits when a token is drawn.
DRAWN_LOGITS = 4
# Bytes of a GPU in a plan for another machine (`ppo plan --device_memory`).
ASSUMED_MEMORY: ContextVar[int | None] = ContextVar("assumed_memory", default=None)


@dataclass(frozen=True)
class Place:
    """A kind of device: what it has, what it needs in each phase, and of that for each role.

    `asleep` are weights of a sampler that stay while it does not work; `phases` leave them out.
    vLLM starts only if `vllm_least`, its weights and the cache of one row, is in `vllm_share`.
    """

    name: str
    there: int | None
    roles: Mapping[str, Share]
    phases: Mapping[str, int]
    contexts: int = 0  # of CUDA and NCCL
    asleep: int = 0
    vllm_least: int = 0
    vllm_share: int = 0

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self._total)

    @property
    def needed(self) -> int:
        """Bytes at the highest."""
        return self._total(self.phase)

    def _total(self, phase: str) -> int:
        return self.phases[phase] + (0 if phase in AWAKE else self.asleep)

    @property
    def fits(self) -> bool | None:
        """Whether it has what it needs beside what is left free; None where that is not known."""
        if self.there is None:
            return None
        return self.needed <= self.there - self.left_free and self.vllm_starts

    @property
    def vllm_starts(self) -> bool:
        """Whether vLLM's share of it is enough; it is where vLLM is not here."""
        return self.vllm_least <= self.vllm_share

    @property
    def left_free(self) -> int:
        """Bytes for libraries and drivers, and for what the count misses."""
        return max(int(RESERVE * (self.there or 0)), self.contexts * CONTEXT_BYTES)

    def facts(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        shown = asdict(self)
        return shown | {"phase": self.phase, "needed": self.needed, "fits": self.fits}


@dataclass(frozen=True)
class Shapes:
    """The models of a run; `rewards` are those that it hosts itself."""

    actor: Shape
    critic: Shape
    reference: Shape
    rewards: tuple[Shape, ...] = ()


def sampled_prompts(config: Config) -> int:
    """Count the prompts that a sampler gets: they are dealt out whole, with all their rows."""
    return -(-gen_batch(config) // max(1, len(placement_of(config).rollout)))


def sampled_rows(config: Config) -> int:
    """Count the rows that a sampler works on at once."""
    return min(config.rollout.max_num_seqs, sampled_prompts(config) * config.rollout.n)


def count_vllm(config: Config, shape: Shape, width: int) -> tuple[int, int]:
    """Count the weights of vLLM on one of its devices, and the cache of one row."""
    span = config.rollout.tensor_model_parallel_size
    longest = config.data.max_prompt_length + config.data.max_response_length
    token = 2 * width * max(shape.keys // span, shape.queries // shape.heads)
    return width * shape.parameters() // span, token * shape.layers * longest


def _sampler(config: Config, shape: Shape, device: Device, there: int | None) -> Work:
    """Count a sampler on one of its devices: vLLM takes a share of it, ours what it needs."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = sampled_rows(config)
    if sampler_name(config) == "vllm":
        weights, least = count_vllm(config, shape, device.width)
        claimed = int(config.rollout.gpu_memory_utilization * (there or 0)) if device.gpu else 0
        cache = max(least, claimed - weights) if device.gpu else least * rows
        return Work(Share(parameters=weights, kv_cache=cache), 0, 0, weights + cache)
    alone = engine_name(config) == "local"
    own = 0 if alone else (device.width if device.gpu else FLOAT) * shape.parameters()
    layer = 2 * device.width * shape.keys * rows * longest
    # A step makes one layer's cache anew; on a GPU keys are repeated for all heads behind a mask.
    cache = layer * (shape.layers + 1)
    if shape.keys < shape.queries and device.gpu:
        cache += layer * shape.queries // shape.keys
    # Linear layers are cast once a rollout, unless they are frozen and held so.
    frozen = device.gpu and (not alone or config.model.lora_rank > 0)
    cast = 2 * (shape.layers * shape.layer + shape.embedding) if device.half and not frozen else 0
    logits = DRAWN_LOGITS * FLOAT * shape.vocabulary * rows
    prompts = min(sampled_prompts(config), rows) * config.data.max_prompt_length
    prefill = min(prompts, max(PREFILL_TOKENS, config.data.max_prompt_length))
    states = prefill * device.width * (3 * shape.inner + 4 * shape.hidden)
    share = Share(own + cast, 0, 0, states, logits, cache)
    return Work(share, own, 0, cast + cache + max(logits, states))


def _rewards(config: Config, shapes: Iterable[Shape], gpu: bool) -> Work:
    """Count all reward models that run here, each with a batch of its own."""
    weights = states = rest = 0
    here = [m.settings for m in models_of(config.reward) if not is_url(str(m.settings.path))]
    for settings, shape in zip(here, shapes, strict=False):
        usual = gpu and has_bfloat16(list_gpus()[:1])
        half = settings.dtype == "bfloat16" or (settings.dtype is None and usual)
        width = 2 if half else FLOAT
        own = width * shape.parameters(head=False)
        weights += own
        rest += 0 if settings.offload and gpu else own
        batch = settings.batch_tokens * width * (3 * shape.inner + 4 * shape.hidden)
        states = max(states, batch + own - (0 if settings.offload and gpu else own))
    return Work(Share(parameters=weights, activations=states), rest, 0, states)


@dataclass(frozen=True)
class _Roles:
    """What all roles of a run need of the devices that they use."""

    device: Device
    works: Mapping[str, Work]  # of actor, critic and reference on a learner rank
    sampler: Work
    rewards: Work

    @classmethod
    def count(cls, config: Config, shapes: Shapes, there: int | None) -> _Roles:
        """Count each role by itself; `there` is what a device has."""
        gpu, rows = gpus_per_node(config) > 0, data_ranks(config)
        ranks = max(1, len(placement_of(config).train))
        size = config.actor.fsdp_config.fsdp_size
        frees = ranks > 1 and config.model.enable_gradient_checkpointing is not False
        device = Device(
            half=compute_dtype(config) == "bfloat16",
            gpu=gpu,
            shards=rows if size == -1 else min(size, rows),
            tensor=ranks // rows,
            packed=config.model.packing is not False,
            keeps_freed=not (gpu or frees),
        )
        sharding = config.actor.fsdp_config
        mini = config.actor.ppo_mini_batch_size
        models = {"actor": Model(config, device, shapes.actor, config.actor, mini, sharding)}
        if uses_critic(config):
            mini, spread = critic_mini_batch(config), config.critic.fsdp_config
            models["critic"] = Model(config, device, shapes.critic, config.critic, mini, spread)
        if uses_reference(config) and not (config.model.lora_rank and config.ref.path is None):
            sharding = sharding.model_copy(update={"param_offload": config.ref.param_offload})
            models["reference"] = Model(config, device, shapes.reference, None, 0, sharding)
        return cls(
            device,
            {name: model.count() for name, model in models.items()},
            _sampler(config, shapes.actor, device, there),
            _rewards(config, shapes.rewards, gpu),
        )

    def phases(self, config: Config) -> dict[str, int]:
        """Bytes on a learner rank in each phase, samplers and reward models left out."""
        works = self.works
        rest = sum(work.rest for work in works.values())
        again = why_recompute_logprobs(config)
        asked = [work for name, work in works.items() if name != "actor" or again]
        annotation = max((work.annotate for work in asked), default=0)
        # The sampler of a single process reads the actor's weights where they are used.
        own = works["actor"].brought if engine_name(config) == "local" else 0
        phases = {
            "rollout": rest + own,
            "annotation": rest + sum(work.brought for work in asked) + annotation,
        }
        updates = {f"update of the {name}": rest + work.update for name, work in works.items()}
        actor = config.actor
        if "reference" in works and actor.use_kl_loss and actor.kl_loss_type == "full":
            updates["update of the actor"] += works["reference"].brought
        return phases | {phase: size for phase, size in updates.items() if size > rest}


def count_learner(config: Config, shapes: Shapes) -> dict[str, int]:
    """Bytes on a learner rank in each phase, samplers and reward models left out."""
    return _Roles.count(config, shapes, None).phases(config)


def count_memory(config: Config, shapes: Shapes, there: int | None) -> tuple[Place, ...]:
    """Count what each kind of device needs; `there` is what one has (the host, without GPUs)."""
    placement, roles = placement_of(config), _Roles.count(config, shapes, there)
    sampler, rewards, phases = roles.sampler, roles.rewards, roles.phases(config)
    shares = {name: work.share for name, work in roles.works.items()}
    if shapes.rewards:
        phases["scoring"] = sum(work.rest for work in roles.works.values())
    ours = {"sampler": sampler.share} | ({"reward model": rewards.share} if shapes.rewards else {})
    if not roles.device.gpu:
        ranks = max(1, len(placement.train))
        return (_cpu_node(placement.nodes, ranks, placement.rollout, phases, shares | ours,
                          sampler, rewards, there),)  # fmt: skip
    training = {*placement.train}
    shared = placement.alone or training & {d for one in placement.rollout for d in one}
    scored = training & {*placement.reward} or placement.alone
    vllm = sampler_name(config) == "vllm"
    awake = sampler.share.parameters if vllm else 0  # beyond what a sampler has at rest
    started = {}
    if vllm and there is not None:
        started["vllm_least"] = sum(count_vllm(config, shapes.actor, roles.device.width))
        started["vllm_share"] = int(config.rollout.gpu_memory_utilization * there)
    if not placement.alone:
        published = publish_bytes(config, shapes.actor, roles.device)
        phases["publishing"] = sum(work.rest for work in roles.works.values()) + published.learner
    asleep = awake if shared and sleep_mode(config) == "keep" else 0
    places = []
    if shared:
        phases = {name: need + sampler.rest for name, need in phases.items()}
        phases["rollout"] += sampler.update
        shares["sampler"] = sampler.share
    if shared and not placement.alone:
        # By memory the learner is done before the sampler's weights wake.
        wakes = awake + published.sampler
        alone = published.learner if weight_transfer(config) == "memory" else 0
        phases["publishing"] += max(0, wakes - alone)
    if shapes.rewards and scored:
        phases = {name: need + rewards.rest for name, need in phases.items()}
        phases["scoring"] += rewards.update
        shares["reward model"] = rewards.share
    # A process that samples has its own; learner ranks and the transfer of weights are groups.
    processes = 1 + (bool(shared) and not placement.alone) + bool(shapes.rewards and scored)
    groups = (len(placement.train) > 1) + (not placement.alone)
    contexts, starts = processes + groups, started if shared else {}
    places.append(Place("a GPU that trains", there, shares, phases, contexts, asleep, **starts))
    if placement.rollout and not shared:
        need = {"rollout": sampler.rest + sampler.update}
        need["publishing"] = need["rollout"] + published.sampler  # its cache stays
        share = {"sampler": sampler.share}
        places.append(Place("a GPU that samples", there, share, need, **started))
    if shapes.rewards and not scored:
        need = {"scoring": rewards.rest + rewards.update}
        places.append(Place("a GPU that scores", there, {"reward model": rewards.share}, need))
    return tuple(places)


def _cpu_node(
    nodes: int, ranks: int, rollout: Sequence[Sequence[int]], phases: Mapping[str, int],
    shares: Mapping[str, Share], sampler: Work, rewards: Work, there: int | None,
) -> Place:  # fmt: skip
    """Add up the processes of the fullest node: each role of one of them is shown."""
    learners, samplers = -(-ranks // nodes), -(-len(rollout) // nodes)
    always = samplers * sampler.rest + rewards.rest
    whole = {name: learners * need + always for name, need in phases.items()}
    whole["rollout"] += samplers * sampler.update
    if "scoring" in whole:
        whole["scoring"] += rewards.update
    return Place("this machine" if nodes == 1 else "a node", there, shares, whole)


def count_host(config: Config, shapes: Shapes, there: int | None) -> Place | None:
    """Count the memory of the fullest node where GPUs compute; None where there are none.

    Offloaded weights, gradients and moments; a checkpoint, whose float32 copies are written while
    the run goes on; samplers that sleep there; the reading of a model, by the first rank. What
    processes, their libraries and Ray's object store take is not counted: RESERVE is for it.
    """
    placement = placement_of(config)
    if not placement.devices_per_node:
        return None
    roles = _Roles.count(config, shapes, None)
    nodes, ranks = placement.nodes, len(placement.train)
    learners, samplers = -(-ranks // nodes), -(-len(placement.rollout) // nodes)
    columns = zip(*(astuple(work.host) for work in roles.works.values()), strict=True)
    away = Share(*(learners * sum(column) for column in columns))
    pieces = roles.device.shards * roles.device.tensor  # other ranks hold copies
    saved = pieces * sum(work.trained for work in roles.works.values()) // nodes
    checkpoint = Share(parameters=saved, moments=2 * saved)
    shares = {"offloaded": away, "checkpoint": checkpoint}
    always = sum(astuple(away)) + sum(astuple(checkpoint))
    phases = {"training": always}
    weights = roles.device.width * shapes.actor.parameters()
    if sampler_name(config) == "vllm" and placement.sleepers and sleep_mode(config) == "offload":
        phases["training"] += samplers * weights
        shares["sleeping samplers"] = Share(parameters=samplers * weights)
    if not placement.alone:
        phases["publishing"] = always + publish_bytes(config, shapes.actor, roles.device).host
    used = (shapes.actor, *([shapes.critic] if uses_critic(config) else ()))
    phases["loading"] = sum(astuple(away)) + FLOAT * max(shape.parameters() for shape in used)
    name = "the host's memory" if nodes == 1 else "the memory of a node"
    return Place(name, there, {k: v for k, v in shares.items() if any(astuple(v))}, phases)


def read_shapes(config: Config) -> Shapes | tuple[str, ...]:
    """Read the shapes of all models from their config.json; the paths of those that cannot be."""
    paths = {"actor": config.model.path, "critic": critic_path(config)}
    paths["reference"] = config.ref.path or config.model.path
    rewards = [str(model.settings.path) for model in models_of(config.reward)]
    used = {"actor"}
    used |= {"critic"} if uses_critic(config) else set()
    used |= {"reference"} if uses_reference(config) else set()
    asked = [paths[name] for name in paths if name in used]
    asked += [path for path in rewards if not is_url(path)]
    found = {path: Shape.of(read_config(path)) for path in dict.fromkeys(asked)}
    if unread := tuple(path for path, shape in found.items() if shape is None):
        return unread
    known = {path: shape for path, shape in found.items() if shape is not None}
    if config.model.attn_implementation == "eager":
        known = {path: replace(shape, scores=True) for path, shape in known.items()}
    actor, critic, reference = (known.get(paths[name], known[paths["actor"]]) for name in paths)
    return Shapes(actor, critic, reference, tuple(known[p] for p in rewards if p in known))


def device_memory(config: Config) -> int | None:
    """Return the memory of a GPU, the smallest of those used, else this machine's, in bytes.

    None: the run uses GPUs, and this machine has none.
    """
    per_node = gpus_per_node(config)
    if not per_node:
        return host_memory()
    if (assumed := ASSUMED_MEMORY.get()) is not None:
        return assumed
    return min((gpu.memory_bytes for gpu in list_gpus()[:per_node]), default=None)


@contextmanager
def assume_memory(text: str | None) -> Iterator[None]:
    """Plan for GPUs of this size, such as 80GB, instead of those that are here (None)."""
    count = None
    if text is not None:
        size = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG])(i?)B", text.strip(), re.IGNORECASE)
        if size is None or not float(size[1]):
            raise ConfigError(f"--device_memory {text} is not a size: write 80GB, or 24564MiB.")
        unit = (1024 if size[3] else 1000) ** ("MG".index(size[2].upper()) + 2)
        count = int(float(size[1]) * unit)
    token = ASSUMED_MEMORY.set(count)
    try:
        yield
    finally:
        ASSUMED_MEMORY.reset(token)


def host_of_gpus() -> int | None:
    """Return the memory beside the GPUs of a plan; None where these are elsewhere."""
    return host_memory() if ASSUMED_MEMORY.get() is None else None


def host_memory(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or what control groups leave of it, in bytes."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [whole]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / "sys/fs/cgroup" / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


KV_GB = 1  # of a server on the CPU
OVERHEAD = 2 * GIB  # of its processes, measured with vLLM 0.32 on the CPU


def judge_memory(config: Config) -> Place | None:
    """What the server takes of each of its devices; None where its weights are not at hand."""
    judge = local_judge(config)
    if judge is None or not judge.settings.model:
        return None
    folder = Path(model_folder(judge.settings.model)).expanduser()
    try:
        weights = sum(file.stat().st_size for file in weight_files(folder))
    except (ModelError, OSError):
        weights = 0
    if not weights:
        return None
    there, devices = device_memory(config), judge_devices(config)
    if not gpus_per_node(config):
        if (
            not processor.has_bfloat16()
            and read_json(folder / "config.json").get("dtype") == "bfloat16"
        ):
            weights = weights * FLOAT // 2
        share = Share(parameters=weights, kv_cache=KV_GB * GIB)
        need = weights + KV_GB * GIB + OVERHEAD
        return Place("the judge's server", there, {"judge": share}, {"judging": need})
    own = weights // max(1, len(devices))
    taken = int(judge.settings.local.gpu_memory_utilization * there) if there else own
    share = Share(parameters=own, kv_cache=max(0, taken - own))
    return Place("a GPU of the judge", there, {"judge": share}, {"judging": max(own, taken)})
