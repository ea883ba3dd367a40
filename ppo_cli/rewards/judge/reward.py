"""The reward that asks an LLM judge: rollouts in, scores in [0, 1] out.

`start` shows with a few calls that key, model and reply format are right. `submit` asks at once on
a background event loop; where too many failed, `end_round` asks for them again before any update
(`rounds`). `asker` has the votes on a response, and their mean in [0, 1]; `client` has the calls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import PpoError, RewardError
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.base import LabelledRollouts, Reward, RoundKind, Tell, tell_nobody
from ppo_cli.rewards.judge.asker import UNKNOWN_ANSWER, JudgeAsker
from ppo_cli.rewards.judge.calls import JudgeError, Question, gated_score
from ppo_cli.rewards.judge.client import Counters
from ppo_cli.rewards.judge.connection import DRAIN_S, connect_judge, connect_other
from ppo_cli.rewards.judge.monitor import (
    MONITOR_PENDING,
    NOISE_STOP_S,
    NOISE_WAIT_S,
    Canaries,
    LabelledCheck,
    Monitor,
    NoiseCheck,
    PlacedVerdict,
    StepReport,
)
from ppo_cli.rewards.judge.placing import place_evenly, place_score
from ppo_cli.rewards.judge.rounds import FailurePolicy, JudgingRound, PendingScore
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.signals import shorten_wait

# Replies that say nothing and that weak judges reward (arXiv 2507.08794).
CANARY_REPLIES = (":", "Solution", "Thought process:", "Let's solve this problem step by step.")


class JudgeReward(JudgeAsker, Reward):
    """Scores by the verdicts of one judge; its settings are those of ApiReward.

    Verdicts are kept in the cache and the spending in the ledger's file: a checkpoint holds only
    the first scores of labelled responses.
    """

    def __init__(
        self, api: ApiReward, *, name: str = "judge", environ: Mapping[str, str] = os.environ
    ) -> None:
        self.name = name
        connection = connect_judge(api, environ)
        self._report = StepReport(api.votes)
        # Several votes on each response show the noise without further calls.
        self._noise = NoiseCheck(api.noise_responses if api.repeats else 0)
        self._canaries = Canaries(api.canary_every)
        self._labelled: LabelledCheck | None = None
        self._monitor: Monitor | None = None
        if api.monitor.model is not None:
            self._monitor = Monitor(
                api, environ=environ, ledger=connection.ledger, cache=connection.cache
            )
        JudgeAsker.__init__(self, api, connection, LoopThread())
        self._policy = FailurePolicy(api.on_failure, api.max_failure_rate, api.outage_wait)
        self._askers: list[JudgeAsker] = [self]  # also the other judges of a cascade or panel
        self._round = self._new_round()
        self._validating = False
        self._measuring: Future[None] | None = None
        self._closed = False

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Check the template against the rows, and key, model and reply format by first calls.

        Calls with a verdict in the cache are skipped, except before a new batch; the second judge
        is always called.
        """
        # Mistakes in the data come first: they cost nothing.
        for asker in self._askers:
            asker.check_rows(prompts)
        if (interrupted := self.connection.ledger.interrupted).calls:
            tell(
                f"{interrupted.calls} judge calls were in flight when the run was killed; they "
                f"count at their worst case: {interrupted.usage.total:,} tokens, "
                f"${interrupted.usd:.3g}."
            )
        if not prompts:
            return
        # Then calls: the judges, their format checks, and the second judge.
        self.connection.provider.start_server(tell)
        for asker in self._askers:
            asker.try_out(prompts, patient=patient, tell=tell)
        if self._monitor is not None:
            question = self.question(prompts[0], UNKNOWN_ANSWER)
            self._loop.call(self._monitor.try_out(question, tell))

    def set_labelled(self, labelled: Mapping[str, LabelledRollouts]) -> None:
        """Take the labelled responses of the file that the settings name."""
        monitor = self._api.monitor
        if monitor.labels is not None:
            self._labelled = LabelledCheck(
                labelled[monitor.labels],
                self._ask_fresh_score,
                self.template.scale,
                monitor.labels_every,
            )

    def begin_step(self, step: int) -> None:
        """Test the judge with empty replies and labelled responses when that is due."""
        self._canaries.begin_step(step)
        self._noise.begin_step(step)
        if self._labelled is not None and self._labelled.is_due(step):
            self._loop.submit(self._labelled.read())

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Ask the judge at once, and return the future score."""
        entry = PendingScore(rollout)
        self._round.add(entry, self._loop.submit(self._judge_new(entry)))
        # Canaries go with the first prompt of a step in which they are due, to all judges, since
        # any of them may decide a score.
        for text in CANARY_REPLIES if self._canaries.pop_due() else ():
            for asker in self._askers:
                question = asker.question(rollout.prompt, text)
                self._loop.submit(self._canaries.ask(question, asker.connection.client))
        return entry.future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Close the step: failed verdicts are masked, or asked for again, or stop the run."""
        self._validating = kind == "validation"
        # Responses submitted from now on belong to the next round.
        ended, self._round = self._round, self._new_round()
        measuring = kind == "train" and self._noise.pop_due()
        if ended.entries:
            future = self._loop.submit(self._finish(ended, measuring=measuring))
            self._measuring = future if measuring else self._measuring

    def waiting_for(self) -> str | None:
        """Return what a judge is waiting for, or None while verdicts come in."""
        batch = self.connection.batch
        jobs = None if batch is None else batch.waiting_for()
        waits = (asker.connection.client.waiting_for() for asker in self._askers)
        return self._policy.waiting_message or jobs or next(filter(None, waits), None)

    def repeat(self, rollout: Rollout, votes: int) -> Future[list[Score]]:
        """Ask for several fresh verdicts on one response, past the cache."""
        return self._loop.submit(self._repeat(rollout, votes))

    def pop_metrics(self) -> dict[str, float]:
        """Return the `judge/…` metrics since the last call; works after `close` too.

        Repeated verdicts are waited for, so that they belong to a step's metrics in every run.
        """
        if self._measuring is not None:
            wait([self._measuring], shorten_wait(NOISE_WAIT_S, NOISE_STOP_S))
        if self._closed:
            return asyncio.run(self._collect_metrics())
        return self._loop.call(self._collect_metrics(), timeout=60.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the first scores of the labelled responses."""
        return {} if self._labelled is None else {"labels": dict(self._labelled.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._labelled is not None:
            self._labelled.first |= state.get("labels", {})

    def attach(self, folder: Path) -> None:
        """Keep the calls in the run folder; each judge has its own file."""
        suffix = "" if self.name == "judge" else f"_{self.name}"
        self.connection.ledger.attach(folder / f"judge_calls{suffix}.jsonl")
        self._noise.attach(folder / f"judge_repeats{suffix}.jsonl")

    def close(self) -> None:
        """Let calls in flight finish (in seconds after a signal), then free what they use."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call(self._close(), timeout=DRAIN_S + 10.0)
            if self._measuring is not None:  # what it got is written down
                wait([self._measuring], shorten_wait(NOISE_WAIT_S))
        finally:
            self._loop.close()
            self.connection.provider.stop_server()

    def _add_judge(self, api: ApiReward, environ: Mapping[str, str]) -> JudgeAsker:
        """Return a further judge, which is tried out, waited for and closed with this one."""
        try:
            asker = JudgeAsker(api, connect_other(api, environ, self.connection), self._loop)
        except BaseException:
            self._loop.close()
            raise
        self._askers.append(asker)
        return asker

    def _new_round(self) -> JudgingRound:
        place = partial(place_evenly, api=self._api)
        return JudgingRound(self._policy, self._judge, self.is_up, place)

    async def _finish(self, ended: JudgingRound, *, measuring: bool) -> None:
        """Decide the scores of a round; then ask again about a few responses, if `measuring`."""
        await ended.finish()
        if measuring:
            await self._noise.measure()

    async def _judge_new(self, entry: PendingScore) -> None:
        """Score a new response: the lowest score without a call when it has no content."""
        try:
            seen = self._visible(entry.rollout)
        except RewardError as error:  # a split of the user's that fails on this text
            entry.future.set_result(Score.failed(str(error)))
            return
        if empty := self._gate_reason(entry.rollout, seen):
            self._report.gated += 1
            entry.future.set_result(gated_score(empty, self.template.scale))
            return
        await self._judge(entry)

    async def _judge(self, entry: PendingScore) -> None:
        """Ask for the score of an entry; on failure note the error and leave the entry open."""
        question = self.question(entry.rollout.prompt, self._visible(entry.rollout))
        try:
            score, entry.error = await self._ask_judges(entry, question)
        except PpoError as stop:
            entry.future.set_exception(stop)
            return
        if score is None:
            return
        score = place_score(score, entry.rollout, self._api, question.rubric)
        self._report.add(entry.rollout, score)
        if entry.info.get("escalated", True):  # False: the cheaper judge of a cascade decided
            pieces = score.info.get("pieces", ())
            ask_again = partial(self._ask_fresh_verdict, entry.rollout)
            self._noise.offer(question, (score.number, pieces), ask_again)
            if votes := score.info.get("votes"):
                self._report.verdicts.append([question.scale.scaled(vote) for vote in votes])
        # The second judge reads a share; its verdict is filled into `info` later.
        if self._monitor is not None and self._monitor.wants(entry.rollout):
            info = {**score.info, **MONITOR_PENDING}
            self._monitor.begin(question, score.number, info)
            score = replace(score, info=info)
        self._publish(entry, score)

    def _publish(self, entry: PendingScore, score: Score) -> None:
        """Set the score of an entry; a cascade overrides it."""
        entry.future.set_result(score)

    async def _ask_judges(
        self, entry: PendingScore, question: Question
    ) -> tuple[Score | None, JudgeError | None]:
        """Return an entry's score; None and the error if there is no verdict.

        This class asks one judge; cascades and panels override it.
        """
        return await self.ask_score(entry.rollout, question)

    async def _ask_fresh_score(self, rollout: Rollout) -> float:
        """Return the score in [0, 1] of a fresh verdict on a response."""
        return (await self._ask_fresh_verdict(rollout))[0]

    async def _ask_fresh_verdict(self, rollout: Rollout) -> PlacedVerdict:
        """Return the scores in [0, 1] of a fresh verdict on a response."""
        # Built again, so that the request has another nonce, as in another run.
        (score,) = await self._repeat(rollout, 1)
        if score.value is None:
            raise JudgeError(Failure.UNPARSED, "repeat", score.failure)
        return score.value, score.info.get("pieces", ())

    async def _collect_metrics(self) -> dict[str, float]:
        """Return the metrics of all judges together, and those that only this kind has."""
        counters = [asker.connection.client.pop_counters() for asker in self._askers]
        report, self._report = self._report, StepReport(self._api.votes)
        metrics = report.metrics(sum(counters, Counters()), self.connection.ledger)
        metrics |= self._canaries.pop_metrics()
        # A validation leaves those of noise and labelled responses for the next step.
        if not self._validating:
            metrics |= self._noise.pop_metrics()
            metrics |= self._labelled.pop_metrics() if self._labelled is not None else {}
        metrics |= self._monitor.pop_metrics() if self._monitor is not None else {}
        return metrics | self._pop_extra_metrics(metrics, counters)

    def _pop_extra_metrics(
        self, metrics: Mapping[str, float], counters: Sequence[Counters]
    ) -> dict[str, float]:
        """Return metrics that other judge rewards do not have; `counters` has those of each judge.

        `metrics` are the common ones, empty if nothing was judged.
        """
        return {}

    async def _close(self) -> None:
        await asyncio.gather(*(asker.connection.close() for asker in self._askers))
        if self._monitor is not None:
            await self._monitor.close()
        # Last, since the second judge writes to the cache too.
        if self.connection.cache is not None:
            self.connection.cache.close()
