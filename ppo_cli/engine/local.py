"""The seven verbs in one process, on one device: one learner, and a sampler on its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.config.model_checks import why_logprobs_again
from ppo_cli.config.schema import Config
from ppo_cli.engine.base import MiniBatch, Sampling, Sums, merge_sums
from ppo_cli.engine.device import set_threads
from ppo_cli.engine.hf_sampler import sample_from
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.micro_batches import tell_out_of_memory
from ppo_cli.engine.responses import merge_annotations
from ppo_cli.engine.sampler import room_told
from ppo_cli.records import Prompt, Rollout


class LocalEngine:
    """Holds every model in this process; the sampler reads the actor's own weights."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        total_steps: int,
        profiles: Path | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        set_threads(config.trainer.threads)
        self._learner = Learner(config, tokenizer, total_steps=total_steps, profiles=profiles)
        for remark in self._learner.remarks:
            tell(remark)
        self._sampler = sample_from(
            self._learner.policy.model, config, tokenizer,
            with_entropies=not why_logprobs_again(config),
        )  # fmt: skip
        self._sampler.room.tell = lambda rows: tell(room_told(rows))

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield rollouts as they finish."""
        awake = self._learner.policy.awake()
        # Greedy responses (validations, baselines) belong to no phase of training.
        phase = self._learner.phase("rollout") if sampling.temperature else nullcontext()
        with phase, tell_out_of_memory("Sampling", "rollout.max_num_seqs"), awake:
            version = self._learner.weight_version
            yield from self._sampler.generate(prompts, sampling, version, begun)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values."""
        return merge_annotations(batch, [self._learner.annotate(batch)])

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step with the actor, the critic or both."""
        return merge_sums([self._learner.step(minibatch)])

    def publish(self) -> None:
        """Raise the weight version and move the learning-rate schedules on."""
        self._learner.publish()

    def save(self, directory: Path) -> Future[None]:
        """Take a snapshot; `actor/`, `critic/` and `state/` are written in the background."""
        return self._learner.begin_save(directory, room=[self._sampler.room.left()])

    def load(self, directory: Path) -> None:
        """Take back weights, optimizers, budgets and the weight version, exactly."""
        for rows in self._learner.load(directory)[:1]:
            self._sampler.room.resume(rows)

    def close(self) -> None:
        """Nothing here outlives the process."""
