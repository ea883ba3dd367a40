"""What the ranks of a learner found out about the rows of a batch, and how it is put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, Batch


@dataclass(frozen=True, eq=False)
class Annotations:
    """What one rank found: its rows of the batch, and (R, T) tensors by name."""

    row_R: Tensor
    found: dict[str, Tensor]


def merge_annotations(batch: Batch, parts: Iterable[Annotations]) -> AnnotatedBatch:
    """Put the shares of all ranks into one annotated batch."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, rows_RT in part.found.items():
            whole = found.setdefault(name, torch.zeros(batch.response_mask_BT.shape))
            whole[part.row_R] = rows_RT
    return AnnotatedBatch(
        **{name: getattr(batch, name) for name in Batch.__dataclass_fields__},
        old_logprobs_BT=found["old_logprobs_BT"],
        entropy_BT=found["entropy_BT"],
        ref_logprobs_BT=found.get("ref_logprobs_BT"),
        full_kl_BT=found.get("full_kl_BT"),
        values_BT=found.get("values_BT"),
    )
