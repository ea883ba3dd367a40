"""Asks a judge through its provider's batch interface: cheaper, and done within a day.

`BatchJudge` takes the place of a provider. Questions are collected until no more come, submitted as
one job (or several, if one would be too large), and answered when the job is over. Each job has a
file next to the verdict cache, so that a later command continues it. Everything here runs on one
event loop, except `waiting_for()`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.errors import Interrupted
from ppo_cli.extras.lab.batches.interface import (
    BATCH_CALL_S,
    BatchInterface,
    BatchResults,
    row_error,
)
from ppo_cli.rewards.judge.cache import VerdictCache, cache_key
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, worst_case
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.secrets.redact import redact

logger = logging.getLogger(__name__)

# A job is submitted after so long without a new question.
QUIET_S = 0.5
FIRST_POLL_S, LONGEST_POLL_S = 0.5, 60.0
# Give up on a job after so many replies about it that cannot be read.
MAX_UNREAD = 5
# Providers keep results for 29 days at least.
_KEPT_S = 29 * 86400
# Characters of a cache key in the id of a row, which may have 64.
_KEY_LENGTH = 40
# Bytes of a request without its texts, at most.
_ENVELOPE = 8192
_ENDED = "The command ended before the batch was over; the same command continues it."


@dataclass(eq=False)
class _Row:
    """One question that waits for its result."""

    key: str
    question: Question
    outcome: asyncio.Future[Reply]

    def size(self) -> int:
        """Bytes on the wire, at most."""
        return len(json.dumps([self.question.system, self.question.user])) + _ENVELOPE

    def finish(self, result: Reply | Exception) -> None:
        """Set the result, unless nobody waits for it any more."""
        if self.outcome.done():
            return
        if isinstance(result, Reply):
            self.outcome.set_result(result)
        else:
            self.outcome.set_exception(result)


@dataclass
class _Job:
    """A job as in its file; without an id while it is being submitted.

    `rows` are ids (key and number) whose results were not read yet, `dropped` the parameters that
    its requests do not have.
    """

    judge: str
    rows: list[str]
    dropped: dict[str, str]
    id: str | None = None
    time: float = field(default_factory=time.time)

    def write(self, path: Path) -> None:
        """Write the file, or delete it when all rows were read."""
        if not self.rows:
            path.unlink(missing_ok=True)
            return
        with atomic_replace(path) as file:
            file.write_text(json.dumps(asdict(self)), encoding="utf-8")


class BatchJudge:
    """Asks a provider through batch jobs; `wait_s` is how long to wait for a job."""

    def __init__(
        self,
        interface: type[BatchInterface],
        provider: SdkProvider,
        cache: VerdictCache,
        *,
        wait_s: float,
    ) -> None:
        self.name, self.model, self.identity = provider.name, provider.model, provider.identity
        self._provider = provider
        self._interface = interface(provider)
        self._cache = cache
        self._folder = cache.path.with_name(f"{cache.path.stem}.batches")
        self._wait_s = wait_s
        self._queue: list[_Row] = []
        self._open_rows: set[_Row] = set()
        self._last_question = 0.0
        self._sender: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clearing: set[asyncio.Task[None]] = set()
        self._followed: set[tuple[Path, str]] = set()
        self._status: dict[str, str] = {}
        self._stopped = False

    async def ask(self, question: Question, *, timeout: float) -> Reply:
        """Return the reply from a batch job, however long that takes; `timeout` is not used.

        Raises JudgeError for a row that failed. Raises Interrupted if the whole job fails, is not
        accepted or cannot be read, if it takes longer than `wait_s`, and after `stop`.
        """
        if self._stopped:
            raise Interrupted(_ENDED)
        loop = asyncio.get_running_loop()
        row = _Row(cache_key(self.identity, question)[:_KEY_LENGTH], question, loop.create_future())
        self._queue.append(row)
        self._open_rows.add(row)
        self._last_question = loop.time()
        if self._sender is None or self._sender.done():
            self._sender = self._spawn(self._send())
        try:
            return await row.outcome
        finally:
            self._open_rows.discard(row)

    def has_open_job(self) -> bool:
        """Whether an earlier command left an unfinished job of this judge."""
        return any(job.id for _, job in self._stored_jobs())

    def waiting_for(self) -> str | None:
        """Return the jobs that are waited for and their states; from any thread."""
        return " ".join(list(self._status.values())) or None

    async def stop(self) -> None:
        """Stop waiting for jobs; they go on at the provider."""
        self._stopped = True
        for row in list(self._open_rows):
            row.finish(Interrupted(_ENDED))
        for task in self._tasks - self._clearing:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the provider's connections."""
        await self._provider.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- submitting ---------------------------------------------------------------------------

    async def _send(self) -> None:
        """Submit the queued questions as batch jobs, once none has come for QUIET_S seconds.

        An error becomes the outcome of every question in the batch.
        """
        loop = asyncio.get_running_loop()
        while self._queue:
            while (remaining := self._last_question + QUIET_S - loop.time()) > 0:
                await asyncio.sleep(remaining)
            # Rows whose caller was cancelled while they waited are left out.
            rows, self._queue = [row for row in self._queue if not row.outcome.done()], []
            try:
                for part in self._split(await self._resume(rows)):
                    await self._submit(part)
            except Exception as error:  # after any error: no caller may wait for ever
                for row in rows:
                    row.finish(error)

    async def _resume(self, rows: Sequence[_Row]) -> list[_Row]:
        """Let jobs of earlier commands answer rows; return the other rows."""
        waiting: dict[str, list[_Row]] = defaultdict(list)
        for row in rows:
            waiting[row.key].append(row)
        # Each open job of an earlier command takes the rows that it already has.
        for path, job in self._stored_jobs():
            unread = [name for name in job.rows if (path, name) not in self._followed]
            names = [name for name in unread if waiting.get(_key(name))]
            if names and job.id is None:
                await self._find(path, job)
                if job.id is None:
                    path.unlink(missing_ok=True)
            if names and job.id:
                self._provider.adopt_dropped(job.dropped)
                self._follow(path, job, {n: waiting[_key(n)].pop() for n in names})
        return [row for others in waiting.values() for row in others]

    async def _find(self, path: Path, job: _Job) -> None:
        """Set the id of a job that the provider may have accepted, if it has that job."""
        provider, size = self._provider, len(job.rows)
        until, pause = time.monotonic() + self._wait_s, FIRST_POLL_S
        ids: list[str] | None = None
        while ids is None:
            try:
                ids = await provider.run_with_client(
                    BATCH_CALL_S,
                    lambda client: self._interface.find(client, path.stem, job.time, size),
                )
            except JudgeError as error:
                if error.kind is not Failure.RETRYABLE or time.monotonic() > until:
                    raise Interrupted(
                        f"A batch of {size} requests was submitted, and the provider does not say "
                        f"whether it has it ({error.cause}: {error}). Look at your batches there; "
                        f"to ask again, delete {path}."
                    ) from error
                await asyncio.sleep(pause)
                pause = min(2.0 * pause, LONGEST_POLL_S)
        # Several jobs may look alike: skip those that other files already have.
        others = {other.id for _, other in self._stored_jobs()}
        job.id = next((name for name in ids if name not in others), None)
        if job.id is not None:
            job.write(path)

    def _stored_jobs(self) -> Iterator[tuple[Path, _Job]]:
        """Yield the jobs of this judge that have a file, without those that are too old."""
        for path in sorted(self._folder.glob("[!.]*.json")):
            try:
                job = _Job(**json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue  # another command has just finished it
            if time.time() - job.time > _KEPT_S:
                path.unlink(missing_ok=True)
            elif job.judge == self.identity:
                yield path, job

    def _split(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Yield rows in jobs of a size that the provider accepts."""
        part: list[_Row] = []
        size = 0
        for row in rows:
            size += row.size()
            if part and (len(part) == self._interface.max_rows or size > self._interface.max_bytes):
                yield part
                part, size = [], row.size()
            part.append(row)
        if part:
            yield part

    async def _submit(self, part: Sequence[_Row]) -> None:
        """Submit a job; retried only if the provider has certainly not accepted it."""
        provider, seen, rows = self._provider, Counter[str](), dict[str, _Row]()
        # Equal questions in one job need different ids.
        for row in part:
            rows[f"{row.key}-{seen[row.key]}"] = row
            seen[row.key] += 1
        questions = {name: provider.fit_answer(row.question) for name, row in rows.items()}
        provider.check_answer_limit(provider.forms())
        # The file is written before the job is submitted, so a kill in between loses nothing.
        job = _Job(self.identity, list(rows), dict(provider.dropped()))
        path = self._folder / f"{uuid.uuid4().hex}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        job.write(path)
        until, pause = time.monotonic() + self._wait_s, FIRST_POLL_S
        while job.id is None:
            try:
                job.id = await provider.run_with_client(
                    BATCH_CALL_S,
                    lambda client: self._interface.submit(
                        client, questions, provider.forms(), path.stem
                    ),
                )
            except JudgeError as error:
                # No reply: the provider may have the job. Submitting again could pay twice.
                if error.status is None and error.kind is not Failure.FATAL:
                    raise Interrupted(
                        f"It is not known whether the provider accepted the batch ({error.cause}: "
                        f"{error}). The same command looks for it there."
                    ) from error
                if error.kind is not Failure.RETRYABLE or time.monotonic() > until:
                    path.unlink(missing_ok=True)
                    raise Interrupted(
                        f"The provider did not accept the batch ({error.cause}): {error}"
                    ) from error
                self._status[str(path)] = f"The batch was not accepted yet ({error.cause})."
                await asyncio.sleep(max(pause, error.retry_after or 0.0))
                pause = min(2.0 * pause, LONGEST_POLL_S)
                if (error.status or 0) >= 500:  # it may have been accepted nevertheless
                    await self._find(path, job)
            finally:
                self._status.pop(str(path), None)
        job.write(path)
        self._follow(path, job, rows)

    # --- waiting and reading ------------------------------------------------------------------

    def _follow(self, path: Path, job: _Job, rows: Mapping[str, _Row]) -> None:
        self._followed.update((path, name) for name in rows)
        self._spawn(self._watch(path, job, rows))

    async def _watch(self, path: Path, job: _Job, rows: Mapping[str, _Row]) -> None:
        """Wait for a job, and give each row its result."""
        self._status[str(path)] = f"Batch {job.id} of {len(job.rows)} requests: submitted."
        try:
            outcomes = await self._outcomes(path, job)
        except Exception as error:  # after any error: no caller may wait for ever
            for row in rows.values():
                row.finish(error)
            return
        finally:
            self._status.pop(str(path), None)
        message = f"the results of the batch {job.id} have no readable line for this row"
        for name, row in rows.items():
            # It may have been billed nevertheless.
            usage = worst_case(row.question)
            lost = JudgeError(Failure.REFUSED, "batch_failed", message, usage=usage)
            row.finish(outcomes.get(name, lost))
        # Not awaited here: the verdicts reach the cache only after the rows are finished.
        self._clearing.add(self._spawn(self._clear(path, job, rows.keys() & outcomes)))

    async def _clear(self, path: Path, job: _Job, rows: Set[str]) -> None:
        """Remove rows that were read, once their verdicts are in the cache's file.

        A row without a line stays: the same command reads the results again, without asking.
        """
        await asyncio.sleep(QUIET_S / 2)  # they are on their way there
        if await asyncio.to_thread(self._cache.flush):
            job.rows = [name for name in job.rows if name not in rows]
            job.write(path)

    async def _outcomes(self, path: Path, job: _Job) -> dict[str, Reply | JudgeError]:
        """Poll a job until it is over; raises Interrupted if waiting would not help."""
        provider, name, began, pause = self._provider, job.id or "", time.monotonic(), FIRST_POLL_S
        unread = 0
        while True:
            try:
                progress = await provider.run_with_client(
                    BATCH_CALL_S, lambda client: self._interface.poll(client, name)
                )
                if progress.failed:
                    path.unlink(missing_ok=True)
                    raise Interrupted(f"The batch {name} failed: {redact(progress.failed)}.")
                if progress.over:
                    lines = await provider.run_with_client(
                        BATCH_CALL_S, lambda client: self._interface.fetch_results(client, name)
                    )
                    return _results_by_row(job, progress.state, lines)
                done = "" if progress.done is None else f", {progress.done} done"
                self._status[str(path)] = (
                    f"Batch {name} of {len(job.rows)} requests: {progress.state}{done}."
                )
            except JudgeError as error:
                # The provider deleted it: forget the file, so that the next command asks again.
                if error.status == 404:
                    path.unlink(missing_ok=True)
                    raise Interrupted(
                        f"The provider no longer has the batch {name}; the same command asks again."
                    ) from error
                unread += error.status is None and error.cause not in ("timeout", "connection")
                if error.kind is not Failure.RETRYABLE or unread == MAX_UNREAD:
                    raise Interrupted(f"The batch {name} cannot be read: {error}") from error
            remaining = began + self._wait_s - time.monotonic()
            if remaining <= 0:
                raise Interrupted(
                    f"The batch {name} is not over after {self._wait_s / 3600:g} h "
                    "(--batch_hours). It goes on at the provider."
                )
            await asyncio.sleep(min(pause, remaining))
            pause = min(1.5 * pause, LONGEST_POLL_S)


def _results_by_row(job: _Job, state: str, lines: BatchResults) -> dict[str, Reply | JudgeError]:
    """Return the result of each row that has exactly one line; other lines are skipped."""
    # A row that comes twice is not trusted.
    times = Counter(name for name, _ in lines)
    outcomes = {name: outcome for name, outcome in lines if times[name] == 1}
    if state in ("expired", "cancelled"):
        missing = row_error(state, f"the batch {job.id} is {state}, without this row")
        outcomes |= {name: missing for name in job.rows if not times[name]}
    return outcomes


def _key(name: str) -> str:
    return name.rpartition("-")[0]
