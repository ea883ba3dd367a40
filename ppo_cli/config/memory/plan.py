"""Whether a run fits into memory, and the smallest change that makes it fit."""

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
from ppo_cli.config.machine.device_record import proven
from ppo_cli.config.machine.processor import matmul_library
from ppo_cli.config.memory.devices import (
    AMPLE,
    GIB,
    Place,
    Shapes,
    count_host,
    count_memory,
    count_vllm,
    device_memory,
    host_of_gpus,
    judge_memory,
    read_shapes,
    sampled_rows,
)
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
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ppo

LORA_RANK = 16  # of the adapter that is proposed
STEP_PHASES = ("annotation", "update")  # in which those settings take memory
SMALLEST_BUDGET = 1024  # tokens of a micro-batch; fewer leave a device idle
LARGEST_SHARE = 0.9  # of a GPU that vLLM is offered
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Estimate:
    """What a run needs with its settings, those settled that take memory for speed."""

    config: Config
    places: tuple[Place, ...]
    ample: int  # bytes that a step needs with all that was unset kept
    host: Place | None = None  # beside GPUs

    @property
    def fits(self) -> bool | None:
        """Whether all devices have what they need; None where that is not known."""
        answers = [place.fits for place in self.places]
        if None in answers:
            return None
        return all(answers) and (self.host is None or self.host.fits is not False)


def estimate(
    config: Config, shapes: Shapes, there: int | None, host: int | None = None
) -> Estimate:
    """Count the memory of a run; what is unset takes memory for speed only where it is ample.

    `there` is what a device has, `host` what the host of GPUs has.
    """
    if _sleeps_in_host_memory(config) and config.rollout.sleep == "auto":
        # Weights that stay need not come back from host memory in each step.
        keeping = estimate(change(config, {"rollout.sleep": "keep"}), shapes, there, host)
        if keeping.fits:
            return keeping
    settled = _estimate_devices(config, shapes, there)
    return replace(settled, host=count_host(settled.config, shapes, host))


def _sleeps_in_host_memory(config: Config) -> bool:
    """Whether vLLM's weights go to host memory while their GPU trains."""
    shared = gpus_per_node(config) and placement_of(config).sleepers
    return bool(shared) and sampler_name(config) == "vllm" and sleep_mode(config) == "offload"


def _estimate_devices(config: Config, shapes: Shapes, there: int | None) -> Estimate:
    ample = 0
    for recompute, reshard in _ways_by_speed(config):
        settled = _settle(config, recompute=recompute, reshard=reshard)
        places = count_memory(settled, shapes, there)
        step = max(map(_step_bytes, places))
        if not recompute:
            ample = step
        if there is None:
            continue
        # Of activations the count may be wrong. Weights and gradients are what they are.
        counted_well = recompute or config.model.enable_gradient_checkpointing is not None
        if counted_well and gpus_per_node(config):
            enough = all(place.fits for place in places)
        else:
            enough = step <= AMPLE * there
        if enough:
            return Estimate(settled, places, ample)
    saving = _settle(config, recompute=True, reshard=True)
    return Estimate(saving, count_memory(saving, shapes, there), ample)


def _ways_by_speed(config: Config) -> list[tuple[bool, bool]]:
    """Ways that take memory for speed, the fastest first: (recompute layers, reshard weights).

    Products take 6 FLOPs a weight and token, and 2 more where layers are computed again. Gathers
    and reductions take 8 bytes a weight and micro-batch: in a node these are hidden behind the
    products, between nodes they may take longer (100 Gb/s: 0.6 s of 1e9 weights, of which 16,384
    tokens take 0.25 s at 400 TFLOPS).
    """
    if not _may_keep_gathered(config):
        return [(False, True)]
    between = [(False, True), (True, False)]
    return [(False, False), *(between[::-1] if config.trainer.nnodes > 1 else between)]


def _step_bytes(place: Place) -> int:
    """Bytes that a device needs where models are asked and trained; 0 where it only samples."""
    return max((n for name, n in place.phases.items() if name.startswith(STEP_PHASES)), default=0)


