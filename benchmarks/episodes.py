"""How long episodes side by side take, against the slowest of them alone on its path.

Run: OMP_NUM_THREADS=1 python benchmarks/episodes.py [--episodes 64] [--turns 4] [--tool_s 0.5]
The bundled tools model plays with an environment that takes --tool_s seconds for each reply. The
chain of an episode is the time that it was sampled in, turn by turn, plus --tool_s for each
turn. The ratio is that of the whole to the slowest chain; the target is 1.3 at most.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ppo_cli.config.models.bundled import EMBEDDED_TOOLS, model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.pretrained import load_tokenizer
from ppo_cli.environments.episodes import Episodes
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.records import Prompt, Rollout
from ppo_cli.run.episodes import start_episodes

ENVIRONMENT = """
import time

class Slow:
    def __init__(self, turns, seconds):
        self.turns, self.seconds = turns, seconds

    def reset(self, row):
        return f"What is 12 * {row['seed'] % 90 + 10}?"

    def step(self, message):
        time.sleep(self.seconds)
        self.turns -= 1
        return f"What is 12 * {self.turns + 10}?", self.turns == 0, 1.0
"""
MAX_TURN_TOKENS = 32


def make_config(folder: Path, turns: int, tool_s: float) -> Config:
    """Return settings for episodes with the slow environment."""
    (folder / "slow.py").write_text(ENVIRONMENT, encoding="utf-8")
    return fit_memory(settle(Config.model_validate(
        {
            "model": {"path": EMBEDDED_TOOLS, "dtype": "float32"},
            "data": {"max_prompt_length": 64, "max_response_length": 64 * turns},
            "rollout": {"name": "hf"},
            "environment": {
                "path": f"{folder}/slow.py:Slow", "max_turn_tokens": MAX_TURN_TOKENS,
                "kwargs": {"turns": turns, "seconds": tool_s},
            },
        }
    ), Machine.here())).config  # fmt: skip


def measure(engine: LocalEngine, episodes: Episodes, args: argparse.Namespace) -> float:
    """Play the episodes once; return the ratio of the whole to the slowest chain."""
    chains: Counter[str] = Counter()

    def draw(unfinished: Sequence[Rollout], sampling: Sampling) -> Iterator[Rollout]:
        started = time.monotonic()
        for rollout in engine.generate((), sampling, unfinished):
            chains[rollout.prompt.uid] += time.monotonic() - started + args.tool_s
            yield rollout

    # The environment opens the episodes, so their row is empty.
    row, sampling = (
        Prompt("row", "", (), "", ()),
        Sampling(n=args.episodes, max_tokens=64 * args.turns),
    )
    started = time.monotonic()
    rollouts = list(episodes.play(draw, [row], sampling))
    whole, slowest = time.monotonic() - started, max(chains.values())
    assert [len(r.turns) for r in rollouts] == [args.turns] * args.episodes
    print(f"whole {whole:.2f} s, slowest chain {slowest:.2f} s, ratio {whole / slowest:.3f}")
    return whole / slowest


def main() -> None:
    """Measure a few times, after a round that is left out, and print the median."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tool_s", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        config = make_config(Path(folder), args.turns, args.tool_s)
        tokenizer = load_tokenizer(model_folder(EMBEDDED_TOOLS))
        episodes = start_episodes(config, tokenizer, None, closing)
        assert episodes is not None
        engine = LocalEngine(config, tokenizer, total_steps=1)
        ratios = [measure(engine, episodes, args) for _ in range(args.rounds + 1)]
        print(f"ratio {statistics.median(ratios[1:]):.2f}, {args.episodes} episodes")


if __name__ == "__main__":
    main()
