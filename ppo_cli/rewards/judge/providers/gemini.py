"""Judges behind the google-genai SDK: the Gemini API, or Vertex AI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import (
    BatchProgress,
    BatchResults,
    BatchRows,
    SdkProvider,
    silence_logger,
    vertex_address,
)
from ppo_cli.rewards.judge.providers.forms import (
    decision_question,
    read_decision,
    verdict_schema,
)
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.judge.providers.replies import (
    TokenFields,
    bad_body,
    build_reply,
    check_reply,
    check_response,
    describe,
    get_nested,
    read_row,
    read_usage,
    refusal,
    row_error,
)
from ppo_cli.rewards.remote.proxies import client_settings, is_socks

# Categories of Gemini's filters; a judge has to read what they would block.
_HARMS = ("HARASSMENT", "HATE_SPEECH", "SEXUALLY_EXPLICIT", "DANGEROUS_CONTENT")
# Finish reasons of an answer that a filter withheld.
_BLOCKED = {
    "SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "MODEL_ARMOR",
    "ESCALATION",
}  # fmt: skip
_OVER = {"succeeded", "partially_succeeded", "failed", "cancelled", "expired"}
_NOT_DONE = {1: "cancelled", 4: "expired"}  # by google.rpc.Code
_VERSION = re.compile(r"^(.*)/(v\d\w*)$")
# Thinking is billed as output.
TOKENS = TokenFields(
    ("prompt_token_count",),
    ("candidates_token_count", "thoughts_token_count"),
    "cached_content_token_count",
    "total_token_count",
)
DECISION_TOKENS = TokenFields(
    ("total_input_tokens",), ("total_output_tokens",), "total_cached_tokens"
)


class Judge(SdkProvider):
    """A judge behind Gemini's endpoints for generated content and decisions."""

    name = "gemini"
    package = "google-genai"
    module = "google.genai"
    decision_module = "google.genai.decisions"
    redundant_path = r"/(models(/[^/]*)?|decisions)$"
    batch_rows, batch_bytes = 100_000, 15_000_000  # requests in the call itself: 20 MB at most
    _session: Any = None

    def options(self) -> Sequence[Option]:
        """Thinking is off if possible, else minimal; filters are off."""
        return [
            Option(
                "thinking", ("budget 0", "level MINIMAL", "level LOW"),
                ("thinking_config", "thinking_budget", "thinking_level", "budget"),
            ),
            Option("safety_settings", ("OFF", "BLOCK_NONE"), ("threshold",)),
            Option("seed"),
            Option(
                "response_schema", ("json_schema", "json"),
                (
                    "response_json_schema", "response_mime_type", "schema", "json mode",
                    "structured output", "structured outputs", "controlled generation",
                    "constrained decoding", "application/json",
                ),
            ),
            Option("temperature"),
            Option("max_output_tokens"),
            Option(
                "system_instruction", ("apart", "in the prompt"),
                ("developer instruction", "system prompt", "system role", "system message"),
            ),
        ]  # fmt: skip

    def connect(self, key: str) -> Any:
        """Return a genai client with the SDK's retries disabled; the remote client retries."""
        import aiohttp
        import httpx
        from google import genai
        from google.genai import types

        silence_logger(
            "google_genai._api_client"
        )  # it names the wrong variable when both contain a key
        # The SDK appends the version itself.
        base, version = self._address()
        if version is None and self.api.mode == "decision":
            version = "v1beta"  # where the decision endpoint is documented
        settings = client_settings(self.base_url)
        http = types.HttpOptions(
            base_url=base,
            api_version=version,
            retry_options=types.HttpRetryOptions(attempts=1),
            client_args=settings or None,
            async_client_args=settings or None,
        )
        if is_socks(settings.get("proxy")):  # aiohttp speaks HTTP only
            self._session = http.httpx_async_client = httpx.AsyncClient(
                event_hooks={"response": [check_response]}, **settings
            )
        else:  # the SDK's session warns when it is not closed
            self._session = http.aiohttp_client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=not settings,
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

    async def request_verdict(
        self, client: Any, question: Question, forms: Forms, timeout: float
    ) -> Reply:
        """Ask for generated content."""
        reply = await client.aio.models.generate_content(
            model=self.model,
            contents=_contents(question, forms),
            config=self._config(question, forms),
        )
        return read_content(reply)

    def _address(self) -> tuple[str, str | None]:
        """Return the base URL without its API version, and the version if it has one."""
        match = _VERSION.match(self.base_url)
        return (match[1], match[2]) if match else (self.base_url, None)

    async def submit_batch(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Submit all requests in one call, each with its id as metadata."""
        # Inline requests: no file has to be uploaded.
        requests = [
            {
                "contents": _contents(question, forms),
                "config": self._config(question, forms),
                "metadata": {"key": row_id},
            }
            for row_id, question in rows.items()
        ]
        job = await client.aio.batches.create(
            model=self.model, src=requests, config={"display_name": f"ppo-cli judge {name}"}
        )
        return str(job.name)

    async def find_batches(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """Look for the name in the display name."""
        jobs = [job async for job in await client.aio.batches.list(config={"page_size": 100})]
        return [str(job.name) for job in jobs if (job.display_name or "").endswith(f" {name}")]

    async def poll_batch(self, client: Any, job: str) -> BatchProgress:
        """Return the state of a job; there are no counts."""
        batch = await client.aio.batches.get(name=job)
        state = _word(get_nested(batch, "state")).removeprefix("JOB_STATE_").lower()
        message = get_nested(batch, "error", "message") or state
        return BatchProgress(state, state in _OVER, failed=message if state == "failed" else "")

    async def fetch_results(self, client: Any, job: str) -> BatchResults:
        """Return the responses of a job; one that expired may have none."""
        batch = await client.aio.batches.get(name=job)
        lines = get_nested(batch, "dest", "inlined_responses") or []
        return [(str(get_nested(line, "metadata", "key")), _outcome(line)) for line in lines]

    def _config(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the `config` of a request, with the optional fields that `forms` has."""
        plain = {
            "seed": question.vote, "temperature": self.temperature(),
            "max_output_tokens": question.max_tokens,
        }  # fmt: skip
        # Plain options first, then those with forms.
        config: dict[str, Any] = {name: value for name, value in plain.items() if name in forms}
        config["automatic_function_calling"] = {"disable": True}
        if question.system and forms.get("system_instruction") == "apart":
            config["system_instruction"] = question.system
        if "thinking" in forms:
            # Gemini 2.5 has a budget of tokens, Gemini 3 has levels.
            way, _, amount = forms["thinking"].partition(" ")
            config["thinking_config"] = (
                {"thinking_budget": 0} if way == "budget" else {"thinking_level": amount}
            )
        if "safety_settings" in forms:
            config["safety_settings"] = [
                {"category": f"HARM_CATEGORY_{harm}", "threshold": forms["safety_settings"]}
                for harm in _HARMS
            ]
        schema_form = forms.get("response_schema") if question.output == "json" else None
        if schema_form:
            config["response_mime_type"] = "application/json"
        if schema_form == "json_schema":
            schema = verdict_schema(question)
            # Without an order Gemini sorts the keys: the score would come before the reason.
            order = list(schema["properties"])
            config["response_json_schema"] = {**schema, "propertyOrdering": order}
        return config

    async def request_decision(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask the decision endpoint for the probability of each level of the scale.

        The reply has no text and no score.
        """
        reply = await client.aio.decisions.create(
            model=self.model, input=question.user, questions=decision_question(question)
        )
        usage = read_usage(get_nested(reply, "usage"), DECISION_TOKENS)
        if blocked := get_nested(reply, "prompt_feedback", "block_reason"):
            raise refusal("content_filter", f"The prompt was blocked: {blocked}", usage)
        return read_decision(reply, question.scale, usage)


class Vertex(Judge):
    """Gemini at Vertex AI, with Google's own credentials."""

    name = "vertex"
    batch_rows = 0

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the address of the region."""
        return vertex_address(environ["GOOGLE_CLOUD_LOCATION"])

    def credentials(self, key: str) -> dict[str, Any]:
        """Return project and region; the SDK finds the credentials."""
        names = ("GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_LOCATION")
        project, location = (os.environ[name] for name in names)
        return {"vertexai": True, "project": project.strip(), "location": location.strip()}


def _outcome(line: Any) -> Reply | JudgeError:
    """Return what one response of a job says."""
    if get_nested(line, "response") is not None:
        return read_row(read_content, get_nested(line, "response"))
    code, message = get_nested(line, "error", "code"), get_nested(line, "error", "message")
    return row_error(_NOT_DONE.get(code, "failed"), f"{code}: {message}")


def _contents(question: Question, forms: Forms) -> str:
    """Return the prompt, with the system message at its beginning if the model takes none."""
    apart = forms.get("system_instruction") == "apart" or not question.system
    return question.user if apart else f"{question.system}\n\n{question.user}"


def read_content(reply: Any) -> Reply:
    """Return the reply in generated content; a blocked one also comes with status 200."""
    usage = read_usage(get_nested(reply, "usage_metadata"), TOKENS)
    blocked = get_nested(reply, "prompt_feedback", "block_reason")
    if blocked is not None:
        raise refusal("content_filter", f"The prompt was blocked: {_word(blocked)}", usage)
    # No candidate and no block reason: not an answer of Gemini.
    candidate = get_nested(reply, "candidates", 0)
    if candidate is None:
        raise bad_body(describe(reply))
    finish_reason = _word(get_nested(candidate, "finish_reason"))
    if finish_reason in _BLOCKED:
        raise refusal("content_filter", f"The answer was blocked: {finish_reason}", usage)
    # Thoughts are parts, too, and are not the answer.
    parts = get_nested(candidate, "content", "parts") or []
    texts = [get_nested(part, "text") for part in parts if not get_nested(part, "thought")]
    return build_reply(
        "".join(t for t in texts if t), usage, truncated=finish_reason == "MAX_TOKENS"
    )


def _word(value: Any) -> str:
    return str(getattr(value, "value", value) or "")
