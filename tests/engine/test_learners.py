"""Optimizer steps: what must not matter to them, and steps that must not be taken."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.algo.estimators import POLICY_LOSSES
from ppo_cli.algo.tokens import gather_logprobs_entropy
from ppo_cli.config import choices
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.algorithm import Optim, PolicyLoss
from ppo_cli.engine.base import MiniBatch, merge_sums
from ppo_cli.engine.batches.micro_batches import Budget
from ppo_cli.engine.batches.rows import build_micro_batch
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import Learner, LocalEngine
from ppo_cli.engine.models import Policy, ValueModel, load_policy, load_tokenizer
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.training import actor_critic, loss_scale
from ppo_cli.engine.training.actor_critic import ActorLearner, CriticLearner
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.errors import ModelError
from tests.engine.packed_steps import (
    Seen,
    annotated,
    build_optimizer,
    gaps,
    scored,
    settings,
    take_steps,
)
from tests.engine.packed_steps import make_batch as make_rows
from tests.rounding import assert_near
from tests.settings import CPU, complete, with_gpus

COMPUTE = Compute(torch.device("cpu"), torch.float32)
VOCAB = 97
TOKENS = 16384  # of a micro-batch, all rows
TERMS = 17 * 32 * 2 * 32  # rows, tokens of about a row, layers, width


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=256, attention_dropout=0.1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("qwen2")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)


def make_batch(seed: int = 0, rows: int = 17) -> TrainBatch:
    """Rows of very different lengths, some without a score."""
    rng = np.random.default_rng(seed)
    lengths = zip(
        rng.integers(2, 30, rows).tolist(), rng.integers(1, 25, rows).tolist(), strict=True
    )
    batch = make_rows(tuple(lengths), seed, vocabulary=VOCAB)
    torch.manual_seed(seed)
    old, reference, values, advantages, returns = torch.randn(5, *batch.response_mask_BT.shape)
    with_logprobs = annotated(
        batch, old_logprobs_BT=-4.5 + 0.1 * old, ref_logprobs_BT=-4.5 + 0.1 * reference,
        values_BT=values,
    )  # fmt: skip
    return scored(
        with_logprobs, seed, valid_B=torch.arange(rows) % 5 != 3, advantages_BT=advantages,
        returns_BT=returns,
    )  # fmt: skip


class Recorder(Optimizer):
    """Keeps the gradient that a step would have used."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module, Optim(), total_steps=1, grad_clip=0.0, clip_grad_value=None)
        self.module = module
        self.gradient = torch.empty(0)

    def apply(self) -> tuple[float, bool]:
        gradients = [p.grad.flatten() for p in self.module.parameters() if p.grad is not None]
        self.gradient = torch.cat(gradients).clone()
        return super().apply()


def learner_of(
    policy: Policy, optimizer: Optimizer | None = None, reference: Policy | None = None,
    tokens: int = TOKENS, **settings: Any,
) -> ActorLearner:  # fmt: skip
    actor, optimizer = complete({"actor": settings}).actor, optimizer or Recorder(policy.model)
    return ActorLearner(policy, reference, actor, tokens, optimizer, COMPUTE, 0.7)


def critic_of(value_model: ValueModel, tokens: int = TOKENS, **settings: Any) -> CriticLearner:
    optimizer, critic = Recorder(value_model.model), complete({"critic": settings}).critic
    return CriticLearner(value_model, critic, tokens, optimizer, COMPUTE)


def gradients_of_actor(model_dir: str, batch: TrainBatch, **settings: Any) -> torch.Tensor:
    losses = {"entropy_coeff": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1}
    reference = load_policy(model_dir)
    learner = learner_of(load_policy(model_dir), reference=reference, **losses | settings)
    learner.step(batch)
    return learner.optimizer.gradient


def gradients_of_critic(model_dir: str, batch: TrainBatch) -> torch.Tensor:
    value_model = load_value_model(model_dir)
    torch.manual_seed(1)
    torch.nn.init.normal_(value_model.head.weight)
    learner = critic_of(value_model)
    learner.step(batch)
    return learner.optimizer.gradient


