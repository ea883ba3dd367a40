"""What packages and files add by name: losses, rules, judge providers, commands and others.

An installed package adds a name by an entry point of the group `ppo_cli.KIND`. Losses and
estimators are also named as FILE.py:NAME; they get their inputs by the names of their parameters.
Entry points are read when a name is checked, and a module is imported when its name is used. What
is in ppo_cli/extras uses the same entry points.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

from ppo_cli.errors import ConfigError, did_you_mean, first_line, is_out_of_memory
from ppo_cli.paths import user_path

T = TypeVar("T")
_times: dict[Path, int] = {}  # when files were changed, as they were read last
# Groups of entry points, and what messages call one of their names.
KINDS = {
    "losses": "policy loss", "estimators": "advantage estimator", "rules": "rule",
    "providers": "judge provider", "environments": "environment", "commands": "command",
    "readers": "reader of foreign settings", "engines": "engine",
    "plan_sections": "section of the plan", "batches": "batch interface of judges",
    "reward_checks": "check of a reward", "reward_forms": "form of reward functions",
}  # fmt: skip
# Sections of the settings that name plug-ins of a kind.
SECTIONS = {
    "losses": "actor.", "estimators": "algorithm.", "rules": "reward.", "providers": "reward.",
    "environments": "environment.",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command of `ppo`: the name of its entry point is `NAME`, or `GROUP.NAME` inside a group.

    `app` is a Typer app, as MODULE:NAME, which is imported when the command is called. `section` is
    a heading of `ppo --help`, `order` the place below that heading; built-in commands have 0.
    """

    app: str
    help: str
    section: str = "Plug-ins"
    order: int = 100


@dataclass(frozen=True)
class PlanSection:
    """What a switch of `ppo plan` adds to the plan.

    `measure` is MODULE:FUNCTION: it gets the `Resolved` of the run, and returns what --json prints
    under `key` and the lines of the section with this title.
    """

    flag: str  # without dashes
    help: str
    key: str
    measure: str


@dataclass
class Line:
    """A command line under our own names; notes say what was left out, problems what is wrong.

    `foreign`: the line was written for another program, so that its settings without an effect are
    remarked on, not refused. `defaults` are that program's: value and origin by setting. `origins`
    names the flag that was typed, by the setting that it became.
    """

    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    foreign: bool = False
    defaults: dict[str, tuple[str, str]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def advise(self, flag: str, names: Mapping[str, str]) -> str:
        """Return the end of the sentence `there is no flag --x`; "" where nothing is known of it.

        `names` has the flags of the command by their names without dashes.
        """
        return ""


@dataclass(frozen=True)
class Reader:
    """What rewrites command lines and files of another program; functions are MODULE:NAME.

    `line` returns arguments as a `Line`. `layers` gets all layers (`Layers` of config.layers) and
    the environment, and puts entries with our own names in place of others. `explain` returns our
    name for a foreign one, or "", and lines about it, for `ppo explain`. `sections` describes
    further names at the top of files.
    """

    line: str = ""
    layers: str = ""
    explain: str = ""
    sections: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Engine:
    """A program that trains in place of this one; functions are MODULE:NAME.

    `train` and `plan` get the `Arguments` of a line that names the engine. `advise` gets those of a
    refused line without it, and the problems, and returns what to add to these.
    """

    train: str
    plan: str
    advise: str = ""


@dataclass(frozen=True)
class EntryPoint:
    """What a package adds under a name: `value` is MODULE:ATTRIBUTE, `info` its metadata folder."""

    name: str
    value: str
    info: Path

    def package(self) -> tuple[str, str]:
        """Return the name and the version of the package."""
        # Imported here: it takes a seventh of the time of `ppo --help`.
        from importlib.metadata import Distribution

        distribution = Distribution.at(self.info)
        return distribution.name, distribution.version


def entry_points(kind: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a kind by name; several where packages use the same name."""
    return read_metadata().get(f"ppo_cli.{kind}", {})


@cache
def read_metadata() -> dict[str, dict[str, tuple[EntryPoint, ...]]]:
    """Return the entry points of installed packages by group and name: `ppo_cli.KIND` only.

    importlib.metadata has the same, but takes four times as long.
    """
    points: dict[str, dict[str, tuple[EntryPoint, ...]]] = {}
    packages: set[str] = set()
    for folder in sys.path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:  # a zip file, or nothing there
            continue
        for name in names:
            package = name.partition("-")[0].lower()
            # Of a package that is installed in two places, Python imports the first.
            if not name.endswith((".dist-info", ".egg-info")) or package in packages:
                continue
            packages.add(package)
            info = Path(folder or ".", name)
            try:
                lines = (info / "entry_points.txt").read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            group = ""
            for line in lines:
                key, equals, value = (part.strip() for part in line.partition("="))
                if line.startswith("["):
                    group = line.strip("[] ")
                elif group.startswith("ppo_cli.") and equals:
                    named = points.setdefault(group, {})
                    named[key] = (*named.get(key, ()), EntryPoint(key, value, info))
    return points


def load_all(kind: str) -> tuple[list[Any], list[str]]:
    """Return what packages add of a kind, in the order of the names, and why others do not load."""
    loaded, problems = [], []
    for name in sorted(entry_points(kind)):
        try:
            loaded.append(load(kind, name))
        except ConfigError as error:
            problems.append(str(error))
    return loaded, problems


def import_name(value: str) -> Any:
    """Import MODULE:ATTRIBUTE."""
    module, _, attribute = value.partition(":")
    return attrgetter(attribute)(importlib.import_module(module))


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
                versions |= dict(point.package() for point in points)
    return versions


def _package(point: EntryPoint) -> str:
    return f"the package {point.package()[0]}"


@cache
def load(kind: str, spec: str) -> Any:
    """Import what the name of a plug-in, FILE.py:NAME or a place of ours stands for.

    A file is imported once; `Names.read` forgets one that has changed. ConfigError if it fails.
    """
    if is_own(spec):
        return import_name(spec)
    file, _, name = spec.rpartition(":")
    point = None if file else find_plugin(kind, spec)
    if not file and not point:
        raise ConfigError(f"unknown {KINDS[kind]} '{spec}', and no installed package adds it")
    try:
        if point:
            return import_name(point.value)
        sys.path.append(str(Path(file).parent))  # the file may import its neighbours
        contents = runpy.run_path(file)
        if name not in contents:
            raise ImportError(f"it has no '{name}'{did_you_mean(name, contents)}")
        return contents[name]
    except BaseException as error:
        label = f"{_package(point)} ({point.value})" if point else f"the file {file}"
        advice = f" Install {point.package()[0]} again, or uninstall it." if point else ""
        raise ConfigError(
            f"The {KINDS[kind]} '{name}' of {label} does not load: {type(error).__name__}: "
            f"{str(error).rstrip('.')}.{advice}"
        ) from error


def is_own(spec: str) -> bool:
    """Whether a function is one of this package: its place is MODULE:NAME."""
    return spec.startswith("ppo_cli.")


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
    """Call a function with those of `values` that its parameters name.

    An error in the function of a package or file becomes a ConfigError that names its line.
    """
    inputs = {name: values[name] for name in inputs_of(kind, spec, tuple(values))}
    if is_own(spec):
        return load(kind, spec)(**inputs)
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
            path = user_path(file).absolute()
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
        if isinstance(self.table, Declarations):
            self.table[text]
        return text


def runs_elsewhere(engine: str) -> bool:
    """Whether an engine is that of a package, which checks for itself what it supports."""
    return engine in entry_points("engines")
