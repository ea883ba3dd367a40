"""Does the interval of `ppo eval` cover the difference between two models that repeats show?

Run: python benchmarks/eval_intervals.py [STEPS]
The bundled model before and after STEPS (3) training steps, compared on the 256 bundled sums with
20 seeds. What they show together is taken for the difference. It ends with 1 where fewer than 19
of the 20 intervals cover it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from typing import Any

from ppo_cli.cli.app import main as ppo

REPEATS = 20
COVERED = 19


def call(*words: str) -> str:
    with redirect_stdout(io.StringIO()) as out:
        assert ppo(words) == 0
    return out.getvalue()


def difference(seed: int) -> dict[str, Any]:
    words = ["run", "embedded", "--n", "1", "--temperature", "1", "--seed", str(seed), "--json"]
    (gap,) = json.loads(call("eval", *words))["differences"]
    found: dict[str, Any] = gap["sources"]["ppo-cli/arithmetic"]
    return found


def main() -> None:
    steps = sys.argv[1] if len(sys.argv) > 1 else "3"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        call("train", "--preset", "embedded", "--max_steps", steps, "--output_dir", "run")
        found = [difference(seed) for seed in range(REPEATS)]
    truth = sum(one["value"] for one in found) / REPEATS
    covers = [one["low"] <= truth <= one["high"] for one in found]
    for one, covered in zip(found, covers, strict=True):
        within = f"[{one['low']:+.3f}, {one['high']:+.3f}]"
        print(f"{one['value']:+.3f} {within} p {one['p']:.5f}{'' if covered else '  missed'}")
    print(f"{truth:+.4f} over all; {sum(covers)} of {REPEATS} intervals cover it")
    if sum(covers) < COVERED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
