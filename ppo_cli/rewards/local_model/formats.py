"""Which format a reward model reads: its adapter decides, and `reward.model.template` before it.

Token ids of the policy are never used again: every sample is text, tokenised anew.
"""

from __future__ import annotations

from typing import Protocol

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.rewards.local_model.base import Format, LoadedModel
from ppo_cli.rewards.local_model.chat_format import ChatFormat
from ppo_cli.rewards.local_model.conversation import Choice
from ppo_cli.rewards.local_model.literal_format import StarlingFormat, TemplateFormat
from ppo_cli.rewards.local_model.pair_format import PairFormat


class CountingFormat(Format, Protocol):
    """A format that counts the prompts that it had to cut."""

    prompts_cut: int
    max_length: int


def format_for(loaded: LoadedModel, settings: ModelReward) -> CountingFormat:
    """Return the format of a loaded model; raises RewardError when its tokenizer cannot do it."""
    choice = Choice(settings.system_prompt, settings.turns)
    most = min(settings.max_length or loaded.max_length, loaded.max_length)
    if settings.template is not None:
        return TemplateFormat(loaded.tokenizer, settings.template, choice, most)
    if loaded.adapter == "pair":
        return PairFormat(loaded.tokenizer, choice, most)
    if loaded.adapter == "starling":
        return StarlingFormat(loaded.tokenizer, choice, most)
    return ChatFormat(loaded.tokenizer, choice, most, settings.path or "")
