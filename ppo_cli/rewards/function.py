"""The reward that runs a user's `compute_score`, a function of a Python file, in workers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.machinery import PathFinder
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ppo_cli.errors import ConfigError, RewardError, UserError, did_you_mean
from ppo_cli.paths import user_path
from ppo_cli.processes.user_code import describe_error, error_line, import_file
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.base import (
    STEPS,
    TOKENS,
    BatchScore,
    Call,
    Reward,
    RoundKind,
    RunLength,
    Tell,
    describe_episode,
    tell_nobody,
)
from ppo_cli.rewards.forms import (
    ARGUMENTS,
    Form,
    Responses,
    adapt,
    describe_finish,
    describe_response,
    find_form,
    get_form,
    list_forms,
    prefer_columns,
)
from ppo_cli.rewards.pool import RUN_ENDED, WorkerPool
from ppo_cli.rewards.worker import Refused, Task

# The function's default name, as in verl.
DEFAULT_NAME = "compute_score"
ROW_COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info", "reward_model")
SIGNATURE = f"{DEFAULT_NAME}(data_source, solution_str, ground_truth, extra_info=None)"


class FunctionReward(Reward):
    """Scores with the user's function in worker processes; its errors are failed scores."""

    name = "function"

    def __init__(
        self,
        spec: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        num_workers: int = 2,
    ) -> None:
        path, function, module = find_function(spec)
        check_source(path, function, kwargs or {}, module)
        load = partial(load_function, str(path), function, dict(kwargs or {}), module)
        task = Task(f"the reward function file {path}", load)
        self._label = f"{module or path.name}:{function}"
        self._pool = WorkerPool(task, size=num_workers, timeout=timeout)
        try:
            ready = self._pool.start()
        except BaseException:
            self._pool.close()
            raise
        self._required = ready.required
        # Of a function for another trainer; None for our own form.
        self._form = get_form(ready.form) if ready.form else None
        self._step, self._length = 0, RunLength()
        self._round: list[tuple[Rollout, Future[Score]]] = []  # not yet scored

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Say whose form the function has; RewardError if the rows lack a column that it needs."""
        if self._form is None:
            return
        columns = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        self._form = prefer_columns(self._form, self._required, columns)
        tell(f"{self._label} is called as {self._form.name} does: {self._form.signature}.")
        missing = [n for n in self._required if n not in (*self._form.offered, *columns)]
        if missing and columns:
            raise RewardError(
                f"{self._label} needs {', '.join(missing)}, and the rows have no such column, only "
                f"{', '.join(columns)}. Rename the column, give the parameter a default, or set "
                f"reward.function_kwargs.{missing[0]}."
            )

    def begin_run(self, length: RunLength) -> None:
        """Remember the length of the run, over which functions for TRL change what they pay."""
        self._length = length

    def begin_step(self, step: int) -> None:
        """Remember the step, which functions for TRL read."""
        self._step = step

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Send one rollout to a worker; a function of several waits for the end of the round."""
        if self._form is not None:
            entry = rollout, Future[Score]()
            if self._form.unit == "response":
                self._call(self._form, [entry])
            else:
                self._round.append(entry)
            return entry[1]
        prompt = rollout.prompt
        columns = {k: v for k, v in prompt.columns.items() if k not in ROW_COLUMNS}
        facts = {**columns, **describe_finish(rollout)}
        extra_info = {**facts, **prompt.extra_info, **describe_episode(rollout)}
        call = Call(prompt.data_source, rollout.text, prompt.ground_truth, extra_info)
        return self._pool.submit(call, partial(check_placed_rewards, rollout))

    def end_round(self, kind: RoundKind = "train") -> None:
        """Call a function of several responses: those to a prompt, or all in their order."""
        entries, self._round = self._round, []
        entries.sort(key=lambda entry: (entry[0].prompt.uid, entry[0].sample))
        if not entries or self._form is None:
            return
        if self._form.unit == "round":
            self._call(self._form, entries)
            return
        for _, group in groupby(entries, lambda entry: entry[0].prompt.uid):
            self._call(self._form, list(group))

    def _call(self, form: Form, entries: list[tuple[Rollout, Future[Score]]]) -> None:
        """Send a call for these responses to a worker."""
        responses = tuple(describe_response(r) for r, _ in entries)
        call = Responses(responses, self._step, self._length, form.name)
        scored = self._pool.submit(call, lambda score: score, len(entries))
        scored.add_done_callback(partial(_deal, entries))

    def close(self) -> None:
        """Stop the workers."""
        for _, future in self._round:
            future.set_result(Score.failed(RUN_ENDED))
        self._round = []
        self._pool.close()


