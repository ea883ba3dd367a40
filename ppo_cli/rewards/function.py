"""The rewards that run functions: the built-in rules, and what a user wrote.

Text is compared at once; algebra, and `compute_score` from a user's Python file, are for worker
processes; code is for sandboxes.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ppo_cli.errors import RewardError, did_you_mean
from ppo_cli.records import Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import (
    STEPS,
    TOKENS,
    Call,
    Reward,
    Tell,
    describe_error,
    read_returned,
    tell_nobody,
)
from ppo_cli.rewards.pool import Refused, Task, WorkerPool, place_in
from ppo_cli.rewards.rules import RULES, Rule, answer_now, check_prompts, rule_for
from ppo_cli.thoughts import NO_ANSWER

if TYPE_CHECKING:
    from ppo_cli.config.schema.reward import Code
    from ppo_cli.rewards.code.check import CodePool

DEFAULT_NAME = "compute_score"
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
SIGNATURE = f"{DEFAULT_NAME}(data_source, solution_str, ground_truth, extra_info=None)"


class FunctionReward(Reward):
    """Scores with the user's function; whatever it does, the run goes on."""

    name = "function"

    def __init__(
        self,
        spec: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        num_workers: int = 2,
    ) -> None:
        path, function = find_file(spec)
        check_source(path, function, kwargs or {})
        load = partial(load_function, str(path), function, dict(kwargs or {}))
        task = Task(f"the reward function file {path}", load)
        self._pool = WorkerPool(task, size=num_workers, timeout=timeout)
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Hand one rollout to a worker."""
        prompt = rollout.prompt
        call = Call(prompt.data_source, rollout.text, prompt.ground_truth, dict(prompt.extra_info))
        return self._pool.submit(call, partial(_checked, rollout))

    def close(self) -> None:
        """Stop the workers."""
        self._pool.close()


def _checked(rollout: Rollout, score: Score) -> Score:
    """The score, or a failure where its rewards cannot be placed in the response."""
    tokens, count = sum(s.unit == "token" for s in score.steps), len(rollout.token_ids)
    ends = rollout.finish_reason == "stop"  # its last token is the end of the sequence
    length = len(rollout.text)
    chars = [step.end for step in score.steps if step.unit == "char"]
    past = next((end for end in chars if not 0 < end <= length), None)
    if tokens and tokens not in ((count - 1, count) if ends else (count,)):
        length_note = f"{count} tokens" + (", its end token included" if ends else "")
        wrong = f"{tokens} {TOKENS} for a response of {length_note}"
    elif past is not None:
        wrong = f"{STEPS} with offset {past}, outside the response's 1 to {length} characters"
    else:
        return score
    return Score(None, f"returned {wrong}", info=score.info)


def find_file(spec: str) -> tuple[Path, str]:
    """Split FILE[:NAME] and make sure that the file is there."""
    file, _, name = spec.rpartition(":")
    if not file or os.sep in name or name.endswith(".py"):
        file, name = spec, DEFAULT_NAME
    path = Path(file).expanduser()
    if not name.isidentifier():
        raise RewardError(
            f"--reward_function {spec}: {name!r} cannot be a function's name. "
            "Write FILE.py:NAME, or FILE.py for compute_score."
        )
    if path.is_dir():
        raise RewardError(f"--reward_function {spec}: {path} is a folder; name the Python file.")
    if not path.is_file():
        raise RewardError(f"--reward_function {spec}: there is no file {path}.{_near(path)}")
    return path.resolve(), name


def _near(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix == ".py"]
    except OSError:
        return f" The folder {path.parent} does not exist either."
    return did_you_mean(path.name, names)


def check_source(path: Path, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raise RewardError for a file that is not Python, or whose function surely is not usable.

    Nothing of the file runs. Whatever only running it would show is left to the worker.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        shown = f": {line}" if line else ""
        raise RewardError(
            f"The reward function file {path} is not valid Python: line {error.lineno}: "
            f"{error.msg}{shown}"
        ) from error
    except (OSError, ValueError) as error:
        raise RewardError(f"The reward function file {path} cannot be read: {error}") from error
    bindings = [node for node in tree.body if name in _bound_names(node)]
    if not bindings and not _binds_at_run_time(tree):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = [node.name for node in tree.body if isinstance(node, kinds)]
        raise RewardError(_no_function(str(path), name, names))
    if len(bindings) != 1:
        return
    node = bindings[0]
    try:
        if isinstance(node, ast.ClassDef):
            _check_kind(type, str(path), name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            _check_kind(node.value.value, str(path), name)
        elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
            _check_signature(_without_body(node, path), str(path), name, kwargs)
    except Refused as error:
        raise RewardError(str(error)) from error


def _bound_names(node: ast.AST) -> set[str]:
    """Return the names that a statement binds in its own scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Lambda):
        return set()
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return set().union(*map(_bound_names, ast.iter_child_nodes(node)))


