"""A judge behind the anthropic SDK: Anthropic itself, Vertex AI or Bedrock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import (
    CALL_S,
    CLOCKS_APART_S,
    Form,
    Option,
    Progress,
    Results,
    Rows,
    SdkProvider,
    TokenFields,
    attribute,
    finish,
    http_client,
    read_row,
    read_usage,
    refused,
    result_lines,
    row_error,
    vertex_address,
)
from ppo_cli.rewards.judge.providers.bodies import raise_body, read_body
from ppo_cli.rewards.judge.providers.forms import FORMAT_WORDS, verdict_schema
from ppo_cli.rewards.remote.proxies import client_settings

_STATES = ("processing", "succeeded", "errored", "canceled", "expired")
_CUT = {"max_tokens", "model_context_window_exceeded"}
# `input_tokens` leaves out what was read from or put in a cache.
TOKENS = TokenFields(
    ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    ("output_tokens",),
    "cache_read_input_tokens",
)


class Judge(SdkProvider):
    """Messages; there is no decision endpoint."""

    name = "claude"
    package = "anthropic"
    module = "anthropic"
    pasted = r"(/v1)?(/messages(/batches)?)?$"
    batch_rows, batch_bytes = 100_000, 256_000_000

    def sampling(self) -> float | None:
        """Only what was asked for: current models take none."""
        return self.api.temperature

    def options(self) -> Sequence[Option]:
        """Temperature only when it was asked for: current models take none."""
        options = [
            Option("thinking", ("disabled",)),
            Option(
                "output_config", ("json_schema",),
                ("output_format", "schema", "response_format", *FORMAT_WORDS),
            ),
        ]  # fmt: skip
        if self.sampling() is not None:
            options.append(Option("temperature"))
        return options

    def connect(self, key: str) -> Any:
        """An AsyncAnthropic client without retries."""
        from anthropic import AsyncAnthropic, DefaultAioHttpClient, DefaultAsyncHttpxClient

        http = http_client(self.base_url, DefaultAioHttpClient, DefaultAsyncHttpxClient)
        return AsyncAnthropic(api_key=key, base_url=self.base_url, max_retries=0, http_client=http)

    async def models(self, client: Any) -> list[str] | None:
        """What the models endpoint lists."""
        return [model.id async for model in client.models.list(limit=1000)]

    async def judge(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        """One message."""
        chosen = self._request(question, form)
        if "temperature" in form:  # the SDK has no such argument any more; gateways may
            chosen["extra_body"] = {"temperature": self.sampling()}
        reply = await client.messages.with_raw_response.create(timeout=timeout, **chosen)
        return read_message(read_body(await reply.text()))

    async def submit(self, client: Any, rows: Rows, form: Form, name: str) -> str:
        """All requests in one call."""
        warmth = {"temperature": self.sampling()} if "temperature" in form else {}
        requests = [
            {"custom_id": row_id, "params": self._request(question, form) | warmth}
            for row_id, question in rows.items()
        ]
        return str((await client.messages.batches.create(requests=requests)).id)

    async def find(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """Jobs have no names here: those of that time and size, the oldest first."""
        ids: list[str] = []
        async for job in client.messages.batches.list(limit=100):  # the newest first
            late_s = job.created_at.timestamp() - since
            if late_s < -CLOCKS_APART_S:
                break
            size = sum(attribute(job, "request_counts", state) or 0 for state in _STATES)
            if size == rows and late_s < CALL_S + CLOCKS_APART_S:
                ids.insert(0, str(job.id))
        return ids

    async def look(self, client: Any, job: str) -> Progress:
        """State and counts; the counts are 0 until all rows have ended."""
        found = await client.messages.batches.retrieve(job)
        state = str(attribute(found, "processing_status"))
        counts = [attribute(found, "request_counts", name) or 0 for name in _STATES[1:]]
        return Progress(state, state == "ended", sum(counts))

    async def results(self, client: Any, job: str) -> Results:
        """The lines of the results, in whatever order they come."""
        lines = await client.messages.batches.results(job)
        # The SDK's own reader ends at the first line that is cut.
        rows = result_lines(await lines.http_response.aread())
        return [(str(row.get("custom_id")), _outcome(row)) for row in rows]

    def _request(self, question: Question, form: Form) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            "model": self.model,
            "max_tokens": question.max_tokens,
            "messages": [{"role": "user", "content": question.user}],
        }
        if question.system:
            chosen["system"] = question.system
        if "thinking" in form:
            chosen["thinking"] = {"type": "disabled"}
        if "output_config" in form and question.output == "json":
            schema = verdict_schema(question)
            chosen["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return chosen


class VertexClaude(Judge):
    """Claude at Vertex AI, with Google's own credentials."""

    name = "vertex-claude"
    batch_rows = 0
    models = SdkProvider.models  # the SDK lists none
    pasted = r"/projects(/.*)?$"
    path = "/v1"

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """There is one address for each region."""
        return f"{vertex_address(environ['CLOUD_ML_REGION'])}/v1"

    def connect(self, key: str) -> Any:
        """An AsyncAnthropicVertex client without retries."""
        from anthropic import AsyncAnthropicVertex, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(**client_settings(self.base_url))
        return AsyncAnthropicVertex(base_url=self.base_url, max_retries=0, http_client=http)


class Bedrock(Judge):
    """Claude at Bedrock: a bearer token, or the credentials of AWS that boto3 finds."""

    name = "bedrock"
    batch_rows = 0
    models = SdkProvider.models  # the SDK lists none
    pasted = r"/model(/.*)?$"

    @classmethod
    def home(cls, environ: Mapping[str, str]) -> str:
        """There is one address for each region."""
        region = environ.get("AWS_REGION", "").strip() or environ["AWS_DEFAULT_REGION"].strip()
        return f"https://bedrock-runtime.{region}.amazonaws.com"

    def connect(self, key: str) -> Any:
        """An AsyncAnthropicBedrock client without retries."""
        from anthropic import AsyncAnthropicBedrock, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(**client_settings(self.base_url))
        client = AsyncAnthropicBedrock(base_url=self.base_url, max_retries=0, http_client=http)
        client.api_key = key if self._key.variable else None  # its own look takes a blank one
        return client


def _outcome(line: Any) -> Reply | JudgeError:
    """What one line of a batch's results says."""
    kind = str(attribute(line, "result", "type"))
    if kind == "succeeded":
        return read_row(read_message, attribute(line, "result", "message"))
    error = attribute(line, "result", "error", "error")
    told = f"{attribute(error, 'type')}: {attribute(error, 'message')}" if error else kind
    words = {"expired": "expired", "canceled": "cancelled"}
    return row_error(words.get(kind, "failed"), told)


def read_message(reply: Any) -> Reply:
    """Read a message; anything else is a bad body."""
    blocks = attribute(reply, "content")
    if not isinstance(blocks, list):
        raise_body(reply)
    usage = read_usage(attribute(reply, "usage"), TOKENS)
    ended = attribute(reply, "stop_reason")
    if ended == "refusal":
        category = attribute(reply, "stop_details", "category")
        raise refused("refusal", f"The judge refused (category: {category or 'none'}).", usage)
    texts = [attribute(block, "text") for block in blocks if attribute(block, "type") == "text"]
    return finish("".join(t for t in texts if t), usage, truncated=ended in _CUT)
