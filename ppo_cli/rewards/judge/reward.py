"""The reward that asks an LLM judge: rollouts in, scores in [0, 1] out.

`start` shows with one call that key, model and reply format are right. `submit` asks at once on a
background event loop; `end_round` asks again for what failed, before any update (`rounds`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import PpoError, RewardError, ppo, shorten
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import LabelledRollouts, Reward, RoundKind, Tell, tell_nobody
from ppo_cli.rewards.judge.calls import (
    JudgeError,
    Question,
    Verdict,
    gated_score,
    merge_criteria,
    score_from_votes,
    split_answers,
)
from ppo_cli.rewards.judge.client import judge_label
from ppo_cli.rewards.judge.connection import DRAIN_S, connect_judge
from ppo_cli.rewards.judge.format_check import FormatCheck, format_checks
from ppo_cli.rewards.judge.monitor import MONITOR_PENDING, JudgeObserver
from ppo_cli.rewards.judge.prompt import (
    build_material,
    check_rows,
    load_template,
    rubric_reader,
    visible_text,
)
from ppo_cli.rewards.judge.rounds import FailurePolicy, JudgingRound, PendingScore
from ppo_cli.rewards.judge.rubric import Rubric
from ppo_cli.rewards.judge.sanitise import no_content_reason
from ppo_cli.rewards.remote.event_loop import LoopThread
from ppo_cli.thoughts import NO_ANSWER

# Replies that say nothing and that weak judges reward (arXiv 2507.08794).
CANARY_REPLIES = (":", "Solution", "Thought process:", "Let's solve this problem step by step.")
MAX_REFUSED_PROMPTS = 3  # prompts that the judge may refuse before the start asks no more
UNKNOWN_ANSWER = "I do not know."  # the response of test questions without a reference


class JudgeReward(Reward):
    """Scores by the verdicts of one judge; its settings are those of ApiReward.

    Verdicts are kept in the cache and the spending in the ledger's file: a checkpoint holds only
    the first scores of labelled responses.
    """

    def __init__(
        self, api: ApiReward, *, name: str = "judge", environ: Mapping[str, str] = os.environ
    ) -> None:
        self.name = name
        self._api = api
        self.template = load_template(api)
        self._read_rubric = rubric_reader(api)
        self._connection = connect_judge(api, environ)
        self._observer = JudgeObserver(api, environ, self._connection, self.template.scale)
        self._loop = LoopThread()
        self._policy = FailurePolicy(api.on_failure, api.max_failure_rate, api.outage_wait)
        self._round = self._new_round()
        self._last_judged: Question | None = None
        self._validating = False
        self._closed = False

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Check the template against the rows, and key, model and reply format by one call.

        The call is skipped while its verdict is in the cache: a run with all verdicts paid for
        costs nothing.
        """
        # Mistakes in the data come first: they cost nothing.
        materials = [build_material(prompt, "") for prompt in prompts]
        check_rows(self._api, self.template, materials)
        if (interrupted := self._connection.ledger.interrupted).calls:
            tell(
                f"{interrupted.calls} judge calls were in flight when the run was killed; they "
                f"count at their worst case: {interrupted.usage.total:,} tokens, "
                f"${interrupted.usd:.3g}."
            )
        if not prompts:
            return
        # Then calls: the judge itself, its format checks, and the second judge.
        provider = self._connection.provider
        provider.start_server(tell)
        self._test_judge(prompts, patient=patient, tell=tell)
        if self._api.canary_every:
            self.check_format(tell)
        if (monitor := self._observer.monitor) is not None:
            question = self._question(prompts[0], UNKNOWN_ANSWER)
            self._loop.call(monitor.try_out(question, tell))
        # Parameters that the model rejected in the calls above.
        for name, why in provider.dropped().items():
            tell(f"{self._api.model} does not take {name} ({why}); the judge runs without it.")

    def _test_judge(self, prompts: Sequence[Prompt], *, patient: bool, tell: Tell) -> None:
        """Ask about the first prompt, and about the next ones while the judge refuses.

        After prompts that exceed its context comes the shortest one: if even that does not fit,
        the judge cannot be used.
        """
        error: JudgeError | None = None
        shortest = min(prompts, key=lambda prompt: len(prompt.text))
        # The shortest prompt is only tried after prompts that were too long.
        for prompt in (*prompts[:MAX_REFUSED_PROMPTS], shortest):
            if prompt is shortest and error is not None and error.cause != "too_long":
                break
            question = self._question(prompt, str(prompt.ground_truth or UNKNOWN_ANSWER))
            try:
                self._connection.test_question(
                    question, self._api, self._loop, patient=patient, tell=tell
                )
                return
            except JudgeError as refusal:
                error = refusal
        if error is not None and error.cause == "too_long":
            raise RewardError(f"The judge cannot be used ({error.summary})") from error
        tell(f"The judge answers, but would not judge the first prompts ({error}).")

    def check_format(self, tell: Tell) -> None:
        """Ask questions with known answers, and warn about a judge that gets one wrong."""
        checks = format_checks(self._api, self.template)
        answers = self._loop.call(self._ask_checks(checks))
        if not checks:
            return
        # A stop or a bug ends the start; a JudgeError is a wrong answer.
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, JudgeError):
                raise answer
        failed = [
            answer
            for check, answer in zip(checks, answers, strict=True)
            if not (isinstance(answer, Verdict) and check.is_passed(answer))
        ]
        judge = judge_label(self._api)
        passed = f"{len(checks) - len(failed)} of {len(checks)} questions with a known answer"
        if not failed:
            tell(f"The judge {judge} answers {passed} right.")
            return
        judge_text = failed[0].text if isinstance(failed[0], Verdict) else str(failed[0])
        tell(
            f"Warning: the judge {judge} answers only {passed} right, so its verdicts may not mean "
            f"what they are read as. It said: {shorten(redact(judge_text), 200)}. Compare it with "
            f"labels (`{ppo('reward calibrate')}`), or try another --rm_model."
        )

    async def _ask_checks(self, checks: Sequence[FormatCheck]) -> list[Verdict | BaseException]:
        calls = (self._connection.direct.ask(check.question) for check in checks)
        return await asyncio.gather(*calls, return_exceptions=True)

    def set_labelled(self, labelled: Mapping[str, LabelledRollouts]) -> None:
        """Take the labelled responses of the file that the settings name."""
        if (file := self._api.monitor.labels) is not None:
            self._observer.watch_labelled(labelled[file], self._rejudge)

    def begin_step(self, step: int) -> None:
        """Test the judge with empty replies and labelled responses when that is due."""
        if (reading := self._observer.begin_step(step)) is not None:
            self._loop.submit(reading)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Ask the judge at once, and return the future score."""
        entry = PendingScore(rollout)
        self._round.add(entry, self._loop.submit(self._judge_new(entry)))
        # Canaries go with the first prompt of a step in which they are due.
        for text in CANARY_REPLIES if self._observer.canaries.pop_due() else ():
            question = self._question(rollout.prompt, text)
            self._loop.submit(self._observer.canaries.ask(question))
        return entry.future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Close the step: failed verdicts are asked for again, then masked, or stop the run."""
        self._validating = kind == "validation"
        # Responses submitted from now on belong to the next round.
        ended, self._round = self._round, self._new_round()
        if ended.entries:
            self._loop.submit(ended.finish())

    def waiting_for(self) -> str | None:
        """Return what the judge is waiting for, or None while verdicts come in."""
        batch = self._connection.batch
        jobs = None if batch is None else batch.waiting_for()
        return self._policy.waiting_message or jobs or self._connection.client.waiting_for()

    def repeat(self, rollout: Rollout, votes: int) -> Future[list[Score]]:
        """Ask for several fresh verdicts on one response, past the cache."""
        return self._loop.submit(self._repeat(rollout, votes))

    def pop_metrics(self) -> dict[str, float]:
        """Return the `judge/…` metrics since the last call; works after `close` too."""
        if self._closed:
            return asyncio.run(self._collect_metrics())
        return self._loop.call(self._collect_metrics(), timeout=60.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the first scores of the labelled responses."""
        labelled = self._observer.labelled
        return {} if labelled is None else {"labels": dict(labelled.first)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if self._observer.labelled is not None:
            self._observer.labelled.first |= state.get("labels", {})

    def attach(self, folder: Path) -> None:
        """Keep the calls in the run folder; each judge has its own file."""
        suffix = "" if self.name == "judge" else f"_{self.name}"
        self._connection.ledger.attach(folder / f"judge_calls{suffix}.jsonl")

    def close(self) -> None:
        """Let calls in flight finish, then free connections and the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call(self._close(), timeout=DRAIN_S + 10.0)
        finally:
            self._loop.close()
            self._connection.provider.stop_server()

    def _new_round(self) -> JudgingRound:
        return JudgingRound(self._policy, self._judge, self._is_judge_up)

    async def _judge_new(self, entry: PendingScore) -> None:
        """Score a new response: the lowest score without a call when it has no content."""
        empty = self._gate_reason(entry.rollout, self._visible_text(entry.rollout))
        if empty:
            self._observer.report.gated += 1
            entry.future.set_result(gated_score(empty, self.template.scale))
            return
        await self._judge(entry)

    async def _judge(self, entry: PendingScore) -> None:
        """Ask for the score of an entry; on failure note the error and leave the entry open."""
        # One request per vote.
        questions = [
            self._question(entry.rollout.prompt, self._visible_text(entry.rollout), vote)
            for vote in range(self._api.votes)
        ]
        answers = await asyncio.gather(
            *(self._ask_verdict(entry.rollout, question) for question in questions),
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
        self._observer.report.add(entry.rollout, score)
        self._last_judged = questions[0]
        # The second judge reads a share; its verdict is filled into `info` later.
        monitor = self._observer.monitor
        if monitor is not None and monitor.wants(entry.rollout):
            info = {**score.info, **MONITOR_PENDING}
            monitor.begin(questions[0], float(score.value or 0.0), info)
            score = replace(score, info=info)
        entry.future.set_result(score)

    async def _ask_verdict(
        self, rollout: Rollout, question: Question, *, fresh: bool = False
    ) -> Verdict:
        """Return one verdict; with one call per criterion, merged from their verdicts."""
        rubric, vote = question.rubric, question.vote
        if rubric is None or self._api.rubric_calls == "one":
            return await self._connection.client.ask(question, fresh=fresh)
        # `rubric_calls: each`: one request per criterion.
        seen = self._visible_text(rollout)
        parts = [
            self._question(rollout.prompt, seen, vote, criterion)
            for criterion in rubric.split_criteria()
        ]
        answers = await asyncio.gather(
            *(self._connection.client.ask(part, fresh=fresh) for part in parts),
            return_exceptions=True,
        )
        verdicts, error = split_answers(answers)
        if error is not None:
            raise error
        return merge_criteria(verdicts, rubric)

    async def _is_judge_up(self) -> bool:
        """Return whether the judge still answers a question that it answered before."""
        if self._last_judged is None:
            return False
        try:
            async with asyncio.timeout(self._api.timeout):
                await self._connection.client.ask(self._last_judged, fresh=True)
        except (JudgeError, TimeoutError):
            return False
        return True

    async def _rejudge(self, rollout: Rollout) -> float:
        """Return a fresh score in [0, 1]."""
        question = self._question(rollout.prompt, self._visible_text(rollout))
        verdict = await self._ask_verdict(rollout, question, fresh=True)
        return question.scale.scaled(verdict.value)

    async def _repeat(self, rollout: Rollout, votes: int) -> list[Score]:
        """Return the scores of several fresh verdicts on one response."""
        seen = self._visible_text(rollout)
        questions = [self._question(rollout.prompt, seen, vote) for vote in range(votes)]
        answers = await asyncio.gather(
            *(self._ask_verdict(rollout, question, fresh=True) for question in questions),
            return_exceptions=True,
        )
        pairs = [
            score_from_votes([answer], question)
            for answer, question in zip(answers, questions, strict=True)
        ]
        return [score or Score.failed(str(error)) for score, error in pairs]

    def _visible_text(self, rollout: Rollout) -> str:
        """Return what the judge sees of a response, before it is shortened."""
        reasoning = self._api.reasoning
        return visible_text(
            rollout.answer if reasoning == "strip" else rollout.full_text, reasoning
        )

    def _gate_reason(self, rollout: Rollout, text: str) -> str | None:
        """Return why a response gets the lowest score without a call; `text` is what it sees."""
        if not self._api.gate:
            return None
        # A response that never left its thought has no answer.
        if rollout.unclosed and not text:
            return NO_ANSWER
        return no_content_reason(rollout.prompt.text, text, rollout.prompt.ground_truth)

    def _question(
        self, prompt: Prompt, response: str, vote: int = 0, rubric: Rubric | None = None
    ) -> Question:
        """Build the request for one response."""
        material = build_material(prompt, response)
        rubric = rubric or self._read_rubric(material)
        return self.template.question(material, self._api, vote=vote, rubric=rubric)

    async def _collect_metrics(self) -> dict[str, float]:
        connection = self._connection
        return self._observer.pop_metrics(
            connection.client.pop_counters(), connection.ledger, validating=self._validating
        )

    async def _close(self) -> None:
        await self._connection.close()
        await self._observer.close()
        # Last, since the second judge writes to the cache too.
        if self._connection.cache is not None:
            self._connection.cache.close()
