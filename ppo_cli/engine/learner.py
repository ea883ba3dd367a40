"""Actor, critic and reference on one rank, and the engine of a single process.

Every rank gets the whole batch and computes its share of the rows; the caller of the ranks merges
the shares (`merge_annotations`, `merge_sums`). Ranks must call the same methods with the same
arguments in the same order, because each may contain collectives. `LocalEngine` is the engine of a
single rank in this process; `cluster/engine.py` has that of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, Annotations, Batch, merge_annotations
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import describe_unused_head, full_kl_problem, vocabulary_problem
from ppo_cli.config.models.limits import require_length
from ppo_cli.config.schema.algorithm import Actor, Critic, CriticModel, Sharding
from ppo_cli.config.schema.run import Config, Model
from ppo_cli.engine.base import (
    MiniBatch,
    Sampling,
    Sums,
    Weights,
    describe_halving,
    explain_out_of_memory,
    merge_sums,
)
from ppo_cli.engine.batches.micro_batches import (
    Budget,
    explain_step_errors,
    run_within_memory,
)
from ppo_cli.engine.batches.packing import (
    Loaded,
    build_budget,
    choose_run_mode,
    enable_packing,
)
from ppo_cli.engine.batches.rows import build_micro_batch, row_lengths, row_prompts
from ppo_cli.engine.checkpoint import (
    TrainedModel,
    convert_layers,
    restore,
    stored_tensors,
    take_snapshot,
)
from ppo_cli.engine.cpu.prepare import Preparation
from ppo_cli.engine.cpu.products import set_matmul_library
from ppo_cli.engine.cpu.runtime import keep_freed_memory, set_threads
from ppo_cli.engine.device import Compute, expand_segments
from ppo_cli.engine.models import Policy, ValueModel, count_embeddings, load_policy
from ppo_cli.engine.models.lora import (
    adapt,
    adapter_tensors,
    merged_tensors,
    reference_of,
    write_adapter_config,
)
from ppo_cli.engine.models.policy import Adapt, adapted, stop_token_ids, use_float32_head
from ppo_cli.engine.models.value_models import CRITIC_FLAG, freeze_attention, load_value_model
from ppo_cli.engine.pretrained import load_config, load_tokenizer
from ppo_cli.engine.profiling import Profiler
from ppo_cli.engine.ranks import ALONE, Ranks, run_on_all_ranks
from ppo_cli.engine.samplers.hf import build_shared_sampler
from ppo_cli.engine.samplers.kv_cache import plan_cache
from ppo_cli.engine.samplers.text import run_end_ids
from ppo_cli.engine.saved_files import generation_files, model_files, render_files, tokenizer_files
from ppo_cli.engine.sharding.load import load_sharded
from ppo_cli.engine.sharding.tensors import gather_copy, gather_tensor
from ppo_cli.engine.training.actor_critic import (
    ActorLearner,
    CriticLearner,
    ModelLearner,
    compute_token_stats,
)
from ppo_cli.engine.training.loss_scale import LossScale
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.errors import ModelError, ppo
from ppo_cli.machine.device_record import is_proven
from ppo_cli.planning.memory.advice import advise_memory
from ppo_cli.records import Prompt, Rollout


class Learner:
    """One rank's actor, critic and reference, with their optimizers and checkpoints."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        ranks: Ranks = ALONE,
        *,
        total_steps: int,
        profiles: Path | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._compute = Compute.choose(config.model.dtype)
        self._preparation = Preparation(
            self._compute.device,
            self._compute.dtype,
            ranks.alone,
            ranks.tensor_size > 1 or config.model.compile_layers,
        )
        # IPC shares expandable segments slowly.
        by_ipc = config.rollout.weight_transfer == "ipc"
        if self._compute.device.type == "cuda" and not by_ipc and is_proven("expandable_segments"):
            expand_segments()
        self.remarks: list[str] = []
        if not set_matmul_library(config.model.float32_matmul):
            self.remarks.append("oneDNN would round products of float32 here: BLAS computes them.")
        # State of the run; `load` restores it.
        self.weight_version = 0  # how often `publish` was called in this run
        self._profiler = Profiler(config.trainer, profiles, f"rank_{ranks.rank}")
        self._files: dict[str, dict[str, bytes]] = {}  # of checkpoints; they never change
        self.policy = self._load(
            load_policy,
            model_folder(config.model.path),
            config.actor.fsdp_config,
            config.model.enable_gradient_checkpointing,
            adapt(config.model, config.trainer.seed, self.remarks.append),
            trained=True,
            flag="--model",
        )
        if config.rollout.name == "hf" and plan_cache(self.policy.model) is None:
            self.remarks.append(
                "The hf sampler cannot hold the cache of this model: it computes each response "
                "again for every token. On a GPU, rollout.name=vllm is faster."
            )
        # The frozen reference, then both trained models with their optimizers.
        self._reference = self._load_reference()
        self._actor = self._build_actor(total_steps)
        self._critic = self._build_critic(total_steps)
        # Renders the files of checkpoints now: a model that cannot be saved must not be trained.
        run_on_all_ranks(ranks, self.trained)
        # Annotation runs all models on the same micro-batches.
        self._annotate_budget = build_budget(
            config.ref.log_prob_max_token_len_per_gpu,
            None,
            *self._models(),
        )
        # Advice for running out of memory depends on the settings.
        for budget in self._budgets().values():
            budget.advise = partial(advise_memory, config)
        # When memory is short, ranks free each gathered layer after use.
        ample = config.model.enable_gradient_checkpointing is False
        if self._compute.device.type == "cpu" and (ranks.alone or ample):
            keep_freed_memory()

    @torch.no_grad()
    def annotate(self, batch: Batch) -> Annotations:
        """Compute old and reference log-probs, entropy and values of this rank's rows.

        Skips the actor when the sampler's log-probs are the old ones. Those of one process are,
        if they are of the current weights; a separate sampler's by the settings alone.
        """
        if self._config.trainer.engine == "ray":
            from_sampler = self._config.algorithm.rollout_correction.bypass_mode
        else:
            from_sampler = batch.sampler_entropy_BT is not None and bool(
                (batch.weight_version_B == self.weight_version).all()
            )
        # The actor comes first; the sampler's log-probs replace it.
        models = self._models()[1 if from_sampler else 0 :]
        if not models:
            return Annotations(torch.zeros(0, dtype=torch.int64), {})

        # Results per micro-batch, put together at the end.
        rows: list[Tensor] = []
        parts: list[Tensor] = []  # of each micro-batch: (names, B, T)
        names: list[str] = []

        def collect(group: Sequence[int], last: bool) -> None:
            annotations = self._compute_annotations(batch, group, from_sampler)
            if group and self._ranks.reports_results:
                rows.append(torch.as_tensor(group))
                names[:] = annotations
                # Stacked, so that the host waits for the device once.
                parts.append(pad_to_batch(torch.stack(list(annotations.values())), batch))

        def restart() -> None:
            rows.clear()
            parts.clear()

        # All models stay on the device for all micro-batches.
        with ExitStack() as awake:
            awake.enter_context(self.phase("annotate"))
            for model in models:
                awake.enter_context(model.awake())
            prompts = row_prompts(batch.input_ids_BL, batch.prompt_len_B)
            run_within_memory(
                row_lengths(batch), self._annotate_budget, collect, restart, self._ranks, prompts,
                [model.weights_context for model in models],
            )  # fmt: skip
        if not rows:
            return Annotations(torch.zeros(0, dtype=torch.int64), {})
        return Annotations(
            torch.cat(rows),
            {name: torch.cat([part[i] for part in parts]) for i, name in enumerate(names)},
        )

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step with the actor, the critic or both."""
        sums: Sums = {}
        # The loop trains one model at a time; self-tests train both.
        advise = partial(advise_memory, self._config, "step")
        if minibatch.actor:
            with self.phase("update actor"), explain_step_errors("actor", self._ranks, advise):
                sums |= self._actor.step(minibatch.batch)
        if minibatch.critic and self._critic is not None:
            with self.phase("update critic"), explain_step_errors("critic", self._ranks, advise):
                step = None if minibatch.pretraining else self.weight_version
                self._critic.optimizer.set_progress(step)
                sums |= self._critic.step(minibatch.batch)
        if not self._ranks.alone:
            sums["perf/agree_s"] = (self._ranks.pop_wait_seconds(), 1.0)
        # After memory has run out: the current size limit of micro-batches.
        for name, budget in self._budgets().items():
            if budget.halvings and self._ranks.rank == 0:
                unit, limit = budget.current_limit()
                sums[f"{name}/micro_batch_{unit}"] = (float(limit), 1.0)
        return sums

    def publish(self) -> None:
        """Raise the weight version and advance the learning-rate schedules."""
        self._profiler.finish()
        self.weight_version += 1
        self._set_progress()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context of a phase of the current training step, for its profile."""
        return self._profiler.phase(name, self.weight_version + 1)

    @torch.no_grad()
    def weights(self) -> Weights | None:
        """Return the policy's whole weights on the CPU for a sampler; on the first rank only.

        They may be the live tensors: copy them before the next step.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.iterate_cpu_weights():
            if self._ranks.rank == 0:
                tensors[name] = tensor
        if self._ranks.rank != 0:
            return None
        return Weights(tensors, self.weight_version, adapter=self._config.model.publishes_adapter)

    @torch.no_grad()
    def begin_save(
        self,
        directory: Path,
        writers: int | None = None,
        room: Sequence[int | None] = (),
        *,
        last: bool = False,
    ) -> Future[None]:
        """Copy this rank's share of a checkpoint now, and write it in the background.

        The first `writers` ranks write (all by default): those that see the run folder. `room` has
        each sampler's capacity after halvings, None if there were none. The `last` checkpoint is
        written from the live weights.
        """
        budgets = {name: budget.state() for name, budget in self._budgets().items()}
        state = {
            "weight_version": self.weight_version, "budgets": budgets, "room": [*room],
            "loss_scales": {name: scale.state() for name, scale in self._loss_scales().items()},
        }  # fmt: skip
        snapshot = take_snapshot(self.trained(), state, self._ranks, writers, last=last)
        return snapshot.write_in_background(directory)

    def load(self, directory: Path) -> list[int | None]:
        """Restore weights, optimizers, budgets and the weight version exactly.

        Returns the saved capacities of the samplers.
        """
        state = restore(directory, self.trained(), self._ranks)
        self.weight_version = state["weight_version"]
        for name, budget in self._budgets().items():
            budget.load_state(state["budgets"][name])
        for name, scale_state in state.get("loss_scales", {}).items():  # not in older checkpoints
            self._learners()[name].optimizer.loss_scale.load_state(scale_state)
        self._set_progress()
        room: list[int | None] = state.get("room", [])  # older checkpoints have none
        return room

    def trained(self) -> list[TrainedModel]:
        """Return what a checkpoint saves of the trained models."""
        c = self._config
        trained = [self._describe_model("actor", c.model, c.model.path)]
        if self._critic is not None:
            trained.append(self._describe_model("critic", c.critic.model, c.critic.model.path))
        return trained

    def _describe_model(self, name: str, settings: Model | CriticModel, path: str) -> TrainedModel:
        """Return what a checkpoint saves of a model: its adapter, or all of it.

        Config and tokenizer files are rendered once, on the rank that writes them.
        """
        # An adapter is saved alone, with its config.
        learner = self._learners()[name]
        model = learner.model.model
        lora = settings.lora_rank > 0

        def write_adapter_files(folder: Path) -> None:
            write_adapter_config(folder, model, model_folder(path), settings.quantization)

        if self._ranks.rank == 0 and name not in self._files:
            end_ids: frozenset[int] = frozenset()
            if name == "actor":
                listed = stop_token_ids(model, self._tokenizer)
                end_ids = run_end_ids(listed, self._config, self._tokenizer)
            self._files[name] = (
                render_files(write_adapter_files, "config of the adapter")
                | generation_files(model, end_ids)
                | tokenizer_files(self._tokenizer)
                if lora
                else model_files(model, self._tokenizer, end_ids)
            )
        files = self._files.get(name, {})
        if lora:
            return TrainedModel(name, dict(adapter_tensors(model)), learner.optimizer, files)
        return TrainedModel(name, stored_tensors(model), learner.optimizer, files, model)

    def published(
        self,
        gather: Callable[[Tensor], Tensor] = gather_copy,
        exact: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a sampler needs; all ranks iterate: `gather` may be a collective.

        If `gather` casts, `exact` gathers without casting, for buffers and for weights that are
        still to be merged. vLLM gets the tensors of the model's files, buffers included, by their
        names in the files.
        """
        c, model = self._config, self.policy.model
        if c.model.publishes_adapter:
            return ((name, gather(tensor)) for name, tensor in adapter_tensors(model))
        # vLLM loads checkpoint tensors, the hf sampler the model's parameters.
        as_files = c.rollout.name == "vllm"
        live = stored_tensors(model) if as_files else dict(model.named_parameters())
        tensors = merged_tensors(model, gather, exact, live=live)
        return convert_layers(model, tensors) if as_files else tensors

    @property
    def published_dtype(self) -> torch.dtype | None:
        """Return the dtype of published weights: vLLM's own, which saves bytes; None: unchanged."""
        is_cast = self._config.rollout.name == "vllm" and not self._config.model.publishes_adapter
        return self._compute.dtype if is_cast else None

    def iterate_cpu_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that a sampler needs in host memory; all ranks iterate."""
        return self.published(partial(_to_cpu, dtype=self.published_dtype), _to_cpu)

    def _models(self) -> list[Policy | ValueModel]:
        """Return all models that an annotation may use, the actor first."""
        models: list[Policy | ValueModel] = [self.policy]
        if self._reference is not None:
            models.append(self._reference)
        if self._critic is not None:
            models.append(self._critic.value_model)
        return models

    def _learners(self) -> dict[str, ModelLearner]:
        learners: dict[str, ModelLearner] = {"actor": self._actor}
        if self._critic is not None:
            learners["critic"] = self._critic
        return learners

    def _budgets(self) -> dict[str, Budget]:
        budgets = {name: learner.budget for name, learner in self._learners().items()}
        return budgets | {"annotate": self._annotate_budget}

    def _loss_scales(self) -> dict[str, LossScale]:
        """Return the scales of the losses by model; none where losses are not scaled."""
        scales = {name: learner.optimizer.loss_scale for name, learner in self._learners().items()}
        return {name: scale for name, scale in scales.items() if scale.dynamic}

    def _set_progress(self) -> None:
        for learner in self._learners().values():
            learner.optimizer.set_progress(self.weight_version)

    def _compute_annotations(
        self, batch: Batch, rows: Sequence[int], from_sampler: bool
    ) -> dict[str, Tensor]:
        """Return the annotations of one micro-batch by name, each (B, T); all ranks call.

        These are old log-probs and entropies from the actor (not with `from_sampler`), the full KL,
        reference log-probs, and values; only those that the run needs.
        """
        temperature, compute = self._config.rollout.temperature, self._compute
        budget = self._annotate_budget
        micro_batch = build_micro_batch(
            batch, rows, compute.device, packed=budget.packed, shared=budget.shared
        )
        # The full KL needs actor and reference in the same pass.
        full = "algorithm.kl_penalty" in self._config.full_kls
        annotations: dict[str, Tensor] = {}
        if not from_sampler:
            seen = compute_token_stats(
                self.policy, micro_batch, compute, temperature,
                with_entropy=True, kl_to=self._reference if full else None,
            )  # fmt: skip
            annotations["old_logprobs_BT"] = micro_batch.scatter(seen.logprobs_N)
            annotations["entropy_BT"] = micro_batch.scatter(seen.entropy_N)
            if seen.full_kl_N is not None:
                annotations["full_kl_BT"] = micro_batch.scatter(seen.full_kl_N)
        if self._reference is not None:
            ref = compute_token_stats(
                self._reference, micro_batch, compute, temperature, with_entropy=False
            )
            annotations["ref_logprobs_BT"] = micro_batch.scatter(ref.logprobs_N)
        if self._critic is not None:
            annotations["values_BT"] = self._critic.values_BT(micro_batch)
        return annotations

    def _load(
        self,
        load: Callable[..., Loaded],
        path: str,
        sharding: Sharding,
        checkpointing: bool,
        adapter: Adapt | None = None,
        *,
        trained: bool,
        flag: str,
    ) -> Loaded:
        """Load a model of the run onto all ranks, in the run mode of its family.

        `adapter` injects LoRA layers; `flag` is the setting that error messages name. With
        `trained` False it is the reference.
        """
        settings = self._config.model

        def prepare(loaded: Loaded) -> Loaded:
            """Inject the adapter, if any, and prepare the weights to be trained or frozen."""
            loaded = adapted(loaded, adapter)
            self._preparation.prepare_weights(
                loaded.model,
                trained=trained,
                adds_noise=self._config.model.spread_weights,
                seed=self._config.trainer.seed,
            )
            if settings.widens_head and isinstance(loaded, Policy):
                use_float32_head(loaded.model, self._compute.dtype)
            return loaded

        # 1. The family decides on attention kernel and packing.
        config = run_on_all_ranks(
            self._ranks, partial(load_config, path, flag, settings.trust_remote_code)
        )
        mode, remarks = choose_run_mode(path, config, settings)
        self.remarks += [remark for remark in remarks if remark not in self.remarks]
        # 2. Load, prepare and shard.
        loaded: Loaded = load_sharded(
            load,
            path,
            self._ranks,
            sharding,
            self._compute,
            gradient_checkpointing=checkpointing,
            compiles=settings.compile_layers,
            offload_between_uses=not trained and self._config.loads_reference_once,
            prepare=prepare,
            trust_remote_code=settings.trust_remote_code,
            attn_implementation=mode.kernel,
            flag=flag,
        )
        require_length(loaded.model.config.to_dict(), path, self._config.data)
        self._preparation.prepare_norms(loaded.model, partial(self._probe_states, loaded))
        # 3. Packed rows, after comparing the device's kernel.
        if not mode.packed:
            return loaded
        packed = enable_packing(
            loaded,
            path,
            self._compute,
            self._ranks,
            settings.packing,
            self._config.model.share_prompts,
        )
        if packed.packing is None:
            self.remarks.append(
                f"Rows of {path} are padded: packed attention is not proven on these GPUs "
                f"({ppo('doctor --self-test')})."
            )
        return packed

    def _require_vocabulary(self, loaded: Policy | ValueModel, path: str, flag: str) -> None:
        """Raise ModelError if a model has too few embeddings for the run's tokens, or others."""
        if path == model_folder(self._config.model.path):
            return
        size, policy_size = (count_embeddings(m.model) for m in (loaded, self.policy))
        trust = self._config.model.trust_remote_code
        try:
            ids = load_tokenizer(path, trust_remote_code=trust).get_vocab()
        except ModelError:  # weights without a tokenizer: there is nothing to compare
            ids = {}
        if problem := vocabulary_problem(
            path, flag, size, ids,
            self._config.model.path, policy_size, self._tokenizer.get_vocab(),
        ):  # fmt: skip
            raise ModelError(problem)

    def _probe_states(self, loaded: Policy | ValueModel) -> Tensor:
        """Return the last hidden states of a few tokens under autocast."""
        with self._compute.autocast():
            return loaded.hidden_BLH(torch.arange(7)[None])

    def _load_reference(self) -> Policy | None:
        """Return the frozen reference policy; None if the run does not use one.

        With LoRA, and without another `ref.path`, it is the actor with its adapter disabled.
        """
        c = self._config
        if not c.uses_reference:
            return None
        if c.shares_reference:
            return reference_of(self.policy)
        reference_path = model_folder(c.ref.path)
        flag = "--model" if c.ref.path == c.model.path else "--ref_model"
        reference = self._load(
            load_policy, reference_path, c.reference_sharding,
            c.model.enable_gradient_checkpointing, trained=False, flag=flag,
        )  # fmt: skip
        self._require_vocabulary(reference, reference_path, flag)
        size, policy_size = (count_embeddings(m.model) for m in (reference, self.policy))
        if problem := full_kl_problem(reference_path, size, c.model.path, policy_size, c.full_kls):
            raise ModelError(problem)
        self._preparation.prepare_reference(reference.model)
        return reference

    def _build_actor(self, total_steps: int) -> ActorLearner:
        c = self._config
        optimizer = self._build_optimizer(self.policy.model, c.actor, total_steps)
        tokens = c.actor.ppo_max_token_len_per_gpu
        return ActorLearner(
            self.policy, self._reference, c.actor, tokens, optimizer, self._compute,
            c.rollout.temperature, self._ranks,
        )  # fmt: skip

    def _build_critic(self, total_steps: int) -> CriticLearner | None:
        """Load the value model, and return it with its optimizer; None if the run has no critic."""
        c = self._config
        if not c.uses_critic:
            return None
        checkpointing = c.critic.model.enable_gradient_checkpointing
        path = model_folder(c.critic.model.path)
        adapter = adapt(c.critic.model, c.trainer.seed, self.remarks.append)
        if c.critic.model.freeze_attention:
            adapter = freeze_attention
        value_model = self._load(
            load_value_model, path, c.critic.fsdp_config, checkpointing, adapter, trained=True,
            flag=CRITIC_FLAG,
        )  # fmt: skip
        self._require_vocabulary(value_model, path, CRITIC_FLAG)
        if remark := describe_unused_head(c.critic.model.path):
            self.remarks.append(remark)
        optimizer = self._build_optimizer(value_model.model, c.critic, total_steps)
        tokens = c.critic.ppo_max_token_len_per_gpu
        return CriticLearner(value_model, c.critic, tokens, optimizer, self._compute, self._ranks)

    def _build_optimizer(self, model: Any, settings: Actor | Critic, total_steps: int) -> Optimizer:
        return Optimizer(
            model, settings.optim, total_steps=total_steps, grad_clip=settings.grad_clip,
            clip_grad_value=settings.clip_grad_value, ranks=self._ranks,
            offload=settings.fsdp_config.optimizer_offload,
            scales_losses=self._compute.dtype == torch.float16,
        )  # fmt: skip


