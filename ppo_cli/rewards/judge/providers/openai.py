"""Judges behind the openai SDK: OpenAI, or any server with its protocol."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.rewards.judge.calls import Question, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.batches import BatchFields, BatchRows
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
from ppo_cli.rewards.judge.providers.replies import CHAT, TokenFields, read_chat, result_lines

_BATCH_ENDPOINT = "/v1/chat/completions"
# These take `max_completion_tokens`; other servers often know only `max_tokens`.
_OFFICIAL_HOSTS = ("api.openai.com", ".openai.azure.com")
# How a server is asked not to think, by the name of the parameter.
_NO_THOUGHTS = {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}}


class Judge(SdkProvider):
    """A judge behind OpenAI's endpoints for chat completions and decisions."""

    name = "openai"
    package = module = "openai"
    client_class = "AsyncOpenAI"
    decision_module = "openai.resources.decisions"
    redundant_path = r"/(chat/completions|completions|responses|decisions|models|batches)$"
    default_path = "/v1"
    reply_fields = CHAT
    decision_tokens = TokenFields(
        ("input_tokens",), ("output_tokens",), "input_tokens_details.cached_tokens"
    )
    batch_rows, batch_bytes = 50_000, 200_000_000
    batch = BatchFields(
        over=frozenset(("failed", "completed", "expired", "cancelled")),
        created="created_at", name="metadata.ppo_cli", counts=("completed", "failed"),
        failures="errors.data", success=("response.status_code", 200), answer="response.body",
        outcome="error.code", errors=("error", "response.body.error"),
        states={"batch_expired": "expired", "batch_cancelled": "cancelled"},
    )  # fmt: skip

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

    async def submit_batch(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Upload a file with a request in each line, and start a batch of it."""
        frame = {"method": "POST", "url": _BATCH_ENDPOINT}
        lines = [
            json.dumps({"custom_id": row_id, **frame, "body": self.body(question, forms)}) + "\n"
            for row_id, question in rows.items()
        ]
        content = "".join(lines).encode()
        file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
        job = await client.batches.create(
            input_file_id=file.id, endpoint=_BATCH_ENDPOINT, completion_window="24h",
            metadata={"ppo_cli": name},
        )  # fmt: skip
        return str(job.id)

    async def load_rows(self, client: Any, job: str) -> Iterable[Any]:
        """Return the lines of both files of a batch: answers, and rows that failed or expired."""
        batch = await client.batches.retrieve(job)
        files = [file for file in (batch.output_file_id, batch.error_file_id) if file]
        contents = [(await client.files.content(file)).content for file in files]
        return [row for content in contents for row in result_lines(content)]

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
