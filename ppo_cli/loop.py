"""THE training loop: proximal policy optimisation on one screen.

For each step: take prompts; sample responses and hand each to the reward as it finishes
(dynamic sampling goes on until the batch is full of prompts that teach something);
annotate while the rewards answer; gather scores; estimate advantages; update critic and
actor in mini-batches; publish the new weights; report; validate; save.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from ppo_cli.algo.batch import build_batch
from ppo_cli.engine.base import Sampling
from ppo_cli.errors import Interrupted
from ppo_cli.records import Scored
from ppo_cli.report.metrics import resume_line, score_metrics, staleness_metrics
from ppo_cli.step.shaping import place_steps, shape_scores, shape_step
from ppo_cli.step.stages import (
    MOST_UNSCORED,
    VALIDATION,
    Job,
    RunState,
    baselines_of_rows,
    explain_zero_reward,
    gather,
    refuse_foreign_weights,
    refuse_raising,
    roll_out,
    sample_first,
    sample_step,
    stream_seed,
    submit_baselines,
    update,
)


def run(job: Job, state: RunState) -> None:
    """Train from `state` to the last step; raises Interrupted when asked to stop early."""
    if state.unfinished is None and _out_of_patience(job, state):
        return
    with job.store.open():
        sample_first(job)
        if state.step == 0 and job.config.trainer.val_before_train:
            with _saved_when_stopped(job, state):
                validate(job, state)
        while state.step < job.total_steps or state.unfinished is not None:
            if state.unfinished is None:
                take_step(job, state)
            if finish_step(job, state):
                break
        settle(job)


def take_step(job: Job, state: RunState) -> None:
    """Train one step; what is to be reported of it waits in `state` for its validation.

    A step that cannot be finished (a judge that is down, a budget that is used up) never was.
    """
    order, scales = job.order.state_dict(), job.reward.state_dict()
    state.step += 1
    started = time.perf_counter()
    try:
        scored, metrics, tokens = train_step(job, state)
    except Interrupted as stop:
        state.step -= 1
        job.order.load_state_dict(order)
        job.reward.load_state_dict(scales)
        settle(job)
        if job.store.newest_step() != state.step:
            save(job, state, last=True)
        raise _resumable(job, state, stop) from stop
    job.tracker.rollouts(state.step, scored)
    seconds = time.perf_counter() - started
    metrics |= {"time/step_s": seconds, "perf/tokens_per_s": tokens / seconds}
    refuse_raising(job, scored)
    job.tracker.show_profile(state.step)
    state.count_unscored_steps(scored)
    explain_zero_reward(job, state, scored)
    state.unfinished = metrics


def finish_step(job: Job, state: RunState) -> bool:
    """Validate, report and save as is due; returns whether the run is over."""
    job.store.check()
    trainer = job.config.trainer
    last = state.step == job.total_steps
    if last or _due(state.step, trainer.test_freq):
        with _saved_when_stopped(job, state):
            validate(job, state)
    job.tracker.step(state.step, state.unfinished or {})
    state.unfinished = None
    state.refuse_broken_steps(trainer.max_nonfinite_steps, job.resume_command, job.store.newest())
    stop = job.stop_requested() or _unscored(state)
    done = last or _out_of_patience(job, state)
    if done or stop or state.is_best or _due(state.step, trainer.save_freq):
        save(job, state, last=bool(done or stop))
    if stop and not done:
        raise _resumable(job, state, Interrupted(f"Stopped after step {state.step} ({stop})."))
    return done


@contextmanager
def _saved_when_stopped(job: Job, state: RunState) -> Iterator[None]:
    try:
        yield
    except Interrupted as stop:
        save(job, state, last=True)
        raise _resumable(job, state, stop) from stop


def _resumable(job: Job, state: RunState, stop: Interrupted) -> Interrupted:
    settle(job)
    saved = f"Everything up to step {state.step} of {job.total_steps} is saved."
    if state.unfinished is not None:  # neither screen nor metrics have this step yet
        saved = f"Step {state.step} of {job.total_steps} is trained and saved, but not validated."
    history, rows = job.tracker.history, len(job.val_prompts)
    line = resume_line(job.resume_command, stop, job.config, history, job.total_steps, rows)
    return Interrupted(f"{stop} {saved} Go on with: {line}")


def train_step(job: Job, state: RunState) -> tuple[list[Scored], dict[str, float], int]:
    """One PPO step: rollouts, rewards, advantages, updates; returns what to report."""
    config, tracker = job.config, job.tracker
    job.reward.begin_step(state.step)
    prompts, rollouts, futures, filtered = sample_step(job, state.step)
    baseline_futures = submit_baselines(job, state, prompts)
    with tracker.phase("annotate"):
        annotated = job.engine.annotate(build_batch(rollouts, job.pad_token_id))
    scored = gather(job, rollouts, futures, "reward_wait")
    greedy = None
    if baseline_futures is not None:
        greedy = gather(job, *baseline_futures, "baseline reward")
    with tracker.phase("advantages"):
        fair = shape_scores(
            config.reward.shaping, config.data.max_response_length, scored, greedy, state.moments
        )
        baselines = baselines_of_rows(annotated, fair.baselines)
        placed = [place_steps(s.rollout, s.score.steps, job.decode) for s in fair.scored]
        shaped = shape_step(config, annotated, fair.scored, state.kl_coef, baselines, placed)
    refuse_foreign_weights(job, shaped.metrics)
    state.kl_coef, state.moments = shaped.next_kl_coef, fair.moments
    sums = update(job, state, shaped.batch)
    with tracker.phase("publish"):
        job.engine.publish()
    job.published.append(state.step)
    metrics = score_metrics(scored) | job.reward.pop_metrics() | fair.metrics
    metrics |= filtered | shaped.metrics | sums.means()
    if config.trainer.async_steps:
        metrics |= staleness_metrics(scored, state.step - 1)
    tokens = int((annotated.prompt_len_B + annotated.response_len_B).sum())
    return list(fair.logged), metrics, tokens


def validate(job: Job, state: RunState) -> None:
    """Score greedy responses to the validation prompts, and keep track of the best."""
    if not job.val_prompts:
        return
    v = job.config.rollout.val_kwargs
    sampling = Sampling(
        temperature=v.temperature,
        top_p=v.top_p,
        top_k=v.top_k,
        n=v.n,
        max_tokens=job.config.data.max_response_length,
        stop=job.config.rollout.stop,
        seed=stream_seed(job.config.trainer.seed, VALIDATION, 0),
    )
    rollouts, futures = roll_out(job, job.val_prompts, sampling, "validate", "validation")
    scored = gather(job, rollouts, futures, "validate reward")
    job.tracker.rollouts(state.step, scored, split="val")
    refuse_raising(job, scored)
    metrics = score_metrics(scored, prefix="val/")
    metrics |= {f"val/{name}": value for name, value in job.reward.pop_metrics().items()}
    job.tracker.validation(state.step, metrics)
    state.note_validation(metrics)


def save(job: Job, state: RunState, *, last: bool) -> None:
    """Take a snapshot of engine, order, reward and state; it is written while training goes on.

    Nothing is trained after the `last` one.
    """

    def fill(folder: Path) -> Future[None]:
        state.write(folder, order=job.order, reward=job.reward, fingerprint=job.fingerprint)
        return job.engine.save(folder, last=last)

    with job.tracker.phase("save"):
        job.store.begin(state.step, fill, best=state.is_best)


def settle(job: Job) -> None:
    """Wait until the last checkpoint is whole on the disk."""
    if job.store.busy:
        with job.tracker.phase("save"):
            job.store.settle()
    job.store.settle()


def load(job: Job, folder: Path) -> RunState:
    """Take everything back that `save` wrote, and forget what was logged past it."""
    job.store.settle()
    state = RunState.read(folder, order=job.order, reward=job.reward)
    if job.config.algorithm.kl_ctrl.type == "fixed":  # what is set now counts
        state.kl_coef = job.config.algorithm.kl_ctrl.kl_coef
    job.engine.load(folder)
    job.tracker.resume_at(state.step)
    job.store.drop_past(state.step)
    return state


def _unscored(state: RunState) -> str | None:
    """Why a run whose reward always fails should stop: nothing of it is learnt."""
    if state.unscored_steps < MOST_UNSCORED:
        return None
    return f"no response of {state.unscored_steps} steps in a row got a score; correct the reward"


def _out_of_patience(job: Job, state: RunState) -> bool:
    patience = job.config.trainer.patience
    if patience is None or state.stale < patience:
        return False
    job.tracker.screen.note(
        f"Ended at step {state.step}: {state.stale} validations without a new best. To go on, "
        "raise --patience."
    )
    return True


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
