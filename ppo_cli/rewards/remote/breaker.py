"""The circuit breaker: opens when a service is down, decides when to try again or to give up."""

from __future__ import annotations

import math
import time

from ppo_cli.errors import Interrupted
from ppo_cli.rewards.remote.failures import SERVER_ERROR, TOO_MANY, Failure, RemoteError
from ppo_cli.rewards.remote.limits import Clock
from ppo_cli.secrets.redact import redact

# The breaker opens after a row of failures as long as the window, within these bounds, ...
MIN_FAILURES, MAX_FAILURES = 5, 20
# ... when nothing was answered for so long either.
QUIET_S = 2.0
# Between two probes. A service that asks for more than the longest wait is down, not busy.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
SHORTEST_PAUSE_S = 1.0
CONFIRM_WAITS_S = (1.0, 1.5, 2.5)  # before the probes that confirm a fatal answer
BAD_REQUESTS_IN_A_ROW = 5
# A service that has never answered, and has nothing but status 500 for so long, is not starting: it
# cannot serve these requests. One that answered before has an outage.
SERVER_ERROR_S = 45.0


def is_long(retry_after: float | None) -> bool:
    """Whether a service that asks for such a pause is out of service, not just busy."""
    return retry_after is not None and not retry_after <= LONGEST_WAIT_S


class BadRequests:
    """Distinguishes a single text that cannot be judged from a service that rejects every request.

    A rejection of one text is final. Several rejections in a row on different texts, with no answer
    in between, point to the service and not to the texts, and may be temporary.
    """

    def __init__(self) -> None:
        self._rejected: set[str] = set()

    def clear(self) -> None:
        """Forget the rejected texts, because the service answered a request."""
        self._rejected.clear()

    def is_outage(self, text_id: str) -> bool:
        """Record a rejected text; return True if so many are that the service is at fault."""
        if len(self._rejected) < BAD_REQUESTS_IN_A_ROW:
            self._rejected.add(text_id)
        return len(self._rejected) >= BAD_REQUESTS_IN_A_ROW