def _deal(entries: Sequence[tuple[Rollout, Future[Score]]], scored: Future[Score]) -> None:
    """Give each response of a call its score, or the failure of the call."""
    score = scored.result()
    scores = [score] * len(entries)
    if isinstance(score, BatchScore):
        # The first has the time and the prints of the call.
        first, *others = score.scores
        scores = [replace(first, info={**score.info, **first.info}), *others]
    for (rollout, future), response_score in zip(entries, scores, strict=True):
        future.set_result(check_placed_rewards(rollout, response_score))


def check_placed_rewards(rollout: Rollout, score: Score) -> Score:
    """Return the score, or a failure if its placed rewards do not fit into the response.

    Those of an episode are for the tokens and characters of its last turn.
    """
    # Token rewards may leave out the end token; offsets must be inside the text.
    start = rollout.turns[-1].start if rollout.turns else 0
    tokens, count = sum(s.unit == "token" for s in score.steps), len(rollout.token_ids) - start
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
        moved = (replace(s, end=s.end + start) if s.unit == "token" else s for s in score.steps)
        return replace(score, steps=tuple(moved)) if start else score
    return Score(None, f"returned {wrong}", info=score.info)


def find_function(spec: str) -> tuple[Path, str, str]:
    """Return the file, the function and the module of FILE[:NAME] or MODULE:NAME, "" for a file.

    No module is imported here.
    """
    module, _, name = spec.rpartition(":")
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module) and not user_path(module).exists():
        search: Sequence[str] | None = [os.getcwd(), *sys.path]
        location = None
        for count in range(1, module.count(".") + 2):
            part = ".".join(module.split(".")[:count])
            location = PathFinder.find_spec(part, search)
            search = (location.submodule_search_locations if location else None) or []
        if location is not None and location.origin is not None:
            return Path(location.origin), name, module
        if "." in module and not module.endswith(".py"):
            raise RewardError(
                f"--reward_function {spec}: there is no module {module} in this environment "
                f"({sys.prefix}), and no such file. Install its package, or name FILE.py:NAME."
            )
    return *find_file(spec), ""


def find_file(spec: str, flag: str = "--reward_function") -> tuple[Path, str]:
    """Split FILE[:NAME] into path and function name; RewardError unless the file exists."""
    # A colon may also be part of the path.
    file, _, name = spec.rpartition(":")
    if not file or os.sep in name or name.endswith(".py"):
        file, name = spec, DEFAULT_NAME
    path = user_path(file)
    if not name.isidentifier():
        raise RewardError(
            f"{flag} {spec}: {name!r} cannot be a function's name. "
            "Write FILE.py:NAME, or FILE.py for compute_score."
        )
    if path.is_dir():
        raise RewardError(f"{flag} {spec}: {path} is a folder; name the Python file.")
    if not path.is_file():
        hint = f" The folder {path.parent} does not exist either."
        if path.parent.is_dir():
            neighbours = [p.name for p in path.parent.iterdir() if p.suffix == ".py"]
            hint = did_you_mean(path.name, neighbours)
        raise RewardError(f"{flag} {spec}: there is no file {path}.{hint}")
    return path.resolve(), name


