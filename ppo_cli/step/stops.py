"""Why a run stops before its last step, other than by a signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_cli.config.schema.run import Config
from ppo_cli.errors import Interrupted, WentBack
from ppo_cli.paths import user_path
from ppo_cli.report.hacking import find_hacking, find_onset, find_rise, name_checkpoint_before
from ppo_cli.report.metrics import read_limits
from ppo_cli.run_folder.restraints import Restraint, go_back, read_restraints, write_restraints
from ppo_cli.step.saving import make_resumable
from ppo_cli.step.state import Job, RunState

MAX_UNSCORED_STEPS = 3  # steps in a row without any score, after which the run stops
MAX_RESTRAINTS = 2  # returns to an earlier checkpoint, after which the run stops
KL_FACTOR = 10  # by which a restraint raises the weight of the KL at least
MAX_KL_FACTOR = 100  # and at most: nothing is learned at an extreme weight
KL_COST = 2  # times the gain of the exploit, that its KL costs at the new weight at least


def find_stop_reason(job: Job, state: RunState) -> str | None:
    """Return why to stop after this step: a signal, a reward that fails, an exploit; else None.

    An exploit may also raise WentBack. It comes first: once the run is saved and resumed, its alarm
    does not begin again.
    """
    return _act_on_alarm(job, state) or job.stop_requested() or unscored_reason(state)


def unscored_reason(state: RunState) -> str | None:
    """Return why to stop a run whose reward fails for every response; None to continue."""
    if state.unscored_steps < MAX_UNSCORED_STEPS:
        return None
    return f"no response of {state.unscored_steps} steps in a row got a score; correct the reward"


def _act_on_alarm(job: Job, state: RunState) -> str | None:
    """Return why to stop a run whose alarm has just begun; None unless it was asked to.

    A resumed run goes on: its alarm began before. Raises WentBack if the run is to be restrained.
    """
    trainer, run_dir = job.config.trainer, job.store.directory.parent
    if trainer.on_hacking == "warn":
        return None
    limits = read_limits(run_dir, job.config)
    steps = [line for line in job.tracker.history if line["step"] > 0]
    alarm = find_hacking(steps, limits)
    if not alarm or find_hacking(steps[:-1], limits):
        return None
    onset = find_onset(steps, limits)
    if trainer.on_hacking == "stop":
        return f"--on_hacking stop; {name_checkpoint_before(onset, limits)}"
    restraints = read_restraints(run_dir)
    # What is exploited again has begun to be so after the first return, perhaps slowly.
    to = min([_find_return(job, onset), *(r.to for r in restraints if r.to)])
    is_last = len(restraints) >= MAX_RESTRAINTS
    # A fork has no start of its own to go back to.
    if not to and (is_last or steps[0]["step"] > 1):
        return f"--on_hacking restrain; no checkpoint is from step {onset} or before"
    changes = {} if is_last else _raise_kl(job.config, job.store.directory, steps, to)
    restraint = Restraint(int(steps[-1]["step"]), to, changes, alarm, dict(job.fingerprint))
    # From here on the run has gone back, also if it is killed now.
    write_restraints(run_dir, [*restraints, restraint])
    if not is_last:
        raise WentBack(f"Going {restraint.describe()} ({len(restraints) + 1} of {MAX_RESTRAINTS}).")
    evidence = go_back(run_dir, job.store.delete_after)
    job.tracker.resume_at(to, state.pretraining)
    state.step = to
    message = (
        f"The reward is exploited again after {MAX_RESTRAINTS} restraints: the run went back from "
        f"steps that are in {evidence}."
    )
    raise make_resumable(job, state, Interrupted(message))


def _find_return(job: Job, onset: int) -> int:
    """Return the last checkpoint until `onset`; 0 for the start.

    Steps that a stop or a new best has saved do not count: not every run of these settings has
    them.
    """
    job.store.wait_for_save()
    every = job.config.trainer.save_freq
    return max((s for s in job.store.steps() if s <= onset and is_due(s, every)), default=0)


def _raise_kl(
    config: Config, checkpoints: Path, steps: Sequence[Mapping[str, Any]], to: int
) -> dict[str, tuple[float, float]]:
    """Return the KL's weights before and from now on.

    A response's KL since step `to` then costs more than the reward has risen, within bounds.
    """
    before = next((line.get("kl_divergence") for line in steps if line["step"] == to), None)
    # The KL since a return is to one of the checkpoints, not to the model of the steps before it.
    if checkpoints.resolve() in user_path(config.ref.path).resolve().parents:
        before = 0.0
    kl, length = (steps[-1].get(key) for key in ("kl_divergence", "response_length_mean"))
    cost = max((kl or 0.0) - (before or 0.0), 0.0) * (length or 0.0)
    dear = float(f"{KL_COST * find_rise(steps)[1] / cost:.3g}") if cost > 0 else 0.0
    return {
        key: (old, min(max(KL_FACTOR * old, dear), MAX_KL_FACTOR * old))
        for key, old in config.kl_weights.items()
    }


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
