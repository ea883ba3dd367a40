"""Linear layers cast once, where autocast would cast their weights again in every pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_cli.config.processor import has_amx


@dataclass(frozen=True)
class CastLayer:
    """A linear layer, its weights, and these cast as autocast casts them in every pass.

    With AMX, oneDNN packs a weight again for each product of few rows; here it is packed once.
    """

    module: nn.Module
    own: Mapping[str, nn.Parameter]
    cast: Mapping[str, Any]
    packed: Callable[[Tensor], Tensor] | None = None

    def put_in(self) -> None:
        """Let the module compute with the cast weights."""
        if self.packed is not None:
            self.module.__dict__["forward"] = self.packed
        else:
            self.module._parameters.update(self.cast)

    def take_out(self) -> None:
        """Let it compute with its own again."""
        self.module.__dict__.pop("forward", None)
        self.module._parameters.update(self.own)


def cast_layers(model: nn.Module, dtype: torch.dtype) -> list[CastLayer]:
    """The linear layers of a model, cast once for all tokens of a rollout.

    A tied output head is cast; the embedding, which is not a product, stays as it is.
    """
    found = []
    packs = has_amx() and dtype == torch.bfloat16
    for module in model.modules():
        if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
            continue  # one that somebody has given another forward pass computes as that says
        own = {name: held for name, held in module._parameters.items() if held is not None}
        cast = {name: held.detach().to(dtype) for name, held in own.items()}
        packed = None
        if packs and type(module) is nn.Linear and module.weight.device.type == "cpu":
            packed = _packed(cast.pop("weight"), cast.get("bias"))
        found.append(CastLayer(module, own, cast, packed))
    return found


def _packed(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The linear map by a weight that lies as oneDNN's matrix units read it.

    The operators are those of torch's own compiler for frozen weights.
    """
    ready, dtype = torch.ops.mkldnn._reorder_linear_weight(weight), weight.dtype
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(states: Tensor) -> Tensor:
        product: Tensor = multiply(states.to(dtype), ready, bias, "none", [], "")
        return product

    return forward