def _may_keep_gathered(config: Config) -> bool:
    """Whether ranks share weights that may stay gathered through a step."""
    if data_ranks(config) == 1:
        return False
    return not gpus_per_node(config) or proven("keep_gathered")


def _settle(config: Config, *, recompute: bool, reshard: bool) -> Config:
    """Decide whether to take memory for speed, in all settings that are unset."""
    if config.model.enable_gradient_checkpointing is None:
        config = change(config, {"model.enable_gradient_checkpointing": recompute})
    for part in ("actor", "critic") if _may_keep_gathered(config) else ():
        sharding = getattr(config, part).fsdp_config
        if sharding.reshard_after_forward is None:
            # Weights at home in host memory are there for want of room on the GPU.
            frees = reshard or (sharding.param_offload and gpus_per_node(config) > 0)
            config = change(config, {f"{part}.fsdp_config.reshard_after_forward": frees})
    return config


def memory_plan(config: Config) -> PlanPart:
    """Lay out what each role holds on a device, whether it fits, and what would make it fit."""
    model = config.model
    layout = [
        {
            None: "rows are packed without padding if a trial at the start gives the same numbers",
            True: "rows are packed without padding, as set",
            False: "rows are padded, as set",
        }[model.packing]
    ]
    layout.append(
        f"attention: {model.attn_implementation}, as set"
        if model.attn_implementation
        else "attention: sdpa if the trial gives the same numbers, else eager"
    )
    if config.rollout.n > 1 and model.packing is not False:
        why = "" if model.share_prompts is None else ", as set"
        once = shares_prompts(config, on_gpu=gpus_per_node(config) > 0)
        layout.append(
            f"packed responses share their prompt{why}"
            if once
            else f"packed responses have a prompt each{why} (model.share_prompts)"
        )
    why = why_recompute_logprobs(config)
    layout.append(
        f"the actor computes old log-probs: {why}"
        if why
        else "old log-probs are the sampler's, which computes with the actor's own weights"
    )
    layout += cpu_plan(config, jemalloc=find_jemalloc() is not None)
    if compute_dtype(config) == "bfloat16":
        spreads = spreads_weights(config, "cuda" if gpus_per_node(config) else "cpu")
        layout.append(
            "weights that bfloat16 holds exactly are "
            + ("spread, so that small updates count" if spreads else "trained as they are")
            + (" (model.spread_weights)" if model.spread_weights is None else ", as set")
        )
    shapes, there, host = read_shapes(config), device_memory(config), host_of_gpus()
    asked = config.model.enable_gradient_checkpointing
    if not isinstance(shapes, Shapes):
        said = [
            f"what {path} needs is not known: no config.json here, or not a plain decoder's"
            for path in shapes
        ]
        if asked is None:
            said.append(
                "gradient checkpointing is on: what a step needs of memory is not known here"
            )
        else:
            said.append(f"gradient checkpointing is {'on' if asked else 'off'}, as set")
        return PlanPart((*said, *layout), {"unknown": list(shapes)})
    found = estimate(config, shapes, there, host)
    judge = judge_memory(config)
    places = [*found.places, *filter(None, (judge, found.host))]
    said = [line for place in places for line in _lines(place)]
    changes = None
    if found.fits is False:
        changes = smallest_change(config, shapes, there, host)
        if changes is None:
            said.append("no change of settings makes it fit: take a smaller --model")
        else:
            said.append("the smallest change that makes it fit: " + _words(changes))
    if asked is not None:
        said.append(f"gradient checkpointing is {'on' if asked else 'off'}, as set")
    said += _settled(config, found, there)
    facts = {
        "fits": found.fits,
        "devices": [place.facts() for place in places],
        "gradient_checkpointing": found.config.model.enable_gradient_checkpointing,
        "changes": changes,
    }
    return PlanPart((*said, *layout), facts)


