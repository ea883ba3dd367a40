"""Losses of routers and the balance of experts, against transformers on padded rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_cli.algo.batch import merge_annotations
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import MiniBatch, Sampling, Sums, merge_sums
from ppo_cli.engine.batches.rows import build_micro_batch
from ppo_cli.engine.learner import Learner, LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.training.experts import ExpertMonitor, expert_metrics
from ppo_cli.records import Prompt
from tests.engine.packed_steps import make_batch, scored, settings
from tests.engine.tiny_families import FAMILIES, make_model, save_model

# Two prompts of one length: their rows share one where prompts are shared.
ROWS = ((1, 1), (3, 9), (17, 2), (5, 5), (5, 5), (5, 3), (2, 12), (23, 1), (8, 4))
COEF = 0.3
ASKS = {"output_router_logits": True, "router_aux_loss_coef": COEF}
OTHER_KINDS = ("qwen3_moe", "olmoe", "gpt_oss", "phimoe", "qwen3_next")
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"packing": False},
    "padded, recomputed": {"packing": False, "enable_gradient_checkpointing": True},
    "packed": {"packing": True, "share_prompts": False},
    "packed, shared prompts, recomputed": {"packing": True, "share_prompts": True,
                                           "enable_gradient_checkpointing": True},
}  # fmt: skip


def step(path: str, tokens: int = 32, **model: Any) -> tuple[dict[str, Tensor], Sums]:
    """Gradients and sums of a step in micro-batches of so many tokens."""
    attention = "eager" if "gpt_oss" in path else "sdpa"
    model = {"enable_gradient_checkpointing": False, "attn_implementation": attention} | model
    config = settings(
        model={"path": path, **model}, algorithm={"adv_estimator": "grpo"},
        actor={"ppo_max_token_len_per_gpu": tokens, "grad_clip": 0.0, "optim": {"lr": 0.0},
               "use_kl_loss": False, "entropy_coeff": 0.0},
    )  # fmt: skip
    learner = Learner(config, load_tokenizer(str(model_folder("embedded"))), total_steps=1)
    optimizer, gradients = learner._actor.optimizer, {}
    parameters = dict(learner.policy.model.named_parameters())
    apply = optimizer.apply

    def keep_gradients() -> tuple[float, bool]:
        gradients.update({n: p.grad.clone() for n, p in parameters.items() if p.grad is not None})
        return apply()

    optimizer.apply = keep_gradients  # type: ignore[method-assign]
    batch = make_batch(ROWS, 0, one_prompt=True)
    ready = scored(merge_annotations(batch, [learner.annotate(batch)]), 0)
    # Losses of routers alone have a gradient.
    nothing = torch.zeros_like(ready.advantages_BT)
    batch = replace(ready, advantages_BT=nothing, returns_BT=nothing)
    return gradients, merge_sums([learner.step(MiniBatch(batch, actor=True, critic=False))])


def reference_step(path: str) -> tuple[dict[str, Tensor], float, list[Tensor], Tensor]:
    """What transformers computes of padded rows: gradients, loss, logits of routers, mask."""
    from transformers import AutoModelForCausalLM

    batch = make_batch(ROWS, 0, one_prompt=True)
    length_B = batch.prompt_len_B + batch.response_len_B
    mask_BL = torch.arange(batch.input_ids_BL.shape[1])[None, :] < length_B[:, None]
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    out = model(input_ids=batch.input_ids_BL, attention_mask=mask_BL.long(), use_cache=False)
    (COEF * out.aux_loss).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, out.aux_loss.item(), [*out.router_logits], mask_BL.flatten()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("mixtral", layout) for layout in LAYOUTS),
        ("granitemoe", "packed, shared prompts, recomputed"),
        *(pytest.param(kind, "padded", marks=pytest.mark.slow) for kind in OTHER_KINDS),
    ],
)
def test_the_loss_of_routers_is_that_of_transformers(
    kind: str, layout: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path, kind, **ASKS)
    gradients, loss, _, _ = reference_step(path)
    actual, sums = step(path, **LAYOUTS[layout])
    assert sums["actor/router_aux_loss"][0] == pytest.approx(loss, rel=1e-5)
    assert sums["actor_loss"][0] == pytest.approx(COEF * loss, rel=1e-5)
    assert loss > 1.0
    for name, gradient in gradients.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_z_loss_is_added_where_the_config_has_it(tmp_path: Path) -> None:
    path = save_model(tmp_path, "mixtral", **ASKS, router_z_loss_coef=0.7)
    _, loss, router_logits, mask_N = reference_step(path)
    squares = [logits_NE.logsumexp(-1).square()[mask_N] for logits_NE in router_logits]
    z_loss = torch.cat(squares).mean().item()
    _, sums = step(path, packing=True)
    assert sums["actor/router_z_loss"][0] == pytest.approx(z_loss, rel=1e-5)
    assert sums["actor_loss"][0] == pytest.approx(COEF * loss + 0.7 * z_loss, rel=1e-5)


def test_a_config_that_does_not_ask_has_no_loss(tmp_path: Path) -> None:
    path = save_model(tmp_path, "mixtral", router_aux_loss_coef=COEF)
    gradients, sums = step(path, packing=False)
    assert "actor/router_aux_loss" not in sums
    assert all(gradient.abs().max() == 0 for gradient in gradients.values())


@pytest.mark.parametrize("layout", ["padded", "packed, shared prompts, recomputed"])
def test_the_balance_counts_each_token_of_each_row_once(layout: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, "mixtral", **ASKS)
    _, _, router_logits, mask_N = reference_step(path)
    top_k, experts = FAMILIES["mixtral"]["num_experts_per_tok"], router_logits[0].shape[-1]
    chosen = [logits_NE[mask_N].topk(top_k).indices.flatten() for logits_NE in router_logits]
    loads_RE = torch.stack([ids.bincount(minlength=experts) for ids in chosen]).double()
    share_RE = loads_RE / loads_RE.sum(-1, keepdim=True)
    entropy_R = -(share_RE * share_RE.log()).sum(-1)
    _, sums = step(path, **LAYOUTS[layout])
    load, steps = sums["actor/expert_load_max"]
    assert load / steps == pytest.approx(experts * share_RE.max().item())
    entropy = entropy_R.mean().item() / torch.tensor(float(experts)).log().item()
    assert sums["actor/expert_load_entropy"][0] == pytest.approx(entropy)


def test_balance_by_hand() -> None:
    """Two ranks, two layers of four experts: even, and all tokens to one."""
    first = torch.tensor([[1.0, 1.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    second = torch.tensor([[0.0, 0.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0]])
    sums = expert_metrics([first, second, None])
    assert sums["actor/expert_load_max"] == (4.0, 1.0)
    assert sums["actor/expert_load_entropy"][0] == pytest.approx(0.5)


@pytest.fixture
def monitored() -> tuple[Any, ExpertMonitor, Any]:
    """A backbone, its monitor, and a micro-batch."""
    model = make_model("mixtral", **ASKS)
    micro_batch = build_micro_batch(make_batch(ROWS, 0), [1, 2], torch.device("cpu"))
    return model.model, ExpertMonitor(model, model.model), micro_batch


def test_a_mini_batch_starts_without_the_counts_of_the_one_before(monitored: Any) -> None:
    backbone, monitor, micro_batch = monitored
    counts: list[tuple[Tensor | None, Tensor | None]] = []
    for _ in range(2):
        monitor.reset()
        monitor.reset_assignments()
        with monitor.recording(micro_batch, counts=True), torch.no_grad():
            backbone(micro_batch.input_ids_BL)
        monitor.set_assignments([monitor.assignments()])
        with monitor.recording(micro_batch):
            backbone(micro_batch.input_ids_BL)
        counts.append((monitor.assignments(), monitor.loads()))
    torch.testing.assert_close(counts[1], counts[0])


def test_a_pass_without_gradients_is_not_counted(monitored: Any) -> None:
    """A reference shares its layers with an adapted policy."""
    backbone, monitor, micro_batch = monitored
    with monitor.recording(micro_batch), torch.no_grad():
        backbone(micro_batch.input_ids_BL)
    assert monitor.loads() is None


def test_a_model_without_experts_has_no_balance() -> None:
    _, sums = step(str(model_folder("embedded")), 64, packing=False)
    assert not any("expert" in name for name in sums)


def test_a_config_that_asks_for_losses_samples_alike(tmp_path: Path) -> None:
    sampled = []
    for asks in ({}, ASKS):
        config = settings(
            model={"path": save_model(tmp_path, "mixtral", **asks)},
            algorithm={"adv_estimator": "grpo"},
        )
        engine = LocalEngine(config, load_tokenizer(str(model_folder("embedded"))), total_steps=1)
        prompts = [Prompt(f"{i}", "", (), "", ids) for i, ids in enumerate([(5, 6, 7), (8, 9)])]
        rollouts = engine.generate(prompts, Sampling(n=2, max_tokens=6, temperature=1.0))
        sampled.append(sorted((r.key, r.token_ids) for r in rollouts))
    assert sampled[0] == sampled[1]
