"""Seconds and peak memory of a step as its batch and its responses grow.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--turns 2]

A random Qwen2 of 10 million parameters in float32, packed rows, settings as `ppo train` has them:
sampling, annotation and update of 4 responses of 64 tokens, of 32 such responses, and of 4 of 256
tokens. Each size has a process of its own; they take turns. Printed are the median processor
seconds of each verb and the peak above the loaded models in MiB, with ratios to the first size: at
most the ratio of tokens is linear. Attention grows with the square of a row, and counts little.
Then the peak above the libraries is compared with the sum on paper: three models, the moments of
two, one gradient, and the most that autograd holds of activations at a time.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_speed import with_scores
from step_against_trl import make_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_cli.algo.batch import build_batch
from ppo_cli.allocator import start_with_jemalloc
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.records import Prompt, Rollout

PROMPT = 64
SIZES = {"4 x 64 tokens": (4, 64), "32 x 64": (32, 64), "4 x 256": (4, 256)}
Measured = dict[str, float]


def main() -> None:
    """Measure each size in turns, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.size:
        start_with_jemalloc()  # as `ppo train` has it
        measure(str(model_folder("embedded")), 1, 2)  # what libraries take for themselves
        gc.collect()
        print(json.dumps(measure(asked.model, *SIZES[asked.size])))
        return
    found: dict[str, list[Measured]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), ends=0.0)
        for _ in range(asked.turns):
            for size in SIZES:
                line = [sys.executable, __file__, "--size", size, "--model", name]
                done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
                found[size].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        size: {what: statistics.median(one[what] for one in turns) for what in turns[0]}
        for size, turns in found.items()
    }
    first, (rows, tokens) = next(iter(medians.values())), next(iter(SIZES.values()))
    for size, median in medians.items():
        grown = SIZES[size][0] * (PROMPT + SIZES[size][1]) / (rows * (PROMPT + tokens))
        peak, paper = median.pop("peak"), median.pop("paper")
        shown = ", ".join(f"{n} {v:.2f} ({v / first[n]:.2f})" for n, v in median.items())
        print(f"{size:14} tokens x {grown:.1f}: {shown}")
        print(f"{'':14} peak {peak:.0f} MiB, on paper {paper:.0f}: {peak / paper:.2f}")


def measure(folder: str, rows: int, tokens: int) -> Measured:
    """Seconds of the verbs, the faster of two turns after a warm-up, and the peak in MiB."""
    config = fit_memory(settle(
        Config.model_validate({
            "model": {"path": folder, "dtype": "float32"},
            "data": {"max_prompt_length": PROMPT, "max_response_length": tokens},
        }),
        Machine.here())).config  # fmt: skip
    libraries, saved = resident(), Saved()
    engine = LocalEngine(config, AutoTokenizer.from_pretrained(folder), total_steps=10)
    loaded = resident()
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(i), "", (), "", tuple(torch.randint(5, 282, (PROMPT,), generator=generator)
        .tolist())) for i in range(rows)
    ]  # fmt: skip

    def draw(sampling: Sampling) -> list[Rollout]:
        return list(engine.generate(prompts, sampling))

    seconds: list[Measured] = []
    for turn in range(3):
        sampling = Sampling(max_tokens=tokens, seed=turn)
        drawn, generate = timed(partial(draw, sampling))
        batch = build_batch(drawn, pad_token_id=1)
        annotated, annotate = timed(partial(engine.annotate, batch))
        minibatch = MiniBatch(with_scores(annotated), actor=True, critic=True)
        with saved if turn == 0 else nullcontext():
            _, step = timed(partial(engine.step, minibatch))
        engine.publish()
        if turn:
            seconds.append({"generate": generate, "annotate": annotate, "step": step})
    engine.close()
    peak = resident()
    model = sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    return {what: min(one[what] for one in seconds) for what in seconds[0]} | {
        "MiB": peak - loaded,
        "peak": peak - libraries,
        "paper": ((3 + 4 + 1) * model + saved.most) / 2**20,
    }


@dataclass(eq=False)
class Held:
    """A tensor as long as autograd keeps it."""

    tensor: Tensor


class Saved(saved_tensors_hooks):
    """What autograd keeps for backward passes in this block, `most` bytes of it at a time.

    Parameters do not count, and what is kept twice counts once.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self._holders: dict[int, int] = {}
        super().__init__(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> Held:
        held = Held(tensor)
        if not isinstance(tensor, torch.nn.Parameter):
            memory = tensor.untyped_storage()
            self._count(memory.data_ptr(), memory.nbytes(), 1)
            weakref.finalize(held, self._count, memory.data_ptr(), memory.nbytes(), -1)
        return held

    def _count(self, place: int, size: int, change: int) -> None:
        before = self._holders.get(place, 0)
        self._holders[place] = before + change
        self.now += size * (bool(before + change) - bool(before))
        self.most = max(self.most, self.now)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Do it, and say how many processor seconds it took."""
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


def resident() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
