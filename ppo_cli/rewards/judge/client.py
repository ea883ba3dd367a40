"""Between the reward and a provider: a question in, a verdict out, whatever happens on the way.

Equal questions share one call; calls pass the admission and the ledger; what failed for a moment
is tried again, what cannot be read is asked again. Everything here runs on one event loop,
except `waiting_for()`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.redact import mask_secrets, redact, redact_url
from ppo_cli.rewards.judge.batch import BatchJudge
from ppo_cli.rewards.judge.cache import FINAL_REFUSALS, VerdictCache, cache_key
from ppo_cli.rewards.judge.calls import (
    Failure,
    JudgeError,
    Question,
    Reply,
    UnlimitedCost,
    Usage,
    Verdict,
    bill,
)
from ppo_cli.rewards.judge.costs import Ledger, SharedLedger
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.verdict import build_reminder, read_answer
from ppo_cli.rewards.remote.breaker import TOO_MANY, Admission, BadRequests, Breaker
from ppo_cli.rewards.remote.event_loop import LoopThread
from ppo_cli.rewards.remote.limits import Limits, QueueSlot

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 8.0
MOST_FATALS = 3
TRIES = 3  # for the first reply, where none can be read
UNREACHABLE_S = 4.0  # an address where nothing listens is a mistake more often than an outage
# Nobody there, or somebody who is no judge: a mistyped address more often than an outage.
_WRONG_ADDRESS = ("connection", "bad_body")
_CLOSED = "The run ended before the judge had answered."


@dataclass(eq=False)
class _Job:
    """One verdict on its way. `spent` is its own time: calls and backoff, but no queueing."""

    asked: Question
    question: Question
    ticket: QueueSlot = field(default_factory=QueueSlot)
    first_sent: float | None = None
    spent: float = 0.0
    last_s: float = 0.0
    retries: int = 0
    reasks: int = 0
    fatals: int = 0
    calls: int = 0
    under_way: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float = 0.0


@dataclass
class Counters:
    """Counts since the last `take()`.

    `calls` are requests sent, `retried` those that repeat a failed one, and `verdicts` the scores
    that they brought; `cached` and `shared` are answers that needed no call of their own. `unread`
    counts replies that did not count, by cause, and `errors` failed calls, retried ones included;
    `latencies` are the seconds of the calls that a score was read from. `concurrency` is how many
    calls may be under way now, `open_seconds` how long the breaker was open.
    """

    calls: int = 0
    retried: int = 0
    verdicts: int = 0
    cached: int = 0
    shared: int = 0
    refused: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    concurrency: int = 0
    open_seconds: float = 0.0


@dataclass(eq=False)
class _Pending:
    job: _Job
    task: asyncio.Task[Verdict]
    askers: int = 0


class JudgeClient:
    """Asks one judge, as fast as it allows and as long as it takes."""

    def __init__(
        self,
        provider: SdkProvider | BatchJudge,
        *,
        limits: Limits,
        ledger: Ledger | SharedLedger,
        cache: VerdictCache | None,
    ) -> None:
        self._provider = provider
        self._limits = limits
        self._ledger = ledger
        self._cache = cache
        self._clock = time.monotonic
        label = f"{provider.name} ({provider.model})"
        self._breaker = Breaker(label, limits.outage_wait, self._clock)
        self._admission = Admission(limits, self._breaker, self._clock)
        self._admission.known_good = self._probe_known_good
        self._bad_requests = BadRequests()
        self._counts = Counters()
        self._open_before = 0.0
        self._pending: dict[Hashable, _Pending] = {}
        self._spares: set[asyncio.Task[None]] = set()
        self._known_good: Question | None = None
        self._mean_output = 0.0
        self._closed = False

    async def ask(self, question: Question, *, fresh: bool = False) -> Verdict:
        """Return a verdict; raises the JudgeError that ended it, or Interrupted for everybody.

        A `fresh` verdict is a call of its own: neither read from the cache nor kept there.
        """
        if self._closed:
            raise Interrupted(_CLOSED)
        key = cache_key(self._provider.identity, question)
        if fresh:
            return await self._join(self._start(object(), question, None))
        kept = self._look_up(key)
        if kept is not None:
            return kept
        pending = self._pending.get(key)
        if pending is None:
            return await self._join(self._start(key, question, key))
        verdict = await self._join(pending)
        self._counts.shared += 1
        info = {**verdict.info, "shared": True}
        return replace(verdict, usage=Usage(), cost_usd=0.0, calls=0, cached=True, info=info)

    async def probe(self, question: Question) -> Verdict:
        """Make one call, past cache, queue and breaker; raises its JudgeError as it is."""
        job = _Job(question, question)
        found = await self._call(job)
        self._ledger.check_output_limit()
        self._known_good = question
        return self._whole(job, found, job.last_s)

    def take(self) -> Counters:
        """Return what was counted since the last call, and start again from nothing."""
        taken, self._counts = self._counts, Counters()
        open_seconds = self._breaker.open_seconds()
        taken.concurrency = self._admission.capacity.size
        taken.open_seconds, self._open_before = open_seconds - self._open_before, open_seconds
        return taken

    def waiting_for(self) -> str | None:
        """Say in one sentence what the judge is waited for, or None; from any thread."""
        return self._breaker.sentence() or self._admission.pause_sentence()

    async def close(self, drain_s: float = 0.0) -> None:
        """Let calls under way finish for at most `drain_s` seconds, then cancel. Twice is fine.

        Calls that wait in a queue or back off end at once: nothing has been paid for them.
        """
        self._closed = True
        self._admission.close(_CLOSED)
        pending = list(self._pending.values())
        calling = {one.task for one in pending if one.job.under_way}
        tasks = {*self._spares, *(one.task for one in pending)}
        for task in tasks - calling:
            task.cancel()
        if calling and drain_s > 0:
            await asyncio.wait(calling, timeout=drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._provider.close()

    # --- sharing ------------------------------------------------------------------------------

    def _look_up(self, key: str) -> Verdict | None:
        if self._cache is None:
            return None
        try:
            kept = self._cache.get(key)
        except JudgeError:
            self._counts.cached += 1
            raise
        if kept is not None:
            self._counts.cached += 1
        return kept

    def _start(self, name: Hashable, question: Question, key: str | None) -> _Pending:
        job = _Job(question, question)
        work = asyncio.get_running_loop().create_task(self._answer(job, key))
        pending = self._pending[name] = _Pending(job, work)
        work.add_done_callback(lambda _: self._forget(name, pending))
        return pending

    def _forget(self, name: Hashable, pending: _Pending) -> None:
        if self._pending.get(name) is pending:
            del self._pending[name]

    async def _join(self, pending: _Pending) -> Verdict:
        """Wait for a verdict; it is given up only when the last who asked for it goes away."""
        pending.askers += 1
        try:
            return await asyncio.shield(pending.task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if self._closed and pending.task.cancelled() and me is not None and not me.cancelling():
                raise Interrupted(_CLOSED) from None
            raise
        finally:
            pending.askers -= 1
            if not pending.askers and not pending.task.done():
                for name in [n for n, one in self._pending.items() if one is pending]:
                    del self._pending[name]
                pending.task.cancel()

    # --- one verdict --------------------------------------------------------------------------

    async def _answer(self, job: _Job, key: str | None) -> Verdict:
        while True:
            try:
                found = await self._try(job)
            except JudgeError as error:
                pause = self._after(job, error, key)
                self._counts.retried += 1
            else:
                verdict = self._whole(job, found, self._clock() - (job.first_sent or 0.0))
                self._known_good = job.asked
                self._counts.verdicts += 1
                if self._cache is not None and key is not None:
                    self._cache.put(key, verdict)
                return verdict
            if pause > 0.0:
                await self._admission.rest(pause)

    def _whole(self, job: _Job, found: Verdict, took: float) -> Verdict:
        """A verdict with what all calls took that were made for it."""
        return replace(
            found, usage=job.usage, cost_usd=job.cost_usd, latency_s=took, calls=job.calls
        )

    def _after(self, job: _Job, error: JudgeError, key: str | None) -> float:
        """Seconds to wait before the next try; raises the final error when there is none."""
        if error.kind is Failure.REFUSED:
            self._counts.refused += 1
            if self._cache is not None and key is not None and error.cause in FINAL_REFUSALS:
                self._cache.put_refusal(key, error.cause, str(error))
            raise self._final(job, error)
        if error.kind is Failure.UNPARSED:
            self._ask_again(job, error)
            return 0.0
        if error.kind is Failure.FATAL:
            job.fatals += 1
            if job.fatals >= MOST_FATALS and self._answered_others(job):
                raise self._final(job, error)
        # An outage is nobody's own time: the breaker decides how long it may last.
        if self._breaker.open or self._breaker.gave_up:
            return 0.0
        if error.status in TOO_MANY:  # no backoff of its own: the admission slows all calls down
            job.spent += job.last_s
            pause = 0.0
        else:
            pause = random.uniform(0.0, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**job.retries))
            pause = max(pause, self._breaker.short_pause(error.retry_after))
            job.retries += 1
            # One Retry-After alone must not use a verdict's whole time up.
            job.spent += job.last_s + min(pause, self._limits.deadline / 4.0)
        if job.spent >= self._limits.deadline and self._answered_others(job):
            raise self._final(job, error)
        return pause

    def _ask_again(self, job: _Job, error: JudgeError) -> None:
        if job.reasks >= self._limits.reasks:
            raise self._final(job, error)
        job.reasks += 1
        more = 2 if error.cause == "truncated" else 1
        job.question = replace(
            job.asked,
            user=f"{job.asked.user}\n\n{build_reminder(job.asked)}",
            max_tokens=more * job.question.max_tokens,
        )

    def _answered_others(self, job: _Job) -> bool:
        """Whether the judge answered anything since this verdict was begun: then it is not down."""
        last = self._breaker.last_success
        return last is not None and job.first_sent is not None and last >= job.first_sent

    def _final(self, job: _Job, error: JudgeError) -> JudgeError:
        over = self._clock() - (job.first_sent or self._clock())
        calls = "1 call" if job.calls == 1 else f"{job.calls} calls"
        return JudgeError(
            error.kind, error.cause, f"{error} ({calls} in {over:.1f} s)", status=error.status,
            retry_after=error.retry_after, usage=job.usage, reply=error.reply,
        )  # fmt: skip

    # --- one call -----------------------------------------------------------------------------

    async def _try(self, job: _Job) -> Verdict:
        job.ticket.tokens = self._expected_tokens(job.question)
        await self._admission.enter(job.ticket)
        if job.first_sent is None:
            job.first_sent = job.ticket.sent_at
        if self._limits.hedge_after is None:
            return await self._send(job, job.ticket)
        return await self._send_hedged(job, self._limits.hedge_after)

    async def _send_hedged(self, job: _Job, hedge_after: float) -> Verdict:
        """Send a call, and a second one when it is slow; the first good answer is taken."""
        first = asyncio.create_task(self._send(job, job.ticket))
        both = {first}
        try:
            await asyncio.wait(both, timeout=hedge_after)
            if not first.done() and self._admission.room():
                spare = QueueSlot(job.ticket.tokens)
                self._admission.admit(spare)
                both.add(asyncio.create_task(self._send(job, spare)))
            pending = set(both)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
                if good:
                    return good[0].result()
            return first.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _send(self, job: _Job, ticket: QueueSlot) -> Verdict:
        """Make a call that was let in, and tell the admission what came of it."""
        before = job.usage
        try:
            found = await self._call(job)
        except JudgeError as error:
            if error.kind in (Failure.REFUSED, Failure.UNPARSED):
                if error.cause != "bad_request":
                    self._bad_requests.answered()
                self._admission.succeeded(ticket, used=job.usage.total - before.total)
            else:
                self._admission.failed(ticket, error)
            raise
        except BaseException:
            self._admission.leave(ticket)
            raise
        self._bad_requests.answered()
        self._admission.succeeded(ticket, used=found.usage.total)
        return found

    async def _call(self, job: _Job) -> Verdict:
        """Reserve, call, read, settle; the usage is that of this call alone."""
        held = await self._ledger.reserve(job.question)
        job.calls += 1
        job.under_way += 1
        self._counts.calls += 1
        began, word = self._clock(), "cancelled"
        outcome: Reply | JudgeError | None = None
        try:
            outcome = reply = await self._provider.ask(job.question, timeout=self._limits.timeout)
            word = "ok"
            value, reason, info = read_answer(reply, job.question)
        except Interrupted as stop:  # a batch goes on without us: it is booked when it is read
            outcome, word = JudgeError(Failure.FATAL, "unread", str(stop)), "unread"
            raise
        except JudgeError as raw_error:
            error = raw_error.redacted()
            outcome, word = outcome or error, error.cause
            if error.kind is Failure.UNPARSED:
                self._counts.unread[error.cause] += 1
            else:
                self._counts.errors[error.cause] += 1
            raise self._bad_requests.weigh(error, job.asked) from None
        finally:
            job.under_way -= 1
            job.last_s = self._clock() - began
            usage, note = bill(outcome, job.question, held.input_ratio)
            job.usage += usage
            job.cost_usd += held.settle(usage, word, job.last_s, note)
        self._counts.latencies.append(job.last_s)
        self._mean_output += 0.1 * (usage.output - self._mean_output)
        return Verdict(
            value, redact(reason), redact(reply.text), usage=usage, info=mask_secrets(info)
        )

    def _expected_tokens(self, question: Question) -> int:
        if self._limits.max_tpm is None:
            return 0
        output = self._mean_output or question.max_tokens
        return (len(question.system) + len(question.user)) // 3 + int(output)

    # --- is it the judge, or only this text? --------------------------------------------------

    def _probe_known_good(self) -> bool:
        """Try a question that was answered before; for the case that only bad ones are left."""
        if self._known_good is None or self._closed:
            return False
        ticket = QueueSlot()
        self._admission.admit(ticket)
        job = _Job(self._known_good, self._known_good, ticket)
        task = asyncio.get_running_loop().create_task(self._send_spare(job))
        self._spares.add(task)
        task.add_done_callback(self._spares.discard)
        return True

    async def _send_spare(self, job: _Job) -> None:
        try:
            await self._send(job, job.ticket)
        except (JudgeError, Interrupted):
            return  # the admission has heard of it


# --- before any other call ------------------------------------------------------------------------


def reach(
    loop: LoopThread,
    client: JudgeClient,
    question: Question,
    api: ApiReward,
    *,
    tell: Callable[[str], None],
    patient: bool = False,
    tries: int = TRIES,
) -> Verdict:
    """Ask once, or until the judge is up; shows that key, model and address are right.

    Raises RewardError when asking is hopeless, Interrupted when the judge stays down, and the
    JudgeError of a refusal, or of so many replies that cannot be read: this text will not do.
    """
    began, pause, told = time.monotonic(), 1.0, False
    while True:
        try:
            return loop.call(client.probe(question))
        except UnlimitedCost as error:
            raise RewardError(str(error)) from error
        except JudgeError as error:
            if error.kind is Failure.FATAL:
                raise RewardError(
                    f"The judge cannot be used ({error.cause}): {redact(str(error))}"
                ) from error
            tries -= error.kind is Failure.UNPARSED
            if error.kind is Failure.REFUSED or not tries:
                raise
            if error.kind is Failure.UNPARSED:
                continue
            waited = time.monotonic() - began
            absent = error.cause in _WRONG_ADDRESS and not patient
            if absent and waited > UNREACHABLE_S:
                raise RewardError(_no_judge_there(api, error)) from error
            if not absent and waited > api.outage_wait:
                raise Interrupted(
                    f"The judge {who(api)} did not answer for {waited:.0f} s ({error.said})."
                ) from error
            if not told:
                tell(f"The judge does not answer yet ({error.said}); trying again.")
                told = True
            left = api.outage_wait - waited
            time.sleep(min(max(pause, error.retry_after or 0.0), max(left, 0.1)))
            pause = min(2 * pause, 30.0)


def _no_judge_there(api: ApiReward, error: JudgeError) -> str:
    where = f" at {redact_url(api.base_url)}" if api.base_url else ""
    if error.cause == "bad_body":
        return (
            f"What answers{where} as the judge {who(api)} sends no verdict ({error.said}). Check "
            "that --rm_base_url is the address of the API (mostly it ends in /v1) and not of a "
            "web page or a proxy."
        )
    return (
        f"The judge {who(api)} cannot be reached{where} ({error.said}). Check --rm_base_url, the "
        "network, and that the server is running."
    )


def who(api: ApiReward) -> str:
    """What messages call a judge."""
    return f"{api.model} ({api.type})"
