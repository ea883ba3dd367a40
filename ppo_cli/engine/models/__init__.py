"""Models: loaded, adapted, and taken as a backbone and a head."""

from ppo_cli.engine.models.policy import (
    Policy,
    ValueModel,
    count_embeddings,
    load_policy,
    read_stop_token_ids,
    stop_token_ids,
)
from ppo_cli.engine.pretrained import load_tokenizer, pad_token_id

__all__ = [
    "Policy",
    "ValueModel",
    "count_embeddings",
    "load_policy",
    "load_tokenizer",
    "pad_token_id",
    "read_stop_token_ids",
    "stop_token_ids",
]
