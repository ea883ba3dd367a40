"""The processes of a run: reserves nodes, starts workers, waits for their results, ends them.

Each wait has a deadline. While it waits, the driver checks several times a second whether Ray still
works, whether the user wants to stop, and whether the time is up.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ppo_cli.cluster.ray_session import Session, node_answers
from ppo_cli.cluster.serialise import send_tensors_as_arrays
from ppo_cli.cluster.worker_process import (
    CRASH,
    KILLED,
    THREAD_VARIABLES,
    Failure,
    Outcome,
    Worker,
    find_late_frame,
    last_lines,
)
from ppo_cli.config.schema.run import Transfer
from ppo_cli.errors import Interrupted, UserError, WorkerLost, plural
from ppo_cli.planning.placement import Placement

# Ray's message about a worker that ended by itself.
EXIT = re.compile(r"exits with an exit code (.+?)\.?\s*$", re.MULTILINE)


class WorkerFault(Exception):
    """A bug in a worker; the text is its own traceback, under its role and node."""


@dataclass(frozen=True)
class WorkerHandle:
    """A worker process as the driver sees it; `title` is like "learner rank 1"."""

    title: str
    log: Path
    handle: Any
    node: str = ""
    node_id: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.title} on node {self.node}" if self.node else self.title


@dataclass(frozen=True)
class Halved:
    """A sampler ran out of memory and samples at most `rows` responses at once from now on."""

    sampler: int
    rows: int


@dataclass(frozen=True)
class ExchangePlan:
    """How weights travel, to which samplers, and from which address of the first rank."""

    transfer: Transfer
    samplers: tuple[WorkerHandle, ...]
    workers_each: int
    address: str
    timeout_s: float


COLLECTIVES = "/torch/distributed/"  # where a rank that waits for others is
USE_MEMORY = " Use rollout.weight_transfer=memory."


def unpack_failure(member: WorkerHandle, failure: Failure) -> Exception:
    """Return a user's mistake as it was raised, a fault of its GPU, or the worker's traceback."""
    if failure.pickled is not None:
        error: Exception = pickle.loads(failure.pickled)
        return error
    if failure.device:
        return WorkerLost(f"{member} failed: {failure.device} Its log: {member.log}.")
    return WorkerFault(f"{member} failed:\n{failure.traceback.rstrip()}")


def worker_lost(
    member: WorkerHandle, doing: str, ray_message: str, *, node_lives: bool = True
) -> WorkerLost:
    """The error for a worker whose process is gone; Ray's message sometimes names the cause."""
    if not node_lives:
        return WorkerLost(
            f"Node {member.node} does not answer any more, and {member.title} on it is lost "
            f"(during `{doing}`)."
        )
    # The cause: from Ray's message, from the worker's log, otherwise a kill.
    lines = last_lines(member.log, member.pid)
    if "running low on memory" in ray_message:
        cause = "was ended by Ray, as its node was running out of memory"
    elif any(line.startswith(CRASH) for line in lines):
        cause = "crashed"
    elif match := EXIT.search(ray_message):
        cause = f"ended by itself (exit code {match[1]})"
    else:
        cause = KILLED
    tail = "\n  ".join([f"The last lines of its log, {member.log}:", *lines])
    detail = tail if lines else f"Its log: {member.log} (on that node)."
    return WorkerLost(f"{_capital(str(member))} {cause} during `{doing}`. {detail}")


