"""Take the weights out of a model, and give them back on every rank, a part at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppo_cli.engine.ranks import Ranks, gather_objects
from ppo_cli.errors import ModelError


@dataclass
class Taken:
    """The weights of a model whose tensors are now placeholders on the meta device.

    `names` knows what each placeholder stands for. `whole` has weights on the first rank only;
    a parameter that has been given back is forgotten.
    """

    names: dict[Tensor, str] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)

    def give(self, module: nn.Module, ranks: Ranks, device: torch.device) -> None:
        """Put the first rank's weights into a part of the model on every rank; all call."""
        given: dict[Tensor, Tensor] = {}
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is None or tensor not in self.names:
                        continue
                    if tensor not in given:
                        given[tensor] = self._send(tensor, ranks, device)
                    held[name] = given[tensor]  # type: ignore[assignment]

    def _send(self, placeholder: Tensor, ranks: Ranks, device: torch.device) -> Tensor:
        name, is_parameter = self.names[placeholder], isinstance(placeholder, nn.Parameter)
        whole = self.whole.pop(name, None) if is_parameter else self.whole.get(name)
        sent = torch.empty(placeholder.shape, dtype=placeholder.dtype, device=device)
        if whole is not None:
            sent.copy_(whole)
        dist.broadcast(sent, 0)
        if is_parameter:
            return nn.Parameter(sent, requires_grad=placeholder.requires_grad)
        return sent


def take_weights(model: nn.Module, ranks: Ranks, path: str) -> Taken:
    """Take all parameters and buffers out of a model; shared ones stay shared; all ranks call.

    Only the first rank keeps the weights. Raises ModelError, on all ranks, when the models of
    the ranks differ.
    """
    taken = Taken()
    seen: dict[Tensor, Tensor] = {}
    for prefix, part in model.named_modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if tensor not in seen:
                    seen[tensor] = _placeholder(tensor)
                    taken.names[seen[tensor]] = f"{prefix}.{name}"
                    if ranks.rank == 0:
                        taken.whole[f"{prefix}.{name}"] = tensor.detach()
                held[name] = seen[tensor]
    layout = [(name, tuple(t.shape), str(t.dtype)) for t, name in taken.names.items()]
    if any(other != layout for other in gather_objects(ranks, layout)):
        raise ModelError(
            f"{path} holds another model on some nodes than on the first: give all nodes the "
            "same folder."
        )
    return taken


def _placeholder(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
