"""One step's responses until all have a score, and what happens when the judge fails.

A response without a verdict is kept until the round ends. When too many fail, the round asks again
for just those before it masks them, imputes them or stops the run. Called by the judge rewards.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from ppo_cli.errors import Interrupted, PpoError
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.remote.failures import Failure

MAX_PAUSE_S = 30.0
# A text that failed so often while others passed is the cause itself, not the judge.
MAX_LONE_FAILURES = 3
# So few texts without a verdict never count as a problem of the judge.
TOLERATED_FAILURES = 2


@dataclass(eq=False)
class PendingScore:
    """A response that waits for its score; `error` is why it has none yet.

    A `score` that may still change, by other responses of its group or by the correction of a
    cascade, is set in `future` only at the end of the round. In a cascade, `cheap` is the cheaper
    judge's score, and `info` tells about it. Of a panel, `verdicts` has the scores of the judges
    so far.
    """

    rollout: Rollout
    future: Future[Score] = field(default_factory=Future)
    error: JudgeError | None = None
    score: Score | None = None
    failed_alone: int = 0
    cheap: Score | None = None
    verdicts: dict[str, Score] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether the response has no score yet."""
        return self.score is None and not self.future.done()

    @property
    def may_pass_later(self) -> bool:
        """Whether asking again may succeed."""
        curable = self.error is not None and self.error.kind is Failure.RETRYABLE
        return curable and self.failed_alone < MAX_LONE_FAILURES


@dataclass
class FailurePolicy:
    """What to do with responses that the judge did not score.

    `waiting_message` is set while scoring is paused because of an outage.
    """

    on_failure: Literal["mask", "batch_mean", "stop"]
    max_failure_rate: float
    outage_wait: float
    waiting_message: str | None = None


