"""Scores computed straight from a checkpoint's tensors, in float64, one sample at a time.

Llama and Qwen3 are written out here from their papers; other bodies run in their own classes,
on one sample without padding, where these are right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.rewards.models.twins import Weights, read_weights

# (token ids, token types) -> outputs of the head; objectives come behind the score.
Straight = Callable[[Sequence[int], Sequence[int]], Tensor]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def doubles(folder: Path) -> Weights:
    return {name: tensor.double() for name, tensor in read_weights(folder).items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turn(x: Tensor) -> Tensor:
    """Rotary positions of (tokens, heads, size)."""
    tokens, _, size = x.shape
    speed = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * speed
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def llama_hidden(w: Mapping[str, Tensor], prefix: str, ids: Sequence[int]) -> Tensor:
    """Hidden states (tokens, size) of a Llama or Qwen3 with 4 query and 2 key heads of 8."""
    x = w[f"{prefix}embed_tokens.weight"][list(ids)]
    layers = {name.split("layers.")[1].split(".")[0] for name in w if f"{prefix}layers." in name}
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for layer in sorted(layers):
        at = f"{prefix}layers.{layer}."
        y = norm(x, w[f"{at}input_layernorm.weight"])
        q, k, v = (
            (y @ w[f"{at}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, 8)) for part in "qkv"
        )
        if f"{at}self_attn.q_norm.weight" in w:
            q = norm(q, w[f"{at}self_attn.q_norm.weight"])
            k = norm(k, w[f"{at}self_attn.k_norm.weight"])
        q, k = turn(q), turn(k)
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / 8**0.5
        chances = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", chances, v).flatten(1) @ (
            w[f"{at}self_attn.o_proj.weight"].T
        )
        y = norm(x, w[f"{at}post_attention_layernorm.weight"])
        gate = functional.silu(y @ w[f"{at}mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ w[f"{at}mlp.up_proj.weight"].T)) @ w[f"{at}mlp.down_proj.weight"].T
    return norm(x, w[f"{prefix}norm.weight"])


def last_linear(folder: Path, prefix: str, head: str) -> Straight:
    """A linear head at the last token of a Llama or Qwen3."""
    w = doubles(folder)

    def straight(ids: Sequence[int], types: Sequence[int]) -> Tensor:
        output = w[f"{head}.weight"] @ llama_hidden(w, prefix, ids)[-1]
        return output + w.get(f"{head}.bias", 0.0)

    return straight


def armorm(folder: Path, header: Sequence[int]) -> Straight:
    """ArmoRM's score and raw objectives; the gate reads the last header's first token."""
    w = doubles(folder)

    def straight(ids: Sequence[int], types: Sequence[int]) -> Tensor:
        hidden = llama_hidden(w, "model.", ids)
        rewards = w["regression_layer.weight"] @ hidden[-1]
        starts = [i for i in range(len(ids)) if list(ids[i : i + len(header)]) == list(header)]
        x = hidden[starts[-1]]
        for i in range(4):
            x = w[f"gating.layers.{i}.weight"] @ x + w[f"gating.layers.{i}.bias"]
            x = x.clamp(min=0) if i < 3 else x
        gate = (x / 10).softmax(-1) * w["gating.logit_scale"][0]
        score = (gate * (rewards @ w["reward_transform_matrix"])).sum()
        return torch.cat([score[None], rewards])

    return straight


def own_class(folder: Path, kind: Any, *, types: bool = False) -> Straight:
    """The architecture's own sequence classifier, filled by torch, on one unpadded sample."""
    model = kind(kind.config_class(**config_of(folder)))
    model.load_state_dict(read_weights(folder), strict=True)
    model.eval().double()

    def straight(ids: Sequence[int], type_ids: Sequence[int]) -> Tensor:
        inputs = {"input_ids": torch.tensor([ids])}
        if types:
            inputs["token_type_ids"] = torch.tensor([type_ids])
        with torch.no_grad():
            return model(**inputs).logits[0]

    return straight