def _to_cpu(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return gather_tensor(tensor, dtype).cpu()


def pad_to_batch(part_XBT: Tensor, batch: Batch) -> Tensor:
    """Pad rows of a micro-batch to the width of the whole batch, on the CPU."""
    missing = batch.response_mask_BT.shape[1] - part_XBT.shape[-1]
    return torch.nn.functional.pad(part_XBT.cpu(), (0, missing))


class LocalEngine:
    """The engine of a single process; the sampler uses the actor's live weights."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        total_steps: int,
        profiles: Path | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        # Before any tensor is computed: results depend on the number of threads.
        set_threads(config.trainer.threads)
        self._learner = Learner(config, tokenizer, total_steps=total_steps, profiles=profiles)
        for remark in self._learner.remarks:
            tell(remark)
        self._sampler = build_shared_sampler(
            self._learner.policy.model, config, tokenizer,
            with_entropies=config.algorithm.rollout_correction.bypass_mode,
        )  # fmt: skip
        self._sampler.capacity.on_halving = lambda rows: tell(describe_halving(rows))

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield rollouts as they finish."""
        # Offloaded weights stay on the device while responses are drawn.
        awake = self._learner.policy.awake()
        # Greedy responses (validations, baselines) are not part of a training step's profile.
        phase = self._learner.phase("rollout") if sampling.temperature else nullcontext()
        advise = partial(advise_memory, self._learner._config, "sampling")
        with phase, explain_out_of_memory("Sampling", advise), awake:
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

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Take a snapshot; `actor/`, `critic/` and `state/` are written in the background."""
        return self._learner.begin_save(
            directory, room=[self._sampler.capacity.halved_rows()], last=last
        )

    def load(self, directory: Path) -> None:
        """Restore weights, optimizers, budgets and the weight version exactly."""
        for rows in self._learner.load(directory)[:1]:
            self._sampler.capacity.restore(rows)

    def close(self) -> None:
        """Does nothing: all memory ends with the process."""
