"""The simulated device as a platform of verl's, and stand-ins for the GPU kernels that verl calls.

verl imports it by VERL_USE_EXTERNAL_MODULES (memory_against_verl.py).
"""

from __future__ import annotations

from typing import Any

import torch
from cpu_platform import register_platform
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
)

from ppo_cli.extras.lab.simulation.device import DEVICE, NAME

register_platform(
    NAME, getattr(torch, NAME), current_device=0, get_device_capability=(9, 0),
    communication_backend_name=NAME,
)  # fmt: skip


class FlashAttention(torch.autograd.Function):
    """Keeps what the kernel keeps for its backward pass: inputs, output, a number for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Allocate what the kernel writes."""
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Allocate a gradient for each input."""
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class CrossEntropy(torch.autograd.Function):
    """Keeps the logits, and writes their gradient over them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        """Allocate a number for each token."""
        ctx.save_for_backward(logits)
        return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Give the logits, written over."""
        (logits,) = ctx.saved_tensors
        return logits  # type: ignore[no-any-return]


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    states = (t.transpose(1, 2) for t in (query, key, value))
    return FlashAttention.apply(*states), None  # type: ignore[no-untyped-call]


def put_in_kernels(simulator: Any) -> None:
    """Have verl build models without files and call the stand-ins."""
    import verl.utils.torch_functional as functional
    import verl.workers.engine.fsdp.transformer_impl as engines

    AttentionInterface.register("stand_in", attend)
    AttentionMaskInterface.register("stand_in", lambda *_, **__: None)
    functional.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE = True
    functional.cross_entropy_loss = lambda logits, *_, **__: (
        CrossEntropy.apply(logits),  # type: ignore[no-untyped-call]
        None,
    )

    def build(engine: Any) -> Any:
        config = engine.model_config.hf_config
        config.use_cache = False
        family = AutoModelForCausalLM
        if engine.model_config.model_type == "value_model":
            config.num_labels, family = 1, AutoModelForTokenClassification
        with torch.device("meta"):
            model = family.from_config(config, dtype=torch.float32, attn_implementation="stand_in")
        if engine.model_config.enable_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def forward_step(engine: Any, batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """verl's, without nested tensors, of which none are fake."""
        ids, positions = (
            batch[name].values()[None].to(DEVICE) for name in ("input_ids", "position_ids")
        )
        with torch.autocast(NAME, dtype=torch.bfloat16):
            logits = engine.module(
                input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False
            ).logits
            if engine.model_config.model_type == "language_model":
                logits = engines.logprobs_from_logits(
                    logits=logits[0], labels=ids[0].roll(-1), inplace_backward=True
                )
        return logits.float().sum(), {"metrics": {}}

    plan = engines.prepare_micro_batches
    engines.FSDPEngine._build_module = build
    engines.FSDPEngineWithLMHead.forward_step = forward_step
    engines.fsdp2_load_full_state_dict = lambda model, *_: model.to_empty(device=DEVICE)
    engines.prepare_micro_batches = lambda data, **_: plan(
        data=data, dp_group=None, same_micro_num_in_dp=False
    )
    engines.postprocess_batch_func = lambda **_: {"metrics": {}}
    engines.log_gpu_memory_usage = lambda *_, **__: None
