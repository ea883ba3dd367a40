"""AdamW with its schedule, clipping, and the refusal to step on a broken gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ppo_cli.config.training import Optim
from ppo_cli.engine.ranks import ALONE, Ranks


def lr_factor(step: int, total_steps: int, optim: Optim) -> float:
    """Share of the peak learning rate in training step `step` (from 0).

    Linear warm-up that starts above zero, then constant or a half cosine down to
    `min_lr_ratio` at the last step.
    """
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = math.ceil(optim.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW over the float32 weights of one model."""

    def __init__(
        self,
        module: nn.Module,
        optim: Optim,
        *,
        total_steps: int,
        grad_clip: float,
        clip_grad_value: float | None,
        ranks: Ranks = ALONE,
        offload: bool = False,
    ) -> None:
        trained = [p for p in module.parameters() if p.requires_grad]
        # Norm weights and biases have one axis; decay would only pull them off their scale.
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._parameters = trained
        self._settings = optim
        self._total_steps = total_steps
        self._grad_clip = grad_clip
        self._clip_grad_value = clip_grad_value
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps,
            fused=True,
        )  # fmt: skip
        self.set_progress(0)

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return float(self._adamw.param_groups[0]["lr"])

    def set_progress(self, step: int) -> None:
        """Set the learning rate of training step `step`, counted from 0."""
        lr = self._settings.lr * lr_factor(step, self._total_steps, self._settings)
        for group in self._adamw.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def apply(self) -> tuple[float, bool]:
        """Clip and step; returns the gradient norm before clipping and whether it stepped.

        A norm that is not finite leaves weights and moments untouched.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # Measured before clipping by value, which would turn an infinity into a number.
        norm = float(torch.nn.utils.get_total_norm(gradients))
        stepped = math.isfinite(norm)
        if stepped:
            if self._clip_grad_value is not None:
                torch.nn.utils.clip_grad_value_(self._parameters, self._clip_grad_value)
            if self._grad_clip > 0:
                torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip)
            self._adamw.step()
        self.zero_grad()
        return norm, stepped

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts."""
        return dict(self._adamw.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back moments and step counts; settings stay as they are now."""
        kept = [{k: v for k, v in g.items() if k != "params"} for g in self._adamw.param_groups]
        self._adamw.load_state_dict(state)
        for group, settings in zip(self._adamw.param_groups, kept, strict=True):
            group.update(settings)
