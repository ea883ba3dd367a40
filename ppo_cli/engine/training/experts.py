"""Mixtures of experts: metrics of how tokens are spread over experts, and router losses.

The load-balancing loss (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6) is transformers',
over all layers together: E sum_e f_e P_e, with f_e assignments to an expert per token and P_e its
mean probability. f is constant in the gradient. It is counted over the whole mini-batch first, so
the loss is a sum over tokens and does not depend on micro-batches, padding and ranks.
The z-loss is mean(logsumexp²) (Zoph et al. 2022, arXiv 2202.08906).
Legend: N tokens of a micro-batch, E experts, K experts of a token, R layers with a router.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from ppo_cli.engine.base import Sums
from ppo_cli.engine.batches.rows import MicroBatch

AUX, Z = "actor/router_aux_loss", "actor/router_z_loss"


class _AddLoss(torch.autograd.Function):
    """Passes states through; their backward pass also starts that of a loss.

    A router's loss is added inside its layer, where sharded weights are available.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, loss: Tensor) -> Tensor:
        """Return the states."""
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the states, and 1 for the loss."""
        return grad, torch.ones((), device=grad.device)


class ExpertMonitor:
    """Observes routers and experts of a policy during optimizer steps, through hooks.

    `balances` is True if the model's config asks for router losses. A first pass over the
    mini-batch then counts assignments, before losses are added (`recording`).
    """

    def __init__(self, model: Any, backbone: nn.Module) -> None:
        config = model.config.get_text_config()
        # Coefficients that the model's config or class sets; router logits must be on.
        names = ("router_aux_loss_coef", "aux_loss_coef")
        coef = next((getattr(model, name) for name in names if hasattr(model, name)), None)
        coefs = {AUX: coef, Z: getattr(config, "router_z_loss_coef", None)}
        has_losses = coef is not None and getattr(config, "output_router_logits", False)
        self._coefs = {name: float(c) for name, c in coefs.items() if has_losses and c}
        self._top_k = int(getattr(model, "num_experts_per_tok", 0))
        self.balances = bool(self._coefs)
        self.present = False
        # Counts for the metrics, counts for the losses, and the state of the current micro-batch.
        self._counts: dict[str, Tensor] = {}  # of each layer, by expert
        self._assigned: dict[str, Tensor] = {}  # the same, as the loss counts them
        self._per_token_E: Tensor | None = None  # f, of the mini-batch under way
        self._tokens = 0.0  # of the mini-batch, in all layers
        self._weight_N: Tensor | None = None  # how often each token of the micro-batch counts
        self._recording = self._counting = False
        self._losses: dict[str, Tensor] = {}  # of the micro-batch, before their coefficients
        self._loss_scale = 1.0
        for name, module in backbone.named_modules():
            if name.rpartition(".")[2] == "experts":
                module.register_forward_pre_hook(partial(self._count_tokens, name))
                self.present = True
        for name, router, index in _routers(backbone) if self.balances else ():
            router.register_forward_hook(partial(self._observe_router, name, index))

    def reset(self, loss_scale: float = 1.0) -> None:
        """Start a mini-batch, whose losses are multiplied by `loss_scale` in the backward pass."""
        self._counts, self._losses, self._loss_scale = {}, {}, loss_scale

    @contextmanager
    def recording(self, micro_batch: MicroBatch, *, counts: bool = False) -> Iterator[None]:
        """Context that counts the tokens of a micro-batch and adds router losses.

        With `counts`, for a pass without gradients, it counts the assignments for later losses.
        """
        self._weight_N = micro_batch.count_BL.flatten()
        self._counting, self._recording = counts, not counts
        try:
            yield
        finally:
            self._counting = self._recording = False

    def reset_assignments(self) -> None:
        """Start the first pass over a mini-batch."""
        self._assigned, self._per_token_E, self._tokens = {}, None, 0.0

    def assignments(self) -> Tensor | None:
        """Return (R, 1 + E) of this rank: tokens of each router, and assignments to each expert."""
        return torch.stack([*self._assigned.values()]).cpu() if self._assigned else None

    def set_assignments(self, assignments: Sequence[Tensor | None]) -> None:
        """Set the assignments of the mini-batch to the sum over all ranks."""
        total_RE = sum(part for part in assignments if part is not None)
        assert isinstance(total_RE, Tensor)
        self._tokens = float(total_RE[:, 0].sum())
        self._per_token_E = total_RE[:, 1:].sum(0) / self._tokens

    def pop_losses(self) -> list[tuple[str, Tensor, float]]:
        """Return and clear the last micro-batch's losses: (metric, value, coefficient)."""
        losses, self._losses = self._losses, {}
        return [(name, value, self._coefs[name]) for name, value in losses.items()]

    def loads(self) -> Tensor | None:
        """Return (R, E) of this rank: tokens of each expert of each layer; None without experts."""
        return torch.stack([*self._counts.values()]).cpu() if self._counts else None

    def _count_tokens(self, name: str, module: Any, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook: count the tokens of each expert of layer `name` for the metrics."""
        # A LoRA reference shares these layers; it runs without gradients and is not counted.
        if not self._recording or not torch.is_grad_enabled():
            return
        if len(inputs) < 2 or inputs[1].is_floating_point():  # every expert sees all tokens
            return
        index_NK = inputs[1]
        # A shared prompt token counts once for each row.
        weight_N1 = self._weights(index_NK)[:, None].expand_as(index_NK)
        counts_E = self._counts.setdefault(
            name, torch.zeros(module.num_experts, dtype=torch.float64, device=index_NK.device)
        )
        counts_E.index_add_(0, index_NK.flatten(), weight_N1.flatten().double())

    def _observe_router(self, name: str, index: int, module: Any, inputs: Any, output: Any) -> Any:
        """Forward hook: count assignments in the first pass, attach router losses in the second.

        `index` is the place of the logits in a tuple `output`. Returns the output with the losses
        attached to its gradient, or None to leave it unchanged.
        """
        if self._weight_N is None:
            return None
        logits_NE = output[index] if isinstance(output, tuple) else output
        logits_NE = logits_NE.reshape(-1, logits_NE.shape[-1]).float()
        # First pass: count the tokens and the assignments to each expert.
        if self._counting:
            weight_N = self._weights(logits_NE).double()
            index_NK = logits_NE.softmax(-1).topk(self._top_k, dim=-1).indices
            counts_1E = torch.zeros(1 + logits_NE.shape[-1], dtype=torch.float64).to(weight_N)
            counts_1E.index_add_(0, 1 + index_NK.flatten(), weight_N.repeat_interleave(self._top_k))
            counts_1E[0] = weight_N.sum()
            self._assigned[name] = self._assigned.get(name, 0.0) + counts_1E
        if not torch.is_grad_enabled() or self._per_token_E is None:
            return None
        # Second pass: compute the losses, and attach them to the layer's output.
        losses = self._compute_losses(logits_NE)
        if self._recording:
            for loss_name, value in losses.items():
                self._losses[loss_name] = self._losses.get(loss_name, 0.0) + value.detach()
        if not logits_NE.requires_grad:
            return None
        loss = torch.stack([self._coefs[n] * value for n, value in losses.items()]).sum()
        return _attach(loss * self._loss_scale, output, index)

    def _compute_losses(self, logits_NE: Tensor) -> dict[str, Tensor]:
        """Return this layer's and micro-batch's part of the mini-batch's losses."""
        assert self._per_token_E is not None
        weight_N = self._weights(logits_NE).float() / self._tokens
        losses: dict[str, Tensor] = {}
        if AUX in self._coefs:
            share_E = self._per_token_E.to(logits_NE) * logits_NE.shape[-1]
            losses[AUX] = (weight_N * (logits_NE.softmax(-1) @ share_E)).sum()
        if Z in self._coefs:
            losses[Z] = (weight_N * logits_NE.logsumexp(-1).square()).sum()
        return losses

    def _weights(self, states_NX: Tensor) -> Tensor:
        assert self._weight_N is not None
        return self._weight_N.to(states_NX.device)


def _attach(loss: Tensor, output: Any, index: int) -> Any:
    """Attach a loss to the part of a router's output that its layer uses."""
    if not isinstance(output, tuple):
        return _AddLoss.apply(output, loss)  # type: ignore[no-untyped-call]
    # The first other output with a gradient, else the logits themselves.
    places = [
        at for at, states in enumerate(output)
        if at != index and isinstance(states, Tensor) and states.requires_grad
    ]  # fmt: skip
    place = places[0] if places else index
    outputs = list(output)
    outputs[place] = _AddLoss.apply(output[place], loss)  # type: ignore[no-untyped-call]
    return tuple(outputs)


def _routers(backbone: Any) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the modules whose router logits transformers records, with the index in their output.

    `_can_record_outputs` is a private attribute of models in transformers 5.19.
    """
    recorders = (getattr(backbone, "_can_record_outputs", None) or {}).get("router_logits", [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        if not isinstance(recorder, OutputRecorder):
            recorder = OutputRecorder(recorder, index=1)
        for name, module in backbone.named_modules():
            if isinstance(module, recorder.target_class):
                yield name, module, recorder.index


def expert_metrics(loads: Sequence[Tensor | None]) -> Sums:
    """Return metrics of how evenly tokens are spread, from the loads of all ranks."""
    parts = [part for part in loads if part is not None]
    if not parts:
        return {}
    # Entropy 1 and maximum 1 mean that all experts get the same.
    total_RE = torch.stack(parts).sum(0)
    share_RE = total_RE / total_RE.sum(-1, keepdim=True)
    experts = share_RE.shape[-1]
    entropy_R = torch.special.entr(share_RE).sum(-1) / torch.tensor(float(experts)).log()
    return {
        "actor/expert_load_max": (experts * share_RE.max().item(), 1.0),
        "actor/expert_load_entropy": (entropy_R.mean().item(), 1.0),
    }
