"""Compare our sampler with transformers' `generate` on a model of a million parameters.

Run: OMP_NUM_THREADS=1 python benchmarks/sampler.py
Both draw at temperature 1 to the full length; the best of several turns, taken alternately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

from ppo_cli.engine.base import Sampling
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.records import Prompt

VOCAB = 512
NO_TOKEN = VOCAB + 1  # neither side ever stops early
CASES = ((256, 16, False), (64, 64, False), (256, 16, True), (64, 64, True))
TURNS = 7


def build_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def make_prompts(count: int, mixed: bool) -> list[Prompt]:
    lengths = [8 + (7 * i) % 17 if mixed else 14 for i in range(count)]
    return [
        Prompt(f"{i}", "", (), "", token_ids=tuple((i + j) % (VOCAB - 4) for j in range(length)))
        for i, length in enumerate(lengths)
    ]


def decode(ids: Sequence[int], context: Sequence[int]) -> str:
    return ""


def run_ours(model: Qwen2ForCausalLM, prompts: list[Prompt], tokens: int) -> None:
    sampler = HFSampler(
        model, eos_token_ids=frozenset({NO_TOKEN}), pad_token_id=0, max_num_seqs=256,
        detokenize=decode,
    )  # fmt: skip
    rollouts = list(sampler.generate(prompts, Sampling(max_tokens=tokens), 0))
    assert sum(len(rollout.token_ids) for rollout in rollouts) == len(prompts) * tokens


@torch.no_grad()
def run_theirs(model: Qwen2ForCausalLM, prompts: list[Prompt], tokens: int) -> None:
    width = max(len(prompt.token_ids) for prompt in prompts)
    rows = [[0] * (width - len(p.token_ids)) + list(p.token_ids) for p in prompts]
    seen = [[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts]
    out = model.generate(
        torch.tensor(rows), attention_mask=torch.tensor(seen), do_sample=True, top_k=0,
        max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert out.shape == (len(prompts), width + tokens)


def measure(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    model = build_model()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, best of {TURNS}")
    for count, tokens, mixed in CASES:
        prompts = make_prompts(count, mixed)
        ours, theirs = [], []
        for _ in range(TURNS):
            ours.append(measure(partial(run_ours, model, prompts, tokens)))
            theirs.append(measure(partial(run_theirs, model, prompts, tokens)))
        total = count * tokens
        print(
            f"{count:4d} x {tokens:2d} {'mixed' if mixed else 'equal'} lengths: "
            f"ours {total / min(ours):7.0f} tokens/s, generate {total / min(theirs):7.0f}, "
            f"ratio {min(theirs) / min(ours):.2f}"
        )


if __name__ == "__main__":
    main()
