"""The training loop: proximal policy optimisation (PPO, Schulman et al. 2017, arXiv 1707.06347).

    ppo train --preset embedded --max_steps 4

Each training step has four parts (`train_step`):
1. Sample n responses to each prompt of the batch; each goes to the reward as soon as it finishes.
2. Annotate them with log-probs, reference log-probs and values, while the rewards are computed.
3. Turn scores into token rewards (penalties, KL) and estimate advantages.
4. Update critic and actor in epochs of mini-batches, then publish the weights to the samplers.

Around it, `finish_step` validates, reports and saves. `step/stages.py` has the stages,
`step/shaping.py` the arithmetic of part 3; `run/assemble.py` builds the `Job` and calls `run`,
`run/session.py` drives `steps` for a caller with its own scores.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from ppo_cli.algo.batch import build_batch
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import Sampling
from ppo_cli.errors import Interrupted, plural
from ppo_cli.records import Scored
from ppo_cli.report.hacking import find_hacking, name_checkpoint_before
from ppo_cli.report.metrics import (
    StepSums,
    describe_pretraining,
    extend_budget,
    has_reached_target,
    is_pretrained,
    read_limits,
    score_metrics,
    staleness_metrics,
)
from ppo_cli.step.shaping import ShapedScores, ShapedStep, place_steps, shape_scores, shape_step
from ppo_cli.step.stages import (
    MAX_UNSCORED_STEPS,
    PRETRAIN_SHUFFLE,
    VALIDATION,
    Job,
    RunState,
    StepSample,
    baselines_by_row,
    check_sampler_weights,
    explain_zero_reward,
    gather,
    gather_baselines,
    raise_if_reward_only_raises,
    sample_pretraining,
    sample_references,
    sample_rollouts,
    sample_step,
    stream_seed,
    submit_baselines,
    update,
    update_critic,
)
from ppo_cli.step.token_details import list_token_details
from ppo_cli.step.turns import split_scores, split_turns


def run(job: Job, state: RunState) -> None:
    """Train from `state` to the last step; raises Interrupted when asked to stop early."""
    for _ in steps(job, state):
        pass


def steps(job: Job, state: RunState) -> Generator[StepSample | None]:
    """Train step by step, for a caller that scores the responses itself (`run/session.py`).

    Yields None before a step, then its sample, whose scores the rest of it waits for. An
    Interrupted that the caller throws in undoes the step and saves the run.
    """
    complete = state.step >= job.total_steps
    if state.unfinished is None and (complete or _out_of_patience(job, state)):
        return
    with job.store.open():
        # Before the first step: reference responses and a validation, if configured.
        sample_references(job)
        if state.step == 0 and not state.pretraining and job.config.trainer.val_before_train:
            with _save_on_stop(job, state):
                validate(job, state)
        if state.step == 0:
            pretrain_critic(job, state)
        # A resumed run may start with a step that is trained but not validated.
        over = state.unfinished is not None and finish_step(job, state)
        while not over and state.step < job.total_steps:
            yield from take_step(job, state)
            over = finish_step(job, state)
        wait_for_save(job)


def pretrain_critic(job: Job, state: RunState) -> None:
    """Train the critic alone on responses of the initial policy (VC-PPO, arXiv 2503.01491).

    Its targets are the rewards to come (lambda 1), and each step has fresh responses: the explained
    variance of their first values, which no update has seen, ends it at critic.pretrain_until. The
    critic's optimizer goes on into step 1 as it is: its moments are those of the same loss.
    """
    while not is_pretrained(job.config, state.pretraining):
        scales, started = job.reward.state_dict(), time.perf_counter()
        step = len(state.pretraining) + 1
        # A step that cannot be finished is undone, as in `take_step`.
        try:
            scored, metrics = pretrain_step(job, state, step)
        except Interrupted as stop:
            job.reward.load_state_dict(scales)
            save(job, state, last=True)
            raise _with_resume_command(job, state, stop) from stop
        job.tracker.rollouts(step, scored, split="pretraining")
        metrics["time/step_s"] = time.perf_counter() - started
        _check_reward(job, state, scored)
        state.pretraining.append(metrics)
        job.tracker.pretraining(state.pretraining)
        state.stop_after_broken_steps(
            job.config.trainer.max_nonfinite_steps, job.resume_command, job.store.newest()
        )
        # Saved at the end too, so that other runs can start from the pretrained critic.
        stop_reason = job.stop_requested() or _unscored_reason(state)
        done = is_pretrained(job.config, state.pretraining)
        if done or stop_reason or _is_due(step, job.config.trainer.save_freq):
            save(job, state, last=bool(stop_reason))
        if stop_reason:
            message = f"Stopped after step {step} of critic pretraining ({stop_reason})."
            raise _with_resume_command(job, state, Interrupted(message))
        if done:
            text = describe_pretraining(job.config, state.pretraining)
            reached = has_reached_target(job.config, state.pretraining)
            short = job.config.critic.pretrain_until is not None and not reached
            (job.tracker.screen.health if short else job.tracker.screen.note)(text)


def pretrain_step(job: Job, state: RunState, step: int) -> tuple[list[Scored], dict[str, float]]:
    """One step of critic pretraining: returns the responses with scores, and the metrics."""
    sample = sample_pretraining(job, step)
    config = with_settings(job.config, {"critic.lam": 1.0})
    scored, scores, shaped = prepare_batch(job, state, config, sample)
    state.moments = scores.moments
    sums = StepSums()
    update_critic(job, shaped.batch, sums, (PRETRAIN_SHUFFLE, step), pretraining=True)
    state.count_broken_steps(sums)
    metrics = score_metrics(scored) | job.reward.pop_metrics() | scores.metrics
    return list(scores.logged), metrics | shaped.metrics | sums.means()


def take_step(job: Job, state: RunState) -> Generator[StepSample | None]:
    """Train one step and put its metrics into `state.unfinished`, for `finish_step`.

    A step that cannot be finished (judge down, budget used up) is undone, and the run is saved.
    """
    # Remember what sampling changes, to undo the step.
    order, scales, before = job.order.state_dict(), job.reward.state_dict(), state.step
    try:
        yield None
        state.step += 1
        started = time.perf_counter()
        scored, metrics, tokens = yield from train_step(job, state)
    except Interrupted as stop:
        state.step = before
        job.order.load_state_dict(order)
        job.reward.load_state_dict(scales)
        wait_for_save(job)
        if job.store.newest_step() != state.step:
            save(job, state, last=True)
        raise _with_resume_command(job, state, stop) from stop
    # Stop or warn if the reward does not work.
    seconds = time.perf_counter() - started
    metrics |= {"time/step_s": seconds, "perf/tokens_per_s": tokens / seconds}
    job.tracker.show_profile(state.step)
    _check_reward(job, state, scored)
    state.unfinished = metrics


def _check_reward(job: Job, state: RunState, scored: list[Scored]) -> None:
    """Stop the run if the reward only raises; show a diagnosis if it gives nothing to learn."""
    raise_if_reward_only_raises(job, scored)
    state.count_unscored_steps(scored)
    explain_zero_reward(job, state, scored)


def finish_step(job: Job, state: RunState) -> bool:
    """Validate, report and save the trained step as configured; returns whether the run is over."""
    job.store.raise_save_error()
    trainer = job.config.trainer
    last = state.step == job.total_steps
    if last or _is_due(state.step, trainer.test_freq):
        with _save_on_stop(job, state):
            validate(job, state)
    # Report after the validation: both are one line of metrics.
    job.tracker.step(state.step, state.unfinished or {})
    state.unfinished = None
    limit = trainer.max_nonfinite_steps
    state.stop_after_broken_steps(limit, job.resume_command, job.store.newest())
    # Save, also when the run ends or was asked to stop.
    stop = job.stop_requested() or _unscored_reason(state) or _hacking_reason(job)
    done = last or _out_of_patience(job, state)
    if done or stop or state.is_best or _is_due(state.step, trainer.save_freq):
        save(job, state, last=bool(done or stop))
    if stop and not done:
        message = f"Stopped after step {state.step} ({stop})."
        raise _with_resume_command(job, state, Interrupted(message))
    return done


def train_step(
    job: Job, state: RunState
) -> Generator[StepSample, None, tuple[list[Scored], dict[str, float], int]]:
    """One PPO step: returns the responses with scores, the metrics, and the number of tokens.

    Yields the sample: a session scores it meanwhile.
    """
    config, tracker = job.config, job.tracker
    # 1. Sample. Rewards start as responses finish; ReMax also samples greedy baselines.
    job.reward.begin_step(state.step)
    sample = sample_step(job, state.step)
    yield sample
    # 2. and 3. Annotate, shape the scores, estimate advantages.
    scored, scores, shaped = prepare_batch(job, state, config, sample)
    state.kl_coef, state.moments = shaped.next_kl_coef, scores.moments
    # 4. Update, and give the samplers the new weights.
    sums = update(job, state, shaped.batch)
    with tracker.phase("publish"):
        job.engine.publish()
    job.published.append(state.step)
    # Collect the metrics of all stages.
    metrics = score_metrics(scored) | job.reward.pop_metrics() | scores.metrics
    metrics |= sample.metrics | shaped.metrics | sums.means()
    if config.trainer.async_steps:
        metrics |= staleness_metrics(scored, state.step - 1)
    # Write the responses, some of them token by token, and what the critic predicts.
    tracker.rollouts(
        state.step,
        scores.logged,
        tokens=list_token_details(
            shaped.batch,
            sample.rollouts,
            job.decode,
            # Rows of single turns are no responses.
            config.trainer.token_details if len(shaped.batch) == len(scored) else 0,
        ),
        critic=shaped.critic,
    )
    tokens = int((shaped.batch.prompt_len_B + shaped.batch.response_len_B).sum())
    return list(scores.logged), metrics, tokens


def prepare_batch(
    job: Job, state: RunState, config: Config, sample: StepSample
) -> tuple[list[Scored], ShapedScores, ShapedStep]:
    """Parts 2 and 3 of a step: returns the scores, as given and shaped, and the batch."""
    # 2. Annotate on the engine while rewards are computed, then wait for the scores.
    baseline = submit_baselines(job, state, sample.prompts)
    with job.tracker.phase("annotate"):
        split = list(map(split_turns, sample.rollouts))
        annotated = job.engine.annotate(build_batch([*chain(*split)], job.pad_token_id))
    scored = gather(job, sample.rollouts, sample.futures, "reward_wait")
    greedy = gather_baselines(job, baseline)
    # 3. Shape scores (penalties, normalisation), place them on tokens, estimate advantages.
    with job.tracker.phase("advantages"):
        scores = shape_scores(
            config.reward.shaping, config.data.max_response_length, scored, greedy, state.moments
        )
        baselines = baselines_by_row(annotated, scores.baselines)
        scored_rows = [
            row
            for s, rows in zip(scores.scored, split, strict=True)
            for row in split_scores(
                s,
                rows,
                place_steps(s.rollout, s.score.steps, job.decode),
                config.environment.gamma_turn,
            )
        ]
        shaped = shape_step(
            config, annotated, [s for s, _ in scored_rows], state.kl_coef, baselines,
            [placed for _, placed in scored_rows],
        )  # fmt: skip
    check_sampler_weights(job, shaped.metrics)
    return scored, scores, shaped


def validate(job: Job, state: RunState) -> None:
    """Sample and score responses to the validation prompts, and record a new best."""
    if not job.val_prompts:
        return
    v = job.config.rollout.val_kwargs
    # The same seed at every validation, so that they can be compared.
    sampling = Sampling(
        temperature=v.temperature,
        top_p=v.top_p,
        top_k=v.top_k,
        n=v.n,
        max_tokens=job.config.data.max_response_length,
        stop=job.config.rollout.stop,
        seed=stream_seed(job.config.trainer.seed, VALIDATION, 0),
    )
    rollouts, futures = sample_rollouts(job, job.val_prompts, sampling, "validate", "validation")
    scored = gather(job, rollouts, futures, "validate reward")
    job.tracker.rollouts(state.step, scored, split="val")
    raise_if_reward_only_raises(job, scored)
    metrics = score_metrics(scored, prefix="val/")
    metrics |= {f"val/{name}": value for name, value in job.reward.pop_metrics().items()}
    job.tracker.validation(state.step, metrics)
    state.note_validation(metrics)


def save(job: Job, state: RunState, *, last: bool) -> None:
    """Start a checkpoint of engine, order, reward and state; it is written in the background.

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
    return state


