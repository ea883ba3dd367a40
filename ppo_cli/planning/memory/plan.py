"""Whether a run fits into memory, and the smallest change of settings that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppo_cli.allocator import find_jemalloc
from ppo_cli.config.models.attention import PACKED, SDPA, is_plain
from ppo_cli.config.models.folder import read_config
from ppo_cli.config.models.remote_configs import find_config
from ppo_cli.config.models.shape import FLOAT, Shape
from ppo_cli.config.models.weight_files import text_config
from ppo_cli.config.schema.algorithm import Sharding
from ppo_cli.config.schema.keys import table, value_of, with_settings
from ppo_cli.config.schema.run import Config, Model, Sleep, Trainer
from ppo_cli.config.schema.unset import Fitted as FittedRule
from ppo_cli.config.settle import Settled, settle
from ppo_cli.errors import ppo
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.devices import (
    AMPLE,
    GIB,
    DeviceNeeds,
    ModelShapes,
    RunNeeds,
    count_judge_server,
    count_vllm,
    counted_models,
    device_memory,
    read_shapes,
    sampled_prompts,
    sampled_rows,
)
from ppo_cli.planning.placement import (
    PlanPart,
    data_ranks,
    local_judge,
    placement_of,
)
from ppo_cli.plugins import runs_elsewhere

LORA_RANK = 16  # of the adapter that is suggested
STEP_PHASES = ("annotation", "update")  # in which checkpointing and gathering matter
SMALLEST_BUDGET = 1024  # tokens of a suggested micro-batch; fewer leave a device idle
LARGEST_SHARE = 0.9  # of a GPU that is suggested for vLLM
Settings = Mapping[str, Any]  # key -> value
# Settings with the token budgets of micro-batches, and what they are unless they are set.
TOKEN_BUDGETS = (
    "actor.ppo_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "ref.log_prob_max_token_len_per_gpu",
)
SMALL_BUDGET, LARGE_BUDGET = 2048, 16384
UNKNOWN_STEP = "gradient checkpointing: on (the memory of a step is unknown here)"


@dataclass(frozen=True)
class Fitted:
    """Settings in which nothing is unset, the reasons of choices, and those of the memory plan."""

    config: Config
    why: dict[str, str]
    lines: tuple[str, ...]
    estimate: Estimate | None = None  # None: nothing can be counted here


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


def estimate_memory(config: Config, shapes: ModelShapes, machine: Machine) -> Estimate:
    """Count the memory of a run; unset settings trade memory for speed only if it is ample.

    Of `config`, only the settings that are fitted to the memory may be unset.
    """
    if config.rollout.sleep is None:
        sleep = _frugal_sleep(config.model, machine)
        # Whether vLLM samples on GPUs that train.
        on_gpus = config.trainer.n_gpus_per_node and config.rollout.name == "vllm"
        if sleep == "offload" and on_gpus and placement_of(config).sleepers:
            # A sampler that keeps its weights on the GPU saves a copy from host memory in each
            # step.
            keeping = estimate_memory(
                with_settings(config, {"rollout.sleep": "keep"}), shapes, machine
            )
            if keeping.fits:
                return keeping
        config = with_settings(config, {"rollout.sleep": sleep})
    fitted = _estimate_devices(config, shapes, machine)
    return replace(fitted, host=RunNeeds(fitted.config, shapes, machine).host())


def _frugal_sleep(model: Model, machine: Machine) -> Sleep:
    """Return where vLLM's weights need no memory of the GPU while it trains.

    They are discarded only where the self-test has proven that an engine samples correctly after it
    gets its weights again.
    """
    proven = "sleep" in machine.proven and not model.publishes_adapter
    return "discard" if proven else "offload"


def _estimate_devices(config: Config, shapes: ModelShapes, machine: Machine) -> Estimate:
    """Return the fastest settings that fit into memory, with their estimate.

    If none fits, or the size of a device is unknown, they are those that need the least memory.
    """
    # The first mode that fits wins; the most frugal one is counted if none does.
    ample, capacity = 0, device_memory(config.trainer, machine)
    may_keep = _may_keep_gathered(config, machine)
    for recompute, reshard in _modes_by_speed(may_keep, config.trainer.nnodes):
        settled = _fill_unset(config, may_keep, recompute=recompute, reshard=reshard)
        places = RunNeeds(settled, shapes, machine).devices()
        step = max(map(_step_bytes, places))
        if not recompute:
            ample = step
        if capacity is None:
            continue
        # The estimate of activations may be wrong, that of weights and gradients is not.
        counted_well = recompute or config.model.enable_gradient_checkpointing is not None
        if counted_well and config.trainer.n_gpus_per_node:
            enough = all(place.fits for place in places)
        else:
            enough = step <= AMPLE * capacity
        if enough:
            return Estimate(settled, places, ample)
    saving = _fill_unset(config, may_keep, recompute=True, reshard=True)
    return Estimate(saving, RunNeeds(saving, shapes, machine).devices(), ample)


def _modes_by_speed(may_keep: bool, nodes: int) -> list[tuple[bool, bool]]:
    """Return pairs (recompute layers, reshard weights), the fastest first.

    Products take 6 FLOPs for each weight and token, and 2 more if layers are recomputed. Gathers
    and reductions send 8 bytes for each weight and micro-batch: within a node they overlap with the
    products, between nodes they may take longer (1e9 weights at 100 Gb/s: 0.6 s; their products for
    16,384 tokens at 400 TFLOPS: 0.25 s).
    """
    # One rank, or an unproven feature: only recomputation can be chosen.
    if not may_keep:
        return [(False, True)]
    between = [(False, True), (True, False)]
    return [(False, False), *(between[::-1] if nodes > 1 else between)]


def _step_bytes(place: DeviceNeeds) -> int:
    """Return the bytes of annotation and update on a device; 0 if it only samples."""
    return max((n for name, n in place.phases.items() if name.startswith(STEP_PHASES)), default=0)


def _may_keep_gathered(config: Config, machine: Machine) -> bool:
    """Whether weights are sharded and may stay gathered through a step."""
    if data_ranks(config) == 1:
        return False
    return not config.trainer.n_gpus_per_node or "keep_gathered" in machine.proven


def _fill_unset(config: Config, may_keep: bool, *, recompute: bool, reshard: bool) -> Config:
    """Fill in the unset settings of checkpointing and resharding, and the token budgets.

    `may_keep`: weights may stay gathered through a step.
    """
    gpus = config.trainer.n_gpus_per_node
    switch = config.model.enable_gradient_checkpointing
    values: dict[str, Any] = {
        "model.enable_gradient_checkpointing": recompute,
        "critic.model.enable_gradient_checkpointing": recompute if switch is None else switch,
    }
    # Weights are offloaded because the GPU is too small: they must not stay gathered.
    for part in ("actor", "critic"):
        offloaded = getattr(config, part).fsdp_config.param_offload and gpus > 0
        values[f"{part}.fsdp_config.reshard_after_forward"] = reshard or offloaded or not may_keep
    config = _set_unset(config, values)
    # On the CPU small batches are as fast and need less memory for activations
    # (notes/lab_book.md), unless weights are gathered for each micro-batch.
    gathered_once = placement_of(config).ranks == 1 or config.actor.fsdp_config.stays_whole
    budget = SMALL_BUDGET if gathered_once and not gpus else LARGE_BUDGET
    return _set_unset(config, dict.fromkeys(TOKEN_BUDGETS, budget))


def _set_unset(config: Config, values: Settings) -> Config:
    return with_settings(config, {k: v for k, v in values.items() if value_of(config, k) is None})


def memory_plan(requested: Config, fitted: Fitted, machine: Machine) -> PlanPart:
    """Return the memory section of the plan: needs of each device, whether they fit, advice.

    It has lines for people and facts for programs. Without a readable config.json of a model the
    memory is unknown. `requested` has the settings before any rule decides.
    """
    config, chosen = fitted.config, fitted.estimate
    shapes = read_shapes(config)
    layout = tuple(_describe_layout(requested.model, config, fitted.why))
    checkpointing = requested.model.enable_gradient_checkpointing
    as_set = [f"gradient checkpointing: {'on' if checkpointing else 'off'}, as set"]
    # Nothing can be counted if a model's config.json is not readable.
    if not isinstance(shapes, ModelShapes):
        lines = [
            f"memory of {path}: unknown (no config.json here or at the hub, or not a plain decoder)"
            for path in shapes
        ]
        lines += fitted.lines if checkpointing is None else as_set
        return PlanPart(tuple(lines), {"unknown": list(shapes)}, layout)
    chosen = chosen or estimate_memory(config, shapes, machine)
    judge = count_judge_server(
        local_judge(config.reward), placement_of(config), config.trainer, machine
    )
    places = [*chosen.places, *filter(None, (judge, chosen.host))]
    lines = [line for place in places for line in _describe_device(place)]
    # What would make it fit, and how the unset settings were chosen.
    changes = None
    if chosen.fits is False:
        changes = find_smallest_change(requested, shapes, machine)
        if changes is None:
            lines.append("no change of settings makes it fit: use a smaller --model")
        else:
            lines.append("the smallest change that makes it fit: " + _format_overrides(changes))
    lines += as_set if checkpointing is not None else []
    lines += fitted.lines
    # Shapes that are not read from the model's own files on this machine.
    sources = {path: find_config(path)[1] for path in counted_models(config)}
    sources = {path: source for path, source in sources.items() if source}
    lines += [f"shape of {path}: from {source}" for path, source in sources.items()]
    facts = {
        "fits": chosen.fits,
        "devices": [place.facts() for place in places],
        "gradient_checkpointing": chosen.config.model.enable_gradient_checkpointing,
        "choices": list(fitted.lines),
        "changes": changes,
        "shapes": sources,
    }
    return PlanPart(tuple(lines), facts, layout)


def _describe_layout(requested: Model, config: Config, why: Settings) -> Iterator[str]:
    """Yield the plan's lines about how rows, log-probs and products are computed."""
    words = {True: "on", False: "off", None: "as the family of each model"}
    yield f"packing: {words[config.model.packing]}{_explain(requested, why, 'packing')}"
    kernel = config.model.attn_implementation or "as the family of each model"
    yield f"attention: {kernel}{_explain(requested, why, 'attn_implementation')}"
    if config.rollout.n > 1 and config.model.packing is not False:
        shared = "yes" if config.model.share_prompts else "no"
        reason = _explain(requested, why, "share_prompts")
        yield f"prompt computed once for its packed responses: {shared}{reason}"
    old = "sampler" if config.algorithm.rollout_correction.bypass_mode else "actor"
    yield f"old log-probs: from the {old}"
    yield from cpu_plan(
        requested, config.model, config.trainer, jemalloc=find_jemalloc() is not None
    )
    if config.model.dtype == "bfloat16":
        spread = config.model.spread_weights
        result = "spread, so that small updates count" if spread else "trained as loaded"
        reason = _explain(requested, why, "spread_weights")
        yield f"weights that are exact in bfloat16: {result}{reason}"


