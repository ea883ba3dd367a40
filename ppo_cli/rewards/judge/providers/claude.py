"""Judges behind the anthropic SDK: Anthropic, Vertex AI or Bedrock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import (
    BATCH_CALL_S,
    CLOCK_SKEW_S,
    BatchProgress,
    BatchResults,
    BatchRows,
    SdkProvider,
    http_client,
    vertex_address,
)
from ppo_cli.rewards.judge.providers.forms import FORMAT_WORDS, verdict_schema
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.judge.providers.replies import (
    TokenFields,
    build_reply,
    get_nested,
    raise_body,
    read_body,
    read_row,
    read_usage,
    refusal,
    result_lines,
    row_error,
)
from ppo_cli.rewards.remote.proxies import client_settings

# Counts of rows in a batch; all but the first have ended.
_STATES = ("processing", "succeeded", "errored", "canceled", "expired")
# Reasons why an answer ended early.
_CUT = {"max_tokens", "model_context_window_exceeded"}
# `input_tokens` does not include what was read from or written to a cache.
TOKENS = TokenFields(
    ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    ("output_tokens",),
    "cache_read_input_tokens",
)


class Judge(SdkProvider):
    """A judge behind Anthropic's Messages API, which has no decision endpoint."""

    name = "claude"
    package = "anthropic"
    module = "anthropic"
    redundant_path = r"(/v1)?(/messages(/batches)?)?$"
    batch_rows, batch_bytes = 100_000, 256_000_000

    def temperature(self) -> float | None:
        """Return the temperature of the settings: current models take none."""
        return self.api.temperature

    def options(self) -> Sequence[Option]:
        """Temperature is sent only if it is set: current models take none."""
        options = [
            Option("thinking", ("disabled",)),
            Option(
                "output_config", ("json_schema",),
                ("output_format", "schema", "response_format", *FORMAT_WORDS),
            ),
        ]  # fmt: skip
        if self.temperature() is not None:
            options.append(Option("temperature"))
        return options

    def connect(self, key: str) -> Any:
        """Return an AsyncAnthropic client without retries."""
        from anthropic import AsyncAnthropic, DefaultAioHttpClient, DefaultAsyncHttpxClient

        http = http_client(self.base_url, DefaultAioHttpClient, DefaultAsyncHttpxClient)
        return AsyncAnthropic(api_key=key, base_url=self.base_url, max_retries=0, http_client=http)

    async def list_models(self, client: Any) -> list[str] | None:
        """Return the models of the models endpoint."""
        return [model.id async for model in client.models.list(limit=1000)]

    async def request_verdict(
        self, client: Any, question: Question, forms: Forms, timeout: float
    ) -> Reply:
        """Ask with one message."""
        arguments = self._request(question, forms)
        if "temperature" in forms:  # gateways may know it, the SDK (0.79) does not any more
            arguments["extra_body"] = {"temperature": self.temperature()}
        reply = await client.messages.with_raw_response.create(timeout=timeout, **arguments)
        return read_message(read_body(await reply.text()))

    async def submit_batch(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Submit all requests in one call."""
        extra = {"temperature": self.temperature()} if "temperature" in forms else {}
        requests = [
            {"custom_id": row_id, "params": self._request(question, forms) | extra}
            for row_id, question in rows.items()
        ]
        return str((await client.messages.batches.create(requests=requests)).id)

    async def find_batches(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """Return the jobs of that time and size, the oldest first: jobs have no names here."""
        ids: list[str] = []
        async for job in client.messages.batches.list(limit=100):  # the newest first
            # The list is sorted by time: older jobs cannot be the one.
            late_s = job.created_at.timestamp() - since
            if late_s < -CLOCK_SKEW_S:
                break
            size = sum(get_nested(job, "request_counts", state) or 0 for state in _STATES)
            if size == rows and late_s < BATCH_CALL_S + CLOCK_SKEW_S:
                ids.insert(0, str(job.id))
        return ids

    async def poll_batch(self, client: Any, job: str) -> BatchProgress:
        """Return state and counts; the counts are 0 until all rows have ended."""
        batch = await client.messages.batches.retrieve(job)
        state = str(get_nested(batch, "processing_status"))
        counts = [get_nested(batch, "request_counts", name) or 0 for name in _STATES[1:]]
        return BatchProgress(state, state == "ended", sum(counts))

    async def fetch_results(self, client: Any, job: str) -> BatchResults:
        """Return the lines of the results, in any order."""
        lines = await client.messages.batches.results(job)
        # The SDK's reader stops at the first line that is cut (anthropic 0.79).
        rows = result_lines(await lines.http_response.aread())
        return [(str(row.get("custom_id")), _outcome(row)) for row in rows]

    def _request(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the arguments of a request, with the optional ones that `forms` has."""
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
            # Structured output: the answer follows the schema.
            schema = verdict_schema(question)
            arguments["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return arguments


class VertexClaude(Judge):
    """Claude at Vertex AI, with Google's own credentials."""

    name = "vertex-claude"
    batch_rows = 0
    list_models = SdkProvider.list_models  # the SDK lists none
    redundant_path = r"/projects(/.*)?$"
    default_path = "/v1"

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the address of the region."""
        return f"{vertex_address(environ['CLOUD_ML_REGION'])}/v1"

    def connect(self, key: str) -> Any:
        """Return an AsyncAnthropicVertex client without retries."""
        from anthropic import AsyncAnthropicVertex, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(**client_settings(self.base_url))
        return AsyncAnthropicVertex(base_url=self.base_url, max_retries=0, http_client=http)


class Bedrock(Judge):
    """Claude at Bedrock: a bearer token, or the credentials of AWS that boto3 finds."""

    name = "bedrock"
    batch_rows = 0
    list_models = SdkProvider.list_models  # the SDK lists none
    redundant_path = r"/model(/.*)?$"

    @classmethod
    def default_url(cls, environ: Mapping[str, str]) -> str:
        """Return the address of the region."""
        region = environ.get("AWS_REGION", "").strip() or environ["AWS_DEFAULT_REGION"].strip()
        return f"https://bedrock-runtime.{region}.amazonaws.com"

    def connect(self, key: str) -> Any:
        """Return an AsyncAnthropicBedrock client without retries."""
        from anthropic import AsyncAnthropicBedrock, DefaultAsyncHttpxClient

        http = DefaultAsyncHttpxClient(**client_settings(self.base_url))
        client = AsyncAnthropicBedrock(base_url=self.base_url, max_retries=0, http_client=http)
        client.api_key = key if self._key.variable else None  # the SDK would take a blank variable
        return client


def _outcome(line: Any) -> Reply | JudgeError:
    """Return what one line of a batch's results says."""
    # A row succeeded, errored, was cancelled or expired.
    kind = str(get_nested(line, "result", "type"))
    if kind == "succeeded":
        return read_row(read_message, get_nested(line, "result", "message"))
    error = get_nested(line, "result", "error", "error")
    message = f"{get_nested(error, 'type')}: {get_nested(error, 'message')}" if error else kind
    states = {"expired": "expired", "canceled": "cancelled"}
    return row_error(states.get(kind, "failed"), message)


def read_message(reply: Any) -> Reply:
    """Return the reply in a message; raises a bad body for anything else."""
    blocks = get_nested(reply, "content")
    if not isinstance(blocks, list):
        raise_body(reply)
    usage = read_usage(get_nested(reply, "usage"), TOKENS)
    stop_reason = get_nested(reply, "stop_reason")
    if stop_reason == "refusal":
        category = get_nested(reply, "stop_details", "category")
        raise refusal("refusal", f"The judge refused (category: {category or 'none'}).", usage)
    # Thinking blocks and other types are skipped.
    texts = [get_nested(block, "text") for block in blocks if get_nested(block, "type") == "text"]
    return build_reply("".join(t for t in texts if t), usage, truncated=stop_reason in _CUT)
