"""How long `ppo --help` and its like take, beside a bare interpreter and beside torch alone.

Run: python benchmarks/startup.py
The best of several turns, taken alternately. It ends with 1 where help takes more than a third, or
any other word about a run more than half, of what importing torch takes.
"""

from __future__ import annotations

import subprocess
import sys
import time

PPO = [sys.executable, "-m", "ppo_cli"]
BARE = "python -c pass"
TORCH = "python -c 'import torch'"
COMMANDS = {
    BARE: [sys.executable, "-c", "pass"],
    TORCH: [sys.executable, "-c", "import torch"],
    "ppo --help": [*PPO, "--help"],
    "ppo train --help": [*PPO, "train", "--help"],
    "ppo plan --preset embedded": [*PPO, "plan", "--preset", "embedded"],
}
MOST = {"ppo --help": 1 / 3, "ppo train --help": 1 / 2, "ppo plan --preset embedded": 1 / 2}
TURNS = 7


def seconds_of(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return time.perf_counter() - started


def main() -> None:
    turns = [{name: seconds_of(line) for name, line in COMMANDS.items()} for _ in range(TURNS)]
    best = {name: min(turn[name] for turn in turns) for name in COMMANDS}
    for name, seconds in best.items():
        print(f"{name:28} {seconds:6.2f} s   {seconds / best[TORCH]:5.2f} of importing torch")
    slow = [name for name, most in MOST.items() if best[name] > most * best[TORCH]]
    if slow:
        raise SystemExit(f"too slow: {', '.join(slow)}")


if __name__ == "__main__":
    main()