def _explain(requested: Model, why: Settings, name: str) -> str:
    """Return the reason of a value, for the end of a line."""
    return ", as set" if getattr(requested, name) is not None else f" ({why[f'model.{name}']})"


def cpu_plan(requested: Model, model: Model, trainer: Trainer, *, jemalloc: bool) -> list[str]:
    """Return the plan's lines about the matrix library and the allocator on the CPU."""
    if trainer.n_gpus_per_node:
        return []
    lines = []
    if (dtype := model.dtype) != "float32":
        why = ", as set" if requested.dtype else " (faster on this processor)"
        lines.append(f"matrix products: {dtype}{why}")
    else:
        library = {"onednn": "oneDNN", "blas": "torch's BLAS"}[model.float32_matmul]
        why = ", as set" if requested.float32_matmul else ""
        lines.append(f"matrix products: float32 by {library}{why}")
    if jemalloc and trainer.engine == "local":
        lines.append("allocator: jemalloc")
    return lines


def fit_memory(settled: Settled) -> Fitted:
    """Decide the settings that trade memory for speed as well: nothing unset is left."""
    requested, machine = settled.requested, settled.machine
    layout = _choose_layout(settled.config, machine)
    if devices := placement_of(settled.config).judge:
        layout["reward.api.local.devices"] = (devices, "those of judge in --placement")
    config = with_settings(settled.config, {key: value for key, (value, _) in layout.items()})
    estimate, lines = None, []
    shapes = read_shapes(config)
    counted = not runs_elsewhere(config.trainer.engine) and (
        device_memory(config.trainer, machine) is not None
    )
    if isinstance(shapes, ModelShapes) and counted:
        estimate = estimate_memory(config, shapes, machine)
        config = estimate.config
        sharding = requested.actor.fsdp_config
        lines = list(_explain_choices(requested.model, sharding, estimate, machine))
    else:
        sleep = config.rollout.sleep or _frugal_sleep(config.model, machine)
        config = _fill_unset(
            with_settings(config, {"rollout.sleep": sleep}), _may_keep_gathered(config, machine),
            recompute=True, reshard=True,
        )  # fmt: skip
        if requested.model.enable_gradient_checkpointing is None:
            lines = [UNKNOWN_STEP]
    unset = (k for k, key in table().items() if isinstance(key.rule, FittedRule))
    why = {k: "by the memory plan" for k in unset if value_of(requested, k) is None}
    why |= {key: reason for key, (_, reason) in layout.items()}
    return Fitted(config, settled.why | why, tuple(lines), estimate)


