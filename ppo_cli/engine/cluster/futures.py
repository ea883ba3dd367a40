"""Waits for workers: each wait has a deadline, an owner, and one error at its end.

While it waits, the driver checks several times a second: whether Ray still lives, whether the
user wants to stop, whether time is up.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ppo_cli.engine.cluster.ray_session import node_answers
from ppo_cli.engine.cluster.worker_process import CRASH, KILLED, Failure, Outcome, last_lines
from ppo_cli.errors import Interrupted, PpoError, WorkerLost

EXIT = re.compile(r"exits with an exit code (.+?)\.?\s*$", re.MULTILINE)


class WorkerFault(Exception):
    """A bug in a worker; the text is its own traceback, under its role and node."""


@dataclass(frozen=True)
class Member:
    """A worker as the driver knows it: `title` is like "learner rank 1"."""

    title: str
    log: Path
    handle: Any
    node: str = ""
    node_id: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.title} on node {self.node}" if self.node else self.title


def reported(member: Member, failure: Failure) -> Exception:
    """The user's mistake as it was raised; anything else as a bug with the worker's traceback."""
    if failure.pickled is not None:
        error: Exception = pickle.loads(failure.pickled)
        return error
    return WorkerFault(f"{member} failed:\n{failure.traceback.rstrip()}")


def lost(member: Member, doing: str, words: str, *, node_lives: bool = True) -> WorkerLost:
    """A worker whose process is gone; `words` are Ray's, which name the cause now and then."""
    if not node_lives:
        return WorkerLost(
            f"Node {member.node} does not answer any more, and {member.title} on it is lost "
            f"(during `{doing}`)."
        )
    lines = last_lines(member.log, member.pid)
    if "running low on memory" in words:
        cause = "was ended by Ray, as its node was running out of memory"
    elif any(line.startswith(CRASH) for line in lines):
        cause = "crashed"
    elif found := EXIT.search(words):
        cause = f"ended by itself (exit code {found[1]})"
    else:
        cause = KILLED
    tail = "\n  ".join([f"The last lines of its log, {member.log}:", *lines])
    detail = tail if lines else f"Its log: {member.log} (on that node)."
    return WorkerLost(f"{_capital(str(member))} {cause} during `{doing}`. {detail}")


def late(members: list[Member], doing: str, seconds: float) -> WorkerLost:
    """Workers that live and do not answer."""
    names = ", ".join(str(member) for member in members)
    logs = ", ".join(str(member.log) for member in members)
    one = len(members) == 1
    return WorkerLost(
        f"{_capital(names)} {'has' if one else 'have'} not answered `{doing}` for {seconds:g} s; "
        f"{'its log' if one else 'their logs'}: {logs}. If the work is only slow, raise "
        "--worker_timeout."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


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
