"""The seven verbs in one process, on one device: one learner, and a sampler on its weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.config.schema import Config
from ppo_cli.engine.base import MiniBatch, Sampling, Sums
from ppo_cli.engine.device import Compute
from ppo_cli.engine.hf_sampler import HFSampler
from ppo_cli.engine.learner import Learner, merge_annotations
from ppo_cli.engine.micro_batches import tell_out_of_memory
from ppo_cli.engine.models import (
    DAMAGED,
    decode_text,
    load_policy,
    load_value_model,
    stop_token_ids,
)
from ppo_cli.engine.sums import merge_sums
from ppo_cli.errors import ModelError
from ppo_cli.records import Prompt, Rollout


class LocalEngine:
    """Holds every model in this process; the sampler reads the actor's own weights."""

    def __init__(self, config: Config, tokenizer: Any, *, total_steps: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._learner = Learner(config, tokenizer, total_steps=total_steps)
        self._sampler = self._build_sampler()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Rollout]:
        """Yield rollouts as they finish."""
        with tell_out_of_memory("Sampling", "rollout.max_num_seqs"):
            yield from self._sampler.generate(prompts, sampling, self._learner.weight_version)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values."""
        return merge_annotations(batch, [self._learner.annotate(batch)])

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step with the actor, the critic or both."""
        return merge_sums([self._learner.step(minibatch)])

    def publish(self) -> None:
        """Raise the weight version and move the learning-rate schedules on."""
        self._learner.publish()

    def save(self, directory: Path) -> None:
        """Write `actor/`, `critic/` and `state/`."""
        learner = self._learner
        learner.policy.model.save_pretrained(directory / "actor")
        self._tokenizer.save_pretrained(directory / "actor")
        if learner._critic is not None:
            learner._critic.value_model.model.save_pretrained(directory / "critic")
            self._tokenizer.save_pretrained(directory / "critic")
        state = directory / "state"
        state.mkdir(exist_ok=True)
        for name, part in learner._learners().items():
            torch.save(part.optimizer.state_dict(), state / f"{name}_optimizer.pt")
        budgets = {name: [b.rows, b.halvings] for name, b in learner._budgets().items()}
        told = {"weight_version": learner.weight_version, "budgets": budgets}
        (state / "engine.json").write_text(json.dumps(told, indent=2))

    def load(self, directory: Path) -> None:
        """Take back weights, optimizers, budgets and the weight version, exactly."""
        learner = self._learner
        try:
            state = json.loads((directory / "state" / "engine.json").read_text())
            for name, part in learner._learners().items():
                path = directory / "state" / f"{name}_optimizer.pt"
                part.optimizer.load_state_dict(torch.load(path, weights_only=True))
            _copy_weights(load_policy(str(directory / "actor")).model, learner.policy.model)
            if learner._critic is not None:
                saved = load_value_model(str(directory / "critic"))
                _copy_weights(saved.model, learner._critic.value_model.model)
        except (*DAMAGED, ModelError) as error:
            raise ModelError(
                f"The checkpoint {directory} does not fit this run or is damaged: {error} "
                "Start afresh with --resume never, or name another checkpoint with --resume PATH."
            ) from error
        learner._weight_version = state["weight_version"]
        for name, budget in learner._budgets().items():
            rows, budget.halvings = state["budgets"][name]
            if budget.halvings:  # else the setting of this run counts
                budget.rows = min(rows, budget.rows or rows)
        learner._set_progress()

    def close(self) -> None:
        """Nothing outlives the process here."""

    def _build_sampler(self) -> HFSampler:
        compute = Compute.choose(self._config.model.dtype)
        model = self._learner.policy.model
        return HFSampler(
            model,
            eos_token_ids=stop_token_ids(model, self._tokenizer),
            pad_token_id=self._tokenizer.pad_token_id,
            max_num_seqs=self._config.rollout.max_num_seqs,
            detokenize=partial(decode_text, self._tokenizer),
            autocast=None if compute.dtype == torch.float32 else compute.dtype,
        )


@torch.no_grad()
def _copy_weights(source: Any, target: Any) -> None:
    """Copy all weights in place: optimizers keep pointing at the same tensors."""
    fresh = source.state_dict()
    for name, tensor in target.state_dict().items():
        tensor.copy_(fresh[name])
