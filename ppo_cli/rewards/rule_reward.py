"""The reward of rules: text is compared at once, algebra is for workers, code for sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from ppo_cli.config.reward_schema import Code
from ppo_cli.errors import RewardError, did_you_mean
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.code.check import CodePool
from ppo_cli.rewards.pool import WorkerPool
from ppo_cli.rewards.rules import RULES, Rule, answer_now, check_prompts, rule_for
from ppo_cli.rewards.worker import Call, Task

CPU_SECONDS = 3.0
MOST_MEMORY = 4 << 30


def load_slow(name: str, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the slow way of a rule, with its libraries loaded before the clock runs."""
    slow = RULES[name].slow
    assert slow is not None

    def compute_score(solution_str: str, ground_truth: Any, extra_info: Any, **_: Any) -> Any:
        return slow(solution_str, ground_truth, extra_info, **settings)

    if name == "math":
        slow(r"\boxed{\frac{2}{4}}", "0.5", {})
    return compute_score


class RuleReward(Reward):
    """Scores by rule: strings are compared at once, algebra goes to workers, code to sandboxes.

    `rule` serves every row; without it each row's data_source chooses. `timeout` is by the
    wall clock, `cpu_seconds` by the worker's own processor time; `code` limits the rule code.
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
    ) -> None:
        self._rule = rule
        self._settings = dict(settings or {})
        self._timeout = timeout
        self._num_workers = num_workers
        self._cpu_seconds = cpu_seconds
        self._code = CodePool(code or Code(), size=num_workers)
        self._pools: dict[str, WorkerPool] = {}
        self._closed = False
        _check_settings(rule, self._settings)

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        patient: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Choose the sandbox where prompts ask for code.

        RewardError when no sandbox works, or when no prompt of a rule can be scored.
        """
        check_prompts(self._rule, self._settings, prompts)
        if any((self._rule or rule_for(p.data_source)) is RULES["code"] for p in prompts):
            self._code.start(tell)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Score one rollout; most rules answer before this returns."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        prompt = rollout.prompt
        rule = self._rule or rule_for(prompt.data_source)
        if rule is None:
            return _done(Score.failed(f"no rule for data_source {prompt.data_source!r}"))
        call = Call(prompt.data_source, rollout.text, prompt.ground_truth, dict(prompt.extra_info))
        score = answer_now(rule, call, self._settings)
        if score is None:
            return self._pool(rule).submit(call, partial(_named, rule))
        return _done(_named(rule, score))

    def _pool(self, rule: Rule) -> WorkerPool | CodePool:
        if rule.slow is None:
            return self._code
        if rule.name not in self._pools:
            load = partial(load_slow, rule.name, self._settings)
            task = Task(f"the rule {rule.name}", load, self._cpu_seconds, MOST_MEMORY)
            self._pools[rule.name] = WorkerPool(task, size=self._num_workers, timeout=self._timeout)
        return self._pools[rule.name]

    def close(self) -> None:
        """Stop the workers."""
        self._closed = True
        self._code.close()
        for pool in self._pools.values():
            pool.close()


def _done(score: Score) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(score)
    return future


def _named(rule: Rule, score: Score) -> Score:
    # How long it took stays out: the same rollout gives the same record.
    info = {k: v for k, v in score.info.items() if k != "latency_s"} | {"rule": rule.name}
    value = score.value
    parts = {} if value is None else {rule.name: Part(raw=value, scaled=value)}
    return replace(score, parts=parts, info=info)


def _check_settings(rule: Rule | None, settings: Mapping[str, Any]) -> None:
    if not settings:
        return
    if rule is None:
        raise RewardError(
            "reward.function_kwargs belong to --reward_function FILE:NAME or --rule NAME, "
            "but neither is set."
        )
    for name in settings:
        if name not in rule.settings:
            known = ", ".join(rule.settings) or "none"
            hint = did_you_mean(name, rule.settings)
            raise RewardError(
                f"reward.function_kwargs.{name}: the rule {rule.name} has no such setting.{hint} "
                f"Known: {known}."
            )