def _choose_layout(config: Config, machine: Machine) -> dict[str, tuple[Any, str]]:
    """Return values and reasons of the unset attention kernel and of packing.

    None: the files of the models are not here, or they are of several families; each model is then
    run as its family is when it is loaded.
    """
    kernel, packing = config.model.attn_implementation, config.model.packing
    configs = [read_config(path) for path in config.training_models.values()]
    texts = [text_config(config_json) for config_json in configs]
    families = {text.get("model_type") for text in texts}
    family = next(iter(families))
    foreign = any("auto_map" in config_json for config_json in configs)
    if config.trainer.engine == "verl" or foreign or len(families) > 1 or family is None:
        unset = {"model.attn_implementation": kernel, "model.packing": packing}
        why = "as the family of each model, when it is loaded"
        return {key: (None, why) for key, value in unset.items() if value is None}
    layout: dict[str, tuple[Any, str]] = {}
    if kernel is None:
        exact = "is" if family in SDPA else "is not known to be"
        kernel = "sdpa" if family in SDPA else "eager"
        layout["model.attn_implementation"] = (kernel, f"sdpa {exact} exact for {family} models")
    if packing is None:
        plain = [is_plain(text) for text in texts]
        if kernel != "sdpa" or family not in PACKED or False in plain:
            layout["model.packing"] = (False, f"not for {kernel} attention of {family} models")
        elif config.trainer.n_gpus_per_node and "packed_attention" not in machine.proven:
            layout["model.packing"] = (False, "no self-test has proven it on these GPUs")
        elif None in plain:
            layout["model.packing"] = (None, "if the model has no windows, when it is loaded")
        else:
            layout["model.packing"] = (True, f"{family} models have plain attention")
    return layout


