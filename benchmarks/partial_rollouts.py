"""What partial rollouts save where a few responses are long: the real scheduling, a faked sampler.

python benchmarks/partial_rollouts.py [--steps 16] [--train 300]

The sampler takes a known time for a token of all its rows, as a GPU does: the same for few rows as
for many, then in proportion. Lengths are log-normal, cut at the longest. Training takes a known
time too. All else is `AheadEngine` as it runs in training.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from ppo_cli.engine.async_rollout import AheadEngine
from ppo_cli.engine.base import Engine, Sampling, extend_rollout, start_rollouts
from ppo_cli.records import Prompt, Rollout

ROWS, LONGEST, MEDIAN, SPREAD = 64, 2048, 256, 1.0
TOKEN_S, FREE_ROWS = 1e-4, 64  # a token of up to so many rows; more take longer


class TimedEngine:
    """Samples tokens of which only the number and the time count."""

    def __init__(self) -> None:
        self.version = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield responses, the shortest first, when their time has come."""
        waiting = sorted(
            (
                (self._left(one, sampling), one)
                for one in (*start_rollouts(prompts, sampling), *begun)
            ),
            key=lambda pair: pair[0],
        )
        done = 0
        for i, (tokens, one) in enumerate(waiting):
            rows = len(waiting) - i
            time.sleep((tokens - done) * TOKEN_S * max(1.0, rows / FREE_ROWS))
            done = tokens
            stopped = len(one.token_ids) + tokens == _length(one)
            yield extend_rollout(
                one, (1,) * tokens, np.zeros(tokens, np.float32), stopped=stopped,
                sampling=sampling, weight_version=self.version, detokenize=lambda ids, context: "",
            )  # fmt: skip

    def annotate(self, batch: Any) -> Any:
        """Take no time."""
        return batch

    def publish(self) -> None:
        """Take no time."""
        self.version += 1

    def close(self) -> None:
        """Nothing is held."""

    @staticmethod
    def _left(one: Rollout, sampling: Sampling) -> int:
        drawn = len(one.token_ids)
        return min(_length(one), sampling.length_limit(drawn)) - drawn


def _length(one: Rollout) -> int:
    drawn = np.random.default_rng([one.seed, int(one.prompt.uid)]).lognormal(sigma=SPREAD)
    return int(min(LONGEST, 1 + MEDIAN * drawn))


def measure(ahead: int, partial: int | None, steps: int, train_s: float) -> dict[str, float]:
    """Seconds of the later half of the steps, by what they were spent on, and what was carried."""
    prompts = tuple(Prompt(str(i), "", (), "", (1,)) for i in range(ROWS))
    step = 0

    def asked(ahead: int) -> tuple[Sequence[Prompt], Sampling]:
        return prompts, Sampling(seed=step + ahead, max_tokens=LONGEST)

    engine = AheadEngine(cast("Engine", TimedEngine()), asked, ahead, partial)
    times: list[tuple[float, float, float]] = []
    carried: list[bool] = []
    for step in range(1, steps + 1):
        marks = [time.perf_counter()]
        rollouts = list(engine.generate(*asked(0)))
        marks.append(time.perf_counter())
        versions = np.array([one.weight_version for one in rollouts])
        engine.annotate(cast("Any", SimpleNamespace(weight_version_B=versions)))
        time.sleep(train_s)
        marks.append(time.perf_counter())
        engine.publish()
        marks.append(time.perf_counter())
        times.append((marks[1] - marks[0], marks[3] - marks[2], marks[3] - marks[0]))
        carried += [one.carried > 0 for one in rollouts] if step > steps // 2 else []
    engine.close()
    named = zip(("rollout", "publish", "step"), zip(*times[steps // 2 :], strict=True), strict=True)
    return {name: statistics.fmean(seconds) for name, seconds in named} | {
        "carried": float(np.mean(carried))
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--train", type=int, default=300, help="training, in tokens' time")
    args = parser.parse_args()
    print(f"{ROWS} rows, lengths of median {MEDIAN}, at most {LONGEST}; in time of a token")
    for ahead, partial in (
        (1, None), (2, None), (1, 512), (2, 1024), (2, 512), (4, 512), (4, 256), (8, 256),
    ):  # fmt: skip
        found = measure(ahead, partial, args.steps, args.train * TOKEN_S)
        share = found.pop("carried")
        told = "  ".join(f"{name} {s / TOKEN_S:5.0f}" for name, s in found.items())
        print(f"async_steps {ahead}  partial_tokens {partial!s:>4}  {told}  carried {share:.2f}")


if __name__ == "__main__":
    main()
