"""From a prompt and a response to the Sample that goes on the wire.

With a tokenizer of ours the sample is put together here, for vLLM as token ids, in which no text
can turn into a control token. Where the server tokenises, control tokens in a response are
neutralised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import RewardError
from ppo_cli.records import Message, Prompt
from ppo_cli.rewards.local.formats import Choice, question_of
from ppo_cli.rewards.served_model.exchange import Sample
from ppo_cli.rewards.served_model.plain_text import begins_with_bos, neutralise

_PLACE = re.compile(r"\{(prompt|response)\}")


class UnfitError(Exception):
    """A sample that cannot be sent; the message says why."""


class Writer:
    """Writes samples for one protocol, and counts what it had to change."""

    def __init__(self, settings: ModelReward, adapter: str) -> None:
        _refuse_what_has_no_effect(settings, adapter)
        self._adapter = adapter
        self._template = settings.template
        self._choice = Choice(settings.system_prompt, settings.turns)
        self._format: Any = None if settings.tokenizer is None else _local_format(settings)
        self._max_length = settings.max_length
        self._neutralised = 0

    def take_counts(self) -> dict[str, int]:
        """Responses with control tokens, and prompts that lost their beginning, since last time."""
        counts = {"neutralised": self._neutralised, "prompts_cut": 0}
        self._neutralised = 0
        if self._format is not None:
            counts["prompts_cut"], self._format.prompts_cut = self._format.prompts_cut, 0
        return counts

    @property
    def chat(self) -> bool:
        """Whether the server puts the conversation together (the chat form of vLLM)."""
        return self._adapter == "vllm" and self._format is None and self._template is None

    def remarks(self) -> list[str]:
        """What the user should know about the text that the server gets."""
        if self._adapter != "openrlhf":
            return []
        told = []
        if self._format is None and self._template is None:
            told.append(
                "The reward model's server gets the policy's own prompt and response as text, "
                "without an end token; set reward.model.tokenizer to the reward model's tokenizer "
                "to have its chat template."
            )
        if self._max_length is None or self._format is None:
            told.append(
                "Servers of this protocol may cut long samples without a word; with "
                "reward.model.max_length and reward.model.tokenizer those count as failed."
            )
        return told

    def write(self, prompt: Prompt, response: str) -> Sample:
        """Write one sample; raises UnfitError."""
        messages = self._choice.of(prompt.messages or ({"role": "user", "content": prompt.text},))
        if self._format is not None and self._adapter == "vllm":
            return Sample(messages, response, "", ids=self._encoded(messages, response))
        plain, found = neutralise(response)
        self._neutralised += found > 0
        question = question_of(messages)
        if self._adapter == "rerank":
            return Sample(messages, plain, question, group=prompt.uid)
        text = "" if self.chat else self._text(prompt, messages, question, plain)
        return Sample(
            messages, plain, question, text=text, add_special_tokens=not begins_with_bos(text),
            rendered=prompt.rendered, label=_plain_json(prompt.ground_truth),
        )  # fmt: skip

    def _encoded(self, messages: tuple[Message, ...], response: str) -> tuple[int, ...]:
        from ppo_cli.rewards.local.base import TooLong
        from ppo_cli.rewards.local.formats import ControlToken

        try:
            ids: tuple[int, ...] = self._format.encode(messages, response).ids
        except TooLong as error:
            raise UnfitError(f"too long: {error}") from None
        except ControlToken as error:
            raise UnfitError(f"control token: {error}") from None
        return ids

    def _text(
        self, prompt: Prompt, messages: Sequence[Message], question: str, response: str
    ) -> str:
        if self._format is not None:
            tokens = len(self._format.ids_of(messages, response))
            if self._max_length is not None and tokens > self._max_length:
                raise UnfitError(f"too long: {tokens} tokens, and {self._max_length} are allowed")
            return str(self._format.render(messages, response))
        if self._template is not None:
            values = {"prompt": question, "response": response}
            return _PLACE.sub(lambda place: values[place[1]], self._template)
        return prompt.rendered + response


def _refuse_what_has_no_effect(settings: ModelReward, adapter: str) -> None:
    """Raise RewardError for settings that this protocol cannot honour."""
    template, shown = settings.template, (settings.system_prompt, settings.turns)
    if adapter == "rerank":
        _refuse(template is not None, "reward.model.template", "a reranker gets query and text")
        _refuse(settings.tokenizer is not None, "reward.model.tokenizer", "its server tokenises")
    elif template is not None and not ("{prompt}" in template and "{response}" in template):
        raise RewardError("reward.model.template needs both {prompt} and {response} in it.")
    elif adapter == "openrlhf" and not (settings.tokenizer or template):
        own = shown == ("keep", "all")
        _refuse(not own, "reward.model.system_prompt and .turns", "no template is applied here")
    if adapter != "vllm":
        _refuse(bool(settings.outputs), "reward.model.outputs", "its server sends one score")
    if settings.max_length is not None and settings.tokenizer is None:
        raise RewardError(
            "reward.model.max_length counts tokens, which takes reward.model.tokenizer for a "
            "served model. Without both, the server's own limit holds."
        )


def _refuse(when: bool, keys: str, why: str) -> None:
    if when:
        raise RewardError(f"{keys} has no effect on this served reward model: {why}. Take it out.")


def _local_format(settings: ModelReward) -> Any:
    """The format of sequence classifiers with the tokenizer that was named; it needs no model."""
    from ppo_cli.rewards.local.formats import served_format

    return served_format(settings)


def _plain_json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value
