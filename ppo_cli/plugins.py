"""What packages and files add by name: losses, estimators, rules, judge providers, environments.

An installed package adds a name by an entry point of the group `ppo_cli.KIND`. Losses and
estimators are also named as FILE.py:NAME; they get their inputs by the names of their parameters.
Entry points are read when a name is checked, and a module is imported when its name is used.
"""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeVar

from ppo_cli.errors import ConfigError, did_you_mean, first_line, is_out_of_memory

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_times: dict[Path, int] = {}  # when files were changed, as they were read last
# Groups of entry points, and what messages call one of their names.
KINDS = {
    "losses": "policy loss", "estimators": "advantage estimator", "rules": "rule",
    "providers": "judge provider", "environments": "environment",
}  # fmt: skip
# Sections of the settings that name plug-ins of a kind.
SECTIONS = {
    "losses": "actor.", "estimators": "algorithm.", "rules": "reward.", "providers": "reward.",
    "environments": "environment.",
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
    if len(points) + (name in built_in) > 1:
        others = " and ".join(sorted([*map(_package, points), *["ppo-cli"] * (name in built_in)]))
        raise ConfigError(
            f"A {KINDS[kind]} named '{name}' is in {others}: uninstall the package that you do not "
            "use, or rename its entry point."
        )
    return points[0] if points else None


def package_versions(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the packages whose names the settings use, by package."""
    versions: dict[str, str] = {}
    for kind, section in SECTIONS.items():
        values = json.dumps([v for k, v in settings.items() if k.startswith(section)], default=str)
        for name, points in entry_points(kind).items():
            if json.dumps(name) in values:
                versions |= {point.dist.name: point.dist.version for point in points if point.dist}
    return versions


def _package(point: EntryPoint) -> str:
    return f"the package {point.dist.name if point.dist else point.value}"


@cache
def load(kind: str, spec: str) -> Any:
    """Import what the name of a plug-in or FILE.py:NAME stands for; ConfigError if that fails.

    A file is imported once; `Names.read` forgets one that has changed.
    """
    file, _, name = spec.rpartition(":")
    point = None if file else find_plugin(kind, spec)
    if not file and not point:
        raise ConfigError(f"unknown {KINDS[kind]} '{spec}', and no installed package adds it")
    label = f"{_package(point)} ({point.value})" if point else f"the file {file}"
    try:
        if point:
            return point.load()
        sys.path.append(str(Path(file).parent))  # the file may import its neighbours
        contents = runpy.run_path(file)
        if name not in contents:
            raise ImportError(f"it has no '{name}'{did_you_mean(name, contents)}")
        return contents[name]
    except BaseException as error:
        raise ConfigError(
            f"The {KINDS[kind]} '{name}' of {label} does not load: {type(error).__name__}: {error}."
        ) from error


@cache
def inputs_of(kind: str, spec: str, inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return which of `inputs` the function of a plug-in or file takes; ConfigError for others."""
    function = load(kind, spec)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"The {KINDS[kind]} {spec} is {function!r:.60}, not a plain function.")
    chosen: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return tuple(inputs)
        if name in inputs:
            chosen.append(name)
        elif parameter.default is parameter.empty:
            raise ConfigError(
                f"The {KINDS[kind]} {spec}: '{name}' is not an input.{did_you_mean(name, inputs)} "
                f"Its parameters are some of {', '.join(inputs)}."
            )
    return tuple(chosen)


def call(kind: str, spec: str, values: Mapping[str, Any]) -> Any:
    """Call the function of a plug-in or of FILE.py:NAME with those of `values` that it takes.

    An error inside the function becomes a ConfigError that names its line.
    """
    inputs = {name: values[name] for name in inputs_of(kind, spec, tuple(values))}
    # The function may change tensors in place, which the caller goes on to use.
    inputs = {k: v.clone() if hasattr(v, "clone") else v for k, v in inputs.items()}
    try:
        return load(kind, spec)(**inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # The innermost line of the function's file: below it is torch.
        frames = extract_tb(error.__traceback__)[1:]
        lines = [f for f in frames if f.filename == frames[0].filename]
        place = f" ({lines[-1].filename}, line {lines[-1].lineno}: {lines[-1].line})" * bool(lines)
        raise ConfigError(
            f"The {KINDS[kind]} {spec} raised {type(error).__name__}: {first_line(error)}{place}."
        ) from error


class Declarations(dict[str, T]):
    """Declarations by name: the built-in ones, and those that `declare` makes of other names."""

    def __init__(self, declare: Callable[[str], T], built_in: dict[str, T]) -> None:
        super().__init__(built_in)
        self._declare = declare

    def __missing__(self, name: str) -> T:
        return self._declare(name)


@dataclass(frozen=True, eq=False)
class Names:
    """The names that a setting takes: of a table, of plug-ins, and FILE.py:NAME if `files`.

    `table` makes the declaration of any other name from its function, which must exist and fit.
    """

    table: Mapping[str, Any]
    kind: str
    files: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema: editors offer the names of the table, and accept others."""
        return {"anyOf": [{"enum": list(self.table)}, {"type": "string"}]}

    @property
    def offered(self) -> list[str]:
        """The names of the table and those of plug-ins."""
        return [*self.table, *entry_points(self.kind)]

    def read(self, text: str) -> str:
        """Return a name, FILE with its absolute path; ValueError says what is wrong with it."""
        file, _, name = text.rpartition(":")
        if self.files and file.endswith(".py"):
            path = Path(file).expanduser().absolute()
            text = f"{path}:{name}"
            # A file that has changed since it was imported is imported again.
            changed = path.stat().st_mtime_ns if path.is_file() else 0
            if _times.setdefault(path, changed) != changed:
                _times[path] = changed
                load.cache_clear()
                inputs_of.cache_clear()
        elif not find_plugin(self.kind, text, self.table) and text not in self.table:
            raise ValueError(
                f"'{text}' is not one of {', '.join(self.offered)}"
                f"{', or FILE.py:NAME' * self.files}, and no installed package adds it."
                f"{did_you_mean(text, self.offered)}"
            )
        self.table[text]
        return text
