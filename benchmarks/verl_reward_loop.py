"""verl 0.9.1's reward loop on a judge's endpoint; run by judge_traffic.py in verl's own Python.

The reward function is what its guide shows: an async function that posts to the judge and reads
the score. `naive` has no limit, `rate_limited` its default of one call a worker, and
`rate_limited_tuned` the concurrency that the benchmark's server takes, over all workers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

WORKERS = 8
TOKENS = 8
_WORDS = ("what", "is", "the", "answer", "to", "this", "question")


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], url: str
) -> dict[str, float]:
    """Ask the judge once, as the client libraries are used in guides."""
    import aiohttp

    body = {"model": "m", "messages": [{"role": "user", "content": f"Judge: {ground_truth}."}]}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
        session.post(f"{url}/chat/completions", json=body) as reply,
    ):
        reply.raise_for_status()
        text = (await reply.json())["choices"][0]["message"]["content"]
    return {"score": float(json.loads(text)["score"])}


def save_tokenizer(folder: Path) -> None:
    """Make a tokenizer of seven words: the loop decodes responses, and no more."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate((*_WORDS, "<eos>", "<unk>"))}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<eos>",
                                   unk_token="<unk>")  # fmt: skip
    fast.save_pretrained(folder)


def make_config(url: str, way: str, concurrency: int, tokenizer: Path) -> Any:
    from omegaconf import OmegaConf

    reward: dict[str, Any] = {
        "num_workers": WORKERS,
        "custom_reward_function": {
            "path": str(Path(__file__).resolve()), "name": "compute_score",
            "reward_kwargs": {"url": url},
        },
        "reward_manager": {"source": "register", "name": way.removesuffix("_tuned")},
        "reward_model": {"enable": False},
    }  # fmt: skip
    if way.endswith("_tuned"):
        reward["max_concurrent"] = max(1, concurrency // WORKERS)
    model = {"path": str(tokenizer), "tokenizer_path": str(tokenizer)}
    return OmegaConf.create({"reward": reward, "actor_rollout_ref": {"model": model}, "data": {}})


def make_data(count: int) -> Any:
    import numpy as np
    import torch
    from verl.protocol import DataProto

    ones = torch.ones(count, 2 * TOKENS, dtype=torch.long)
    tensors = {
        "prompts": ones[:, :TOKENS], "responses": ones[:, :TOKENS], "attention_mask": ones,
        "input_ids": ones,
    }  # fmt: skip
    told = [{"ground_truth": f"number {i}", "style": "model"} for i in range(count)]
    others = {
        "data_source": np.array(["benchmark"] * count, dtype=object),
        "reward_model": np.array(told, dtype=object),
        "extra_info": np.array([{"index": i} for i in range(count)], dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--way", required=True)
    options = parser.parse_args()
    import ray
    from verl.experimental.reward_loop.reward_loop import RewardLoopManager

    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        config = make_config(options.url, options.way, options.concurrency, Path(folder))
        loop = RewardLoopManager(config)
        # Workers that are still starting would be timed otherwise.
        ray.get([worker.__ray_ready__.remote() for worker in loop.reward_loop_workers])
        data, error, scored = make_data(options.calls), "", 0
        began = time.perf_counter()
        try:
            scores = loop.compute_rm_score(data).batch["rm_scores"].sum(-1)
            scored = int((scores > 0).sum())
        except Exception as problem:
            error = f"{type(problem).__name__}: {str(problem).strip().splitlines()[-1][:120]}"
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "scored": scored, "error": error}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
