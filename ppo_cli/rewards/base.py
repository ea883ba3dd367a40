"""The one method behind which every reward hides.

`submit` returns at once; the future it returns always resolves to a `Score`, and a failure to
judge is a `Score` whose value is None. The future raises only what must stop the run
(a `PpoError`). Callers may submit from one thread only; the work happens elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from ppo_cli.records import Rollout, Score


class Reward(Protocol):
    """Scores rollouts, one by one, as they finish."""

    name: str

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Start scoring one rollout; never blocks on the answer."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run must remember (JSON-serialisable); {} when nothing."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        ...

    def close(self) -> None:
        """Free processes, threads and connections. Safe to call twice."""
        ...
