"""Tokens a second and MFU of `annotate` and `step` on one device, rows padded and packed.

    python benchmarks/engine_speed.py             # a random Qwen2.5-0.5B shape; bf16 on a GPU
    python benchmarks/engine_speed.py --small     # a tiny shape, to try it on the CPU

One learner with actor, reference and critic, rows of many lengths, medians after a warm-up.
Tokens are those of prompts and responses; padding counts for nothing. MFU and its FLOPs:
`ppo_cli/planning/work.py`.
What the device could do is the number of its data sheet where `GPU_SPEEDS` has it, else that of a
large matrix product, measured here. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch, merge_annotations
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.shape import Shape
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.engine.base import MiniBatch
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.planning.work import ForwardFlops, find_speed

QWEN_0_5B = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """FLOPs that a batch takes in the two verbs."""

    annotate: float
    step: float


def main() -> None:
    """Measure both layouts and print a line for each verb."""
    options = read_options()
    shape = SMALL if options.small else QWEN_0_5B
    machine = Machine.here()
    half = machine.gpus and machine.has_bfloat16(1)
    device = Compute.choose(options.dtype or ("bfloat16" if half else "float32"))
    peak, source = find_peak(device, options.peak_tflops)
    batch = make_batch(options, shape["vocab_size"])
    work = count_flops(shape, batch)
    real = int((batch.prompt_len_B + batch.response_len_B).sum())
    longest = batch.input_ids_BL.shape[1]
    print(
        f"{len(batch)} rows of {real / len(batch):.0f} tokens, at most {longest}; "
        f"{device.dtype} on {device_name(device)}, peak {peak:.4g} TFLOP/s ({source})"
    )
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), shape)
        for packing in (False, True):
            label = "packed" if packing else "padded"
            seconds, memory = measure(settings(options, name, packing), batch, options.turns)
            for verb, flops in (("annotate", work.annotate), ("step", work.step)):
                median = statistics.median(seconds[verb])
                print(
                    f"{label} {verb:8} {real / median:10.0f} tokens/s"
                    f"  MFU {flops / median / peak / 1e12:6.1%}  {median:8.3f} s"
                    f"  ({min(seconds[verb]):.3f}-{max(seconds[verb]):.3f})  {memory}"
                )


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a tiny shape and short rows")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16384, help="budget of a micro-batch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--keep", action="store_true", help="keep activations, recompute nothing")
    parser.add_argument(
        "--peak_tflops", type=float, help="of the device, in the place of the number here"
    )
    return parser.parse_args()


def settings(options: argparse.Namespace, folder: str, packing: bool) -> Config:
    """A run with all three models in one layout."""
    budget = {"ppo_max_token_len_per_gpu": options.tokens}
    precision = {"dtype": options.dtype} if options.dtype else {}
    return fit_memory(settle(Config.model_validate({
        "model": {
            **precision, "path": folder, "packing": packing,
            "attn_implementation": options.attention,
            "enable_gradient_checkpointing": not options.keep,
        },
        "actor": {**budget, "use_kl_loss": True},
        "critic": budget,
        "ref": {"log_prob_max_token_len_per_gpu": options.tokens},
        "data": {"max_prompt_length": 512, "max_response_length": 1024},
    }), Machine.here())).config  # fmt: skip


def measure(config: Config, batch: Batch, turns: int) -> tuple[dict[str, list[float]], str]:
    """Seconds of each verb in each turn, and the most memory that was in use."""
    torch.manual_seed(0)
    learner = Learner(config, load_tokenizer(str(model_folder("embedded"))), total_steps=turns + 1)
    if torch.cuda.is_available():
        gc.collect()  # of what was measured before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds: dict[str, list[float]] = {"annotate": [], "step": []}
    for turn in range(turns + 1):
        found, annotating = timed(lambda: learner.annotate(batch))
        scored = with_scores(merge_annotations(batch, [found]))
        minibatch = MiniBatch(scored, actor=True, critic=True)
        _, stepping = timed(lambda m=minibatch: learner.step(m))  # type: ignore[misc]
        learner.publish()
        if turn:  # the first one warms up
            seconds["annotate"].append(annotating)
            seconds["step"].append(stepping)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0
    return seconds, f"peak {peak:.1f} GiB" if peak else ""


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Do it, and wait until the device has."""
    wait_for_device()
    start = time.perf_counter()
    found = work()
    wait_for_device()
    return found, time.perf_counter() - start


