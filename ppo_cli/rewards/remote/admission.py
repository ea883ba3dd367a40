"""Admission control: calls leave first in, first out, unless the circuit breaker is open."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from ppo_cli.rewards.remote.breaker import LONGEST_WAIT_S, Breaker, is_long
from ppo_cli.rewards.remote.failures import OVERLOADED, TOO_MANY, Failure, RemoteError
from ppo_cli.rewards.remote.limits import (
    MINUTE_S,
    AdaptiveWindow,
    Clock,
    Limits,
    QueueSlot,
    RateLimiter,
)

# Most providers round a short Retry-After up to whole seconds; the next call may pass earlier.
COARSE_S = 2.0
# After a refusal or an overload, hedged calls wait for so long.
CALM_S = 30.0


class Admission:
    """Queues calls and lets them leave: window, caps per minute, requested pauses, breaker.

    A call that is repeated goes before new ones. While the breaker is open it goes to the end
    instead, so that each probe is another text and no single text decides about the service.
    """

    def __init__(
        self, limits: Limits, breaker: Breaker, clock: Clock = time.monotonic, subject: str = ""
    ) -> None:
        self.in_flight = 0
        self.breaker = breaker
        self.window = AdaptiveWindow(limits.concurrency, clock)
        # Starts a call with a request that was answered before; False if there is none.
        self.probe_known_good: Callable[[], bool] = lambda: False
        self._subject = subject
        self._clock = clock
        self._rpm = RateLimiter(limits.max_rpm / MINUTE_S, clock) if limits.max_rpm else None
        self._tpm = RateLimiter(limits.max_tpm / MINUTE_S, clock) if limits.max_tpm else None
        self._repeated: deque[tuple[QueueSlot, asyncio.Future[None]]] = deque()
        self._new: deque[tuple[QueueSlot, asyncio.Future[None]]] = deque()
        self._backing_off: set[asyncio.Future[None]] = set()
        self._paused_until = -math.inf
        self._refused_at = -math.inf
        self._probes = self._failed_probes = 0  # in flight; failed since the last answer
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    async def enter(self, slot: QueueSlot) -> None:
        """Wait until this call may leave; raises Interrupted when the service was given up."""
        if not slot.times_sent and not self._has_waiting() and not self.in_flight:
            self.breaker.restart_outage()
        if self.breaker.has_given_up():
            raise self.breaker.stop_error()
        # Nobody waits and nothing holds calls back: no queueing.
        if not self._has_waiting() and not self.breaker.open and self._delay() <= 0.0:
            self.admit(slot)
            return
        turn = asyncio.get_running_loop().create_future()
        # A refused call goes behind the others: most services ask it to wait a second or more.
        first = slot.times_sent and not slot.refused and not self.breaker.open
        (self._repeated if first else self._new).append((slot, turn))
        self.pump()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(slot)  # admitted and cancelled in the same moment
            raise

    async def back_off(self, seconds: float) -> None:
        """Wait outside the queue; ends at once when the breaker opens or everything is closed."""
        if self.breaker.open or self.breaker.stop_reason:
            return
        alarm = asyncio.get_running_loop().create_future()
        self._backing_off.add(alarm)
        try:
            await asyncio.wait({alarm}, timeout=seconds)
        finally:
            self._backing_off.discard(alarm)

    def allows_hedge(self) -> bool:
        """Whether a second call for the same result may leave at once, past the queue."""
        calm = self._clock() - self._refused_at > CALM_S
        return calm and not self.breaker.open and not self._has_waiting() and self._delay() <= 0.0

    def admit(self, slot: QueueSlot) -> None:
        """Let a call leave without queueing."""
        # While the breaker is open, each call that leaves is a probe.
        slot.probing, slot.refused = self.breaker.open, False
        self._probes += slot.probing
        slot.times_sent += 1
        slot.sent_at = self._clock()
        self.window.sent(self.in_flight)
        self.in_flight += 1
        self.breaker.sent()
        if self._rpm:
            self._rpm.consume()
        if self._tpm:
            self._tpm.consume(slot.tokens)

    def leave(self, slot: QueueSlot, tokens: int | None = None) -> None:
        """End a call that used so many tokens; a cancelled one says nothing about the service."""
        self.in_flight -= 1
        self._probes -= slot.probing
        slot.probing = False
        if self._tpm and tokens is not None:
            self._tpm.correct(tokens - slot.tokens)
        self.pump()

    def succeeded(self, slot: QueueSlot, *, tokens: int | None = None) -> None:
        """End a call that the service answered, even if with a refusal of the text."""
        self.window.answered()
        self._failed_probes = 0
        if self.breaker.success():
            self.window.restart()
        self.leave(slot, tokens)

    def failed(self, slot: QueueSlot, error: RemoteError) -> None:
        """End a call that failed, and learn from how it failed."""
        now, requested = self._clock(), error.retry_after
        self._failed_probes += slot.probing
        slot.refused = error.status in TOO_MANY
        pause = self.breaker.short_pause(requested) if error.kind is Failure.RETRYABLE else 0.0
        may_be_outage = True
        if slot.refused:
            self._refused_at = now
            others = self.in_flight - 1
            self.window.refused(slot.sent_at, others)
            # A rate limit that may end soon is not an outage, unless it has lasted for long.
            longest_quiet_s = min(LONGEST_WAIT_S, self.breaker.outage_wait)
            ends_soon = error.kind is Failure.RETRYABLE and not is_long(requested)
            quiet = self.breaker.quiet_s() > longest_quiet_s
            may_be_outage = slot.probing or not ends_soon or quiet
            # A service that has answered before, or answers others, may accept the next call
            # before a pause in whole seconds is over.
            if pause <= COARSE_S and (others or self.breaker.last_success is not None):
                pause = 0.0
        elif error.status in OVERLOADED or error.cause == "timeout":
            self._refused_at = now if error.status == 503 else self._refused_at
            self.window.overloaded(slot.sent_at)
        self._paused_until = max(self._paused_until, now + pause)
        if may_be_outage:
            self.breaker.failure(error, window=self.window.size, probe=slot.probing)
        if self.breaker.open:
            # Callers that back off must queue: to probe, and to learn that it was given up.
            self.breaker.delay_probe(self._paused_until)
            self._wake()
        self.leave(slot)

    def pump(self) -> None:
        """Let calls leave that may go now, and set a timer for the next one."""
        if self.breaker.has_given_up():
            self._reject_waiting()
        while self._has_waiting():
            delay = self._delay()
            if delay > 0.0:
                self._set_timer(delay)
                return
            slot, turn = self._pop()
            if turn.done():
                continue
            if self._probes_known_good():
                self._new.appendleft((slot, turn))
                continue
            self.admit(slot)
            turn.set_result(None)

    def describe_pause(self) -> str | None:
        """Return a sentence about a requested pause, when it is long enough to be noticed."""
        remaining_s = self._paused_until - self._clock()
        if remaining_s < 2.0:
            return None
        return f"{self._subject} asked for a pause; going on in {remaining_s:.0f} s."

    def close(self, reason: str) -> None:
        """Reject calls that wait and those that come later; calls in flight go on."""
        self.breaker.stop_reason = self.breaker.stop_reason or reason
        self._reject_waiting()
        self._cancel_timer()

    def _probes_known_good(self) -> bool:
        """Probe with a request that worked before, where those that wait keep failing as probes."""
        patience = 1 if self.breaker.confirms_fatal else 2
        excess = self._failed_probes - patience
        return self.breaker.open and excess >= 0 and excess % 2 == 0 and self.probe_known_good()

    def _delay(self) -> float:
        """Return the seconds until a call may leave; infinite if only an answer can change that."""
        now = self._clock()
        if self.breaker.open:  # one probe at a time
            return math.inf if self._probes else max(0.0, self.breaker.next_probe - now)
        waits = [self._paused_until - now, self.window.wait(self.in_flight)]
        waits += [limiter.wait() for limiter in (self._rpm, self._tpm) if limiter]
        return max(0.0, *waits)

    def _has_waiting(self) -> bool:
        return bool(self._repeated or self._new)

    def _pop(self) -> tuple[QueueSlot, asyncio.Future[None]]:
        return (self._repeated or self._new).popleft()

    def _reject_waiting(self) -> None:
        while self._has_waiting():
            _, turn = self._pop()
            if not turn.done():
                turn.set_exception(self.breaker.stop_error())
        self._wake()

    def _wake(self) -> None:
        for alarm in self._backing_off:
            if not alarm.done():
                alarm.set_result(None)

    def _set_timer(self, delay: float) -> None:
        """Call `_on_timer` after `delay` seconds, unless it is called earlier already.

        With an open breaker it is called when the breaker gives up, at the latest, unless the
        breaker is confirming a fatal error.
        """
        now = self._clock()
        at = now + delay
        if self.breaker.open and not self.breaker.confirms_fatal:
            at = min(at, self.breaker.gives_up_at)
        if at == math.inf or (self._timer is not None and now < self._timer_at <= at):
            return
        self._cancel_timer()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.pump()