class JudgingRound:
    """The responses of one step, from the first `submit` to the last score.

    `judge` asks for the score of an entry and leaves it open on failure. `check_judge` asks again
    about a response that was judged before, and returns whether the judge answered. `place` places
    a score that stands in for a verdict.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        judge: Callable[[PendingScore], Awaitable[None]],
        check_judge: Callable[[], Awaitable[bool]],
        place: Callable[[Score, Rollout], Score],
    ) -> None:
        self.entries: list[PendingScore] = []
        # Applied to scores that waited for the end of the round.
        self.revise: Callable[[Score, Rollout], Score] | None = None
        self._first_judgings: list[Future[None]] = []
        self._policy = policy
        self._judge = judge
        self._check_judge = check_judge
        self._place = place

    def add(self, entry: PendingScore, first_judging: Future[None]) -> None:
        """Add an entry; `first_judging` is the call that asks about it for the first time."""
        self.entries.append(entry)
        self._first_judgings.append(first_judging)

    async def finish(self) -> None:
        """Wait until each entry was judged once, retry failures, and set every future."""
        try:
            await asyncio.gather(
                *(asyncio.wrap_future(judging) for judging in self._first_judgings)
            )
            self._raise_stop()
            await self._recover()
            self._raise_stop()
            self._conclude()
        except BaseException as error:
            # Nobody may wait forever: an error ends all open futures.
            exception = (
                error if isinstance(error, Exception) else RuntimeError("the judge was closed")
            )
            for entry in self.entries:
                if not entry.future.done():
                    entry.future.set_exception(exception)
            if not isinstance(error, PpoError):
                raise
        finally:
            self._policy.waiting_message = None

    def _raise_stop(self) -> None:
        """Raise the exception of an entry that stops the run, so that all entries end with it."""
        for entry in self.entries:
            if entry.future.done() and (stop := entry.future.exception()) is not None:
                raise stop

    def _open_entries(self) -> list[PendingScore]:
        return [entry for entry in self.entries if entry.open]

    def _has_too_many_failures(self) -> bool:
        """Return whether more verdicts are missing than the policy allows; 1 or 2 are tolerated.

        With max_failure_rate 0 none is tolerated.
        """
        max_rate = self._policy.max_failure_rate
        return len(self._open_entries()) > max(
            TOLERATED_FAILURES if max_rate > 0 else 0, max_rate * len(self.entries)
        )

    async def _recover(self) -> None:
        """Ask again while too many verdicts are missing; Interrupted when that is hopeless."""
        if not self._has_too_many_failures():
            return
        # Unreadable replies are asked for once more: the judge answers, so no pause is needed.
        unread = [e for e in self._open_entries() if e.error and e.error.kind is Failure.UNPARSED]
        await self._ask_again(unread)
        # In an outage one entry at a time tests the judge, with growing pauses.
        began, pause, turn = time.monotonic(), 1.0, 0
        while self._has_too_many_failures():
            curable = [entry for entry in self._open_entries() if entry.may_pass_later]
            remaining_s = self._policy.outage_wait - (time.monotonic() - began)
            if not curable or remaining_s <= 0:
                raise Interrupted(self._describe_stop(waited=bool(curable)))
            pause = min(pause, MAX_PAUSE_S, remaining_s)
            self._policy.waiting_message = (
                f"{self._describe_missing()} ({self._describe_causes()}): calls stop, with a new "
                f"attempt in {pause:.0f} s, for up to {remaining_s:.0f} s more."
            )
            await asyncio.sleep(pause)
            # Another entry each time: one text may fail on its own.
            tried = curable[turn % len(curable)]
            await self._ask_again([tried], within=max(1.0, remaining_s - pause))
            turn, pause = turn + 1, 2 * pause
            pause = pause if tried.open else 1.0
            if not tried.open or await self._check_judge():
                self._policy.waiting_message = None
                # The judge answers again: failures from now on are due to the texts.
                rest = [entry for entry in curable if entry.open]
                await self._ask_again(rest)
                for entry in rest:
                    entry.failed_alone += entry.open

    async def _ask_again(
        self, entries: Sequence[PendingScore], within: float | None = None
    ) -> None:
        """Judge entries again; those that take longer than `within` seconds stay open."""
        judging = asyncio.gather(*(self._judge(entry) for entry in entries))
        try:
            await asyncio.wait_for(judging, within)
        except TimeoutError:
            return

    def _conclude(self) -> None:
        """Set the scores, and treat the failed entries by the policy."""
        # Scores that waited for their group, or for the kind of their round, are published first.
        failed, policy = self._open_entries(), self._policy
        # Imputed scores are the mean of those that the judge gave.
        mean: float | None = None
        for entry in self.entries:
            if entry.score is not None and not entry.future.done():
                score = entry.score
                entry.future.set_result(self.revise(score, entry.rollout) if self.revise else score)
        if failed and policy.on_failure == "stop":
            raise Interrupted(
                f"{self._describe_missing()} ({self._describe_causes()}), and --rm_on_failure is "
                "stop."
            )
        if policy.on_failure == "batch_mean":
            scores = [entry.future.result() for entry in self.entries if not entry.open]
            values = [score.value for score in scores if score.value is not None]
            mean = fmean(values) if values else None
        for entry in failed:
            error = entry.error
            failure, reply = (error.summary, error.reply) if error else ("no verdict", "")
            score = Score(None, failure, reply=reply, info=entry.info)
            if mean is not None:
                reason = "imputed: the mean of the step"
                score = replace(score, value=mean, failure="", reason=reason, imputed=failure)
                score = self._place(score, entry.rollout)
            entry.future.set_result(score)

    def _describe_missing(self, where: str = "") -> str:
        return f"{len(self._open_entries())} of {len(self.entries)} responses{where} got no verdict"

    def _describe_causes(self) -> str:
        counts = Counter(entry.error.cause for entry in self._open_entries() if entry.error)
        return ", ".join(f"{cause} {n}" for cause, n in counts.most_common())

    def _describe_stop(self, *, waited: bool) -> str:
        """Return the message for a round with too many failures: their causes, and what to do.

        `waited`: the run has waited for --rm_outage_wait.
        """
        message = (
            f"{self._describe_missing(' of this step')} ({self._describe_causes()}), more than "
            f"--rm_max_failure_rate {self._policy.max_failure_rate:g} allows"
        )
        if waited:
            message += (
                f", and {self._policy.outage_wait:.0f} s of waiting (--rm_outage_wait) did not help"
            )
        errors = [entry.error.summary for entry in self._open_entries() if entry.error]
        first = f" The first: {errors[0]}" if errors else ""
        return f"{message}. Look at the judge and its prompt, or raise that rate.{first}"
