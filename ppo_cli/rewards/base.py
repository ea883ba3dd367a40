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

from ppo_cli.errors import WorkerLost
from ppo_cli.records import Prompt, Rollout, Score

RoundKind = Literal["train", "baseline", "validation"]
LabelledRollouts = Sequence[tuple[Rollout, float]]


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

    def wants_first(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Of which prompts it needs the starting model's greedy response, before any score."""
        return ()

    def take_first(self, rollouts: Sequence[Rollout]) -> None:
        """Take these responses."""
        return

    def hold_out(self, labelled: Mapping[str, LabelledRollouts]) -> None:
        """Take responses that people have labelled, by the file that settings name."""
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


# A reward that needs a device says what is to be made, by a factory that pickles, and talks to it
# by method names. It does not know who makes it, or where: in this process, or in one of its own.
Factory = Callable[[], Any]


class Host(Protocol):
    """An object that was made by a factory, wherever it lives; one call at a time."""

    @property
    def alive(self) -> bool:
        """Whether it can still be called: not lost, not closed, nor the cluster under it."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; arguments and result pickle.

        A PpoError that the method raises comes out as itself. Raises WorkerLost when the
        object's process died, does not answer in time or was closed, at any moment of the call.
        """
        ...

    def close(self) -> None:
        """Close the object and end its process, also one that is lost. Safe to call twice."""
        ...


# Takes a factory and the name of the reward that it is for.
HostMaker = Callable[[Factory, str], Host]


class InProcess:
    """The object lives here, where nothing else was arranged, and its errors are its own."""

    def __init__(self, factory: Factory, name: str = "") -> None:
        self._made = factory()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Until it is closed."""
        return not self._closed

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object."""
        if self._closed:
            raise WorkerLost("This reward was closed.")
        return getattr(self._made, method)(*args)

    def close(self) -> None:
        """Close the object."""
        if not self._closed:
            self._closed = True
            self._made.close()
