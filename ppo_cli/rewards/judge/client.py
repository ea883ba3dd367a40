"""Asks one judge: a question in, a verdict out.

Equal questions share one call, answers come from a cache where they can, and each call is booked
in the ledger. A reply that cannot be read is asked for again. `rewards/remote` repeats calls that
failed and waits out outages. Everything here runs on one event loop, except `waiting_for()`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.rewards.judge.cache import FINAL_REFUSALS, VerdictCache, cache_key
from ppo_cli.rewards.judge.calls import (
    JudgeError,
    Question,
    Reply,
    UnlimitedCost,
    Usage,
    Verdict,
    billed_usage,
)
from ppo_cli.rewards.judge.costs import Ledger, SharedLedger
from ppo_cli.rewards.judge.verdict import MAX_REMINDERS, build_reminder, read_answer
from ppo_cli.rewards.remote.client import RemoteCall, RemoteClient, reach
from ppo_cli.rewards.remote.failures import Failure, RemoteError
from ppo_cli.rewards.remote.limits import Limits, QueueSlot
from ppo_cli.secrets.redact import mask_secrets, redact, redact_url

PARSE_ATTEMPTS = 3  # at the start of a run, for a first reply that can be read
_CLOSED = "The run ended before the judge had answered."


class Answerer(Protocol):
    """A provider, or what asks it in another way."""

    name: str
    model: str

    @property
    def identity(self) -> str:
        """All but the question that may change an answer."""

    async def ask(self, question: Question, *, timeout: float) -> Reply:
        """Return the reply to a question; raises JudgeError."""

    async def close(self) -> None:
        """Close connections."""


@dataclass(eq=False, kw_only=True)
class _JudgeCall(RemoteCall):
    """A request for one verdict: the original question, and the one of the next attempt."""

    original: Question
    question: Question
    reminders: int = 0
    in_flight: int = 0
    task: asyncio.Task[Verdict] = field(init=False)  # that makes it, once it has begun
    waiters: int = 0
    usage: Usage = field(default_factory=Usage)
    cost_usd: float = 0.0


@dataclass
class Counters:
    """Counts since the last `pop_counters()`.

    `calls` are requests sent, `retried` those that repeat a failed one, and `verdicts` their
    scores; `cached` and `shared` are answers that needed no separate call. `unread` counts replies
    that could not be read, by cause, and `errors` failed calls, retried ones included. `latencies`
    are the seconds of calls with a score, `concurrency` is how many calls may be in flight now,
    `open_seconds` how long the breaker was open.
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

    def __add__(self, other: Counters) -> Counters:
        """Return the counts of two judges together."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Counters(**sums)


def _weigh(verdict: Verdict, question: Question) -> Verdict:
    """Return a verdict with the weights of this question's criteria, which no key has."""
    rubric, info = question.rubric, verdict.info
    if rubric is None:
        return verdict
    if "spreads" in info:
        info = {**info, "spread": rubric.spread(info["spreads"])}
    return replace(verdict, value=rubric.value(info["grades"]), info=info)