def no_answer(
    members: list[WorkerHandle], doing: str, seconds: float, *, logs_frame: bool = False
) -> WorkerLost:
    """The error for workers that run and do not answer; it names those that others wait for.

    `logs_frame` says that a running worker has logged where it is.
    """
    frames = {member: find_late_frame(member.log, member.pid) for member in members}
    waiting = [member for member in members if COLLECTIVES in frames[member]]
    silent = [member for member in members if member not in waiting] or members
    names = []
    for member in silent:
        where = f" (at {frames[member]})" if frames[member] else ""
        if logs_frame and not where and member.pid and member.log.exists():
            where = f" (process {member.pid}, which seems to be stopped: it logs nothing any more)"
        names.append(f"{member}{where}")
    verb = "has" if len(silent) == 1 else "have"
    others = ""
    if len(silent) < len(members):
        others = f" (waiting in a collective: {', '.join(map(str, waiting))})"
    logs = ", ".join(str(member.log) for member in members)
    return WorkerLost(
        f"{_capital(', '.join(names))} {verb} not answered `{doing}` for {seconds:g} s{others}; "
        f"{'its log' if len(members) == 1 else 'their logs'}: {logs}. If the work is only slow, "
        "raise --worker_timeout."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


TICK_S = 0.25
# A fetch that is given up starts again: long enough for large weights from another node.
FETCH_S = 30.0
# A rank that fails because its neighbour died may report before the death is known.
GRACE_S = 3.0
# During these calls workers wait for each other, so an error may come from another's death.
EXCHANGES = ("connect", "send_weights")
NODE_OR_RAY_S = 1.0


@dataclass(frozen=True)
class Call:
    """A call of a worker's method; `ref` is a Ray reference, or a stream of them."""

    member: WorkerHandle
    doing: str
    ref: Any


@dataclass(frozen=True)
class Waits:
    """Waits for calls: their deadline, and what ends a wait early."""

    timeout_s: float
    trouble: Callable[[], str | None]
    stop_requested: Callable[[], str | None] = field(default=lambda: None)

    def collect(
        self, calls: Sequence[Call], seconds: float | None = None, *, may_stop: bool = False
    ) -> list[Any]:
        """Return the results of the calls in their order; raises the first error at once.

        It does not wait for the other calls then: ranks that lost another rank never answer. Raises
        WorkerLost after `seconds` (None: `timeout_s`), and Interrupted if `may_stop` and the user
        wants to stop.
        """
        seconds = seconds or self.timeout_s
        # Results come in any order; each is opened as soon as it is there.
        deadline = time.monotonic() + seconds
        pending = {call.ref: call for call in calls}
        values: dict[Any, Any] = {}
        while pending:
            ready = self._first(pending, deadline, seconds, may_stop)
            call = pending.pop(ready)
            values[ready] = self._open(call, ready, deadline, seconds, list(pending.values()))
        return [values[call.ref] for call in calls]

    def stream(self, calls: Sequence[Call]) -> Iterator[Any]:
        """Yield the results of streaming calls as they come; the deadline is for each pause."""
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
        """Return the reference of a call that has ended.

        Raises WorkerLost after the deadline, and Interrupted if `may_stop` and the user wants to
        stop.
        """
        while True:
            self.check(may_stop=may_stop)
            # Only whether one has ended: its value, which may be large, is fetched by `_fetch`.
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=TICK_S, fetch_local=False)
            if ready:
                return ready[0]
            if time.monotonic() > deadline:
                calls = list(pending.values())
                members = [call.member for call in calls]
                late = seconds >= self.timeout_s
                raise no_answer(members, calls[0].doing, seconds, logs_frame=late)

    def check(self, *, may_stop: bool = False) -> None:
        """Raise when Ray is gone, or the user wants to stop and may."""
        if trouble := self.trouble():
            raise WorkerLost(trouble)
        if may_stop and (stop := self.stop_requested()):
            raise Interrupted(f"Stopped while starting ({stop}).")

    def _open(
        self, call: Call, ref: Any, deadline: float, seconds: float, others: list[Call]
    ) -> Any:
        """Return the value of a call that has ended, or raise its error.

        An error that the death of another worker may have caused is replaced by that death.
        """
        outcome = self._fetch(call, ref, deadline, seconds)
        if outcome.failure is None:
            return outcome.value
        error = unpack_failure(call.member, outcome.failure)
        if not isinstance(error, UserError) or call.doing in EXCHANGES:
            self._look_for_dead(others)
        raise error

    def _fetch(self, call: Call, ref: Any, deadline: float, seconds: float) -> Outcome:
        """Return the outcome of a call that has ended.

        Raises WorkerLost if its worker has died, or if the outcome does not arrive before the
        deadline.
        """
        while True:
            try:
                outcome: Outcome = ray.get(ref, timeout=FETCH_S)
                return outcome
            except GetTimeoutError:
                self.check()
                if time.monotonic() > deadline:
                    raise no_answer([call.member], call.doing, seconds) from None
            except RayError as error:
                raise self._lost(call, error) from None

    def _look_for_dead(self, others: list[Call]) -> None:
        """Raise WorkerLost if one of these workers died, which would explain the error."""
        # Ray reports a death later than other workers report the broken connection.
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
            time.sleep(NODE_OR_RAY_S)  # Ray as a whole may be lost, not only that node
            self.check()
        return worker_lost(call.member, call.doing, str(error), node_lives=lives)


TELL_EVERY_S = 10.0


