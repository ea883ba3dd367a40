"""The reward of rules and reward functions, and the tasks that its workers run."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_cli.config.reward_schema import Code
from ppo_cli.errors import RewardError, did_you_mean
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.code.check import CodePool
from ppo_cli.rewards.pool import WorkerPool
from ppo_cli.rewards.returned import Returned, describe_error
from ppo_cli.rewards.rules import RULES, Rule, answer_now, check_prompts, rule_for
from ppo_cli.rewards.worker import Call, Refused, place_in

DEFAULT_NAME = "compute_score"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURE = f"{DEFAULT_NAME}(data_source, solution_str, ground_truth, extra_info=None)"
CPU_SECONDS = 3.0
MOST_MEMORY = 4 << 30


@dataclass(frozen=True)
class RuleTask:
    """Run one rule in a worker, within limits that hold on a busy machine too."""

    rule: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    cpu_limit: float | None = CPU_SECONDS
    memory_limit: int | None = MOST_MEMORY

    @property
    def label(self) -> str:
        """What the task is, for messages."""
        return f"the rule {self.rule}"

    def load(self) -> Callable[..., Any]:
        """Return the rule, with its libraries loaded before the clock runs."""
        function = partial(RULES[self.rule].compute_score, **self.settings)
        if self.rule == "math":
            function(data_source="", solution_str=r"\boxed{\frac{2}{4}}", ground_truth="0.5")
        return function


@dataclass(frozen=True)
class FunctionTask:
    """Load one function of a user's file in a worker; the trainer itself never imports it."""

    file: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    cpu_limit: float | None = None
    memory_limit: int | None = None

    @property
    def label(self) -> str:
        """What the task is, for messages."""
        return f"the reward function file {self.file}"

    def load(self) -> Callable[..., Any]:
        """Import the file and return the function, its extra keyword arguments bound."""
        function = _pick(_import(self.file), self.file, self.name)
        _check_signature(function, self.file, self.name, self.kwargs)
        return partial(function, **self.kwargs) if self.kwargs else function


def _import(file: str) -> ModuleType:
    stem = Path(file).stem
    name = stem if stem.isidentifier() and stem not in sys.modules else f"reward_function_{stem}"
    loader = SourceFileLoader(name, file)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # As when the file is run as a script: its neighbours can be imported, classes be pickled.
    sys.path.insert(0, str(Path(file).parent))
    sys.modules[name] = module
    sys.dont_write_bytecode = True
    try:
        loader.exec_module(module)
    except BaseException as error:
        mend = ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            mend = f" Install {error.name.split('.')[0]!r} into this environment ({sys.prefix})."
        raise Refused(
            f"The reward function file {file} does not load: "
            f"{describe_error(error)}{place_in(error, file)}.{mend}"
        ) from error
    return module


def _pick(module: ModuleType, file: str, name: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        hint = did_you_mean(name, own)
        listed = f" It has: {', '.join(own[:10])}." if own else " It has no functions at all."
        wanted = f"Define {SIGNATURE}" if name == DEFAULT_NAME else "Write --reward_function"
        mend = (
            f" {wanted}, or choose one with FILE:NAME."
            if name == DEFAULT_NAME
            else (f" {wanted} FILE:NAME with one of them.")
        )
        raise Refused(f"The reward function file {file} has no '{name}'.{hint}{listed}{mend}")
    function = getattr(module, name)
    if not callable(function) or inspect.isclass(function):
        kind = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise Refused(f"'{name}' in {file} is {kind}, not a function. Define {SIGNATURE}.")
    found: Callable[..., Any] = function
    return found


def _check_signature(
    function: Callable[..., Any], file: str, name: str, kwargs: Mapping[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        line = f", line {code.co_firstlineno}" if code else ""
        extra = f" With reward.function_kwargs it also gets: {', '.join(kwargs)}." if kwargs else ""
        raise Refused(
            f"{name}{signature} in {file}{line} cannot be called with "
            f"{', '.join(ARGUMENTS)}: {error}. Write it as "
            f"{name}(data_source, solution_str, ground_truth, extra_info=None).{extra}"
        ) from error


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
        self._code = code or Code()
        self._pools: dict[str, WorkerPool | CodePool] = {}
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
            self._code_pool().start(tell)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Score one rollout; most rules answer before this returns."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        prompt = rollout.prompt
        rule = self._rule or rule_for(prompt.data_source)
        if rule is None:
            return _done(Score.failed(f"no rule for data_source {prompt.data_source!r}"))
        call = Call(prompt.data_source, rollout.text, prompt.ground_truth, dict(prompt.extra_info))
        finish = partial(_score, rule)
        returned = answer_now(rule, call, self._settings)
        return (
            self._pool(rule).submit(call, finish) if returned is None else _done(finish(returned))
        )

    def _code_pool(self) -> CodePool:
        pool = self._pools.setdefault("code", CodePool(self._code, size=self._num_workers))
        assert isinstance(pool, CodePool)
        return pool

    def _pool(self, rule: Rule) -> WorkerPool | CodePool:
        if rule.name == "code":
            return self._code_pool()
        if rule.name not in self._pools:
            task = RuleTask(rule.name, self._settings, self._cpu_seconds)
            self._pools[rule.name] = WorkerPool(task, size=self._num_workers, timeout=self._timeout)
        return self._pools[rule.name]

    def close(self) -> None:
        """Stop the workers."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()


def _done(score: Score) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(score)
    return future


def _score(rule: Rule, returned: Returned) -> Score:
    # How long it took stays out: the same rollout gives the same record.
    info = {k: v for k, v in returned.info.items() if k != "latency_s"} | {"rule": rule.name}
    value = returned.score
    parts = {} if value is None else {rule.name: Part(raw=value, scaled=value)}
    return Score(value, returned.failure, returned.reason, parts, info)


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
