"""PPO steps of the bundled model compared with formulas, and with themselves after a resume.

The formulas process one row at a time, in float64 on the CPU: no packing, no micro-batches, no code
of the engine. Legend: B rows, T response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModel, AutoModelForCausalLM

from ppo_cli.algo.batch import Batch, TrainBatch, merge_annotations
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, merge_sums
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.models.lora import adapter_tensors
from ppo_cli.machine.device_record import Feature
from ppo_cli.self_test.checks.kernels import AdamWFormulas
from ppo_cli.self_test.checks.runs import (
    CAP,
    LIMITS,
    largest_gap,
    make_batch,
    make_config,
    score_rows,
    uses_bfloat16,
)
from ppo_cli.self_test.results import Results, Setup

STEPS = 2
GRPO: dict[str, Any] = {"adv_estimator": "grpo"}
LORA: dict[str, dict[str, Any]] = {
    "model": {"lora_rank": 4, "lora_merge": True, "enable_gradient_checkpointing": True},
    "algorithm": GRPO,
    "rollout": {"n": 2},
}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "packed": {},
    "padded": {"model": {"packing": False}, "algorithm": GRPO, "rollout": {"n": 2}},
    "LoRA": LORA,
}
FLOAT32: dict[str, dict[str, Any]] = {"model": {"dtype": "float32"}}
FLOAT16: dict[str, dict[str, Any]] = {"model": {"dtype": "float16", "packing": False}}
# The way of a run proves these.
PROVES: dict[str, tuple[Feature, ...]] = {
    "packed": ("packed_attention", "shared_prompts"), "float16": ("float16",),
}  # fmt: skip


def check_training(setup: Setup, results: Results) -> None:
    """Annotate and step a few times; compare log-probs, values, losses and gradient norms."""
    # On a CPU every other run is in float32.
    runs = RUNS | {"float16": FLOAT16} | ({"float32": FLOAT32} if setup.device == "cuda" else {})
    if setup.device == "cuda" and not uses_bfloat16(setup.device):
        del runs["packed"]
        results.skip("rows are padded: the kernel for packed rows needs a GPU with bfloat16")
    for name, parts in runs.items():
        with results.part(name, *PROVES.get(name, ())):
            check_run(name, make_config(setup.device, **parts), results)


def check_compiled(setup: Setup, results: Results) -> None:
    """The same for compiled layers, which must not differ from plain ones."""
    with results.part("compiled", "compiled_layers"):
        for name, parts in {"compiled": {}, "compiled LoRA": LORA}.items():
            model = parts.get("model", {}) | {"compile_layers": True}
            check_run(name, make_config(setup.device, **parts | {"model": model}), results)


def check_run(name: str, config: Config, results: Results) -> None:
    """Compare a few steps of a run with the formulas."""
    limit = LIMITS[str(config.model.dtype)]
    # The learner and the formulas start from the same weights and read the same batch.
    learner = make_learner(config)
    formulas = Formulas(learner, config)
    batch = make_batch(learner.policy.model.config.vocab_size)
    mask_BT = batch.response_mask_BT
    for turn in range(STEPS + 1):
        # Annotations of learner and formulas with the present weights.
        annotated = merge_annotations(batch, [learner.annotate(batch)])
        expected = formulas.annotate(batch)
        if turn == 0:
            assert annotated.ref_logprobs_BT is not None
            gap = largest_gap(annotated.old_logprobs_BT, annotated.ref_logprobs_BT, mask_BT)
            results.compare(f"KL to the reference before the first step, {name}", gap, 1e-6)
        for part, expected_BT in expected.items():
            gap = largest_gap(getattr(annotated, part), expected_BT, mask_BT)
            what = part.removesuffix("_BT").replace("_", " ")
            results.compare(f"{what} after {turn} steps, {name}", gap, limit)
        if turn == STEPS:
            _check_published(name, learner, formulas, config, results)
            break
        # The same step with both; its metrics have to agree.
        train_batch = score_rows(annotated, turn)
        sums = merge_sums([learner.step(MiniBatch(train_batch, actor=True, critic=True))])
        for metric, number in formulas.step(train_batch, expected).items():
            total, count = sums[metric]
            gap = abs(total / count - number) / max(1.0, abs(number))
            results.compare(f"{metric} of step {turn + 1}, {name}", gap, limit)
        skipped = sum(sums.get(f"{m}/loss_scale_halvings", (0.0,))[0] for m in ("actor", "critic"))
        results.require(f"losses were scaled by too much, {name}", not skipped)
        learner.publish()


def _check_published(
    name: str, learner: Learner, formulas: Formulas, config: Config, results: Results
) -> None:
    """Compare the weights that samplers get with the formulas', and as they are rounded once.

    Steps in half precision have other gradients; only the merge of an adapter is compared there.
    """
    exact = partial(Tensor.to, device="cpu", dtype=torch.float32)
    whole = dict(learner.published(exact, exact))
    rounded = dict(learner.published(partial(Tensor.to, device="cpu", dtype=torch.bfloat16), exact))
    if config.model.lora_rank or config.model.dtype == "float32":
        expected = Formulas(learner, config) if config.model.lora_rank else formulas
        merged = expected.merged()
        gap = max(largest_gap(tensor, merged[key]) for key, tensor in whole.items())
        results.compare(f"published weights, {name}", gap, LIMITS["float32"])
    gap = max(largest_gap(t, whole[key].bfloat16()) for key, t in rounded.items())
    results.compare(f"weights published in bfloat16, {name}", gap, 0.0)


def make_learner(config: Config) -> Learner:
    """Build the learner of a run in this process."""
    tokenizer = load_tokenizer(model_folder(config.model.path))
    return Learner(config, tokenizer, total_steps=8)


class Formulas:
    """Actor, reference and critic with a learner's initial weights, and PPO's formulas on them."""

    def __init__(self, learner: Learner, config: Config) -> None:
        folder = model_folder(config.model.path)
        options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
        self._config = config
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        self._frozen = {n: p.detach().clone() for n, p in self._model.named_parameters()}
        # Only the weights that the learner trains are leaves.
        weights = self._frozen
        if config.model.lora_rank:
            weights = dict(adapter_tensors(learner.policy.model))
        self._actor = {n: _copy_as_leaf(t) for n, t in weights.items()}
        self._adamw = AdamWFormulas(self._actor, config.actor.optim)
        self._critic: dict[str, Tensor] = {}
        if config.uses_critic:
            self._backbone: Any = AutoModel.from_pretrained(folder, **options).eval()
            self._critic = {n: _copy_as_leaf(p) for n, p in self._backbone.named_parameters()}
            # A missing value head starts at zero.
            head = nn.Linear(self._model.config.hidden_size, 1)
            self._critic |= {
                n: _copy_as_leaf(torch.zeros_like(p)) for n, p in head.named_parameters()
            }
            self._critic_adamw = AdamWFormulas(self._critic, config.critic.optim)

    @torch.no_grad()
    def annotate(self, batch: Batch) -> dict[str, Tensor]:
        """Return log-probs, entropy and values by their names in `AnnotatedBatch`."""
        rows = [*_rows(batch)]
        actor, frozen = self.merged(), self._frozen
        views = [self._logprobs_and_entropies(actor, *row) for row in rows]
        columns = {
            "old_logprobs_BT": [logprobs_T for logprobs_T, _ in views],
            "entropy_BT": [entropy_T for _, entropy_T in views],
            "ref_logprobs_BT": [self._logprobs_and_entropies(frozen, *row)[0] for row in rows],
        }
        if self._critic:
            columns["values_BT"] = [self._values(*row) for row in rows]
        return {name: _pad(column, batch) for name, column in columns.items()}

    def step(self, batch: TrainBatch, old: dict[str, Tensor]) -> dict[str, float]:
        """Take one AdamW step of each model; return losses and gradient norms by metric name."""
        a, mask_BT = self._config.actor, batch.loss_mask_BT
        tokens = int(mask_BT.sum())
        rows = [*_rows(batch)]
        views = [self._logprobs_and_entropies(self.merged(), *row) for row in rows]
        new_BT = _pad([logprobs_T for logprobs_T, _ in views], batch)
        entropy_BT = _pad([entropy_T for _, entropy_T in views], batch)
        # Clipped surrogate (PPO), with the lower bound of dual-clip PPO.
        old_BT, sampler_BT = batch.old_logprobs_BT.double(), batch.sampler_logprobs_BT.double()
        ratio_BT = (new_BT - old_BT).exp()
        gain_BT = batch.advantages_BT.double()
        clipped_BT = ratio_BT.clamp(1 - a.clip_ratio, 1 + a.clip_ratio)
        surrogate_BT = -torch.minimum(gain_BT * ratio_BT, gain_BT * clipped_BT)
        if a.clip_ratio_c is not None:
            bounded_BT = torch.minimum(surrogate_BT, -gain_BT * a.clip_ratio_c)
            surrogate_BT = torch.where(gain_BT < 0, bounded_BT, surrogate_BT)
        # The truncated importance weight of each token: trainer over sampler probability.
        surrogate_BT = surrogate_BT * (old_BT - sampler_BT).exp().clamp(max=CAP)
        # KL loss (low_var_kl, k3) and entropy.
        x_BT = new_BT - old["ref_logprobs_BT"]
        kl_BT = (-x_BT).exp() - 1 + x_BT
        loss_BT = surrogate_BT - a.entropy_coeff * entropy_BT + a.kl_loss_coef * kl_BT
        loss = loss_BT[mask_BT].sum() / tokens
        numbers = {"actor_loss": loss.item()}
        numbers["grad_norm"] = _apply_gradients(loss, self._actor, self._adamw, a)
        # Clipped value loss.
        if self._critic:
            c = self._config.critic
            assert batch.values_BT is not None
            new_BT = _pad([self._values(*row) for row in rows], batch)
            old_BT = batch.values_BT.double()
            reach = torch.inf if c.cliprange_value is None else c.cliprange_value
            near_BT = old_BT + (new_BT - old_BT).clamp(-reach, reach)
            errors_BT = [(v_BT - batch.returns_BT.double()).square() for v_BT in (new_BT, near_BT)]
            value_loss = 0.5 * torch.maximum(*errors_BT)[mask_BT].sum() / tokens
            loss = c.value_loss_coef * value_loss
            numbers["critic_loss"] = loss.item()
            numbers["critic_grad_norm"] = _apply_gradients(
                loss, self._critic, self._critic_adamw, c
            )
        return numbers

    def merged(self) -> dict[str, Tensor]:
        """Return the actor's weights; with LoRA W + alpha / rank B A."""
        model = self._config.model
        if not model.lora_rank:
            return self._actor
        merged = dict(self._frozen)
        merge_adapter(merged, self._actor, model.lora_alpha / model.lora_rank)
        return merged

    def _logprobs_and_entropies(
        self, weights: dict[str, Tensor], ids_1L: Tensor, prompt: int
    ) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy at each response token, at the sampling temperature.

        `prompt` is the number of prompt tokens at the start of the row.
        """
        output = functional_call(
            self._model, weights, kwargs={"input_ids": ids_1L, "use_cache": False}
        )
        logits_TV = output.logits[0, prompt - 1 : -1] / self._config.rollout.temperature
        all_TV = logits_TV.log_softmax(-1)
        return all_TV.gather(1, ids_1L[0, prompt:, None])[:, 0], -(all_TV.exp() * all_TV).sum(-1)

    def _values(self, ids_1L: Tensor, prompt: int) -> Tensor:
        weights = dict(self._critic)
        weight_1H, bias_1 = weights.pop("weight"), weights.pop("bias")
        output = functional_call(
            self._backbone, weights, kwargs={"input_ids": ids_1L, "use_cache": False}
        )
        values_T: Tensor = output.last_hidden_state[0, prompt - 1 : -1] @ weight_1H[0] + bias_1
        return values_T


def merge_adapter(weights: dict[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> None:
    """Add the scaled B A of an adapter to weights (names as in PEFT's files)."""
    for name, a_ri in adapter.items():
        owner = name.removesuffix(".lora_A.weight")
        if owner != name:
            weight = f"{owner.removeprefix('base_model.model.')}.weight"
            change = adapter[f"{owner}.lora_B.weight"].to(weights[weight]) @ a_ri.to(
                weights[weight]
            )
            weights[weight] = weights[weight] + scale * change


def _copy_as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double().clone().requires_grad_()


def _apply_gradients(
    loss: Tensor, weights: dict[str, Tensor], adamw: AdamWFormulas, settings: Any
) -> float:
    """Update `weights` in place with one AdamW step on `loss`; return the gradient norm."""
    grads = torch.autograd.grad(loss, [*weights.values()], allow_unused=True)
    named = {
        n: torch.zeros_like(t) if g is None else g
        for (n, t), g in zip(weights.items(), grads, strict=True)
    }
    return adamw(named, settings.optim.lr, settings.grad_clip)


def _rows(batch: Batch) -> Iterator[tuple[Tensor, int]]:
    """Yield the ids of each row and the length of its prompt."""
    sizes = zip(batch.prompt_len_B.tolist(), batch.response_len_B.tolist(), strict=True)
    for ids_L, (prompt, response) in zip(batch.input_ids_BL, sizes, strict=True):
        yield ids_L[None, : prompt + response], prompt


def _pad(rows: list[Tensor], batch: Batch) -> Tensor:
    width = batch.response_mask_BT.shape[1]
    return torch.stack([nn.functional.pad(row, (0, width - len(row))) for row in rows])


def check_resume(setup: Setup, results: Results) -> None:
    """Save after a step, load into another learner, and take one more step with both."""
    # On a GPU the order of sums is not fixed.
    config = make_config(setup.device)
    limit = 0.0 if setup.device == "cpu" else LIMITS[str(config.model.dtype)]
    learner = make_learner(config)
    batch = make_batch(learner.policy.model.config.vocab_size)
    take_step(learner, batch)
    folder = setup.folder / "checkpoint"
    folder.mkdir()
    learner.begin_save(folder).result()
    # Loaded by a fresh learner, and by one with offloading.
    saved = copy_state(learner)
    loaded: dict[str, Learner] = {}
    for name, parts in {"resumed": {}, "offloaded": OFFLOAD}.items():
        with results.part(name):
            other = make_learner(make_config(setup.device, **parts))
            other.load(folder)
            loaded[name] = other
            _compare_states(f"after loading ({name})", copy_state(other), saved, 0.0, results)
    # One more step with each; one that did not load has failed above.
    take_step(learner, batch, 1)
    expected = copy_state(learner)
    for name, other in loaded.items():
        with results.part(f"{name} step"):
            take_step(other, batch, 1)
            _compare_states(f"after a step ({name})", copy_state(other), expected, limit, results)


OFFLOADED = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
OFFLOAD: dict[str, dict[str, Any]] = {"actor": OFFLOADED, "critic": OFFLOADED}


def take_step(learner: Learner, batch: Batch, seed: int = 0) -> None:
    """Annotate, step both models and raise the weight version."""
    annotated = merge_annotations(batch, [learner.annotate(batch)])
    learner.step(MiniBatch(score_rows(annotated, seed), actor=True, critic=True))
    learner.publish()


def copy_state(learner: Learner) -> dict[str, Tensor]:
    """Copy weights and moments of all trained models, and the weight version."""
    tensors: dict[str, Tensor] = {"version": torch.tensor(float(learner.weight_version))}
    for trained in learner.trained():
        for name, tensor in trained.weights.items():
            tensors[f"{trained.name} {name}"] = tensor.detach().cpu().clone()
        for name, tensor in trained.optimizer.moments().items():
            tensors[f"{trained.name} moments {name}"] = tensor.detach().cpu().clone()
    return tensors


def _compare_states(
    what: str, state: dict[str, Tensor], expected: dict[str, Tensor], limit: float, results: Results
) -> None:
    results.require(f"{what}: other tensors", state.keys() == expected.keys())
    for kind in ("moments", "weights"):
        names = [n for n in expected if (" moments " in n) == (kind == "moments") and n in state]
        gap = max((largest_gap(state[n], expected[n]) for n in names), default=float("nan"))
        results.compare(f"{kind} {what}", gap, limit)
