"""A judge behind the openai SDK: OpenAI, Azure, or any server that speaks its protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import (
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
)
from ppo_cli.rewards.judge.providers.bodies import bad_body, raise_body, read_chat
from ppo_cli.rewards.judge.providers.forms import (
    FORMAT_WORDS,
    QUESTION,
    by_level,
    criteria,
    response_format,
)

_BATCHED = "/v1/chat/completions"
_NAME = "ppo_cli"  # in a batch's metadata
_OVER = {"failed", "completed", "expired", "cancelled"}
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
    pasted = r"/(chat/completions|completions|responses|decisions|models|batches)$"
    path = "/v1"
    batch_rows, batch_bytes = 50_000, 200_000_000

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
        from openai import AsyncOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient

        http = http_client(self.base_url, DefaultAioHttpClient, DefaultAsyncHttpxClient)
        return AsyncOpenAI(api_key=key, base_url=self.base_url, max_retries=0, http_client=http)

    async def models(self, client: Any) -> list[str] | None:
        """What the models endpoint lists."""
        return [model.id async for model in client.models.list()]

    async def judge(self, client: Any, question: Question, form: Form, timeout: float) -> Reply:
        """One chat completion."""
        asked, extra = self._request(question, form)
        reply = await client.chat.completions.with_raw_response.create(
            **asked, timeout=timeout, **({"extra_body": extra} if extra else {})
        )
        return read_completion(read_chat(reply.text))

    async def submit(self, client: Any, rows: Rows, form: Form, name: str) -> str:
        """A file with a request in each line, and a batch of it."""
        lines = []
        for row_id, question in rows.items():
            asked, extra = self._request(question, form)
            row = {"custom_id": row_id, "method": "POST", "url": _BATCHED, "body": asked | extra}
            lines.append(json.dumps(row) + "\n")
        content = "".join(lines).encode()
        file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
        job = await client.batches.create(
            input_file_id=file.id, endpoint=_BATCHED, completion_window="24h",
            metadata={_NAME: name},
        )  # fmt: skip
        return str(job.id)

    async def find(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """The name is in the metadata."""
        async for job in client.batches.list(limit=100):  # the newest first
            if attribute(job, "metadata", _NAME) == name:
                return [str(job.id)]
            if (attribute(job, "created_at") or 0) < since - CLOCKS_APART_S:
                break
        return []

    async def look(self, client: Any, job: str) -> Progress:
        """State and counts of a batch; `failed` is one whose file was not taken."""
        found = await client.batches.retrieve(job)
        state = str(attribute(found, "status"))
        counts = [attribute(found, "request_counts", name) or 0 for name in ("completed", "failed")]
        told = [attribute(error, "message") for error in attribute(found, "errors", "data") or ()]
        failed = "; ".join(map(str, told)) or state if state == "failed" else ""
        return Progress(state, state in _OVER, sum(counts), failed)

    async def results(self, client: Any, job: str) -> Results:
        """The lines of both files of a batch: answers, and rows that failed or ran out of time."""
        found = await client.batches.retrieve(job)
        outcomes: list[tuple[str, Reply | JudgeError]] = []
        for name in ("output_file_id", "error_file_id"):
            file = attribute(found, name)
            content = (await client.files.content(file)).content if file else b""
            rows = result_lines(content)
            outcomes += [(str(row.get("custom_id")), _outcome(row)) for row in rows]
        return outcomes

    def _request(self, question: Question, form: Form) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the SDK knows of a request, and what is sent as it is."""
        chosen: dict[str, Any] = {
            "model": self.model,
            "messages": chat_messages(question, apart=form.get("system_message") == "apart"),
        }
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
        return chosen, extra

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
            raise_body(reply)
        if attribute(answer, "type") == "refusal":
            raise refused("refusal", "The judge declined to decide.", usage)
        rows = attribute(answer, "probabilities") or []
        shares = [(str(attribute(row, "label")), attribute(row, "probability")) for row in rows]
        return by_level(shares, labels, question.scale, usage)


class Azure(Judge):
    """Azure OpenAI; the model is the name of a deployment."""

    name = "azure"
    batch_rows = 0
    models = SdkProvider.models  # the SDK lists models, and no deployments
    pasted = r"/openai(/.*)?$"
    path = ""

    def connect(self, key: str) -> Any:
        """An AsyncAzureOpenAI client without retries; the key may be a token of Entra ID."""
        from openai import AsyncAzureOpenAI, DefaultAioHttpClient, DefaultAsyncHttpxClient

        http = http_client(self.base_url, DefaultAioHttpClient, DefaultAsyncHttpxClient)
        token = self._key.variable == "AZURE_OPENAI_AD_TOKEN"
        let_in: dict[str, Any] = {"azure_ad_token": key} if token else {"api_key": key}
        return AsyncAzureOpenAI(
            azure_endpoint=self.base_url, max_retries=0, http_client=http, **let_in,
        )  # fmt: skip


def _outcome(row: Mapping[str, Any]) -> Reply | JudgeError:
    """What one line of a batch's results says."""
    status, body = attribute(row, "response", "status_code"), attribute(row, "response", "body")
    if status == 200:
        return read_row(read_completion, body)
    error = attribute(row, "error") or attribute(body, "error") or {}
    code, told = attribute(error, "code"), attribute(error, "message")
    word = {"batch_expired": "expired", "batch_cancelled": "cancelled"}.get(str(code), "failed")
    return row_error(word, f"{code or status}: {told}", status)


def chat_messages(question: Question, *, apart: bool = True) -> list[Mapping[str, str]]:
    """System and user message, or both in one; no empty system message."""
    if question.system and not apart:
        return [{"role": "user", "content": f"{question.system}\n\n{question.user}"}]
    system = [{"role": "system", "content": question.system}] if question.system else []
    return [*system, {"role": "user", "content": question.user}]


def read_completion(reply: Any, tokens: TokenFields = TOKENS) -> Reply:
    """Read a chat completion; anything else is a bad body."""
    choice = attribute(reply, "choices", 0)
    message = attribute(choice, "message")
    if message is None:
        raise_body(reply)
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
    if not isinstance(content, str | None):
        raise bad_body(f"the content of its message is no text: {str(content)[:100]}")
    return finish(content, usage, truncated=ended == "length")
