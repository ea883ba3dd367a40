"""The command line's flags, made from the schema: one parameter for each marked setting.

Values stay text until the resolver reads them, so that all mistakes are reported at once
and in the same words, wherever they come from.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperCommand

from ppo_cli.cli.app import describe_unknown_flag, replace_aliases
from ppo_cli.config.layers import Resolved
from ppo_cli.config.models.bundled import ALIASES, preset_names
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.keys import Key, describe_range, table
from ppo_cli.errors import ConfigError, ppo

PANELS = {"ref": "Reference", "trainer": "Run"}  # the others are called as their group
UNKNOWN_FLAGS = "ppo_cli.unknown_flags"  # where the parser's context keeps flags that do not exist
EXAMPLES = {
    "--train_files": "train.parquet",
    "--lr": "1e-6",
    "--batch_size": "256",
    "--reward_function": "my_reward.py:compute_score",
    "--resume": "never",
    "--logger": "console,tensorboard",
    "--reward": "judge:0.7",
    "--placement": "train:0-5,rollout:6-7",
}


@dataclass(frozen=True)
class Arguments:
    """What was typed after the command, not yet checked."""

    flags: Mapping[str, tuple[Any, str]]
    preset: str | None
    config_files: tuple[Path, ...]
    overrides: tuple[str, ...]
    extras: Mapping[str, Any]
    unknown: tuple[str, ...] = ()
    run: Path | None = None  # its settings are the defaults

    @property
    def on_verl(self) -> bool:
        """Whether the line is to run on verl."""
        engine = self.flags.get("trainer.engine", ("",))[0]
        return engine == "verl" or "trainer.engine=verl" in self.overrides

    def resolve_node(self) -> Resolved:
        """Put what was typed over the other layers, with what SLURM says of this node."""
        from ppo_cli.config.slurm import node_variables

        around = node_variables(os.environ, set(self.flags))
        return self.resolve({**os.environ, **around.values}, around.origins)

    def resolve(
        self,
        environ: Mapping[str, str] | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> Resolved:
        """Put what was typed over the other layers; `origins` names the source of variables.

        Raises one ConfigError with flags that do not exist and all that is wrong with the rest.
        """
        try:
            resolved = resolve(
                flags=self.flags,
                preset=self.preset,
                config_files=self.config_files,
                overrides=self.overrides,
                environ=os.environ if environ is None else environ,
                origins=origins,
                run=self.run,
            )
        except ConfigError as error:
            raise ConfigError([*self.unknown, *error.problems]) from error
        if self.unknown:
            raise ConfigError(self.unknown)
        return resolved


def flag_keys() -> dict[str, Key]:
    """Return the settings that have a flag, by parameter name."""
    return {key.flag.removeprefix("--"): key for key in table().values() if key.flag}


def add_command(
    app: typer.Typer,
    run: Callable[[Arguments], None],
    example: str,
    extras: Sequence[inspect.Parameter],
    shown: tuple[str, ...] = ("",),
) -> None:
    """Register a command with flags of its own, `extras`, and every flag of the schema.

    The help lists the settings whose keys start with one of `shown`. The other flags are accepted
    but hidden, so that the line of a training run can be reused.
    """
    keys = flag_keys()
    extra_names = {p.name for p in extras}

    def command(ctx: typer.Context, **typed: Any) -> None:
        flags = {
            key.name: (tuple(typed[name]) if key.is_list else typed[name], f"flag {key.flag}")
            for name, key in keys.items()
            if typed[name] not in (None, [], ())
        }
        run(
            Arguments(
                flags=flags,
                preset=typed["preset"],
                config_files=tuple(Path(p) for p in typed["config"] or ()),
                overrides=tuple(typed["overrides"] or ()),
                extras={name: typed[name] for name in extra_names},
                unknown=ctx.meta.get(UNKNOWN_FLAGS, ()),
            )
        )

    command.__doc__ = run.__doc__
    flags = [_make_setting_flag(name, key) for name, key in keys.items()]
    for parameter in flags:
        parameter.default.hidden = not keys[parameter.name].name.startswith(shown)
    # The file comes before the overrides, which take every word that is left.
    files = [p for p in extras if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    others = [p for p in extras if p not in files]
    layers = [p for p in _make_shared_parameters() if p.name not in extra_names]
    parameters = [*files, *layers, *others, *flags]
    app.command(run.__name__, cls=SettingsCommand, epilog=example)(
        set_parameters(command, parameters)
    )


def set_parameters(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> Any:
    """Tell Typer which arguments and flags a function takes."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def make_switch(name: str, description: str) -> inspect.Parameter:
    """Make an on-off flag of a command's own."""
    return _keyword_parameter(name, bool, typer.Option(False, f"--{name}", help=description))


def make_flag(
    name: str, kind: Any, default: Any, description: str, metavar: str | None = None, **options: Any
) -> inspect.Parameter:
    """Make a flag of a command's own; without a default it may be left out.

    `options` are other arguments of typer.Option, such as `min`.
    """
    shown = {"show_default": default is not None} | options
    option = typer.Option(default, f"--{name}", help=description, metavar=metavar, **shown)
    return _keyword_parameter(name, kind if default is not None else kind | None, option)


def make_file_argument(description: str, *, required: bool = False) -> inspect.Parameter:
    """Make the argument FILE of a command's own."""
    return make_argument("file", "FILE", description, required=required)