@contextmanager
def _save_on_stop(job: Job, state: RunState) -> Iterator[None]:
    """Save the run if the block is interrupted, and raise with the command that resumes it."""
    try:
        yield
    except Interrupted as stop:
        save(job, state, last=True)
        raise _with_resume_command(job, state, stop) from stop


def _with_resume_command(job: Job, state: RunState, stop: Interrupted) -> Interrupted:
    """Wait for the checkpoint; return the error with what is saved and how to resume."""
    wait_for_save(job)
    saved = f"Everything up to step {state.step} of {job.total_steps} is saved."
    if state.step == 0 and not is_pretrained(job.config, state.pretraining):
        saved = f"{plural(len(state.pretraining), 'step')} of critic pretraining are saved."
    if state.unfinished is not None:  # not yet on the screen or in the metrics
        saved = f"Step {state.step} of {job.total_steps} is trained and saved, but not validated."
    history, rows = job.tracker.history, len(job.val_prompts)
    line = extend_budget(job.resume_command, stop, job.config, history, job.total_steps, rows)
    return Interrupted(f"{stop} {saved} Go on with: {line}")


def _unscored_reason(state: RunState) -> str | None:
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


def _out_of_patience(job: Job, state: RunState) -> bool:
    """Whether `trainer.patience` validations in a row had no new best; says so on the screen."""
    patience = job.config.trainer.patience
    if patience is None or state.stale < patience:
        return False
    job.tracker.screen.note(
        f"Ended at step {state.step}: {state.stale} validations without a new best. To go on, "
        "raise --patience."
    )
    return True


def _is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps happens now; never for -1 and 0."""
    return every > 0 and step % every == 0
