"""A few annotations and optimizer steps of a learner, for comparing two ways to lay rows out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch, build_batch, merge_annotations
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, merge_sums
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import ALONE, Ranks, gather_objects
from ppo_cli.engine.sharding.tensors import gather_copy
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.records import Prompt, Rollout
from tests.settings import complete

Rows = tuple[tuple[int, int], ...]
# Prompt and response of each row: of one token, of one length, longer than any other.
MIXED = ((1, 1), (3, 9), (17, 2), (5, 5), (5, 5), (2, 12), (1, 7), (23, 1), (8, 4))
RATE = 1e-3  # of both optimizers
SPLIT = 24  # tokens of a micro-batch: fewer than the longest rows have together
ANNOTATED = ("old_logprobs_BT", "ref_logprobs_BT", "full_kl_BT", "entropy_BT", "values_BT")


@dataclass
class Seen:
    """What came of it."""

    annotated: list[dict[str, Tensor]]
    sums: list[dict[str, tuple[float, float]]]
    weights: dict[str, Tensor]


def settings(tokens: int = SPLIT, **parts: dict[str, Any]) -> Config:
    """A run with every model; groups of settings are merged over these."""
    optim = {"lr": RATE, "eps": 1e-5}
    defaults = {
        "model": {"path": "embedded", "packing": False},
        "algorithm": {"kl_penalty": "full", "use_kl_in_reward": True},
        "actor": {
            "optim": optim, "use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.1,
            "entropy_coeff": 0.01, "ppo_max_token_len_per_gpu": tokens,
        },
        "critic": {"optim": optim, "ppo_max_token_len_per_gpu": tokens},
        "ref": {"log_prob_max_token_len_per_gpu": tokens},
        "data": {"max_prompt_length": 24, "max_response_length": 12},
    }  # fmt: skip
    return merge_settings(defaults, parts)


def make_batch(rows: Rows, seed: int, *, one_prompt: bool = False, vocabulary: int = 250) -> Any:
    """Rows of random ids; with `one_prompt` prompts of one length are the same."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, vocabulary, (count,), generator=generator).tolist())

    prompts = {p: ids(p) for p, _ in rows} if one_prompt else {}
    rollouts = [
        Rollout(
            Prompt(f"{i}", "", (), "", prompts.get(p) or ids(p)), 0, ids(t),
            torch.zeros(t).numpy(), "", "stop",
        )
        for i, (p, t) in enumerate(rows)
    ]  # fmt: skip
    return build_batch(rollouts, pad_token_id=0)


def annotated(batch: Batch, **tensors: Any) -> AnnotatedBatch:
    """The batch with the named annotations; those of the actor are 0 else, the others missing."""
    zeros = torch.zeros_like(batch.sampler_logprobs_BT)
    values = dict.fromkeys(ANNOTATED) | {"old_logprobs_BT": zeros, "entropy_BT": zeros} | tensors
    return AnnotatedBatch(**vars(batch), **values)  # type: ignore[arg-type]


def scored(batch: AnnotatedBatch, seed: int, **tensors: Any) -> TrainBatch:
    """With made-up advantages; one row has no score."""
    shape = batch.response_mask_BT.shape
    noise = torch.randn((2, *shape), generator=torch.Generator().manual_seed(seed))
    values: dict[str, Any] = vars(batch) | {
        "scores_B": torch.zeros(shape[0]), "valid_B": torch.arange(shape[0]) != 2,
        "token_rewards_BT": torch.zeros(shape), "advantages_BT": noise[0], "returns_BT": noise[1],
        "is_weight_BT": torch.ones(shape),
    }  # fmt: skip
    return TrainBatch(**values | tensors)


def build_optimizer(module: nn.Module, optim: Optim | None = None, **settings: Any) -> Optimizer:
    """An optimizer that clips nothing, unless the settings say otherwise."""
    defaults = {"total_steps": 9, "grad_clip": 0.0, "clip_grad_value": None}
    return Optimizer(module, optim or Optim(), **defaults | settings)


def merge_settings(defaults: dict[str, dict[str, Any]], parts: dict[str, Any]) -> Config:
    """A config of groups of settings, which are merged over the defaults of each group."""
    return complete(
        {key: defaults.get(key, {}) | parts.get(key, {}) for key in {**defaults, **parts}}
    )


def take_steps(
    config: Config,
    ranks: Ranks = ALONE,
    rows: Rows = MIXED,
    steps: int = 3,
    *,
    one_prompt: bool = False,
) -> Seen:
    """Annotate and train on the same rows whatever the settings; all ranks see all of it."""
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    learner = Learner(config, tokenizer, ranks, total_steps=steps)
    seen = Seen([], [], {})
    for step in range(steps):
        batch = make_batch(rows, step, one_prompt=one_prompt)
        merged = merge_annotations(batch, gather_objects(ranks, learner.annotate(batch)))
        seen.annotated.append({name: getattr(merged, name) for name in ANNOTATED})
        minibatch = MiniBatch(scored(merged, step), actor=True, critic=True)
        sums = merge_sums(gather_objects(ranks, learner.step(minibatch)))
        seen.sums.append({name: sum_ for name, sum_ in sums.items() if name != "perf/agree_s"})
        learner.publish()
    for name, model in (("actor", learner.policy), ("critic", learner._models()[-1])):
        named = model.model.named_parameters()
        seen.weights |= {f"{name} {n}": gather_copy(p) for n, p in named}
    return seen


def gaps(first: Seen, other: Seen) -> dict[str, float]:
    """The largest difference of each kind: annotations and means as shares of what they are of.

    A mean is one of log-probs, of values or of their ratios: its scale is theirs. Of weights it is
    the root mean square within a tensor: AdamW moves a weight whose gradient is near its eps by
    what rounding makes of it.
    """
    differences = [
        (a[name] - b[name], b[name].abs().max().clamp_min(1.0))
        for a, b in zip(first.annotated, other.annotated, strict=True)
        for name in ANNOTATED
    ]
    largest = max(scale.item() for _, scale in differences)
    sums = list(zip(first.sums, other.sums, strict=True))
    return {
        "annotated": max((gap.abs().max() / scale).item() for gap, scale in differences),
        "counts": max(abs(a[key][1] - b[key][1]) for a, b in sums for key in a.keys() | b.keys()),
        "means": max(
            abs(a[key][0] - b[key][0]) / b[key][1] / max(largest, abs(b[key][0]) / b[key][1])
            for a, b in sums
            for key in b
        ),
        "weights": max(
            (first.weights[n] - other.weights[n]).square().mean().sqrt().item()
            for n in first.weights
        ),
    }