def cpu_plan(config: Config, *, jemalloc: bool) -> list[str]:
    """Say what multiplies matrices and what gives out memory where models are on the CPU."""
    if gpus_per_node(config):
        return []
    said = []
    if compute_dtype(config) == "bfloat16":
        why = "as set" if config.model.dtype else "which this processor does faster"
        said.append(f"matrices are multiplied in bfloat16, {why}")
    else:
        asked = config.model.float32_matmul
        library = {"onednn": "oneDNN", "blas": "torch's BLAS"}[matmul_library(asked)]
        said.append(f"{library} multiplies float32 matrices{', as set' if asked else ''}")
    if jemalloc and engine_name(config) == "local":
        said.append("jemalloc gives out memory")
    return said


def settle_dtype(config: Config) -> Config:
    """Write down what an unset `model.dtype` comes to, unless it is the usual of the device."""
    chosen = compute_dtype(config)
    if config.model.dtype or (chosen == "bfloat16") == bool(gpus_per_node(config)):
        return config
    return change(config, {"model.dtype": chosen})


def settle_memory(config: Config, tell: Callable[[str], None]) -> Config:
    """Settle what is unset and takes memory for speed where it is ample, and say why."""
    shapes, there = read_shapes(config), device_memory(config)
    if not isinstance(shapes, Shapes) or there is None:
        return _settle(config, recompute=True, reshard=True)
    found = estimate(config, shapes, there, host_of_gpus())
    for line in _settled(config, found, there):
        tell(f"Memory: {line}")
    return found.config


def smallest_change(
    config: Config, shapes: Shapes, there: int | None, host: int | None = None
) -> dict[str, Any] | None:
    """The first change that makes a run fit, from harmless to costly; else as few as are needed.

    None where all of them together do not.
    """

    def fits(changes: list[Settings]) -> bool:
        merged = {key: value for one in changes for key, value in one.items()}
        return bool(estimate(change(config, merged), shapes, there, host).fits)

    offered = list(_changes(config, shapes.actor, there))
    tried: list[Settings] = []
    chosen = next(([one] for one in offered if fits([one])), None)
    for one in offered if chosen is None else ():
        tried.append(one)
        if fits(tried):
            chosen = tried
            break
    if chosen is None:
        return None
    for one in list(chosen):
        rest = [other for other in chosen if other is not one]
        if rest and fits(rest):
            chosen = rest
    return {key: value for one in chosen for key, value in one.items()}


