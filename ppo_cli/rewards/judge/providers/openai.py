"""Judges behind the openai SDK: OpenAI, Azure, or any server with its protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import (
    CLOCK_SKEW_S,
    BatchProgress,
    BatchResults,
    BatchRows,
    SdkProvider,
    http_client,
)
from ppo_cli.rewards.judge.providers.forms import (
    FORMAT_WORDS,
    QUESTION,
    level_labels,
    reply_from_probabilities,
    response_format,
)
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.judge.providers.replies import (
    TokenFields,
    bad_body,
    build_reply,
    get_nested,
    raise_body,
    read_chat,
    read_row,
    read_usage,
    refusal,
    result_lines,
    row_error,
)

_BATCH_ENDPOINT = "/v1/chat/completions"
_METADATA_KEY = "ppo_cli"  # of the name in a batch's metadata
_OVER = {"failed", "completed", "expired", "cancelled"}
# These take `max_completion_tokens`; other servers often know only `max_tokens`.
_OFFICIAL_HOSTS = ("api.openai.com", ".openai.azure.com")
# The prompt tokens include the cached ones.
TOKENS = TokenFields(
    ("prompt_tokens",), ("completion_tokens",), "prompt_tokens_details.cached_tokens",
    "total_tokens",
)  # fmt: skip
DECISION_TOKENS = TokenFields(
    ("input_tokens",), ("output_tokens",), "input_tokens_details.cached_tokens"
)


class Judge(SdkProvider):
    """A judge behind OpenAI's endpoints for chat completions and decisions."""

    name = "openai"
    package = "openai"
    module = "openai"
    decision_module = "openai.resources.decisions"
    redundant_path = r"/(chat/completions|completions|responses|decisions|models|batches)$"
    default_path = "/v1"
    batch_rows, batch_bytes = 50_000, 200_000_000

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
            Option(
                "system_message", ("apart", "in the prompt"),
                ("developer instruction", "system instruction", "system prompt", "system role",
                 "role 'system'", 'role "system"'),
            ),
        ]  # fmt: skip
        if "qwen" in self.model.lower() and not is_official:
            way = "enable_thinking" if "aliyuncs" in host else "chat_template_kwargs"
            options.insert(0, Option("thinking", (way,), ("enable_thinking",)))
        return options

    def connect(self, key: str) -> Any:
        """Return an AsyncOpenAI client without retries."""
        from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient

        http = http_client(self.base_url, DefaultAioHttpClient, DefaultAsyncHttpxClient)
        return AsyncOpenAI(api_key=key, base_url=self.base_url, max_retries=0, http_client=http)

    async def list_models(self, client: Any) -> list[str] | None:
        """Return the models of the models endpoint."""
        return [model.id async for model in client.models.list()]

    async def request_verdict(
        self, client: Any, question: Question, forms: Forms, timeout: float
    ) -> Reply:
        """One chat completion."""
        body, extra = self._request(question, forms)
        reply = await client.chat.completions.with_raw_response.create(
            **body, timeout=timeout, **({"extra_body": extra} if extra else {})
        )
        return read_completion(read_chat(reply.text))

    async def submit_batch(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Upload a file with a request in each line, and start a batch of it."""
        lines = []
        for row_id, question in rows.items():
            body, extra = self._request(question, forms)
            row = {
                "custom_id": row_id,
                "method": "POST",
                "url": _BATCH_ENDPOINT,
                "body": body | extra,
            }
            lines.append(json.dumps(row) + "\n")
        content = "".join(lines).encode()
        file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
        job = await client.batches.create(
            input_file_id=file.id, endpoint=_BATCH_ENDPOINT, completion_window="24h",
            metadata={_METADATA_KEY: name},
        )  # fmt: skip
        return str(job.id)

    async def find_batches(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """Look for the name in the metadata."""
        async for job in client.batches.list(limit=100):  # the newest first
            if get_nested(job, "metadata", _METADATA_KEY) == name:
                return [str(job.id)]
            if (get_nested(job, "created_at") or 0) < since - CLOCK_SKEW_S:
                break
        return []

    async def poll_batch(self, client: Any, job: str) -> BatchProgress:
        """Return state and counts of a batch; `failed` means that its file was not accepted."""
        batch = await client.batches.retrieve(job)
        state = str(get_nested(batch, "status"))
        counts = [
            get_nested(batch, "request_counts", name) or 0 for name in ("completed", "failed")
        ]
        errors = get_nested(batch, "errors", "data") or ()
        messages = [str(get_nested(error, "message")) for error in errors]
        failed = "; ".join(messages) or state if state == "failed" else ""
        return BatchProgress(state, state in _OVER, sum(counts), failed)

    async def fetch_results(self, client: Any, job: str) -> BatchResults:
        """Return the lines of both files of a batch: answers, and rows that failed or expired."""
        batch = await client.batches.retrieve(job)
        # Answers are in one file, errors in another.
        outcomes: list[tuple[str, Reply | JudgeError]] = []
        for name in ("output_file_id", "error_file_id"):
            file = get_nested(batch, name)
            content = (await client.files.content(file)).content if file else b""
            rows = result_lines(content)
            outcomes += [(str(row.get("custom_id")), _outcome(row)) for row in rows]
        return outcomes

    def _request(self, question: Question, forms: Forms) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments that the SDK checks, and those that it sends unchanged."""
        # Only options that the model accepts are sent.
        chosen: dict[str, Any] = {
            "model": self.model,
            "messages": chat_messages(question, apart=forms.get("system_message") == "apart"),
        }
        if "seed" in forms:
            chosen["seed"] = question.vote
        if "temperature" in forms:
            chosen["temperature"] = self.temperature()
        if "max_tokens" in forms:
            chosen[forms["max_tokens"]] = question.max_tokens
        # As an extra argument it is sent unchanged: the SDK's walk over it takes a fifth of a call.
        extra: dict[str, Any] = {}
        if "response_format" in forms and question.output == "json":
            extra["response_format"] = response_format(question, forms["response_format"])
        if forms.get("thinking") == "enable_thinking":
            extra["enable_thinking"] = False
        elif "thinking" in forms:
            extra["chat_template_kwargs"] = {"enable_thinking": False}
        return chosen, extra

    async def request_decision(self, client: Any, question: Question, timeout: float) -> Reply:
        """Ask the decision endpoint for the probability of each level of the scale.

        The reply has no text and no score.
        """
        # One label for each level, in order.
        labels = level_labels(question.scale)
        task = {
            "type": "score",
            "name": QUESTION,
            "instructions": question.system or "Score the response.",
            "levels": [{"label": label} for label in labels],
        }
        reply = await client.decisions.create(
            model=self.model, input=question.user, questions=[task], timeout=timeout
        )
        usage = read_usage(get_nested(reply, "usage"), DECISION_TOKENS)
        answer = get_nested(reply, "answers", 0)
        if answer is None:
            raise_body(reply)
        if get_nested(answer, "type") == "refusal":
            raise refusal("refusal", "The judge declined to decide.", usage)
        rows = get_nested(answer, "probabilities") or []
        shares = [(str(get_nested(row, "label")), get_nested(row, "probability")) for row in rows]
        return reply_from_probabilities(shares, labels, question.scale, usage)


class Azure(Judge):
    """Azure OpenAI; the model is the name of a deployment."""

    name = "azure"
    batch_rows = 0
    list_models = SdkProvider.list_models  # the SDK lists models, not deployments
    redundant_path = r"/openai(/.*)?$"
    default_path = ""

    def connect(self, key: str) -> Any:
        """Return an AsyncAzureOpenAI client without retries; the key may be an Entra ID token."""
        from openai import AsyncAzureOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient

        http = http_client(self.base_url, DefaultAioHttpClient, DefaultAsyncHttpxClient)
        token = self._key.variable == "AZURE_OPENAI_AD_TOKEN"
        credentials: dict[str, Any] = {"azure_ad_token": key} if token else {"api_key": key}
        return AsyncAzureOpenAI(
            azure_endpoint=self.base_url, max_retries=0, http_client=http, **credentials,
        )  # fmt: skip


def _outcome(row: Mapping[str, Any]) -> Reply | JudgeError:
    """Return what one line of a batch's results says."""
    status, body = get_nested(row, "response", "status_code"), get_nested(row, "response", "body")
    if status == 200:
        return read_row(read_completion, body)
    error = get_nested(row, "error") or get_nested(body, "error") or {}
    code, message = get_nested(error, "code"), get_nested(error, "message")
    state = {"batch_expired": "expired", "batch_cancelled": "cancelled"}.get(str(code), "failed")
    return row_error(state, f"{code or status}: {message}", status)


def chat_messages(question: Question, *, apart: bool = True) -> list[Mapping[str, str]]:
    """Return system and user message, or both in one; no empty system message."""
    if question.system and not apart:
        return [{"role": "user", "content": f"{question.system}\n\n{question.user}"}]
    system = [{"role": "system", "content": question.system}] if question.system else []
    return [*system, {"role": "user", "content": question.user}]


def read_completion(reply: Any, tokens: TokenFields = TOKENS) -> Reply:
    """Return the reply in a chat completion; raises a bad body for anything else."""
    choice = get_nested(reply, "choices", 0)
    message = get_nested(choice, "message")
    if message is None:
        raise_body(reply)
    usage = read_usage(get_nested(reply, "usage"), tokens)
    finish_reason, content = get_nested(choice, "finish_reason"), get_nested(message, "content")
    # A refusal has a field of its own; some gateways use the finish reason.
    refused_text = get_nested(message, "refusal")
    if refused_text or finish_reason == "refusal":
        raise refusal("refusal", str(refused_text or content), usage)
    if finish_reason == "content_filter":
        raise refusal("content_filter", "The provider's filter withheld the answer.", usage)
    if isinstance(content, list):  # Mistral's thinking models answer in chunks
        texts = [get_nested(part, "text") for part in content if get_nested(part, "type") == "text"]
        content = "".join(t for t in texts if isinstance(t, str))
    if not isinstance(content, str | None):
        raise bad_body(f"the content of its message is not a text: {str(content)[:100]}")
    return build_reply(content, usage, truncated=finish_reason == "length")
