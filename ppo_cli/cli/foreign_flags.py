"""Reads command lines of other programs: TRL, OpenRLHF, Hugging Face's Trainer, their launchers.

foreign_flags.toml says what each of their flags is here. What has an equal is replaced, what
changes no result is left out with a note, and for the others a sentence says what to use.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path, PurePath
from typing import Any

from ppo_cli.config.schema.keys import table
from ppo_cli.errors import ppo

# difflib's similarity, from 0 to 1. Suggestions below it are rarely what was meant.
SUGGESTION_CUTOFF = 0.75
# Programs that start another one.
LAUNCHER = re.compile(
    r"(\S*/)?(accelerate|bash|conda|deepspeed|docker|env|mpirun|nohup|numactl|nsys|poetry|"
    r"python[\w.]*|ray|sh|srun|sudo|time|torchrun|trl|uv)$"
)
# Those whose own flags count processes, and their modules.
COUNTING = re.compile(
    r"(\S*/)?(accelerate|deepspeed|torchrun)$|torch\.distributed\.(run|launch)$|accelerate\.commands"
)
# What only the estimator gae uses.
CRITIC = re.compile(r"(--)?critic[._]|--cliprange_value|--lam$|trainer\.critic_warmup")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")  # in front of a command
OFF = frozenset({"false", "0", "no", "off"})
# verl's own configuration files; its defaults are built in.
VERL_FILES = frozenset({"ppo_trainer", "ppo_megatron_trainer"})


@cache
def load_foreign_flags() -> dict[str, dict[str, Any]]:
    """Read foreign_flags.toml; its comments say what each table is."""
    import tomllib

    return tomllib.loads(Path(__file__).with_name("foreign_flags.toml").read_text("utf-8"))


@cache
def own_flags() -> frozenset[str]:
    """Return the flags of our settings."""
    return frozenset(key.flag for key in table().values() if key.flag)


@dataclass
class Translation:
    """Arguments of this program, what was left out and why, and what cannot be translated.

    `program` is the script, the module or the command of trl that a launcher would start; `values`
    has those of the line's flags, by their names in the tables of foreign_flags.toml.
    """

    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    program: str = ""
    values: dict[str, list[str]] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=load_foreign_flags)


def translate(args: Sequence[str]) -> Translation:
    """Replace flags of other programs by ours, or by KEY=VALUE for a setting without a flag.

    A launcher in front (`accelerate launch train.py`) is left out. Everything after a `--` stays.
    """
    done = Translation()
    line = _skip_launcher(args, done)
    parts = [part for flag in _split(line) for part in _open_file(*flag, done)]
    done.values = {_name(flag): values for flag, values in parts if values is not None}
    estimator = _estimator(done)
    for flag in done.tables["with"].keys() & {*done.values, estimator}:
        rows = done.tables["with"][flag]
        done.tables = {**done.tables, **{name: done.tables[name] | rows[name] for name in rows}}
    for flag, values in parts:
        if values is None:
            done.args.append(flag)
            continue
        replaced = _translate_flag(flag.partition("=")[0], values, done)
        if replaced is None:
            replaced = [flag, *([] if "=" in flag else values)]
        elif estimator not in ("", "gae"):
            if CRITIC.match("".join(replaced[:1])):
                done.notes.append(f"{flag} is left out: only the estimator gae uses it.")
                continue
            replaced = [argument for argument in replaced if not argument.startswith("critic.")]
        done.args += replaced
    if estimator in done.tables["estimators"] and "adv_estimator" not in " ".join(done.args):
        flags = done.tables["estimators"][estimator].split()
        if {"num_generations", "rloo_k", "config"} & done.values.keys():
            flags = flags[:2]
        done.args[:0] = flags
        done.notes.append(f"{' '.join(flags)}: that is what TRL's {estimator.upper()} is.")
    return done


def _split(args: Sequence[str]) -> Iterator[tuple[str, list[str] | None]]:
    """Yield each flag with its values, and each other argument with None."""
    end = args.index("--") if "--" in args else len(args)
    rest = list(args[:end])
    while rest:
        argument = rest.pop(0)
        _, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            yield argument, None
        elif equals:
            yield argument, [value]
        else:  # its values end at the next flag or override
            values = list(takewhile(lambda a: a[:2] != "--" and not is_override(a), rest))
            yield argument, values
            del rest[: len(values)]
    yield from ((argument, None) for argument in args[end:])


def _open_file(
    argument: str, values: list[str] | None, done: Translation
) -> Iterator[tuple[str, list[str] | None]]:
    """Yield the flags of TRL's YAML file for `--config FILE`; any other argument as it is."""
    path = Path("".join(values or []))
    flags = None
    if argument.partition("=")[0] == "--config" and path.is_file():
        import yaml

        # Reported with our own files.
        with suppress(ValueError, yaml.YAMLError, RecursionError):
            flags = yaml.safe_load(path.read_text("utf-8"))
    if not isinstance(flags, dict) or "model_name_or_path" not in flags:
        yield argument, values
        return
    done.notes.append(f"{path} has flags of TRL.")
    for name, value in flags.items():
        if isinstance(value, list):
            yield f"--{name}", [str(item) for item in value]
        elif value is not None:
            yield f"--{name}={value}", [str(value)]