def reserve_nodes(
    count: int, gpus_each: int, waits: Waits, timeout_s: float, tell: Callable[[str], None]
) -> PlacementGroup:
    """Reserve `gpus_each` GPUs on each of `count` nodes; bundle i is node i.

    Raises WorkerLost when they are not there in time, Interrupted when the user stops.
    """
    # One bundle a node: `STRICT_SPREAD` puts each on another machine.
    bundles: list[dict[str, float]] = []
    for _ in range(count):
        bundles.append({"CPU": 1.0} | ({"GPU": float(gpus_each)} if gpus_each else {}))
    if home := _home(gpus_each):
        bundles[0] |= {f"node:{home}": 0.001}  # the first node is this one: it has the run folder
    group = placement_group(bundles, strategy="STRICT_SPREAD" if count > 1 else "PACK")
    ready, started, reported_at = group.ready(), time.monotonic(), time.monotonic()
    try:
        while not ray.wait([ready], timeout=TICK_S)[0]:
            waits.check(may_stop=True)
            now = time.monotonic()
            if now - started > timeout_s:
                raise WorkerLost(
                    f"After {timeout_s:g} s still {describe_wait(count, gpus_each)}. Start the "
                    "missing nodes, or ask for fewer (--nnodes, --n_gpus); --node_timeout sets "
                    "how long to wait."
                )
            if now - reported_at > TELL_EVERY_S:
                tell(describe_wait(count, gpus_each))
                reported_at = now
    except BaseException:
        # A Ray that is gone cannot remove the group, and would be waited for.
        if waits.trouble() is None:
            remove_placement_group(group)
        raise
    return group


def describe_wait(count: int, gpus_each: int) -> str:
    """Describe which nodes are requested and which the cluster has."""
    request = plural(count, "node") + f" with {plural(gpus_each, 'GPU')}" * bool(gpus_each)
    rooms = [_resources(node) for node in ray.nodes() if node["Alive"]]
    fit = sum(1 for room in rooms if room.get("GPU", 0) >= gpus_each)
    has = f"the cluster has {fit}"
    if fit < len(rooms):
        # The GPUs of each node show which ones are too small.
        counts = ", ".join(f"{room.get('GPU', 0):g}" for room in rooms)
        has += f" (GPUs of its {len(rooms)} nodes: {counts})"
    elif fit >= count:
        has += ", which another run may use"
    return f"waiting for {request}; {has}"


def _home(gpus_each: int) -> str | None:
    """The address of this node, if it has enough GPUs to take part."""
    local_id = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == local_id and _resources(node).get("GPU", 0) >= gpus_each:
            return str(node["NodeManagerAddress"])
    return None


def _resources(node: dict[str, Any]) -> dict[str, float]:
    return dict(node["Resources"])


FAREWELL_S = 10.0
MOMENT_S = 0.1  # enough to learn what has already ended


@dataclass(frozen=True)
class WorkerSlot:
    """Where a worker runs: the index of its node, and the GPUs that it sees there."""

    title: str
    node: int = 0
    gpus: tuple[int, ...] = ()

    @property
    def log_name(self) -> str:
        """`learner rank 1` writes into learner-1.log."""
        return f"{self.title.replace(' rank ', '-').replace(' ', '-').replace('/', '-')}.log"


