"""Judges behind the google-genai SDK: the Gemini API; clouds.py has Vertex AI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ppo_cli.rewards.judge.calls import Question, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.forms import (
    FORMAT_WORDS,
    SYSTEM_WORDS,
    decision_input,
    decision_questions,
    join_texts,
    read_decision,
    verdict_schema,
)
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.judge.providers.replies import (
    ReplyFields,
    TokenFields,
    check_reply,
    check_response,
)
from ppo_cli.rewards.remote.proxies import client_settings, is_socks

# How a model is asked not to think, or as little as it can: Gemini 2.5 has a budget of tokens,
# Gemini 3 has levels.
_THINKING = {
    "budget 0": {"thinking_budget": 0},
    "level MINIMAL": {"thinking_level": "MINIMAL"},
    "level LOW": {"thinking_level": "LOW"},
}
# Categories of Gemini's filters; a judge has to read what they would block.
_HARMS = ("HARASSMENT", "HATE_SPEECH", "SEXUALLY_EXPLICIT", "DANGEROUS_CONTENT")


class Judge(SdkProvider):
    """A judge behind Gemini's endpoints for generated content and decisions."""

    name = batches = "gemini"
    package, module = "google-genai", "google.genai"
    decision_module = "google.genai.decisions"
    redundant_path = r"/(models(/[^/]*)?|decisions)$"
    noisy_logger = "google_genai._api_client"  # names the wrong variable if both contain a key
    reply_fields = ReplyFields(
        answer="candidates.0", content="candidates.0.content.parts",
        finish="candidates.0.finish_reason", cut=("MAX_TOKENS",), usage="usage_metadata",
        filtered=("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE",
                  "MODEL_ARMOR", "ESCALATION"),
        # Thinking is billed as output.
        tokens=TokenFields(
            ("prompt_token_count",), ("candidates_token_count", "thoughts_token_count"),
            "cached_content_token_count", "total_token_count",
        ),
    )  # fmt: skip
    decision_tokens = TokenFields(
        ("total_input_tokens",), ("total_output_tokens",), "total_cached_tokens"
    )
    _session: Any = None

    def options(self) -> Sequence[Option]:
        """Thinking is off if possible, else minimal; filters are off."""
        return [
            Option(
                "thinking", tuple(_THINKING),
                ("thinking_config", "thinking_budget", "thinking_level", "budget"),
            ),
            Option("safety_settings", ("OFF", "BLOCK_NONE"), ("threshold",)),
            Option("seed"),
            Option(
                "response_schema", ("json_schema", "json"),
                ("response_json_schema", "schema", "controlled generation", "application/json",
                 *FORMAT_WORDS),
            ),
            Option("temperature"),
            Option("max_output_tokens"),
            Option("system_instruction", ("apart", "in the prompt"), SYSTEM_WORDS),
        ]  # fmt: skip

    def connect(self, key: str) -> Any:
        """Return a genai client with the SDK's retries disabled; the remote client retries."""
        import aiohttp
        import httpx
        from google import genai
        from google.genai import types

        # The SDK appends the version itself; the decision endpoint is documented in v1beta.
        match = re.match(r"^(.*)/(v\d\w*)$", self.base_url)
        base, version = match.groups() if match else (self.base_url, None)
        if version is None and self.api.mode == "decision":
            version = "v1beta"
        # The SDK's own certificates: Vertex AI may ask for one of the client.
        settings = client_settings(self.base_url)
        proxied = settings if "proxy" in settings else None
        http = types.HttpOptions(
            base_url=base, api_version=version,
            retry_options=types.HttpRetryOptions(attempts=1),
            client_args=proxied, async_client_args=proxied,
        )  # fmt: skip
        if is_socks(settings.get("proxy")):  # aiohttp speaks HTTP only
            hooks: Any = {"response": [check_response]}
            self._session = http.httpx_async_client = httpx.AsyncClient(
                event_hooks=hooks, **settings
            )
        else:  # the SDK's session warns when it is not closed
            self._session = http.aiohttp_client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=proxied is None,
                middlewares=[check_reply],
            )  # fmt: skip
        return genai.Client(http_options=http, **self.credentials(key))

    def credentials(self, key: str) -> dict[str, Any]:
        """Return the credentials for the SDK."""
        return {"api_key": key, "vertexai": False}

    async def disconnect(self, client: Any) -> None:
        """Close both halves of the client, and its session."""
        session, self._session = self._session, None
        await client.aio.aclose()
        client.close()
        if session is not None:
            await (session.aclose() if hasattr(session, "aclose") else session.close())

    async def list_models(self, client: Any) -> list[str] | None:
        """Return the models of the models endpoint that generate content."""
        models = [model async for model in await client.aio.models.list()]
        # At Vertex AI a model does not list its actions.
        fit = [m for m in models if "generateContent" in (m.supported_actions or "generateContent")]
        return [model.name.rsplit("/", 1)[-1] for model in fit if model.name]

    def arguments(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the arguments of a request, with the optional fields that `forms` has."""
        config: dict[str, Any] = self.plain_fields(question, forms)
        config["automatic_function_calling"] = {"disable": True}
        apart = forms.get("system_instruction") == "apart"
        if question.system and apart:
            config["system_instruction"] = question.system
        if "thinking" in forms:
            config["thinking_config"] = _THINKING[forms["thinking"]]
        if threshold := forms.get("safety_settings"):
            config["safety_settings"] = [
                {"category": f"HARM_CATEGORY_{harm}", "threshold": threshold} for harm in _HARMS
            ]
        schema_form = forms.get("response_schema") if question.output == "json" else None
        if schema_form:
            config["response_mime_type"] = "application/json"
        if schema_form == "json_schema":
            schema = verdict_schema(question)
            # Without an order Gemini sorts the keys: the score would come before the reason.
            order = list(schema["properties"])
            config["response_json_schema"] = {**schema, "propertyOrdering": order}
        contents = question.user if apart else join_texts(question)
        return {"contents": contents, "config": config}

    async def send(self, client: Any, arguments: dict[str, Any], timeout: float) -> Any:
        """Ask for generated content."""
        return await client.aio.models.generate_content(model=self.model, **arguments)

    async def request_decision(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask the decision endpoint for the probability of each level."""
        reply = await client.aio.decisions.create(
            model=self.model, input=decision_input(question),
            questions=decision_questions(question),
        )  # fmt: skip
        return read_decision(reply, question, self.decision_tokens)
