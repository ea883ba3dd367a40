"""Annotations and whole optimizer steps against their formulas, written out in float64.

The plain side sees one row at a time: no padding, no micro-batches, no code of the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

from ppo_cli.algo.batch import TrainBatch, merge_annotations
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, merge_sums
from ppo_cli.engine.learner import Learner
from tests.engine.packed_steps import MIXED, make_batch, merge_settings, scored
from tests.rounding import allowed, assert_near

TINY = {
    "vocab_size": 270, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "attention_dropout": 0.3, "pad_token_id": 0,
}  # fmt: skip
TEMPERATURE, LONGEST, TOTAL_STEPS = 0.6, 15, 8
# Sums over the tokens of all rows, through each layer of the model and back.
TERMS = sum(p + t for p, t in MIXED) * TINY["hidden_size"] * TINY["num_hidden_layers"] * 2
ACTOR_OPTIM = {
    "lr": 4e-3, "lr_warmup_steps": 3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3,
}  # fmt: skip
CRITIC_OPTIM = {
    "lr": 7e-3, "lr_warmup_steps": 0, "lr_scheduler_type": "cosine", "min_lr_ratio": 0.2,
    "betas": (0.7, 0.95), "eps": 5e-3, "weight_decay": 0.1,
}  # fmt: skip
Rates = tuple[float, float]
ACTOR_LR: Rates = (4e-3 * 1 / 4, 4e-3 * 2 / 4)
CRITIC_LR: Rates = (7e-3, 7e-3 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / TOTAL_STEPS))))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An actor, a reference not far from it, and a critic of its own whose head is trained."""
    tensors, other = {}, torch.Generator().manual_seed(2)
    for seed, name in ((0, "actor"), (0, "reference"), (1, "critic")):
        torch.manual_seed(seed)
        kind = Qwen2ForTokenClassification if name == "critic" else Qwen2ForCausalLM
        model = kind(Qwen2Config(**TINY, tie_word_embeddings=name != "critic", num_labels=1))
        with torch.no_grad():
            for p in model.parameters():  # fresh weights give every token the same chance
                p.normal_(std=0.25) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
                if name == "reference":
                    p.add_(0.05 * torch.randn(p.shape, generator=other))
        folder: Path = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        tensors[name] = str(folder)
    return tensors


def settings(folders: dict[str, str], **parts: dict[str, Any]) -> Config:
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": folders["actor"]},
        "ref": {"path": folders["reference"], "log_prob_max_token_len_per_gpu": 50},
        "rollout": {"temperature": TEMPERATURE},
        "data": {"max_response_length": LONGEST},
        "actor": {"optim": ACTOR_OPTIM},
        "critic": {"optim": CRITIC_OPTIM, "model": {"path": folders["critic"]}},
    }
    return merge_settings(defaults, parts)


class PlainAdamW(torch.optim.AdamW):
    """torch's AdamW over one model in float64; its formula is checked in `test_optimizer.py`."""

    def __init__(self, model: Any, optim: dict[str, Any], clips: dict[str, Any]) -> None:
        self.model, self.clips = model, clips
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": optim["weight_decay"]}, {"params": others}]
        super().__init__(groups, betas=optim["betas"], eps=optim["eps"], weight_decay=0.0)

    def clip_and_step(self, lr: float) -> float:
        """Clip, move the weights; returns the norm before clipping."""
        parameters = [*self.model.parameters()]
        norm = clip_grad_norm_(parameters, math.inf).item()
        if self.clips.get("clip_grad_value"):
            clip_grad_value_(parameters, self.clips["clip_grad_value"])
        clip_grad_norm_(parameters, self.clips["grad_clip"] or math.inf)
        for group in self.param_groups:
            group["lr"] = lr
        self.step()
        self.zero_grad()
        return norm

    def moments(self, name: str) -> dict[str, Tensor]:
        return {n: self.state[p][name] for n, p in self.model.named_parameters() if self.state[p]}


def plain(folder: str, kind: Any = AutoModelForCausalLM) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float64).eval()