BINDING_CALLS = ("globals", "vars", "locals", "exec", "setattr")


def _binds_at_run_time(tree: ast.Module) -> bool:
    """Tell whether a file may bind names that its text does not show."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) or (isinstance(node, ast.alias) and node.name == "*"):
            return True
        if isinstance(node, ast.Name) and node.id in BINDING_CALLS:
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
    return False


def _without_body(node: ast.FunctionDef, path: Path) -> Callable[..., Any]:
    """Return a function with the arguments of a definition, which does nothing."""
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    # A default is code; only that there is one counts, and constants are shown as they are.
    arguments.defaults = [_constant(value) for value in arguments.defaults]
    arguments.kw_defaults = [value and _constant(value) for value in arguments.kw_defaults]
    node.body, node.returns = [ast.copy_location(ast.Pass(), node)], None
    namespace: dict[str, Any] = {}
    module = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(module, str(path), "exec"), namespace)
    function: Callable[..., Any] = namespace[node.name]
    return function


def _constant(default: ast.expr) -> ast.expr:
    constant = default if isinstance(default, ast.Constant) else ast.Constant(None)
    return ast.copy_location(constant, default)


def load_function(file: str, name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Import the file and return the function, its extra keyword arguments bound.

    Runs in a worker: the trainer itself never imports the file. Raises `Refused`.
    """
    function = _pick(_import(file), file, name)
    _check_signature(function, file, name, kwargs)
    return partial(function, **kwargs) if kwargs else function


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
        values = {n: v for n, v in vars(module).items() if callable(v)}
        names = [n for n, v in values.items() if getattr(v, "__module__", "") == module.__name__]
        raise Refused(_no_function(file, name, names))
    function = getattr(module, name)
    _check_kind(function, file, name)
    checked: Callable[..., Any] = function
    return checked


def _no_function(file: str, name: str, names: Sequence[str]) -> str:
    """Say that a file lacks the function, and which ones it has."""
    names = [other for other in names if not other.startswith("_")]
    hint = did_you_mean(name, names)
    listed = f" It has: {', '.join(names[:10])}." if names else " It has no functions at all."
    mend = " Write --reward_function FILE:NAME with one of them."
    if name == DEFAULT_NAME:
        mend = f" Define {SIGNATURE}, or choose one with FILE:NAME."
    return f"The reward function file {file} has no '{name}'.{hint}{listed}{mend}"


def _check_kind(value: object, file: str, name: str) -> None:
    """Refuse what is not a function."""
    if not callable(value) or inspect.isclass(value):
        kind = "a class" if inspect.isclass(value) else f"of type {type(value).__name__}"
        raise Refused(f"'{name}' in {file} is {kind}, not a function. Define {SIGNATURE}.")


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
        # Settings come with it, and workers of a user's function do without.
        from ppo_cli.config.schema.reward import Code
        from ppo_cli.rewards.code.check import CodePool

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
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
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
        text = rollout.whole if rule.reads_thoughts else rollout.answer
        extra_info = {"question": prompt.text, **prompt.extra_info}
        call = Call(prompt.data_source, text, prompt.ground_truth, extra_info)
        score = answer_now(rule, call, self._settings)
        if (
            not rule.reads_thoughts
            and not text
            and rollout.unclosed
            and not (score and score.failure)
        ):
            score = read_returned({"score": 0.0, "extracted": None, "reason": NO_ANSWER})
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
            names = ", ".join(rule.settings) or "none"
            hint = did_you_mean(name, rule.settings)
            raise RewardError(
                f"reward.function_kwargs.{name}: the rule {rule.name} has no such setting.{hint} "
                f"Known: {names}."
            )
