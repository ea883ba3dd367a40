"""THE training loop: proximal policy optimisation on one screen.

For each step: take prompts; sample responses and hand each to the reward as it finishes;
annotate while the rewards answer; gather scores; estimate advantages; update critic and
actor in mini-batches; publish the new weights; report; validate; save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_cli.algo.advantages import needs_baseline
from ppo_cli.algo.batch import AnnotatedBatch, TrainBatch, build_batch
from ppo_cli.config.derived import critic_mini_batch, sampler_seed
from ppo_cli.config.schema import Config
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.engine.base import Engine, MiniBatch, Sampling
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.records import Prompt, Rollout, Score, Scored
from ppo_cli.report.metrics import StepSums, resume_line, score_metrics, staleness_metrics
from ppo_cli.report.tracker import Tracker
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.run_folder.checkpoints import CheckpointStore
from ppo_cli.train.shaping import place_steps, shape_scores, shape_step
from ppo_cli.train.state import MOST_UNSCORED, RunState, stream_seed

TRAIN, BASELINE, VALIDATION, SHUFFLE = range(4)  # random streams, one for each use


@dataclass(frozen=True)
class Job:
    """All that the loop works with, built by `assemble`."""

    config: Config
    engine: Engine
    reward: Reward
    prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    order: PromptOrder
    tracker: Tracker
    store: CheckpointStore
    pad_token_id: int
    total_steps: int
    decode: Callable[[Sequence[int]], str]
    diagnose: Callable[[Sequence[Scored]], str | None]
    stop_requested: Callable[[], str | None]
    resume_command: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    in_flight: list[Future[Score]] = field(default_factory=list)  # of the round under way


def run(job: Job, state: RunState) -> None:
    """Train from `state` to the last step; raises Interrupted when asked to stop early."""
    if state.unfinished is None and _out_of_patience(job, state):
        return
    with job.store.open():
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
            save(job, state)
        raise _resumable(job, state, stop) from stop
    seconds = time.perf_counter() - started
    metrics |= {"time/step_s": seconds, "perf/tokens_per_s": tokens / seconds}
    job.tracker.rollouts(state.step, scored)
    _refuse_raising(job, scored)
    job.tracker.show_profile(state.step)
    state.count_unscored_steps(scored)
    _explain_zero_reward(job, state, scored)
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
    state.refuse_broken_steps(trainer.max_nonfinite_steps, job.resume_command)
    stop = job.stop_requested() or _unscored(state)
    done = last or _out_of_patience(job, state)
    if done or stop or state.is_best or _due(state.step, trainer.save_freq):
        save(job, state)
    if stop and not done:
        raise _resumable(job, state, Interrupted(f"Stopped after step {state.step} ({stop})."))
    return done


@contextmanager
def _saved_when_stopped(job: Job, state: RunState) -> Iterator[None]:
    try:
        yield
    except Interrupted as stop:
        save(job, state)
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
    prompts = [job.prompts[i] for i in job.order.take()]
    sampling = train_sampling(config, state.step)
    rollouts, futures = roll_out(job, prompts, sampling, "rollout", "train")
    baseline_futures = _submit_baselines(job, state, prompts)
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
        baselines = _baselines_of_rows(annotated, fair.baselines)
        placed = [place_steps(s.rollout, s.score.steps, job.decode) for s in fair.scored]
        shaped = shape_step(config, annotated, fair.scored, state.kl_coef, baselines, placed)
    state.kl_coef, state.moments = shaped.next_kl_coef, fair.moments
    sums = update(job, state, shaped.batch)
    with tracker.phase("publish"):
        job.engine.publish()
    metrics = score_metrics(scored) | job.reward.measure() | fair.metrics
    metrics |= shaped.metrics | sums.means()
    if config.trainer.async_steps:
        metrics |= staleness_metrics(scored, state.step - 1)
    tokens = int((annotated.prompt_len_B + annotated.response_len_B).sum())
    return list(fair.logged), metrics, tokens


def roll_out(
    job: Job, prompts: Sequence[Prompt], sampling: Sampling, phase: str, kind: RoundKind
) -> tuple[list[Rollout], list[Future[Score]]]:
    """Sample responses, each submitted to the reward as it finishes; in prompt order."""
    place = {prompt.uid: i for i, prompt in enumerate(prompts)}
    pairs: list[tuple[Rollout, Future[Score]]] = []
    job.in_flight[:] = [future for future in job.in_flight if not future.done()]
    with job.tracker.phase(phase, len(prompts) * sampling.n) as advance:
        for rollout in job.engine.generate(prompts, sampling):
            pairs.append((rollout, job.reward.submit(rollout)))
            job.in_flight.append(pairs[-1][1])
            advance(1)
    job.reward.settle(kind)
    pairs.sort(key=lambda pair: (place[pair[0].prompt.uid], pair[0].sample))
    return [rollout for rollout, _ in pairs], [future for _, future in pairs]


def gather(
    job: Job, rollouts: Sequence[Rollout], futures: Sequence[Future[Score]], phase: str
) -> list[Scored]:
    """Wait for the scores that are still missing."""
    scored: list[Scored] = []
    with job.tracker.phase(phase, len(futures)) as advance:
        for rollout, future in zip(rollouts, futures, strict=True):
            scored.append(Scored(rollout, _wait(job, future)))
            advance(1)
    return scored


def _wait(job: Job, future: Future[Score]) -> Score:
    """Wait for one score; while a reward stands still, say why, and let the user stop."""
    told = None
    while not future.done():
        wait([future], timeout=0.5)
        still = None if future.done() else job.reward.waiting_for()
        if still is not None and job.stop_requested():
            raise Interrupted(f"Stopped while waiting ({job.stop_requested()}). {still}")
        if still is not None and told is None:
            job.tracker.screen.health(still)
            told = still
    return future.result()


def update(job: Job, state: RunState, batch: TrainBatch) -> StepSums:
    """Epochs of mini-batches: the critic first, then the actor, which may stop early on KL."""
    config, sums = job.config, StepSums()
    if batch.values_BT is not None:
        size = critic_mini_batch(config)
        with job.tracker.phase("update critic", config.critic.ppo_epochs) as advance:
            for epoch in range(config.critic.ppo_epochs):
                for rows in _mini_batches(config, state.step, epoch, size, batch, "critic"):
                    sums.add(job.engine.step(MiniBatch(batch.rows(rows), actor=False, critic=True)))
                advance(1)
    if state.step > config.trainer.critic_warmup:
        _update_actor(job, state, batch, sums)
    state.count_broken_steps(sums)
    return sums


def _update_actor(job: Job, state: RunState, batch: TrainBatch, sums: StepSums) -> None:
    settings = job.config.actor
    size = settings.ppo_mini_batch_size
    with job.tracker.phase("update actor", settings.ppo_epochs) as advance:
        for epoch in range(settings.ppo_epochs):
            for rows in _mini_batches(job.config, state.step, epoch, size, batch, "actor"):
                step = job.engine.step(MiniBatch(batch.rows(rows), actor=True, critic=False))
                sums.add(step)
                moved, tokens = step.get("actor/approx_kl", (0.0, 1.0))
                if settings.target_kl is not None and moved / tokens > 1.5 * settings.target_kl:
                    sums.add({"actor/stopped_early": (1.0, 1.0)})
                    return
            advance(1)


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
        seed=stream_seed(job.config.trainer.seed, VALIDATION, 0),
    )
    rollouts, futures = roll_out(job, job.val_prompts, sampling, "validate", "validation")
    scored = gather(job, rollouts, futures, "validate reward")
    job.tracker.rollouts(state.step, scored, split="val")
    _refuse_raising(job, scored)
    metrics = score_metrics(scored, prefix="val/")
    metrics |= {f"val/{name}": value for name, value in job.reward.measure().items()}
    job.tracker.validation(state.step, metrics)
    state.note_validation(metrics)


def save(job: Job, state: RunState) -> None:
    """Take a snapshot of engine, order, reward and state; it is written while training goes on."""

    def fill(folder: Path) -> Future[None]:
        state.write(folder, order=job.order, reward=job.reward, fingerprint=job.fingerprint)
        return job.engine.save(folder)

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


def train_sampling(config: Config, step: int) -> Sampling:
    """How the rollouts of a training step are sampled."""
    r = config.rollout
    return Sampling(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        n=r.n,
        max_tokens=config.data.max_response_length,
        seed=stream_seed(sampler_seed(config), TRAIN, step),
    )


def _submit_baselines(
    job: Job, state: RunState, prompts: Sequence[Prompt]
) -> tuple[list[Rollout], list[Future[Score]]] | None:
    """ReMax (Li et al. 2023) subtracts the reward of the greedy response to each prompt."""
    if not needs_baseline(job.config.algorithm.adv_estimator):
        return None
    greedy = Sampling(
        temperature=0.0,
        max_tokens=job.config.data.max_response_length,
        seed=stream_seed(job.config.trainer.seed, BASELINE, state.step),
    )
    return roll_out(job, prompts, greedy, "baseline rollout", "baseline")


def _baselines_of_rows(
    annotated: AnnotatedBatch, greedy: Sequence[Scored] | None
) -> list[float | None] | None:
    """The greedy score of each row's prompt."""
    if greedy is None:
        return None
    return [greedy[group].score.value for group in annotated.group_B.tolist()]