def row(batch: Any, b: int) -> tuple[Tensor, int, int]:
    p, t = int(batch.prompt_len_B[b]), int(batch.response_len_B[b])
    return batch.input_ids_BL[b, : p + t][None], p, t


def plain_logp(model: Any, batch: Any, b: int) -> tuple[Tensor, Tensor]:
    """Log-prob of each response token, and those of the whole vocabulary there."""
    ids, p, t = row(batch, b)
    logits = model(input_ids=ids, use_cache=False).logits[0, p - 1 : p + t - 1].double()
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
    return logprobs.gather(1, ids[0, p:, None])[:, 0], logprobs


def plain_values(model: Any, batch: Any, b: int) -> Tensor:
    ids, p, t = row(batch, b)
    values: Tensor = model(input_ids=ids, use_cache=False).logits[0, p - 1 : p + t - 1, 0]
    return values


def joined(rows: list[Tensor], width: int) -> Tensor:
    return torch.stack([torch.nn.functional.pad(r, (0, width - len(r))) for r in rows])


def to_train(learner: Learner, folders: dict[str, str], seed: int) -> TrainBatch:
    """Annotated rows, moved away from the policy so that every clip has its tokens."""
    batch = make_batch(MIXED, seed)
    annotated = merge_annotations(batch, [learner.annotate(batch)])
    shape = batch.response_mask_BT.shape
    noise = torch.randn((4, *shape), generator=torch.Generator().manual_seed(seed))
    moved: dict[str, Tensor] = {"old_logprobs_BT": annotated.old_logprobs_BT + 0.6 * noise[0]}
    if annotated.values_BT is not None:
        moved["values_BT"] = annotated.values_BT + 0.6 * noise[1]
    return scored(
        annotated, seed, **moved, advantages_BT=noise[2], returns_BT=noise[3],
        is_weight_BT=0.2 + noise[1].abs(), scores_B=(torch.arange(shape[0]) % 2).float(),
    )  # fmt: skip


def aggregated(rows: list[Tensor], mode: str, factor: float) -> Tensor:
    """Token losses of the rows that count, as one number."""
    if mode == "token-mean":
        return torch.cat(rows).mean()
    if mode == "token-sum":
        return torch.cat(rows).sum()
    per_row = [r.mean() if mode == "seq-mean-token-mean" else r.sum() for r in rows]
    return torch.stack(per_row).mean() / (factor if mode.endswith("-norm") else 1.0)


def plain_kl(
    kind: str, new: Tensor, ref: Tensor, full_logprobs: Tensor, ref_whole: Tensor
) -> Tensor:
    x = new - ref  # k3 is held within 10
    return {
        "full": (full_logprobs.exp() * (full_logprobs - ref_whole)).sum(-1),
        "mse": x * x / 2, "abs": x.abs(),
        "low_var_kl": (torch.exp(-x) - 1 + x).clamp(max=10),
    }[kind]  # fmt: skip


@dataclass(frozen=True)
class ActorCase:
    """How an actor is set, and what of it the formula reads."""

    actor: dict[str, Any]
    low: float = 0.2
    high: float = 0.2
    ratio_bound: float = 3.0
    factor: float = float(LONGEST)
    packing: bool = False


