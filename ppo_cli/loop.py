"""The training loop: proximal policy optimisation (PPO, Schulman et al. 2017, arXiv 1707.06347).

    ppo train --preset embedded --max_steps 4

`run` is the whole of it. For a caller with its own scores, `run/session.py` calls `begin`, `sample`
and `learn` itself. `step/` has the stages; `run/assemble.py` builds the `Job`.
"""

from __future__ import annotations

import time

from ppo_cli.errors import Interrupted
from ppo_cli.report.metrics import score_metrics, staleness_metrics
from ppo_cli.signals import note_end_of_work
from ppo_cli.step.checks import check_reward
from ppo_cli.step.pretraining import pretrain_critic
from ppo_cli.step.sampling import (
    StepSample,
    leave_overdue_step,
    sample_references,
    sample_step,
    validate,
)
from ppo_cli.step.saving import (
    Snapshot,
    make_resumable,
    save,
    saved_on_stop,
    undone_on_stop,
    wait_for_save,
)
from ppo_cli.step.state import Job, RunState
from ppo_cli.step.stops import find_stop_reason, is_due, is_out_of_patience
from ppo_cli.step.token_details import list_token_details
from ppo_cli.step.update import prepare_batch, update


def run(job: Job, state: RunState) -> None:
    """Train from `state` to the last step; raises Interrupted if the run stops early."""
    with job.store.open():
        over = begin(job, state)
        while not over:
            before = Snapshot.take(job, state)
            step_sample = sample(job, state, before)
            over = learn(job, state, step_sample, before)
        wait_for_save(job)


def begin(job: Job, state: RunState) -> bool:
    """Do what comes before the next step; returns whether the run is over."""
    complete = state.step >= job.total_steps
    if state.unfinished is None and (complete or is_out_of_patience(job, state)):
        return True
    sample_references(job)
    if state.step == 0:
        if job.config.trainer.val_before_train and not state.pretraining:
            with saved_on_stop(job, state):
                validate(job, state)
        pretrain_critic(job, state)
    # A resumed run may start with a step that is trained but not validated.
    return state.unfinished is not None and finish(job, state)


def sample(job: Job, state: RunState, before: Snapshot) -> StepSample:
    """Sample n responses to each prompt; each goes to the reward as soon as it finishes."""
    with undone_on_stop(job, state, before):
        state.step += 1
        job.reward.begin_step(state.step)
        return sample_step(job, state.step)


def learn(job: Job, state: RunState, step_sample: StepSample, before: Snapshot) -> bool:
    """Train on a sample and finish its step; returns whether the run is over."""
    config, tracker = job.config, job.tracker
    with undone_on_stop(job, state, before):
        # While the reward scores the responses, the engine annotates them with log-probs and
        # values. The scores become token rewards, and these become advantages.
        scored, scores, shaped = prepare_batch(
            job, state, step_sample, critic_lam=config.critic.lam
        )
        leave_overdue_step(job, "annotating")
    state.kl_coef, state.moments = shaped.next_kl_coef, scores.moments
    # Train the critic, then the actor, each in epochs of mini-batches. Then the samplers get the
    # new weights, and the learning rates move on.
    sums = update(job, state, shaped.batch)
    with tracker.phase("publish"):
        job.engine.publish()
    job.published.append(state.step)
    # Collect the metrics of all stages.
    metrics = score_metrics(scored) | job.reward.pop_metrics() | scores.metrics
    metrics |= step_sample.metrics | shaped.metrics | sums.means()
    if config.trainer.async_steps:
        metrics |= staleness_metrics(scored, state.step - 1)
    # Write the responses, some token by token (not if responses were split into turns).
    kept = config.trainer.token_details if len(shaped.batch) == len(scored) else 0
    details = list_token_details(shaped.batch, step_sample.rollouts, job.decode, kept)
    tracker.rollouts(state.step, scores.logged, tokens=details, critic=shaped.critic)
    seconds = time.perf_counter() - before.started
    tokens = int((shaped.batch.prompt_len_B + shaped.batch.response_len_B).sum())
    tracker.show_profile(state.step)
    check_reward(job, state, scores.logged)
    state.unfinished = metrics | {"time/step_s": seconds, "perf/tokens_per_s": tokens / seconds}
    return finish(job, state)


def finish(job: Job, state: RunState) -> bool:
    """Validate, report and save the trained step as configured; returns whether the run is over."""
    job.store.raise_save_error()
    trainer, last = job.config.trainer, state.step == job.total_steps
    with saved_on_stop(job, state):
        if (last and trainer.test_freq >= 0) or is_due(state.step, trainer.test_freq):
            validate(job, state)
        # Report after the validation: both are one line of metrics. A logger may not answer.
        job.tracker.step(state.step, state.unfinished or {})
    state.unfinished = None
    state.stop_after_broken_steps(job)
    # Save, also when the run ends or was asked to stop.
    stop_reason = find_stop_reason(job, state)
    done = last or is_out_of_patience(job, state)
    if done or stop_reason or state.is_best or is_due(state.step, trainer.save_freq):
        save(job, state, last=bool(done or stop_reason))
    if done or stop_reason:
        note_end_of_work()
    if stop_reason and not done:
        message = f"Stopped after step {state.step} ({stop_reason})."
        raise make_resumable(job, state, Interrupted(message))
    return done
