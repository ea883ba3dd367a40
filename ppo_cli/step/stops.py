"""Why a run stops before its last step, other than by a signal."""

from __future__ import annotations

from pathlib import Path

from ppo_cli.report.hacking import find_hacking, name_checkpoint_before
from ppo_cli.report.metrics import read_limits
from ppo_cli.step.state import Job, RunState

MAX_UNSCORED_STEPS = 3  # steps in a row without any score, after which the run stops


def find_stop_reason(job: Job, state: RunState) -> str | None:
    """Return why to stop after this step: a signal, a reward that fails, an exploit; else None."""
    return job.stop_requested() or unscored_reason(state) or _hacking_reason(job)


def unscored_reason(state: RunState) -> str | None:
    """Return why to stop a run whose reward fails for every response; None to continue."""
    if state.unscored_steps < MAX_UNSCORED_STEPS:
        return None
    return f"no response of {state.unscored_steps} steps in a row got a score; correct the reward"


def _hacking_reason(job: Job) -> str | None:
    """Return why to stop a run if it was asked to, and its alarm has just begun; else None.

    A resumed run goes on: its alarm began before.
    """
    if not job.config.trainer.stop_on_hacking:
        return None
    limits = read_limits(Path(job.config.trainer.output_dir), job.config)
    steps = [line for line in job.tracker.history if line["step"] > 0]
    if not find_hacking(steps, limits) or find_hacking(steps[:-1], limits):
        return None
    return f"--stop_on_hacking; {name_checkpoint_before(steps, limits)}"


def is_out_of_patience(job: Job, state: RunState) -> bool:
    """Whether `trainer.patience` validations in a row had no new best; says so on the screen."""
    patience = job.config.trainer.patience
    if patience is None or state.stale < patience:
        return False
    job.tracker.screen.note(
        f"Ended at step {state.step}: {state.stale} validations without a new best. To go on, "
        "raise --patience."
    )
    return True


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps happens now; never for -1 and 0."""
    return every > 0 and step % every == 0
