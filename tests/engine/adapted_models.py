"""Tiny random models of several families, with and without an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ppo_cli.config.schema.run import Model
from ppo_cli.engine.models.lora import (
    ADAPTER_WEIGHTS,
    adapt,
    adapter_tensors,
    write_adapter_config,
)
from tests.engine.tiny_families import make_model

ALL = "all-linear"
# Untied and tied heads, capped logits, layers that are no `nn.Linear`; without dropout.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.0},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 40, 41, 200]])


def base(kind: str = "llama", **changes: Any) -> Any:
    return make_model(kind, **FAMILIES.get(kind, {}) | changes)


def inject(model: Any, targets: Any = ALL, seed: int = 42, rank: int = 3) -> Any:
    """The same model, with an adapter of twice its rank as alpha."""
    settings = Model(lora_rank=rank, lora_alpha=2 * rank, target_modules=targets)
    put_in = adapt(settings, seed)
    assert put_in is not None
    return put_in(model)


def adapted(kind: str = "llama", targets: Any = ALL, **changes: Any) -> Any:
    return inject(base(kind, **changes), targets)


def trained(model: Any) -> Any:
    """The same model as if its adapter had been trained: B is zero no more."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model):
            if "lora_B" in name:
                tensor.normal_(std=0.3)
    return model


def save_adapter(model: Any, folder: Path, base_path: Path) -> None:
    """Write the adapter as a checkpoint has it, into a new folder."""
    folder.mkdir()
    save_file({n: gathered(t) for n, t in adapter_tensors(model)}, folder / ADAPTER_WEIGHTS)
    write_adapter_config(folder, model, str(base_path))


def gathered(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits
