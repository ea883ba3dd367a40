"""Updates of a step: epochs of mini-batches for critic and actor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.config.derived import critic_mini_batch
from ppo_cli.config.schema import Config
from ppo_cli.engine.base import MiniBatch
from ppo_cli.report.metrics import StepSums
from ppo_cli.train.state import SHUFFLE, Job, RunState, stream_seed


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
