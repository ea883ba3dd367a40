"""What the batch interfaces of providers share: jobs are found, polled and read by declared names.

An interface declares limits and fields, submits jobs and loads the rows of their results
(`providers.py`); the rest is here.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.failures import is_about_filter
from ppo_cli.rewards.judge.providers.options import Forms
from ppo_cli.rewards.judge.providers.replies import ReplyFields, get_path, read_reply, to_word
from ppo_cli.rewards.remote.failures import Failure

BATCH_CALL_S = 300.0  # for one request that submits, polls or fetches a whole batch job
CLOCK_SKEW_S = 120.0  # between this machine and a provider, at most

BatchRows = Mapping[str, Question]  # of a batch job, by the id that the results carry
BatchResults = Sequence[tuple[str, Reply | JudgeError]]  # by the id of the row


@dataclass(frozen=True)
class BatchProgress:
    """The state of a batch job in the provider's word, rows done if known, and why it failed."""

    state: str
    over: bool
    done: int | None = None
    failed: str = ""


@dataclass(frozen=True)
class BatchFields:
    """Dotted names of what is read in a provider's batch jobs and in the rows of their results.

    Without a `name` that the client gave it, a job is known by its time and size. Without the time
    `created`, the list of jobs is in no order. A row has an answer if its field `success[0]` is
    `success[1]`; otherwise its `outcome` gives its state by `states`, or it failed.
    """

    over: frozenset[str]  # states in which a job has ended
    answer: str
    success: tuple[str, Any]
    outcome: str
    states: Mapping[Any, str]
    errors: tuple[str, ...]  # where the error object of a row may be
    job_id: str = "id"
    state: str = "status"
    created: str = ""
    name: str = ""
    counts: tuple[str, ...] = ()  # of rows that have ended, in `request_counts`
    failures: str = ""  # why a whole job failed: an error object, or a list of them
    row_id: str = "custom_id"

    def count(self, job: Any, *names: str) -> int:
        """Return the rows of a job with these outcomes."""
        return sum(get_path(job, f"request_counts.{name}") or 0 for name in names)

    def read_row(self, row: Any, reply_fields: ReplyFields) -> Reply | JudgeError:
        """Return the answer in a row of results, read like a direct one, or its error."""
        if get_path(row, self.success[0]) != self.success[1]:
            return self._read_error(row)
        try:
            return read_reply(get_path(row, self.answer), reply_fields)
        except JudgeError as error:
            if error.kind is Failure.RETRYABLE:
                return JudgeError(Failure.REFUSED, "batch_failed", str(error))  # it may be billed
            return error

    def _read_error(self, row: Any) -> JudgeError:
        error = next(filter(None, (get_path(row, place) for place in self.errors)), None)
        outcome, status = get_path(row, self.outcome), get_path(row, "response.status_code")
        code = get_path(error, "code") or get_path(error, "type") or status or outcome
        words = [str(word) for word in (code, get_path(error, "message")) if word is not None]
        return row_error(self.states.get(outcome, "failed"), ": ".join(words), status)


def row_error(state: str, message: str, status: int | None = None) -> JudgeError:
    """Return the error for a row without an answer: expired, failed or cancelled.

    It is final: waiting for another job would not help. A row that did not run is not billed.
    """
    cause = "content_filter" if is_about_filter(message) else f"batch_{state}"
    return JudgeError(Failure.REFUSED, cause, message, status=status or 0)


def result_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Return the JSON objects in the lines of a file; other lines are skipped.

    Lines end with a line feed only: an answer may contain U+2028 and other separators.
    """
    for line in content.split(b"\n"):
        try:
            row = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


class BatchInterface(ABC):
    """The batch interface of a provider."""

    max_rows: ClassVar[int]  # of a job
    max_bytes: ClassVar[int]
    fields: ClassVar[BatchFields]

    def __init__(self, provider: SdkProvider) -> None:
        self.provider = provider

    @abstractmethod
    async def submit(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Submit requests as one batch job under a name; returns the job's id."""

    def body(self, question: Question, forms: Forms) -> dict[str, Any]:
        """Return the body of a request, which an SDK does not build for a batch."""
        arguments = self.provider.arguments(question, forms)
        extra: dict[str, Any] = arguments.pop("extra_body", {})
        return arguments | extra

    def jobs(self, client: Any) -> Any:
        """Return the part of the SDK's client with the batch jobs."""
        return client.batches

    async def get_job(self, client: Any, job: str) -> Any:
        """Return a job with an id."""
        return await self.jobs(client).retrieve(job)

    async def list_jobs(self, client: Any) -> AsyncIterator[Any]:
        """Return all jobs, the newest first where they have a time."""
        jobs: AsyncIterator[Any] = self.jobs(client).list(limit=100)
        return jobs

    @abstractmethod
    async def load_rows(self, client: Any, job: str) -> Iterable[Any]:
        """Return the rows of a finished job's results."""

    async def find(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """Return ids of the batch jobs that may be the one submitted as `name` after `since`.

        `rows` is the number of its questions; the oldest job comes first.
        """
        fields, ids = self.fields, list[str]()
        async for job in await self.list_jobs(client):
            created = get_path(job, fields.created) or 0
            late_s = (created.timestamp() if isinstance(created, datetime) else created) - since
            if fields.name:
                matches = str(get_path(job, fields.name)).endswith(name)
            else:
                size = fields.count(job, "processing", *fields.counts)
                matches = size == rows and -CLOCK_SKEW_S <= late_s < BATCH_CALL_S + CLOCK_SKEW_S
            if matches:
                ids.insert(0, str(get_path(job, fields.job_id)))
            # In a list sorted by time, older jobs cannot be the one.
            if fields.created and late_s < -CLOCK_SKEW_S:
                break
        return ids

    async def poll(self, client: Any, job: str) -> BatchProgress:
        """Return the state of a batch job."""
        fields, batch = self.fields, await self.get_job(client, job)
        state = to_word(get_path(batch, fields.state)).removeprefix("JOB_STATE_").lower()
        done = fields.count(batch, *fields.counts) if fields.counts else None
        errors = get_path(batch, fields.failures)
        errors = errors if isinstance(errors, list) else [errors]
        messages = [str(get_path(error, "message") or state) for error in errors]
        failed = "; ".join(messages) or state if state == "failed" else ""
        return BatchProgress(state, state in fields.over, done, failed)

    async def fetch_results(self, client: Any, job: str) -> BatchResults:
        """Return what a finished job says of its rows; some may be missing or come twice."""
        rows, fields = await self.load_rows(client, job), self.fields
        return [
            (str(get_path(row, fields.row_id)), fields.read_row(row, self.provider.reply_fields))
            for row in rows
        ]
