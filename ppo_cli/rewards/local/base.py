"""What every reward model comes to, and how its samples are scored in batches.

A model is a tokenizer, a format for samples, and a network. Batches hold samples of one length or
nearly so, within a token budget that learns from running out of memory.

Legend: B samples, L tokens (right-padded), O objectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ppo_cli.errors import RewardError
from ppo_cli.records import Message


@dataclass(frozen=True)
class Encoded:
    """One sample as token ids; `type_ids` for models that tell question from answer by them."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] | None = None


class TooLong(Exception):
    """A sample that does not fit, even after cutting what may be cut; the message has numbers."""


class Format(Protocol):
    """Turns a conversation and the response to it into the ids that a model was trained on.

    `prompts_cut` counts the prompts that lost a part to keep within `max_length` tokens.
    """

    prompts_cut: int
    max_length: int

    def encode(self, messages: Sequence[Message], response: str) -> Encoded:
        """Encode one sample; raises TooLong. Control tokens in `response` stay plain text."""
        ...


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of a batch: `score_B` in float32, and named objectives beside it."""

    score_B: Tensor
    objectives: Mapping[str, Tensor] = field(default_factory=dict)  # name -> (B,)


class Network(Protocol):
    """A loaded reward model: body in its dtype, head in float32, eval mode, no dropout."""

    module: nn.Module

    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        """Score a padded batch (either side); pooling goes by the mask, never by the pad id."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A reward model in memory.

    `adapter` names how it is read, `reason` in one sentence why; `max_length` is the most
    tokens that it was made for, `pad_token_id` a token to pad with (its embedding is unused).
    """

    adapter: str
    reason: str
    network: Network
    tokenizer: Any
    max_length: int
    pad_token_id: int


@dataclass(frozen=True)
class Row:
    """What a sample got: its score, and the objectives beside it."""

    score: float
    objectives: dict[str, float]


@dataclass
class Budget:
    """Most tokens of a batch, padding included; stays lower once memory has run out."""

    tokens: int

    def lower_to(self, tokens: int) -> None:
        """Remember that a batch of more tokens than these did not fit."""
        self.tokens = min(self.tokens, tokens)


@dataclass(frozen=True)
class Batch:
    """A batch that was scored: places of its samples, their rows, tokens, tokens with padding."""

    indices: tuple[int, ...]
    rows: tuple[Row, ...]
    tokens: int
    padded: int


def plan_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Group neighbours within the budget; a sample above it goes alone.

    The lengths come sorted, the longest first, so that the first batch is the largest.
    """
    batches: list[list[int]] = []
    for index in range(len(lengths)):
        batch = batches[-1] if batches else []
        if batch and (len(batch) + 1) * lengths[batch[0]] <= tokens:
            batch.append(index)
        else:
            batches.append([index])
    return batches


def pad(
    samples: Sequence[Encoded], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Right-pad samples to ids, mask and type ids of one shape."""
    shape = len(samples), max(len(sample.ids) for sample in samples)
    ids_BL = torch.full(shape, pad_token_id, dtype=torch.long)
    mask_BL = torch.zeros(shape, dtype=torch.bool)
    types_BL = torch.zeros(shape, dtype=torch.long)
    for i, sample in enumerate(samples):
        ids_BL[i, : len(sample.ids)] = torch.tensor(sample.ids)
        mask_BL[i, : len(sample.ids)] = True
        if sample.type_ids is not None:
            types_BL[i, : len(sample.ids)] = torch.tensor(sample.type_ids)
    typed = samples[0].type_ids is not None
    return ids_BL.to(device), mask_BL.to(device), types_BL.to(device) if typed else None


def score_batches(
    loaded: LoadedModel, samples: Sequence[Encoded], budget: Budget
) -> Iterator[Batch]:
    """Score samples that come sorted, the longest first.

    When memory runs out, the batch is halved and the budget stays at the half.
    """
    lengths = [len(sample.ids) for sample in samples]
    waiting = plan_batches(lengths, budget.tokens)
    while waiting:
        batch = waiting.pop(0)
        scores = _try(loaded, [samples[i] for i in batch])
        if scores is None:
            longest, start = lengths[batch[0]], batch[0]
            if len(batch) == 1:
                raise RewardError(
                    f"The reward model ran out of memory with a single sample of {longest} tokens. "
                    "Lower --reward_model_max_length, give it another --reward_model_device, or "
                    "set --reward_model_offload."
                )
            budget.lower_to(len(batch) // 2 * longest)
            plan = plan_batches(lengths[start:], budget.tokens)
            waiting = [[start + i for i in part] for part in plan]
            continue
        tokens = sum(lengths[i] for i in batch)
        yield Batch(tuple(batch), tuple(rows_of(scores)), tokens, len(batch) * lengths[batch[0]])


def rows_of(scores: Scores) -> list[Row]:
    """Take scores to the host in one piece, a row for each sample."""
    columns = [scores.score_B.float(), *(each_B.float() for each_B in scores.objectives.values())]
    return [
        Row(score, dict(zip(scores.objectives, others, strict=True)))
        for score, *others in torch.stack(columns, dim=1).tolist()
    ]


def body_dtype(module: nn.Module) -> torch.dtype:
    """The precision of most weights; a head in float32 beside them does not count."""
    sizes: dict[torch.dtype, int] = {}
    for weight in module.parameters():
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch could work."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    signs = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _try(loaded: LoadedModel, samples: Sequence[Encoded]) -> Scores | None:
    """Score one batch; None when memory ran out. The error's tensors are gone by then."""
    device = next(loaded.network.module.parameters()).device
    try:
        with torch.inference_mode():
            return loaded.network.score(*pad(samples, loaded.pad_token_id, device))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
