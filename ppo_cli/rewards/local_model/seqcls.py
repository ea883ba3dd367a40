"""Sequence classifiers with a `score` head on a causal body, such as Skywork's reward models.

The pooling is our own: the checkpoint's class finds the last token by the pad token's id, which
picks another token where pad and end-of-text are one.
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
    row_weights,
)
from ppo_cli.rewards.local_model.weights import Checkpoint

STEM = "score"


def load_seqcls(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, settings: ModelReward
) -> LastTokenNetwork:
    """Load body and `score`; a head of several rows needs weights for them."""
    hidden = config.get_text_config().hidden_size
    weight_OH, bias_O = linear_head(checkpoint, STEM, hidden)
    outputs = row_weights(checkpoint.folder, len(weight_OH), config, settings.outputs)
    body = load_body(checkpoint, config, dtype)
    return LastTokenNetwork(BodyAndHead(body, weight_OH, bias_O), outputs)
