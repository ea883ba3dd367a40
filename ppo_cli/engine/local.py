"""The seven verbs in one process, on one device: one learner, and a sampler on its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppo_cli.algo.batch import AnnotatedBatch, Batch
from ppo_cli.config.bundled import model_folder
from ppo_cli.config.schema import Config
from ppo_cli.engine.base import MiniBatch, Sampling, Sums
from ppo_cli.engine.checkpoint import (
    Trained,
    model_files,
    render_files,
    restore,
    saved_model,
    take_snapshot,
)
from ppo_cli.engine.device import Compute
from ppo_cli.engine.hf_sampler import HFSampler
from ppo_cli.engine.learner import Learner, merge_annotations
from ppo_cli.engine.lora import adapter_tensors, write_adapter_config
from ppo_cli.engine.micro_batches import tell_out_of_memory
from ppo_cli.engine.models import decode_text, stop_token_ids
from ppo_cli.engine.ranks import ALONE
from ppo_cli.engine.sums import merge_sums
from ppo_cli.records import Prompt, Rollout


class LocalEngine:
    """Holds every model in this process; the sampler reads the actor's own weights."""

    def __init__(self, config: Config, tokenizer: Any, *, total_steps: int) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._learner = Learner(config, tokenizer, total_steps=total_steps)
        self._sampler = self._build_sampler()
        self._files: dict[str, dict[str, bytes]] = {}  # of checkpoints; they never change

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

    def save(self, directory: Path) -> Future[None]:
        """Take a snapshot; `actor/`, `critic/` and `state/` are written in the background."""
        learner = self._learner
        budgets = {name: [b.rows, b.halvings] for name, b in learner._budgets().items()}
        state = {"weight_version": learner.weight_version, "budgets": budgets}
        return take_snapshot(self._trained(), state, ALONE).write_in_background(directory)

    def load(self, directory: Path) -> None:
        """Take back weights, optimizers, budgets and the weight version, exactly."""
        learner = self._learner
        state = restore(directory, self._trained(), ALONE)
        learner._weight_version = state["weight_version"]
        for name, budget in learner._budgets().items():
            rows, budget.halvings = state["budgets"][name]
            if budget.halvings:  # else the setting of this run counts
                budget.rows = min(rows, budget.rows or rows)
        learner._set_progress()

    def close(self) -> None:
        """Nothing outlives the process here."""

    def _trained(self) -> list[Trained]:
        learner, files = self._learner, self._files
        models = {"actor": learner.policy.model}
        if learner._critic is not None:
            models["critic"] = learner._critic.value_model.model
        found = []
        for name, model in models.items():
            optimizer = learner._learners()[name].optimizer
            if name == "actor" and self._config.model.lora_rank:
                files[name] = files.get(name) or self._adapter_files(model)
                found.append(Trained(name, dict(adapter_tensors(model)), optimizer, files[name]))
            else:
                files[name] = files.get(name) or model_files(model, self._tokenizer)
                found.append(saved_model(name, model, optimizer, files[name]))
        return found

    def _adapter_files(self, model: Any) -> dict[str, bytes]:
        def write(folder: Path) -> None:
            write_adapter_config(folder, model, model_folder(self._config.model.path))
            self._tokenizer.save_pretrained(folder)

        return render_files(write)

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
