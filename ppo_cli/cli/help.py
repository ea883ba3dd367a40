"""The help of all commands, in one plain layout; rich would take 0.2 s more.

`--help` fits on one screen: a command's own flags, and of the settings those that are declared as
common. `--help-all` shows every setting that the command reads, with key, range and variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from ppo_cli.errors import ConfigError, did_you_mean, ppo
from ppo_cli.plugins import Command, entry_points, find_plugin, import_name, load

# Key of click's `ctx.meta` that is set if all flags are to be shown.
ALL_FLAGS = "ppo_cli.all_flags"
HELP_ALL_WORDS = {"--help-all", "--help_all"}
# Width of the column of flags: a longer name gets a line of its own.
MAX_NAME_WIDTH = 27
# Types as typer names them -> what stands for a value in the help.
_METAVARS = {
    "<int>": "N", "<int range>": "N", "<float>": "X", "<float range>": "X", "<str>": "TEXT",
    "<list[int]>": "N", "<list[str]>": "TEXT",
}  # fmt: skip
Row = tuple[str, str]


class _Examples:
    """Commands whose epilog has lines that work as they are printed."""

    epilog: str | None

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        lines = (self.epilog or "").splitlines()
        if lines:
            formatter.write_paragraph()
            formatter.write("Examples:\n" if len(lines) > 1 else "Example:\n")
        for line in lines:
            formatter.write(f"  {re.sub('^ppo', lambda _: ppo(), line)}\n")


def describe_flag(param: Any, ctx: Any) -> Row:
    """Return name and meaning of a flag or argument that is not a setting."""
    default = param.show_default if isinstance(param.show_default, str) else None
    if default is None and param.show_default and not getattr(param, "is_flag", False):
        default = param.default
    facts = f" [{default}]" if default not in (None, "", [], ()) else ""
    if param.param_type_name == "argument":
        return param.metavar or param.name.upper(), f"{param.help or ''}{facts}"
    # Flags without a value have no placeholder.
    shown_type = param.metavar or param.display_type(ctx)
    metavar = "" if param.is_flag else " " + _METAVARS.get(shown_type, shown_type.strip("<>"))
    return f"{', '.join(sorted(param.opts, key=len))}{metavar}", f"{param.help or ''}{facts}"


def normalize_flag(word: str) -> str:
    """Return a flag with underscores: `--batch-size` and `--batch_size` are the same flag."""
    return word.replace("-", "_")


def find_repeated_flags(params: Sequence[Any], args: Sequence[str]) -> list[str]:
    """Return a note for each flag with several different values; list flags may repeat.

    The last value counts, as scripts that end in `"$@"` expect.
    """
    flags = {normalize_flag(word): p for p in params for word in [*p.opts, *p.secondary_opts]}
    # Collect the values of each flag in the order of the line.
    values_by_flag: dict[str, list[str]] = {}
    typed = iter(args)
    for word in typed:
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        param = flags.get(normalize_flag(flag)) if word.startswith("-") else None
        if param is None or param.multiple or param.count:
            continue
        if param.is_flag:
            value = word
        elif not equals:
            value = next(typed, "")
        values_by_flag.setdefault(param.opts[0], []).append(value)
    return [
        f"note: {flag} is given as {', then as '.join(map(repr, values))}; the last one counts."
        for flag, values in values_by_flag.items()
        if len(set(values)) > 1
    ]


class HelpCommand(_Examples, TyperCommand):
    """A command with this module's help."""

    # Whether --help-all has more to show.
    has_more = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read --help-all, and note each flag with several values, of which click keeps the last.

        An error of the parser gets the command, which its advice names.
        """
        own_words = args[: args.index("--")] if "--" in args else args
        ctx.meta[ALL_FLAGS] = bool(HELP_ALL_WORDS & set(own_words))
        for note in find_repeated_flags(self.params, args):
            typer.echo(note, err=True)
        try:
            return super().parse_args(ctx, ["--help"] if ctx.meta[ALL_FLAGS] else args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage line; the placeholder of an argument says itself if it is optional."""
        pieces = ["[OPTIONS]"]
        for param in self.params:
            if param.param_type_name == "argument":
                name, _ = describe_flag(param, ctx)
                pieces.append(f"{name}{'...' * (param.nargs != 1 and '...' not in name)}")
        formatter.write_usage(ctx.command_path, " ".join(pieces))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and flags by section, with their meanings in one column."""
        sections: dict[str, list[Row]] = {}
        for param in self.get_params(ctx):
            if entry := self.describe_parameter(param, ctx):
                sections.setdefault(entry[0], []).append(entry[1])
        if self.has_more:
            sections["Options"].append(("--help-all", "Show all settings, with keys and ranges."))
        names = [name for rows in sections.values() for name, _ in rows]
        width = max(len(name) for name in names if len(name) <= MAX_NAME_WIDTH)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(n.ljust(width), text) for n, text in rows], col_max=width)

    def describe_parameter(self, param: Any, ctx: Any) -> tuple[str, Row] | None:
        """Return section, name and meaning of a parameter; None if this help does not show it."""
        if param.hidden:
            return None
        return "Options", describe_flag(param, ctx)


def _entry_point(ctx: Any, name: str) -> str:
    """Return the name of the entry point that adds a command to the group of a context."""
    return ".".join([*ctx.command_path.split()[1:], name])


class HelpGroup(_Examples, TyperGroup):
    """A group of commands with this module's help, to which packages may add commands.

    A declared command is imported when it is called, so that the help stays fast.
    """

    # Declared commands that are built in.
    built_in: Mapping[str, Command] = {}

    def declared_commands(self, ctx: Any) -> dict[str, Command]:
        """Return the declared commands by name, those of packages last in their order."""
        added: dict[str, Command] = {}
        # `reward.calibrate` is a command of `ppo reward`.
        path = _entry_point(ctx, "")
        for point in entry_points("commands"):
            group, dot, name = point.rpartition(".")
            if f"{group}{dot}" != path or name in {*self.built_in, *self.commands}:
                continue
            try:
                added[name] = load("commands", point)
            except ConfigError as error:  # other commands work
                added[name] = Command("", str(error))
        return {**self.built_in, **dict(sorted(added.items(), key=lambda item: item[1].order))}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*self.commands, *self.declared_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; of a declared one a placeholder with the line of the help."""
        declared = self.declared_commands(ctx)
        if cmd_name not in declared:
            return super().get_command(ctx, cmd_name)
        return HelpCommand(cmd_name, help=declared[cmd_name].help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that was called; an unknown one fails with the most similar name."""
        name = args[0]
        points = {_entry_point(ctx, own) for own in (*self.built_in, *self.commands)}
        point = find_plugin("commands", _entry_point(ctx, name), points)
        if name in self.commands:
            return super().resolve_command(ctx, args)
        if name not in self.built_in and point is None:
            ctx.fail(f"There is no command '{name}'.{did_you_mean(name, self.list_commands(ctx))}")
        declared = load("commands", point.name) if point else self.built_in[name]
        command: Any = typer.main.get_command(import_name(declared.app))
        command.name = name
        return name, command, args[1:]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by section, then the flags."""
        for title, names in self.group_commands(ctx).items():
            commands: list[tuple[str, Any]] = [(n, self.get_command(ctx, n)) for n in names]
            with formatter.section(title):
                formatter.write_dl([(n.ljust(9), c.get_short_help_str(200)) for n, c in commands])
        with formatter.section("Options"):
            formatter.write_dl([describe_flag(param, ctx) for param in self.get_params(ctx)])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read --help-all like --help: a group hides nothing."""
        return super().parse_args(ctx, ["--help"] if HELP_ALL_WORDS & set(args[:1]) else args)

    def group_commands(self, ctx: Any) -> dict[str, Sequence[str]]:
        """Return the names of the commands by section of the help."""
        return {"Commands": self.list_commands(ctx)}


def keep_group() -> None:
    """Keep the only command of an app a command of a group, to which packages add others."""


class App(typer.Typer):
    """A typer app whose commands have this module's help; without arguments a group shows it."""

    def __init__(self, *, cls: type[HelpGroup] = HelpGroup, **options: Any) -> None:
        """Switch rich off, and completion unless it is asked for."""
        shared = {"add_completion": False, "rich_markup_mode": None} | options
        super().__init__(cls=cls, no_args_is_help=True, pretty_exceptions_enable=False, **shared)

    def command(
        self, name: str | None = None, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command with this module's help."""
        return super().command(name, **{"cls": HelpCommand, **options})
