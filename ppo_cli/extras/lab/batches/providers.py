"""The batch interfaces of OpenAI, Anthropic and Gemini, which entry points name.

Other providers have none, or the same model is elsewhere: batches work differently on each cloud.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from ppo_cli.extras.lab.batches.interface import (
    BatchFields,
    BatchInterface,
    BatchRows,
    result_lines,
)
from ppo_cli.extras.lab.batches.judge import BatchJudge
from ppo_cli.rewards.judge.providers.options import Forms
from ppo_cli.rewards.judge.providers.replies import get_path

_ENDPOINT = "/v1/chat/completions"


class OpenAIBatches(BatchInterface):
    """Jobs of a file with a request in each line."""

    max_rows, max_bytes = 50_000, 200_000_000
    fields = BatchFields(
        over=frozenset(("failed", "completed", "expired", "cancelled")),
        created="created_at", name="metadata.ppo_cli", counts=("completed", "failed"),
        failures="errors.data", success=("response.status_code", 200), answer="response.body",
        outcome="error.code", errors=("error", "response.body.error"),
        states={"batch_expired": "expired", "batch_cancelled": "cancelled"},
    )  # fmt: skip

    async def submit(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Upload a file with a request in each line, and start a batch of it."""
        frame = {"method": "POST", "url": _ENDPOINT}
        lines = [
            json.dumps({"custom_id": row_id, **frame, "body": self.body(question, forms)}) + "\n"
            for row_id, question in rows.items()
        ]
        content = "".join(lines).encode()
        file = await client.files.create(file=("requests.jsonl", content), purpose="batch")
        job = await client.batches.create(
            input_file_id=file.id, endpoint=_ENDPOINT, completion_window="24h",
            metadata={"ppo_cli": name},
        )  # fmt: skip
        return str(job.id)

    async def load_rows(self, client: Any, job: str) -> Iterable[Any]:
        """Return the lines of both files of a batch: answers, and rows that failed or expired."""
        batch = await client.batches.retrieve(job)
        files = [file for file in (batch.output_file_id, batch.error_file_id) if file]
        contents = [(await client.files.content(file)).content for file in files]
        return [row for content in contents for row in result_lines(content)]


class ClaudeBatches(BatchInterface):
    """Batches of messages."""

    max_rows, max_bytes = 100_000, 256_000_000
    # The counts of a job are 0 until all its rows have ended.
    fields = BatchFields(
        over=frozenset(("ended",)), state="processing_status", created="created_at",
        counts=("succeeded", "errored", "canceled", "expired"), answer="result.message",
        success=("result.type", "succeeded"), outcome="result.type",
        states={"expired": "expired", "canceled": "cancelled"}, errors=("result.error.error",),
    )  # fmt: skip

    def jobs(self, client: Any) -> Any:
        """Return the batches of messages."""
        return client.messages.batches

    async def submit(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Submit all requests in one call."""
        requests = [
            {"custom_id": row_id, "params": self.body(question, forms)}
            for row_id, question in rows.items()
        ]
        return str((await client.messages.batches.create(requests=requests)).id)

    async def load_rows(self, client: Any, job: str) -> Iterable[Any]:
        """Return the lines of the results, in any order."""
        lines = await client.messages.batches.results(job)
        # The SDK's reader stops at the first line that is cut (anthropic 0.79).
        return result_lines(await lines.http_response.aread())


class GeminiBatches(BatchInterface):
    """Jobs whose requests are in the call itself."""

    max_rows, max_bytes = 100_000, 15_000_000  # requests in the call itself: 20 MB at most
    fields = BatchFields(
        over=frozenset(("succeeded", "partially_succeeded", "failed", "cancelled", "expired")),
        job_id="name", state="state", name="display_name", failures="error",
        row_id="metadata.key", success=("error", None), answer="response", outcome="error.code",
        states={1: "cancelled", 4: "expired"}, errors=("error",),  # by google.rpc.Code
    )  # fmt: skip

    def jobs(self, client: Any) -> Any:
        """Return the batches of the asynchronous client."""
        return client.aio.batches

    async def submit(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Submit all requests in one call, each with its id as metadata."""
        requests = [
            {**self.provider.arguments(question, forms), "metadata": {"key": row_id}}
            for row_id, question in rows.items()
        ]
        job = await client.aio.batches.create(
            model=self.provider.model,
            src=requests,
            config={"display_name": f"ppo-cli judge {name}"},
        )
        return str(job.name)

    async def get_job(self, client: Any, job: str) -> Any:
        """Return a job of a name."""
        return await client.aio.batches.get(name=job)

    async def list_jobs(self, client: Any) -> AsyncIterator[Any]:
        """Return all jobs; their list is in no order."""
        jobs: AsyncIterator[Any] = await client.aio.batches.list(config={"page_size": 100})
        return jobs

    async def load_rows(self, client: Any, job: str) -> Iterable[Any]:
        """Return the responses of a job; one that expired may have none."""
        return get_path(await self.get_job(client, job), "dest.inlined_responses") or ()


openai = partial(BatchJudge, OpenAIBatches)
claude = partial(BatchJudge, ClaudeBatches)
gemini = partial(BatchJudge, GeminiBatches)