@pytest.mark.parametrize("gradients", [gradients_of_actor, gradients_of_critic])
def test_gradients_do_not_depend_on_padding_or_order(gradients, model_dir) -> None:
    batch = make_batch()
    full = gradients(model_dir, batch)
    for other in (pad_wider(batch, 13), batch.rows(torch.randperm(len(batch)))):
        assert_near(gradients(model_dir, other), full, terms=TERMS)


def test_many_logits_are_computed_again_and_few_are_kept(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    logits = int(batch.response_len_B.sum()) * VOCAB
    results = []
    for limit in (logits, logits - 1):
        monkeypatch.setattr(actor_critic, "KEPT_LOGITS", limit)
        passes: list[bool] = []

        def note(*args: Any, passes: list[bool] = passes, **named: Any) -> Any:
            passes.append(named["keep"])
            return gather_logprobs_entropy(*args, **named)

        monkeypatch.setattr(actor_critic, "gather_logprobs_entropy", note)
        results.append(gradients_of_actor(model_dir, batch))
        assert passes == [limit == logits]
    assert_near(results[0], results[1], terms=TERMS)


@pytest.mark.parametrize("kind", [k for k, loss in POLICY_LOSSES.items() if loss.chooses])
def test_chosen_tokens_are_those_of_the_whole_mini_batch(kind: str, model_dir: str) -> None:
    loss = PolicyLoss(
        loss_mode=kind, clip_cov_ratio=0.1, kl_cov_ratio=0.1, clip_cov_lb=0.0, ppo_kl_coef=1.0
    )
    batch = make_batch()
    settings = {"policy_loss": loss, "clip_ratio": 0.9}
    full = gradients_of_actor(model_dir, batch, **settings)
    cut = gradients_of_actor(model_dir, batch, ppo_micro_batch_size_per_gpu=2, **settings)
    assert_near(cut, full, terms=TERMS)
    plain = gradients_of_actor(model_dir, batch, clip_ratio=0.9)
    assert (plain - full).abs().max() > 1e-3 * full.abs().max()


def pad_wider(batch: TrainBatch, extra: int) -> TrainBatch:
    """The same rows under more padding, filled with noise where that must not matter."""
    wide = {}
    for name in batch.__dataclass_fields__:
        value = getattr(batch, name)
        if isinstance(value, torch.Tensor) and name.endswith(("_BT", "_BL")):
            fill = torch.zeros(len(batch), extra, dtype=value.dtype)
            if name in ("advantages_BT", "returns_BT", "values_BT"):
                fill = fill + 1e3
            wide[name] = torch.cat([value, fill], dim=1)
    return replace(batch, **wide)


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        pytest.param({"valid_B": False}, "actor/empty_minibatches", id="no row has a score"),
        pytest.param({"advantages_BT": math.inf}, "actor/skipped_steps", id="infinite gradients"),
    ],
)
def test_a_step_that_cannot_be_taken_changes_nothing(
    model_dir: str, change: dict[str, Any], metric: str
) -> None:
    batch = make_batch(rows=4)
    batch = replace(batch, **{n: torch.full_like(getattr(batch, n), v) for n, v in change.items()})
    policy = load_policy(model_dir)
    before = [p.clone() for p in policy.model.parameters()]
    optimizer = build_optimizer(policy.model, Optim(lr=1.0), grad_clip=1.0, clip_grad_value=0.5)
    sums = merge_sums([learner_of(policy, optimizer).step(batch)])
    assert sums[metric] == (1.0, 1.0)
    assert len(sums) == 1 or metric == "actor/skipped_steps"
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("tokens", "expected"), [((300, 400, 500), [300, 400, 500]), ((None,) * 3, [2048] * 3)], ids=str
)
def test_budgets_of_tokens_are_as_set_or_small_on_the_cpu(
    tokens: tuple[int | None, ...], expected: list[int]
) -> None:
    keys = (
        ("actor", "ppo_max_token_len_per_gpu"), ("critic", "ppo_max_token_len_per_gpu"),
        ("ref", "log_prob_max_token_len_per_gpu"),
    )  # fmt: skip
    config = complete({
        "model": {"path": "embedded", "packing": False},
        **{part: {key: set_} for (part, key), set_ in zip(keys, tokens, strict=True) if set_},
    })  # fmt: skip
    learner = Learner(config, load_tokenizer(model_folder("embedded")), total_steps=1)
    budgets = learner._budgets()
    assert [budgets[name].tokens for name in ("actor", "critic", "annotate")] == expected


