"""A judge behind the openai SDK: OpenAI itself, or any server that speaks its protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.rewards.judge.calls import Question, Reply
from ppo_cli.rewards.judge.providers.base import (
    FORMAT_WORDS,
    QUESTION,
    Form,
    Option,
    SdkProvider,
    TokenFields,
    attribute,
    bad_body,
    by_level,
    criteria,
    finish,
    read_usage,
    refused,
    response_format,
)

_OWN_HOSTS = ("api.openai.com", ".openai.azure.com")
# Cached tokens are part of the prompt's.
TOKENS = TokenFields(
    ("prompt_tokens",), ("completion_tokens",), "prompt_tokens_details.cached_tokens",
    "total_tokens",
)  # fmt: skip
DECISION_TOKENS = TokenFields(
    ("input_tokens",), ("output_tokens",), "input_tokens_details.cached_tokens"
)


class Judge(SdkProvider):
    """Chat completions, and the decision endpoint."""

    name = "openai"
    package = "openai"
    module = "openai"
    decisions = "openai.resources.decisions"
    pasted = r"/(chat/completions|completions|responses|decisions|models)$"
    path = "/v1"

    def options(self) -> Sequence[Option]:
        """Thinking is switched off for Qwen models only, which say how."""
        host = urlsplit(self.base_url).netloc
        own = host.endswith(_OWN_HOSTS)
        lengths = ("max_completion_tokens", "max_tokens")
        options = [
            Option("seed"),
            Option(
                "response_format", ("json_schema", "json_object"),
                ("text.format", "schema", *FORMAT_WORDS),
            ),
            Option("temperature"),
            Option("max_tokens", lengths if own else lengths[::-1]),
            Option(
                "system_message", ("apart", "in the prompt"),
                ("developer instruction", "system instruction", "system prompt", "system role",
                 "role 'system'", 'role "system"'),
            ),
        ]  # fmt: skip
        if "qwen" in self.model.lower() and not own:
            way = "enable_thinking" if "aliyuncs" in host else "chat_template_kwargs"
            options.insert(0, Option("thinking", (way,), ("enable_thinking",)))
        return options

    def connect(self, key: str) -> Any:
        """An AsyncOpenAI client without retries."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(api_key=key, base_url=self.base_url, max_retries=0)

    async def judge(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        """One chat completion."""
        reply = await client.chat.completions.create(
            model=self.model,
            messages=chat_messages(question, apart=form.get("system_message") == "apart"),
            timeout=timeout,
            **self._parameters(question, form),
        )
        return read_completion(reply)

    def _parameters(self, question: Question, form: Form) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        if "seed" in form:
            chosen["seed"] = question.vote
        if "temperature" in form:
            chosen["temperature"] = self.sampling()
        if "max_tokens" in form:
            chosen[form["max_tokens"]] = question.max_tokens
        # As an extra it goes out as it is: the SDK's walk over the schema is a fifth of a call.
        extra: dict[str, Any] = {}
        if "response_format" in form and question.output == "json":
            extra["response_format"] = response_format(question, form["response_format"])
        if form.get("thinking") == "enable_thinking":
            extra["enable_thinking"] = False
        elif "thinking" in form:
            extra["chat_template_kwargs"] = {"enable_thinking": False}
        return chosen | ({"extra_body": extra} if extra else {})

    async def decide(self, client: Any, question: Question, timeout: float) -> Reply:
        """One decision."""
        labels = criteria(question.scale)
        asked = {
            "type": "score",
            "name": QUESTION,
            "instructions": question.system or "Score the response.",
            "levels": [{"label": label} for label in labels],
        }
        reply = await client.decisions.create(
            model=self.model, input=question.user, questions=[asked], timeout=timeout
        )
        usage = read_usage(attribute(reply, "usage"), DECISION_TOKENS)
        answer = attribute(reply, "answers", 0)
        if answer is None:
            raise bad_body(f"no answers in {type(reply).__name__}")
        if attribute(answer, "type") == "refusal":
            raise refused("refusal", "The judge declined to decide.", usage)
        rows = attribute(answer, "probabilities") or []
        shares = {attribute(row, "label"): attribute(row, "probability") for row in rows}
        return by_level([shares.get(label) for label in labels], question.scale, usage)


def chat_messages(question: Question, *, apart: bool = True) -> list[Mapping[str, str]]:
    """System and user message, or both in one; no empty system message."""
    if question.system and not apart:
        return [{"role": "user", "content": f"{question.system}\n\n{question.user}"}]
    system = [{"role": "system", "content": question.system}] if question.system else []
    return [*system, {"role": "user", "content": question.user}]


def read_completion(reply: Any, tokens: TokenFields = TOKENS) -> Reply:
    """Read a chat completion; anything else (a page of HTML comes as a str) is a bad body."""
    choice = attribute(reply, "choices", 0)
    message = attribute(choice, "message")
    if message is None:
        message = attribute(reply, "error", "message")
        raise bad_body(str(message) if message else f"no choices in a {type(reply).__name__}")
    usage = read_usage(attribute(reply, "usage"), tokens)
    ended, content = attribute(choice, "finish_reason"), attribute(message, "content")
    declined = attribute(message, "refusal")
    if declined or ended == "refusal":
        raise refused("refusal", str(declined or content), usage)
    if ended == "content_filter":
        raise refused("content_filter", "The provider's filter withheld the answer.", usage)
    if isinstance(content, list):  # Mistral's thinking models answer in chunks
        texts = [attribute(part, "text") for part in content if attribute(part, "type") == "text"]
        content = "".join(t for t in texts if isinstance(t, str))
    return finish(content if isinstance(content, str) else None, usage, truncated=ended == "length")