def plain_actor_loss(
    case: ActorCase, model: Any, reference: Any, batch: TrainBatch
) -> tuple[Tensor, dict[str, float]]:
    """The loss of the whole mini-batch, and what is told of it."""
    actor = case.actor
    surrogate, entropy, kl, ratios, clips, lowers, right = [], [], [], [], [], [], []
    for b in range(len(batch)):
        if not batch.valid_B[b]:
            continue
        new, full_logprobs = plain_logp(model, batch, b)
        with torch.no_grad():
            ref, ref_whole = plain_logp(reference, batch, b)
        t = len(new)
        ratio = torch.exp(new - batch.old_logprobs_BT[b, :t])
        a, w = batch.advantages_BT[b, :t], batch.is_weight_BT[b, :t]
        bounds = torch.tensor([1 - case.low, 1 + case.high, case.ratio_bound])
        assert (ratio[:, None] - bounds).abs().min() > 1e-4  # on no edge: rounding decides nothing
        free, clipped = -a * ratio, -a * ratio.clamp(1 - case.low, 1 + case.high)
        worse = torch.where(free > clipped, free, clipped)
        bound = torch.where(a < 0, -a * case.ratio_bound, torch.inf)
        surrogate.append(w * torch.where(worse > bound, bound, worse))
        entropy.append(-(full_logprobs.exp() * full_logprobs).sum(-1))
        kind = actor.get("kl_loss_type", "low_var_kl")
        kl.append(plain_kl(kind, new, ref, full_logprobs, ref_whole))
        if batch.scores_B[b] >= actor.get("positive_score", 1.0):
            right.append(new)
        ratios.append(ratio.detach())
        clips.append(clipped > free)
        lowers.append(worse > bound)
    mode = actor.get("loss_agg_mode", "token-mean")
    policy, spread, apart = (aggregated(r, mode, case.factor) for r in (surrogate, entropy, kl))
    sums = {
        "policy_loss": policy.item(),
        "ppo_ratio": torch.cat(ratios).mean().item(),
        "clip_fraction": torch.cat(clips).double().mean().item(),
        "actor/clip_lower": torch.cat(lowers).double().mean().item(),
        "actor/approx_kl": -torch.cat(ratios).log().mean().item(),
    }
    assert sums["clip_fraction"] > 0.2 and sums["actor/clip_lower"] > 0
    loss = policy
    if "entropy_coeff" in actor:
        loss = loss - actor["entropy_coeff"] * spread
        sums["actor/entropy_loss"] = spread.item()
    if "use_kl_loss" in actor:
        loss = loss + actor["kl_loss_coef"] * apart
        sums["actor/kl_loss"] = apart.item()
    if "positive_nll_coef" in actor:
        assert 0 < len(right) < len(ratios)
        nll = -torch.cat(right).mean()
        loss = loss + actor["positive_nll_coef"] * nll
        sums["actor/positive_nll"] = nll.item()
    sums["actor_loss"] = loss.item()
    return loss, sums


def assert_step(
    learner: Learner, name: str, batch: TrainBatch, by_hand: PlainAdamW, expected: dict[str, float]
) -> None:
    """One step of the learner against a plain one that is taken already."""
    minibatch = MiniBatch(batch, actor=name == "actor", critic=name == "critic")
    sums = merge_sums([learner.step(minibatch)])
    means = {key: total / count for key, (total, count) in sums.items()}
    assert means == pytest.approx(expected | {f"{name}/skipped_steps": 0.0}, rel=allowed(TERMS))
    trained = learner._learners()[name]
    moments = trained.optimizer.moments()
    for kind in ("exp_avg", "exp_avg_sq"):
        exact = by_hand.moments(kind)
        assert {n.removesuffix(f".{kind}") for n in moments if n.endswith(f".{kind}")} == set(exact)
        actual = torch.cat([moments[f"{n}.{kind}"].flatten() for n in exact])
        assert_near(actual, torch.cat([e.flatten() for e in exact.values()]), terms=TERMS)
    model = learner.policy.model if name == "actor" else trained.value_model.model
    weights = dict(by_hand.model.named_parameters())
    # About how far a step moves a weight: what its error is compared with.
    rate = min(ACTOR_LR if name == "actor" else CRITIC_LR)
    for n, p in model.named_parameters():
        assert (p.double() - weights[n]).abs().max() < 1e-3 * rate, n
    learner.publish()


