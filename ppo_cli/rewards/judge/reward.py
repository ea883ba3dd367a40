"""The reward that asks an LLM judge: rollouts in, scores on [0, 1] out.

Everything that waits runs on one background event loop. A response that got no verdict is held
back until the step is settled, so that a judge that failed too often is asked again for just
those; see `rounds`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.errors import PpoError
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.rewards.judge.cache import VerdictCache, cache_path, key_of
from ppo_cli.rewards.judge.client import JudgeClient
from ppo_cli.rewards.judge.exchange import JudgeError, Question
from ppo_cli.rewards.judge.gate import content_free
from ppo_cli.rewards.judge.ledger import Ledger
from ppo_cli.rewards.judge.limits import Limits
from ppo_cli.rewards.judge.loop_thread import LoopThread
from ppo_cli.rewards.judge.prices import find_price
from ppo_cli.rewards.judge.providers import Endpoint, build_provider
from ppo_cli.rewards.judge.report import StepReport
from ppo_cli.rewards.judge.rounds import Entry, Round, Rules
from ppo_cli.rewards.judge.scoring import gated_score, material_of, score_of, worthless
from ppo_cli.rewards.judge.start import try_out
from ppo_cli.rewards.judge.template import load_template, readable
from ppo_cli.rewards.judge.watch import Canaries, Monitor

REFUSALS = 3  # prompts that may be refused before the start asks no more
DRAIN_S = 20.0  # what calls under way get to finish when a run ends: they are paid for


class JudgeReward(Reward):
    """Scores by the verdicts of one judge; see ApiReward for every setting.

    Verdicts are in the cache and the spending in its own file: a checkpoint keeps nothing.
    """

    def __init__(
        self, api: ApiReward, *, name: str = "judge", environ: Mapping[str, str] = os.environ
    ) -> None:
        self.name = name
        self._api = api
        self.template = load_template(api)
        provider = build_provider(Endpoint.of(api), environ=environ)
        self._ledger = Ledger(
            find_price(api),
            budget_usd=api.budget_usd,
            budget_tokens=api.budget_tokens,
            provider=api.type,
            model=provider.model,
        )
        path = cache_path(api, environ)
        self._cache = None if path is None else VerdictCache(path)
        limits = Limits.of(api)
        self._client = JudgeClient(provider, limits=limits, ledger=self._ledger, cache=self._cache)
        self._provider = provider
        self._report = StepReport()
        self._canaries = Canaries(self._client, every=api.canary_every)
        self._monitor = Monitor.of(
            api, environ=environ, limits=limits, ledger=self._ledger, cache=self._cache
        )
        self._rules = Rules(api.on_failure, api.max_failure_rate, api.outage_wait)
        self._loop = LoopThread()
        self._judged_before: Question | None = None
        self._closed = False
        self._round = self._new_round()

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        patient: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Check the template against the rows, and key, model and reply format by one call.

        The call is not repeated while its verdict is in the cache: a run whose verdicts are
        all paid for costs nothing.
        """
        self.template.check([material_of(prompt, "") for prompt in prompts])
        if not prompts:
            return
        self._try_out(prompts, patient=patient, tell=tell)
        if self._monitor is not None:
            self._loop.call(
                self._monitor.try_out(self._question(prompts[0], "I do not know."), tell)
            )
        for name, told in self._provider.dropped().items():
            tell(f"{self._api.model} does not take {name} ({told}); the judge runs without it.")

    def _try_out(
        self, prompts: Sequence[Prompt], *, patient: bool, tell: Callable[[str], None]
    ) -> None:
        """Ask about the first prompt; about another one when the judge will not judge it."""
        error: JudgeError | None = None
        for prompt in prompts[:REFUSALS]:
            question = self._question(prompt, str(prompt.ground_truth or "I do not know."))
            try:
                if self._cache is None:
                    try_out(self._loop, self._client, question, self._api, patient, tell)
                    return
                key = key_of(self._provider.identity, question)
                if self._cache.get(key) is None:
                    probe = try_out(self._loop, self._client, question, self._api, patient, tell)
                    self._cache.put(key, probe)
                return
            except JudgeError as refusal:
                error = refusal
        tell(f"The judge answers, but would not judge the first prompts ({error}).")

    def begin_step(self, step: int) -> None:
        """Test the judge with worthless replies when that is due."""
        self._canaries.begin_step(step)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Ask the judge, at once and without waiting."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        entry = Entry(rollout)
        self._round.add(entry, self._loop.submit(self._first(entry)))
        if self._canaries.due:
            for question in self._canary_questions(rollout.prompt):
                self._loop.submit(self._canaries.ask(question))
        return entry.future

    def settle(self, kind: RoundKind = "train") -> None:
        """Close the step: failed verdicts are asked for again, masked or stop the run."""
        done, self._round = self._round, self._new_round()
        if done.entries:
            self._loop.submit(done.finish())

    def waiting_for(self) -> str | None:
        """Say what the judge is waiting for, when it stands still."""
        return self._rules.standing_still or self._client.waiting_for()

    def repeat(self, rollout: Rollout, votes: int) -> Future[list[Score]]:
        """Ask for several fresh verdicts on one response, past the cache."""
        return self._loop.submit(self._repeat(rollout, votes))

    def measure(self) -> dict[str, float]:
        """`judge/…` metrics since the last call."""
        return self._loop.call(self._measure(), timeout=60.0)

    def attach(self, folder: Path) -> None:
        """Keep a line for each paid call in the run's folder; each judge has a file of its own."""
        which = "" if self.name == "judge" else f"_{self.name}"
        self._loop.call(self._attach(folder / f"judge_calls{which}.jsonl"), timeout=60.0)

    def close(self) -> None:
        """Let paid calls finish, then free connections and the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            self._loop.call(self._close(), timeout=DRAIN_S + 10.0)
        finally:
            self._loop.close()

    def _new_round(self) -> Round:
        return Round(self._rules, self._judge, self._answers_at_all)

    async def _first(self, entry: Entry) -> None:
        """Judge a fresh response: by the gate when it has no content, else by the judge."""
        prompt, text = entry.rollout.prompt, readable(entry.rollout.text, self._api.reasoning)
        empty = self._api.gate and content_free(prompt.text, text, prompt.ground_truth)
        if empty:
            score = gated_score(empty, self.template.scale)
            self._report.note_gated()
            entry.future.set_result(score)
            return
        await self._judge(entry)

    async def _judge(self, entry: Entry) -> None:
        """Bring an entry's future to its score, or leave it open with what went wrong."""
        questions = [
            self._question(entry.rollout.prompt, entry.rollout.text, vote)
            for vote in range(self._api.votes)
        ]
        answers = await asyncio.gather(
            *(self._client.ask(question) for question in questions), return_exceptions=True
        )
        try:
            score, error = score_of(answers, self.template.scale)
        except PpoError as stop:
            entry.future.set_exception(stop)
            return
        entry.error = error
        if score is None:
            return
        self._report.note(entry.rollout, score)
        self._judged_before = questions[0]
        entry.future.set_result(score)
        if self._monitor is not None and self._monitor.wants(entry.rollout):
            self._monitor.begin(questions[0], score)

    async def _answers_at_all(self) -> bool:
        """Ask again about something that was judged before: is it the judge, or the texts?"""
        if self._judged_before is None:
            return False
        try:
            async with asyncio.timeout(self._api.timeout):
                await self._client.ask(self._judged_before, fresh=True)
        except (JudgeError, TimeoutError):
            return False
        return True

    async def _repeat(self, rollout: Rollout, votes: int) -> list[Score]:
        scores = []
        for vote in range(votes):
            question = self._question(rollout.prompt, rollout.text, vote)
            answer = await asyncio.gather(
                self._client.ask(question, fresh=True), return_exceptions=True
            )
            score, error = score_of(answer, self.template.scale)
            scores.append(score or Score.failed(str(error)))
        return scores

    def _question(self, prompt: Prompt, response: str, vote: int = 0) -> Question:
        api = self._api
        return self.template.question(
            material_of(prompt, response),
            vote=vote,
            max_tokens=api.max_tokens,
            reasoning=api.reasoning,
            max_response_chars=api.max_response_chars,
        )

    def _canary_questions(self, prompt: Prompt) -> list[Question]:
        self._canaries.due = False
        return [self._question(prompt, text) for text in worthless()]

    async def _measure(self) -> dict[str, float]:
        metrics = self._report.take(self._client.counters.take(), self._ledger)
        metrics |= self._canaries.take(self.template.scale)
        return metrics | (self._monitor.take() if self._monitor else {})

    async def _attach(self, path: Path) -> None:
        self._ledger.attach(path)

    async def _close(self) -> None:
        await self._client.close(DRAIN_S)
        if self._monitor is not None:
            await self._monitor.close()
        if self._cache is not None:
            self._cache.close()
