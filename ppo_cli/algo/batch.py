"""The tensors of a training step, with a separate frozen type for each stage.

Rollouts -> `Batch` -> `AnnotatedBatch` (old/ref log-probs, values) -> `TrainBatch` (scores,
advantages). Scores join last, so that models annotate while judges are still answering.

Legend: B sequences, L tokens of prompt + response (right-padded), T response tokens
(right-padded), G group of responses to one prompt. A mask is bool and True means it counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ppo_cli.records import Rollout


@dataclass(frozen=True, eq=False)
class Batch:
    """Rollouts as tensors, all on the CPU.

    Response token t of row b sits at `input_ids_BL[b, prompt_len_B[b] + t]`, and its
    log-prob and value are read at the position before it. `response_mask_BT` marks the tokens that
    the policy wrote: an episode has holes where its environment replied. `sampler_entropy_BT` is
    there where the sampler gave entropies.
    """

    input_ids_BL: Tensor  # int64
    prompt_len_B: Tensor  # int64
    response_len_B: Tensor  # int64, >= 1
    response_mask_BT: Tensor  # bool
    sampler_logprobs_BT: Tensor  # float32
    group_B: Tensor  # int64, index of the prompt within the step
    weight_version_B: Tensor  # int64
    sampler_entropy_BT: Tensor | None = field(default=None, kw_only=True)  # float32

    def __len__(self) -> int:
        return int(self.input_ids_BL.shape[0])

    def rows(self, index: Tensor) -> Self:
        """Return the rows at these indices, in their order; padding widths stay."""
        # All tensors of a batch have the rows as their first axis.
        values = {}
        for f in fields(self):
            value = getattr(self, f.name)
            values[f.name] = value[index] if isinstance(value, Tensor) else value
        return replace(self, **values)


@dataclass(frozen=True, eq=False)
class AnnotatedBatch(Batch):
    """A batch with the outputs of the models before any update.

    A tensor is None only if the run has no reference, no critic, or no full-vocabulary KL. Old
    log-probs that come from the sampler are the batch's own tensor. Where the sampler gave no
    entropies, `entropy_BT` has -log p of the tokens drawn, whose mean estimates the entropy.
    """

    old_logprobs_BT: Tensor  # float32
    entropy_BT: Tensor  # float32
    ref_logprobs_BT: Tensor | None
    full_kl_BT: Tensor | None  # KL(actor || reference) over the whole vocabulary
    values_BT: Tensor | None

    @property
    def measures_sampler(self) -> bool:
        """Whether old log-probs were computed by the actor, so that they can differ."""
        return self.old_logprobs_BT is not self.sampler_logprobs_BT


@dataclass(frozen=True, eq=False)
class TrainBatch(AnnotatedBatch):
    """An annotated batch with scores, advantages and returns: all inputs of a step.

    `valid_B` is False for rows whose score failed: they are not in `loss_mask_BT` and not in any
    statistic. `is_weight_BT` is the truncated importance weight between sampler and trainer (ones
    when correction is off).
    """

    scores_B: Tensor  # float32, 0 where not valid
    valid_B: Tensor  # bool
    token_rewards_BT: Tensor
    advantages_BT: Tensor
    returns_BT: Tensor
    is_weight_BT: Tensor

    @property
    def loss_mask_BT(self) -> Tensor:
        """Return the mask of response tokens in rows that have a score."""
        return self.response_mask_BT & self.valid_B[:, None]


def build_batch(rollouts: Sequence[Rollout], pad_token_id: int) -> Batch:
    """Pad rollouts into one `Batch`, one row per rollout in their order.

    An episode that failed before its first token gets one token that does not count. Raises
    ValueError for an empty list or another empty response: a sampler always emits a token.
    """
    if not rollouts:
        raise ValueError("no rollouts to batch")
    if not all(r.token_ids or r.failure for r in rollouts):
        raise ValueError("a rollout has no response token")
    prompt_lens = [len(r.prompt.token_ids) for r in rollouts]
    response_lens = [max(1, len(r.token_ids)) for r in rollouts]
    # Sizes: each row is prompt and response without a gap, padded on the right.
    B, T = len(rollouts), max(response_lens)
    L = max(p + t for p, t in zip(prompt_lens, response_lens, strict=True))
    # Filled as numpy arrays: torch.tensor(tuple) takes six times as long.
    ids_BL = np.full((B, L), pad_token_id, dtype=np.int64)
    logprobs_BT, entropy_BT = np.zeros((2, B, T), dtype=np.float32)
    mask_BT = np.zeros((B, T), dtype=np.bool_)
    for b, r in enumerate(rollouts):
        ids = (*r.prompt.token_ids, *r.token_ids)
        ids_BL[b, : len(ids)] = ids
        logprobs_BT[b, : len(r.token_ids)] = r.sampler_logprobs
        if r.entropies is not None:
            entropy_BT[b, : len(r.token_ids)] = r.entropies
        spans = [(turn.start, turn.end) for turn in r.turns] or [(0, len(r.token_ids))]
        for start, end in spans:
            mask_BT[b, start:end] = True
    # Rollouts of one prompt form a group.
    groups: dict[str, int] = {}
    group = [groups.setdefault(r.prompt.uid, len(groups)) for r in rollouts]
    return Batch(
        input_ids_BL=torch.from_numpy(ids_BL),
        prompt_len_B=torch.tensor(prompt_lens),
        response_len_B=torch.tensor(response_lens),
        response_mask_BT=torch.from_numpy(mask_BT),
        sampler_logprobs_BT=torch.from_numpy(logprobs_BT),
        group_B=torch.tensor(group),
        weight_version_B=torch.tensor([r.weight_version for r in rollouts]),
        sampler_entropy_BT=(
            None
            if any(r.entropies is None and r.token_ids for r in rollouts)
            else torch.from_numpy(entropy_BT)
        ),
    )


@dataclass(frozen=True, eq=False)
class Annotations:
    """The annotations of one rank: its rows of the batch, and (R, T) tensors by name."""

    row_R: Tensor
    tensors: dict[str, Tensor]


def merge_annotations(batch: Batch, parts: Iterable[Annotations]) -> AnnotatedBatch:
    """Merge the annotations of all ranks, and of the sampler if the actor was skipped."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        for name, rows_RT in part.tensors.items():
            # Rows of other ranks are zero until their part comes.
            merged_BT = tensors.setdefault(name, torch.zeros(batch.response_mask_BT.shape))
            merged_BT[part.row_R] = rows_RT
    # No rank computed old log-probs: they are the sampler's.
    if "old_logprobs_BT" not in tensors:
        tensors["old_logprobs_BT"] = batch.sampler_logprobs_BT
        entropy_BT = batch.sampler_entropy_BT
        tensors["entropy_BT"] = -batch.sampler_logprobs_BT if entropy_BT is None else entropy_BT
    return AnnotatedBatch(
        **{name: getattr(batch, name) for name in Batch.__dataclass_fields__},
        old_logprobs_BT=tensors["old_logprobs_BT"],
        entropy_BT=tensors["entropy_BT"],
        ref_logprobs_BT=tensors.get("ref_logprobs_BT"),
        full_kl_BT=tensors.get("full_kl_BT"),
        values_BT=tensors.get("values_BT"),
    )
