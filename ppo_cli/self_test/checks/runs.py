"""A small run of the bundled model: its settings, a batch of known rows, and made-up scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch, build_batch
from ppo_cli.algo.kl import importance_weights
from ppo_cli.config.models.bundled import EMBEDDED
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.machine.gpus import has_bfloat16, list_gpus
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.records import Prompt, Rollout

OPTIM = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}  # eps: no gradient counts by its sign alone
MICRO_BATCH = 96  # tokens; the batch has more
CAP = 2.0  # of importance weights
Rows = Sequence[tuple[int, Sequence[int]]]
# Tokens of a prompt, and of each response to it.
PROMPTS: Rows = ((21, (5, 12, 1)), (1, (7,)), (9, (3, 9)), (30, (2, 8)))
# How far numbers may be apart: rounding of float32, or of bfloat16 through all layers.
LIMITS = {"float32": 1e-4, "bfloat16": 0.3, "float16": 0.05}


def uses_bfloat16(device: str) -> bool:
    """Whether the device is GPUs that compute in bfloat16 themselves."""
    return device == "cuda" and has_bfloat16(list_gpus())


def make_config(device: str, **parts: dict[str, Any]) -> Config:
    """Settings of a run with every model; groups of settings are merged over these."""
    # The kernel for packed rows needs a GPU with bfloat16. GPUs pack and share prompts unasked
    # only once this test has passed.
    model: dict[str, Any] = {"path": EMBEDDED, "dtype": "float32" if device == "cpu" else "float16"}
    if uses_bfloat16(device):
        model |= {"dtype": "bfloat16", "packing": True, "share_prompts": True}
    base: dict[str, dict[str, Any]] = {
        "model": model,
        "actor": {
            "optim": OPTIM, "use_kl_loss": True, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.1,
            "entropy_coeff": 0.01, "ppo_max_token_len_per_gpu": MICRO_BATCH,
        },
        "critic": {"optim": OPTIM, "ppo_max_token_len_per_gpu": MICRO_BATCH},
        "ref": {"log_prob_max_token_len_per_gpu": MICRO_BATCH},
        "data": {"max_prompt_length": 40, "max_response_length": 16},
        "trainer": {"engine": "local", "worker_timeout": 120, "node_timeout": 120},
    }  # fmt: skip
    merged = {key: base.get(key, {}) | parts.get(key, {}) for key in {**base, **parts}}
    return fit_memory(settle(Config.model_validate(merged))).config


def make_batch(vocabulary: int, rows: Rows = PROMPTS) -> Batch:
    """Return a batch of random ids with the lengths in `rows`; the same in each call."""
    generator = torch.Generator().manual_seed(0)

    def draw_ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

    prompts = [
        (Prompt(f"{i}", "", (), "", draw_ids(size)), sizes) for i, (size, sizes) in enumerate(rows)
    ]
    rollouts = [
        Rollout(prompt, sample, draw_ids(size), torch.zeros(size).numpy(), "", "stop")
        for prompt, sizes in prompts
        for sample, size in enumerate(sizes)
    ]
    return build_batch(rollouts, pad_token_id=0)


def score_rows(batch: AnnotatedBatch, seed: int = 0) -> TrainBatch:
    """The batch with random advantages, returns and other policies; the last row has no score.

    Old and sampler's log-probs and old values are moved, so that ratios and values reach each
    clip, and weights their cap.
    """
    shape, mask_BT = batch.response_mask_BT.shape, batch.response_mask_BT
    generator = torch.Generator().manual_seed(seed)
    advantages_BT, returns_BT, moved_BT, gap_BT = (
        torch.randn(shape, generator=generator) for _ in range(4)
    )
    old_BT = torch.where(mask_BT, batch.old_logprobs_BT + moved_BT, 0.0)
    sampler_BT = torch.where(mask_BT, old_BT + gap_BT, 0.0)
    valid_B = torch.ones(shape[0], dtype=torch.bool)
    valid_B[-1] = False
    policies = {"old_logprobs_BT": old_BT, "sampler_logprobs_BT": sampler_BT}
    if batch.values_BT is not None:
        policies["values_BT"] = batch.values_BT + moved_BT
    fields = {name: getattr(batch, name) for name in AnnotatedBatch.__dataclass_fields__}
    return TrainBatch(
        **fields | policies,
        scores_B=torch.zeros(shape[0]), valid_B=valid_B, token_rewards_BT=torch.zeros(shape),
        advantages_BT=advantages_BT, returns_BT=returns_BT,
        is_weight_BT=importance_weights(old_BT, sampler_BT, mask_BT, level="token", threshold=CAP),
    )  # fmt: skip


def largest_gap(value: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """The largest absolute difference, where the mask is True."""
    gap = (value.detach().cpu().double() - expected.detach().cpu().double()).abs()
    return float((gap if mask is None else gap[mask]).max())