class Cluster:
    """Ray, the nodes of a run, and the workers on them."""

    def __init__(
        self,
        placement: Placement,
        logs: Path,
        *,
        address: str,
        worker_timeout: float,
        node_timeout: float,
        threads: int | None = None,
        tell: Callable[[str], None] = lambda text: None,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._placement = placement
        self._threads = threads  # of a worker; None: one, or its GPUs' share of the cores
        self._logs = logs.absolute()
        self._node_timeout = node_timeout
        self._group: PlacementGroup | None = None
        self._members: list[WorkerHandle] = []
        self._session: Session | None = Session(address, self._logs)
        send_tensors_as_arrays()
        self.waits = Waits(worker_timeout, self._session.failure, stop_requested)
        try:
            self._group = reserve_nodes(
                placement.nodes, placement.devices_per_node, self.waits, node_timeout, tell
            )
        except BaseException:
            self.close()
            raise

    def seat(self, title: str, devices: Sequence[int], index: int = 0, of: int = 1) -> WorkerSlot:
        """Choose the node of a worker: that of its GPUs, or, on the CPU, an even share of them."""
        per_node = self._placement.devices_per_node
        if not per_node or not devices:
            return WorkerSlot(title, index * self._placement.nodes // of)
        node = self._placement.node_of(devices[0]) or 0
        return WorkerSlot(title, node, tuple(device % per_node for device in devices))

    def start(self, seats: Sequence[WorkerSlot]) -> list[WorkerHandle]:
        """Start a process for each slot, and wait until all have reported their node."""
        # Actors first: their processes start at the same time.
        fresh = [self._create_worker(seat) for seat in seats]
        self._members += fresh
        greeted = self.waits.collect(
            [
                self.ask(
                    member,
                    "start",
                    "arrive",
                    str(member.log),
                    seat.gpus,
                    self._threads,
                    self.waits.timeout_s,
                )
                for member, seat in zip(fresh, seats, strict=True)
            ],
            self._node_timeout,
            may_stop=True,
        )
        started = [replace(member, **place) for member, place in zip(fresh, greeted, strict=True)]
        self._members = [m for m in self._members if m not in fresh] + started
        return started

    def share(self, value: Any) -> Any:
        """Store a value once for all workers; returns the reference to pass to them."""
        self.waits.check()
        try:
            # Ray may have died since the check, which then gives the better error.
            return ray.put(value)
        except Exception:
            self.waits.check()  # a Ray that died meanwhile
            raise

    def ask(self, member: WorkerHandle, name: str, method: str = "call", *args: Any) -> Call:
        """Call a worker without waiting; `waits` waits for the result.

        `method` is one of `Worker`: "call" and "stream" call the method `name` of its object.
        """
        arguments = (name, *args) if method in ("call", "stream") else args
        remote = getattr(member.handle, method)
        if method == "stream":
            remote = remote.options(num_returns="streaming")
        return Call(member, name, remote.remote(*arguments))

    def call(
        self, members: Sequence[WorkerHandle], name: str, *args: Any, seconds: float | None = None
    ) -> list[Any]:
        """Call the same method of several workers' objects and wait for the results."""
        return self.waits.collect([self.ask(m, name, "call", *args) for m in members], seconds)

    def host(
        self, factory: Callable[[], Any], *, role: str, devices: Sequence[int] = ()
    ) -> WorkerHandle:
        """Host any object in a separate process; `factory` is pickled."""
        if self._session is None:
            raise WorkerLost(f"The {role} cannot start: its cluster has ended.")
        (member,) = self.start([self.seat(role, devices)])
        self.waits.collect([self.ask(member, "start", "build", factory)], may_stop=True)
        return member

    def dismiss(self, member: WorkerHandle) -> None:
        """End a worker. Safe to call twice, and after `close`."""
        # Compared by handle: `start` replaces a member once it has reported its node.
        if any(m.handle is member.handle for m in self._members):
            self._members = [m for m in self._members if m.handle is not member.handle]
            ray.kill(member.handle)

    def close(self, polite: Sequence[WorkerHandle] = ()) -> None:
        """End all workers and disconnect from Ray. Safe to call twice.

        The objects of `polite` workers are closed first: they may have child processes.
        """
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if session.failure() is None:
                self.end_workers(polite)
                if self._group is not None:
                    with suppress(Exception):
                        remove_placement_group(self._group)
        finally:
            self._members.clear()
            session.close()

    def end_workers(self, polite: Sequence[WorkerHandle] = ()) -> None:
        """End all workers and wait until they are gone; the nodes stay reserved."""
        # Errors are ignored: the workers end anyway, and their logs have the reason. The others end
        # first, because a polite one may be waiting for them.
        deadline = time.monotonic() + FAREWELL_S
        handles = [member.handle for member in polite]
        ends = self._end([m for m in self._members if m.handle not in handles])
        for call in [self.ask(member, "close") for member in polite]:
            with suppress(Exception):
                self.waits.collect([call], max(MOMENT_S, deadline - time.monotonic()))
        ends += self._end(polite)
        with suppress(Exception):
            # Devices are free for the next engine only when their processes are gone.
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=FAREWELL_S)
        self._members.clear()

    def _end(self, members: Sequence[WorkerHandle]) -> list[Any]:
        """End these workers; returns references that are ready once they are gone."""
        ends: list[Any] = []
        for member in members:
            with suppress(Exception):
                ends.append(self.ask(member, "end", "run", bool).ref)
                ray.kill(member.handle)
        return ends

    def _create_worker(self, slot: WorkerSlot) -> WorkerHandle:
        """Create the Ray actor of a worker on the slot's node; does not wait until it runs."""
        # Ray hides all GPUs from a worker that requests none; `Worker` selects its GPUs itself.
        variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
        if not slot.gpus:
            # More threads than cores in all processes together would slow each other down.
            variables |= dict.fromkeys(THREAD_VARIABLES, str(self._threads or 1))
        # The bundle index is the number of the node in the placement group.
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=slot.node
        )
        log = self._logs / slot.log_name
        actor = ray.remote(Worker).options(
            num_cpus=0, num_gpus=0, max_restarts=0, max_task_retries=0,
            scheduling_strategy=strategy, runtime_env={"env_vars": variables},
        )  # fmt: skip
        return WorkerHandle(slot.title, log, actor.remote())