def _name(flag: str) -> str:
    """Return the name of a flag in foreign_flags.toml."""
    typed = flag.partition("=")[0][2:].replace("-", "_")
    return str(load_foreign_flags()["renamed"].get(typed, typed))


def _translate_flag(flag: str, values: list[str], done: Translation) -> list[str] | None:
    """Return the arguments for a flag and its values; None to leave them as they are."""
    flags, name = done.tables, _name(flag)
    value = values[0].lower() if len(values) == 1 else ""
    if name in flags["values"]:
        meanings = flags["values"][name]
        if value in meanings:
            return list(meanings[value].split())
        if not any(name in flags[t] for t in ("aliases", "several")):
            if name in flags["pointers"] or f"--{name}" in own_flags() or not values:
                return None
            offered = ", ".join(meanings)
            done.problems.append(f"{flag} {' '.join(values)} is not offered; there are {offered}.")
            return []
    if name in flags["ignored"]:
        done.notes.append(f"{flag} is left out: {flags['ignored'][name].format(ppo=ppo())}.")
        return []
    if name in flags["switches"]:
        settings = flags["switches"][name].split()
        return [] if value in OFF else settings
    if name in flags["pointers"] and value == "false":
        return []
    if name in flags["pairs"]:
        return [f"{k}={v}" for k, v in zip(flags["pairs"][name].split(), values, strict=False)]
    if name in flags["several"] and values:
        keys = flags["several"][name].split()
        return [key if "=" in key else _set(key, values) for key in keys]
    if name in ("config_name", "config_path"):
        return _skip_verl_file(flag, name, value, done)
    if name == "train_batch_size" and "rollout_batch_size" in done.values:
        return _count_prompts(flag, value, done)
    alias = flags["aliases"].get(name)
    if alias is None:
        # A flag that has our name, but for the dots.
        renamed = name != flag[2:].replace("-", "_") and name not in flags["pointers"]
        return [f"--{name}", *values] if renamed else None
    if alias.startswith("--"):
        return [alias, *values]
    return [_set(alias, values)] if values else None


def _set(key: str, values: Sequence[str]) -> str:
    """Return the override of a setting; several values are a list, commas between them or not."""
    if len(values) > 1:
        return f"{key}=[{','.join(value.strip(',') for value in values)}]"
    return f"{key}={values[0]}"


def _count_prompts(flag: str, value: str, done: Translation) -> list[str] | None:
    """Return OpenRLHF's responses of an optimizer step as prompts, if they divide."""
    samples = "".join(done.values.get("n_samples_per_prompt") or ["1"])
    if not (value.isdigit() and samples.isdigit() and int(samples)) or int(value) % int(samples):
        return None
    prompts = int(value) // int(samples)
    done.notes.append(f"{flag} {value} is --mini_batch_size {prompts}: {samples} to a prompt.")
    return ["--mini_batch_size", str(prompts)]


def _estimator(done: Translation) -> str:
    """Return the estimator that OpenRLHF's flag or TRL's script stands for; "" if none does."""
    values, program = done.values, done.program.lower()
    if named := values.get("advantage_estimator") or values.get("adv_estimator"):
        return named[0]
    if "rloo" in program or "rloo_k" in values:
        return "rloo"
    return "grpo" if "grpo" in program or "num_generations" in values else ""


