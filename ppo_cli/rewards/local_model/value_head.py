"""Causal models with a value head, read at the last token.

Known layouts: TRL's `v_head.summary`, OpenRLHF's `value_head` or `score`, a bare `v_head` or
`reward_head`, and token classifiers (`score` or `classifier`), which critics are saved as.
"""

from __future__ import annotations

from typing import Any

import torch

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import ModelError
from ppo_cli.rewards.local_model.body import load_body
from ppo_cli.rewards.local_model.last_token import (
    BodyAndHead,
    LastTokenNetwork,
    linear_head,
    only_row,
    row_weights,
)
from ppo_cli.rewards.local_model.weights import Checkpoint

STEMS = ("v_head.summary", "v_head", "value_head", "reward_head", "score", "classifier")


def load_value_head(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, settings: ModelReward
) -> LastTokenNetwork:
    """Load the body, under whatever prefix it lies, and its value head."""
    stem = _stem(checkpoint)
    hidden = config.get_text_config().hidden_size
    weight_OH, bias_O = linear_head(checkpoint, stem, hidden, bias=_needs_bias(stem, config))
    only_row(checkpoint, stem, weight_OH)
    outputs = row_weights(checkpoint.folder, 1, config, settings.outputs)
    body = load_body(checkpoint, config, dtype)
    return LastTokenNetwork(BodyAndHead(body, weight_OH, bias_O), outputs)


def _stem(checkpoint: Checkpoint) -> str:
    for stem in STEMS:
        if f"{stem}.weight" in checkpoint.names:
            return stem
    present = checkpoint.starting_with(*(f"{stem}." for stem in STEMS))
    raise ModelError(
        f"{checkpoint.folder} lacks the weight of its value head (it has {present}): fetch the "
        "whole checkpoint."
    )


def _needs_bias(stem: str, config: Any) -> bool | None:
    """Whether the head must have a bias: True, or None for `where there is one`."""
    if stem == "v_head.summary":
        return True
    written_by = (getattr(config, "architectures", None) or [""])[0]
    if stem == "score" and written_by.endswith("ForTokenClassification"):
        return True if getattr(config, "token_classification_bias", True) else None
    return None
