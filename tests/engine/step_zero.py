"""Annotates rows with fresh models in bfloat16, and says how far the actor is from its reference.

Run as `python step_zero.py RANK SIZE FOLDER [second]`; writes FOLDER/found-RANK.json. A lone rank
computes on the CPU, or on the second device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from ppo_cli.algo.batch import merge_annotations
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import ALONE, Ranks, gather_objects, join_ranks
from tests.engine.packed_steps import make_batch
from tests.settings import complete

ROWS = [(5, 9), (3, 12), (8, 4), (6, 1)]
# Family, whether its head is tied, how it is stored, and settings of the model.
CASES: dict[str, tuple[str, bool, torch.dtype, dict[str, Any]]] = {
    "tied": ("qwen2", True, torch.bfloat16, {}),
    "tied, not spread": ("qwen2", True, torch.bfloat16, {"spread_weights": False}),
    "scaled": ("gemma2", True, torch.bfloat16, {}),
    "positions": ("gpt2", True, torch.bfloat16, {}),
    "positions from a mask": ("opt", True, torch.bfloat16, {}),
    "adapter": ("qwen2", True, torch.bfloat16, {"lora_rank": 4}),
    "float32 head": ("qwen2", False, torch.bfloat16, {"float32_head": True}),
    "experts": ("qwen3_moe", False, torch.bfloat16, {}),
    "adapted experts": ("qwen3_moe", False, torch.bfloat16, {
        "lora_rank": 4, "target_modules": ["q_proj", "experts.gate_up_proj", "experts.down_proj"],
    }),
    "tied, in float32": ("qwen2", True, torch.float32, {}),
}  # fmt: skip


def settings(path: str, changes: dict[str, Any]) -> Config:
    model = {
        "path": path, "dtype": "bfloat16", "packing": False, "attn_implementation": "eager",
        "spread_weights": True,
    }  # fmt: skip
    return complete(
        {
            "model": model | changes,
            "data": {"max_prompt_length": 32, "max_response_length": 16},
            "algorithm": {"use_kl_in_reward": True, "kl_penalty": "full"},
            "trainer": {"engine": "local"},
        }
    )


def annotate(config: Config, ranks: Ranks) -> dict[str, Any]:
    learner = Learner(config, load_tokenizer(model_folder("embedded")), ranks, total_steps=1)
    batch = make_batch(ROWS, seed=0)
    annotated = merge_annotations(batch, gather_objects(ranks, learner.annotate(batch)))
    mask = batch.response_mask_BT
    assert annotated.ref_logprobs_BT is not None and annotated.full_kl_BT is not None
    reference = learner._reference
    assert reference is not None
    frozen = {n: p for n, p in reference.model.named_parameters() if not p.requires_grad}
    return {
        "gap": (annotated.old_logprobs_BT - annotated.ref_logprobs_BT)[mask].abs().max().item(),
        "kl": annotated.full_kl_BT[mask].abs().max().item(),
        "float32": [name for name, p in frozen.items() if p.dtype == torch.float32],
        "logprobs": annotated.old_logprobs_BT[mask].tolist(),
    }


def main(rank: int, size: int, folder: Path, device: str = "cpu") -> None:
    if device == "second":
        from tests.engine.second_device import install

        second = install()
        counts = torch.histc  # of integers, which CUDA alone has
        torch.histc = lambda ids, **bins: counts(ids.float(), **bins)
        Compute.choose = classmethod(  # type: ignore[method-assign,assignment]
            lambda cls, dtype: cls(second, getattr(torch, dtype))
        )
    ranks = ALONE
    if size > 1:
        ranks = join_ranks(
            rank, size, init_method=f"file://{folder}/meet", device=torch.device("cpu"),
            timeout_s=60,
        )  # fmt: skip
    report = {
        case: annotate(settings(str(folder / case / kind), changes), ranks)
        for case, (kind, _, _, changes) in CASES.items()
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
