"""Norms, gated units and whole blocks that keep less for their backward pass.

Autograd keeps each step of an RMS norm (Zhang and Sennrich 2019, arXiv 1910.07467) and of
`silu(gate) * up` (Shazeer 2020, arXiv 2002.05202). Here a norm keeps its input and one number a
token, and a unit its two inputs; results have the same bits, and are faster on the CPU. With
gradient checkpointing (Chen et al. 2016, arXiv 1604.06174) a block keeps its inputs alone.
Legend: X any axes, H hidden size.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class RootMeanSquare(torch.autograd.Function):
    """w x / sqrt(mean(x²) + eps) over the last axis, in float32; the result is cast to `dtype`."""

    @staticmethod
    def forward(
        ctx: Any, states_XH: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        """Return normalised states; keeps the input and one number per token."""
        scale_X1 = torch.rsqrt(states_XH.pow(2).mean(-1, keepdim=True) + eps)
        # The input and one number per token.
        ctx.save_for_backward(states_XH, weight_H, scale_X1)
        return (states_XH * scale_X1).mul_(weight_H).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_XH: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of states and weight.

        Uses the kernel of layer norm with a mean of zero. That kernel also subtracts
        scale * mean(w grad), the gradient of the mean, which is added back here.
        """
        states_XH, weight_H, scale_X1 = ctx.saved_tensors
        # An ATen kernel without a public Python name, tried with torch 2.13.
        grad_XH = grad_XH.float().contiguous()
        size = len(weight_H)
        found_XH, of_weight_H, _ = torch.ops.aten.native_layer_norm_backward(
            grad_XH, states_XH, [size], torch.zeros_like(scale_X1), scale_X1, weight_H, None,
            [True, ctx.needs_input_grad[1], False],
        )  # fmt: skip
        mean_X1 = torch.mv(grad_XH.flatten(0, -2), weight_H).view(scale_X1.shape)
        return found_XH.addcmul_(scale_X1, mean_X1, value=1 / size), of_weight_H, None, None


class GatedUnit(torch.autograd.Function):
    """silu(gate) * up; the backward pass computes silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate_X: Tensor, up_X: Tensor) -> Tensor:
        """Return silu(gate) * up; keeps both inputs."""
        ctx.save_for_backward(gate_X, up_X)
        return silu(gate_X).mul_(up_X)

    @staticmethod
    def backward(ctx: Any, grad_X: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up."""
        # `silu_backward` is ATen's, without a public Python name (torch 2.13).
        gate_X, up_X = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad_X * up_X, gate_X), silu(gate_X).mul_(grad_X)


def use_lean_layers(model: nn.Module) -> None:
    """Replace the forward passes of RMS norms and gated units by ones that keep less memory.

    Only modules whose results are identical are replaced; those with further inputs, such as a
    gated norm, stay as they are.
    """
    for module in model.modules():
        # Modules with a replaced forward pass, or with further inputs, stay as they are.
        if "forward" in module.__dict__ or len(signature(type(module).forward).parameters) != 2:
            continue
        # Each kind is recognised by its results, not by its class name.
        for lean_forward, is_same in ((_normalise, _is_norm), (_gate, _is_unit)):
            if is_same(module):
                module.forward = partial(lean_forward, module)


@torch.no_grad()
def round_norms(model: nn.Module, states: Callable[[], Tensor]) -> None:
    """Let norms round their outputs once, if only products use them (which would round copies).

    `states` computes the model's output under autocast. All norms of one name round if that
    output stays bit-identical.
    """
    named = defaultdict(list)
    for name, module in model.named_modules():
        if getattr(module.__dict__.get("forward"), "func", None) is _normalise:
            named[name.rpartition(".")[2]].append(module)
    if not named:
        return
    # Name by name: switch rounding on, and off again if the output changes.
    exact = states()
    for norms in named.values():
        for norm in norms:
            norm.forward = partial(_normalise, norm, rounds=True)
        if not torch.equal(states(), exact):
            for norm in norms:
                norm.forward = partial(_normalise, norm)


def _normalise(module: Any, states_XH: Tensor, *, rounds: bool = False) -> Tensor:
    """Return the normalised states; this replaces the `forward` of an RMSNorm module.

    With gradients it runs `RootMeanSquare`, which keeps less for the backward pass. With `rounds`
    the output has the autocast dtype, otherwise float32.
    """
    device = states_XH.device.type
    dtype = torch.float32
    if rounds and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    # Without gradients there is nothing to keep: the module's own pass runs.
    if torch.is_grad_enabled() and states_XH.dtype == module.weight.dtype == torch.float32:
        eps = module.variance_epsilon
        normalised: Tensor = RootMeanSquare.apply(states_XH, module.weight, eps, dtype)  # type: ignore[no-untyped-call]
        return normalised
    output: Tensor = type(module).forward(module, states_XH)
    return output if dtype == torch.float32 else output.to(dtype)


def _gate(module: Any, states: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        plain: Tensor = type(module).forward(module, states)
        return plain
    inner = GatedUnit.apply(module.gate_proj(states), module.up_proj(states))  # type: ignore[no-untyped-call]
    output: Tensor = module.down_proj(inner)
    return output


def _is_norm(module: nn.Module) -> bool:
    """Whether a module computes what `RootMeanSquare` does, tried on a probe weight."""
    if [*module._parameters] != ["weight"] or not hasattr(module, "variance_epsilon"):
        return False
    weight_H = nn.Parameter(torch.linspace(0.5, 1.5, 8))
    return _computes(_normalise, _stand_in(module, _parameters={"weight": weight_H}))


def _is_unit(module: nn.Module) -> bool:
    """Whether a module is a gated unit, tried with simple maps in place of its linear layers."""
    maps: dict[str, Any] = {
        "gate_proj": lambda states: 2000 * states - 1,
        "up_proj": lambda states: 3 - 1000 * states,
        "down_proj": lambda states: states - states.flip(-1) ** 2,
    }
    if not module._modules.keys() >= maps.keys():
        return False
    return _computes(_gate, _stand_in(module, _modules=module._modules | maps))


def _stand_in(module: nn.Module, **parts: Any) -> nn.Module:
    probe = copy.copy(module)
    probe.__dict__.update(parts)
    return probe


def _computes(lean_forward: Callable[..., Tensor], module: nn.Module) -> bool:
    """Whether both forward passes give equal results, on states so small that eps matters."""
    states = torch.linspace(-1e-3, 2e-3, 16).view(2, 8)
    try:
        with torch.enable_grad():
            return torch.equal(lean_forward(module, states), type(module).forward(module, states))
    except Exception:  # a model's own code may raise anything
        return False