class Breaker:
    """Opens when calls fail and none succeeds, or at once on a fatal answer or a long pause.

    `subject` and `name` are what messages call the service: "The judge", "openai (gpt-5)".
    """

    def __init__(
        self, subject: str, name: str, outage_wait: float, clock: Clock = time.monotonic
    ) -> None:
        self.outage_wait = outage_wait
        self.open = False
        self.stop_reason = ""  # set once the service is given up
        self.next_probe = 0.0
        self.last_success: float | None = None
        self._subject = subject
        self._name = name
        self._clock = clock
        self._quiet_since: float | None = None
        self._failures_in_a_row = 0
        self._opened_at = 0.0
        self._open_s_before = 0.0
        self._fatal_probes: int | None = None
        self._backoff_s = FIRST_WAIT_S
        self._requested_pause_s = 0.0
        self._error: RemoteError | None = None
        self.always_server_error = True  # until the service answers, or fails in another way

    @property
    def confirms_fatal(self) -> bool:
        """Whether the last answer said that no call will ever succeed, and probes confirm it."""
        return self.open and self._fatal_probes is not None

    @property
    def gives_up_at(self) -> float:
        """When the outage will have lasted too long; a fatal answer is confirmed first anyway."""
        limit_s = SERVER_ERROR_S if self.always_server_error else math.inf
        return self._opened_at + min(self.outage_wait, limit_s)

    def open_seconds(self) -> float:
        """Return how long the breaker has been open in total."""
        return self._open_s_before + (self._clock() - self._opened_at if self.open else 0.0)

    def sent(self) -> None:
        """Record that a call is sent: the time without an answer is counted from the first one."""
        if self._quiet_since is None:
            self._quiet_since = self._clock()

    def quiet_s(self) -> float:
        """Return the seconds since the last answer, or since the first call."""
        return self._clock() - (self._quiet_since or 0.0)

    def success(self) -> bool:
        """Record an answered call and close the breaker; return whether it was open."""
        self.last_success = self._quiet_since = self._clock()
        self._failures_in_a_row = 0
        self.always_server_error = False
        was_open, self.open = self.open, False
        if was_open:
            self._open_s_before += self._clock() - self._opened_at
            self._fatal_probes, self._backoff_s = None, FIRST_WAIT_S
        return was_open

    def failure(self, error: RemoteError, *, window: int, probe: bool) -> None:
        """Record a failed call, and open the breaker or plan the next probe if it is due.

        `window` is how many calls may be in flight at once. While the breaker is open only failures
        of probes count.
        """
        # Calls that left before the outage are not probes: their failures change nothing.
        if self.stop_reason or (self.open and not probe):
            return
        self._error = error
        self.always_server_error &= error.status == SERVER_ERROR
        if error.kind is Failure.FATAL:
            self._confirm_fatal(error, probe=probe)
        elif self.open:
            self._fatal_probes = None
            self._schedule_probe(error)
        elif is_long(error.retry_after):
            self._open_now()
            self._schedule_probe(error)
        else:
            self._failures_in_a_row += 1
            # One call at a time: five in a row. Many at once: so many in a row that it is not
            # chance, even when a third of all calls fail.
            row = self._failures_in_a_row
            enough = row >= min(MAX_FAILURES, max(MIN_FAILURES, window))
            if enough and (self.quiet_s() >= QUIET_S or row >= 2 * MAX_FAILURES):
                self._open_now()
                self._schedule_probe(error)

    def has_given_up(self) -> bool:
        """Give up when the outage has lasted too long; True once the service is given up."""
        if self.open and self._fatal_probes is None and self._clock() >= self.gives_up_at:
            pause = self._requested_pause_s
            request = f" and asked for a pause of {pause:,.0f} s" if pause else ""
            problem = describe_outage(self.gives_up_at - self._opened_at, self.always_server_error)
            self.stop_reason = (
                f"{self._subject} {self._name} {problem}{request} (last: {self._last_error})."
            )
        return bool(self.stop_reason)

    def stop_error(self) -> Interrupted:
        """Return the exception that all waiting callers receive once the service is given up."""
        return Interrupted(self.stop_reason)

    def short_pause(self, retry_after: float | None) -> float:
        """Return the seconds of a requested pause that is short; 0 for one that is an outage."""
        if not retry_after or is_long(retry_after):
            return 0.0
        return min(retry_after, max(self.outage_wait, SHORTEST_PAUSE_S))

    def delay_probe(self, moment: float) -> None:
        """Put the next probe off until then, but not past the end of all waiting."""
        self.next_probe = max(self.next_probe, min(moment, self.gives_up_at))

    def restart_outage(self) -> None:
        """Count an outage from now on: nobody was waiting until now."""
        if self.open:
            self._open_s_before += self._clock() - self._opened_at
            self._opened_at = self._clock()

    def describe(self) -> str | None:
        """Return one sentence about what the run is waiting for; None when nothing is wrong."""
        if not self.open:
            return None
        now = self._clock()
        if self._fatal_probes is not None:
            return f"{self._subject} rejects requests ({self._last_error}); confirming."
        wait_s = max(0.0, min(self.next_probe, self.gives_up_at) - now)
        remaining_s = max(0.0, self.gives_up_at - now)
        limit = f"{remaining_s / 60:.0f} min" if remaining_s >= 90 else f"{remaining_s:.0f} s"
        problem = "does not answer"
        if self._requested_pause_s:
            problem = f"asked for a pause of {self._requested_pause_s:,.0f} s"
        return (
            f"{self._subject} {problem} ({self._last_error}); trying again in {wait_s:,.0f} s, "
            f"for up to {limit} more."
        )

    @property
    def _last_error(self) -> str:
        error = self._error
        return f"{error.cause}: {_split_hint(error)[0][:300]}" if error else ""

    def _confirm_fatal(self, error: RemoteError, *, probe: bool) -> None:
        """Open the breaker, and plan a probe that confirms the fatal error.

        When all probes have confirmed it, `stop_reason` is set instead.
        """
        if not self.open:
            self._open_now()
        # Only probes count: other calls left before the first fatal answer.
        if self._fatal_probes is None:
            self._fatal_probes = 0
        elif probe:
            self._fatal_probes += 1
        if self._fatal_probes >= len(CONFIRM_WAITS_S):
            message = f"{self._subject} {self._name} rejects every request ({self._last_error}). "
            self.stop_reason = (message + _split_hint(error)[1]).strip()
            return
        self.next_probe = self._clock() + CONFIRM_WAITS_S[self._fatal_probes]

    def _open_now(self) -> None:
        self.open, self._opened_at = True, self._clock()
        self._failures_in_a_row, self._backoff_s = 0, FIRST_WAIT_S

    def _schedule_probe(self, error: RemoteError) -> None:
        """Set the time of the next probe from the growing pause and the server's retry-after.

        It is never after the time at which the breaker gives up.
        """
        now, requested = self._clock(), error.retry_after or 0.0
        self._requested_pause_s = requested if requested > self._backoff_s else 0.0
        if error.status in TOO_MANY:
            # This ends with a quota's minute and is not a breakdown: probe more often.
            self._backoff_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 0.1 * (now - self._opened_at)))
        # A wrong clock makes long pauses out of short ones, so try once before giving up.
        last_try = self.gives_up_at - min(LONGEST_WAIT_S, 0.1 * self.outage_wait)
        next_probe = max(now + self._backoff_s, min(now + requested, last_try))
        self.next_probe = min(next_probe, self.gives_up_at)
        self._backoff_s = min(LONGEST_WAIT_S, 2.0 * self._backoff_s)


def describe_outage(seconds: float, always_server_error: bool) -> str:
    """Return what a service did during an outage, without its name."""
    if always_server_error:
        return f"answered every request of {seconds:,.0f} s with an error"
    return f"did not answer for {seconds:,.0f} s"


def _split_hint(error: RemoteError) -> tuple[str, str]:
    """Split an error's message into one line and the hint on its last line, if it has one."""
    message, _, hint = redact(str(error)).strip().rpartition("\n")
    if not message:
        message, hint = hint, ""
    return " ".join(message.split()), hint.strip()