@pytest.mark.parametrize("rank", [0, 2])
def test_what_a_checkpoint_could_not_save_is_refused_before_the_first_step(rank) -> None:
    tokenizer = load_tokenizer(model_folder("embedded"))
    tokenizer.chat_template, tokenizer.name_or_path = "\ud800", ""
    config = complete({"model": {"path": "embedded", "lora_rank": rank}})
    with pytest.raises(ModelError, match="cannot be saved, so no checkpoint could be written"):
        Learner(config, tokenizer, total_steps=1)


def test_a_gpu_and_several_ranks_take_large_micro_batches() -> None:
    path = {"model": {"path": "nobody/knows"}}
    for trainer, here, tokens in (
        ({}, CPU, 2048), ({"n_gpus_per_node": 1}, with_gpus(1), 16384),
        ({"num_workers": 2}, CPU, 16384),
    ):  # fmt: skip
        config = complete(path | {"trainer": trainer}, here)
        assert config.actor.ppo_max_token_len_per_gpu == tokens
        assert config.critic.ppo_max_token_len_per_gpu == tokens


@pytest.mark.parametrize(("rows", "tokens"), [(None, 16384), (3, 16384), (2, 120)])
def test_each_model_has_a_budget_of_its_settings(
    model_dir: str, rows: int | None, tokens: int
) -> None:
    cut = {"ppo_micro_batch_size_per_gpu": rows}
    policy, value_model = load_policy(model_dir), load_value_model(model_dir)
    assert learner_of(policy, None, None, tokens, **cut).budget == Budget(tokens, rows)
    assert critic_of(value_model, tokens, **cut).budget == Budget(tokens, rows)


def test_every_forward_pass_stays_within_the_budget(model_dir: str) -> None:
    """At most two rows, and at most 120 padded tokens."""
    batch, value_model, shapes = make_batch(), load_value_model(model_dir), []
    value_model.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    critic_of(value_model, 120, ppo_micro_batch_size_per_gpu=2).step(batch)
    assert sum(B for B, _ in shapes) == len(batch)
    assert max(B for B, _ in shapes) == 2 and max(B * L for B, L in shapes) <= 120


def test_a_micro_batch_that_runs_out_of_memory_is_halved(model_dir, monkeypatch) -> None:
    """Memory runs out above three rows: the gradient stays right and the size is remembered."""
    batch = make_batch(rows=16)
    exact, policy = learner_of(load_policy(model_dir)), load_policy(model_dir)
    exact.step(batch)
    forward, sizes = policy.backbone.forward, []

    def limited(*args: object, **kwargs: object) -> object:
        rows = kwargs["input_ids"].shape[0]  # type: ignore[attr-defined]
        sizes.append(rows)
        if rows > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(policy.backbone, "forward", limited)
    learner = learner_of(policy)
    learner.step(batch)
    assert_near(learner.optimizer.gradient, exact.optimizer.gradient, terms=TERMS)
    assert learner.budget.rows == 2 and learner.budget.halvings == 3
    sizes.clear()
    learner.step(batch)
    assert max(sizes) == 2


