"""Whether a run fits into memory, and the smallest change of settings that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppo_cli.allocator import find_jemalloc
from ppo_cli.config.derived import (
    compute_dtype,
    micro_batch_tokens,
    shares_prompts,
    spreads_weights,
    uses_critic,
    uses_reference,
    why_recompute_logprobs,
)
from ppo_cli.config.memory.devices import (
    AMPLE,
    GIB,
    DeviceNeeds,
    ModelShapes,
    count_host,
    count_judge_server,
    count_memory,
    count_vllm,
    counted_models,
    device_memory,
    host_of_gpus,
    read_shapes,
    sampled_rows,
)
from ppo_cli.config.models.remote_configs import find_config
from ppo_cli.config.models.shape import FLOAT, Shape
from ppo_cli.config.placement import (
    PlanPart,
    data_ranks,
    engine_name,
    gpus_per_node,
    placement_of,
    sampler_name,
    sleep_mode,
)
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ppo
from ppo_cli.machine.device_record import is_proven
from ppo_cli.machine.processor import matmul_library

LORA_RANK = 16  # of the adapter that is suggested
STEP_PHASES = ("annotation", "update")  # in which checkpointing and gathering matter
SMALLEST_BUDGET = 1024  # tokens of a suggested micro-batch; fewer leave a device idle
LARGEST_SHARE = 0.9  # of a GPU that is suggested for vLLM
Settings = Mapping[str, Any]  # key -> value
UNKNOWN_STEP = "gradient checkpointing: on (the memory of a step is unknown here)"


@dataclass(frozen=True)
class Estimate:
    """The needs of a run, with the settings that trade memory for speed filled in."""

    config: Config
    places: tuple[DeviceNeeds, ...]
    ample: int  # bytes of a step with all activations kept and weights gathered once
    host: DeviceNeeds | None = None  # the host of GPUs

    @property
    def fits(self) -> bool | None:
        """Whether all devices and the host have enough memory; None if unknown."""
        answers = [place.fits for place in self.places]
        if None in answers:
            return None
        return all(answers) and (self.host is None or self.host.fits is not False)


def estimate_memory(
    config: Config, shapes: ModelShapes, capacity: int | None, host: int | None = None
) -> Estimate:
    """Count the memory of a run; unset settings trade memory for speed only if it is ample.

    `capacity` is the size of a device, `host` that of the memory next to GPUs.
    """
    if _sleeps_in_host_memory(config) and config.rollout.sleep == "auto":
        # A sampler that keeps its weights on the GPU saves a copy from host memory in each step.
        keeping = estimate_memory(
            with_settings(config, {"rollout.sleep": "keep"}), shapes, capacity, host
        )
        if keeping.fits:
            return keeping
    settled = _estimate_devices(config, shapes, capacity)
    return replace(settled, host=count_host(settled.config, shapes, host))


def _sleeps_in_host_memory(config: Config) -> bool:
    """Whether vLLM's weights move to host memory while their GPU trains."""
    shared = gpus_per_node(config) and placement_of(config).sleepers
    return bool(shared) and sampler_name(config) == "vllm" and sleep_mode(config) == "offload"


def _estimate_devices(config: Config, shapes: ModelShapes, capacity: int | None) -> Estimate:
    """Return the fastest settings that fit into memory, with their estimate.

    If none fits, or `capacity` is unknown, they are those that need the least memory.
    """
    # The first mode that fits wins; the most frugal one is counted if none does.
    ample = 0
    for recompute, reshard in _modes_by_speed(config):
        settled = _fill_unset(config, recompute=recompute, reshard=reshard)
        places = count_memory(settled, shapes, capacity)
        step = max(map(_step_bytes, places))
        if not recompute:
            ample = step
        if capacity is None:
            continue
        # The estimate of activations may be wrong, that of weights and gradients is not.
        counted_well = recompute or config.model.enable_gradient_checkpointing is not None
        if counted_well and gpus_per_node(config):
            enough = all(place.fits for place in places)
        else:
            enough = step <= AMPLE * capacity
        if enough:
            return Estimate(settled, places, ample)
    saving = _fill_unset(config, recompute=True, reshard=True)
    return Estimate(saving, count_memory(saving, shapes, capacity), ample)


def _modes_by_speed(config: Config) -> list[tuple[bool, bool]]:
    """Return pairs (recompute layers, reshard weights), the fastest first.

    Products take 6 FLOPs for each weight and token, and 2 more if layers are recomputed. Gathers
    and reductions send 8 bytes for each weight and micro-batch: within a node they overlap with the
    products, between nodes they may take longer (1e9 weights at 100 Gb/s: 0.6 s; their products for
    16,384 tokens at 400 TFLOPS: 0.25 s).
    """
    # One rank, or an unproven feature: only recomputation can be chosen.
    if not _may_keep_gathered(config):
        return [(False, True)]
    between = [(False, True), (True, False)]
    return [(False, False), *(between[::-1] if config.trainer.nnodes > 1 else between)]


