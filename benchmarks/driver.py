"""Seconds of a step that are neither sampling nor training: 1,024 responses of 512 tokens.

    OMP_NUM_THREADS=2 python benchmarks/driver.py [--profile]

`ppo train` runs with its defaults and a rule, but its engine samples, annotates and trains nothing:
what is left is what the driver does itself. `--profile` adds where Python's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.cli.app import main as ppo
from ppo_cli.engine.base import MiniBatch, Sampling, Sums
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.records import Prompt, Rollout
from ppo_cli.run import assemble

ROWS, TOKENS, STEPS = 1024, 512, 5
WORDS = ("so", "we", "add", "12", "and", "3", "which", "gives", "15", "the", "number", "is")


class IdleEngine(LocalEngine):
    """Responses are drawn from a few words; no model is asked or trained."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield one response after the other, all of the same length."""
        dice = random.Random(sampling.seed)
        texts = [" ".join(dice.choices(WORDS, k=TOKENS)) + "\n#### 15" for _ in range(16)]
        ids, logprobs = tuple(range(TOKENS)), np.full(TOKENS, -1.0, np.float32)
        for i, prompt in enumerate(prompts):
            for sample in range(sampling.n):
                text = texts[(i + sample) % len(texts)]
                yield Rollout(prompt, sample, ids, logprobs, text, "stop", 0)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Log-probs of -1, values of 0."""
        shape = batch.response_mask_BT.shape
        return AnnotatedBatch(
            **{name: getattr(batch, name) for name in Batch.__dataclass_fields__},
            old_logprobs_BT=torch.full(shape, -1.0), entropy_BT=torch.ones(shape),
            ref_logprobs_BT=torch.full(shape, -1.1), full_kl_BT=None,
            values_BT=torch.zeros(shape),
        )  # fmt: skip

    def step(self, minibatch: MiniBatch) -> Sums:
        """Nothing is learnt."""
        return {}


def main() -> None:
    """Run, and print the seconds of a step as the run's own metrics and its clock have them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    vars(assemble)["LocalEngine"] = IdleEngine
    with tempfile.TemporaryDirectory() as name:
        rows = [
            {"prompt": " ".join(random.choices(WORDS, k=80)), "ground_truth": "15"}
            for _ in range(ROWS)
        ]
        data = Path(name) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sys.argv = [
            "ppo", "train", "--model", "embedded", "--train_files", str(data),
            "--rule", "gsm8k", "--batch_size", str(ROWS), "--mini_batch_size", "256",
            "--max_prompt_length", "512", "--max_response_length", str(TOKENS), "--max_steps",
            str(STEPS), "--save_freq", "-1", "--test_freq", "-1", "--output_dir", f"{name}/run",
        ]  # fmt: skip
        profile: Any = cProfile.Profile()
        if asked.profile:
            profile.enable()
        status = ppo()
        profile.disable()
        lines = (Path(name) / "run/metrics.jsonl").read_text().splitlines()
        metrics = [json.loads(line) for line in lines][-STEPS:]
    if asked.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    print({k: round(v, 3) for k, v in metrics[-1].items() if k.startswith("time/")})
    steps = [line["time/step_s"] for line in metrics]
    ends = [line["time/run_s"] for line in metrics]
    waits = [b - a for a, b in itertools.pairwise(ends)]
    print(
        f"time/step_s {statistics.median(steps[1:]):.2f}, from line to line "
        f"{statistics.median(waits):.2f} s (median of {len(waits)}); exit {status}"
    )


if __name__ == "__main__":
    main()
