"""Steps before the first one that train only the critic."""

from __future__ import annotations

import time

from ppo_cli.errors import Interrupted
from ppo_cli.records import Scored
from ppo_cli.report.metrics import (
    StepSums,
    describe_pretraining,
    has_reached_target,
    is_pretrained,
    score_metrics,
)
from ppo_cli.step.checks import check_reward
from ppo_cli.step.sampling import PRETRAIN_MINI_BATCHES, sample_pretraining
from ppo_cli.step.saving import Snapshot, make_resumable, save
from ppo_cli.step.state import Job, RunState
from ppo_cli.step.stops import is_due, unscored_reason
from ppo_cli.step.update import prepare_batch, update_critic


def pretrain_critic(job: Job, state: RunState) -> None:
    """Train the critic alone on responses of the initial policy (VC-PPO, arXiv 2503.01491).

    Its targets are the rewards to come (lambda 1), and each step has fresh responses: the explained
    variance of their first values, which no update has seen, ends it at critic.pretrain_until. The
    critic's optimizer goes on into step 1 as it is: its moments are those of the same loss.
    """
    limits = job.config.pretraining
    while not is_pretrained(limits, state.pretraining):
        step, before = len(state.pretraining) + 1, Snapshot.take(job, state)
        try:
            scored, metrics = pretrain_step(job, state, step)
        except Interrupted as stop:
            before.restore(job, state)
            save(job, state, last=True)
            raise make_resumable(job, state, stop) from stop
        job.tracker.rollouts(step, scored, split="pretraining")
        metrics["time/step_s"] = time.perf_counter() - before.started
        check_reward(job, state, scored)
        state.pretraining.append(metrics)
        job.tracker.pretraining(state.pretraining)
        state.stop_after_broken_steps(job)
        # Saved at the end too, so that other runs can start from the pretrained critic.
        stop_reason = job.stop_requested() or unscored_reason(state)
        done = is_pretrained(limits, state.pretraining)
        if done or stop_reason or is_due(step, job.config.trainer.save_freq):
            save(job, state, last=bool(stop_reason))
        if stop_reason:
            message = f"Stopped after step {step} of critic pretraining ({stop_reason})."
            raise make_resumable(job, state, Interrupted(message))
        if done:
            text = describe_pretraining(limits, state.pretraining)
            reached = has_reached_target(limits.target, state.pretraining)
            short = limits.target is not None and not reached
            (job.tracker.screen.health if short else job.tracker.screen.note)(text)


def pretrain_step(job: Job, state: RunState, step: int) -> tuple[list[Scored], dict[str, float]]:
    """One step of critic pretraining: returns the responses with scores, and the metrics."""
    sample = sample_pretraining(job, step)
    scored, scores, shaped = prepare_batch(job, state, sample, critic_lam=1.0)
    state.moments = scores.moments
    sums = StepSums()
    update_critic(job, shaped.batch, sums, (PRETRAIN_MINI_BATCHES, step), pretraining=True)
    state.count_broken_steps(sums)
    metrics = score_metrics(scored) | job.reward.pop_metrics() | scores.metrics
    return list(scores.logged), metrics | shaped.metrics | sums.means()
