"""What packages and files add by name: losses, estimators, rules, judge providers, environments.

An installed package adds a name by an entry point of the group `ppo_cli.KIND`; settings also take
FILE.py:NAME for losses and estimators, which get their inputs by the names of their parameters.
Entry points are read when a name is checked, and a module is imported when its name is used. A
file is parsed for a plan, and imported by the processes that train.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_cli.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Groups of entry points, and what messages call one of their names.
KINDS = {
    "losses": "policy loss", "estimators": "advantage estimator", "rules": "rule",
    "providers": "judge provider", "environments": "environment",
}  # fmt: skip


@cache
def entry_points(kind: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a kind by name; several where packages use the same name."""
    # Imported here: it reads the metadata of each installed package.
    from importlib.metadata import entry_points as read_metadata

    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in read_metadata(group=f"ppo_cli.{kind}"):
        points[point.name] = (*points.get(point.name, ()), point)
    return points


def find_plugin(kind: str, name: str, built_in: Collection[str] = ()) -> EntryPoint | None:
    """Return the entry point of a name; None without one. ConfigError for a clash of names."""
    points = entry_points(kind).get(name, ())
    packages = [_package(point) for point in points]
    if len(packages) > 1:
        raise ConfigError(
            f"The packages {' and '.join(packages)} each add a {KINDS[kind]} named '{name}': "
            "uninstall all but one."
        )
    if packages and name in built_in:
        raise ConfigError(
            f"The package {packages[0]} adds a {KINDS[kind]} named '{name}', which is the name of "
            "a built-in one: uninstall the package, or rename its entry point."
        )
    return points[0] if points else None


def load_plugin(kind: str, name: str) -> Any:
    """Import what an entry point names; ConfigError, with the package, if that fails."""
    point = find_plugin(kind, name)
    if point is None:
        raise ConfigError(f"unknown {KINDS[kind]} '{name}', and no installed package adds it")
    try:
        return point.load()
    except BaseException as error:
        raise ConfigError(
            f"The {KINDS[kind]} '{name}' of the package {_package(point)} does not load: "
            f"{type(error).__name__}: {error} (entry point {point.value})."
        ) from error


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


def signature_of(kind: str, spec: str) -> inspect.Signature:
    """Return the signature of a plug-in's function, or of the def in FILE.py:NAME.

    A file is parsed, not imported. Raises ConfigError.
    """
    file, _, name = spec.rpartition(":")
    if not file:
        function = load_plugin(kind, spec)
        if not callable(function):
            raise ConfigError(f"The {KINDS[kind]} '{spec}' is {function!r:.60}, not a function.")
        return inspect.signature(function)
    path = Path(file)
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")]
        raise ConfigError(f"there is no file {path}.{did_you_mean(path.name, siblings)}")
    try:
        nodes = ast.parse(path.read_bytes(), filename=file).body
    except (SyntaxError, ValueError) as error:
        line = f" line {error.lineno}:" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{path} is not valid Python:{line} {error}") from None
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        hint = did_you_mean(name, functions)
        raise ConfigError(f"{path} has no function '{name}' (a def at its top level).{hint}")
    functions[name].decorator_list = []
    return inspect.signature(make_stub(functions[name], functions[name], path))


def make_stub(
    node: ast.stmt, definition: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, path: Path
) -> Any:
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


def choose_inputs(
    kind: str, label: str, signature: inspect.Signature, inputs: Collection[str]
) -> tuple[str, ...]:
    """Return which of `inputs` a function takes by name; ConfigError if it needs another one."""
    chosen: list[str] = []
    for parameter in signature.parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if parameter.kind is parameter.VAR_KEYWORD:
            chosen = list(inputs)
        elif by_name and parameter.name in inputs:
            chosen.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"{label}: '{parameter.name}' is not an input."
                f"{did_you_mean(parameter.name, inputs)} The parameters of each {KINDS[kind]} "
                f"are some of {', '.join(inputs)}."
            )
    return tuple(dict.fromkeys(chosen))


def inputs_of(kind: str, spec: str, inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of `inputs` the function of a plug-in or of FILE.py:NAME takes."""
    return _read_inputs(kind, spec, inputs, _changed(spec))


@cache
def _read_inputs(kind: str, spec: str, inputs: tuple[str, ...], changed: int) -> tuple[str, ...]:
    return choose_inputs(kind, spec, signature_of(kind, spec), inputs)


def _changed(spec: str) -> int:
    """Return when the file of FILE.py:NAME was changed, in nanoseconds; 0 without a file."""
    path = Path(spec.rpartition(":")[0])
    return path.stat().st_mtime_ns if path.is_file() else 0


def call_function(kind: str, spec: str, values: Mapping[str, Any]) -> Any:
    """Call the function of a plug-in or of FILE.py:NAME with those of `values` that it takes."""
    function, names = _load_function(kind, spec, tuple(values), _changed(spec))
    return function(**{name: values[name] for name in names})


@cache
def _load_function(
    kind: str, spec: str, inputs: tuple[str, ...], changed: int
) -> tuple[Any, tuple[str, ...]]:
    """Return a function and the inputs that it takes; a file is imported again if it `changed`."""
    file, _, name = spec.rpartition(":")
    names = _read_inputs(kind, spec, inputs, changed)
    if not file:
        return load_plugin(kind, spec), names
    module_spec = importlib.util.spec_from_file_location(f"ppo_cli_file_{Path(file).stem}", file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.path.append(str(Path(file).parent))  # the file may import its neighbours
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        raise ConfigError(f"{file} does not load: {type(error).__name__}: {error}") from error
    return getattr(module, name), names