def _skip_verl_file(flag: str, name: str, value: str, done: Translation) -> list[str] | None:
    """Leave out verl's own configuration files, whose defaults are built in; refuse others."""
    path = PurePath(value)
    if (path.stem if name == "config_name" else path.name) not in VERL_FILES | {"config"}:
        return None
    done.notes.append(f"{flag} {value} is left out: verl's defaults are built in.")
    return []


def _skip_launcher(args: Sequence[str], done: Translation) -> list[str]:
    """Return the arguments after a launcher and its program, with its counts of processes.

    `accelerate launch --num_processes 8 train.py`, `CUDA_VISIBLE_DEVICES=0 python3 -m verl…`,
    `trl grpo`, `ray job submit … -- python3 …`, `srun … bash -c "…"`.
    """
    line = list(args)
    start = next((i for i, argument in enumerate(line) if not VARIABLE.match(argument)), 0)
    if not line or not LAUNCHER.match(line[start]):
        return line
    for shell, dash, script in zip(line, line[1:], line[2:], strict=False):
        if shell.endswith("sh") and dash in ("-c", "-lc"):
            return _skip_launcher(shlex.split(script), done)
    # The program is a script, a module, or a command of trl.
    ends = (
        count
        for count, (before, argument) in enumerate(pairwise(["", *line]), 1)
        if argument.endswith(".py")
        or (before in ("-m", "--module", "trl") and not COUNTING.match(argument))
        or (re.search(r"python[\w.]*$", before) and not argument.startswith("-"))
    )
    end = next(ends, 0)
    if end == 0:
        return line
    done.program = PurePath(line[end - 1]).name
    while line[end:] and line[end].isalpha():  # a command of the script
        end += 1
    at = next((i for i in range(start, end) if line[i].startswith("--")), end)
    done.notes.append(f"`{' '.join(line[start:at])}` is left out: this program starts itself.")
    for variable in line[:start]:
        done.notes.append(f"{variable} is left out: write it in front of the command.")
    counting = max((i for i in range(end) if COUNTING.match(line[i])), default=end)
    flags: list[str] = []
    for flag, values in _split(line[counting:end]):
        name = _name(flag)
        listed = any(name in rows for rows in load_foreign_flags().values())
        if values is not None and (listed or f"--{name}" in own_flags()):
            flags += [flag, *([] if "=" in flag else values[:1])]
        elif values is not None and flag != "--module":
            done.notes.append(f"{flag} is left out: it is the launcher's.")
    return [*flags, *line[end:]]


def is_override(argument: str) -> bool:
    """Whether an argument is KEY=VALUE or ~KEY; `~/path` is a path."""
    return "=" in argument or (argument.startswith("~") and "/" not in argument)


def describe_unknown_flags(
    unknown: Iterable[str], flags: Iterable[str], program: str = ""
) -> list[str]:
    """Return errors for unknown flags, those with the same advice in one.

    `program` is the script or module of another program's line, which may have flags of its own.
    """
    names = {flag.lstrip("-"): flag for flag in flags}
    by_advice: dict[str, list[str]] = {}
    for flag in dict.fromkeys(unknown):
        by_advice.setdefault(_advise(flag, names, program), []).append(flag)
    return [f"there is no flag {', '.join(same)}{advice}" for advice, same in by_advice.items()]


def _advise(flag: str, names: dict[str, str], program: str) -> str:
    """Return what to use in place of an unknown flag, or a similar flag; `names` are ours."""
    foreign = load_foreign_flags()
    aliases, pointers, renamed = foreign["aliases"], foreign["pointers"], foreign["renamed"]
    typed = flag.lstrip("-").replace("-", "_")
    name = renamed.get(typed, typed)
    if name not in pointers:
        # A dotted name is a flag of OpenRLHF: only those are near it.
        candidates = [*renamed] if "." in typed else [*names, *aliases, *pointers]
        # In a line of another program an unknown flag is rather the script's own than mistyped.
        cutoff = 0.9 if program else SUGGESTION_CUTOFF
        near = difflib.get_close_matches(typed, candidates, n=1, cutoff=cutoff)
        if not near:
            return f": it is {program}'s own; see `{ppo('explain')} NAME`." if program else "."
        name = near[0]
    if name in pointers:
        return f": {pointers[name].format(ppo=ppo())}."
    return f". Did you mean '{names.get(name) or aliases.get(name) or '--' + name}'?"
