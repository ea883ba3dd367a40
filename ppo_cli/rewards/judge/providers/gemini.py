"""A judge behind the google-genai SDK: the Gemini API, or Vertex AI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import (
    Form,
    Option,
    Progress,
    Results,
    Rows,
    SdkProvider,
    TokenFields,
    attribute,
    finish,
    hush,
    read_row,
    read_usage,
    refused,
    row_error,
    vertex_address,
)
from ppo_cli.rewards.judge.providers.bodies import (
    bad_body,
    check_reply,
    check_response,
    describe,
)
from ppo_cli.rewards.judge.providers.failures import read_status, wrong_version
from ppo_cli.rewards.judge.providers.forms import read_decision, score_question, verdict_schema
from ppo_cli.rewards.remote.proxies import client_settings, is_socks

_HARMS = ("HARASSMENT", "HATE_SPEECH", "SEXUALLY_EXPLICIT", "DANGEROUS_CONTENT")
_BLOCKED = {
    "SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "MODEL_ARMOR",
    "ESCALATION",
}  # fmt: skip
_OVER = {"succeeded", "partially_succeeded", "failed", "cancelled", "expired"}
_NOT_DONE = {1: "cancelled", 4: "expired"}  # by google.rpc.Code
_NO_SUCH_PATH = {404, 405}
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
    """Generated content, and the decision endpoint."""

    name = "gemini"
    package = "google-genai"
    module = "google.genai"
    decisions = "google.genai.decisions"
    pasted = r"/(models(/[^/]*)?|decisions)$"
    batch_rows, batch_bytes = 100_000, 15_000_000  # requests in the call itself: 20 MB at most
    versions: ClassVar[tuple[str, ...]] = ("v1", "v1beta")
    _session: Any = None

    def options(self) -> Sequence[Option]:
        """Thinking off if the model can, else as little as it can; filters off, for judging."""
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
        """A genai client; one attempt, which also ends the SDK's own second try."""
        import aiohttp
        import httpx
        from google import genai
        from google.genai import types

        hush("google_genai._api_client")  # it names the wrong variable when both hold a key
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
        else:  # a separate session: the SDK's own warns
            self._session = http.aiohttp_client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), trust_env=not settings,
                middlewares=[check_reply],
            )  # fmt: skip
        return genai.Client(http_options=http, **self.access(key))

    def access(self, key: str) -> dict[str, Any]:
        """How the SDK is let in."""
        return {"api_key": key, "vertexai": False}

    async def disconnect(self, client: Any) -> None:
        """Close both halves of the client, and the session that was lent to it."""
        session, self._session = self._session, None
        await client.aio.aclose()
        client.close()
        if session is not None:
            await (session.aclose() if hasattr(session, "aclose") else session.close())

    async def models(self, client: Any) -> list[str] | None:
        """What the models endpoint lists of models that generate content."""
        found = [model async for model in await client.aio.models.list()]
        # At Vertex AI a model does not say what it does.
        fit = [m for m in found if "generateContent" in (m.supported_actions or "generateContent")]
        return [model.name.rsplit("/", 1)[-1] for model in fit if model.name]

    async def judge(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        """One generated content."""
        try:
            reply = await client.aio.models.generate_content(
                model=self.model,
                contents=_contents(question, form),
                config=self._config(question, form),
            )
        except Exception as error:
            status = read_status(error)
            unproven = status in _NO_SUCH_PATH and self._worked is None
            if unproven and (served := await self._served_address()):
                raise wrong_version(self._context, status, served) from None
            raise
        return read_content(reply)

    def _address(self) -> tuple[str, str | None]:
        """The base URL without its API version, and the version if it has one."""
        match = _VERSION.match(self.base_url)
        return (match[1], match[2]) if match else (self.base_url, None)

    async def _served_address(self) -> str | None:
        """The base URL of another API version that answers; some gateways serve only one.

        An empty request costs nothing: a server that has the path rejects it as incomplete.
        """
        import httpx

        base, version = self._address()
        async with httpx.AsyncClient(**client_settings(base)) as http:
            for other in self.versions:
                if other == version:
                    continue
                url = f"{base}/{other}/models/{self.model}:generateContent"
                reply = await http.post(url, json={}, headers={"x-goog-api-key": self._key.value})
                is_json = "json" in reply.headers.get("content-type", "")
                if is_json and reply.status_code not in _NO_SUCH_PATH:
                    return f"{base}/{other}"
        return None

    async def submit(self, client: Any, rows: Rows, form: Form, name: str) -> str:
        """All requests in one call, each with its id as metadata."""
        requests = [
            {
                "contents": _contents(question, form),
                "config": self._config(question, form),
                "metadata": {"key": row_id},
            }
            for row_id, question in rows.items()
        ]
        job = await client.aio.batches.create(
            model=self.model, src=requests, config={"display_name": f"ppo-cli judge {name}"}
        )
        return str(job.name)

    async def find(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """The name is in the display name."""
        jobs = [job async for job in await client.aio.batches.list(config={"page_size": 100})]
        return [str(job.name) for job in jobs if (job.display_name or "").endswith(f" {name}")]

    async def look(self, client: Any, job: str) -> Progress:
        """State of a job; it tells no counts."""
        found = await client.aio.batches.get(name=job)
        state = _word(attribute(found, "state")).removeprefix("JOB_STATE_").lower()
        told = attribute(found, "error", "message") or state
        return Progress(state, state in _OVER, failed=told if state == "failed" else "")

    async def results(self, client: Any, job: str) -> Results:
        """The responses of a job; one that ran out of time may have none."""
        found = await client.aio.batches.get(name=job)
        lines = attribute(found, "dest", "inlined_responses") or []
        return [(str(attribute(one, "metadata", "key")), _outcome(one)) for one in lines]

    def _config(self, question: Question, form: Form) -> dict[str, Any]:
        plain = {
            "seed": question.vote, "temperature": self.sampling(),
            "max_output_tokens": question.max_tokens,
        }  # fmt: skip
        config: dict[str, Any] = {name: value for name, value in plain.items() if name in form}
        config["automatic_function_calling"] = {"disable": True}
        if question.system and form.get("system_instruction") == "apart":
            config["system_instruction"] = question.system
        if "thinking" in form:
            way, _, amount = form["thinking"].partition(" ")
            config["thinking_config"] = (
                {"thinking_budget": 0} if way == "budget" else {"thinking_level": amount}
            )
        if "safety_settings" in form:
            config["safety_settings"] = [
                {"category": f"HARM_CATEGORY_{harm}", "threshold": form["safety_settings"]}
                for harm in _HARMS
            ]
        asked = form.get("response_schema") if question.output == "json" else None
        if asked:
            config["response_mime_type"] = "application/json"
        if asked == "json_schema":
            schema = verdict_schema(question)
            order = list(schema["properties"])
            config["response_json_schema"] = {**schema, "propertyOrdering": order}
        return config

    async def decide(self, client: Any, question: Question, timeout: float) -> Reply:
        """One decision."""
        reply = await client.aio.decisions.create(
            model=self.model, input=question.user, questions=score_question(question)
        )
        usage = read_usage(attribute(reply, "usage"), DECISION_TOKENS)
        if blocked := attribute(reply, "prompt_feedback", "block_reason"):
            raise refused("content_filter", f"The prompt was blocked: {blocked}", usage)
        return read_decision(reply, question.scale, usage)


class Vertex(Judge):
    """Gemini at Vertex AI, with Google's own credentials."""

    name = "vertex"
    batch_rows = 0
    versions = ()  # paths name a project there

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """There is one address for each region."""
        return vertex_address(environ["GOOGLE_CLOUD_LOCATION"])

    def access(self, key: str) -> dict[str, Any]:
        """Project and region; the SDK finds the credentials."""
        project, location = (os.environ[f"GOOGLE_CLOUD_{it}"] for it in ("PROJECT", "LOCATION"))
        return {"vertexai": True, "project": project.strip(), "location": location.strip()}


def _outcome(line: Any) -> Reply | JudgeError:
    """What one of a job's responses says."""
    if attribute(line, "response") is not None:
        return read_row(read_content, attribute(line, "response"))
    code, told = attribute(line, "error", "code"), attribute(line, "error", "message")
    return row_error(_NOT_DONE.get(code, "failed"), f"{code}: {told}")


def _contents(question: Question, form: Form) -> str:
    """The prompt; a model without system instructions reads them at its beginning."""
    apart = form.get("system_instruction") == "apart" or not question.system
    return question.user if apart else f"{question.system}\n\n{question.user}"


def read_content(reply: Any) -> Reply:
    """Read generated content; a blocked prompt or answer comes with status 200."""
    usage = read_usage(attribute(reply, "usage_metadata"), TOKENS)
    blocked = attribute(reply, "prompt_feedback", "block_reason")
    if blocked is not None:
        raise refused("content_filter", f"The prompt was blocked: {_word(blocked)}", usage)
    candidate = attribute(reply, "candidates", 0)
    if candidate is None:
        raise bad_body(describe(reply))
    ended = _word(attribute(candidate, "finish_reason"))
    if ended in _BLOCKED:
        raise refused("content_filter", f"The answer was blocked: {ended}", usage)
    parts = attribute(candidate, "content", "parts") or []
    texts = [attribute(part, "text") for part in parts if not attribute(part, "thought")]
    return finish("".join(t for t in texts if t), usage, truncated=ended == "MAX_TOKENS")


def _word(value: Any) -> str:
    return str(getattr(value, "value", value) or "")