def _changes(config: Config, shape: Shape, there: int | None) -> Iterator[Settings]:
    """Settings that save memory, those first that change nothing but speed."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    asked = {
        "actor.ppo_max_token_len_per_gpu": config.actor.ppo_max_token_len_per_gpu,
        "ref.log_prob_max_token_len_per_gpu": config.ref.log_prob_max_token_len_per_gpu,
    }
    if uses_critic(config):
        asked["critic.ppo_max_token_len_per_gpu"] = config.critic.ppo_max_token_len_per_gpu
    budgets = {key: micro_batch_tokens(config, tokens) for key, tokens in asked.items()}
    tokens = max(budgets.values()) // 2
    while tokens >= max(longest, SMALLEST_BUDGET):
        yield {key: tokens for key, now in budgets.items() if tokens < now}
        tokens //= 2
    if config.model.enable_gradient_checkpointing is False:
        yield {"model.enable_gradient_checkpointing": True}
    if sampler_name(config) == "hf":
        rows = sampled_rows(config)
        while rows > 8:
            rows //= 2
            yield {"rollout.max_num_seqs": rows}
    elif gpus_per_node(config) and there:
        least = _least_share(
            sum(count_vllm(config, shape, 2 if compute_dtype(config) == "bfloat16" else FLOAT)),
            there,
        )
        share = config.rollout.gpu_memory_utilization
        if share > max(0.3, least) or share < least <= LARGEST_SHARE:
            yield {"rollout.gpu_memory_utilization": max(0.3, least)}
    if sampler_name(config) == "vllm" and gpus_per_node(config):
        yield from _wider_samplers(config, shape)
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


def _least_share(size: int, there: int) -> float:
    """The least share of a device with room for `size` bytes, in steps of 0.05."""
    return math.ceil(20 * size / there) / 20


def _wider_samplers(config: Config, shape: Shape) -> Iterator[Settings]:
    """Samplers over more GPUs: less of the weights on each, in a rollout and when they arrive."""
    span, gpus = config.rollout.tensor_model_parallel_size, gpus_per_node(config)
    keys = shape.keys * shape.heads // shape.queries  # heads of keys
    while config.trainer.placement is None and 2 * span <= gpus:
        span *= 2
        if gpus % span == 0 and shape.heads % span == 0 and keys % min(span, keys) == 0:
            yield {"rollout.tensor_model_parallel_size": span}


def _more_devices(config: Config) -> Iterator[Settings]:
    """More GPUs, as long as they can share the rows of a mini-batch."""
    if config.trainer.placement is not None or config.trainer.engine == "local":
        return
    nodes, now = config.trainer.nnodes, gpus_per_node(config)
    rows = config.actor.ppo_mini_batch_size * config.rollout.n
    for count in (2, 4, 8, 16, 32, 64):
        if count <= nodes * now or rows % (count // config.trainer.tensor_parallel_size or 1):
            continue
        if count <= 8 and nodes == 1:
            yield {"trainer.n_gpus_per_node": count}
        elif count % 8 == 0:
            yield {"trainer.n_gpus_per_node": 8, "trainer.nnodes": count // 8}


def change(config: Config, settings: Settings) -> Config:
    """The configuration with other values at these keys, which must be valid ones."""
    for key, value in settings.items():
        config = _put(config, key.split("."), value)
    return config


def _put(section: Any, names: list[str], value: Any) -> Any:
    name, *below = names
    inner = _put(getattr(section, name), below, value) if below else value
    return section.model_copy(update={name: inner})


def _lines(place: Place) -> Iterator[str]:
    """Say what a device needs, and what of it for which role."""
    need = f"{place.name} needs about {format_size(place.needed)} ({place.phase})"
    if place.there is None:
        yield f"{need}; how much it has is not known here"
    elif place.fits:
        yield f"{need} of {format_size(place.there)}: fits"
    elif not place.vllm_starts:
        least = _least_share(place.vllm_least, place.there)
        setting = f"rollout.gpu_memory_utilization to {least:.2g} or "
        yield (
            f"{place.name} gives vLLM {format_size(place.vllm_share)}, which needs "
            f"{format_size(place.vllm_least)} for its weights and the cache of one row: does not "
            f"fit; raise {setting if least <= LARGEST_SHARE else ''}"
            "rollout.tensor_model_parallel_size (--rollout_tp)"
        )
    else:
        free = format_size(place.left_free)
        yield f"{need} of {format_size(place.there)}, of which {free} is left free: does not fit"
    for role, share in place.roles.items():
        parts = [
            f"{field.replace('_', ' ').replace('kv', 'KV')} {format_size(size)}"
            for field, size in vars(share).items()
            if size
        ]
        if parts:
            yield f"{role}: {', '.join(parts)}"


def _settled(asked: Config, found: Estimate, there: int | None) -> Iterator[str]:
    """Say what was counted and what follows from it for what was unset."""
    if asked.model.enable_gradient_checkpointing is None:
        if there is None:
            yield "gradient checkpointing is on: what a step needs of memory is not known here"
        else:
            recompute = found.config.model.enable_gradient_checkpointing
            then = "computed again (gradient" if recompute else "kept (no gradient"
            yield (
                f"a step with all activations needs about {format_size(found.ample)} of "
                f"{format_size(there)}: they are {then} checkpointing)"
            )
    if data_ranks(asked) == 1 or asked.actor.fsdp_config.reshard_after_forward is not None:
        return
    if not _may_keep_gathered(asked):
        yield (
            "ranks gather weights and reduce gradients with each micro-batch: "
            f"`{ppo('doctor --self-test')}` has not proven here that once a step is right"
        )
    else:
        yield (
            "ranks gather weights and reduce gradients once a step: memory is ample"
            if found.config.actor.fsdp_config.stays_whole
            else "ranks gather weights and reduce gradients with each micro-batch"
        )


def _words(changes: Settings) -> str:
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in changes.items()
    )


def format_size(count: int) -> str:
    """Bytes in GiB, or MiB where they are few, to three digits."""
    return f"{count / GIB:.3g} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.3g} MiB"
