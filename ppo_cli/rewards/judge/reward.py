"""The reward that asks an LLM judge: rollouts in, scores on [0, 1] out.

Everything that waits runs on one background event loop. Before any rollout one call shows that key,
model and reply are right. A response that got no verdict is held back until the step is settled, so
that a judge that failed too often is asked again for just those.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import Interrupted, PpoError, RewardError, ppo, shorten
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import LabelledRollouts, Reward, RoundKind, Tell, tell_nobody
from ppo_cli.rewards.judge.batch import BatchJudge
from ppo_cli.rewards.judge.cache import VerdictCache, cache_key, cache_path
from ppo_cli.rewards.judge.calls import (
    JudgeError,
    Question,
    Verdict,
    gated_score,
    merge_criteria,
    score_from_votes,
    split_answers,
)
from ppo_cli.rewards.judge.client import PARSE_ATTEMPTS, JudgeClient, judge_label, reach_judge
from ppo_cli.rewards.judge.costs import SharedLedger, build_ledger
from ppo_cli.rewards.judge.format_check import FormatCheck, format_checks
from ppo_cli.rewards.judge.monitor import (
    MONITOR_PENDING,
    Canaries,
    LabelledCheck,
    Monitor,
    StepReport,
)
from ppo_cli.rewards.judge.prices import batch_price
from ppo_cli.rewards.judge.prompt import (
    build_material,
    check_rows,
    load_template,
    rubric_reader,
    visible_text,
)
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.judge.rubric import Rubric
from ppo_cli.rewards.judge.sanitise import no_content_reason
from ppo_cli.rewards.remote.event_loop import LoopThread
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.limits import Limits
from ppo_cli.thoughts import NO_ANSWER

MAX_PAUSE_S = 30.0
MAX_LONE_FAILURES = 3  # failures while others pass, after which it is the text and not the judge
TOLERATED_FAILURES = 2  # texts without a verdict that are never taken for a trouble of the judge


@dataclass(eq=False)
class PendingScore:
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
        return curable and self.failed_alone < MAX_LONE_FAILURES


@dataclass
class FailurePolicy:
    """The failure policy of a run, and what it remembers from step to step."""

    on_failure: Literal["mask", "batch_mean", "stop"]
    max_failure_rate: float
    outage_wait: float
    waiting_message: str | None = None


class JudgingRound:
    """The responses of one step, from the first submit to the last score.

    `judge` brings an entry to its score or leaves it open; `witness` asks about something that
    was judged before, and says whether the judge answered.
    """

    def __init__(
        self,
        rules: FailurePolicy,
        judge: Callable[[PendingScore], Awaitable[None]],
        witness: Callable[[], Awaitable[bool]],
    ) -> None:
        self.entries: list[PendingScore] = []
        self._asked: list[Future[None]] = []
        self._rules = rules
        self._judge = judge
        self._witness = witness

    def add(self, entry: PendingScore, first_judging: Future[None]) -> None:
        """Take an entry whose first judging is under way."""
        self.entries.append(entry)
        self._asked.append(first_judging)

    async def finish(self) -> None:
        """Wait for the first judging of all, then bring every open future to its end."""
        try:
            await asyncio.gather(*(asyncio.wrap_future(judging) for judging in self._asked))
            self._pass_on_a_stop()
            await self._recover()
            self._pass_on_a_stop()
            self._conclude()
        except BaseException as error:
            # Nobody may wait for ever, whatever went wrong in here.
            exception = (
                error if isinstance(error, Exception) else RuntimeError("the judge was closed")
            )
            for entry in self.entries:
                if not entry.future.done():
                    entry.future.set_exception(exception)
            if not isinstance(error, PpoError):
                raise
        finally:
            self._rules.waiting_message = None

    def _pass_on_a_stop(self) -> None:
        """What stops the run stops it for all responses: none is worth waiting for then."""
        for entry in self.entries:
            if entry.future.done() and (stop := entry.future.exception()) is not None:
                raise stop

    def _open(self) -> list[PendingScore]:
        return [entry for entry in self.entries if entry.open]

    def _too_many(self) -> bool:
        """Whether the share of failed verdicts calls for a pause; one or two texts never do."""
        max_rate = self._rules.max_failure_rate
        return len(self._open()) > max(
            TOLERATED_FAILURES if max_rate > 0 else 0, max_rate * len(self.entries)
        )

    async def _recover(self) -> None:
        if not self._too_many():
            return
        unread = [e for e in self._open() if e.error and e.error.kind is Failure.UNPARSED]
        await self._ask_again(unread)
        began, pause, turn = time.monotonic(), 1.0, 0
        while self._too_many():
            curable = [entry for entry in self._open() if entry.may_pass_later]
            remaining_s = self._rules.outage_wait - (time.monotonic() - began)
            if not curable or remaining_s <= 0:
                raise Interrupted(self._gave_up(waited=bool(curable)))
            pause = min(pause, MAX_PAUSE_S, remaining_s)
            self._rules.waiting_message = (
                f"{self._lacking()} ({self._causes()}): asking stops, and is tried again in "
                f"{pause:.0f} s, for up to {remaining_s:.0f} s more."
            )
            await asyncio.sleep(pause)
            tried = curable[turn % len(curable)]
            await self._ask_again([tried], within=max(1.0, remaining_s - pause))
            turn, pause = turn + 1, 2 * pause
            pause = pause if tried.open else 1.0
            if not tried.open or await self._witness():
                self._rules.waiting_message = None
                # The judge answers again: what fails now fails on its own account.
                rest = [entry for entry in curable if entry.open]
                await self._ask_again(rest)
                for entry in rest:
                    entry.failed_alone += entry.open

    async def _ask_again(
        self, entries: Sequence[PendingScore], within: float | None = None
    ) -> None:
        judging = asyncio.gather(*(self._judge(entry) for entry in entries))
        try:
            await asyncio.wait_for(judging, within)
        except TimeoutError:
            return

    def _conclude(self) -> None:
        failed, rules = self._open(), self._rules
        mean: float | None = None
        for entry in self.entries:
            if entry.score is not None and not entry.future.done():
                entry.future.set_result(entry.score)
        if failed and rules.on_failure == "stop":
            raise Interrupted(f"{self._lacking()} ({self._causes()}), and --rm_on_failure is stop.")
        if rules.on_failure == "batch_mean":
            scores = [entry.future.result() for entry in self.entries if not entry.open]
            values = [score.value for score in scores if score.value is not None]
            mean = fmean(values) if values else None
        for entry in failed:
            error = entry.error
            failure, reply = (error.summary, error.reply) if error else ("no verdict", "")
            score = Score(None, failure, reply=reply)
            if mean is not None:
                reason = "imputed: the mean of the step"
                score = Score(mean, reason=reason, imputed=failure, reply=reply)
            entry.future.set_result(score)

    def _lacking(self, where: str = "") -> str:
        return f"{len(self._open())} of {len(self.entries)} responses{where} got no verdict"

    def _causes(self) -> str:
        counts = Counter(entry.error.cause for entry in self._open() if entry.error)
        return ", ".join(f"{cause} {n}" for cause, n in counts.most_common())

    def _gave_up(self, *, waited: bool) -> str:
        message = (
            f"{self._lacking(' of this step')} ({self._causes()}), more than "
            f"--rm_max_failure_rate {self._rules.max_failure_rate:g} allows"
        )
        if waited:
            message += (
                f", and {self._rules.outage_wait:.0f} s of waiting (--rm_outage_wait) did not help"
            )
        errors = [entry.error.summary for entry in self._open() if entry.error]
        first = f" The first: {errors[0]}" if errors else ""
        return f"{message}. Look at the judge and its prompt, or raise that rate.{first}"


def _unreadable(error: JudgeError, api: ApiReward, room: int | None) -> str:
    if error.cause == "truncated" and room is not None:
        return (
            f"The judge {judge_label(api)} does not come to an end: its context leaves {room} "
            f"tokens for an answer, and {PARSE_ATTEMPTS} answers were cut there. Serve it with a "
            "longer context, or try another --rm_model."
        )
    if error.cause == "truncated":
        return (
            f"The judge {judge_label(api)} does not come to an end: {PARSE_ATTEMPTS} answers were "
            f"cut at {api.max_tokens} tokens. Raise --rm_max_tokens, or try another --rm_model."
        )
    return (
        f"The judge {judge_label(api)} answers, but no score can be read from it "
        f"({error.summary}). It "
        'said: "' + redact(error.reply[:200]) + '". Try a stronger --rm_model or another '
        f"--rm_output, or see the request with `{ppo('prompts render embedded')}` and the same "
        "--rm_ flags."
    )


# Replies that say nothing and that weak judges reward (arXiv 2507.08794).
CANARY_REPLIES = (":", "Solution", "Thought process:", "Let's solve this problem step by step.")
MAX_REFUSED_PROMPTS = 3  # prompts that may be refused before the start asks no more
DRAIN_S = 20.0  # what calls under way get to finish when a run ends: they are paid for


class JudgeReward(Reward):
    """Scores by the verdicts of one judge; see ApiReward for every setting.

    Verdicts are in the cache and the spending in its own file: a checkpoint keeps only how labelled
    responses were first scored.
    """

    def __init__(
        self, api: ApiReward, *, name: str = "judge", environ: Mapping[str, str] = os.environ
    ) -> None:
        self.name = name
        self._api = api
        self.template = load_template(api)
        self._criteria = rubric_reader(api)
        provider = build_provider(api, environ=environ)
        self._ledger = build_ledger(api)
        path = cache_path(api, environ)
        self._cache = None if path is None else VerdictCache(path)
        limits = Limits.of(api)
        self._direct = JudgeClient(provider, limits=limits, ledger=self._ledger, cache=self._cache)
        self._client = self._direct
        self._batch: BatchJudge | None = None
        if api.batch_wait is not None and self._cache is not None:
            self._batch = BatchJudge(provider, self._cache, wait_s=api.batch_wait)
            # A client that sends all it is given, at the price of a batch.
            price = batch_price(self._ledger.price, api)
            shared = SharedLedger(self._ledger, price, api.type, self._batch.model)
            every = Limits(concurrency=10**6, timeout=math.inf, deadline=math.inf)
            self._client = JudgeClient(self._batch, limits=every, ledger=shared, cache=self._cache)
        self._provider = provider
        self._report = StepReport()
        self._canaries = Canaries(self._client, every=api.canary_every)
        self._monitor: Monitor | None = None
        if api.monitor.model is not None:
            self._monitor = Monitor(
                api, environ=environ, limits=limits, ledger=self._ledger, cache=self._cache
            )
        self._held_out: LabelledCheck | None = None
        self._validating = False
        self._rules = FailurePolicy(api.on_failure, api.max_failure_rate, api.outage_wait)
        self._loop = LoopThread()
        self._judged_before: Question | None = None
        self._closed = False
        self._round = self._new_round()

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Check the template against the rows, and key, model and reply format by one call.

        The call is not repeated while its verdict is in the cache: a run whose verdicts are
        all paid for costs nothing.
        """
        materials = [build_material(prompt, "") for prompt in prompts]
        check_rows(self._api, self.template, materials)
        if (killed := self._ledger.interrupted).calls:
            tell(
                f"{killed.calls} judge calls were in flight when the run was killed; they count at "
                f"their worst case: {killed.usage.total:,} tokens, ${killed.usd:.3g}."
            )
        if not prompts:
            return
        self._provider.begin(tell)
        self._try_out(prompts, patient=patient, tell=tell)
        if self._api.canary_every:
            self.check_format(tell)
        if self._monitor is not None:
            self._loop.call(
                self._monitor.try_out(self._question(prompts[0], "I do not know."), tell)
            )
        for name, why in self._provider.dropped().items():
            tell(f"{self._api.model} does not take {name} ({why}); the judge runs without it.")

    def _try_out(self, prompts: Sequence[Prompt], *, patient: bool, tell: Tell) -> None:
        """Ask about the first prompt; about another one when the judge will not judge it.

        Prompts that do not fit its context are followed by the shortest one: if even that does
        not fit, the judge cannot be used.
        """
        error: JudgeError | None = None
        shortest = min(prompts, key=lambda prompt: len(prompt.text))
        for prompt in (*prompts[:MAX_REFUSED_PROMPTS], shortest):
            if prompt is shortest and error is not None and error.cause != "too_long":
                break
            question = self._question(prompt, str(prompt.ground_truth or "I do not know."))
            key = cache_key(self._provider.identity, question)
            try:
                is_cached = self._cache is not None and self._cache.get(key) is not None
                # A batch goes out in a form that a call has found to work.
                if not is_cached or (self._batch is not None and not self._batch.under_way()):
                    probe = reach_judge(
                        self._loop, self._direct, question, self._api, patient=patient, tell=tell
                    )
                    if self._cache is not None:
                        self._cache.put(key, probe)
                return
            except JudgeError as refusal:
                if refusal.kind is Failure.UNPARSED:
                    raise RewardError(
                        _unreadable(refusal, self._api, self._provider.answer_room)
                    ) from refusal
                error = refusal
        if error is not None and error.cause == "too_long":
            raise RewardError(f"The judge cannot be used ({error.summary})") from error
        tell(f"The judge answers, but would not judge the first prompts ({error}).")

    def check_format(self, tell: Tell) -> None:
        """Ask questions with known answers; a judge that gets one wrong is reported."""
        checks = format_checks(self._api, self.template)
        answers = self._loop.call(self._ask_checks(checks))
        if not checks:
            return
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, JudgeError):
                raise answer
        pairs = list(zip(checks, answers, strict=True))
        passed = sum(isinstance(a, Verdict) and check.is_passed(a) for check, a in pairs)
        known_answers = f"{passed} of {len(checks)} questions with a known answer"
        if passed == len(checks):
            tell(f"The judge {judge_label(self._api)} answers {known_answers} right.")
            return
        failed = [a for check, a in pairs if not (isinstance(a, Verdict) and check.is_passed(a))]
        judge_text = failed[0].text if isinstance(failed[0], Verdict) else str(failed[0])
        tell(
            f"Warning: the judge {judge_label(self._api)} answers only {known_answers} right, so "
            f"its verdicts may not mean what they are read as. It said: "
            f"{shorten(redact(judge_text), 200)}. Compare it with labels "
            f"(`{ppo('reward calibrate')}`), or try another --rm_model."
        )

    async def _ask_checks(self, checks: Sequence[FormatCheck]) -> list[Verdict | BaseException]:
        calls = (self._direct.ask(check.question) for check in checks)
        return await asyncio.gather(*calls, return_exceptions=True)

    def set_labelled(self, labelled: Mapping[str, LabelledRollouts]) -> None:
        """Take those of the file that its settings name."""
        monitor = self._api.monitor
        if monitor.labels is not None:
            rows, every = labelled[monitor.labels], monitor.labels_every
            self._held_out = LabelledCheck(rows, self._rejudge, self.template.scale, every)

    def begin_step(self, step: int) -> None:
        """Test the judge with worthless replies and labelled responses when that is due."""
        self._canaries.begin_step(step)
        if self._held_out is not None and self._held_out.is_due(step):
            self._loop.submit(self._held_out.read())

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Ask the judge, at once and without waiting."""
        entry = PendingScore(rollout)
        self._round.add(entry, self._loop.submit(self._first(entry)))
        if self._canaries.due:
            self._canaries.due = False
            for text in CANARY_REPLIES:
                self._loop.submit(self._canaries.ask(self._question(rollout.prompt, text)))
        return entry.future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Close the step: failed verdicts are asked for again, masked or stop the run."""
        self._validating = kind == "validation"
        done, self._round = self._round, self._new_round()
        if done.entries:
            self._loop.submit(done.finish())

    def waiting_for(self) -> str | None:
        """Say what the judge is waiting for, when it stands still."""
        jobs = None if self._batch is None else self._batch.waiting_for()
        return self._rules.waiting_message or jobs or self._client.waiting_for()

    def repeat(self, rollout: Rollout, votes: int) -> Future[list[Score]]:
        """Ask for several fresh verdicts on one response, past the cache."""
        return self._loop.submit(self._repeat(rollout, votes))

    def pop_metrics(self) -> dict[str, float]:
        """`judge/…` metrics since the last call, after `close` too."""
        if self._closed:
            return asyncio.run(self._measure())
        return self._loop.call(self._measure(), timeout=60.0)

    def state_dict(self) -> dict[str, Any]:
        """What the labelled responses were first given."""
        return {} if self._held_out is None else {"labels": dict(self._held_out.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        if self._held_out is not None:
            self._held_out.first |= state.get("labels", {})

    def attach(self, folder: Path) -> None:
        """Keep the calls in the run's folder; each judge has a file of its own."""
        which = "" if self.name == "judge" else f"_{self.name}"
        self._ledger.attach(folder / f"judge_calls{which}.jsonl")

    def close(self) -> None:
        """Let paid calls finish, then free connections and the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call(self._close(), timeout=DRAIN_S + 10.0)
        finally:
            self._loop.close()
            self._provider.end()

    def _new_round(self) -> JudgingRound:
        return JudgingRound(self._rules, self._judge, self._is_judge_up)

    async def _first(self, entry: PendingScore) -> None:
        """Judge a fresh response: by the gate when it has no content, else by the judge."""
        empty = self._gate_reason(entry.rollout, self._visible_text(entry.rollout))
        if empty:
            self._report.gated += 1
            entry.future.set_result(gated_score(empty, self.template.scale))
            return
        await self._judge(entry)

    async def _judge(self, entry: PendingScore) -> None:
        """Bring an entry's future to its score, or leave it open with what went wrong."""
        questions = [
            self._question(entry.rollout.prompt, self._visible_text(entry.rollout), vote)
            for vote in range(self._api.votes)
        ]
        answers = await asyncio.gather(
            *(self._verdict(entry.rollout, question) for question in questions),
            return_exceptions=True,
        )
        try:
            score, error = score_from_votes(answers, questions[0])
        except PpoError as stop:
            entry.future.set_exception(stop)
            return
        entry.error = error
        if score is None:
            return
        self._report.note(entry.rollout, score)
        self._judged_before = questions[0]
        if self._monitor is not None and self._monitor.wants(entry.rollout):
            info = {**score.info, **MONITOR_PENDING}
            self._monitor.begin(questions[0], float(score.value or 0.0), info)
            score = replace(score, info=info)
        entry.future.set_result(score)

    async def _verdict(
        self, rollout: Rollout, question: Question, *, fresh: bool = False
    ) -> Verdict:
        """One verdict; with a call for each criterion, it is made of theirs."""
        rubric, vote = question.rubric, question.vote
        if rubric is None or self._api.rubric_calls == "one":
            return await self._client.ask(question, fresh=fresh)
        seen = self._visible_text(rollout)
        parts = [
            self._question(rollout.prompt, seen, vote, criterion)
            for criterion in rubric.split_criteria()
        ]
        answers = await asyncio.gather(
            *(self._client.ask(part, fresh=fresh) for part in parts), return_exceptions=True
        )
        verdicts, error = split_answers(answers)
        if error is not None:
            raise error
        return merge_criteria(verdicts, rubric)

    async def _is_judge_up(self) -> bool:
        """Ask again about something that was judged before: is it the judge, or the texts?"""
        if self._judged_before is None:
            return False
        try:
            async with asyncio.timeout(self._api.timeout):
                await self._client.ask(self._judged_before, fresh=True)
        except (JudgeError, TimeoutError):
            return False
        return True

    async def _rejudge(self, rollout: Rollout) -> float:
        question = self._question(rollout.prompt, self._visible_text(rollout))
        verdict = await self._verdict(rollout, question, fresh=True)
        return question.scale.scaled(verdict.value)

    async def _repeat(self, rollout: Rollout, votes: int) -> list[Score]:
        seen = self._visible_text(rollout)
        questions = [self._question(rollout.prompt, seen, vote) for vote in range(votes)]
        answers = await asyncio.gather(
            *(self._verdict(rollout, question, fresh=True) for question in questions),
            return_exceptions=True,
        )
        pairs = [
            score_from_votes([answer], question)
            for answer, question in zip(answers, questions, strict=True)
        ]
        return [score or Score.failed(str(error)) for score, error in pairs]

    def _visible_text(self, rollout: Rollout) -> str:
        """What a judge reads of a response, whole."""
        how = self._api.reasoning
        return visible_text(rollout.answer if how == "strip" else rollout.whole, how)

    def _gate_reason(self, rollout: Rollout, text: str) -> str | None:
        """Why a response gets the lowest score without a call; `text` is what a judge reads."""
        if not self._api.gate:
            return None
        if rollout.unclosed and not text:
            return NO_ANSWER
        return no_content_reason(rollout.prompt.text, text, rollout.prompt.ground_truth)

    def _question(
        self, prompt: Prompt, response: str, vote: int = 0, rubric: Rubric | None = None
    ) -> Question:
        material = build_material(prompt, response)
        rubric = rubric or self._criteria(material)
        return self.template.question(material, self._api, vote=vote, rubric=rubric)

    async def _measure(self) -> dict[str, float]:
        report, self._report = self._report, StepReport()
        metrics = report.metrics(self._client.pop_counters(), self._ledger)
        metrics |= self._canaries.take(self.template.scale)
        if self._held_out is not None and not self._validating:
            metrics |= self._held_out.take()
        return metrics | (self._monitor.take() if self._monitor else {})

    async def _close(self) -> None:
        if self._batch is not None:
            await self._batch.stop()
        await self._client.close(DRAIN_S)
        await self._direct.close()
        if self._monitor is not None:
            await self._monitor.close()
        if self._cache is not None:
            self._cache.close()
