"""Builds the flags of commands from the schema: one parameter for each setting with a flag.

Values stay text until the resolver reads them. So all mistakes are reported at once, with the same
messages for flags, files and variables.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from ppo_cli.cli.help import ALL_FLAGS, HelpCommand
from ppo_cli.config.models.bundled import ALIASES, preset_names
from ppo_cli.config.schema.keys import Key, describe_range, offered_choices, table
from ppo_cli.errors import ConfigError, ppo
from ppo_cli.planning.resolve import resolve
from ppo_cli.planning.resolved import Resolved
from ppo_cli.plugins import Engine, Line, find_plugin, import_name, load, load_all

# Group of settings -> its heading in the help; other groups have their own name.
PANELS = {
    "model": "Model and data", "data": "Model and data", "environment": "Model and data",
    "actor": "Algorithm",
    "critic": "Algorithm", "ref": "Algorithm", "rollout": "Algorithm", "trainer": "Run",
}  # fmt: skip
# Keys of click's `ctx.meta` under which the parser leaves messages about unknown flags, and notes.
UNKNOWN_FLAGS = "ppo_cli.unknown_flags"
FLAG_NOTES = "ppo_cli.flag_notes"
ORIGINS = "ppo_cli.origins"  # the flags of other programs that were typed
FOREIGN = "ppo_cli.foreign"  # and whether the line is another program's, with its defaults
# Flags of rows without a prompt, which are a source -> the setting that names sources.
EPISODES = {"episodes": "data.train_files", "val_episodes": "data.val_files"}
# difflib's similarity, from 0 to 1. Suggestions below it are rarely what was meant.
SUGGESTION_CUTOFF = 0.75


@dataclass(frozen=True)
class Arguments:
    """The arguments of a command, not yet checked.

    `flags` has (value, origin) by key, `extras` the flags of the command itself, `unknown` the
    messages about flags that do not exist, `notes` those about flags that were left out. `foreign`
    has the defaults of the program that the line was written for; None for our own lines.
    `origins` names the flag that was typed for a setting, where it is another program's.
    """

    flags: Mapping[str, tuple[Any, str]]
    preset: str | None
    config_files: tuple[Path, ...]
    overrides: tuple[str, ...]
    extras: Mapping[str, Any]
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    run: Path | None = None  # a run folder whose settings are the defaults
    debug: bool = False
    foreign: Mapping[str, tuple[str, str]] | None = None
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> Engine | None:
        """The engine of a package that the command line selects; None for our own."""
        typed = [self.flags.get("trainer.engine", ("",))[0]]
        words = (word.partition("=") for word in self.overrides)
        typed += [value for key, _, value in words if key == "trainer.engine"]
        return next((load("engines", n) for n in typed if find_plugin("engines", n)), None)

    def resolve_node(self) -> Resolved:
        """Resolve the arguments with the environment and SLURM's variables of this node."""
        from ppo_cli.config.slurm import node_variables

        around = node_variables(os.environ, set(self.flags))
        return self.resolve({**os.environ, **around.values}, around.origins)

    def resolve(
        self,
        environ: Mapping[str, str] | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> Resolved:
        """Resolve the arguments over presets, files and variables to checked settings.

        `origins` names the source of variables. Raises one ConfigError with the unknown flags and
        all other problems.
        """
        try:
            resolved = resolve(
                flags=self.flags,
                preset=self.preset,
                config_files=self.config_files,
                overrides=self.overrides,
                environ=os.environ if environ is None else environ,
                origins={**self.origins, **(origins or {})},
                run=self.run,
                foreign=self.foreign,
            )
        except ConfigError as error:
            raise ConfigError([*self.unknown, *error.problems]) from error
        if self.unknown:
            raise ConfigError(self.unknown)
        return replace(resolved, notes=(*self.notes, *resolved.notes))


def list_flag_keys() -> dict[str, Key]:
    """Return the settings that have a flag, by the name of the flag without dashes."""
    return {key.flag.removeprefix("--"): key for key in table().values() if key.flag}


def add_command(
    app: typer.Typer,
    run: Callable[[Arguments], None],
    example: str,
    extras: Sequence[inspect.Parameter],
    shown: tuple[str, ...] = ("",),
) -> None:
    """Register a command with its own flags, `extras`, and every flag of the schema.

    The help lists the settings whose keys start with one of `shown`. The other flags are accepted
    but hidden, so that the command line of a training run can be reused.
    """
    keys = list_flag_keys()
    extra_names = {p.name for p in extras}

    def command(ctx: typer.Context, **values: Any) -> None:
        """Collect the parsed command line into `Arguments`, and call `run` with them."""
        # Flags that were not typed are None, and are left to the other layers.
        origins = ctx.meta.get(ORIGINS, {})
        flags = {
            key.name: (
                tuple(values[name]) if key.is_list else values[name],
                origins.get(key.name, f"flag {key.flag}"),
            )
            for name, key in keys.items()
            if values[name] not in (None, [], ())
        }
        for name, key in EPISODES.items():
            if values[name] is not None:
                files = flags.get(key, ((), ""))[0]
                flags[key] = ((*files, f"episodes:{values[name]}"), f"flag --{name}")
        run(
            Arguments(
                flags=flags,
                preset=values["preset"],
                config_files=tuple(Path(p) for p in values["config"] or ()),
                overrides=tuple(values["overrides"] or ()),
                extras={name: values[name] for name in extra_names},
                unknown=ctx.meta.get(UNKNOWN_FLAGS, ()),
                notes=ctx.meta.get(FLAG_NOTES, ()),
                foreign=ctx.meta.get(FOREIGN),
                origins=origins,
                debug=bool(ctx.find_root().obj),
            )
        )

    # typer reads the help from the docstring.
    command.__doc__ = run.__doc__
    flags = [_make_setting_flag(name, key) for name, key in keys.items()]
    for parameter in flags:
        parameter.default.hidden = not keys[parameter.name].name.startswith(shown)
    # The file comes before the overrides, which take all remaining arguments.
    files = [p for p in extras if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    others = [p for p in extras if p not in files]
    layers = [p for p in _make_shared_parameters() if p.name not in extra_names]
    for parameter in layers:
        if parameter.name in EPISODES:
            parameter.default.hidden = not EPISODES[parameter.name].startswith(shown)
    parameters = [*files, *layers, *others, *flags]
    app.command(run.__name__, cls=SettingsCommand, epilog=example)(
        set_parameters(command, parameters)
    )


def set_parameters(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Any:
    """Set a function's signature, from which typer builds its arguments and flags; return it."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def make_switch(name: str, description: str) -> inspect.Parameter:
    """Return the parameter for an on-off flag `--name`, off by default."""
    return _keyword_parameter(name, bool, typer.Option(False, f"--{name}", help=description))


def make_flag(
    name: str, kind: Any, default: Any, description: str, metavar: str | None = None, **options: Any
) -> inspect.Parameter:
    """Return the parameter for a flag `--name` with a value; without a default it is optional.

    `options` are other arguments of typer.Option, such as `min`.
    """
    shown = {"show_default": default is not None} | options
    option = typer.Option(default, f"--{name}", help=description, metavar=metavar, **shown)
    return _keyword_parameter(name, kind if default is not None else kind | None, option)


def make_argument(
    name: str,
    metavar: str,
    description: str,
    *,
    required: bool = False,
    several: bool = False,
    shown: str | bool = False,
) -> inspect.Parameter:
    """Return the parameter for a positional argument; with `several` it takes a list.

    `shown` is the default as the help shows it.
    """
    kind: Any = list[str] if several else str
    default = ... if required else None
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=typer.Argument(default, metavar=metavar, help=description, show_default=shown),
        annotation=kind if required else kind | None,
    )


class SettingsCommand(HelpCommand):
    """A command with settings whose list flags may be followed by several values.

    Flags of other programs are replaced by ours. Messages about unknown flags go to `ctx.meta`, to
    be reported with all other mistakes.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace foreign flags, set unknown ones aside, repeat list flags; then parse as usual."""
        lines = rewrite_line(args)
        ctx.meta[FLAG_NOTES] = tuple(note for line in lines for note in line.notes)
        ctx.meta[ORIGINS] = dict(ChainMap(*(line.origins for line in lines)))
        if any(line.foreign for line in lines):
            ctx.meta[FOREIGN] = dict(ChainMap(*(line.defaults for line in lines)))
        known_words, unknown = self._split_unknown_flags(lines[-1].args)
        problems = [problem for line in lines for problem in line.problems]
        if unknown or problems:
            # The last message names the help, once for all of them.
            names = [n for p in self.params for n in (*p.opts, *p.secondary_opts) if n[:2] == "--"]
            messages = [*problems, *describe_unknown_flags(unknown, names, lines)]
            messages[-1] += f" See `{ppo(ctx.command_path.partition(' ')[2])} --help`."
            ctx.meta[UNKNOWN_FLAGS] = tuple(messages)
        for param in self.params:
            _skip_check_when_absent(param)
        return super().parse_args(ctx, repeat_list_flags(known_words))

    has_more = True

    def describe_parameter(self, param: Any, ctx: Any) -> tuple[str, tuple[str, str]] | None:
        """Return a setting with its first sentence and default; with all facts for --help-all."""
        key, every = list_flag_keys().get(param.name), ctx.meta[ALL_FLAGS]
        if param.name in EPISODES and not every:
            return None  # the short help is one screen
        if param.hidden or key is None:
            return super().describe_parameter(param, ctx)
        if not (every or key.common):
            return None
        first = re.split(r"(?<=\.) |; unset", key.help)[0].rstrip(".")
        default = "" if key.default in (None, (), False) else f" [{_format_default(key.default)}]"
        names = f"{param.opts[0]} {param.metavar or ''}".rstrip()
        if every and param.secondary_opts:
            names = f"{names}, {param.secondary_opts[0]}"
        panel = PANELS.get(key.name.partition(".")[0], key.name.partition(".")[0].capitalize())
        return panel, (names, format_help_line(key) if every else f"{first}{default}")

    def _split_unknown_flags(self, args: list[str]) -> tuple[list[str], list[str]]:
        """Split arguments into those with known flags, and the names of unknown flags.

        Values that follow an unknown flag are dropped with it.
        """
        # Whether the argument after a flag is its value.
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        } | {"--help": False, "--help_all": False}
        known_words: list[str] = []
        unknown: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            flag, equals, _ = word.replace("-", "_").partition("=")
            flag = f"--{flag[2:]}"
            if word == "--":
                return [*known_words, word, *rest], unknown
            # A known flag keeps its value, even if the value looks like a flag.
            if not word.startswith("--") or flag in takes_value:
                known_words.append(word)
                if word.startswith("--") and takes_value[flag] and not equals and rest:
                    known_words.append(rest.pop(0))
                continue
            # The values of an unknown flag end at the next flag or override.
            unknown.append(word.partition("=")[0])
            while not equals and rest and not rest[0].startswith("--") and not is_override(rest[0]):
                rest.pop(0)
        return known_words, unknown


def rewrite_line(args: Sequence[str]) -> list[Line]:
    """Return the lines that the readers of packages make of arguments, each of the one before."""
    lines = [Line(list(args))]
    for reader in load_all("readers")[0]:
        if reader.line:
            lines.append(import_name(reader.line)(lines[-1].args))
    return lines


def is_override(argument: str) -> bool:
    """Whether an argument is KEY=VALUE or ~KEY; `~/path` is a path."""
    return "=" in argument or (argument.startswith("~") and "/" not in argument)


def describe_unknown_flags(
    unknown: Iterable[str], flags: Iterable[str], lines: Sequence[Line]
) -> list[str]:
    """Return errors for unknown flags, those with the same advice in one."""
    names = {flag.lstrip("-"): flag for flag in flags}
    by_advice: dict[str, list[str]] = {}
    for flag in dict.fromkeys(unknown):
        advice = next(filter(None, (line.advise(flag, names) for line in lines)), "")
        by_advice.setdefault(advice or _suggest_flag(flag, names), []).append(flag)
    return [f"there is no flag {', '.join(same)}{advice}" for advice, same in by_advice.items()]


def _suggest_flag(flag: str, names: Mapping[str, str]) -> str:
    """Return the most similar flag as a question; or the setting without a flag of this name."""
    name = flag.lstrip("-").replace("-", "_")
    key = next((key for key in table() if key.rpartition(".")[2] == name), "")
    near = difflib.get_close_matches(name, names, n=1, cutoff=SUGGESTION_CUTOFF)
    meant = key or "".join(names[n] for n in near)
    return f". Did you mean '{meant}'?" if meant else "."


def _skip_check_when_absent(param: Any) -> None:
    """Make a parameter skip its checks when the flag is absent: a hundred of them take 0.1 s."""
    # `process_value` is a method of click's Parameter (tried with typer 0.29).
    check, optional = param.process_value, not param.required
    param.process_value = lambda ctx, value: (
        None if value is None and optional else check(ctx, value)
    )


def repeat_list_flags(args: Sequence[str]) -> list[str]:
    """Repeat list flags: `--train_files a b` becomes `--train_files a --train_files b`."""
    lists = {key.flag for key in list_flag_keys().values() if key.is_list}
    out: list[str] = []
    # The list flag whose values follow, and how many of them came.
    current, value_count = "", 0
    for index, word in enumerate(args):
        if word == "--":
            return [*out, *args[index:]]
        if word.startswith("--"):
            flag = "--" + word[2:].partition("=")[0].replace("-", "_")
            current = flag if flag in lists and "=" not in word else ""
            value_count = 0
        elif current:
            if value_count and is_override(word):
                current = ""
            elif value_count:
                out.append(current)
            value_count += 1
        out.append(word)
    return out


def _make_shared_parameters() -> list[inspect.Parameter]:
    """Return the parameters of all commands with settings: overrides, --preset, --config, ..."""
    description = "Any setting, such as actor.clip_ratio=0.1."
    return [
        make_argument("overrides", "[KEY=VALUE]...", description, several=True),
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        make_flag(
            "preset", str, None, "Bundled settings; `ppo presets list` has them.", "NAME",
            autocompletion=complete_from(lambda: [*preset_names(), *ALIASES]),
        ),
        make_flag(
            "config", list[str], None, "YAML file of settings; repeatable, the last wins.", "FILE"
        ),
        make_flag(
            "episodes", int, None,
            "Episodes to train on, in place of rows, where the environment opens them.", "N", min=1,
        ),
        make_flag("val_episodes", int, None, "Validation episodes, in place of rows.", "N", min=1),
    ]  # fmt: skip


def complete_from(words: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes a word in the shell from these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def _make_setting_flag(name: str, key: Key) -> inspect.Parameter:
    """Return the parameter for the flag of a setting; values other than booleans stay text."""
    # Booleans become a pair of flags; lists take one value per repetition.
    kind = bool if key.kind is bool else list[str] if key.is_list else str

    def list_words() -> Sequence[str]:
        return key.names.offered if key.names else offered_choices(key.choices)

    option = typer.Option(
        None,
        f"--{name}/--no_{name}" if kind is bool else f"--{name}",
        metavar=None if kind is bool else _choose_metavar(key),
        show_default=False,
        autocompletion=complete_from(list_words) if key.choices else None,
    )
    return _keyword_parameter(name, kind | None, option)


def format_help_line(key: Key) -> str:
    """Return the help of a setting: description, key, range, default, variable."""
    # Facts in brackets after the description; those that a setting does not have are left out.
    variable = f"env {key.env}" if key.env else ""
    facts = (key.name, describe_range(key), f"default {_format_default(key.default)}", variable)
    return f"{key.help} ({'; '.join(filter(None, facts))})"


def _format_default(default: Any) -> str:
    """Return a default as the help shows it."""
    if default is None or default == ():
        return "unset"
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    return str(default)


def _choose_metavar(key: Key) -> str:
    """Return the placeholder for a setting's value in the help, such as `N` or `TEXT...`."""
    if key.choices:
        return "WORD..." if key.is_list else "WORD"
    kind = get_args(key.kind)[0] if get_origin(key.kind) is tuple else key.kind
    word = {int: "N", float: "X"}.get(kind, "TEXT")
    return f"{word}..." if key.is_list else word


def _keyword_parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    """Return a keyword-only parameter with a typer option as its default."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )
