"""What a run holds in memory, role by role, from each model's config.json and the settings.

Counted at the largest micro-batch with every row as long as it may be. Weights, gradients and
moments (but AdamW8bit's) are float32; activations are in the computing precision. What libraries
and drivers take for themselves is not counted: RESERVE is left for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppo_cli.config.algorithm_schema import Actor, Critic, Sharding, Trained
from ppo_cli.config.derived import (
    critic_mini_batch,
    critic_path,
    data_ranks,
    engine_name,
    gen_batch,
    gpus_per_node,
    micro_batch_tokens,
    placement_of,
    sampler_name,
    uses_critic,
    uses_reference,
)
from ppo_cli.config.gpus import has_bfloat16, list_gpus
from ppo_cli.config.known_models import is_url
from ppo_cli.config.mixture import models_of
from ppo_cli.config.model_checks import compute_dtype, read_config, why_logprobs_again
from ppo_cli.config.model_shape import FLOAT, Device, Shape
from ppo_cli.config.schema import Config

# Response tokens whose logits exist at once. With 2,048 a step of 10 million parameters took
# 270 MiB more, and was no faster.
LOGIT_CHUNK = 512
# Logits of a micro-batch that are kept for its backward pass, not computed again: few numbers are
# little memory, and all the more time of a small model (docs/log.md).
KEPT_LOGITS = 1 << 24
PREFILL_TOKENS = 16_384  # of one forward pass of the hf sampler
# Activations are kept when a step with them needs at most this share of the memory: an estimate
# may be wrong, and others may need some too.
AMPLE = 0.5
RESERVE = 0.1  # share of a device that the count must leave free to fit
FOUR_BITS = 1 / 2 + 1 / 64 + FLOAT / 64 / 256  # bytes of a weight in NF4, and of sizes of blocks
EIGHT_BITS = (1 + FLOAT / 256) / FLOAT  # a code, and a block's size, as a share of a float32
GIB = 1 << 30
# Float32 copies of a chunk's logits at once: in a backward pass, in one beside kept logits, in a
# forward pass alone, and when a token is drawn.
BACKWARD_LOGITS, KEPT_BACKWARD_LOGITS, FORWARD_LOGITS, DRAWN_LOGITS = 4, 3, 3, 4
# A process on the CPU keeps what it frees, and glibc's aligned allocation does not fit a block
# into the hole of one of the same size: blocks of the forward passes (of an annotation, of an
# update) are still held when those of the backward pass are added. Larger ones are given back.
# The small gradients of adapters lie between what layers free, about an output of each module.
LARGEST_HELD = 1 << 30


@dataclass(frozen=True)
class Share:
    """Bytes that a role takes of a device, in the phase in which it takes most."""

    parameters: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0


@dataclass(frozen=True)
class Place:
    """A kind of device: what it has, what it needs in each phase, and of that for each role."""

    name: str
    there: int | None
    roles: Mapping[str, Share]
    phases: Mapping[str, int]

    @property
    def phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def needed(self) -> int:
        """Bytes at the highest."""
        return self.phases[self.phase]

    @property
    def fits(self) -> bool | None:
        """Whether it has what it needs and RESERVE; None where its memory is not known."""
        return None if self.there is None else self.needed <= (1 - RESERVE) * self.there

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


@dataclass(frozen=True)
class Work:
    """What one model needs: at rest, and beyond it in an annotation and in an update.

    `whole` are weights that are gathered for all of an annotation.
    """

    share: Share
    rest: int
    annotate: int
    update: int
    whole: int = 0


def _work(
    config: Config,
    device: Device,
    shape: Shape,
    part: Actor | Critic | None,
    mini: int,
    offload: Sharding,
) -> Work:
    """Count one model on one learner rank; `part` is None for a reference.

    A backward pass begins with all activations, the logits and the head's gradient, and ends
    with all gradients and the states of one layer; the gradients are there from the start in
    the second micro-batch.
    """
    critic = part is config.critic
    longest = config.data.max_prompt_length + config.data.max_response_length
    adapted = config.critic.model if critic else config.model
    rank = 0 if part is None else adapted.lora_rank
    trained = device.held(shape, shape.parameters(head=not critic))
    whole = device.frozen(shape) if part is None else trained + FLOAT * shape.adapter(rank)
    in_4_bits = part is not None and adapted.quantization is not None
    if in_4_bits:
        whole -= int((FLOAT - FOUR_BITS) * shape.layers * shape.layer)
    state_bytes = FLOAT if device.half and device.shards == 1 else device.width
    budget = micro_batch_tokens(config, config.ref.log_prob_max_token_len_per_gpu)
    all_rows = -(-config.data.train_batch_size * config.rollout.n // data_ranks(config))
    asked = min(all_rows * longest, max(longest, budget))
    forward = asked * (4 * state_bytes * shape.hidden + 3 * device.width * shape.inner)
    chunk = FLOAT * shape.vocabulary
    answers = config.data.max_response_length / longest
    full = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
    logits = 0 if critic else FORWARD_LOGITS * chunk * min(LOGIT_CHUNK, int(asked * answers))
    gathered = device.gathered(shape, offload.stays_whole)
    kept_whole = gathered if offload.stays_whole else 0
    # Outside of sharding, autocast keeps the trained weights in bfloat16 until a pass is over.
    cast = (
        2 * shape.parameters()
        if device.half and device.shards == 1 and part and not in_4_bits
        else 0
    )
    annotate = gathered - kept_whole + cast + max(forward, logits * (2 if full else 1))
    rest = 0 if offload.param_offload and device.gpu else whole
    # One process brings offloaded weights to the device for as long as it works with them.
    brought = whole - rest if device.shards == 1 else 0
    annotate += brought
    if part is None:
        return Work(Share(parameters=whole), rest, annotate, 0, kept_whole)
    if rank:
        trained = FLOAT * shape.adapter(rank)
    at_home = device.gpu and device.shards > 1 and offload.param_offload
    two = 2 * trained * (EIGHT_BITS if part.optim.optimizer == "AdamW8bit" else 1)
    gradients, moments = (0, 0) if at_home else (trained, int(two))
    tokens = _tokens(config, part, mini)
    own_rows = -(-mini * config.rollout.n // data_ranks(config))
    layer = shape.layer_bytes(device)
    inside = tokens * (layer + 3 * device.width * shape.inner // device.tensor)
    inside += 0 if rank else shape.expert_gradients(device)
    if in_4_bits:  # a linear layer is whole while it is used
        inside += device.width * shape.hidden * max(shape.inner, shape.queries)
    kept = 2 * shape.hidden * state_bytes
    kept = tokens * (
        kept + shape.layers * (shape.hidden * state_bytes if _recomputes(config, critic) else layer)
    )
    update_logits = 0 if critic else _update_logits(config, device, shape, int(tokens * answers))
    table = 0 if rank else FLOAT * shape.embedding
    several = tokens < own_rows * longest
    earlier = gradients if several else 0
    if offload.stays_whole and several and device.shards > 1:  # reduced once, at the end
        earlier = gradients * device.shards
    if rank and device.keeps_freed:
        at_once = 1 if _recomputes(config, critic) else shape.layers
        kept += tokens * at_once * shape.outputs * FLOAT
    start = earlier + kept + max(update_logits + (0 if critic else table), inside)
    reduced = gathered - kept_whole + FLOAT * shape.layer if device.shards > 1 else 0
    end = max(gradients, earlier) + max(inside, table + (table if earlier and not critic else 0))
    optimizer_away = offload.optimizer_offload and device.gpu and not at_home
    apply = gradients + (moments if optimizer_away else 0)
    update = brought + gathered + reduced + cast + max(start, end, apply)
    share = Share(whole, gradients, moments, kept, update_logits)
    return Work(share, rest + (0 if optimizer_away else moments), annotate, update, kept_whole)


def _update_logits(config: Config, device: Device, shape: Shape, tokens: int) -> int:
    """Bytes that the logits of so many response tokens take in an update."""
    chunk = FLOAT * shape.vocabulary * min(LOGIT_CHUNK, tokens)
    whole = shape.vocabulary * tokens
    kept = FLOAT * whole if whole <= KEPT_LOGITS else 0
    backward = KEPT_BACKWARD_LOGITS if kept else BACKWARD_LOGITS
    full = config.actor.use_kl_loss and config.actor.kl_loss_type == "full"
    held = device.keeps_freed and chunk <= LARGEST_HELD
    copies = backward + (BACKWARD_LOGITS if full else 0) + held * (FORWARD_LOGITS + backward)
    return kept + chunk * copies


def _recomputes(config: Config, critic: bool) -> bool:
    own = config.critic.model.enable_gradient_checkpointing if critic else None
    return config.model.enable_gradient_checkpointing is not False if own is None else own


def _tokens(config: Config, part: Trained, mini: int) -> int:
    """Return the most tokens of a micro-batch."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = -(-mini * config.rollout.n // data_ranks(config))
    if part.ppo_micro_batch_size_per_gpu is not None:
        rows = min(rows, part.ppo_micro_batch_size_per_gpu)
    budget = micro_batch_tokens(config, part.ppo_max_token_len_per_gpu)
    return min(rows * longest, max(longest, budget))


