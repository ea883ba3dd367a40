"""What every reward model comes to: a tokenizer, a format for samples, and a network.

Legend: B samples, L tokens (right-padded), O objectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ppo_cli.records import Message


@dataclass(frozen=True)
class Encoded:
    """One sample as token ids; `type_ids` for models that tell question from answer by them."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] | None = None


class TooLong(Exception):
    """A sample that does not fit, even after cutting what may be cut; the message has numbers."""


class Format(Protocol):
    """Turns a conversation and the response to it into the ids that a model was trained on."""

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
