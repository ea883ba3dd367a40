"""The engine of the driver process, with rollouts and annotations put together as the run does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ppo_cli.algo.batch import Batch, build_batch, merge_annotations
from ppo_cli.cluster.engine import ClusterEngine
from ppo_cli.cluster.serialise import prompts_by_uid, rejoin_prompt
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.records import Prompt, Rollout
from tests.engine.packed_steps import scored


class WholeEngine(ClusterEngine):
    """Has the verbs of `Engine`, for tests that need no driver process."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Any]:
        prompt_by_uid = prompts_by_uid(prompts, begun)
        for sent in super().generate(prompts, sampling, begun):
            yield from (rejoin_prompt(item, prompt_by_uid) for item in sent)

    def annotate(self, batch: Batch) -> Any:
        return merge_annotations(batch, super().annotate(batch))


def train_step(
    engine: WholeEngine | LocalEngine, prompts: list[Prompt], sampling: Sampling, pad: int
) -> tuple[Any, ...]:
    """Return rollouts, annotations and sums of a step; prompts are called p0, p1 …"""
    drawn = engine.generate(prompts, sampling)
    rollouts = sorted(drawn, key=lambda r: (int(r.key[0][1:]), r.sample))
    annotated = engine.annotate(build_batch(rollouts, pad))
    sums = engine.step(MiniBatch(scored(annotated, seed=3), actor=True, critic=True))
    engine.publish()
    return rollouts, annotated, sums
