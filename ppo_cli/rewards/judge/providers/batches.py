"""What the batch interfaces of providers share: jobs are found, polled and read by declared names.

A provider with a batch interface declares `batch_rows`, `batch_bytes` and `batch`. It submits jobs
and loads the rows of their results; the rest is here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.options import Forms
from ppo_cli.rewards.judge.providers.replies import (
    ReplyFields,
    get_path,
    read_reply,
    row_error,
    to_word,
)
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


class BatchInterface:
    """The batch interface of a provider; `batch_rows` is 0 where there is none."""

    batch_rows: ClassVar[int] = 0  # most requests of a job
    batch_bytes: ClassVar[int] = 0  # and its most bytes
    batch: ClassVar[BatchFields]
    reply_fields: ClassVar[ReplyFields]

    async def submit_batch(self, client: Any, rows: BatchRows, forms: Forms, name: str) -> str:
        """Submit requests as one batch job under a name; returns the job's id."""
        raise NotImplementedError

    def batch_client(self, client: Any) -> Any:
        """Return the part of the SDK's client with the batch jobs."""
        return client.batches

    async def get_job(self, client: Any, job: str) -> Any:
        """Return a job with an id."""
        return await self.batch_client(client).retrieve(job)

    async def list_jobs(self, client: Any) -> AsyncIterator[Any]:
        """Return all jobs, the newest first where they have a time."""
        jobs: AsyncIterator[Any] = self.batch_client(client).list(limit=100)
        return jobs

    async def load_rows(self, client: Any, job: str) -> Iterable[Any]:
        """Return the rows of a finished job's results."""
        raise NotImplementedError

    async def find_batches(self, client: Any, name: str, since: float, rows: int) -> list[str]:
        """Return ids of the batch jobs that may be the one submitted as `name` after `since`.

        `rows` is the number of its questions; the oldest job comes first.
        """
        fields, ids = self.batch, list[str]()
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

    async def poll_batch(self, client: Any, job: str) -> BatchProgress:
        """Return the state of a batch job."""
        fields, batch = self.batch, await self.get_job(client, job)
        state = to_word(get_path(batch, fields.state)).removeprefix("JOB_STATE_").lower()
        done = fields.count(batch, *fields.counts) if fields.counts else None
        errors = get_path(batch, fields.failures)
        errors = errors if isinstance(errors, list) else [errors]
        messages = [str(get_path(error, "message") or state) for error in errors]
        failed = "; ".join(messages) or state if state == "failed" else ""
        return BatchProgress(state, state in fields.over, done, failed)

    async def fetch_results(self, client: Any, job: str) -> BatchResults:
        """Return what a finished job says of its rows; some may be missing or come twice."""
        rows = await self.load_rows(client, job)
        return [
            (str(get_path(row, self.batch.row_id)), self.batch.read_row(row, self.reply_fields))
            for row in rows
        ]
