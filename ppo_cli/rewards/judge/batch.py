"""A judge that is asked through its provider's batch interface: cheaper, and done within a day.

It stands where a provider does. Questions gather until no more come, go out as one job (as several
where one would be too large), and get their outcomes when the job is over. Each job is in a file
beside the verdict cache, so that a command that was killed goes on with it. Everything here runs
on one event loop, except `waiting_for()`.
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
from ppo_cli.redact import redact
from ppo_cli.rewards.judge.cache import VerdictCache, cache_key
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, worst_case
from ppo_cli.rewards.judge.providers.base import CALL_S, Results, SdkProvider, row_error
from ppo_cli.rewards.remote.failures import Failure

logger = logging.getLogger(__name__)

QUIET_S = 0.5  # without a new question until a job goes out
FIRST_POLL_S, LONGEST_POLL_S = 0.5, 60.0
MOST_UNREAD = 5  # replies about a job that cannot be read
_KEPT_S = 29 * 86400  # as long as providers keep results
_KEY = 40  # of a key: ids of rows may have 64 characters
_ENVELOPE = 8192  # bytes of a request beside its texts, at most
_ENDED = "The command ended before the batch was over; the same command goes on with it."


@dataclass(eq=False)
class _Row:
    """One question that waits for its outcome."""

    key: str
    question: Question
    outcome: asyncio.Future[Reply]

    def size(self) -> int:
        """Bytes on the wire, at most."""
        return len(json.dumps([self.question.system, self.question.user])) + _ENVELOPE

    def settle(self, found: Reply | Exception) -> None:
        """Hand over the outcome, unless nobody waits for it any more."""
        if self.outcome.done():
            return
        if isinstance(found, Reply):
            self.outcome.set_result(found)
        else:
            self.outcome.set_exception(found)


@dataclass
class _Job:
    """A job as its file has it; without an id while it is handed in.

    `rows` are ids (key and number) whose outcomes were not read yet, `dropped` the parameters
    that its requests go without.
    """

    judge: str
    rows: list[str]
    dropped: dict[str, str]
    id: str | None = None
    time: float = field(default_factory=time.time)

    def write(self, path: Path) -> None:
        """Keep it, or forget it when all of it was read."""
        if not self.rows:
            path.unlink(missing_ok=True)
            return
        with atomic_replace(path) as fresh:
            fresh.write_text(json.dumps(asdict(self)), encoding="utf-8")


class BatchJudge:
    """Asks a provider by batch jobs; `wait_s` is how long a job is waited for."""

    def __init__(self, provider: SdkProvider, cache: VerdictCache, *, wait_s: float) -> None:
        self.name, self.model, self.identity = provider.name, provider.model, provider.identity
        self._provider = provider
        self._cache = cache
        self._folder = cache.path.with_name(f"{cache.path.stem}.batches")
        self._wait_s = wait_s
        self._queue: list[_Row] = []
        self._open: set[_Row] = set()
        self._last = 0.0
        self._sender: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clearing: set[asyncio.Task[None]] = set()
        self._taken: set[tuple[Path, str]] = set()
        self._told: dict[str, str] = {}
        self._stopped = False

    async def ask(self, question: Question, *, timeout: float) -> Reply:
        """Return the reply that a job brings, whenever that is; `timeout` is for other ways.

        Raises JudgeError for a row that failed, Interrupted when there is no waiting for the job.
        """
        if self._stopped:
            raise Interrupted(_ENDED)
        loop = asyncio.get_running_loop()
        row = _Row(cache_key(self.identity, question)[:_KEY], question, loop.create_future())
        self._queue.append(row)
        self._open.add(row)
        self._last = loop.time()
        if self._sender is None or self._sender.done():
            self._sender = self._spawn(self._send())
        try:
            return await row.outcome
        finally:
            self._open.discard(row)

    def under_way(self) -> bool:
        """Whether an earlier command left a job of this judge."""
        return any(job.id for _, job in self._kept())

    def waiting_for(self) -> str | None:
        """Say which jobs are waited for, and how far they are; from any thread."""
        return " ".join(list(self._told.values())) or None

    async def stop(self) -> None:
        """Wait for no job any more; they go on at the provider."""
        self._stopped = True
        for row in list(self._open):
            row.settle(Interrupted(_ENDED))
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

    # --- handing in ---------------------------------------------------------------------------

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            while (left := self._last + QUIET_S - loop.time()) > 0:
                await asyncio.sleep(left)
            rows, self._queue = [row for row in self._queue if not row.outcome.done()], []
            try:
                for part in self._parts(await self._resume(rows)):
                    await self._hand_in(part)
            except Exception as error:  # whatever it is, nobody may wait for ever
                for row in rows:
                    row.settle(error)

    async def _resume(self, rows: Sequence[_Row]) -> list[_Row]:
        """Have rows answered by jobs of earlier commands; returns the others."""
        waiting: dict[str, list[_Row]] = defaultdict(list)
        for row in rows:
            waiting[row.key].append(row)
        for path, job in self._kept():
            free = [name for name in job.rows if (path, name) not in self._taken]
            names = [name for name in free if waiting.get(_key(name))]
            if names and job.id is None:
                await self._find(path, job)
                if job.id is None:
                    path.unlink(missing_ok=True)
            if names and job.id:
                self._provider.adopt(job.dropped)
                self._follow(path, job, {n: waiting[_key(n)].pop() for n in names})
        return [row for left in waiting.values() for row in left]

    async def _find(self, path: Path, job: _Job) -> None:
        """Set the id of a job that the provider may have taken, where it has it."""
        provider, size = self._provider, len(job.rows)
        until, pause = time.monotonic() + self._wait_s, FIRST_POLL_S
        ids: list[str] | None = None
        while ids is None:
            try:
                ids = await provider.within(
                    CALL_S, lambda client: provider.find(client, path.stem, job.time, size)
                )
            except JudgeError as error:
                if error.kind is not Failure.RETRYABLE or time.monotonic() > until:
                    raise Interrupted(
                        f"A batch of {size} requests was handed in, and the provider does not say "
                        f"whether it has it ({error.cause}: {error}). Look at your batches there; "
                        f"to ask again, delete {path}."
                    ) from error
                await asyncio.sleep(pause)
                pause = min(2.0 * pause, LONGEST_POLL_S)
        others = {other.id for _, other in self._kept()}
        job.id = next((name for name in ids if name not in others), None)
        if job.id is not None:
            job.write(path)

    def _kept(self) -> Iterator[tuple[Path, _Job]]:
        """The jobs of this judge that are on disk, without those that are too old."""
        for path in sorted(self._folder.glob("[!.]*.json")):
            try:
                job = _Job(**json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue  # another command has just read it to its end
            if time.time() - job.time > _KEPT_S:
                path.unlink(missing_ok=True)
            elif job.judge == self.identity:
                yield path, job

    def _parts(self, rows: Sequence[_Row]) -> Iterator[list[_Row]]:
        """Rows in jobs that the provider takes."""
        part: list[_Row] = []
        size = 0
        for row in rows:
            size += row.size()
            if part and (
                len(part) == self._provider.batch_rows or size > self._provider.batch_bytes
            ):
                yield part
                part, size = [], row.size()
            part.append(row)
        if part:
            yield part

    async def _hand_in(self, part: Sequence[_Row]) -> None:
        """Submit a job; it is tried again only when the provider has turned it away for sure."""
        provider, seen, rows = self._provider, Counter[str](), dict[str, _Row]()
        for row in part:
            rows[f"{row.key}-{seen[row.key]}"] = row
            seen[row.key] += 1
        asked = {name: provider.fitted(row.question) for name, row in rows.items()}
        provider.check_length(provider.form())
        job = _Job(self.identity, list(rows), dict(provider.dropped()))
        path = self._folder / f"{uuid.uuid4().hex}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        job.write(path)
        until, pause = time.monotonic() + self._wait_s, FIRST_POLL_S
        while job.id is None:
            try:
                job.id = await provider.within(
                    CALL_S,
                    lambda client: provider.submit(client, asked, provider.form(), path.stem),
                )
            except JudgeError as error:
                if error.status is None and error.kind is not Failure.FATAL:
                    raise Interrupted(
                        f"Whether the provider took the batch is not known ({error.cause}: "
                        f"{error}). The same command looks for it there."
                    ) from error
                if error.kind is not Failure.RETRYABLE or time.monotonic() > until:
                    path.unlink(missing_ok=True)
                    raise Interrupted(
                        f"The provider did not take the batch ({error.cause}): {error}"
                    ) from error
                self._told[str(path)] = f"The batch was not taken yet ({error.cause})."
                await asyncio.sleep(max(pause, error.retry_after or 0.0))
                pause = min(2.0 * pause, LONGEST_POLL_S)
                if (error.status or 0) >= 500:  # it may have been taken all the same
                    await self._find(path, job)
            finally:
                self._told.pop(str(path), None)
        job.write(path)
        self._follow(path, job, rows)

    # --- waiting and reading ------------------------------------------------------------------

    def _follow(self, path: Path, job: _Job, rows: Mapping[str, _Row]) -> None:
        self._taken.update((path, name) for name in rows)
        self._spawn(self._watch(path, job, rows))

    async def _watch(self, path: Path, job: _Job, rows: Mapping[str, _Row]) -> None:
        """Wait for a job, and give each row its outcome."""
        self._told[str(path)] = f"Batch {job.id} of {len(job.rows)} requests: handed in."
        try:
            outcomes = await self._outcomes(path, job)
        except Exception as error:  # whatever it is, nobody may wait for ever
            for row in rows.values():
                row.settle(error)
            return
        finally:
            self._told.pop(str(path), None)
        told = f"the results of the batch {job.id} have no readable line of its own for it"
        for name, row in rows.items():
            # It may have been billed all the same.
            lost = JudgeError(Failure.REFUSED, "batch_failed", told, usage=worst_case(row.question))
            row.settle(outcomes.get(name, lost))
        self._clearing.add(self._spawn(self._clear(path, job, rows.keys() & outcomes)))

    async def _clear(self, path: Path, job: _Job, rows: Set[str]) -> None:
        """Forget rows that were read, once their verdicts are in the file of the cache.

        One without a line stays: the same command reads the results again, and asks nothing.
        """
        await asyncio.sleep(QUIET_S / 2)  # they are on their way there
        if await asyncio.to_thread(self._cache.flush):
            job.rows = [name for name in job.rows if name not in rows]
            job.write(path)

    async def _outcomes(self, path: Path, job: _Job) -> dict[str, Reply | JudgeError]:
        """Poll a job until it is over; raises Interrupted when there is no point in waiting."""
        provider, name, began, pause = self._provider, job.id or "", time.monotonic(), FIRST_POLL_S
        unread = 0
        while True:
            try:
                found = await provider.within(CALL_S, lambda client: provider.look(client, name))
                if found.failed:
                    path.unlink(missing_ok=True)
                    raise Interrupted(f"The batch {name} failed: {redact(found.failed)}.")
                if found.over:
                    read = await provider.within(CALL_S, lambda c: provider.results(c, name))
                    return _by_row(job, found.state, read)
                done = "" if found.done is None else f", {found.done} done"
                told = f"Batch {name} of {len(job.rows)} requests: {found.state}{done}."
                self._told[str(path)] = told
            except JudgeError as error:
                if error.status == 404:
                    path.unlink(missing_ok=True)
                    told = f"The batch {name} is no longer at the provider; it would be asked anew."
                    raise Interrupted(told) from error
                unread += error.status is None and error.cause not in ("timeout", "connection")
                if error.kind is not Failure.RETRYABLE or unread == MOST_UNREAD:
                    raise Interrupted(f"The batch {name} cannot be read: {error}") from error
            left = began + self._wait_s - time.monotonic()
            if left <= 0:
                raise Interrupted(
                    f"The batch {name} is not over after {self._wait_s / 3600:g} h "
                    "(--batch_hours). It goes on at the provider."
                )
            await asyncio.sleep(min(pause, left))
            pause = min(1.5 * pause, LONGEST_POLL_S)


def _by_row(job: _Job, state: str, lines: Results) -> dict[str, Reply | JudgeError]:
    """The outcome of each row that the results have once; lines of other rows are passed over."""
    times = Counter(name for name, _ in lines)
    outcomes = {name: outcome for name, outcome in lines if times[name] == 1}
    if state in ("expired", "cancelled"):
        late = row_error(state, f"the batch {job.id} is {state}, without this row")
        outcomes |= {name: late for name in job.rows if not times[name]}
    return outcomes


def _key(name: str) -> str:
    return name.rpartition("-")[0]
