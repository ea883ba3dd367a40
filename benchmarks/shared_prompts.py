"""Annotation and update of `rollout.n` responses a prompt, the prompt computed once or for each.

    python benchmarks/shared_prompts.py                # 8 responses, as long as their prompt
    python benchmarks/shared_prompts.py --prompt 32 --response 128 --n 4

A random Qwen2 of 10 million parameters in float32, packed rows, actor, critic and reference. The
two ways take turns; printed are seconds of each pair and the median of the ratios, which is to be
at most 0.75 with the lengths as they are. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from engine_speed import with_scores
from step_against_trl import ENDS, VOCABULARY, make_model

from ppo_cli.algo.batch import Batch, build_batch, merge_annotations
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.engine.base import MiniBatch
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import ALONE
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.records import Prompt, Rollout


def main() -> None:
    """Measure both ways in turns, after a warm-up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=8, help="responses a prompt")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt, on average")
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    asked = parser.parse_args()
    batch = make_batch(asked.prompts, asked.n, asked.prompt, asked.response)
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), ends=ENDS)
        ways = [make_learner(name, share) for share in (False, True)]
    pairs = [tuple(seconds(way, batch) for way in ways) for _ in range(asked.pairs + 1)][1:]
    print("| for each s | once s | ratio |\n|---|---|---|")
    for each, once in pairs:
        print(f"| {each:.2f} | {once:.2f} | {once / each:.2f} |")
    print(f"median ratio: {statistics.median(once / each for each, once in pairs):.2f}")


def make_batch(prompts: int, n: int, prompt: int, response: int) -> Batch:
    """Prompts and responses of random ids, from half to one and a half times as long."""
    generator = torch.Generator().manual_seed(0)

    def ids(mean: int) -> tuple[int, ...]:
        count = int(torch.randint(mean // 2, mean * 3 // 2 + 1, (), generator=generator))
        return tuple(torch.randint(5, VOCABULARY, (count,), generator=generator).tolist())

    rollouts = []
    for number in range(prompts):
        asked = Prompt(str(number), "", (), "", ids(prompt))
        for sample in range(n):
            said = ids(response)
            logprobs = torch.zeros(len(said)).numpy()
            rollouts.append(Rollout(asked, sample, said, logprobs, "", "stop"))
    return build_batch(rollouts, pad_token_id=1)


def make_learner(folder: str, share: bool) -> Learner:
    """A learner with actor, critic and reference, with the settings of a run."""
    config = fit_memory(settle(Config.model_validate(
        {
            "model": {"path": folder, "dtype": "float32", "share_prompts": share,
                      "enable_gradient_checkpointing": False},
            "actor": {"optim": {"lr": 1e-6}}, "critic": {"optim": {"lr": 1e-6}},
        }
    ), Machine.here())).config  # fmt: skip
    return Learner(config, load_tokenizer(folder), ALONE, total_steps=100)


def seconds(learner: Learner, batch: Batch) -> float:
    """Seconds of one annotation and one update of all rows."""
    start = time.perf_counter()
    annotated = merge_annotations(batch, [learner.annotate(batch)])
    learner.step(MiniBatch(with_scores(annotated), actor=True, critic=True))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
