"""One of two ranks: what it publishes to vLLM of models in pieces, and a checkpoint of each.

`python published_ranks.py RANK SIZE FOLDER` writes FOLDER/KIND/published-RANK-ADAPTER.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import ALONE, Ranks, join_ranks
from ppo_cli.engine.sharding.tensors import gather_tensor
from tests.engine.packed_steps import settings

KINDS = ("mixtral", "qwen3_5")


def make_learner(path: str, ranks: Ranks = ALONE, name: str = "vllm", **model: Any) -> Learner:
    """A learner of a run whose sampler is vLLM, without reference or critic."""
    config = settings(
        model={"path": path, "lora_merge": "lora_rank" in model, **model},
        algorithm={"adv_estimator": "grpo"}, actor={"use_kl_loss": False},
        rollout={"n": 2, "name": name}, trainer={"engine": "ray"},
    )  # fmt: skip
    return Learner(config, load_tokenizer(path), ranks, total_steps=1)


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks = join_ranks(
        rank, size, init_method=f"file://{folder}/meet", device=torch.device("cpu"), timeout_s=60.0
    )
    for kind in KINDS:
        for adapter in ({}, {"lora_rank": 2}):
            learner = make_learner(str(folder / kind), ranks, **adapter)
            tensors = {
                name: tensor.clone(memory_format=torch.contiguous_format)
                for name, tensor in learner.published(gather_tensor)
            }
            save_file(tensors, folder / kind / f"published-{rank}-{len(adapter)}.safetensors")
            if not adapter:
                learner.begin_save(folder / kind / "checkpoint").result(60)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
