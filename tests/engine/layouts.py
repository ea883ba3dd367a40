"""One batch in every layout: padded, packed, with shared prompts, over two ranks, with LoRA.

`python layouts.py RANK SIZE FOLDER` is one of two ranks: it trains the models of FOLDER spread over
both, and on the first rank alone, and writes how they differ to FOLDER/gaps-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ppo_cli.engine.ranks import ALONE, Ranks, join_ranks
from tests.engine.packed_steps import Seen, gaps, settings, take_steps

FAMILIES = (
    "qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text", "olmo2", "gpt2", "granite",
    "qwen3_moe", "opt", "cohere2", "phi3",
)  # fmt: skip
# A family of each kind of layer, and all of them with PPO_SWEEP=1.
OF_EACH_KIND = ("qwen2", "qwen3", "gemma3_text", "gpt2", "qwen3_moe", "phi3")
COMPARED = FAMILIES if os.environ.get("PPO_SWEEP") else OF_EACH_KIND
# Whose layers two ranks cannot split between them, as the families publish no plan for it.
UNSPLIT = ("gpt2", "opt", "qwen3_moe")
LORA: dict[str, Any] = {"lora_rank": 4}
# Prompt and response of each row: shared prompts, and rows beyond the windows.
ROWS = ((17, 2), (1, 4), (3, 9), (17, 12), (23, 1), (1, 1), (5, 5), (17, 1), (3, 9), (17, 5))


def train(path: str, ranks: Ranks = ALONE, **model: Any) -> Seen:
    """Two steps of policy and critic; the rows of a prompt of one length share it."""
    config = settings(60, model={"path": path, **model})
    return take_steps(config, ranks, ROWS, steps=2, one_prompt=True)


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    results: dict[str, Any] = {}
    for tensor_size in (1, size):
        ranks = join_ranks(
            rank, size, init_method=f"file://{folder}/meet-{tensor_size}",
            device=torch.device("cpu"), tensor_size=tensor_size, shard_size=size // tensor_size,
            timeout_s=60.0,
        )  # fmt: skip
        for kind in COMPARED:
            for adapter in ({}, LORA):
                if tensor_size > 1 and (kind in UNSPLIT or not adapter):
                    continue
                path = str(folder / kind)
                spread = train(path, ranks, packing=None, **adapter)
                if rank == 0:
                    name = f"{kind}-{tensor_size}-{len(adapter)}"
                    results[name] = gaps(spread, train(path, **adapter))
        torch.distributed.destroy_process_group()
    (folder / f"gaps-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
