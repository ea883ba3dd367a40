"""Checkpoints of a run: what they contain, and how a run that stops early is left and resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_cli.errors import Interrupted, plural
from ppo_cli.report.metrics import extend_budget, is_pretrained
from ppo_cli.run_folder.restraints import undo_restraints
from ppo_cli.step.state import Job, RunState


@dataclass(frozen=True)
class Snapshot:
    """What sampling changes, as it was before a step, and the clock at that time."""

    step: int
    order: dict[str, Any]
    reward: dict[str, Any]
    started: float

    @classmethod
    def take(cls, job: Job, state: RunState) -> Snapshot:
        """Remember the state before a step."""
        order, reward = job.order.state_dict(), job.reward.state_dict()
        return cls(state.step, order, reward, time.perf_counter())

    def restore(self, job: Job, state: RunState) -> None:
        """Undo a step that was not trained."""
        state.step = self.step
        job.order.load_state_dict(self.order)
        job.reward.load_state_dict(self.reward)


def save(job: Job, state: RunState, *, last: bool) -> None:
    """Start a checkpoint of engine, order, reward and state (with what is sampled ahead).

    It is written in the background.

    With `last`, no training follows, so the engine need not copy its weights first.
    """

    def fill(folder: Path) -> Future[None]:
        state.write(folder, order=job.order, reward=job.reward, fingerprint=job.fingerprint)
        return job.engine.save(folder, last=last)

    with job.tracker.phase("save"):
        job.store.begin_save(state.step, fill, best=state.is_best)


def wait_for_save(job: Job) -> None:
    """Wait until the last checkpoint is complete on disk; raises its error."""
    if job.store.busy:
        with job.tracker.phase("save"):
            job.store.wait_for_save()
    # Raises the error of a checkpoint that ended earlier.
    job.store.wait_for_save()


def load(job: Job, folder: Path) -> RunState:
    """Restore everything that `save` wrote, and delete logs and checkpoints of later steps."""
    job.store.wait_for_save()
    state = RunState.read(folder, order=job.order, reward=job.reward)
    if job.config.algorithm.kl_ctrl.type == "fixed":  # the setting may have changed since
        state.kl_coef = job.config.algorithm.kl_ctrl.kl_coef
    job.engine.load(folder)
    job.tracker.resume_at(state.step, state.pretraining)
    job.store.delete_after(state.step)
    undo_restraints(job.store.directory.parent, state.step)
    return state


def save_last_step(job: Job, state: RunState) -> None:
    """Save the last trained step unless its checkpoint exists, and wait until it is complete."""
    wait_for_save(job)
    if job.store.newest_step() != state.step:
        save(job, state, last=True)
        wait_for_save(job)


@contextmanager
def undone_on_stop(job: Job, state: RunState, before: Snapshot) -> Iterator[None]:
    """Undo the step and save the run if the block is interrupted (judge down, budget used up).

    The block ends before the weights change.
    """
    try:
        yield
    except Interrupted as stop:
        before.restore(job, state)
        save_last_step(job, state)
        raise make_resumable(job, state, stop) from stop


@contextmanager
def saved_on_stop(job: Job, state: RunState) -> Iterator[None]:
    """Save the run if the block, a validation and its report, is interrupted: both are repeated."""
    try:
        yield
    except Interrupted as stop:
        save(job, state, last=True)
        raise make_resumable(job, state, stop) from stop


def make_resumable(job: Job, state: RunState, stop: Interrupted) -> Interrupted:
    """Wait for the checkpoint; return the error with what is saved and how to resume."""
    wait_for_save(job)
    saved = f"Everything up to step {state.step} of {job.total_steps} is saved."
    if state.step == 0 and not is_pretrained(job.config.pretraining, state.pretraining):
        saved = f"{plural(len(state.pretraining), 'step')} of critic pretraining are saved."
    if state.unfinished is not None:  # not yet on the screen or in the metrics
        saved = f"Step {state.step} of {job.total_steps} is trained and saved, but not validated."
    history, rows = job.tracker.history, len(job.val_prompts)
    line = extend_budget(job.resume_command, stop, job.config, history, job.total_steps, rows)
    return Interrupted(f"{stop} {saved} Go on with: {line}")