def check_source(path: Path, name: str, kwargs: Mapping[str, Any], module: str = "") -> None:
    """Raise RewardError for a file that is not Python, or whose function is certainly not usable.

    Does not run the file. Errors that only show when it runs are found by the worker. An installed
    `module` may bring its names from others.
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
    if not module:
        _check_imports(tree, path)
    # The statements that bind the name. Without one, the file may still do so at run time.
    bindings = [node for node in tree.body if name in _bound_names(node)]
    if not bindings and not module and not _binds_at_run_time(tree):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = [node.name for node in tree.body if isinstance(node, kinds)]
        raise RewardError(_missing_function_message(str(path), name, names))
    # With several bindings (try/except, if/else) only running the file shows which one counts.
    if len(bindings) != 1:
        return
    node = bindings[0]
    try:
        match node:
            case ast.ClassDef(decorator_list=[]):
                _check_is_function(type, str(path), name)
            case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
                _check_signature(_make_stub(node, node, path), str(path), name, kwargs)
            case ast.Assign(targets=[ast.Name()], value=ast.Lambda() as value):
                _check_signature(_make_stub(node, value, path), str(path), name, kwargs)
            case ast.Assign(targets=[ast.Name()], value=value):
                with suppress(ValueError):
                    _check_is_function(ast.literal_eval(value), str(path), name)
    except Refused as error:
        raise RewardError(str(error)) from error


def _check_imports(tree: ast.Module, path: Path) -> None:
    """Raise RewardError for a missing package that the file imports before it runs other code.

    Other code, also that of modules in the same folder, may change where packages are found.
    """
    for node in tree.body:
        error = None
        match node:
            case ast.Expr(value=value) | ast.Assign(value=value) if isinstance(value, ast.Constant):
                continue
            case ast.ImportFrom(level=level) if level:
                error = ImportError("attempted relative import with no known parent package")
            case ast.Import() | ast.ImportFrom():
                modules = [alias.name for alias in node.names]
                modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else modules
                for package in (module.partition(".")[0] for module in modules):
                    if PathFinder.find_spec(package, [str(path.parent)]):
                        return
                    if package not in sys.modules and not importlib.util.find_spec(package):
                        error = ModuleNotFoundError(f"No module named {package!r}", name=package)
                        break
            case _:
                return
        if error is not None:
            raise RewardError(_describe_load_error(path, error, node.lineno))


def _describe_load_error(file: Path, error: BaseException, line: int | None) -> str:
    """Return the message that a reward file does not load, with the line and advice."""
    advice = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        advice = f" Install {error.name.split('.')[0]!r} into this environment ({sys.prefix})."
    location = f" ({file.name}, line {line})" if line else ""
    problem = describe_error(error)
    return f"The reward function file {file} does not load: {problem}{location}.{advice}"


def _bound_names(node: ast.AST) -> set[str]:
    """Return the names that a statement binds in its scope."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Lambda):
        return set()
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return set().union(*map(_bound_names, ast.iter_child_nodes(node)))


# Names whose use may bind others.
BINDING_CALLS = ("globals", "vars", "locals", "exec", "setattr")