EVERYTHING = {
    "clip_ratio_low": 0.15, "clip_ratio_high": 0.4, "clip_ratio_c": 1.6, "entropy_coeff": 0.2,
    "use_kl_loss": True, "kl_loss_coef": 0.3, "grad_clip": 0.2, "positive_nll_coef": 0.4,
    "positive_score": 0.5,
}  # fmt: skip
ACTORS = {
    "everything on": ActorCase(
        EVERYTHING | {"ppo_micro_batch_size_per_gpu": 3}, low=0.15, high=0.4, ratio_bound=1.6
    ),
    "packed, KL over the vocabulary": ActorCase(
        EVERYTHING | {
            "kl_loss_type": "full", "loss_agg_mode": "seq-mean-token-sum-norm",
            "loss_scale_factor": 7.0, "ppo_max_token_len_per_gpu": 40, "grad_clip": 0.0,
            "clip_grad_value": 0.1,
        }, low=0.15, high=0.4, ratio_bound=1.6, factor=7.0, packing=True,
    ),
    "one clip range": ActorCase(
        {"clip_ratio": 0.3, "clip_ratio_c": 2.0, "loss_agg_mode": "seq-mean-token-sum-norm",
         "use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "mse", "grad_clip": 1e6},
        low=0.3, high=0.3, ratio_bound=2.0,
    ),
    "bounds beside clip_ratio": ActorCase(
        {"clip_ratio": 0.3, "clip_ratio_high": 0.5, "clip_ratio_c": 2.0, "grad_clip": 0.0,
         "loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.1},
        low=0.3, high=0.5, ratio_bound=2.0,
    ),
    "sums of rows": ActorCase(
        {"clip_ratio_low": 0.1, "clip_ratio_c": 1.5, "loss_agg_mode": "seq-mean-token-sum",
         "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "abs", "grad_clip": 2.0,
         "clip_grad_value": 0.5},
        low=0.1, ratio_bound=1.5, packing=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTORS)
def test_two_steps_of_the_actor(name: str, folders: dict[str, str], tokenizer: Any) -> None:
    """Losses, gradients after clipping, learning rates and weights."""
    case = ACTORS[name]
    actor = case.actor | {"optim": ACTOR_OPTIM}
    model = {"path": folders["actor"], "packing": case.packing}
    config = settings(folders, actor=actor, model=model)
    learner = Learner(config, tokenizer, total_steps=TOTAL_STEPS)
    policy, reference = plain(folders["actor"]), plain(folders["reference"])
    by_hand = PlainAdamW(policy, ACTOR_OPTIM, actor)
    for step, lr in enumerate(ACTOR_LR):
        batch = to_train(learner, folders, seed=step)
        loss, sums = plain_actor_loss(case, policy, reference, batch)
        loss.backward()
        norm = by_hand.clip_and_step(lr)
        assert norm > 0.5  # so that clipping to less is seen, and no clipping too
        assert_step(learner, "actor", batch, by_hand, sums | {"grad_norm": norm, "actor/lr": lr})


@dataclass(frozen=True)
class CriticCase:
    """How a critic is set, and what of it the formula reads."""

    critic: dict[str, Any]
    factor: float = float(LONGEST)
    packing: bool = False


CRITICS = {
    "padded": CriticCase(
        {"value_loss_coef": 0.3, "cliprange_value": 0.35, "grad_clip": 0.05,
         "ppo_micro_batch_size_per_gpu": 4},
    ),
    "packed, each row over a constant": CriticCase(
        {"value_loss_coef": 2.5, "cliprange_value": 0.2, "grad_clip": 0.0, "clip_grad_value": 0.1,
         "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 4.0,
         "ppo_max_token_len_per_gpu": 40},
        factor=4.0, packing=True,
    ),
    "each row over the longest response": CriticCase(
        {"value_loss_coef": 1.5, "cliprange_value": 0.3, "grad_clip": 1e6,
         "loss_agg_mode": "seq-mean-token-sum-norm"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CRITICS)
def test_two_steps_of_the_critic(name: str, folders: dict[str, str], tokenizer: Any) -> None:
    """With settings of its own in everything that the actor has too."""
    case = CRITICS[name]
    critic = case.critic | {"optim": CRITIC_OPTIM, "model": {"path": folders["critic"]}}
    actor = {"optim": ACTOR_OPTIM, "grad_clip": 0.01, "clip_grad_value": 1e-4}
    model = {"path": folders["actor"], "packing": case.packing}
    config = settings(folders, actor=actor, critic=critic, model=model)
    learner = Learner(config, tokenizer, total_steps=TOTAL_STEPS)
    value_model = plain(folders["critic"], AutoModelForTokenClassification)
    by_hand = PlainAdamW(value_model, CRITIC_OPTIM, critic)
    for step, lr in enumerate(CRITIC_LR):
        batch = to_train(learner, folders, seed=step)
        assert batch.values_BT is not None
        losses, clips, reach = [], [], critic["cliprange_value"]
        for b in range(len(batch)):
            if not batch.valid_B[b]:
                continue
            new = plain_values(value_model, batch, b)
            old, returns = batch.values_BT[b, : len(new)], batch.returns_BT[b, : len(new)]
            assert ((new - old).abs() - reach).abs().min() > 1e-4
            clipped = torch.maximum(torch.minimum(new, old + reach), old - reach)
            free, clipped_error = (new - returns) ** 2, (clipped - returns) ** 2
            losses.append(torch.where(free > clipped_error, free, clipped_error) / 2)
            clips.append(clipped_error > free)
        mode = critic.get("loss_agg_mode", "token-mean")
        loss = aggregated(losses, mode, case.factor)
        clip_fraction = torch.cat(clips).double().mean().item()
        assert 0.1 < clip_fraction < 0.9
        (critic["value_loss_coef"] * loss).backward()
        norm = by_hand.clip_and_step(lr)
        sums = {
            "value_loss": loss.item(), "critic_loss": critic["value_loss_coef"] * loss.item(),
            "critic/clip_fraction": clip_fraction,
            "critic_grad_norm": norm, "critic/lr": lr,
        }  # fmt: skip
        assert norm > 0.1
        assert_step(learner, "critic", batch, by_hand, sums)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_annotations(packing: bool, folders: dict[str, str], tokenizer: Any) -> None:
    """Policy, reference and critic each say of a token what the plain model says."""
    model = {"path": folders["actor"], "packing": packing}
    config = settings(folders, model=model, algorithm={"kl_penalty": "full"})
    learner = Learner(config, tokenizer, total_steps=TOTAL_STEPS)
    batch = make_batch(MIXED, 0)
    annotated = merge_annotations(batch, [learner.annotate(batch)])
    policy, reference = plain(folders["actor"]), plain(folders["reference"])
    value_model = plain(folders["critic"], AutoModelForTokenClassification)
    exact: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for b in range(len(batch)):
            new, full_logprobs = plain_logp(policy, batch, b)
            ref, ref_whole = plain_logp(reference, batch, b)
            for key, values in (
                ("old_logprobs_BT", new),
                ("ref_logprobs_BT", ref),
                ("entropy_BT", -(full_logprobs.exp() * full_logprobs).sum(-1)),
                ("full_kl_BT", plain_kl("full", new, ref, full_logprobs, ref_whole)),
                ("values_BT", plain_values(value_model, batch, b)),
            ):
                exact.setdefault(key, []).append(values)
    width = batch.response_mask_BT.shape[1]
    for key, rows in exact.items():
        assert_near(getattr(annotated, key), joined(rows, width), terms=TERMS)
    shifted = replace(annotated, old_logprobs_BT=annotated.ref_logprobs_BT)
    with pytest.raises(AssertionError):  # the models do differ
        assert_near(shifted.old_logprobs_BT, joined(exact["old_logprobs_BT"], width), terms=TERMS)


def test_what_is_not_asked_for_is_not_computed(folders: dict[str, str], tokenizer: Any) -> None:
    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": False, "kl_penalty": "full"}
    learner = Learner(settings(folders, algorithm=algorithm), tokenizer, total_steps=1)
    batch = make_batch(MIXED, 0)
    annotated = merge_annotations(batch, [learner.annotate(batch)])
    for name in ("ref_logprobs_BT", "full_kl_BT", "values_BT"):
        assert getattr(annotated, name) is None, name
    sampled = settings(folders, algorithm={"kl_penalty": "kl"})
    seen = Learner(sampled, tokenizer, total_steps=1).annotate(batch).tensors
    assert "full_kl_BT" not in seen and {"ref_logprobs_BT", "values_BT"} <= seen.keys()
