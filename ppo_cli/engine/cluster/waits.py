"""All waiting for workers: each wait has a deadline, an owner and an end.

While it waits, the driver looks up several times a second: whether Ray still lives, whether the
user wants to stop, whether time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ppo_cli.engine.cluster.failures import Member, late, lost, reported
from ppo_cli.engine.cluster.session import node_answers
from ppo_cli.engine.cluster.worker import Outcome
from ppo_cli.errors import Interrupted, PpoError, WorkerLost

TICK_S = 0.25
# A fetch that is given up starts anew: long enough for large weights from another node.
FETCH_S = 30.0
# A rank that fails because its neighbour died may report before the death is known.
GRACE_S = 3.0
# In these a rank may fail because another one has gone, and call it a mistake.
EXCHANGES = ("connect", "send_weights")
NODE_OR_RAY_S = 1.0


@dataclass(frozen=True)
class Call:
    """Something that a worker was asked to do; `ref` is a reference or a stream of them."""

    member: Member
    doing: str
    ref: Any


@dataclass(frozen=True)
class Waits:
    """How long, and for what reasons, the driver waits."""

    timeout_s: float
    trouble: Callable[[], str | None]
    stop_requested: Callable[[], str | None] = field(default=lambda: None)

    def collect(
        self, calls: Sequence[Call], seconds: float | None = None, *, may_stop: bool = False
    ) -> list[Any]:
        """Return what the calls gave, in their order; raises what the first of them raised.

        Nobody waits for the others then: ranks that lost one of theirs never answer.
        """
        seconds = seconds or self.timeout_s
        deadline = time.monotonic() + seconds
        pending = {call.ref: call for call in calls}
        found: dict[Any, Any] = {}
        while pending:
            ready = self._first(pending, deadline, seconds, may_stop)
            call = pending.pop(ready)
            found[ready] = self._open(call, ready, deadline, seconds, list(pending.values()))
        return [found[call.ref] for call in calls]

    def stream(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Yield what streaming calls give, as it comes; the deadline is for each silence."""
        pending = {call.ref: call for call in calls}
        while pending:
            deadline = time.monotonic() + self.timeout_s
            ready = self._first(pending, deadline, self.timeout_s, may_stop=False)
            call = pending[ready]
            try:
                ref = next(ready)
            except StopIteration:
                del pending[ready]
                continue
            others = [other for other in pending.values() if other is not call]
            yield self._open(call, ref, deadline, self.timeout_s, others)

    def _first(
        self, pending: dict[Any, Call], deadline: float, seconds: float, may_stop: bool
    ) -> Any:
        while True:
            self.check(may_stop=may_stop)
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=TICK_S, fetch_local=False)
            if ready:
                return ready[0]
            if time.monotonic() > deadline:
                calls = list(pending.values())
                raise late([call.member for call in calls], calls[0].doing, seconds)

    def check(self, *, may_stop: bool = False) -> None:
        """Raise when Ray is gone, or the user wants to stop and may."""
        if trouble := self.trouble():
            raise WorkerLost(trouble)
        if may_stop and (stop := self.stop_requested()):
            raise Interrupted(f"Stopped while starting ({stop}).")

    def _open(
        self, call: Call, ref: Any, deadline: float, seconds: float, others: list[Call]
    ) -> Any:
        outcome = self._fetch(call, ref, deadline, seconds)
        if outcome.failure is None:
            return outcome.value
        error = reported(call.member, outcome.failure)
        if not isinstance(error, PpoError) or call.doing in EXCHANGES:
            self._look_for_dead(others)
        raise error

    def _fetch(self, call: Call, ref: Any, deadline: float, seconds: float) -> Outcome:
        while True:
            try:
                outcome: Outcome = ray.get(ref, timeout=FETCH_S)
                return outcome
            except GetTimeoutError:
                self.check()
                if time.monotonic() > deadline:
                    raise late([call.member], call.doing, seconds) from None
            except RayError as error:
                raise self._lost(call, error) from None

    def _look_for_dead(self, others: list[Call]) -> None:
        """Raise WorkerLost if one of these workers died: then what failed is only an echo."""
        until = time.monotonic() + GRACE_S
        refs = {call.ref: call for call in others}
        while refs and time.monotonic() < until:
            self.check()
            ready, _ = ray.wait(list(refs), num_returns=1, timeout=TICK_S, fetch_local=False)
            for ref in ready:
                call = refs.pop(ref)
                try:
                    ray.get(next(ref) if hasattr(ref, "__next__") else ref, timeout=TICK_S)
                except (GetTimeoutError, StopIteration):
                    continue
                except RayError as error:
                    raise self._lost(call, error) from None

    def _lost(self, call: Call, error: RayError) -> WorkerLost:
        self.check()
        lives = node_answers(call.member.node_id)
        if not lives:
            time.sleep(NODE_OR_RAY_S)  # was it that node, or Ray as a whole?
            self.check()
        return lost(call.member, call.doing, str(error), node_lives=lives)
