"""The circuit breaker: is the judge down, when may it be tried, and when is it given up?

Pure bookkeeping on a clock, like `limits`; `admission` lets calls through by it. "Open" is the
electrician's word: nothing flows but one probe at a time.
"""

from __future__ import annotations

import time

from ppo_cli.errors import Interrupted
from ppo_cli.redact import redact
from ppo_cli.rewards.judge.exchange import Failure, JudgeError, Question
from ppo_cli.rewards.judge.limits import Clock

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
            quiet = self._clock() - (self._quiet_since or 0.0)
            # One call at a time: five in a row. Many at once: a row that chance does not make,
            # even when a third of all calls fail.
            enough = self._streak >= min(MOST, max(FEWEST, window))
            if enough and (quiet >= QUIET_S or self._streak >= 2 * MOST):
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
            return f"The judge turns calls away ({self._last}); making sure."
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
            told = f"The judge {self.name} turns every call away ({self._last}). "
            self.gave_up = (told + _one_line(error)[1]).strip()
            return
        self.next_probe = self._clock() + CONFIRM_WAITS_S[self._fatal_probes]

    def _start(self) -> None:
        self.open, self._opened = True, self._clock()
        self._streak, self._backoff = 0, 1.0

    def _wait_longer(self, error: JudgeError) -> None:
        now, asked = self._clock(), error.retry_after or 0.0
        self._asked_s = asked if asked > self._backoff else 0.0
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
