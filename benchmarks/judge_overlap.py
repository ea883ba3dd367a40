"""How much longer a step takes when judges with a second of latency score it, not a rule.

Run: OMP_NUM_THREADS=1 python benchmarks/judge_overlap.py [--steps 6] [--turns 2] [--band 0-0.25]
A judge on loopback answers after --latency seconds, with any score. The model has random weights
and is large enough that sampling and annotating take longer than that. Runs take turns; the ratio
is that of the medians of all steps but each run's first. The target is 1.03 at most. In the cascade
each response goes to a cheaper judge first, which answers after --cheap_latency seconds, and then
to the judge, if the cheaper one's score is in --band: by default always, which takes longest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 12,
         "layer_types": ["full_attention"] * 12}  # fmt: skip


def build_model(folder: Path) -> None:
    """Save a model of about ten million random weights that speaks the bundled tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = ROOT / "ppo_cli" / "embedded" / "model"
    shutil.copytree(source, folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@contextmanager
def judge(latency: float) -> Iterator[str]:
    """Start the loopback judge as a process of its own; gives its URL."""
    command = [sys.executable, "-m", "tests.judge_server", "--any",
               "--latency", str(latency)]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]["openai"]
    finally:
        process.terminate()
        process.wait(20)


def step_times(out: Path, model: Path, steps: int, reward: Sequence[str]) -> list[dict[str, float]]:
    """Train a few steps; the timings of all but the first."""
    subprocess.run(
        [sys.executable, "-m", "ppo_cli", "train", "--preset", "embedded", "--model", str(model),
         "--critic_model", str(model), "--max_steps", str(steps), "--batch_size", "32",
         "--mini_batch_size", "32", "--rollout_n", "2", "--max_response_length", "48",
         "--test_freq", "-1", "trainer.val_before_train=false", "data.val_files=[]",
         "--resume", "never", "--output_dir", str(out), *reward],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        env=os.environ | {"OPENAI_API_KEY": "k", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 1]


def main() -> None:
    """Run both in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--cheap_latency", type=float, default=0.3)
    parser.add_argument("--band", default="0-1", help="cheaper scores that are escalated")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as place,
        judge(options.latency) as url,
        judge(options.cheap_latency) as cheap,
    ):
        model = Path(place) / "model"
        build_model(model)
        one = ["--use_api_reward", "--rm_api_type", "openai", "--rm_base_url", url,
               "--rm_model", "judge", "--rm_cache", "off", "--rm_concurrency", "64"]  # fmt: skip
        small = f"reward.api.judges={{small: {{model: small, base_url: {cheap}}}}}"
        rewards = {
            "rule": ["--rule", "exact"],
            "judge": one,
            "cascade": [*one, "--rm_cascade", "small", "--rm_cascade_band", options.band, small],
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in rewards}
        for turn in range(options.turns):
            for name, flags in rewards.items():
                out = Path(place) / f"{name}_{turn}"
                found[name] += step_times(out, model, options.steps, flags)
    for name, lines in found.items():
        keys = ("time/step_s", "time/rollout_s", "time/annotate_s", "time/reward_wait_s")
        times = ", ".join(f"{k[5:]} {statistics.median(x[k] for x in lines):.3f}" for k in keys)
        escalated = statistics.fmean(x.get("judge/escalated", 0.0) for x in lines)
        print(f"{name:7} medians of {len(lines)} steps: {times}; escalated {escalated:.0%}")
    medians = {n: statistics.median(x["time/step_s"] for x in found[n]) for n in found}
    for name, other in (("judge", "rule"), ("cascade", "judge")):
        ratio = medians[name] / medians[other]
        print(f"ratio {name} / {other}: {ratio:.3f} (target 1.03 at most)")


if __name__ == "__main__":
    main()
