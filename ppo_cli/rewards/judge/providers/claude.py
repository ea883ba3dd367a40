"""Judges behind the anthropic SDK: Anthropic's own API; clouds.py has Vertex AI and Bedrock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppo_cli.rewards.judge.calls import Question
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.forms import FORMAT_WORDS, verdict_schema
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.judge.providers.replies import (
    ReplyFields,
    TokenFields,
    read_body,
)


class Judge(SdkProvider):
    """A judge behind Anthropic's Messages API, which has no decision endpoint."""

    name = batches = "claude"
    package = module = "anthropic"
    client_class = "AsyncAnthropic"
    redundant_path = r"(/v1)?(/messages(/batches)?)?$"
    reply_fields = ReplyFields(
        answer="content", content="content", finish="stop_reason",
        refusal="stop_details.category", cut=("max_tokens", "model_context_window_exceeded"),
        usage="usage",
        # `input_tokens` does not include what was read from or written to a cache.
        tokens=TokenFields(
            ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
            ("output_tokens",), "cache_read_input_tokens",
        ),
    )  # fmt: skip

    def options(self) -> Sequence[Option]:
        """Temperature is sent only if it is set."""
        words = ("output_format", "schema", "response_format", *FORMAT_WORDS)
        options = [
            Option("thinking", ("disabled",)),
            Option("output_config", ("json_schema",), words),
        ]
        return options if self.api.temperature is None else [*options, Option("temperature")]

    def arguments(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the arguments of a message, with the optional ones that `forms` has."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "max_tokens": question.max_tokens,
            "messages": [{"role": "user", "content": question.user}],
        }
        if question.system:
            arguments["system"] = question.system
        if "thinking" in forms:
            arguments["thinking"] = {"type": "disabled"}
        if "output_config" in forms and question.output == "json":
            schema = verdict_schema(question)
            arguments["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        if "temperature" in forms:  # gateways may know it, the SDK (0.79) does not any more
            arguments["extra_body"] = {"temperature": self.api.temperature}
        return arguments

    async def send(self, client: Any, arguments: dict[str, Any], timeout: float) -> Any:
        """Ask with one message."""
        messages = client.messages.with_raw_response
        return read_body(await (await messages.create(timeout=timeout, **arguments)).text())
