"""A LoRA adapter as the folder that a sampler loads it from: PEFT's names, PEFT's two files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ppo_cli.errors import ModelError

# Ranks that vLLM's LoRA kernels are made for; a smaller adapter is padded.
PADDED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class LoRA:
    """What an adapter's tensors do not say of it."""

    rank: int
    alpha: float

    def padded_rank(self) -> int:
        """The least rank that vLLM can hold this adapter in."""
        fitting = [rank for rank in PADDED_RANKS if rank >= self.rank]
        if not fitting:
            raise ModelError(
                f"vLLM takes LoRA adapters up to rank {PADDED_RANKS[-1]}, not {self.rank}: lower "
                "--lora_rank, or publish merged weights with model.lora_merge=true."
            )
        return fitting[0]


def write_adapter(folder: Path, lora: LoRA, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and config into a new folder; the tensors' names tell the adapted modules."""
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    owners = {name.partition(".lora_")[0] for name in tensors}
    told = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({owner.rpartition(".")[2] for owner in owners}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(told))
