"""The reward by rule: built-in functions that compare a response with the ground truth.

Rules that compare text answer immediately. Algebra runs in worker processes, code in sandboxes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ppo_cli.config.schema.reward import Code
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import (
    Call,
    Reward,
    Tell,
    describe_episode,
    read_returned,
    resolved,
    tell_nobody,
)
from ppo_cli.rewards.faults import place_loss
from ppo_cli.rewards.rules import (
    RULES,
    Rule,
    check_prompts,
    find_rule,
    get_rule,
    runs_code,
    score_immediately,
)
from ppo_cli.thoughts import NO_ANSWER

if TYPE_CHECKING:
    from ppo_cli.rewards.code.check import CodePool
    from ppo_cli.rewards.pool import WorkerPool

# Limits of one comparison in a worker: sympy may take for ever, or all memory.
CPU_SECONDS = 3.0
MAX_MEMORY_BYTES = 4 << 30


def load_rule_function(name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a rule's function for worker processes (`Rule.in_worker`) with `settings` bound.

    What rules import does not count as time of a call: the algebra of `math` is called once here.
    """
    score_rule = get_rule(name).in_worker
    assert score_rule is not None

    def compute_score(solution_str: str, ground_truth: Any, extra_info: Any, **_: Any) -> Any:
        return score_rule(solution_str, ground_truth, extra_info, **settings)

    if name == "math":
        score_rule(r"\boxed{\frac{2}{4}}", "0.5", {})
    if name == "reasoning_gym":
        importlib.import_module(name)
    return compute_score


class RuleReward(Reward):
    """Scores by rule: compares texts immediately, sends algebra to workers, code to sandboxes.

    `rule` serves every row; without it each row's data_source selects one. `timeout` is in
    seconds of wall time, `cpu_seconds` of the worker's processor time; `code` has the limits of
    the rule `code`. `place`: what a response loses is placed where it goes wrong, if that is known.
    """

    name = "rule"

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        num_workers: int = 2,
        cpu_seconds: float = CPU_SECONDS,
        code: Code | None = None,
        place: bool = False,
    ) -> None:
        self._rule = rule
        self._settings = dict(settings or {})
        self._timeout = timeout
        self._num_workers = num_workers
        self._cpu_seconds = cpu_seconds
        self._code = code
        self._place = place
        self._pools: dict[str, WorkerPool | CodePool] = {}
        self._closed = False

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Choose the sandbox if the prompts need one.

        Raises RewardError when no sandbox works, or when a rule can score none of its prompts.
        """
        check_prompts(self._rule, self._settings, prompts)
        if runs_code(self._rule, prompts):
            cast("CodePool", self._pool(RULES["code"])).start(tell)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Score one rollout; most rules have the score before this returns."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        prompt = rollout.prompt
        rule = self._rule or find_rule(prompt.data_source)
        if rule is None:
            return resolved(Score.failed(f"no rule for data_source {prompt.data_source!r}"))
        text = rollout.full_text if rule.reads_thoughts else rollout.answer
        extra_info = {"question": prompt.text, **prompt.extra_info, **describe_episode(rollout)}
        call = Call(prompt.data_source, text, prompt.ground_truth, extra_info)
        score = score_immediately(rule, call, self._settings)
        # A response that ends inside its thought has no answer, even if the rule accepts "".
        if (
            not rule.reads_thoughts
            and not text
            and rollout.unclosed
            and not (score and score.failure)
        ):
            score = read_returned({"score": 0.0, "extracted": None, "reason": NO_ANSWER})
        if score is None:
            return self._pool(rule).submit(call, partial(self._complete, rule, rollout))
        return resolved(self._complete(rule, rollout, score))

    def _complete(self, rule: Rule, rollout: Rollout, score: Score) -> Score:
        """Return a score with the name of its rule, placed at a fault of the response if asked."""
        # Without the latency, so that the same rollout gives the same record.
        info = {k: v for k, v in score.info.items() if k != "latency_s"} | {"rule": rule.name}
        value = score.value
        parts = {} if value is None else {rule.name: Part(raw=value, scaled=value)}
        score = replace(score, parts=parts, info=info)
        if not self._place or rule.find_fault is None or value is None or value >= 1:
            return score
        text = rollout.full_text
        for thought in rollout.thoughts:
            text = text[: thought.start] + " " * (thought.end - thought.start) + text[thought.end :]
        fault = rule.find_fault(text[len(rollout.prompt.opened) :], score)
        return place_loss(score, rollout.text, fault) if fault else score

    def _pool(self, rule: Rule) -> WorkerPool | CodePool:
        """Return the processes for a rule, created on first use: sandboxes for code, or workers."""
        if rule.name in self._pools:
            return self._pools[rule.name]
        pool: WorkerPool | CodePool
        if rule.in_worker is None:
            from ppo_cli.rewards.code.check import CodePool

            pool = CodePool(self._code or Code(), size=self._num_workers)
        else:
            from ppo_cli.rewards.pool import WorkerPool
            from ppo_cli.rewards.worker import Task

            load = partial(load_rule_function, rule.name, self._settings)
            task = Task(f"the rule {rule.name}", load, self._cpu_seconds, MAX_MEMORY_BYTES)
            pool = WorkerPool(task, size=self._num_workers, timeout=self._timeout)
        self._pools[rule.name] = pool
        return pool

    def close(self) -> None:
        """Stop the workers."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()