def _step_bytes(place: DeviceNeeds) -> int:
    """Return the bytes of annotation and update on a device; 0 if it only samples."""
    return max((n for name, n in place.phases.items() if name.startswith(STEP_PHASES)), default=0)


def _may_keep_gathered(config: Config) -> bool:
    """Whether weights are sharded and may stay gathered through a step."""
    if data_ranks(config) == 1:
        return False
    return not gpus_per_node(config) or is_proven("keep_gathered")


def _fill_unset(config: Config, *, recompute: bool, reshard: bool) -> Config:
    """Fill in the unset settings of checkpointing and resharding."""
    if config.model.enable_gradient_checkpointing is None:
        config = with_settings(config, {"model.enable_gradient_checkpointing": recompute})
    for part in ("actor", "critic") if _may_keep_gathered(config) else ():
        sharding = getattr(config, part).fsdp_config
        if sharding.reshard_after_forward is None:
            # Weights are offloaded because the GPU is too small: they must not stay gathered.
            frees = reshard or (sharding.param_offload and gpus_per_node(config) > 0)
            config = with_settings(config, {f"{part}.fsdp_config.reshard_after_forward": frees})
    return config


def memory_plan(config: Config) -> PlanPart:
    """Return the memory section of the plan: needs of each device, whether they fit, advice.

    It has lines for people and facts for programs. Without a readable config.json of a model the
    memory is unknown.
    """
    layout = tuple(_describe_layout(config))
    shapes, capacity, host = read_shapes(config), device_memory(config), host_of_gpus()
    checkpointing = config.model.enable_gradient_checkpointing
    as_set = [f"gradient checkpointing: {'on' if checkpointing else 'off'}, as set"]
    # Nothing can be counted if a model's config.json is not readable.
    if not isinstance(shapes, ModelShapes):
        lines = [
            f"memory of {path}: unknown (no config.json here or at the hub, or not a plain decoder)"
            for path in shapes
        ]
        lines += [UNKNOWN_STEP] if checkpointing is None else as_set
        return PlanPart(tuple(lines), {"unknown": list(shapes)}, layout)
    chosen = estimate_memory(config, shapes, capacity, host)
    judge = count_judge_server(config)
    places = [*chosen.places, *filter(None, (judge, chosen.host))]
    lines = [line for place in places for line in _describe_device(place)]
    # What would make it fit, and how the unset settings were chosen.
    changes = None
    if chosen.fits is False:
        changes = find_smallest_change(config, shapes, capacity, host)
        if changes is None:
            lines.append("no change of settings makes it fit: use a smaller --model")
        else:
            lines.append("the smallest change that makes it fit: " + _format_overrides(changes))
    lines += as_set if checkpointing is not None else []
    lines += _explain_choices(config, chosen, capacity)
    # Shapes that are not read from the model's own files on this machine.
    sources = {path: find_config(path)[1] for path in counted_models(config)}
    sources = {path: source for path, source in sources.items() if source}
    lines += [f"shape of {path}: from {source}" for path, source in sources.items()]
    facts = {
        "fits": chosen.fits,
        "devices": [place.facts() for place in places],
        "gradient_checkpointing": chosen.config.model.enable_gradient_checkpointing,
        "changes": changes,
        "shapes": sources,
    }
    return PlanPart(tuple(lines), facts, layout)


def _describe_layout(config: Config) -> Iterator[str]:
    """Yield the plan's lines about how rows, log-probs and products are computed."""
    model = config.model
    if model.packing is None:
        yield "packing: on if a trial at start-up gives the same numbers as padded rows"
    else:
        yield f"packing: {'on' if model.packing else 'off'}, as set"
    if model.attn_implementation:
        yield f"attention: {model.attn_implementation}, as set"
    else:
        yield "attention: sdpa if the trial gives the same numbers, else eager"
    if config.rollout.n > 1 and model.packing is not False:
        once = shares_prompts(config, on_gpu=gpus_per_node(config) > 0)
        why = " (model.share_prompts)" if model.share_prompts is None else ", as set"
        yield f"prompt computed once for its packed responses: {'yes' if once else 'no'}{why}"
    why = why_recompute_logprobs(config)
    source = f"from the actor ({why})" if why else "from the sampler (it uses the actor's weights)"
    yield f"old log-probs: {source}"
    yield from cpu_plan(config, jemalloc=find_jemalloc() is not None)
    if compute_dtype(config) == "bfloat16":
        spreads = spreads_weights(config, "cuda" if gpus_per_node(config) else "cpu")
        why = " (model.spread_weights)" if model.spread_weights is None else ", as set"
        result = "spread, so that small updates count" if spreads else "trained as loaded"
        yield f"weights that are exact in bfloat16: {result}{why}"