def _mini_batches(
    config: Config, step: int, epoch: int, prompts: int, batch: TrainBatch, role: str
) -> Iterator[Tensor]:
    """Row indices of each mini-batch; `prompts` times rollout.n rows, the last may be smaller."""
    settings = config.actor if role == "actor" else config.critic
    order = np.arange(len(batch))
    if settings.shuffle:
        seed = stream_seed(config.trainer.seed, SHUFFLE, step, epoch, int(role == "actor"))
        order = np.random.default_rng(seed).permutation(order)
    size = prompts * config.rollout.n
    for start in range(0, len(order), size):
        yield torch.from_numpy(order[start : start + size])


def _refuse_raising(job: Job, scored: Sequence[Scored]) -> None:
    """Raise RewardError when a reward has raised an error for every response so far."""
    names = ("reward_mean", "val/reward_mean")
    before = any(line.get(name) is not None for line in job.tracker.history for name in names)
    if before or not all(s.score.failure.startswith("raised ") for s in scored):
        return
    raise RewardError(f"{job.diagnose(scored)} Then start again: {job.resume_command}")


def _explain_zero_reward(job: Job, state: RunState, scored: Sequence[Scored]) -> None:
    """Say why, once, when the first steps have brought no reward at all."""
    judged = [s for s in scored if s.score.judged]
    if not judged:
        text = job.diagnose(scored) if state.unscored_steps == 1 else None
        if text:
            job.tracker.screen.health(text)
        return
    if any(s.score.value for s in judged):
        state.zero_steps = 0
        return
    state.zero_steps += 1
    # A task that was rewarded before is not too hard: health tells what became of the policy.
    before = any(line.get("reward_mean") for line in job.tracker.history)
    if state.zero_steps in (2, 20) and not before:
        text = job.diagnose(judged)
        if text:
            job.tracker.screen.health(text)


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