def wait_for_device() -> None:
    """A GPU works on while Python goes on."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_flops(fields: dict[str, Any], batch: Batch) -> Work:
    """FLOPs of the batch: see `ppo_cli/planning/work.py`."""
    shape = Shape.from_config(fields)
    assert shape is not None
    lengths = (batch.prompt_len_B + batch.response_len_B).double()
    pairs = float((lengths * (lengths + 1) / 2).sum())
    responses = float(batch.response_len_B.sum())
    forward = ForwardFlops.count(shape, float(lengths.sum()), pairs, responses)
    # annotate: actor, reference and critic; a step: actor and critic, forward and backward.
    return Work(annotate=forward.annotate(2, 1), step=forward.update(critic=True))


def make_batch(options: argparse.Namespace, vocabulary: int) -> Batch:
    """Rows as runs have them: prompts of like length, responses with a long tail."""
    scale = 8 if options.small else 1
    rows = 32 if options.small else options.rows
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(64, 257, (rows,), generator=generator) // scale
    tail = torch.empty(rows).log_normal_(5.7, 0.7, generator=generator)  # median 300 tokens
    responses = tail.clamp(16, 1024).long() // scale
    width, longest = int(responses.max()), int((prompts + responses).max())
    return Batch(
        input_ids_BL=torch.randint(5, vocabulary, (rows, longest), generator=generator),
        prompt_len_B=prompts,
        response_len_B=responses,
        response_mask_BT=torch.arange(width)[None, :] < responses[:, None],
        sampler_logprobs_BT=torch.zeros(rows, width),
        group_B=torch.arange(rows),
        weight_version_B=torch.zeros(rows, dtype=torch.int64),
    )


def with_scores(batch: AnnotatedBatch) -> TrainBatch:
    """The batch with made-up advantages and returns."""
    shape = batch.response_mask_BT.shape
    return TrainBatch(
        **{name: getattr(batch, name) for name in AnnotatedBatch.__dataclass_fields__},
        scores_B=torch.zeros(shape[0]),
        valid_B=torch.ones(shape[0], dtype=torch.bool),
        token_rewards_BT=torch.zeros(shape),
        advantages_BT=torch.randn(shape),
        returns_BT=torch.randn(shape),
        is_weight_BT=torch.ones(shape),
    )


def make_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a randomly initialised model."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, eos_token_id=1, pad_token_id=0))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    model.save_pretrained(folder)


def device_name(compute: Compute) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if compute.device.type == "cuda" else "the CPU"


def find_peak(compute: Compute, told: float | None) -> tuple[float, str]:
    """Peak TFLOP/s of the device, and where the number is from."""
    if told:
        return told, "--peak_tflops"
    name = device_name(compute)
    if compute.dtype != torch.float32 and (speed := find_speed(name)) is not None:
        return speed.tflops, "data sheet"
    return measure_peak(compute), "a matrix product, measured"


def measure_peak(compute: Compute) -> float:
    """TFLOP/s of the best of some square matrix products in the computing precision."""
    size = 8192 if compute.device.type == "cuda" else 1024
    left, right = torch.randn(2, size, size, device=compute.device, dtype=compute.dtype)
    torch.mm(left, right)
    seconds = min(timed(lambda: torch.mm(left, right))[1] for _ in range(10))
    return 2 * size**3 / seconds / 1e12


if __name__ == "__main__":
    main()
