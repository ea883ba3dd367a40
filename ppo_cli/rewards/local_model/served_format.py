"""The format of a model that is served elsewhere: a tokenizer, and no network."""

from __future__ import annotations

from typing import cast

from transformers import AutoTokenizer

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import ModelError
from ppo_cli.rewards.local_model.base import LoadedModel, Network
from ppo_cli.rewards.local_model.formats import format_for
from ppo_cli.rewards.local_model.text_format import TextFormat

NO_LIMIT = 2**30  # the server has its own


def served_format(settings: ModelReward) -> TextFormat:
    """Load `settings.tokenizer`, and write samples with its chat template or the user's."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        told = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")
        raise ModelError(
            f"The tokenizer {settings.tokenizer} (reward.model.tokenizer) does not load: {told}. "
            "Give a folder, or a name on the hub."
        ) from error
    loaded = LoadedModel(
        adapter="seqcls",
        reason="it is served",
        network=cast(Network, None),
        tokenizer=tokenizer,
        max_length=NO_LIMIT,
        pad_token_id=0,
    )
    named = settings.model_copy(update={"path": settings.tokenizer})
    return cast(TextFormat, format_for(loaded, named))