def cpu_plan(config: Config, *, jemalloc: bool) -> list[str]:
    """Return the plan's lines about the matrix library and the allocator on the CPU."""
    if gpus_per_node(config):
        return []
    lines = []
    if compute_dtype(config) == "bfloat16":
        why = ", as set" if config.model.dtype else " (faster on this processor)"
        lines.append(f"matrix products: bfloat16{why}")
    else:
        setting = config.model.float32_matmul
        library = {"onednn": "oneDNN", "blas": "torch's BLAS"}[matmul_library(setting)]
        lines.append(f"matrix products: float32 by {library}{', as set' if setting else ''}")
    if jemalloc and engine_name(config) == "local":
        lines.append("allocator: jemalloc")
    return lines


def fill_dtype(config: Config) -> Config:
    """Set an unset `model.dtype` to the computed one, unless it is the device's default."""
    chosen = compute_dtype(config)
    if config.model.dtype or (chosen == "bfloat16") == bool(gpus_per_node(config)):
        return config
    return with_settings(config, {"model.dtype": chosen})


def fill_memory_settings(config: Config, tell: Callable[[str], None]) -> Config:
    """Fill in unset settings that trade memory for speed, and report why."""
    shapes, capacity = read_shapes(config), device_memory(config)
    if not isinstance(shapes, ModelShapes) or capacity is None:
        return _fill_unset(config, recompute=True, reshard=True)
    chosen = estimate_memory(config, shapes, capacity, host_of_gpus())
    for line in _explain_choices(config, chosen, capacity):
        tell(f"Memory: {line}")
    return chosen.config


def find_smallest_change(
    config: Config, shapes: ModelShapes, capacity: int | None, host: int | None = None
) -> dict[str, Any] | None:
    """Return the first change that makes a run fit, from harmless to costly; else a few together.

    None if all changes together do not make it fit.
    """

    def fits(changes: list[Settings]) -> bool:
        merged = {key: value for candidate in changes for key, value in candidate.items()}
        return bool(estimate_memory(with_settings(config, merged), shapes, capacity, host).fits)

    # One change may be enough; otherwise changes are added until the run fits.
    offered = list(_memory_saving_changes(config, shapes.actor, capacity))
    tried: list[Settings] = []
    chosen = next(([candidate] for candidate in offered if fits([candidate])), None)
    for candidate in offered if chosen is None else ():
        tried.append(candidate)
        if fits(tried):
            chosen = tried
            break
    if chosen is None:
        return None
    # Drop changes that turn out to be unnecessary.
    for candidate in list(chosen):
        rest = [other for other in chosen if other is not candidate]
        if rest and fits(rest):
            chosen = rest
    return {key: value for candidate in chosen for key, value in candidate.items()}