def find_smallest_change(
    requested: Config, shapes: ModelShapes, machine: Machine
) -> dict[str, Any] | None:
    """Return the first change that makes a run fit, from harmless to costly; else a few together.

    None if all changes together do not make it fit. `requested` has the settings before any rule
    decides: a change may lead to other choices.
    """

    def fits(changes: list[Settings]) -> bool:
        merged = {key: value for candidate in changes for key, value in candidate.items()}
        changed = settle(with_settings(requested, merged), machine).config
        return bool(estimate_memory(changed, shapes, machine).fits)

    # One change may be enough; otherwise changes are added until the run fits.
    config = estimate_memory(settle(requested, machine).config, shapes, machine).config
    capacity = device_memory(config.trainer, machine)
    offered = list(_memory_saving_changes(requested, config, shapes.actor, capacity))
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
    requested: Config, config: Config, shape: Shape, capacity: int | None
) -> Iterator[Settings]:
    """Yield settings that save memory; those that only cost speed come first."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    # Smaller micro-batches, and recomputed layers.
    keys = TOKEN_BUDGETS if config.uses_critic else (TOKEN_BUDGETS[0], TOKEN_BUDGETS[2])
    budgets = {key: value_of(config, key) for key in keys}
    tokens = max(budgets.values()) // 2
    while tokens >= max(longest, SMALLEST_BUDGET):
        yield {key: tokens for key, now in budgets.items() if tokens < now}
        tokens //= 2
    if requested.model.enable_gradient_checkpointing is False:
        yield {"model.enable_gradient_checkpointing": True}
    # Less memory for sampling.
    if config.rollout.name == "hf":
        rows = sampled_rows(config.rollout, sampled_prompts(config.data, placement_of(config)))
        while rows > 8:
            rows //= 2
            yield {"rollout.max_num_seqs": rows}
    elif config.trainer.n_gpus_per_node and capacity:
        width = FLOAT if config.model.dtype == "float32" else 2
        least = _smallest_vllm_share(
            sum(count_vllm(config.rollout, longest, shape, width)), capacity
        )
        share = config.rollout.gpu_memory_utilization
        if share > max(0.3, least) or share < least <= LARGEST_SHARE:
            yield {"rollout.gpu_memory_utilization": max(0.3, least)}
    if config.rollout.name == "vllm" and config.trainer.n_gpus_per_node:
        yield from _wider_tensor_parallelism(
            config.trainer, config.rollout.tensor_model_parallel_size, shape
        )
    # Offloading to the host, then training fewer weights, then more devices.
    if config.trainer.n_gpus_per_node:
        if config.uses_reference and not config.model.lora_rank:
            yield {"ref.param_offload": True}
        models = ("actor", "critic") if config.uses_critic else ("actor",)
        for what in ("optimizer_offload", "param_offload"):
            yield {f"{model}.fsdp_config.{what}": True for model in models}
    if not config.model.lora_rank:
        yield {"model.lora_rank": LORA_RANK}
    if config.uses_critic and not config.critic.model.lora_rank:
        yield {"critic.model.lora_rank": LORA_RANK}
    if config.trainer.n_gpus_per_node:
        yield from _more_devices(
            requested.trainer, config.trainer, config.actor.ppo_mini_batch_size * config.rollout.n
        )


def _smallest_vllm_share(size: int, capacity: int) -> float:
    """Return the smallest share of a device that holds `size` bytes, in steps of 0.05."""
    return math.ceil(20 * size / capacity) / 20


def _wider_tensor_parallelism(trainer: Trainer, span: int, shape: Shape) -> Iterator[Settings]:
    """Yield samplers over more GPUs: each has fewer weights, in rollout and transfer."""
    # Heads must divide evenly among the GPUs of a sampler.
    gpus = trainer.n_gpus_per_node
    keys = shape.keys * shape.heads // shape.queries  # key-value heads
    while trainer.placement is None and 2 * span <= gpus:
        span *= 2
        if gpus % span == 0 and shape.heads % span == 0 and keys % min(span, keys) == 0:
            yield {"rollout.tensor_model_parallel_size": span}


def _more_devices(requested: Trainer, trainer: Trainer, rows: int) -> Iterator[Settings]:
    """Yield larger numbers of GPUs that divide the `rows` of a mini-batch."""
    if trainer.placement is not None or requested.engine == "local":
        return
    # Up to 8 GPUs in one node, then nodes of 8.
    nodes, now = trainer.nnodes, trainer.n_gpus_per_node
    for count in (2, 4, 8, 16, 32, 64):
        if count <= nodes * now or rows % (count // trainer.tensor_parallel_size or 1):
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


def _explain_choices(
    requested: Model, sharding: Sharding, chosen: Estimate, machine: Machine
) -> Iterator[str]:
    """Yield lines about the choice of unset settings, with the numbers behind it.

    `requested` and `sharding` (the actor's) are as they were set.
    """
    config, capacity = chosen.config, device_memory(chosen.config.trainer, machine)
    if requested.enable_gradient_checkpointing is None:
        recompute = config.model.enable_gradient_checkpointing
        yield (
            f"gradient checkpointing: {'on' if recompute else 'off'} (a step with all "
            f"activations needs about {format_size(chosen.ample)} of {format_size(capacity or 0)})"
        )
    if data_ranks(config) == 1 or sharding.reshard_after_forward is not None:
        return
    if not _may_keep_gathered(config, machine):
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
