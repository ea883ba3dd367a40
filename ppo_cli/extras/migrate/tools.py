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
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from ppo_cli.config.layers import MAX_FILE_BYTES
from ppo_cli.config.schema.keys import table
from ppo_cli.errors import list_some, ppo
from ppo_cli.paths import user_path

FILE = re.compile(r"\S+\.(ya?ml|toml)$")
OFFERED = re.compile("ppo|grpo|gspo|dapo|rloo|reinforce")
SHOWN = 12  # names that are listed as not taken
# Of values, only plain ones are taken.
PLAIN = (str, int, float)
FILES = ("--train_files", "--val_files")
NUMBER = re.compile(r"[\d.]*$")  # a share of the set in front of it


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
            estimator = ["--adv_estimator", "grpo"] * is_grpo
            return _describe(tool, shape, dict(fields), [*files], estimator)
    return ""


def _find_other_method(
    shape: Mapping[str, str], line: str, fields: Sequence[tuple[str, Any]], is_read: bool
) -> str:
    """Return the method of a line or a file, if it is not RL; "" if it is, or is not said."""
    if program := re.search(shape.get("others", r"(?!)"), line):
        return program.groupdict().get("method") or shape["usual"]
    named = (value for name, value in fields if name == shape.get("method"))
    methods = [text for value in named for text in _read_values(value, {})]
    method = methods[-1] if methods else shape.get("usual", "") * is_read
    return "" if OFFERED.search(method.lower()) else method


def _name_files(files: Iterable[str]) -> str:
    return f", with {', '.join(files)}" if files else ""


def _describe(
    tool: str,
    shape: Mapping[str, Any],
    settings: Mapping[str, Any],
    files: Sequence[str],
    method: Sequence[str],
) -> str:
    """Return the three parts of the answer: what it is, what could be taken, what not."""
    tables = (_load_tables()["fields"], shape.get("fields", {}))
    targets = {name: flag for t in tables for flag, names in t.items() for name in names.split()}
    flags: dict[str, list[str]] = {}
    rest: dict[str, None] = {}
    for name, setting in settings.items():
        flag = targets.get(re.sub(r"\.\d+\.", ".0.", name))
        values = _read_values(setting, settings)
        if flag == "--adv_estimator":
            values = _load_tables()["estimators"].get("".join(values), "").split()
        if flag in FILES:
            parts = [part for v in values for part in v.split(",") if not NUMBER.match(part)]
            values = flags.get(flag, []) * bool(parts) + [_name_set(part) for part in parts]
        if flag and (len(values) == 1 or (values and flag in ("--adv_estimator", *FILES))):
            flags[flag] = values
        else:
            rest[name] = None
    # Some count a step in responses.
    responses = " ".join(_read_values(settings.get(shape.get("responses", "")), settings))
    samples = flags.get("--rollout_n", ["0"])[0]
    if responses.isdigit() and samples.strip("0").isdigit():
        prompts, remainder = divmod(int(responses), int(samples))
        if not remainder:
            flags["--batch_size"] = [str(prompts)]
            del rest[shape["responses"]]
    processes = "".join(_read_values(settings.get(shape.get("processes", "")), settings)[:1])
    if processes.isdigit() and flags.get("--batch_size", [""])[0].isdigit():
        flags["--batch_size"] = [str(int(flags["--batch_size"][0]) * int(processes))]
        del rest[shape["processes"]]
    # A mini-batch has to divide a larger batch.
    batch, mini = flags.get("--batch_size", ["0"])[0], table()["actor.ppo_mini_batch_size"].default
    if batch.isdigit() and int(batch) > mini and int(batch) % mini:
        flags.setdefault("--mini_batch_size", [batch])
    arguments = [] if "--adv_estimator" in flags else list(method)
    arguments += [part for flag, values in flags.items() for part in _write(flag, values)]
    placeholders = {"--model": "MODEL", "--train_files": "FILE"}
    # Our default, one response to a prompt, is not enough for its groups.
    placeholders |= {"--rollout_n": "N"} if "grpo" in arguments else {}
    arguments += [
        w for flag, text in placeholders.items() if flag not in flags for w in (flag, text)
    ]
    reward = (
        "    The reward is not among them: --reward_function FILE.py:NAME, --rule NAME or "
        "--use_api_reward.\n"
    )
    return (
        f"This is a line of {tool}{_name_files(files)}, which is not read. Its plain settings are "
        "here:\n"
        f"    {ppo('train')} {shlex.join(arguments)}\n"
        f"{reward * ('--reward_model' not in flags)}"
        f"    Not taken: {list_some(list(rest), SHOWN) or 'nothing'}"
    )


def _read_values(setting: Any, settings: Mapping[str, Any]) -> list[str]:
    """Return the plain values of a setting, or of the one that `${NAME}` refers to; else []."""
    if reference := re.fullmatch(r"\$\{([\w.]+)\}", str(setting)):
        setting = settings.get(reference[1])
    values = [setting] if isinstance(setting, PLAIN) else setting
    if not isinstance(values, list) or not all(isinstance(value, PLAIN) for value in values):
        return []
    texts = [re.sub(r"^(\d+)\.0$", r"\1", str(value).strip()) for value in values]
    return [] if any("${" in text for text in texts) else [text for text in texts if text]


def _name_set(name: str) -> str:
    """Return a set's name here, without swift's `#ROWS`; RL2's are SPLIT@NAME:CONFIGURATION."""
    name = re.sub(r"#\d+$", "", name.strip(" '\""))
    split = re.fullmatch(r"(\w+)@([^:]+)(?::([\w-]+))?", name)
    return f"{split[2]}{'/' * bool(split[3])}{split[3] or ''}:{split[1]}" if split else name


def _write(flag: str, values: Sequence[str]) -> list[str]:
    return [flag, *values] if flag.startswith("--") else [f"{flag}={values[0]}"]


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


def _split_words(args: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the flags and overrides of a line with their values."""
    for place, word in enumerate(args):
        name, equals, value = word.partition("=")
        if word.startswith("--") or (equals and re.match(r"\+{0,2}[a-z][\w.]*$", name)):
            after = takewhile(lambda w: not w.startswith("--") and "=" not in w, args[place + 1 :])
            values = [value] if equals else [*after]
            yield name.strip("-+").replace("-", "_"), [v.strip("'\"[]") for v in values]
