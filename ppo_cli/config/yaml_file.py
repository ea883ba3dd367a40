"""Read a YAML settings file as flat entries that remember their line."""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.config.values import Quoted, parse_yaml, repeated_keys
from ppo_cli.errors import ConfigError, did_you_mean

LARGEST_FILE = 2**20  # bytes; the largest preset has 3,000


@dataclass(frozen=True)
class Entry:
    """One setting as it was given: dotted name, raw value, and where it came from."""

    name: str
    raw: Any
    origin: str


def read_yaml(path: Path, label: str, example: str = "actor:") -> list[Entry]:
    """Return the entries of a settings file; `label` names the file in origins."""
    root = _compose(_text(path, label), label)
    if root is None:
        raise ConfigError(
            f"{label}: the file is empty. Write settings such as '{example}' into it."
        )
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{label}: expected settings such as '{example}', found {_kind(root)}.")
    problems: list[str] = []
    entries = _flatten(root, "", label, problems)
    problems += _twice(entries)
    if problems:
        raise ConfigError(problems)
    return entries


def _text(path: Path, label: str) -> str:
    try:
        return read_settings_text(path)
    except FileNotFoundError:
        beside = path.parent.glob("*") if path.parent.is_dir() else ()
        hint = did_you_mean(path.name, [p.name for p in beside])
        raise ConfigError(f"{label}: there is no such settings file.{hint}") from None
    except IsADirectoryError:
        raise ConfigError(f"{label}: this is a folder; name a YAML file.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{label}: this is not a text file in UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from None


def read_settings_text(path: Path) -> str:
    """Return the text of a file that a person wrote; a ValueError says what else it is.

    Never waits, as a pipe would have it, and never reads more than LARGEST_FILE.
    """
    there = path.stat()
    if stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(there.st_mode):
        raise ValueError("this is a pipe or a device; write the text to a file and name that.")
    if there.st_size > LARGEST_FILE:
        raise ValueError(
            f"this file has {there.st_size:,} bytes, more than the {LARGEST_FILE:,} that are read."
        )
    return path.read_text(encoding="utf-8")


def _compose(text: str, label: str) -> yaml.Node | None:
    try:
        return parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{label} line {mark.line + 1}" if mark else label
        began = error.context_mark
        since = f" (in what begins on line {began.line + 1})" if began else ""
        said = error.problem or error.context
        raise ConfigError(f"{where}: not valid YAML: {said}{since}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{label}: not valid YAML: {error}.") from None


def _flatten(node: yaml.MappingNode, prefix: str, label: str, problems: list[str]) -> list[Entry]:
    entries: list[Entry] = []
    for key, value in node.value:
        where = f"{label} line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
            problems.append(f"{where}: keys are plain words here; merge keys (<<) are not read.")
            continue
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            entries += _flatten(value, f"{name}.", label, problems)
        else:
            problems += [
                f"{label} line {inner.start_mark.line + 1}: the key '{inner.value}' stands twice "
                "in one group; keep one."
                for inner in repeated_keys(value)
            ]
            entries.append(Entry(name, _raw(value), where))
    return entries


def _twice(entries: list[Entry]) -> list[str]:
    first: dict[str, Entry] = {}
    problems = []
    for entry in entries:
        earlier = first.setdefault(entry.name, entry)
        if earlier is not entry:
            line = earlier.origin.rsplit(" ", 1)[-1]
            problems.append(
                f"{entry.origin}: {entry.name} was set on line {line} already; keep one of them."
            )
    return problems


def _raw(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_raw(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _raw(value) for key, value in node.value}
    if node.tag.endswith(":null"):
        return None
    style = node.style if isinstance(node, yaml.ScalarNode) else None
    return Quoted(node.value) if style in ("'", '"', "|", ">") else node.value


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"'{node.value}'"
