"""Build the embedded models, tokenizers and prompt sets from nothing: seeded, one command.

    python scripts/build_embedded.py               # writes ppo_cli/embedded, ten minutes
    python scripts/build_embedded.py --only tools  # or sums: one of the two models
    python scripts/build_embedded.py --out DIR     # writes somewhere else

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
from embedded import tools_task
from embedded.task import SEED, build_rows, split_pairs
from embedded.tokenizer import CONTEXT, MARKS_OF_TOOLS, TOOLS_TEMPLATE, build_tokenizer
from embedded.warm_up import STAGES, Teacher, build_model, measure, train_stage
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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


def write_model(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Put a model and its tokenizer into `out`/model."""
    with tempfile.TemporaryDirectory(dir=out, prefix=".model-") as work:
        fresh = Path(work) / "model"
        model.eval().save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in fresh.iterdir():
            file.chmod(0o644)  # the weights are written readable by their owner only
        swap_folder(fresh, out / "model")


def build_sums(out: Path, seed: int) -> None:
    """Build the model that adds two numbers, and print its figures."""
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
    write_model(out, model, tokenizer)
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        print(f"{name} {measure(model, tokenizer, questions, temperature):.3f}")


def build_tools(out: Path, seed: int) -> None:
    """Build the model that calls a tool; `ppo eval embedded-tools` measures it."""
    train, validation = tools_task.build_rows(seed)
    write_rows(out / "train.jsonl", train)
    write_rows(out / "val.jsonl", validation)
    texts = [*tools_task.list_texts(seed), *(row["prompt"] for row in train)]
    tokenizer = build_tokenizer(texts, TOOLS_TEMPLATE, MARKS_OF_TOOLS)
    model = build_model(tokenizer, seed, CONTEXT)
    teacher = tools_task.ToolsTeacher(tokenizer, split_pairs(seed).warm_up, seed)
    for stage in tools_task.STAGES:
        train_stage(model, teacher, stage)
    write_model(out, model.to(torch.bfloat16), tokenizer)


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HOME, help="folder to write into")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch")
    parser.add_argument("--only", choices=("sums", "tools"), help="one of the two models")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    for name, build, folder in (
        ("sums", build_sums, args.out), ("tools", build_tools, args.out / "tools"),
    ):  # fmt: skip
        if args.only in (None, name):
            folder.mkdir(parents=True, exist_ok=True)
            build(folder, args.seed)
    print(f"in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
