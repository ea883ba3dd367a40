"""The responses of one step with a judge: from the first submit to the last score.

A response that got no verdict is held back until the step is settled, so that a judge that failed
too often is asked again for just those.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from ppo_cli.errors import Interrupted, PpoError
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.judge.calls import Failure, JudgeError

LONGEST_PAUSE = 30.0
STUBBORN = 3  # failures while others pass, after which it is the text and not the judge
FEW = 2  # texts without a verdict that are never taken for a trouble of the judge


@dataclass(eq=False)
class Entry:
    """One response on its way to a score; `error` is why it has none yet.

    A `score` that others of its group may still change is held back until the round ends.
    """

    rollout: Rollout
    future: Future[Score] = field(default_factory=Future)
    error: JudgeError | None = None
    score: Score | None = None
    failed_alone: int = 0

    @property
    def open(self) -> bool:
        """Whether the response still waits for its score."""
        return self.score is None and not self.future.done()

    @property
    def may_pass_later(self) -> bool:
        """Whether asking again has a point."""
        curable = self.error is not None and self.error.kind is Failure.RETRYABLE
        return curable and self.failed_alone < STUBBORN


@dataclass
class Rules:
    """The failure policy of a run, and what it remembers from step to step."""

    on_failure: Literal["mask", "batch_mean", "stop"]
    max_failure_rate: float
    outage_wait: float
    standing_still: str | None = None

    def too_many(self, failed: int, count: int) -> bool:
        """Whether the share of failed verdicts calls for a pause; one or two texts never do."""
        few = FEW if self.max_failure_rate > 0 else 0
        return failed > max(few, self.max_failure_rate * count)


class Round:
    """The responses of one step, from the first submit to the last score.

    `judge` brings an entry to its score or leaves it open; `witness` asks about something that
    was judged before, and says whether the judge answered.
    """

    def __init__(
        self,
        rules: Rules,
        judge: Callable[[Entry], Awaitable[None]],
        witness: Callable[[], Awaitable[bool]],
    ) -> None:
        self.entries: list[Entry] = []
        self._asked: list[Future[None]] = []
        self._rules = rules
        self._judge = judge
        self._witness = witness

    def add(self, entry: Entry, asked: Future[None]) -> None:
        """Take an entry whose first judging is under way."""
        self.entries.append(entry)
        self._asked.append(asked)

    async def finish(self) -> None:
        """Wait for the first judging of all, then bring every open future to its end."""
        try:
            await asyncio.gather(*(asyncio.wrap_future(asked) for asked in self._asked))
            self._pass_on_a_stop()
            await self._recover()
            self._pass_on_a_stop()
            self._conclude()
        except BaseException as error:
            # Nobody may wait for ever, whatever went wrong in here.
            told = error if isinstance(error, Exception) else RuntimeError("the judge was closed")
            for entry in self.entries:
                if not entry.future.done():
                    entry.future.set_exception(told)
            if not isinstance(error, PpoError):
                raise
        finally:
            self._rules.standing_still = None

    def _pass_on_a_stop(self) -> None:
        """What stops the run stops it for all responses: none is worth waiting for then."""
        for entry in self.entries:
            if entry.future.done() and (stop := entry.future.exception()) is not None:
                raise stop

    def _open(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.open]

    def _too_many(self) -> bool:
        return self._rules.too_many(len(self._open()), len(self.entries))

    async def _recover(self) -> None:
        if not self._too_many():
            return
        await self._ask_again([e for e in self._open() if _is(e, Failure.UNPARSED)])
        began, pause, turn = time.monotonic(), 1.0, 0
        while self._too_many():
            curable = [entry for entry in self._open() if entry.may_pass_later]
            left = self._rules.outage_wait - (time.monotonic() - began)
            if not curable or left <= 0:
                raise Interrupted(self._gave_up(waited=bool(curable)))
            pause = min(pause, LONGEST_PAUSE, left)
            self._rules.standing_still = self._told(pause, left)
            await asyncio.sleep(pause)
            tried = curable[turn % len(curable)]
            await self._ask_again([tried], within=max(1.0, left - pause))
            turn, pause = turn + 1, 2 * pause
            pause = pause if tried.open else 1.0
            if not tried.open or await self._witness():
                self._rules.standing_still = None
                await self._ask_the_rest([entry for entry in curable if entry.open])

    async def _ask_the_rest(self, entries: Sequence[Entry]) -> None:
        """The judge answers again: what fails now fails on its own account."""
        await self._ask_again(entries)
        for entry in entries:
            entry.failed_alone += entry.open

    async def _ask_again(self, entries: Sequence[Entry], within: float | None = None) -> None:
        judging = asyncio.gather(*(self._judge(entry) for entry in entries))
        try:
            await asyncio.wait_for(judging, within)
        except TimeoutError:
            return

    def _conclude(self) -> None:
        failed, rules = self._open(), self._rules
        for entry in self.entries:
            if entry.score is not None and not entry.future.done():
                entry.future.set_result(entry.score)
        if failed and rules.on_failure == "stop":
            raise Interrupted(
                f"{len(failed)} of {len(self.entries)} responses got no verdict "
                f"({self._causes()}), and --rm_on_failure is stop."
            )
        mean = self._mean() if rules.on_failure == "batch_mean" else None
        for entry in failed:
            entry.future.set_result(_unjudged(entry, mean))

    def _mean(self) -> float | None:
        scores = [entry.future.result() for entry in self.entries if not entry.open]
        values = [score.value for score in scores if score.value is not None]
        return fmean(values) if values else None

    def _causes(self) -> str:
        counts = Counter(entry.error.cause for entry in self._open() if entry.error)
        return ", ".join(f"{cause} {n}" for cause, n in counts.most_common())

    def _told(self, pause: float, left: float) -> str:
        return (
            f"{len(self._open())} of {len(self.entries)} responses got no verdict "
            f"({self._causes()}): asking stops, and is tried again in {pause:.0f} s, for up to "
            f"{left:.0f} s more."
        )

    def _gave_up(self, *, waited: bool) -> str:
        told = (
            f"{len(self._open())} of {len(self.entries)} responses of this step got no verdict "
            f"({self._causes()}), more than --rm_max_failure_rate "
            f"{self._rules.max_failure_rate:g} allows"
        )
        if waited:
            told += (
                f", and {self._rules.outage_wait:.0f} s of waiting (--rm_outage_wait) did not help"
            )
        return f"{told}. Look at the judge and its prompt, or raise that rate."


def _is(entry: Entry, kind: Failure) -> bool:
    return entry.error is not None and entry.error.kind is kind


def _unjudged(entry: Entry, mean: float | None) -> Score:
    error = entry.error
    failure = "no verdict" if error is None else f"{error.cause}: {error}"
    reply = "" if error is None else error.reply
    if mean is None:
        return Score(None, failure, reply=reply)
    return Score(mean, reason="imputed: the mean of the step", imputed=failure, reply=reply)