def _binds_at_run_time(tree: ast.Module) -> bool:
    """Whether a file may bind names that are not visible in its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) or (isinstance(node, ast.alias) and node.name == "*"):
            return True
        if isinstance(node, ast.Name) and node.id in BINDING_CALLS:
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return True
    return False


def _make_stub(
    node: ast.stmt, definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, path: Path
) -> Callable[..., Any]:
    """Return an empty function with the parameters of a definition, the statement `node`.

    Its signature can be inspected without running the file at `path`. Annotations are dropped, and
    defaults other than constants become None.
    """
    # Annotations may refer to names that are not defined here.
    arguments = definition.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    # A default may be any code: only constants are kept, for messages; others become None.
    arguments.defaults = [_constant(value) for value in arguments.defaults]
    arguments.kw_defaults = [value and _constant(value) for value in arguments.kw_defaults]
    if isinstance(definition, ast.Lambda):
        definition.body = ast.copy_location(ast.Constant(None), node)
    else:
        definition.body, definition.returns = [ast.copy_location(ast.Pass(), node)], None
    namespace: dict[str, Any] = {}
    module = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(module, str(path), "exec"), namespace)
    return next(value for value in namespace.values() if inspect.isfunction(value))


def _constant(default: ast.expr) -> ast.expr:
    constant = default if isinstance(default, ast.Constant) else ast.Constant(None)
    return ast.copy_location(constant, default)


def load_function(
    file: str, name: str, kwargs: Mapping[str, Any], module: str = ""
) -> Callable[..., Any]:
    """Import the file and return the function with its extra keyword arguments bound.

    One that was written for another trainer is called as that does (forms.py). Runs in a worker;
    the trainer never imports the file. Raises `Refused`.
    """
    function = _get_function(_import_file(file, module), file, name)
    form = _check_signature(function, file, name, kwargs)
    if form is not None:
        return adapt(function, form, kwargs)
    return partial(function, **kwargs) if kwargs else function


def _import_file(file: str, module: str = "") -> ModuleType:
    """Import a reward file, or a module by its name; Refused, with the error and its line."""
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            return importlib.import_module(module)
        return import_file(file)
    except BaseException as error:
        raise Refused(_describe_load_error(Path(file), error, error_line(error, file))) from error


def _get_function(module: ModuleType, file: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of a module; Refused if it is missing or is not a function."""
    if not hasattr(module, name):
        values = {n: v for n, v in vars(module).items() if callable(v)}
        names = [n for n, v in values.items() if getattr(v, "__module__", "") == module.__name__]
        raise Refused(_missing_function_message(file, name, names))
    function = getattr(module, name)
    _check_is_function(function, file, name)
    return cast("Callable[..., Any]", function)


def _missing_function_message(file: str, name: str, names: Sequence[str]) -> str:
    """Return the message that a file lacks the function, and which functions it has."""
    names = [other for other in names if not other.startswith("_")]
    hint = did_you_mean(name, names)
    listed = f" It has: {', '.join(names[:10])}." if names else " It has no functions at all."
    advice = " Write --reward_function FILE:NAME with one of them."
    if name == DEFAULT_NAME:
        advice = f" Define {SIGNATURE}, or choose one with FILE:NAME."
    return f"The reward function file {file} has no '{name}'.{hint}{listed}{advice}"


def _check_is_function(value: object, file: str, name: str) -> None:
    """Raise Refused for a value that is not a function."""
    if not callable(value) or inspect.isclass(value):
        kind = "a class" if inspect.isclass(value) else f"of type {type(value).__name__}"
        raise Refused(f"'{name}' in {file} is {kind}, not a function. Define {SIGNATURE}.")


def _check_signature(
    function: Callable[..., Any], file: str, name: str, kwargs: Mapping[str, Any]
) -> Form | None:
    """Return the form of a function for another trainer, None for our own.

    Raises Refused for one that can be called in no form with these kwargs.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C extensions have none
        return None
    try:
        form = find_form(signature.parameters, kwargs)
        if form is None:
            signature.bind(**dict.fromkeys(ARGUMENTS), **kwargs)
        return form
    except UserError as error:  # a plug-in of forms is broken
        raise Refused(str(error)) from error
    except (TypeError, ValueError) as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        # The function may come from another file, whose line would say nothing here.
        line = f", line {code.co_firstlineno}" if code and code.co_filename == file else ""
        extra = f" With reward.function_kwargs it also gets: {', '.join(kwargs)}." if kwargs else ""
        if isinstance(error, ValueError):
            raise Refused(f"{name}{signature} in {file}{line}: {error}.{extra}") from error
        others = ", ".join(f"{form.name}: {form.signature}" for form in list_forms())
        others = (
            f"with the parameters of another trainer ({others})"
            if others
            else "install ppo-cli again: here it knows no functions of other trainers"
        )
        raise Refused(
            f"{name}{signature} in {file}{line} cannot be called with "
            f"{', '.join(ARGUMENTS)}: {error}. Write it as "
            f"{name}(data_source, solution_str, ground_truth, extra_info=None), or {others}.{extra}"
        ) from error


def check_callable(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for a function of this process that cannot be a reward."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        _check_is_function(function, "this call", name)
        _check_signature(function, "this call", name, kwargs)
    except Refused as error:
        raise ConfigError(str(error)) from None
