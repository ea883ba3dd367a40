"""Starling's reward model: a Llama body under `transformer.*` and `v_head.weight`, no bias.

Its checkpoint holds the body twice (`model.model.*` is the same); its score is read at the last
token that is no padding, the `</s>` after the answer.
"""

from __future__ import annotations

from typing import Any

import torch

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.rewards.local_model.body import load_body
from ppo_cli.rewards.local_model.last_token import (
    BodyAndHead,
    LastTokenNetwork,
    linear_head,
    only_row,
    row_weights,
)
from ppo_cli.rewards.local_model.weights import Checkpoint

STEM = "v_head"
BODIES = ("transformer.", "model.model.", "model.")


def load_starling(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, settings: ModelReward
) -> LastTokenNetwork:
    """Load the body that the head was trained on, and the head."""
    weight_OH, bias_O = linear_head(checkpoint, STEM, config.hidden_size, bias=False)
    only_row(checkpoint, STEM, weight_OH)
    outputs = row_weights(checkpoint.folder, 1, config, settings.outputs)
    body = load_body(checkpoint, config, dtype, prefer=BODIES)
    return LastTokenNetwork(BodyAndHead(body, weight_OH, bias_O), outputs)
