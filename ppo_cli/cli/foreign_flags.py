"""Reads command lines of other programs: TRL, OpenRLHF, Hugging Face's Trainer, their launchers.

foreign_flags.toml says what each of their flags is here. What has an equal is replaced, what
changes no result is left out with a note, and for the others a sentence says what to use.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from ppo_cli.config.schema.keys import table
from ppo_cli.errors import ppo

# difflib's similarity, from 0 to 1. Suggestions below it are rarely what was meant.
SUGGESTION_CUTOFF = 0.75
# Programs that start another one, and the words that come before that one's flags.
LAUNCHERS = frozenset(
    {"accelerate", "deepspeed", "python", "python3", "ray", "torchrun", "trl", "uv"}
)
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
    """Arguments in our own words, what was left out and why, and what cannot be translated."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def translate(args: Sequence[str]) -> Translation:
    """Replace flags of other programs by ours, or by KEY=VALUE for a setting without a flag.

    Words of a launcher in front (`accelerate launch train.py`) are left out. Everything after a
    `--` stays.
    """
    done = Translation()
    rest = skip_launcher(args, done)
    while rest:
        word = rest.pop(0)
        if word == "--":
            done.words += [word, *rest]
            break
        if not word.startswith("--"):
            done.words.append(word)
            continue
        # The values of a flag end at the next flag or override.
        flag, equals, value = word.partition("=")
        count = next((i for i, w in enumerate(rest) if w[:2] == "--" or is_override(w)), len(rest))
        values = [value] if equals else rest[:count]
        replaced = _translate_flag(flag, values, done)
        if replaced is None:
            done.words.append(word)
            continue
        done.words += replaced
        if not equals:
            del rest[:count]
    return done


def _translate_flag(flag: str, values: list[str], done: Translation) -> list[str] | None:
    """Return the words that replace a flag and its values; None to leave them as they are."""
    flags = load_foreign_flags()
    typed = flag[2:].replace("-", "_")
    name = flags["renamed"].get(typed, typed)
    value = values[0].lower() if len(values) == 1 else ""
    if name in flags["values"]:
        meanings = flags["values"][name]
        if value in meanings:
            return list(meanings[value].split())
        if name in flags["pointers"] or f"--{name}" in own_flags() or not values:
            return None
        known = ", ".join(meanings)
        done.problems.append(f"{flag} {' '.join(values)} is not offered; there are {known}.")
        return []
    if name in flags["switches"]:
        settings = flags["switches"][name].split()
        return [] if value in OFF else settings
    if name in flags["pairs"]:
        return [f"{k}={v}" for k, v in zip(flags["pairs"][name].split(), values, strict=False)]
    if name in flags["several"] and values:
        return [_set(key, values) for key in flags["several"][name].split()]
    if name in flags["ignored"]:
        done.notes.append(f"{flag} is left out: {flags['ignored'][name].format(ppo=ppo())}.")
        return []
    if name in ("config_name", "config_path"):
        return _skip_verl_file(flag, name, value, done)
    alias = flags["aliases"].get(name)
    if alias is None:
        # A flag that has our name, but for the dots.
        return [f"--{name}", *values] if typed != name and name not in flags["pointers"] else None
    if alias.startswith("--"):
        return [alias, *values]
    return [_set(alias, values)] if values else None


def _set(key: str, values: Sequence[str]) -> str:
    """Return the override of a setting; several values are a list."""
    return f"{key}={values[0] if len(values) == 1 else '[' + ','.join(values) + ']'}"


def _skip_verl_file(flag: str, name: str, value: str, done: Translation) -> list[str] | None:
    """Leave out verl's own configuration files, whose defaults are built in; refuse others."""
    path = PurePath(value)
    if (path.stem if name == "config_name" else path.name) not in VERL_FILES | {"config"}:
        return None
    done.notes.append(f"{flag} {value} is left out: verl's defaults are built in.")
    return []


def skip_launcher(args: Sequence[str], done: Translation) -> list[str]:
    """Return the arguments without the words of a launcher; its flags stay, and are translated.

    `accelerate launch --num_processes 8 train.py`, `python3 -m verl.trainer.main_ppo`, `trl grpo`,
    and `ray job submit … -- python3 …`.
    """
    words = list(args)
    if not words or words[0] not in LAUNCHERS:
        return words
    if words[0] == "ray" and "--" in words:
        words = words[words.index("--") + 1 :]
    end = next(_program_ends(words), 0)
    if end == 0:
        return words
    launcher = words[:end]
    at = next((i for i, word in enumerate(launcher) if word.startswith("--")), end)
    done.notes.append(f"`{' '.join(launcher[:at])}` is left out: this program starts itself.")
    # The launcher's flags, without the script or the module that it starts.
    flags = [word for word in launcher[at:] if not word.endswith(".py") and word != "--module"]
    return [*flags, *words[end:]]


def _program_ends(words: Sequence[str]) -> Iterator[int]:
    """Yield the numbers of words up to a script, a module, or a command of trl."""
    for index, word in enumerate(words):
        if word.endswith(".py") or (index and words[index - 1] in ("-m", "--module", "trl")):
            yield index + 1


def is_override(word: str) -> bool:
    """Whether an argument is KEY=VALUE or ~KEY; `~/path` is a path."""
    return "=" in word or (word.startswith("~") and "/" not in word)


def describe_unknown_flags(unknown: Iterable[str], flags: Iterable[str]) -> list[str]:
    """Return errors for unknown flags, those with the same advice in one."""
    names = {word.lstrip("-"): word for word in flags}
    by_advice: dict[str, list[str]] = {}
    for flag in unknown:
        by_advice.setdefault(_advise(flag, names), []).append(flag)
    return [f"there is no flag {', '.join(same)}{advice}" for advice, same in by_advice.items()]


def _advise(flag: str, names: dict[str, str]) -> str:
    """Return what to use in place of an unknown flag, or a similar flag; `names` are ours."""
    foreign = load_foreign_flags()
    aliases, pointers, renamed = foreign["aliases"], foreign["pointers"], foreign["renamed"]
    typed = flag.lstrip("-").replace("-", "_")
    name = renamed.get(typed, typed)
    if name not in pointers:
        # A dotted name is a flag of OpenRLHF: only those are near it.
        candidates = [*renamed] if "." in typed else [*names, *aliases, *pointers]
        near = difflib.get_close_matches(typed, candidates, n=1, cutoff=SUGGESTION_CUTOFF)
        if not near:
            return "."
        name = near[0]
    if name in pointers:
        return f": {pointers[name].format(ppo=ppo())}."
    return f". Did you mean '{names.get(name) or aliases.get(name) or '--' + name}'?"