def make_argument(
    name: str,
    metavar: str,
    description: str,
    *,
    required: bool = False,
    several: bool = False,
    shown: str | bool = False,
) -> inspect.Parameter:
    """Make an argument of a command's own; one named `overrides` takes all words.

    `shown` is what the help says of its default.
    """
    kind: Any = list[str] if several else str
    default = ... if required else None
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=typer.Argument(default, metavar=metavar, help=description, show_default=shown),
        annotation=kind if required else kind | None,
    )


class SettingsCommand(TyperCommand):
    """A command whose list flags may be followed by several values.

    Flags of other programs are read as their own; those that do not exist are kept in `ctx.meta`,
    to be reported with all other mistakes.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat a list flag before each of its values, then parse as usual."""
        known_words, unknown = self._split_unknown_flags(replace_aliases(args))
        if unknown:
            names = [n for p in self.params for n in (*p.opts, *p.secondary_opts) if n[:2] == "--"]
            messages = [describe_unknown_flag(flag, names) for flag in unknown]
            messages[-1] += f" See `{ppo(ctx.command_path.partition(' ')[2])} --help`."
            ctx.meta[UNKNOWN_FLAGS] = tuple(messages)
        for param in self.params:
            _skip_check_when_absent(param)
        return super().parse_args(ctx, repeat_list_flags(known_words))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print plain help: in rich tables of 80 columns long flags would be cut."""
        self.rich_markup_mode = None
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the arguments, then the flags by what they set."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                default_panel = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(
                    getattr(param, "rich_help_panel", None) or default_panel, []
                ).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records, col_max=24)

    def _split_unknown_flags(self, args: list[str]) -> tuple[list[str], list[str]]:
        """Take out flags that do not exist, with the values that follow them."""
        takes_value = {
            name: not getattr(option, "is_flag", False)
            for option in self.params
            for name in (*option.opts, *option.secondary_opts)
        } | {"--help": False}
        known_words: list[str] = []
        unknown: list[str] = []
        rest = list(args)
        while rest:
            word = rest.pop(0)
            flag, equals, _ = word.replace("-", "_").partition("=")
            flag = f"--{flag[2:]}"
            if word == "--":
                return [*known_words, word, *rest], unknown
            if not word.startswith("--") or flag in takes_value:
                known_words.append(word)
                if word.startswith("--") and takes_value[flag] and not equals and rest:
                    known_words.append(rest.pop(0))
                continue
            unknown.append(word.partition("=")[0])
            while (
                not equals and rest and not rest[0].startswith("--") and not _is_override(rest[0])
            ):
                rest.pop(0)
        return known_words, unknown


def _skip_check_when_absent(param: Any) -> None:
    """Leave out the check of a flag that was not given: Typer's, of a hundred, take 0.1 s."""
    check, may = param.process_value, not param.required
    param.process_value = lambda ctx, value: None if value is None and may else check(ctx, value)


def repeat_list_flags(args: Sequence[str]) -> list[str]:
    """Turn `--train_files a b` into `--train_files a --train_files b`."""
    lists = {key.flag for key in flag_keys().values() if key.is_list}
    out: list[str] = []
    current, value_count = "", 0
    for index, word in enumerate(args):
        if word == "--":
            return [*out, *args[index:]]
        if word.startswith("--"):
            flag = "--" + word[2:].partition("=")[0].replace("-", "_")
            current = flag if flag in lists and "=" not in word else ""
            value_count = 0
        elif current:
            if value_count and _is_override(word):
                current = ""
            elif value_count:
                out.append(current)
            value_count += 1
        out.append(word)
    return out


def _is_override(word: str) -> bool:
    return "=" in word or (word.startswith("~") and "/" not in word)


def _make_shared_parameters() -> list[inspect.Parameter]:
    presets = ", ".join([*preset_names(), *ALIASES])
    description = "Any setting by its key: actor.clip_ratio=0.1"
    return [
        make_argument("overrides", "[KEY=VALUE]...", description, several=True),
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
        make_flag("preset", str, None, f"A bundled start: {presets}.", "NAME"),
        make_flag("config", list[str], None, "YAML settings; repeatable, later wins.", "FILE"),
        make_switch("debug", "Show tracebacks."),
    ]


def _make_setting_flag(name: str, key: Key) -> inspect.Parameter:
    group = key.name.partition(".")[0]
    kind = bool if key.kind is bool else list[str] if key.is_list else str
    option = typer.Option(
        None,
        f"--{name}/--no_{name}" if kind is bool else f"--{name}",
        help=help_line(key),
        rich_help_panel=PANELS.get(group, group.capitalize()),
        metavar=None if kind is bool else _choose_metavar(key),
        show_default=False,
    )
    return _keyword_parameter(name, kind | None, option)


def help_line(key: Key) -> str:
    """Return one setting's help: what it is, range, default, variable, key."""
    facts = [key.name]
    if describe_range(key):
        facts.append(describe_range(key))
    facts.append(f"default {_format_default(key.default)}")
    if key.env:
        facts.append(f"env {key.env}")
    if key.flag in EXAMPLES:
        facts.append(f"e.g. {key.flag} {EXAMPLES[key.flag]}")
    return f"{key.help} ({'; '.join(facts)})"


def _format_default(default: Any) -> str:
    if default is None or default == ():
        return "unset"
    if isinstance(default, tuple):
        return ",".join(str(item) for item in default)
    return str(default)


def _choose_metavar(key: Key) -> str:
    if key.choices:
        return "WORD..." if key.is_list else "WORD"
    kind = get_args(key.kind)[0] if get_origin(key.kind) is tuple else key.kind
    word = {int: "N", float: "X"}.get(kind, "TEXT")
    return f"{word}..." if key.is_list else word


def _keyword_parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation
    )
