"""Responses and their scores: sampled, submitted as each finishes, and gathered."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.data_sets.table import pick
from ppo_cli.engine.base import Sampling
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.moments import Moments
from ppo_cli.planning.batches import most_gen_batches
from ppo_cli.records import Prompt, Rollout, Score, Scored
from ppo_cli.report.metrics import score_metrics
from ppo_cli.rewards.base import RoundKind, submit_rollout
from ppo_cli.signals import note_end_of_work, time_left
from ppo_cli.step.checks import raise_if_reward_only_raises
from ppo_cli.step.shaping import compute_penalties
from ppo_cli.step.state import Job, RunState

# Numbers of the random streams, a part of each seed: changing one changes every run.
TRAIN, BASELINE, VALIDATION, MINI_BATCHES, PRETRAIN, PRETRAIN_MINI_BATCHES = range(6)


def stream_seed(*key: int) -> int:
    """Derive a seed from (seed, stream, step, …), so that no generator state must be saved.

    Responses of training steps and of evaluations have rollout.seed, all else trainer.seed.
    """
    return int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])


def train_sampling(config: Config, step: int, batch: int = 0, stream: int = TRAIN) -> Sampling:
    """Sampling settings of a step; `batch` is its number in dynamic sampling."""
    # The first batch of a step has the same seed with and without dynamic sampling.
    r, batch_key = config.rollout, (batch,) if batch else ()
    return Sampling(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        n=r.n,
        max_tokens=config.data.max_response_length,
        seed=stream_seed(config.rollout.seed, stream, step, *batch_key),
        stop=r.stop,
    )


@dataclass(frozen=True)
class StepSample:
    """The batch of a step: prompts, responses in prompt order, futures of scores, metrics."""

    prompts: list[Prompt]
    rollouts: list[Rollout]
    futures: list[Future[Score]]
    metrics: dict[str, float] = field(default_factory=dict)


def sample_step(job: Job, step: int) -> StepSample:
    """Sample the responses of a training step and submit each to the reward."""
    if job.config.algorithm.filter_groups.enable:
        return _sample_dynamically(job, step)
    prompts = list(pick(job.prompts, job.order.take()))
    sampling = train_sampling(job.config, step)
    pairs = sample_rollouts(job, prompts, sampling, "rollout", "train", deferred=job.caller_scores)
    return StepSample(prompts, *pairs)


def sample_pretraining(job: Job, step: int) -> StepSample:
    """Sample the responses of a step of critic pretraining and submit each to the reward.

    The prompts have their own order, so that training meets its prompts as without pretraining.
    """
    config = job.config
    seed = stream_seed(config.trainer.seed, PRETRAIN)
    order = PromptOrder(len(job.prompts), config.data.train_batch_size, seed, config.data.shuffle)
    prompts = list(pick(job.prompts, order.peek(step)))
    sampling = train_sampling(config, step, stream=PRETRAIN)
    return StepSample(prompts, *sample_rollouts(job, prompts, sampling, "rollout", "train"))


def _sample_dynamically(job: Job, step: int) -> StepSample:
    """Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2).

    Prompts whose responses are all equal in algorithm.filter_groups.metric give no gradient: they
    are dropped, and more prompts are sampled until the batch is full. Raises Interrupted if the
    allowed number of batches does not fill it.
    """
    config = job.config
    batch_size, n = config.data.train_batch_size, config.rollout.n
    max_batches = most_gen_batches(
        config.algorithm.filter_groups, len(job.prompts), config.data.gen_batch_size
    )
    chosen, sampled, alike, unscored = StepSample([], [], []), 0, 0, 0
    for batch in range(max_batches):
        # Sample and score a batch; prompts that are in the step already are skipped.
        uids = {prompt.uid for prompt in chosen.prompts}
        prompts = [p for p in pick(job.prompts, job.order.take()) if p.uid not in uids]
        sampling = train_sampling(config, step, batch)
        rollouts, futures = sample_rollouts(job, prompts, sampling, "rollout", "train")
        scored = gather(job, rollouts, futures, "reward_wait")
        raise_if_reward_only_raises(job, scored)
        sampled += len(prompts)
        # Keep the groups with a signal, until the batch is full.
        for g, prompt in enumerate(prompts):
            group = slice(g * n, (g + 1) * n)
            # Imputed scores and parts without a value are no difference, nor is rounding.
            judged = [s for s in scored[group] if s.score.judged]
            differs = Moments.from_values(_filter_value(job, s) for s in judged).varies
            unscored, alike = unscored + (not judged), alike + (not differs)
            if differs and len(chosen.prompts) < batch_size:
                chosen.prompts.append(prompt)
                chosen.rollouts.extend(rollouts[group])
                chosen.futures.extend(futures[group])
        if len(chosen.prompts) == batch_size:
            chosen.metrics["filter/gen_batches"] = batch + 1.0
            chosen.metrics["filter/alike_share"] = alike / sampled
            return chosen
    raise Interrupted(
        f"Dynamic sampling found {len(chosen.prompts)} of the {batch_size} prompts of a batch in "
        f"{max_batches} batches ({sampled} prompts, {unscored} of them without any score): the "
        "responses to all others score alike. Raise algorithm.filter_groups.max_num_gen_batches "
        "or --rollout_n, take prompts that are neither too easy nor too hard, or set "
        "algorithm.filter_groups.enable=false."
    )


def _filter_value(job: Job, sample: Scored) -> float | None:
    """Return the value by which dynamic sampling compares responses."""
    config = job.config
    name = config.algorithm.filter_groups.metric
    # `acc` is a part where the reward returns one, and the score otherwise.
    if name in (None, "score") or (name == "acc" and name not in sample.score.parts):
        return sample.score.value
    if name in ("seq_reward", "seq_final_reward"):
        longest = config.data.max_response_length
        penalties = compute_penalties(config.reward.shaping, sample.rollout, longest).values()
        return sample.score.number + sum(penalties)
    if name not in sample.score.parts:
        raise RewardError(
            f"algorithm.filter_groups.metric names '{name}', but a score has no such part; there "
            f"are {', '.join(['score', 'seq_reward', *sample.score.parts])}."
        )
    return sample.score.parts[name].raw


def sample_rollouts(
    job: Job, prompts: Sequence[Prompt], sampling: Sampling, phase: str, kind: RoundKind, *,
    deferred: bool = False,
) -> tuple[list[Rollout], list[Future[Score]]]:  # fmt: skip
    """Sample responses, submit each to the reward as it finishes; return both in prompt order.

    With `deferred` the reward gets none of them, and `Session.update` completes the futures.
    """
    # Responses finish in any order; futures of earlier rounds may still be running.
    place = {prompt.uid: i for i, prompt in enumerate(prompts)}
    pairs: list[tuple[Rollout, Future[Score]]] = []
    job.in_flight[:] = [future for future in job.in_flight if not future.done()]
    # All engines return generators: closing one frees it.
    drawn = cast("Any", job.engine.generate(prompts, sampling))
    with job.tracker.phase(phase, len(prompts) * sampling.n) as advance, closing(drawn):
        for rollout in drawn:
            future = Future[Score]() if deferred else submit_rollout(job.reward, rollout)
            pairs.append((rollout, future))
            job.in_flight.append(future)
            advance(1)
            leave_overdue_step(job, "sampling")
    # All responses are submitted: rewards may now compare them with each other.
    if not deferred:
        job.reward.end_round(kind)
    pairs.sort(key=lambda pair: (place[pair[0].prompt.uid], pair[0].sample))
    return [rollout for rollout, _ in pairs], [future for _, future in pairs]


def gather(
    job: Job, rollouts: Sequence[Rollout], futures: Sequence[Future[Score]], phase: str
) -> list[Scored]:
    """Wait for the scores of `rollouts`; `phase` names the wait on the screen."""
    scored: list[Scored] = []
    with job.tracker.phase(phase, len(futures)) as advance:
        for rollout, future in zip(rollouts, futures, strict=True):
            scored.append(Scored(rollout, _wait_for_score(job, future)))
            advance(1)
    return scored


def leave_overdue_step(job: Job, doing: str) -> None:
    """Raise Interrupted if a signal asked to stop some time ago.

    It is called before the weights change: the step is undone, and repeated after the next start.
    """
    if time_left() <= 0 and (stop := job.stop_requested()):
        note_end_of_work()
        raise Interrupted(f"Stopped while {doing} ({stop}).")


def _wait_for_score(job: Job, future: Future[Score]) -> Score:
    """Wait for one score; if the reward is stalled, show why, and let the user stop the run."""
    noted = False
    while not future.done():
        wait([future], timeout=0.5)
        reason = None if future.done() else job.reward.waiting_for()
        if (reason is not None or time_left() <= 0) and (stop := job.stop_requested()):
            raise Interrupted(f"Stopped while waiting for scores ({stop}). {reason or ''}".strip())
        if reason is not None and not noted:
            job.tracker.screen.health(reason)
            noted = True
    return future.result()


def sample_references(job: Job) -> None:
    """Sample greedy responses of the initial model, for rewards that compare with them."""
    prompts = job.reward.prompts_for_reference(job.prompts)
    if not prompts:
        return
    # In batches as large as a training step's.
    size, references = job.config.data.gen_batch_size * job.config.rollout.n, list[Rollout]()
    with job.tracker.phase("first responses", len(prompts)) as advance:
        for start in range(0, len(prompts), size):
            for rollout in job.engine.generate(
                prompts[start : start + size], _greedy_sampling(job, 0)
            ):
                references.append(rollout)
                advance(1)
    job.reward.set_references(references)


def _greedy_sampling(job: Job, step: int) -> Sampling:
    """Return sampling settings of one greedy response."""
    return Sampling(
        temperature=0.0,
        max_tokens=job.config.data.max_response_length,
        seed=stream_seed(job.config.trainer.seed, BASELINE, step),
        stop=job.config.rollout.stop,
    )


def submit_baselines(
    job: Job, state: RunState, prompts: Sequence[Prompt]
) -> tuple[list[Rollout], list[Future[Score]]] | None:
    """Sample and submit a greedy response per prompt, for ReMax (Li et al. 2023); else None."""
    if not ESTIMATORS[job.config.algorithm.adv_estimator].baseline:
        return None
    return sample_rollouts(
        job, prompts, _greedy_sampling(job, state.step), "baseline rollout", "baseline"
    )


def gather_baselines(
    job: Job, submitted: tuple[list[Rollout], list[Future[Score]]] | None
) -> list[Scored] | None:
    """Wait for the scores of greedy baselines; None for estimators without them."""
    return None if submitted is None else gather(job, *submitted, "baseline reward")


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
