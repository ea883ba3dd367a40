"""The interface of every reward.

`submit` returns at once; the future it returns always resolves to a `Score`, and a failure to
judge is a `Score` whose value is None. The future raises only what must stop the run
(a `PpoError`); after an `Interrupted` a resumed run asks for the same scores again. Callers may
submit from one thread only; the work happens elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol

from ppo_cli.records import Prompt, Rollout, Score

RoundKind = Literal["train", "baseline", "validation"]


class Reward(Protocol):
    """Scores rollouts, one by one, as they finish."""

    name: str

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        patient: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Try the reward out before any rollout, on prompts that it will have to score.

        `patient` waits for a judge that is down (a run that goes on) instead of giving up at
        once. Raises RewardError with what is wrong.
        """
        return

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Start scoring one rollout; never blocks on the answer."""
        ...

    def begin_step(self, step: int) -> None:
        """Say that what is submitted from now on belongs to `step`."""
        return

    def settle(self, kind: RoundKind = "train") -> None:
        """Say that all of this round is submitted: now decide what becomes of failed ones.

        A round is the rollouts of a step, the greedy baselines beside them, or a validation;
        running statistics learn from the first kind only.
        Returns at once. A reward may hold back the futures of rollouts that it could not score
        until this is called, to ask again for all of them when too many failed.
        """
        return

    def waiting_for(self) -> str | None:
        """Say in one sentence why nothing moves at the moment, or return None."""
        return None

    def measure(self) -> dict[str, float]:
        """Metrics of what was scored since the last call, under flat names (`judge/calls`)."""
        return {}

    def attach(self, folder: Path) -> None:
        """Take the run's folder, for what must outlive a killed process."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run must remember (JSON-serialisable); {} when nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        return

    def close(self) -> None:
        """Free processes, threads and connections. Safe to call twice."""
        ...
