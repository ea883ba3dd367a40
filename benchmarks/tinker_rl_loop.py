"""The cookbook's rl_loop, unmodified, on the embedded model behind `ppo serve --tinker`.

    scripts/setup_tinker
    ppo serve --tinker --model embedded --served_name Qwen/Qwen3-8B-Base
    python benchmarks/tinker_rl_loop.py [FOLDER [STEPS]]

The embedded model cannot write \\boxed{}, for which the recipe gives its reward. So the SDK first
trains all weights on sums of numbers below 3 by cross-entropy and saves a state; rl_loop continues
from it, as from any checkpoint in its log_path. Prints the reward of each batch.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "Qwen/Qwen3-8B-Base"  # one for which the cookbook has a renderer
BELOW = 3
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.parquet
---
"""
# Run in .venv-tinker: URL LOG_PATH STEPS. Prompts are those of the recipe.
WARM_UP = ROOT / "benchmarks" / "tinker_warm_up.py"


def environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-local", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline}


def write_working_directory(folder: Path, model: Path) -> None:
    """Write what the recipe looks for below its working directory: a tokenizer and GSM8K."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shutil.copytree(model, folder / NAME, dirs_exist_ok=True)
    pairs = [(a, b) for a in range(BELOW) for b in range(BELOW)]
    chosen = random.Random(0).choices(pairs, k=480)
    rows = [
        {"question": f"What is {a}+{b}?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"}
        for a, b in chosen
    ]
    data = folder / "openai" / "gsm8k"
    data.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), data / "train.parquet")
    (data / "README.md").write_text(CARD)


def recipe(url: str, log_path: str, steps: int) -> list[str]:
    """Return the words after `python -m`."""
    return [
        "tinker_cookbook.recipes.rl_loop", f"base_url={url}", f"model_name={NAME}",
        f"log_path={log_path}", "loss_fn=importance_sampling", "batch_size=8", "group_size=16",
        "max_tokens=14", "learning_rate=1e-3", "save_every=0", f"max_steps={steps}",
    ]  # fmt: skip


def main() -> None:
    from ppo_cli.config.models.bundled import model_folder

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "tinker-rl-loop").resolve()
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    python, url = str(ROOT / ".venv-tinker" / "bin" / "python"), "http://127.0.0.1:8765"
    write_working_directory(folder, Path(model_folder("embedded")))
    for words in ([str(WARM_UP), url, "log", "240"], ["-m", *recipe(url, "log", steps)]):
        subprocess.run([python, *words], cwd=folder, env=environment(), check=True)
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    print([round(json.loads(line)["reward/total"], 2) for line in lines])


if __name__ == "__main__":
    main()
