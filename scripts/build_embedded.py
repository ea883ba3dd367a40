"""Build the embedded model, tokenizer and prompt set from nothing: seeded, one command.

    python scripts/build_embedded.py            # writes ppo_cli/embedded, a few minutes
    python scripts/build_embedded.py --out DIR  # writes somewhere else

The same seed and number of threads give the same files on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from embedded.task import SEED, build_rows, split_pairs
from embedded.tokenizer import CONTEXT, build_tokenizer
from embedded.warm_up import STAGES, Teacher, build_model, measure, train_stage

HOME = Path(__file__).resolve().parent.parent / "ppo_cli" / "embedded"


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object a line, whole or not at all."""
    partial = path.with_suffix(".partial")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def swap_folder(fresh: Path, target: Path) -> None:
    """Put the finished folder where the old one was."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(fresh, target)


def build(out: Path, seed: int) -> dict[str, float]:
    """Build everything into `out` and return the figures of the finished model."""
    out.mkdir(parents=True, exist_ok=True)
    train, validation = build_rows(seed)
    write_rows(out / "train.jsonl", train)
    write_rows(out / "val.jsonl", validation)
    # The tokenizer does not know the unfamiliar wording either.
    familiar, _ = build_rows(seed, unfamiliar=False)
    tokenizer = build_tokenizer([row["prompt"] for row in familiar])
    model = build_model(tokenizer, seed, CONTEXT)
    teacher = Teacher(tokenizer, split_pairs(seed).warm_up, seed)
    for stage in STAGES:
        train_stage(model, teacher, stage)
    questions = [(row["prompt"], row["ground_truth"]) for row in validation]
    with tempfile.TemporaryDirectory(dir=out, prefix=".model-") as work:
        fresh = Path(work) / "model"
        model.eval().save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in fresh.iterdir():
            file.chmod(0o644)  # the weights are written readable by their owner only
        swap_folder(fresh, out / "model")
    return {
        "greedy": measure(model, tokenizer, questions, temperature=0.0),
        "sampled": measure(model, tokenizer, questions, temperature=1.0),
    }


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HOME, help="folder to write into")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    figures = build(args.out, args.seed)
    took = time.monotonic() - began
    print(", ".join(f"{name} {value:.3f}" for name, value in figures.items()), f"in {took:.0f} s")


if __name__ == "__main__":
    main()
