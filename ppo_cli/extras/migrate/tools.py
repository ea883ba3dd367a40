"""Names the tool that a line or a file of settings is for, and what of it could be taken.

tools.toml has the tools by what shows them, and the names that mean the same here. Other names are
listed as they are: a similar name of another tool is never guessed.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ppo_cli.config.layers import MAX_FILE_BYTES
from ppo_cli.errors import list_some, ppo
from ppo_cli.paths import user_path

FILE = re.compile(r"\S+\.(ya?ml|toml)$")
OFFERED = re.compile("ppo|grpo|gspo|dapo|rloo|reinforce")
SHOWN = 12  # names that are listed as not taken
# Of values, only plain ones are taken.
PLAIN = (str, int, float)


@cache
def _load_tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("tools.toml").read_text("utf-8"))


def name_tool(args: Sequence[str]) -> str:
    """Return what a line or file of another tool is, and its line here; "" for any other."""
    files = {word: _read_file(word) for word in args if FILE.match(word)}
    # Values of flags and overrides are paths and names of any kind.
    # A launcher may have a switch before its script.
    launches = bool(args) and not re.match("--|.*=", args[0])
    line = " ".join(
        word.partition("=")[0] + "=" * ("=" in word)
        for before, word in pairwise(["", *args])
        if not before.startswith("--") or "=" in before or (launches and word.endswith(".py"))
    )
    for tool, shape in _load_tables()["tools"].items():
        keys = set(shape["keys"].split())
        shown = [file for file, top in files.items() if keys and keys <= top.keys()]
        if shown or re.search(shape["line"], line):
            fields = [f for top in files.values() for f in _flatten(top)]
            fields += [field for field in _split_words(args) if field[0] not in ("", "config")]
            if method := _find_other_method(shape, line, fields, any(files.values())):
                return (
                    f"This is a line of {tool}{_name_files(files)}, whose method `{method}` is not "
                    "offered: only RL with a reward is, PPO and its relatives. Give a model that "
                    f"was trained with it as --model; `{ppo('reward fit')}` trains a reward model"
                )
            is_grpo = "grpo" in f"{args} {fields}".lower()
            return _describe(tool, fields, [*files], ["--adv_estimator", "grpo"] * is_grpo)
    return ""


def _find_other_method(
    shape: Mapping[str, str], line: str, fields: Sequence[tuple[str, Any]], is_read: bool
) -> str:
    """Return the method of a line or a file, if it is not RL; "" if it is, or is not said."""
    if program := re.search(shape.get("others", r"(?!)"), line):
        return program.groupdict().get("method") or shape["usual"]
    methods = [str(value) for name, value in fields if name == shape.get("method") and value]
    method = methods[-1] if methods else shape.get("usual", "") * is_read
    return "" if OFFERED.search(method.lower()) else method


def _name_files(files: Iterable[str]) -> str:
    return f", with {', '.join(files)}" if files else ""


def _describe(
    tool: str, fields: Iterable[tuple[str, Any]], files: Sequence[str], method: Sequence[str]
) -> str:
    """Return the three parts of the answer: what it is, what could be taken, what not."""
    targets = {
        name: flag for flag, names in _load_tables()["fields"].items() for name in names.split()
    }
    taken: dict[str, str] = {}
    rest: dict[str, None] = {}
    for name, value in fields:
        flag = targets.get(name)
        if flag is not None and isinstance(value, PLAIN) and str(value).strip():
            taken[flag] = re.sub(r"#\d+$", "", str(value))  # swift's number of rows
        else:
            rest[name] = None
    words = [] if "--adv_estimator" in taken else list(method)
    words += [part for flag, value in taken.items() for part in _write(flag, value)]
    for flag, placeholder in (("--model", "MODEL"), ("--train_files", "FILE")):
        words += [] if flag in taken else [flag, placeholder]
    return (
        f"This is a line of {tool}{_name_files(files)}, which is not read. Its plain settings are "
        "here:\n"
        f"    {ppo('train')} {shlex.join(words)}\n"
        "    The reward is not among them: --reward_function FILE.py:NAME, --rule NAME or "
        "--use_api_reward.\n"
        f"    Not taken: {list_some(list(rest), SHOWN) or 'nothing'}"
    )


def _write(flag: str, value: str) -> list[str]:
    return [flag, value] if flag.startswith("--") else [f"{flag}={value}"]


def _read_file(word: str) -> Mapping[str, Any]:
    """Return the settings of a file; {} for one that cannot be read or is not a mapping."""
    import yaml

    path = user_path(word)
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return {}
        text = path.read_text("utf-8")
        read = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings by their dotted names."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = enumerate(value)
    else:
        yield name, value
    for key, inner in items:
        yield from _flatten(inner, f"{name}.{key}".strip(".").replace("-", "_"))


def _split_words(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags and overrides of a line with their first values."""
    for word, following in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word.startswith("--") or (equals and re.match(r"\+{0,2}[a-z][\w.]*$", name)):
            is_value = not following.startswith("--") and not equals
            value = value if equals else following * is_value
            yield name.strip("-+").replace("-", "_"), value.strip("'\"[]")