def _sampler(config: Config, shape: Shape, device: Device, there: int | None) -> Work:
    """Count a sampler on one of its devices: vLLM takes a share of it, ours what it needs."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    rows = min(config.rollout.max_num_seqs, gen_batch(config) * config.rollout.n)
    if sampler_name(config) == "vllm":
        span = config.rollout.tensor_model_parallel_size
        weights = device.width * shape.parameters() // span
        token = 2 * device.width * max(shape.keys // span, shape.queries // shape.heads)
        least = token * shape.layers * longest
        claimed = int(config.rollout.gpu_memory_utilization * (there or 0)) if device.gpu else 0
        cache = max(least, claimed - weights) if device.gpu else least * rows
        return Work(Share(parameters=weights, kv_cache=cache), 0, 0, weights + cache)
    own = 0 if engine_name(config) == "local" else FLOAT * shape.parameters()
    layer = 2 * device.width * shape.keys * rows * longest
    # A step makes one layer's cache anew; on a GPU keys are repeated for all heads behind a mask.
    cache = layer * (shape.layers + 1)
    if shape.keys < shape.queries and device.gpu:
        cache += layer * shape.queries // shape.keys
    # Linear layers are cast once a rollout.
    cast = 2 * (shape.layers * shape.layer + shape.embedding) if device.half else 0
    logits = DRAWN_LOGITS * FLOAT * shape.vocabulary * rows
    prompts = min(gen_batch(config), rows) * config.data.max_prompt_length
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


def count_memory(config: Config, shapes: Shapes, there: int | None) -> tuple[Place, ...]:
    """Count what each kind of device needs; `there` is what one has (the host, without GPUs)."""
    per_node = gpus_per_node(config)
    placement = placement_of(config)
    gpu, ranks = per_node > 0, max(1, len(placement.train))
    rows = data_ranks(config)
    size = config.actor.fsdp_config.fsdp_size
    device = Device(
        half=compute_dtype(config) == "bfloat16",
        gpu=gpu,
        shards=rows if size == -1 else min(size, rows),
        tensor=ranks // rows,
        packed=config.model.packing is not False,
        keeps_freed=not gpu and (ranks == 1 or config.model.enable_gradient_checkpointing is False),
    )
    reference = config.actor.fsdp_config.model_copy(
        update={"param_offload": config.ref.param_offload}
    )
    works = {
        "actor": _work(
            config, device, shapes.actor, config.actor, config.actor.ppo_mini_batch_size,
            config.actor.fsdp_config,
        )
    }  # fmt: skip
    if uses_critic(config):
        works["critic"] = _work(
            config, device, shapes.critic, config.critic, critic_mini_batch(config),
            config.critic.fsdp_config,
        )  # fmt: skip
    if uses_reference(config) and not (config.model.lora_rank and config.ref.path is None):
        works["reference"] = _work(config, device, shapes.reference, None, 0, reference)
    sampler = _sampler(config, shapes.actor, device, there)
    rewards = _rewards(config, shapes.rewards, gpu)
    rest = sum(work.rest for work in works.values())
    asked = [work for name, work in works.items() if name != "actor" or why_logprobs_again(config)]
    brought = sum(work.annotate for work in asked) if device.shards == 1 and gpu else 0
    most = max(brought, *(work.annotate for work in asked)) if asked else 0
    phases = {
        "rollout": rest,
        "annotation": rest + sum(work.whole for work in asked) + most,
        **{
            f"update of the {name}": rest + work.update
            for name, work in works.items()
            if work.update
        },
    }
    shares = {name: work.share for name, work in works.items()}
    if shapes.rewards:
        phases["scoring"] = rest
    ours = {"sampler": sampler.share} | ({"reward model": rewards.share} if shapes.rewards else {})
    if not gpu:
        return (_host(placement.nodes, ranks, placement.rollout, phases, shares | ours,
                      sampler, rewards, there),)  # fmt: skip
    shared = {*placement.train} & {d for one in placement.rollout for d in one}
    scored = {*placement.train} & {*placement.reward} or placement.alone
    places = []
    if shared or placement.alone:
        phases = {name: need + sampler.rest for name, need in phases.items()}
        phases["rollout"] += sampler.update
        shares["sampler"] = sampler.share
    if shapes.rewards and scored:
        phases = {name: need + rewards.rest for name, need in phases.items()}
        phases["scoring"] += rewards.update
        shares["reward model"] = rewards.share
    places.append(Place("a GPU that trains", there, shares, phases))
    if placement.rollout and not (shared or placement.alone):
        need = {"rollout": sampler.rest + sampler.update}
        places.append(Place("a GPU that samples", there, {"sampler": sampler.share}, need))
    if shapes.rewards and not scored:
        need = {"scoring": rewards.rest + rewards.update}
        places.append(Place("a GPU that scores", there, {"reward model": rewards.share}, need))
    return tuple(places)


def _host(
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
    actor, critic, reference = (known.get(paths[name], known[paths["actor"]]) for name in paths)
    return Shapes(actor, critic, reference, tuple(known[p] for p in rewards if p in known))


def device_memory(config: Config) -> int | None:
    """Return the memory of a GPU, the smallest of those used, else this machine's, in bytes.

    None: the run uses GPUs, and this machine has none.
    """
    per_node = gpus_per_node(config)
    if not per_node:
        return host_memory()
    return min((gpu.memory_bytes for gpu in list_gpus()[:per_node]), default=None)


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
