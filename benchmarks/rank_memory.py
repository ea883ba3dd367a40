"""Peak memory of each learner rank: actor, critic and reference of a random 50M model.

    python benchmarks/rank_memory.py            # one rank, then two; prints a table
    python benchmarks/rank_memory.py --whole    # weights stay gathered through a step

Peaks are resident memory over the whole life of a rank, loading included; the baseline is what
the imports alone take. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 11,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, RESPONSE, ROWS = 32, 96, 16
BUDGET = 512  # tokens of a micro-batch: activations are alike on one rank and on many


def main() -> None:
    """Measure one rank, then several, and print what each needs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.ranks, options.steps, options.folder, options.whole)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, __file__, "--rank", "-1", "--folder", name], check=True)
        alone = run_ranks(1, options.steps, folder, options.whole)
        spread = run_ranks(options.ranks, options.steps, folder, options.whole)
    print(f"{'':14} baseline   loaded     peak   peak above baseline   of one rank's")
    whole = alone[0]["peak"] - alone[0]["baseline"]
    for label, found in [("one rank", alone[0])] + [
        (f"rank {i} of {options.ranks}", one) for i, one in enumerate(spread)
    ]:
        own = found["peak"] - found["baseline"]
        print(
            f"{label:14} {found['baseline']:8.0f} {found['loaded']:8.0f} {found['peak']:8.0f} "
            f"{own:12.0f} MiB {own / whole:17.2f}   ({found['seconds']:.1f} s a step)"
        )


def run_ranks(size: int, steps: int, folder: Path, whole: bool) -> list[dict[str, float]]:
    """Start `size` ranks and collect what they measured."""
    workers = [
        subprocess.Popen(
            [
                sys.executable, __file__, "--rank", str(rank), "--ranks", str(size),
                "--steps", str(steps), "--folder", str(folder), *["--whole"] * whole,
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        for worker in workers:
            if worker.wait(timeout=900):
                raise SystemExit("a rank failed")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return [json.loads((folder / f"{rank}-of-{size}.json").read_text()) for rank in range(size)]


def measure(rank: int, size: int, steps: int, folder: Path, whole: bool) -> None:
    """Train a little as one rank and write down the memory it took."""
    import torch

    from ppo_cli.algo.batch import TrainBatch
    from ppo_cli.config.models.bundled import model_folder
    from ppo_cli.config.schema.run import Config
    from ppo_cli.config.settle import settle
    from ppo_cli.engine.base import MiniBatch
    from ppo_cli.engine.learner import Learner
    from ppo_cli.engine.models import load_tokenizer
    from ppo_cli.engine.ranks import ALONE, join_ranks
    from ppo_cli.machine.machine import Machine
    from ppo_cli.planning.memory.plan import fit_memory

    torch.set_num_threads(1)
    if rank < 0:
        make_model(folder)
        return
    ranks = ALONE
    if size > 1:
        ranks = join_ranks(
            rank, size, init_method=f"file://{folder}/meet-{size}", device=torch.device("cpu")
        )
    sharding = {"reshard_after_forward": not whole}
    config = fit_memory(settle(Config.model_validate({
        "model": {"path": str(folder / "model")},
        "actor": {
            "use_kl_loss": True, "ppo_max_token_len_per_gpu": BUDGET, "fsdp_config": sharding,
        },
        "critic": {"ppo_max_token_len_per_gpu": BUDGET, "fsdp_config": sharding},
        "ref": {"log_prob_max_token_len_per_gpu": BUDGET},
        "data": {"max_prompt_length": PROMPT, "max_response_length": RESPONSE},
    }), Machine.here())).config  # fmt: skip
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    baseline = memory("VmRSS")
    learner = Learner(config, tokenizer, ranks, total_steps=steps)
    loaded = memory("VmHWM")
    batch = TrainBatch(**random_batch())
    started = time.monotonic()
    for _ in range(steps):
        learner.annotate(batch)
        learner.step(MiniBatch(batch, actor=True, critic=True))
        learner.publish()
    seconds = (time.monotonic() - started) / steps
    found = {"baseline": baseline, "loaded": loaded, "peak": memory("VmHWM"), "seconds": seconds}
    (folder / f"{rank}-of-{size}.json").write_text(json.dumps(found))
    if size > 1:
        torch.distributed.destroy_process_group()


def make_model(folder: Path) -> None:
    """Write a randomly initialised model."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, eos_token_id=1, pad_token_id=0))
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.1f}M parameters, {count * 4 / 2**20:.0f} MiB in float32")
    model.save_pretrained(folder / "model")


def random_batch() -> dict[str, Any]:
    """Rows of full length with made-up advantages, returns and old values."""
    import torch

    torch.manual_seed(1)
    shape = (ROWS, RESPONSE)
    noise = {
        name: torch.randn(shape)
        for name in ("values_BT", "advantages_BT", "returns_BT", "token_rewards_BT")
    }
    flat = {
        name: torch.full(shape, -9.0)
        for name in ("sampler_logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT")
    }
    return noise | flat | {
        "input_ids_BL": torch.randint(2, SHAPE["vocab_size"], (ROWS, PROMPT + RESPONSE)),
        "prompt_len_B": torch.full((ROWS,), PROMPT),
        "response_len_B": torch.full((ROWS,), RESPONSE),
        "response_mask_BT": torch.ones(shape, dtype=torch.bool),
        "group_B": torch.arange(ROWS),
        "weight_version_B": torch.zeros(ROWS, dtype=torch.int64),
        "entropy_BT": torch.zeros(shape),
        "full_kl_BT": None,
        "scores_B": torch.zeros(ROWS),
        "valid_B": torch.ones(ROWS, dtype=torch.bool),
        "is_weight_BT": torch.ones(shape),
    }  # fmt: skip


def memory(line: str) -> float:
    """A figure of this process in MiB: VmRSS now, VmHWM at its highest."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{line}:"):
            return int(text.split()[1]) / 1024
    raise ValueError(f"no {line} in /proc/self/status")


if __name__ == "__main__":
    main()
