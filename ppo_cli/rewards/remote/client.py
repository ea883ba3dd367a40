"""One client for all remote or paid services: admission, retries, deadlines, outages.

A subclass makes one attempt at a call and says which failures are final for it; judges and served
reward models do. Everything runs on one event loop, except `waiting_for()`.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.rewards.base import Tell
from ppo_cli.rewards.remote.admission import Admission
from ppo_cli.rewards.remote.breaker import (
    SERVER_ERROR_S,
    BadRequests,
    Breaker,
    describe_outage,
)
from ppo_cli.rewards.remote.failures import SERVER_ERROR, TOO_MANY, Failure, RemoteError
from ppo_cli.rewards.remote.limits import Limits, QueueSlot

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0
# A call fails alone after so many fatal answers, or so many of status 500, if others were answered
# meanwhile: many services answer a request that they cannot serve with that status.
MAX_FATAL_ANSWERS, MAX_SERVER_ERRORS = 3, 6
# At the start: an address where nothing answers is a mistake more often than an outage.
UNREACHABLE_S = 4.0
WRONG_ADDRESS = ("connection", "bad_body")
FIRST_POLL_S, LONGEST_POLL_S = 1.0, 30.0


@dataclass(eq=False)
class RemoteCall:
    """All attempts at one result.

    `spent_s` is its own time: attempts and backoff, without queueing. The deadline limits it, or
    `max_attempts` ends the call earlier, once the service has answered others.
    `tokens_used` is what the last attempt used of a token cap.
    """

    slot: QueueSlot = field(default_factory=QueueSlot)
    first_sent: float | None = None
    spent_s: float = 0.0
    last_attempt_s: float = 0.0
    attempts: int = 0
    backoffs: int = 0
    fatal_answers: int = 0
    server_errors: int = 0
    max_attempts: int | None = None
    tokens_used: int | None = None


Call = TypeVar("Call", bound=RemoteCall)
Result = TypeVar("Result")


class RemoteClient(ABC, Generic[Call, Result]):
    """Calls one service, as fast as it allows and as long as it takes."""

    def __init__(self, subject: str, name: str, limits: Limits) -> None:
        self._clock = time.monotonic
        self._limits = limits
        self._breaker = Breaker(subject, name, limits.outage_wait, self._clock)
        self._admission = Admission(limits, self._breaker, self._clock, subject)
        self._admission.probe_known_good = self._probe_known_good
        self._bad_requests = BadRequests()
        self._probe_tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def _attempt(self, call: Call) -> Result:
        """Make one request and count it in `call.attempts`, with its time; raises RemoteError."""

    @abstractmethod
    def _rejected_text(self, call: Call, error: RemoteError) -> str | None:
        """Return an id of the text, if the service rejected it and might reject any other.

        The id is empty if this rejection says nothing about that, None for any other error.
        """

    @abstractmethod
    def _known_good_call(self) -> Call | None:
        """Return a call that is known to work, if there is one; it tests a service that is down."""

    def waiting_for(self) -> str | None:
        """Return one sentence about what the service is waited for, or None; from any thread."""
        return self._breaker.describe() or self._admission.describe_pause()

    async def _attempt_first(self, call: Call) -> Result:
        """Make one attempt, past the queue; the breaker learns that the service can answer."""
        result = await self._attempt(call)
        self._breaker.always_server_error = False
        return result

    # --- one result -----------------------------------------------------------------------------

    async def _call(self, call: Call) -> Result:
        """Attempt a call until it has a result; raises its final error, or Interrupted."""
        while True:
            try:
                await self._admission.enter(call.slot)
                if call.first_sent is None:
                    call.first_sent = call.slot.sent_at
                return await self._send(call)
            except RemoteError as error:
                pause = self._prepare_retry(call, error)
            if pause > 0.0:
                await self._admission.back_off(pause)

    def _prepare_retry(self, call: Call, error: RemoteError) -> float:
        """Return the seconds to wait before the next attempt; raises the error if it is final.

        Refused and unparsed are final. So is the last of MAX_FATAL_ANSWERS fatal ones, that of
        MAX_SERVER_ERRORS with status 500, or any at the deadline, once other calls were answered;
        until then only the breaker gives up.
        """
        if error.kind in (Failure.REFUSED, Failure.UNPARSED):
            raise error
        if error.kind is Failure.FATAL:
            call.fatal_answers += 1
            if call.fatal_answers >= MAX_FATAL_ANSWERS and self._answered_others(call):
                raise error
        # The time of an outage is not the call's own: the breaker decides how long it may last.
        if self._breaker.open or self._breaker.stop_reason:
            return 0.0
        call.server_errors += error.status == SERVER_ERROR
        if error.status in TOO_MANY:  # the admission slows all calls down
            pause = 0.0
        else:
            backoff = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0**call.backoffs)
            pause = max(random.uniform(0.0, backoff), self._breaker.short_pause(error.retry_after))
            call.backoffs += 1
        # One Retry-After alone must not use up the call's whole time.
        call.spent_s += call.last_attempt_s + min(pause, self._limits.deadline / 4.0)
        used_up = call.max_attempts is not None and call.attempts >= call.max_attempts
        used_up |= call.server_errors >= MAX_SERVER_ERRORS
        if (used_up or call.spent_s >= self._limits.deadline) and self._answered_others(call):
            raise error
        return pause

    def _answered_others(self, call: Call) -> bool:
        """Whether the service answered anything since this call was first sent: it is not down."""
        success = self._breaker.last_success
        return success is not None and call.first_sent is not None and success >= call.first_sent

    # --- one attempt ----------------------------------------------------------------------------

    async def _send(self, call: Call) -> Result:
        return await self._send_in_slot(call, call.slot)

    async def _send_in_slot(self, call: Call, slot: QueueSlot) -> Result:
        """Make an attempt that was admitted, and tell the admission how it ended."""
        try:
            result = await self._attempt(call)
        except RemoteError as error:
            # Is this text at fault, or does the service reject every text?
            text_id = self._rejected_text(call, error)
            if text_id and self._bad_requests.is_outage(text_id):
                error.kind = Failure.RETRYABLE
            elif text_id is None and error.kind in (Failure.REFUSED, Failure.UNPARSED):
                self._bad_requests.clear()
            if error.kind in (Failure.REFUSED, Failure.UNPARSED):
                self._admission.succeeded(slot, tokens=call.tokens_used)
            else:
                self._admission.failed(slot, error)
            raise
        except BaseException:
            self._admission.leave(slot)
            raise
        self._bad_requests.clear()
        self._admission.succeeded(slot, tokens=call.tokens_used)
        return result

    def _probe_known_good(self) -> bool:
        """Send a request that is known to work, in case only bad ones are waiting."""
        call = self._known_good_call()
        if call is None:
            return False
        self._admission.admit(call.slot)
        task = asyncio.get_running_loop().create_task(self._send_probe(call))
        self._probe_tasks.add(task)
        task.add_done_callback(self._probe_tasks.discard)
        return True

    async def _send_probe(self, call: Call) -> None:
        try:
            await self._send_in_slot(call, call.slot)
        except (RemoteError, Interrupted):
            return  # the admission knows about it


# --- before any other call ----------------------------------------------------------------------


def reach(
    ask: Callable[[], Result],
    *,
    subject: str,
    outage_wait: float,
    explain: Callable[[RemoteError], str],
    tell: Tell,
    patient: bool = False,
    parse_attempts: int = 1,
) -> Result:
    """Ask once, or until the service is up; shows that key, model and address are right.

    `explain` returns the message for a fatal error or a wrong address. Raises RewardError when
    asking is hopeless, Interrupted when the service stays down, and the RemoteError of a text that
    was refused, or of `parse_attempts` replies that cannot be read.
    """
    began, pause, announced = time.monotonic(), FIRST_POLL_S, False
    always_server_error = not patient
    while True:
        try:
            return ask()
        except RemoteError as error:
            if error.kind is Failure.FATAL:
                raise RewardError(explain(error)) from error
            parse_attempts -= error.kind is Failure.UNPARSED
            if error.kind is Failure.REFUSED or not parse_attempts:
                raise
            if error.kind is Failure.UNPARSED:
                continue
            # A wrong address fails soon; an outage is waited out.
            waited = time.monotonic() - began
            wrong_address = error.cause in WRONG_ADDRESS and not patient
            if wrong_address and waited > UNREACHABLE_S:
                raise RewardError(explain(error)) from error
            always_server_error &= error.status == SERVER_ERROR
            limit_s = min(outage_wait, SERVER_ERROR_S) if always_server_error else outage_wait
            if not wrong_address and waited > limit_s:
                problem = describe_outage(waited, always_server_error)
                raise Interrupted(f"{subject} {problem} ({error.summary}).") from error
            if not announced:
                tell(f"{subject} does not answer yet ({error.summary}); trying again.")
                announced = True
            remaining = max(limit_s - waited, 0.1)
            time.sleep(min(max(pause, error.retry_after or 0.0), remaining))
            pause = min(2 * pause, LONGEST_POLL_S)
