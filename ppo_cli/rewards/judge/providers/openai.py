"""Judges behind the openai SDK: OpenAI, or any server with its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.rewards.judge.calls import Question, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.forms import (
    FORMAT_WORDS,
    SYSTEM_WORDS,
    chat_messages,
    decision_input,
    decisions,
    read_decision,
    response_format,
)
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.judge.providers.replies import CHAT, TokenFields, read_chat

# These take `max_completion_tokens`; other servers often know only `max_tokens`.
_OFFICIAL_HOSTS = ("api.openai.com", ".openai.azure.com")
# How a server is asked not to think, by the name of the parameter.
_NO_THOUGHTS = {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}}


class Judge(SdkProvider):
    """A judge behind OpenAI's endpoints for chat completions and decisions."""

    name = batches = "openai"
    package = module = "openai"
    client_class = "AsyncOpenAI"
    decision_module = "openai.resources.decisions"
    redundant_path = r"/(chat/completions|completions|responses|decisions|models|batches)$"
    default_path = "/v1"
    reply_fields = CHAT
    decision_tokens = TokenFields(
        ("input_tokens",), ("output_tokens",), "input_tokens_details.cached_tokens"
    )

    def options(self) -> Sequence[Option]:
        """Thinking is switched off only for Qwen models, which document how."""
        host = urlsplit(self.base_url).netloc
        is_official = host.endswith(_OFFICIAL_HOSTS)
        # Reasoning models refuse `max_tokens`, older servers the other name.
        lengths = ("max_completion_tokens", "max_tokens")
        options = [
            Option("seed"),
            Option(
                "response_format", ("json_schema", "json_object"),
                ("text.format", "schema", *FORMAT_WORDS),
            ),
            Option("temperature"),
            Option("max_tokens", lengths if is_official else lengths[::-1]),
            Option("system_message", ("apart", "in the prompt"), SYSTEM_WORDS),
        ]  # fmt: skip
        if "qwen" in self.model.lower() and not is_official:
            way = "enable_thinking" if "aliyuncs" in host else "chat_template_kwargs"
            options.insert(0, Option("thinking", (way,), ("enable_thinking",)))
        return options

    def arguments(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the arguments of a chat completion."""
        apart = forms.get("system_message") == "apart"
        messages = chat_messages(question, apart=apart)
        arguments: dict[str, Any] = {"model": self.model, "messages": messages}
        arguments |= self.plain_fields(question, forms)
        # As an extra argument it is sent unchanged: the SDK's walk over it takes a fifth of a call.
        extra: dict[str, Any] = {}
        if "response_format" in forms and question.output == "json":
            extra["response_format"] = response_format(question, forms["response_format"])
        if way := forms.get("thinking"):
            extra[way] = _NO_THOUGHTS[way]
        return arguments | ({"extra_body": extra} if extra else {})

    async def send(self, client: Any, arguments: dict[str, Any], timeout: float) -> Any:
        """One chat completion."""
        completions = client.chat.completions.with_raw_response
        return read_chat((await completions.create(**arguments, timeout=timeout)).text)

    async def request_decision(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask the decision endpoint for the probability of each level."""
        questions = [
            {
                "type": "score",
                "name": name,
                "instructions": instructions,
                "levels": [{"label": label} for label in labels],
            }
            for name, instructions, labels, _ in decisions(question)
        ]
        reply = await client.decisions.create(
            model=self.model, input=decision_input(question), questions=questions, timeout=timeout
        )
        return read_decision(reply, question, self.decision_tokens)