class JudgeClient(RemoteClient[_JudgeCall, Verdict]):
    """Asks one judge, as fast as it allows and as long as it takes."""

    def __init__(
        self,
        provider: Answerer,
        *,
        limits: Limits,
        ledger: Ledger | SharedLedger,
        cache: VerdictCache | None,
    ) -> None:
        super().__init__("The judge", f"{provider.name} ({provider.model})", limits)
        self._provider = provider
        self._ledger = ledger
        self._cache = cache
        self._counts = Counters()
        self._open_s_before = 0.0
        self._pending: dict[Hashable, _JudgeCall] = {}
        self._known_good: Question | None = None
        self._mean_output: float | None = None
        self._closed = False

    async def ask(self, question: Question, *, fresh: bool = False) -> Verdict:
        """Return a verdict; raises the JudgeError that ended it, or Interrupted to stop the run.

        That happens when the judge is given up, the budget is used up, or the client is closed.
        A `fresh` verdict always makes a call: it is neither read from the cache nor stored there.
        """
        if self._closed:
            raise Interrupted(_CLOSED)
        if fresh:
            return await self._join(self._start(object(), question, None))
        # The cache first, then a call for the same question that is in flight.
        key = cache_key(self._provider.identity, question)
        if (verdict := self._look_up(key)) is None:
            pending = self._pending.get(key)
            if pending is None:
                return await self._join(self._start(key, question, key))
            verdict = await self._join(pending)
            self._counts.shared += 1
            # As one from the cache, it cost this caller nothing.
            info = {**verdict.info, "shared": True}
            verdict = replace(verdict, usage=Usage(), cost_usd=0.0, calls=0, cached=True, info=info)
        return _weigh(verdict, question)

    async def probe(self, question: Question) -> Verdict:
        """Make one call, past cache, queue and breaker; raises its JudgeError unchanged."""
        call = _JudgeCall(original=question, question=question)
        verdict = await self._attempt_first(call)
        self._ledger.check_output_limit()
        self._known_good = question
        return self._with_totals(call, verdict, call.last_attempt_s)

    def pop_counters(self) -> Counters:
        """Return the counts since the last call, and start again at zero."""
        counts, self._counts = self._counts, Counters()
        # The breaker counts over the whole run, the step wants the difference.
        open_seconds = self._breaker.open_seconds()
        counts.concurrency = self._admission.window.size
        counts.open_seconds = open_seconds - self._open_s_before
        self._open_s_before = open_seconds
        return counts

    async def close(self, drain_s: float = 0.0) -> None:
        """Let calls in flight finish for at most `drain_s` seconds, then cancel. May run twice.

        Calls that wait in a queue or back off end at once: nothing has been paid for them.
        """
        self._closed = True
        self._admission.close(_CLOSED)
        in_flight = {call.task for call in self._pending.values() if call.in_flight}
        tasks = {*self._probe_tasks, *(call.task for call in self._pending.values())}
        for task in tasks - in_flight:
            task.cancel()
        # Calls in flight are paid for: their verdicts are worth a wait.
        if in_flight and drain_s > 0:
            await asyncio.wait(in_flight, timeout=drain_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._provider.close()

    # --- sharing --------------------------------------------------------------------------------

    def _look_up(self, key: str) -> Verdict | None:
        """Return the verdict in the cache; raises the JudgeError of a refusal in the cache."""
        if self._cache is None:
            return None
        try:
            verdict = self._cache.get(key)
        except JudgeError:
            self._counts.cached += 1
            raise
        if verdict is not None:
            self._counts.cached += 1
        return verdict

    def _start(self, name: Hashable, question: Question, key: str | None) -> _JudgeCall:
        call = self._pending[name] = _JudgeCall(original=question, question=question)
        call.task = asyncio.get_running_loop().create_task(self._answer(call, key))
        call.task.add_done_callback(lambda _: self._forget(name, call))
        return call

    def _forget(self, name: Hashable, call: _JudgeCall) -> None:
        if self._pending.get(name) is call:
            del self._pending[name]

    async def _join(self, call: _JudgeCall) -> Verdict:
        """Wait for a verdict; its call is cancelled when the last waiter goes away."""
        call.waiters += 1
        try:
            return await asyncio.shield(call.task)
        except asyncio.CancelledError:
            # `close` cancelled the task, but nobody cancelled this waiter.
            waiter = asyncio.current_task()
            cancelled_here = waiter is None or waiter.cancelling()
            if self._closed and call.task.cancelled() and not cancelled_here:
                raise Interrupted(_CLOSED) from None
            raise
        finally:
            call.waiters -= 1
            if not call.waiters and not call.task.done():
                for name in [name for name, item in self._pending.items() if item is call]:
                    del self._pending[name]
                call.task.cancel()

    async def _answer(self, call: _JudgeCall, key: str | None) -> Verdict:
        """Return the verdict of a call, and store it or a final refusal in the cache."""
        call.slot.tokens = self._expected_tokens(call.question)
        try:
            verdict = await self._call(call)
        except JudgeError as error:
            if error.kind is Failure.REFUSED:
                self._counts.refused += 1
                if self._cache is not None and key is not None and error.cause in FINAL_REFUSALS:
                    self._cache.put_refusal(key, error.cause, str(error))
            duration = self._clock() - (call.first_sent or self._clock())
            # The message of the final error says how much was tried.
            calls = "1 call" if call.attempts == 1 else f"{call.attempts} calls"
            message = f"{error} ({calls} in {duration:.1f} s)"
            raise error.rewritten(message, usage=call.usage) from None
        verdict = self._with_totals(call, verdict, self._clock() - (call.first_sent or 0.0))
        self._known_good = call.original
        self._counts.verdicts += 1
        if self._cache is not None and key is not None:
            self._cache.put(key, verdict)
        return verdict

    def _with_totals(self, call: _JudgeCall, verdict: Verdict, latency_s: float) -> Verdict:
        """Return a verdict with the usage and cost of all attempts at it."""
        return replace(
            verdict, usage=call.usage, cost_usd=call.cost_usd, latency_s=latency_s,
            calls=call.attempts,
        )  # fmt: skip

    # --- attempts -------------------------------------------------------------------------------

    def _prepare_retry(self, call: _JudgeCall, error: RemoteError) -> float:
        """Return the seconds to wait before the next attempt; raises the error if it is final.

        After an unreadable reply that is 0, and the next question has a reminder of the answer
        format, MAX_REMINDERS times at most; an unreadable reply after the last one is final.
        """
        if error.kind is Failure.UNPARSED and call.reminders < MAX_REMINDERS[call.original.output]:
            # Ask again with a reminder of the form, and with more room if the answer was cut.
            call.reminders += 1
            factor = 2 if error.cause == "truncated" else 1
            call.question = replace(
                call.original,
                user=f"{call.original.user}\n\n{build_reminder(call.original)}",
                max_tokens=factor * call.question.max_tokens,
            )
            call.slot.tokens = self._expected_tokens(call.question)
            pause = 0.0
        else:
            pause = super()._prepare_retry(call, error)
        self._counts.retried += 1
        return pause

    async def _send(self, call: _JudgeCall) -> Verdict:
        """Send a call, and a second one when it is slow; the first good answer is used."""
        hedge_after = self._limits.hedge_after
        if hedge_after is None:
            return await super()._send(call)
        # Both run in tasks: cancelling the loser must not cancel the caller.
        first = asyncio.create_task(self._send_in_slot(call, call.slot))
        tasks = {first}
        try:
            await asyncio.wait(tasks, timeout=hedge_after)
            if not first.done() and self._admission.allows_hedge():
                slot = QueueSlot(call.slot.tokens)
                self._admission.admit(slot)
                tasks.add(asyncio.create_task(self._send_in_slot(call, slot)))
            # A failed attempt does not count while the other one may still succeed.
            pending = set(tasks)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
                if good:
                    return good[0].result()
            return first.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _attempt(self, call: _JudgeCall) -> Verdict:
        """Reserve the cost, ask, read the reply, book the cost; the usage is of this call alone."""
        # The budget must cover the worst case before anything is sent.
        reservation = await self._ledger.reserve(call.question)
        call.attempts += 1
        call.in_flight += 1
        self._counts.calls += 1
        began, outcome_name = self._clock(), "cancelled"
        outcome: Reply | JudgeError | None = None
        try:
            outcome = reply = await self._provider.ask(call.question, timeout=self._limits.timeout)
            outcome_name = "ok"
            value, reason, info = read_answer(reply, call.question)
        except Interrupted as stop:
            # A batch goes on without this command: it is booked when a later command reads it.
            outcome, outcome_name = JudgeError(Failure.FATAL, "unread", str(stop)), "unread"
            raise
        except JudgeError as raw_error:
            error = raw_error.redacted()
            outcome, outcome_name = outcome or error, error.cause
            unread = error.kind is Failure.UNPARSED
            (self._counts.unread if unread else self._counts.errors)[error.cause] += 1
            raise error from None
        finally:
            call.in_flight -= 1
            call.last_attempt_s = self._clock() - began
            # Whatever happened, the call is booked; a cancelled one at its worst case.
            usage, note = billed_usage(outcome, call.question, reservation.input_ratio)
            call.tokens_used = usage.total
            call.usage += usage
            call.cost_usd += reservation.settle(usage, outcome_name, call.last_attempt_s, note)
        self._counts.latencies.append(call.last_attempt_s)
        # A moving average is a better guess for the token cap than the limit.
        before = usage.output if self._mean_output is None else self._mean_output
        self._mean_output = before + 0.1 * (usage.output - before)
        return Verdict(
            value, redact(reason), redact(reply.text), usage=usage, info=mask_secrets(info)
        )

    def _expected_tokens(self, question: Question) -> int:
        """Return roughly what a call will use of a cap on tokens: a token has 3 characters."""
        if self._limits.max_tpm is None:
            return 0
        output = question.max_tokens if self._mean_output is None else self._mean_output
        return (len(question.system) + len(question.user)) // 3 + int(output)

    def _rejected_text(self, call: _JudgeCall, error: RemoteError) -> str | None:
        rejected = error.kind is Failure.REFUSED and error.cause == "bad_request"
        return call.original.identity if rejected else None

    def _known_good_call(self) -> _JudgeCall | None:
        if self._known_good is None or self._closed:
            return None
        return _JudgeCall(original=self._known_good, question=self._known_good)


# --- before any other call ----------------------------------------------------------------------


def reach_judge(
    loop: LoopThread,
    client: JudgeClient,
    question: Question,
    api: ApiReward,
    *,
    tell: Callable[[str], None],
    patient: bool = False,
    parse_attempts: int = PARSE_ATTEMPTS,
) -> Verdict:
    """Ask a judge once, or until it is up; see `reach` for the exceptions."""
    try:
        return reach(
            lambda: loop.call(client.probe(question)),
            subject=f"The judge {judge_label(api)}",
            outage_wait=api.outage_wait,
            explain=lambda error: _explain(api, error),
            tell=tell,
            patient=patient,
            parse_attempts=parse_attempts,
        )
    except UnlimitedCost as error:
        raise RewardError(str(error)) from error


def _explain(api: ApiReward, error: RemoteError) -> str:
    """Return the message for a judge that cannot be used, answers nonsense or cannot be reached."""
    if error.kind is Failure.FATAL:
        return f"The judge cannot be used ({error.summary})"
    where = f" at {redact_url(api.base_url)}" if api.base_url else ""
    if error.cause == "bad_body":
        return (
            f"The reply{where} is not an answer of the judge {judge_label(api)} ({error.summary}). "
            "Check that --rm_base_url is the address of the API (mostly it ends in /v1) and not of "
            "a web page or a proxy."
        )
    return (
        f"The judge {judge_label(api)} cannot be reached{where} ({error.summary}). Check "
        "--rm_base_url, the network, and that the server is running."
    )


def judge_label(api: ApiReward) -> str:
    """Return what messages call a judge."""
    return f"{api.model} ({api.type})"
