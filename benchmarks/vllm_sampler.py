"""Compare our sampler on vLLM with vLLM's own `LLM.generate`, which is asked for the same.

Run: OMP_NUM_THREADS=1 python benchmarks/vllm_sampler.py [--size 10m] [--pairs 3]
One process and one model, in which the two take turns: `LLM.generate` on the very engine that the
sampler has, with its settings (one request for each response, a seed each, sampled log-probs).
The bare side does not turn tokens into text; `text` is the share of ours that this takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from judge_overlap import build_model

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.engine.samplers.vllm import VLLMSampler, set_environment
from ppo_cli.records import Prompt

ROWS, TOKENS, WIDTH = 64, 64, 32


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds on the clock, and of the processor."""
    began, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    """Print the ratio of each pair, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("embedded", "10m"), default="10m")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    set_environment()
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    with tempfile.TemporaryDirectory() as desk:
        tokenizer = load_tokenizer(model_folder("embedded"))
        path = model_folder("embedded")
        if args.size == "10m":
            path = str(Path(desk) / "model")
            build_model(Path(path))
        text_s = 0.0

        def detokenize(ids: Any, context: Any) -> str:
            nonlocal text_s
            began = time.perf_counter()
            text = decode_text(tokenizer, ids, context)
            text_s += time.perf_counter() - began
            return text

        sampler = VLLMSampler(
            path, eos_token_ids=frozenset(), detokenize=detokenize, max_model_len=WIDTH + TOKENS,
            max_num_seqs=ROWS, gpu_memory_utilization=0.5,
        )  # fmt: skip
        prompts = [
            Prompt(str(i), "", (), "", tuple((i + j) % 250 for j in range(WIDTH)))
            for i in range(ROWS)
        ]
        # Around the engine that is there already: two in one process would share its group.
        with patch.object(LLMEngine, "from_engine_args", lambda **_: sampler._engine):
            bare = LLM(path, skip_tokenizer_init=True)
        params = [
            SamplingParams(
                max_tokens=TOKENS, seed=i, ignore_eos=True, logprobs=0, flat_logprobs=True,
                detokenize=False,
            )
            for i in range(ROWS)
        ]  # fmt: skip
        asked: list[Any] = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
        pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for turn in range(args.pairs + 1):
            text_s, sampling = 0.0, Sampling(max_tokens=TOKENS, seed=turn)
            calls = (
                lambda sampling=sampling: list(sampler.generate(prompts, sampling, 0)),
                lambda: bare.generate(asked, params, use_tqdm=False),
            )
            pair = (seconds(calls[0]), seconds(calls[1]))
            if turn:  # the first one warms up
                pairs.append(pair)
                (wall, used), (their_wall, their_used) = pair
                print(
                    f"ours {wall:.3f} s ({used:.3f} s of processor), LLM.generate {their_wall:.3f} "
                    f"s ({their_used:.3f} s): speed {their_wall / wall:.3f} of it "
                    f"({their_used / used:.3f}), text {text_s / wall:.3f}"
                )
        for name, i in (("clock", 0), ("processor", 1)):
            ratio = statistics.median(b[i] / a[i] for a, b in pairs)
            print(f"{name}: {ratio:.3f} of the speed of LLM.generate (median)")
        sampler.close()


if __name__ == "__main__":
    main()
