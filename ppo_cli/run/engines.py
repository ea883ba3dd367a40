"""Engines of a run: the kind that the config asks for, and restarts after a lost worker.

An engine is made when it is first needed. After a loss, `renew` gives a new one and the run
continues from its last checkpoint. A reward model that lives in the cluster is hosted by the
current engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any

from ppo_cli.config.derived import engine_name
from ppo_cli.config.placement import Placement, placement_of
from ppo_cli.config.schema import Config
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.engine.async_rollout import AheadEngine
from ppo_cli.engine.base import Engine, Sampling
from ppo_cli.engine.local import LocalEngine
from ppo_cli.errors import Interrupted, WorkerLost
from ppo_cli.loop import load, run
from ppo_cli.records import Prompt
from ppo_cli.rewards.base import Host
from ppo_cli.train.state import Job, RunState
from ppo_cli.train.steps import train_sampling

Build = Callable[[], Engine]


def run_with_restarts(
    job: Job,
    begin: Callable[[Job], RunState | None],
    *,
    build: Build,
    most: int,
    gather: Callable[[], None] = lambda: None,
    origin: Path | None = None,
) -> None:
    """Run to the end, with at most `most` new starts.

    `begin` gives the state to start from, None when there is nothing to do. Once a lost engine
    is closed, `gather` waits until all nodes are there again, and `build` makes another; both
    may raise WorkerLost. Without a checkpoint of its own the run begins again at `origin`, the
    one that it started from, or at the first step. Raises Interrupted when there are too many
    losses, or when what was lost does not come back.
    """
    begun = job.order.state_dict(), job.reward.state_dict()
    lost: WorkerLost | None = None
    for restarts in range(most + 1):
        try:
            if lost is None:
                state = begin(job)
            else:
                newest = job.store.newest() or origin
                _tell(job, lost, f"({restarts} of {most})", newest)
                _leave(job)
                job = replace(job, engine=_make_another(job, gather, build))
                state = _begin_again(job, begun) if newest is None else load(job, newest)
            return None if state is None else run(job, state)
        except WorkerLost as error:
            lost = error
    more = f"That is one loss more than --max_restarts {most} allows."
    raise _given_up(job, _then(lost, more)) from lost


def start_engine(
    build: Build,
    *,
    most: int,
    patience_s: float,
    gather: Callable[[], None],
    tell: Callable[[str], None],
    resume_command: str,
) -> Engine:
    """Make the first engine; a worker that dies meanwhile costs another start, as later.

    What takes longer than `patience_s` to fail is not tried again: it waited for something
    that does not come.
    """
    for restarts in range(most + 1):
        started = time.monotonic()
        try:
            return build()
        except Interrupted as stop:
            raise Interrupted(f"{stop} Start again with: {resume_command}") from stop
        except WorkerLost as lost:
            if restarts == most or time.monotonic() - started > patience_s:
                raise Interrupted(_then(lost, f"Start again with: {resume_command}")) from lost
            tell(_then(lost, f"Starting again ({restarts + 1} of {most})."))
            gather()
    raise AssertionError("every turn ends above")


def _tell(job: Job, lost: WorkerLost, count: str, newest: Path | None) -> None:
    where = f"{newest.name}, the last checkpoint" if newest else "the first step"
    job.tracker.screen.health(_then(lost, f"Starting again {count} from {where}."))


def _then(lost: WorkerLost | None, more: str) -> str:
    """What was lost, and what comes of it: on a line of its own after lines of a log."""
    text = str(lost)
    return f"{text}\n{more}" if "\n" in text else f"{text} {more}"


def _make_another(job: Job, gather: Callable[[], None], build: Build) -> Engine:
    try:
        gather()
    except (WorkerLost, Interrupted) as gone:
        raise _given_up(job, str(gone)) from gone
    try:
        return build()
    except Interrupted as stop:
        raise _given_up(job, str(stop)) from stop


def _leave(job: Job) -> None:
    """Close the engine, and wait for the scores that are still pending.

    They are paid for and wait in the judge's cache; and they must not reach the statistics of
    a reward after those were put back.
    """
    job.engine.close()
    job.reward.settle("train")
    pending: list[Future[Any]] = [f for f in job.in_flight if not f.done()]
    noted = False
    while pending and not job.stop_requested():
        wait(pending, timeout=0.5)
        pending = [f for f in pending if not f.done()]
        still = job.reward.waiting_for() if pending and not noted else None
        if still is not None:
            job.tracker.screen.health(still)
            noted = True
    job.in_flight.clear()
    job.reward.measure()  # counts of a step that is taken again


def _begin_again(job: Job, begun: tuple[dict[str, Any], dict[str, Any]]) -> RunState:
    job.order.load_state_dict(begun[0])
    job.reward.load_state_dict(begun[1])
    job.tracker.resume_at(0)
    return RunState(kl_coef=job.config.algorithm.kl_ctrl.kl_coef)


def _given_up(job: Job, reason: str) -> Interrupted:
    saved = job.store.newest_step()
    kept = f"Step {saved} of {job.total_steps} is saved." if saved else "Nothing is saved yet."
    return Interrupted(f"{reason} {kept} Go on with: {job.resume_command}")


@dataclass
class Engines:
    """Makes the engine of a run, and makes it anew when it was lost."""

    config: Config
    tokenizer: Any
    prompts: Sequence[Prompt]
    order: PromptOrder
    total_steps: int
    logs: Path
    tell: Callable[[str], None]
    stop_requested: Callable[[], str | None]
    # The Ray cluster that several nodes have formed; None starts one where it is needed.
    address: str | None = None
    _engine: Engine | None = field(default=None, init=False)
    _base: Any = field(default=None, init=False)  # the engine without what runs ahead
    # Rewards ask for their hosts in threads of their own, perhaps while an engine is made anew.
    _lock: RLock = field(default_factory=RLock, init=False)

    def get(self) -> Engine:
        """The engine; made at the first call."""
        with self._lock:
            if self._engine is None:
                self.tell(f"Loading {self.config.model.path}")
                self._base = self._make()
                self._engine = self._ahead(self._base)
            return self._engine

    def renew(self) -> Engine:
        """Another engine in the place of one that was lost."""
        with self._lock:
            self.close()
            return self.get()

    def close(self) -> None:
        """Close the engine, if there is one."""
        engine, self._engine, self._base = self._engine, None, None
        if engine is not None:
            engine.close()

    def hosts_rewards(self) -> bool:
        """Whether reward models live in workers of their own."""
        return engine_name(self.config) == "ray"

    def host(self, factory: Callable[[], Any], name: str) -> Host:
        """Let the cluster make an object and keep it."""
        with self._lock:
            self.get()
            devices = self._placement().reward
            hosted: Host = self._base.host(factory, role=f"reward {name}", devices=devices)
            return hosted

    def _placement(self) -> Placement:
        return placement_of(self.config)

    def _make(self) -> Engine:
        if engine_name(self.config) == "local":
            return LocalEngine(
                self.config, self.tokenizer, total_steps=self.total_steps, tell=self.tell,
                profiles=self.logs.absolute().parent / "profile",
            )  # fmt: skip
        from ppo_cli.engine.cluster.remote import ApartEngine

        engine = ApartEngine(
            self.config,
            self.tokenizer,
            total_steps=self.total_steps,
            placement=self._placement(),
            logs=self.logs,
            address=self.address,
            tell=self.tell,
            stop_requested=self.stop_requested,
        )
        if engine.weight_transfer == "memory":  # another start need not try what failed here
            rollout = self.config.rollout.model_copy(update={"weight_transfer": "memory"})
            self.config = self.config.model_copy(update={"rollout": rollout})
        return engine

    def _ahead(self, engine: Engine) -> Engine:
        steps = self.config.trainer.async_steps
        return AheadEngine(engine, self._upcoming, steps) if steps else engine

    def _upcoming(self, ahead: int) -> tuple[Sequence[Prompt], Sampling] | None:
        """Prompts and sampling of a training step that is still to come."""
        step = self.order.taken + ahead
        if step > self.total_steps:
            return None
        chosen = [self.prompts[i] for i in self.order.peek(ahead)]
        return chosen, train_sampling(self.config, step)
