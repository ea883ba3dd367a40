"""The second half of a step: from a sample to a batch with advantages, and the updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch

from ppo_cli.algo.batch import AnnotatedBatch, TrainBatch, build_batch
from ppo_cli.config.schema.algorithm import Actor, Critic
from ppo_cli.engine.base import MiniBatch
from ppo_cli.records import Scored
from ppo_cli.report.metrics import StepSums
from ppo_cli.step.checks import check_sampler_weights
from ppo_cli.step.sampling import (
    MINI_BATCHES,
    StepSample,
    gather,
    gather_baselines,
    stream_seed,
    submit_baselines,
)
from ppo_cli.step.shaping import (
    Placed,
    ShapedScores,
    ShapedStep,
    place_steps,
    shape_scores,
    shape_step,
)
from ppo_cli.step.state import Job, RunState
from ppo_cli.step.turns import split_scores, split_turns


def prepare_batch(
    job: Job, state: RunState, sample: StepSample, critic_lam: float | None
) -> tuple[list[Scored], ShapedScores, ShapedStep]:
    """Annotate a sample while the reward scores it, then estimate advantages from the scores.

    Returns the scores as given and shaped, and the batch. `critic_lam` is the lambda of the
    critic's targets; None: that of the advantages.
    """
    config = job.config
    baselines = submit_baselines(job, state, sample.prompts)
    with job.tracker.phase("annotate"):
        rows_of = [split_turns(rollout) for rollout in sample.rollouts]
        annotated = job.engine.annotate(build_batch([*chain(*rows_of)], job.pad_token_id))
    scored = gather(job, sample.rollouts, sample.futures, "reward_wait")
    greedy = gather_baselines(job, baselines)
    with job.tracker.phase("advantages"):
        longest = config.data.max_response_length
        scores = shape_scores(config.reward.shaping, longest, scored, greedy, state.moments)
        # A response is a row of the batch, or several where each turn has its own history.
        row_scores: list[Scored] = []
        row_places: list[list[Placed]] = []
        for response, rows in zip(scores.scored, rows_of, strict=True):
            placed = place_steps(response.rollout, response.score.steps, job.decode)
            for row, places in split_scores(response, rows, placed, config.environment.gamma_turn):
                row_scores.append(row)
                row_places.append(places)
        shaped = shape_step(
            config, annotated, row_scores, state.kl_coef,
            _baselines_by_row(annotated, scores.baselines), row_places, critic_lam,
        )  # fmt: skip
    check_sampler_weights(job, shaped.metrics)
    return scored, scores, shaped


def _baselines_by_row(
    annotated: AnnotatedBatch, greedy: Sequence[Scored] | None
) -> list[float | None] | None:
    """Return the greedy score of each row's prompt; None without baselines."""
    if greedy is None:
        return None
    return [greedy[group].score.value for group in annotated.group_B.tolist()]


def update(job: Job, state: RunState, batch: TrainBatch) -> StepSums:
    """Train critic, then actor, in epochs of mini-batches; returns sums for the metrics."""
    # The critic, unless the estimator works without one.
    sums = StepSums()
    if batch.values_BT is not None:
        update_critic(job, batch, sums, (MINI_BATCHES, state.step))
    # The actor, after the critic's warm-up.
    if state.step > job.config.trainer.critic_warmup:
        _update_actor(job, state, batch, sums)
    state.count_broken_steps(sums)
    return sums


def update_critic(
    job: Job, batch: TrainBatch, sums: StepSums, key: tuple[int, int], *, pretraining: bool = False
) -> None:
    """Train the critic in epochs of mini-batches; `key` is the random stream and the step."""
    config, settings = job.config, job.config.critic
    with job.tracker.phase("update critic", settings.ppo_epochs) as advance:
        for epoch in range(settings.ppo_epochs):
            seed = stream_seed(config.trainer.seed, *key, epoch, 0)
            for part in _mini_batches(settings, config.rollout.n, seed, batch):
                sums.add(
                    job.engine.step(
                        MiniBatch(part, actor=False, critic=True, pretraining=pretraining)
                    )
                )
            advance(1)


def _update_actor(job: Job, state: RunState, batch: TrainBatch, sums: StepSums) -> None:
    """Train the actor in epochs of mini-batches, until target_kl stops it."""
    config, settings = job.config, job.config.actor
    with job.tracker.phase("update actor", settings.ppo_epochs) as advance:
        for epoch in range(settings.ppo_epochs):
            seed = stream_seed(config.trainer.seed, MINI_BATCHES, state.step, epoch, 1)
            for part in _mini_batches(settings, config.rollout.n, seed, batch):
                step = job.engine.step(MiniBatch(part, actor=True, critic=False))
                sums.add(step)
                # Early stopping: 1.5 times the target, as in OpenAI's Spinning Up.
                moved, tokens = step.get("actor/approx_kl", (0.0, 1.0))
                if settings.target_kl is not None and moved / tokens > 1.5 * settings.target_kl:
                    sums.add({"actor/stopped_early": (1.0, 1.0)})
                    return
            advance(1)


def _mini_batches(
    settings: Actor | Critic, responses: int, seed: int, batch: TrainBatch
) -> Iterator[TrainBatch]:
    """Yield mini-batches with `responses` rows for each prompt; the last may have less.

    Single rows are shuffled if the settings say so. Actor and critic have their own seeds.
    """
    order = np.arange(len(batch))
    if settings.shuffle:
        order = np.random.default_rng(seed).permutation(order)
    size = settings.ppo_mini_batch_size * responses
    for start in range(0, len(order), size):
        yield batch.rows(torch.from_numpy(order[start : start + size]))