def test_a_rank_without_rows_trains_on_nothing() -> None:
    batch, cpu = make_batch(), torch.device("cpu")
    idle = build_micro_batch(batch, [], cpu)
    assert idle.idle and not idle.loss_mask_BT(batch).any()
    assert build_micro_batch(batch, idle.row_B.tolist(), cpu).loss_mask_BT(batch).any()


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_a_checkpoint_keeps_versions_rates_and_what_memory_allows(
    tmp_path: Path, unit: str
) -> None:
    def build() -> LocalEngine:
        optim = {"lr": 0.5, "lr_scheduler_type": "cosine"}
        config = complete({
            "model": {
                "path": "embedded", "packing": unit == "tokens",
                "dtype": "float32" if unit == "tokens" else "float16",
            },
            "rollout": {"max_num_seqs": 9}, "actor": {"optim": optim},
            "critic": {"optim": optim | {"lr_warmup_steps": 6}},
        })  # fmt: skip
        tokenizer = load_tokenizer(model_folder("embedded"))
        return LocalEngine(config, tokenizer, total_steps=8, tell=report.append)

    report: list[str] = []
    engine, other = build(), build()
    for _ in range(3):
        engine.publish()
    learner = engine._learner
    budgets = learner._budgets()
    assert budgets.keys() == {"actor", "critic", "annotate"}
    for number, budget in enumerate(budgets.values(), 1):
        setattr(budget, unit, 10 * number)
        budget.halvings = number
    for scale in learner._loss_scales().values():
        scale.load_state((8.0, 5))
    engine._sampler.capacity.halve(6)
    assert report == [
        "Sampling ran out of memory: at most 3 responses are sampled at once now. Set "
        "rollout.max_num_seqs=3 to start there next time."
    ]
    engine.save(tmp_path).result(60)
    other.load(tmp_path)
    repeated, capacity = other._learner, other._sampler.capacity
    assert (repeated.weight_version, capacity.rows, capacity.halved_rows()) == (3, 3, 3)
    assert repeated._budgets() == budgets
    scales = {name: scale.state() for name, scale in repeated._loss_scales().items()}
    assert scales == ({} if unit == "tokens" else {"actor": (8.0, 5), "critic": (8.0, 5)})
    assert repeated._actor.optimizer.lr == pytest.approx(0.25 * (1 + math.cos(math.pi * 3 / 8)))
    assert repeated._critic.optimizer.lr == pytest.approx(0.5 * 4 / 7)
    # What is told of a step from then on, by the first rank alone.
    batch = replace(make_batch(), valid_B=torch.zeros(17, dtype=torch.bool))
    sums = other.step(MiniBatch(batch, actor=True, critic=True))
    assert {name: value for name, value in sums.items() if "micro_batch" in name} == {
        f"{name}/micro_batch_{unit}": (10.0 * number, 1.0) for number, name in enumerate(budgets, 1)
    }
    assert sums["actor/empty_minibatches"] == sums["critic/empty_minibatches"] == (1.0, 1.0)


def test_float16_rounds_and_too_large_a_loss_scale_only_skips_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(dtype: str) -> Seen:
        return take_steps(settings(model={"path": "embedded", "dtype": dtype}), steps=1)

    exact, half = train("float32"), train("float16")
    for name in [name for name in half.sums[0] if "loss_scale" in name]:
        del half.sums[0][name]
    assert max(gaps(half, exact).values()) < 0.02
    # Infinite in float16: the step halves the scale, and changes nothing.
    monkeypatch.setattr(loss_scale, "START", 2.0**60)
    skipped = train("float16")
    names = [f"actor/{name}" for name in ("loss_scale", "loss_scale_halvings", "skipped_steps")]
    assert [skipped.sums[0][name][0] for name in names] == [2.0**60, 1.0, 0.0]
    stored = load_policy(model_folder("embedded")).model.state_dict()
    for name, weight in skipped.weights.items():
        role, _, key = name.partition(" ")
        assert role == "critic" or torch.equal(weight, stored[key])


@pytest.mark.parametrize("fast", [True, False])
def test_one_process_computes_in_bfloat16_and_spreads_weights_where_that_is_faster(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint in bfloat16: what is trained gets other last places, the reference none.

    It is held in bfloat16 itself, or packed as oneDNN reads it.
    """
    monkeypatch.setattr(choices, "MIN_BFLOAT16_WIDTH", 1)
    tokenizer = load_tokenizer(model_folder("embedded"))
    stored = load_policy(model_folder("embedded")).model.bfloat16()
    stored.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = complete(
        {"model": {"path": str(tmp_path)}, "trainer": {"engine": "local"}},
        replace(CPU, fast_bfloat16=fast),
    )
    learner = LocalEngine(config, tokenizer, total_steps=8)._learner
    assert learner._compute.dtype == (torch.bfloat16 if fast else torch.float32)
    name = next(n for n, _ in stored.named_parameters() if n.endswith("mlp.up_proj.weight"))
    exact = stored.get_parameter(name)
    assert learner._reference is not None
    trained = learner.policy.model.get_parameter(name)
    kept_values = learner._reference.model.get_parameter(name)
    assert kept_values.dtype == (torch.bfloat16 if fast else torch.float32)
    assert kept_values.is_meta or torch.equal(kept_values.float(), exact.float())
    assert torch.equal(trained, exact.float()) is not fast
    assert torch.equal(trained.bfloat16(), exact)
