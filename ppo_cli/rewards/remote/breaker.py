"""Admission control for judge calls: first in, first out, unless the circuit breaker is open."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from ppo_cli.errors import Interrupted
from ppo_cli.redact import redact
from ppo_cli.rewards.judge.calls import Failure, JudgeError, Question
from ppo_cli.rewards.remote.limits import MINUTE_S, AdaptiveWindow, Clock, Limits, RateLimiter, QueueSlot

FEWEST = 5
MOST = 20
QUIET_S = 2.0
LONGEST_WAIT_S = 30.0
_SHORTEST_PAUSE_S = 1.0
CONFIRM_WAITS_S = (1.0, 1.5, 2.5)
MOST_BAD_REQUESTS = 5


def is_long(retry_after: float | None) -> bool:
    """Whether a judge that asks for such a pause is out of service, not just busy."""
    return retry_after is not None and not retry_after <= LONGEST_WAIT_S


class BadRequests:
    """Tells a text that cannot be judged from a judge that takes nothing any more.

    The "bad request" of one text is final. A row of them on different texts, with no answer in
    between, is no matter of the texts, and may pass.
    """

    def __init__(self) -> None:
        self._row: set[str] = set()

    def answered(self) -> None:
        """Note that the judge answered something."""
        self._row.clear()

    def weigh(self, error: JudgeError, question: Question) -> JudgeError:
        """Return the error as it is to be taken."""
        if error.cause != "bad_request" or error.kind is not Failure.REFUSED:
            return error
        if len(self._row) < MOST_BAD_REQUESTS:
            self._row.add(question.identity)
        if len(self._row) < MOST_BAD_REQUESTS:
            return error
        return JudgeError(
            Failure.RETRYABLE, error.cause, str(error), status=error.status,
            usage=error.usage, reply=error.reply,
        )  # fmt: skip


class Breaker:
    """Opens when calls fail and none succeeds, or at once on a fatal answer or a long pause."""

    def __init__(self, name: str, outage_wait: float, clock: Clock = time.monotonic) -> None:
        self.name = name
        self.outage_wait = outage_wait
        self.open = False
        self.gave_up = ""
        self.next_probe = 0.0
        self.last_success: float | None = None
        self._clock = clock
        self._quiet_since: float | None = None
        self._streak = 0
        self._opened = 0.0
        self._open_before = 0.0
        self._fatal_probes: int | None = None
        self._backoff = 1.0
        self._asked_s = 0.0
        self._error: JudgeError | None = None

    @property
    def suspects_fatal(self) -> bool:
        """Whether the last answer said that no call will ever pass, and this is being checked."""
        return self.open and self._fatal_probes is not None

    @property
    def gives_up_at(self) -> float:
        """When an outage has lasted too long; a fatal answer is checked first in any case."""
        return self._opened + self.outage_wait

    def open_seconds(self) -> float:
        """How long it has been open, all in all."""
        return self._open_before + (self._clock() - self._opened if self.open else 0.0)

    def sent(self) -> None:
        """Note that a call leaves: silence is counted from the first one."""
        if self._quiet_since is None:
            self._quiet_since = self._clock()

    def quiet_s(self) -> float:
        """Seconds since the last call that was answered, or since the first one."""
        return self._clock() - (self._quiet_since or 0.0)

    def success(self) -> bool:
        """Take a call that the judge answered; returns whether that ended an outage."""
        self.last_success = self._quiet_since = self._clock()
        self._streak = 0
        closed, self.open = self.open, False
        if closed:
            self._open_before += self._clock() - self._opened
            self._fatal_probes, self._backoff = None, 1.0
        return closed

    def failure(self, error: JudgeError, *, window: int, probe: bool) -> None:
        """Take a call that failed; `window` is how many may be in flight at once."""
        if self.gave_up or (self.open and not probe):
            return
        self._error = error
        if error.kind is Failure.FATAL:
            self._fatal(error, probe=probe)
        elif self.open:
            self._fatal_probes = None
            self._wait_longer(error)
        elif is_long(error.retry_after):
            self._start()
            self._wait_longer(error)
        else:
            self._streak += 1
            # One call at a time: five in a row. Many at once: a row that chance does not make,
            # even when a third of all calls fail.
            enough = self._streak >= min(MOST, max(FEWEST, window))
            if enough and (self.quiet_s() >= QUIET_S or self._streak >= 2 * MOST):
                self._start()
                self._wait_longer(error)

    def lapsed(self) -> bool:
        """Give up when the outage has lasted too long; says whether the judge was given up."""
        if self.open and self._fatal_probes is None and self._clock() >= self.gives_up_at:
            asked = f" and asked for a pause of {self._asked_s:,.0f} s" if self._asked_s else ""
            self.gave_up = (
                f"The judge {self.name} did not answer for {self.outage_wait:,.0f} s{asked} "
                f"(last: {self._last})."
            )
        return bool(self.gave_up)

    def stop(self) -> Interrupted:
        """Build what everybody gets once the judge was given up."""
        return Interrupted(self.gave_up)

    def short_pause(self, retry_after: float | None) -> float:
        """Seconds of a pause that is no outage; a longer one than that is for the breaker."""
        if not retry_after or is_long(retry_after):
            return 0.0
        return min(retry_after, max(self.outage_wait, _SHORTEST_PAUSE_S))

    def hold_until(self, moment: float) -> None:
        """Put the next probe off until then, but not past the end of all waiting."""
        self.next_probe = max(self.next_probe, min(moment, self.gives_up_at))

    def fresh_start(self) -> None:
        """Count the outage from now: nobody had been waiting."""
        if self.open:
            self._open_before += self._clock() - self._opened
            self._opened = self._clock()

    def sentence(self) -> str | None:
        """What the run is waiting for, in words; None when nothing is wrong."""
        if not self.open:
            return None
        now = self._clock()
        again = max(0.0, min(self.next_probe, self.gives_up_at) - now)
        if self._fatal_probes is not None:
            return f"The judge rejects requests ({self._last}); confirming."
        left = max(0.0, self.gives_up_at - now)
        more = f"{left / 60:.0f} min." if left >= 90 else f"{left:.0f} s"
        asked = f"asked for a pause of {self._asked_s:,.0f} s"
        return (
            f"The judge {asked if self._asked_s else 'does not answer'} ({self._last}); "
            f"trying again in {again:,.0f} s, for up to {more} more."
        )

    @property
    def _last(self) -> str:
        error = self._error
        return f"{error.cause}: {_one_line(error)[0][:300]}" if error else ""

    def _fatal(self, error: JudgeError, *, probe: bool) -> None:
        if not self.open:
            self._start()
        done = -1 if self._fatal_probes is None else self._fatal_probes
        self._fatal_probes = done + 1 if probe or done < 0 else done
        if self._fatal_probes >= len(CONFIRM_WAITS_S):
            told = f"The judge {self.name} rejects every request ({self._last}). "
            self.gave_up = (told + _one_line(error)[1]).strip()
            return
        self.next_probe = self._clock() + CONFIRM_WAITS_S[self._fatal_probes]

    def _start(self) -> None:
        self.open, self._opened = True, self._clock()
        self._streak, self._backoff = 0, 1.0

    def _wait_longer(self, error: JudgeError) -> None:
        now, asked = self._clock(), error.retry_after or 0.0
        self._asked_s = asked if asked > self._backoff else 0.0
        if error.status in TOO_MANY:  # the end of a minute, not of a breakdown
            self._backoff = min(LONGEST_WAIT_S, max(1.0, 0.1 * (now - self._opened)))
        # A clock that goes wrong makes long pauses out of short ones: one try before the end.
        last_try = self.gives_up_at - min(LONGEST_WAIT_S, 0.1 * self.outage_wait)
        again = max(now + self._backoff, min(now + asked, last_try))
        self.next_probe = min(again, self.gives_up_at)
        self._backoff = min(LONGEST_WAIT_S, 2.0 * self._backoff)


def _one_line(error: JudgeError) -> tuple[str, str]:
    """The words of an error, and the hint that stands on its last line, if it has one."""
    said, _, hint = redact(str(error)).strip().rpartition("\n")
    if not said:
        said, hint = hint, ""
    return " ".join(said.split()), hint.strip()


TOO_MANY = {429, 529}
COARSE_S = 2.0
_OVERLOADED = {408, 503, 504}
_CALM_S = 30.0


class Admission:
    """Queues calls and lets them go: learned capacity, caps a minute, pauses and the breaker.

    A call that is tried again goes before fresh ones: its verdict was begun. While the breaker
    is open the queue turns round instead, so that no single text decides about the judge.
    """

    def __init__(self, limits: Limits, breaker: Breaker, clock: Clock = time.monotonic) -> None:
        self.in_flight = 0
        self.breaker = breaker
        self.capacity = AdaptiveWindow(limits.concurrency, clock)
        self.known_good: Callable[[], bool] = lambda: False
        self._clock = clock
        self._rpm = RateLimiter(limits.max_rpm / MINUTE_S, clock) if limits.max_rpm else None
        self._tpm = RateLimiter(limits.max_tpm / MINUTE_S, clock) if limits.max_tpm else None
        self._again: deque[tuple[QueueSlot, asyncio.Future[None]]] = deque()
        self._fresh: deque[tuple[QueueSlot, asyncio.Future[None]]] = deque()
        self._resting: set[asyncio.Future[None]] = set()
        self._paused_until = -math.inf
        self._pushed_at = -math.inf
        self._probing = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    async def enter(self, ticket: QueueSlot) -> None:
        """Wait until this call may leave; raises Interrupted when the judge was given up."""
        if not ticket.times_sent and not self._waiting() and not self.in_flight:
            self.breaker.fresh_start()
        if self.breaker.lapsed():
            raise self.breaker.stop()
        if not self._waiting() and not self.breaker.open and self._delay() <= 0.0:
            self.admit(ticket)
            return
        place = asyncio.get_running_loop().create_future()
        # A refused call goes behind the others: most providers ask it to wait a second or more.
        again = ticket.times_sent and not ticket.refused and not self.breaker.open
        (self._again if again else self._fresh).append((ticket, place))
        self.pump()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(ticket)  # let in and cancelled in the same moment
            raise

    async def rest(self, seconds: float) -> None:
        """Back off outside the queue; over at once when the breaker opens or all is ended."""
        if self.breaker.open or self.breaker.gave_up:
            return
        alarm = asyncio.get_running_loop().create_future()
        self._resting.add(alarm)
        try:
            await asyncio.wait({alarm}, timeout=seconds)
        finally:
            self._resting.discard(alarm)

    def room(self) -> bool:
        """Whether a second call for the same verdict may leave at once, past the queue."""
        now = self._clock()
        calm = now - self._pushed_at > _CALM_S
        return calm and not self.breaker.open and not self._waiting() and self._delay() <= 0.0

    def succeeded(self, ticket: QueueSlot, *, used: int | None = None) -> None:
        """Take back a call that the judge answered, whatever it said; `used` tokens it took."""
        self.capacity.answered(ticket)
        if self.breaker.success():
            self.capacity.restart()
        self.leave(ticket, used)

    def failed(self, ticket: QueueSlot, error: JudgeError) -> None:
        """Take back a call that failed, and learn from how."""
        now, asked = self._clock(), error.retry_after
        ticket.failed_probes += ticket.probing
        ticket.refused = error.status in TOO_MANY
        pause = self.breaker.short_pause(asked) if error.kind is Failure.RETRYABLE else 0.0
        outage = True
        if ticket.refused:
            self._pushed_at = now
            none_yet = self.breaker.last_success is None; self.capacity.refused(ticket, self.in_flight-1)
            # One that may pass soon is no sign of an outage, unless none was answered for long.
            long = min(LONGEST_WAIT_S, self.breaker.outage_wait)
            soon = error.kind is Failure.RETRYABLE and not is_long(asked)
            outage = ticket.probing or not soon or self.breaker.quiet_s() > long
            # A short pause is rounded up to whole seconds: others may be let in before.
            if pause <= COARSE_S and not (none_yet and self.in_flight == 1):
                pause = 0.0
        elif error.status in _OVERLOADED or error.cause == "timeout":
            self._pushed_at = now if error.status == 503 else self._pushed_at
            self.capacity.overloaded(ticket.sent_at)
        self._paused_until = max(self._paused_until, now + pause)
        if outage:
            self.breaker.failure(error, window=self.capacity.size, probe=ticket.probing)
        if self.breaker.open:
            # Whoever waits elsewhere would not be there to probe, nor hear of the end.
            self.breaker.hold_until(self._paused_until)
            self._wake()
        self.leave(ticket)

    def pump(self) -> None:
        """Let out whoever may go now, and look again when the next one may."""
        if self.breaker.lapsed():
            self._turn_away()
        while self._waiting():
            delay = self._delay()
            if delay > 0.0:
                self._look_again(delay)
                return
            ticket, place = self._pop()
            if place.done():
                continue
            if self._rather_known_good(ticket):
                self._fresh.appendleft((ticket, place))
                continue
            self.admit(ticket)
            place.set_result(None)

    def pause_sentence(self) -> str | None:
        """Say that the judge asked for a pause, when it is long enough to be noticed."""
        left = self._paused_until - self._clock()
        if left < 2.0:
            return None
        return f"The judge asked for a pause; going on in {left:.0f} s."

    def close(self, why: str) -> None:
        """Turn away whoever waits, and whoever comes; calls under way go on."""
        self.breaker.gave_up = self.breaker.gave_up or why
        self._turn_away()
        self._silence()

    def _silence(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _rather_known_good(self, ticket: QueueSlot) -> bool:
        """Whether a text that was judged before is tried instead of one that keeps failing."""
        patience = 1 if self.breaker.suspects_fatal else 2
        turn = ticket.failed_probes >= patience and (ticket.failed_probes - patience) % 2 == 0
        if not (self.breaker.open and turn and self.known_good()):
            return False
        ticket.failed_probes += 1
        return True

    def _delay(self) -> float:
        """Seconds until somebody may leave; infinite when only an answer can change that."""
        now = self._clock()
        if self.breaker.open:
            return math.inf if self._probing else max(0.0, self.breaker.next_probe - now)
        waits = [self._paused_until - now, self.capacity.wait(self.in_flight)]
        waits += [spacing.wait() for spacing in (self._rpm, self._tpm) if spacing]
        return max(0.0, *waits)

    def admit(self, ticket: QueueSlot) -> None:
        """Let a call leave without queueing."""
        ticket.probing = self.breaker.open
        self._probing += ticket.probing
        ticket.times_sent += 1
        self.capacity.sent(ticket, self.in_flight)
        self.in_flight += 1
        self.breaker.sent()
        if self._rpm:
            self._rpm.consume()
        if self._tpm:
            self._tpm.consume(ticket.tokens)

    def leave(self, ticket: QueueSlot, used: int | None = None) -> None:
        """Take back a call; one that was cancelled says nothing about the judge."""
        self.in_flight -= 1
        self._probing -= ticket.probing
        ticket.probing = False
        if self._tpm and used is not None:
            self._tpm.correct(used - ticket.tokens)
        self.pump()

    def _waiting(self) -> bool:
        return bool(self._again or self._fresh)

    def _pop(self) -> tuple[QueueSlot, asyncio.Future[None]]:
        return (self._again or self._fresh).popleft()

    def _turn_away(self) -> None:
        while self._waiting():
            _, place = self._pop()
            if not place.done():
                place.set_exception(self.breaker.stop())
        self._wake()

    def _wake(self) -> None:
        for alarm in self._resting:
            if not alarm.done():
                alarm.set_result(None)

    def _look_again(self, delay: float) -> None:
        now = self._clock()
        at = now + delay
        if self.breaker.open and not self.breaker.suspects_fatal:
            at = min(at, self.breaker.gives_up_at)
        if at == math.inf or (self._timer is not None and now < self._timer_at <= at):
            return
        self._silence()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - now), self._ring)

    def _ring(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self.pump()