def _memory_saving_changes(
    config: Config, shape: Shape, capacity: int | None
) -> Iterator[Settings]:
    """Yield settings that save memory; those that only cost speed come first."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    # Smaller micro-batches, and recomputed layers.
    set_budgets = {
        "actor.ppo_max_token_len_per_gpu": config.actor.ppo_max_token_len_per_gpu,
        "ref.log_prob_max_token_len_per_gpu": config.ref.log_prob_max_token_len_per_gpu,
    }
    if uses_critic(config):
        set_budgets["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
    budgets = {key: micro_batch_tokens(config, tokens) for key, tokens in set_budgets.items()}
    tokens = max(budgets.values()) // 2
    while tokens >= max(longest, SMALLEST_BUDGET):
        yield {key: tokens for key, now in budgets.items() if tokens < now}
        tokens //= 2
    if config.model.enable_gradient_checkpointing is False:
        yield {"model.enable_gradient_checkpointing": True}
    # Less memory for sampling.
    if sampler_name(config) == "hf":
        rows = sampled_rows(config)
        while rows > 8:
            rows //= 2
            yield {"rollout.max_num_seqs": rows}
    elif gpus_per_node(config) and capacity:
        least = _smallest_vllm_share(
            sum(count_vllm(config, shape, 2 if compute_dtype(config) == "bfloat16" else FLOAT)),
            capacity,
        )
        share = config.rollout.gpu_memory_utilization
        if share > max(0.3, least) or share < least <= LARGEST_SHARE:
            yield {"rollout.gpu_memory_utilization": max(0.3, least)}
    if sampler_name(config) == "vllm" and gpus_per_node(config):
        yield from _wider_tensor_parallelism(config, shape)
    # Offloading to the host, then training fewer weights, then more devices.
    if gpus_per_node(config):
        if uses_reference(config) and not config.model.lora_rank:
            yield {"ref.param_offload": True}
        models = ("actor", "critic") if uses_critic(config) else ("actor",)
        for what in ("optimizer_offload", "param_offload"):
            yield {f"{model}.fsdp_config.{what}": True for model in models}
    if not config.model.lora_rank:
        yield {"model.lora_rank": LORA_RANK}
    if uses_critic(config) and not config.critic.model.lora_rank:
        yield {"critic.model.lora_rank": LORA_RANK}
    if gpus_per_node(config):
        yield from _more_devices(config)


def _smallest_vllm_share(size: int, capacity: int) -> float:
    """Return the smallest share of a device that holds `size` bytes, in steps of 0.05."""
    return math.ceil(20 * size / capacity) / 20


def _wider_tensor_parallelism(config: Config, shape: Shape) -> Iterator[Settings]:
    """Yield samplers over more GPUs: each has fewer weights, in rollout and transfer."""
    # Heads must divide evenly among the GPUs of a sampler.
    span, gpus = config.rollout.tensor_model_parallel_size, gpus_per_node(config)
    keys = shape.keys * shape.heads // shape.queries  # key-value heads
    while config.trainer.placement is None and 2 * span <= gpus:
        span *= 2
        if gpus % span == 0 and shape.heads % span == 0 and keys % min(span, keys) == 0:
            yield {"rollout.tensor_model_parallel_size": span}


def _more_devices(config: Config) -> Iterator[Settings]:
    """Yield larger numbers of GPUs that divide the rows of a mini-batch."""
    if config.trainer.placement is not None or config.trainer.engine == "local":
        return
    # Up to 8 GPUs in one node, then nodes of 8.
    nodes, now = config.trainer.nnodes, gpus_per_node(config)
    rows = config.actor.ppo_mini_batch_size * config.rollout.n
    for count in (2, 4, 8, 16, 32, 64):
        if count <= nodes * now or rows % (count // config.trainer.tensor_parallel_size or 1):
            continue
        if count <= 8 and nodes == 1:
            yield {"trainer.n_gpus_per_node": count}
        elif count % 8 == 0:
            yield {"trainer.n_gpus_per_node": 8, "trainer.nnodes": count // 8}


def _describe_device(place: DeviceNeeds) -> Iterator[str]:
    """Yield lines about the needs of a device, in total and by role."""
    need = f"{place.name} needs about {format_size(place.needed)} ({place.phase})"
    if place.capacity is None:
        yield f"{need}; its size is unknown here"
    elif place.fits:
        yield f"{need} of {format_size(place.capacity)}: fits"
    elif not place.vllm_starts:
        least = _smallest_vllm_share(place.vllm_least, place.capacity)
        # vLLM needs a larger share, or more GPUs for its weights.
        setting = f"rollout.gpu_memory_utilization to {least:.2g} or "
        yield (
            f"{place.name} gives vLLM {format_size(place.vllm_share)}, which needs "
            f"{format_size(place.vllm_least)} for its weights and the cache of one row: does not "
            f"fit; raise {setting if least <= LARGEST_SHARE else ''}"
            "rollout.tensor_model_parallel_size (--rollout_tp)"
        )
    else:
        free = format_size(place.left_free)
        size = format_size(place.capacity)
        yield f"{need} of {size}, of which {free} must stay free: does not fit"
    for role, share in place.roles.items():
        parts = [
            f"{field.replace('_', ' ').replace('kv', 'KV')} {format_size(size)}"
            for field, size in vars(share).items()
            if size
        ]
        if parts:
            yield f"{role}: {', '.join(parts)}"


def _explain_choices(config: Config, chosen: Estimate, capacity: int | None) -> Iterator[str]:
    """Yield lines about the choice of unset settings, with the numbers behind it."""
    if config.model.enable_gradient_checkpointing is None:
        if capacity is None:
            yield UNKNOWN_STEP
        else:
            recompute = chosen.config.model.enable_gradient_checkpointing
            yield (
                f"gradient checkpointing: {'on' if recompute else 'off'} (a step with all "
                f"activations needs about {format_size(chosen.ample)} of {format_size(capacity)})"
            )
    if data_ranks(config) == 1 or config.actor.fsdp_config.reshard_after_forward is not None:
        return
    if not _may_keep_gathered(config):
        yield (
            "weights are gathered and gradients reduced in each micro-batch: "
            f"`{ppo('doctor --self-test')}` has not proven the faster way (once a step) here"
        )
    else:
        yield (
            "weights are gathered and gradients reduced once a step: memory is ample"
            if chosen.config.actor.fsdp_config.stays_whole
            else "weights are gathered and gradients reduced in each micro-batch"
        )


def _format_overrides(changes: Settings) -> str:
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changes.items()
    )


def format_size(count: int) -> str:
    """Write bytes in GiB, or in MiB if they are few, with three digits."""
    return f"{count / GIB:.3g} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.3g} MiB"
