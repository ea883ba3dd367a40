"""One update of actor and critic, by verl's FSDP engine and by ours, in turns.

    # verl/bin/python is an environment with verl; CONTRIBUTING.md has the lines that make one.
    python benchmarks/update_against_verl.py --verl verl/bin/python --pairs 5

A random Qwen2 of 10 million parameters in float32 on the CPU, 32 rows of many lengths, settings as
`ppo train` has them without a flag. verl runs on the device of
`tests/extras/migrate/bridge/cpu_platform.py`, its rows padded (its kernels for packed rows are for
GPUs), nothing recomputed, in micro-batches of `--rows`. Both processes live through all pairs; the
first update of each is left out. Printed are seconds, the median of the ratios, and peak memory.
Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
ROWS, PROMPT, RESPONSE = 32, 180, 128


def answer_as_verl(folder: Path, rows: int) -> None:
    """Update at each line of the input, and print its seconds and the peak memory in GB."""
    sys.path.insert(0, str(ROOT / "tests" / "extras" / "migrate" / "bridge"))
    from verl_update import make_updates

    updates = make_updates(folder, rows)
    for _ in sys.stdin:
        start = time.perf_counter()
        for update in updates.values():
            update()
        said = {"seconds": time.perf_counter() - start, "gigabytes": peak_gigabytes()}
        print(json.dumps(said), flush=True)


def peak_gigabytes() -> float:
    """Of this process, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def make_batch() -> Any:
    """Prompts of about 60 tokens, responses that end with probability 3/128 at each token."""
    import torch
    from step_against_trl import ENDS, VOCABULARY

    from ppo_cli.algo.batch import Batch

    dice = torch.Generator().manual_seed(0)
    prompts = torch.empty(ROWS).log_normal_(3.95, 0.5, generator=dice).long().clamp(max=170) + 10
    responses = torch.empty(ROWS).geometric_(ENDS, generator=dice).long().clamp(max=RESPONSE)
    width, longest = int(responses.max()), int((prompts + responses).max())
    shape = ROWS, width
    return Batch(
        input_ids_BL=torch.randint(2, VOCABULARY, (ROWS, longest), generator=dice),
        prompt_len_B=prompts,
        response_len_B=responses,
        response_mask_BT=torch.arange(width)[None] < responses[:, None],
        sampler_logprobs_BT=torch.zeros(shape),
        sampler_entropy_BT=torch.zeros(shape),
        group_B=torch.arange(ROWS),
        weight_version_B=torch.zeros(ROWS, dtype=torch.int64),
    )


def settle(lines: list[str]) -> Any:
    """The run's settings from these alone."""
    from ppo_cli.planning.memory.plan import fit_memory
    from ppo_cli.planning.resolve import resolve

    resolved = resolve(flags={}, preset=None, config_files=[], overrides=lines, environ={})
    return fit_memory(resolved).config


def main() -> None:
    """Write the model and the batch, start verl, run the pairs."""
    if sys.argv[1:2] == ["--as-verl"]:
        answer_as_verl(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verl", required=True, help="the Python of an environment with verl")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8, help="of verl's micro-batches")
    asked = parser.parse_args()
    import torch
    from engine_speed import with_scores
    from step_against_trl import make_model
    from transformers import AutoTokenizer

    from ppo_cli.algo.batch import merge_annotations
    from ppo_cli.engine.base import MiniBatch
    from ppo_cli.engine.learner import Learner
    from ppo_cli.extras.migrate.bridge.overrides import build_overrides
    from ppo_cli.machine.machine import Machine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", ends=0.0)
        lines = [
            f"model.path={folder / 'model'}", "model.dtype=float32", "actor.use_kl_loss=true",
            f"data.train_batch_size={ROWS}", f"actor.ppo_mini_batch_size={ROWS}",
            f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}",
            "data.train_files=p.jsonl",
        ]  # fmt: skip
        ours = settle(lines)
        torch.manual_seed(0)
        learner = Learner(ours, AutoTokenizer.from_pretrained(folder / "model"), total_steps=100)
        batch = make_batch()
        scored = with_scores(merge_annotations(batch, [learner.annotate(batch)]))
        fields = {name: getattr(scored, name) for name in scored.__dataclass_fields__}
        torch.save(fields | {"loss_mask_BT": scored.loss_mask_BT}, folder / "batch.pt")
        theirs = [
            *lines, "trainer.engine=verl", "trainer.n_gpus_per_node=1",
            "model.enable_gradient_checkpointing=false", f"critic.model.path={folder / 'model'}",
            f"actor.ppo_micro_batch_size_per_gpu={asked.rows}",
            f"critic.ppo_micro_batch_size_per_gpu={asked.rows}",
        ]  # fmt: skip
        told = build_overrides(settle(theirs), Machine.here()).lines(folder)
        (folder / "overrides").write_text("".join(f"{line}\n" for line in told))
        minibatch = MiniBatch(scored, actor=True, critic=True)
        with subprocess.Popen(
            [asked.verl, __file__, "--as-verl", name, str(asked.rows)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ) as process:  # fmt: skip
            run_pairs(process, lambda: learner.step(minibatch), asked.pairs)


def run_pairs(process: subprocess.Popen[str], update: Any, count: int) -> None:
    """Time both in turns, and print what came out."""
    assert process.stdin is not None
    assert process.stdout is not None
    ratios = []
    for turn in range(count + 1):
        print(file=process.stdin, flush=True)
        said = next(json.loads(line) for line in process.stdout if line.startswith('{"seconds"'))
        start = time.perf_counter()
        update()
        ours = time.perf_counter() - start
        if turn:
            ratios.append(ours / said["seconds"])
            print(f"verl {said['seconds']:.2f} s, ours {ours:.2f} s: {ratios[-1]:.2f}", flush=True)
    process.stdin.close()
    theirs, own = said["gigabytes"], peak_gigabytes()
    print(f"median {statistics.median(ratios):.2f}; peak memory {theirs:.2f} GB, ours {own:.2f}")


if __name__ == "__main__":
    main()
