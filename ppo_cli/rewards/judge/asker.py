"""One judge and what it is asked: the question about a response, its votes, the first calls.

The judge of a reward and the cheaper judge of a cascade are both askers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, TypeVar

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import RewardError, ppo, shorten
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.base import Tell
from ppo_cli.rewards.judge.calls import (
    JudgeError,
    Question,
    Verdict,
    merge_criteria,
    needs_vote,
    score_from_votes,
    split_answers,
)
from ppo_cli.rewards.judge.client import judge_label
from ppo_cli.rewards.judge.connection import JudgeConnection
from ppo_cli.rewards.judge.format_check import FormatCheck, format_checks, wish_question
from ppo_cli.rewards.judge.placing import request_places, show_example, show_response
from ppo_cli.rewards.judge.prompt import (
    build_material,
    check_rows,
    load_template,
    rubric_reader,
)
from ppo_cli.rewards.judge.rubric import Rubric
from ppo_cli.rewards.judge.sanitise import no_content_reason
from ppo_cli.rewards.judge.visible import Response, written_text
from ppo_cli.secrets.redact import redact
from ppo_cli.thoughts import NO_ANSWER

MAX_REFUSED_PROMPTS = 3  # prompts that the judge may refuse before the start asks no more
UNREAD = "Only the words of the prompts and rubrics count."
UNKNOWN_ANSWER = "I do not know."  # the response of test questions without a reference

T = TypeVar("T")


class JudgeAsker:
    """Asks one judge about responses, on the event loop of its reward."""

    def __init__(self, api: ApiReward, connection: JudgeConnection, loop: LoopThread) -> None:
        self._api = api
        self.template = load_template(api)
        self._read_rubric = rubric_reader(api)
        self.connection = connection
        self._loop = loop
        self._last_judged: Question | None = None

    def check_rows(self, prompts: Sequence[Prompt]) -> None:
        """Raise RewardError for rows that lack what the prompt asks for."""
        check_rows(self._api, self.template, prompts)

    def try_out(self, prompts: Sequence[Prompt], *, patient: bool, tell: Tell) -> None:
        """Show by first calls that key, model and reply format are right, and check the answers.

        The first prompts are asked about while the judge refuses, and after prompts that exceed its
        context the shortest one: if even that does not fit, the judge cannot be used.
        """
        error: JudgeError | None = None
        _, shortest = min((len(prompt.text), number) for number, prompt in enumerate(prompts))
        for number in (*range(len(prompts))[:MAX_REFUSED_PROMPTS], shortest):
            if number == shortest and error is not None and error.cause != "too_long":
                break
            # In pieces, as training will ask: the judge shows that it can score them.
            prompt = prompts[number]
            answer = str(prompt.ground_truth or UNKNOWN_ANSWER)
            question = self.question(prompt, show_example(answer, self._api, UNKNOWN_ANSWER))
            try:
                self.connection.test_question(
                    question, self._api, self._loop, patient=patient, tell=tell
                )
                error = None
                break
            except JudgeError as refusal:
                error = refusal
        if error is not None and error.cause == "too_long":
            raise RewardError(f"The judge cannot be used ({error.summary})") from error
        if error is not None:
            tell(f"The judge answers, but would not judge the first prompts ({error}).")
        if self._api.canary_every:
            self.check_format(tell)
        # Parameters that the model rejected in the calls above.
        for name, why in self.connection.provider.dropped().items():
            tell(f"{self._api.model} does not take {name} ({why}); the judge runs without it.")

    def check_format(self, tell: Tell) -> None:
        """Ask questions with known answers, and warn about a judge that gets one wrong."""
        checks = format_checks(self._api, self.template)
        if not checks:
            return
        answers = self._wait_for(self._ask_checks(checks), tell)
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

    def read_wishes(
        self, text: str, features: Sequence[str], tell: Tell
    ) -> Mapping[str, int] | None:
        """Ask of which features a text wants more (1) or less (-1); nothing if that is unclear."""
        if not self._api.canary_every:
            return None
        question = wish_question(self._api, text, features)
        try:
            verdict = self._wait_for(self.connection.direct.ask(question), tell)
        except JudgeError as error:
            tell(f"The judge does not say which features the reward asks for ({error}). {UNREAD}")
            return {}
        signs = [round(2 * grade) - 1 for grade in verdict.info["grades"]]
        wishes = {feature: s for feature, s in zip(features, signs, strict=True) if s}
        if 2 * len(wishes) > len(features):
            tell(f"The judge says that most features are asked for, which is implausible. {UNREAD}")
            return {}
        if wishes:
            named = (f"{'more' if sign > 0 else 'less'} {f}" for f, sign in wishes.items())
            tell(f"The reward asks for this, as the judge reads it: {', '.join(named)}.")
        return wishes

    def _wait_for(self, asking: Coroutine[Any, Any, T], tell: Tell) -> T:
        """Return the result of calls; a pause of the judge is told once."""
        future, shown = self._loop.submit(asking), False
        while not wait([future], timeout=0.5).done:
            if not shown and (reason := self.connection.direct.waiting_for()) is not None:
                tell(reason)
                shown = True
        return future.result()

    async def _ask_checks(self, checks: Sequence[FormatCheck]) -> list[Verdict | BaseException]:
        calls = (self.connection.direct.ask(check.question) for check in checks)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def ask_score(
        self, rollout: Rollout, first: Question | None = None
    ) -> tuple[Score | None, JudgeError | None]:
        """Return the score of a response; None and the error if the judge gave no verdict.

        `first` is the request for the first vote, if it is there already.
        """
        # One request per vote; then further ones, until one verdict has a majority.
        votes, seen = self._api.votes, self._visible(rollout)
        questions = [
            (None if vote else first) or self.question(rollout.prompt, seen, vote)
            for vote in range(self._api.max_votes)
        ]
        answers: list[Verdict | BaseException] = []
        while len(answers) < len(questions) and (not answers or needs_vote(answers)):
            next_questions = (
                questions[len(answers) : len(answers) + 1] if answers else questions[:votes]
            )
            answers += await asyncio.gather(
                *(self._ask_verdict(rollout, question) for question in next_questions),
                return_exceptions=True,
            )
        score, error = score_from_votes(answers, questions[0])
        if score is not None:
            self._last_judged = questions[0]
        return score, error

    async def is_up(self) -> bool:
        """Return whether the judge still answers a question that it answered before.

        False if it has not scored any response yet.
        """
        if self._last_judged is None:
            return False
        try:
            async with asyncio.timeout(self._api.timeout):
                await self.connection.client.ask(self._last_judged, fresh=True)
        except (JudgeError, TimeoutError):
            return False
        return True

    async def _ask_verdict(
        self, rollout: Rollout, question: Question, *, fresh: bool = False
    ) -> Verdict:
        """Return one verdict; with one call per criterion, merged from their verdicts."""
        rubric, vote = question.rubric, question.vote
        if rubric is None or self._api.rubric_calls == "one":
            verdict = await self.connection.client.ask(question, fresh=fresh)
            if rubric is None or not rubric.places:
                return verdict
            # Votes may have been asked in other orders.
            each = ("grades", "quotes") if rubric.quoted else ("grades",)
            ordered = {name: rubric.in_order(verdict.info[name]) for name in each}
            return replace(verdict, info={**verdict.info, **ordered})
        # `rubric_calls: each`: one request per criterion.
        seen = self._visible(rollout)
        parts = [
            self.question(rollout.prompt, seen, vote, criterion)
            for criterion in rubric.split_criteria()
        ]
        answers = await asyncio.gather(
            *(self.connection.client.ask(part, fresh=fresh) for part in parts),
            return_exceptions=True,
        )
        verdicts, error = split_answers(answers)
        if error is not None:
            raise error
        return merge_criteria(verdicts, rubric)

    async def _repeat(self, rollout: Rollout, votes: int) -> list[Score]:
        """Return the scores of several fresh verdicts on one response."""
        seen = self._visible(rollout)
        questions = [self.question(rollout.prompt, seen, vote) for vote in range(votes)]
        answers = await asyncio.gather(
            *(self._ask_verdict(rollout, question, fresh=True) for question in questions),
            return_exceptions=True,
        )
        pairs = [
            score_from_votes([answer], question)
            for answer, question in zip(answers, questions, strict=True)
        ]
        return [score or Score.failed(str(error)) for score, error in pairs]

    def _visible(self, rollout: Rollout) -> Response:
        return show_response(rollout, self._api)

    def _gate_reason(self, rollout: Rollout, response: Response) -> str | None:
        """Return why a response gets the lowest score without a call."""
        if not self._api.gate:
            return None
        # A response that never left its thought has no answer.
        text = written_text(response)
        if rollout.unclosed and not text:
            return NO_ANSWER
        return no_content_reason(rollout.prompt.text, text, rollout.prompt.ground_truth)

    def question(
        self, prompt: Prompt, response: Response, vote: int = 0, rubric: Rubric | None = None
    ) -> Question:
        """Build the request for one response."""
        material = build_material(prompt, response)
        rubric = rubric or self._read_rubric(material)
        if (
            rubric is not None
            and self._api.rubric_order == "shuffled"
            and self._api.rubric_calls == "one"
        ):
            rubric = rubric.shuffle(f"{prompt.uid}/{vote}/{self._api.type}/{self._api.model}")
        placing = request_places(response, self._api, self.template.scale)
        return self.template.question(
            material, self._api, vote=vote, rubric=rubric, placing=placing
        )
