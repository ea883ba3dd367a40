"""The oracle: what transformers computes for each row alone, and PPO's losses on that.

Eager attention and eager experts, no cache, no padding, float32, evaluation mode. Nothing here
comes from ppo_cli; formulas are those of arXiv 1707.06347 (clipped surrogate) and of the clipped
value loss of the baselines code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CLIP, CLIP_VALUE = 0.2, 0.5
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Right-padded prompts and responses."""

    input_ids_BL: Tensor
    prompt_len_B: Tensor
    mask_BT: Tensor  # of response tokens

    def row(self, b: int) -> tuple[Tensor, slice, Tensor]:
        """The tokens of a row, the positions that predict its response, and its own mask."""
        prompt, count = int(self.prompt_len_B[b]), int(self.mask_BT[b].sum())
        ids_1L = self.input_ids_BL[b : b + 1, : prompt + count]
        return ids_1L, slice(prompt - 1, prompt + count - 1), self.mask_BT[b]


@dataclass(frozen=True)
class Update:
    """One optimizer step: its rows, what their loss was made of, and the weights before it.

    `target_BT` are advantages and `old_BT` log-probs for the actor; returns and values for the
    critic, whose weights are those of its backbone, and of its `head`.
    """

    rows: Rows
    old_BT: Tensor
    target_BT: Tensor
    state: Gradients
    gradients: Gradients
    head: Gradients


def load(folder: Path) -> Any:
    """Load a causal LM as its authors compute it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def response_logprobs(model: Any, rows: Rows) -> Tensor:
    """Log-probs of all response tokens, 0 elsewhere; each row is computed alone."""
    logprobs = []
    for b in range(len(rows.input_ids_BL)):
        ids_1L, places, mask_T = rows.row(b)
        logits_TV = model(input_ids=ids_1L, use_cache=False).logits[0, places].float()
        chosen_T = logits_TV.log_softmax(-1).gather(-1, ids_1L[0, 1:][places][:, None])[:, 0]
        logprobs.append(torch.zeros(mask_T.shape).masked_scatter(mask_T, chosen_T))
    return torch.stack(logprobs)


def response_values(backbone: nn.Module, head: Mapping[str, Tensor], rows: Rows) -> Tensor:
    """Values before all response tokens, 0 elsewhere; each row is computed alone."""
    values = []
    for b in range(len(rows.input_ids_BL)):
        ids_1L, places, mask_T = rows.row(b)
        hidden_TH = backbone(input_ids=ids_1L, use_cache=False).last_hidden_state[0, places]
        value_T1 = nn.functional.linear(hidden_TH.float(), head["weight"], head.get("bias"))
        values.append(torch.zeros(mask_T.shape).masked_scatter(mask_T, value_T1[:, 0]))
    return torch.stack(values)


def actor_gradients(model: Any, update: Update) -> Gradients:
    """The gradients of the clipped surrogate, averaged over tokens."""
    ratio_BT = (response_logprobs(model, update.rows) - update.old_BT).exp()
    clipped_BT = update.target_BT * ratio_BT.clamp(1 - CLIP, 1 + CLIP)
    gain_BT = torch.minimum(update.target_BT * ratio_BT, clipped_BT)
    loss = -gain_BT[update.rows.mask_BT].mean()
    return _gradients(loss, dict(model.named_parameters()))


def critic_gradients(backbone: nn.Module, update: Update) -> tuple[Tensor, Gradients]:
    """Values, and the gradients of the clipped value loss, averaged over tokens."""
    head = {name: tensor.clone().requires_grad_() for name, tensor in update.head.items()}
    values_BT = response_values(backbone, head, update.rows)
    near_BT = update.old_BT + (values_BT - update.old_BT).clamp(-CLIP_VALUE, CLIP_VALUE)
    errors = [(values - update.target_BT).square() for values in (values_BT, near_BT)]
    loss = 0.5 * torch.maximum(*errors)[update.rows.mask_BT].mean()
    named = dict(backbone.named_parameters()) | {f"head.{n}": t for n, t in head.items()}
    return values_BT.detach(), _gradients(loss, named)


def gradient_gap(ours: Gradients, oracle: Gradients) -> tuple[float, str]:
    """The largest difference of two gradients and its tensor, relative to the tensor's largest.

    A tensor whose gradient is far smaller than the model's largest counts as a hundredth of that:
    what remains of it after cancellation is rounding.
    """
    largest = max(float(g.abs().max()) for g in oracle.values())
    gaps = {}
    for name in ours.keys() | oracle.keys():
        theirs = oracle.get(name, torch.zeros(()))
        scale = max(float(theirs.abs().max()), largest / 100)
        difference = ours.get(name, torch.zeros(())) - theirs
        gaps[name] = float(difference.abs().max()) / scale if scale else 0.0
    worst = max(gaps, key=lambda name: gaps[name])
    return gaps[worst], worst


def _gradients(loss: Tensor, named: Mapping[str, Tensor]) -> Gradients:
    trained = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(trained.items(), gradients, strict=True)
    }
