"""What a worker can be told to do: run a built-in rule, or a function of a user's file.

A task is pickled to its workers and loaded there; nothing heavy is imported before.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_cli.errors import did_you_mean
from ppo_cli.rewards.returned import describe_error
from ppo_cli.rewards.rules import RULES
from ppo_cli.rewards.worker import Refused, place_in

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
