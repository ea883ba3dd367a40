"""The settings as a flat table, read from the schema, and how raw values become typed ones.

Every layer hands its values over as text, so there is one way in which a number, a switch or
a list is read, wherever it was written: strict, but friendly. A list is items that are apart
already (YAML); a tuple is what a repeated flag collected, and each text of it may hold several.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

import yaml

from ppo_cli.config.mixture import judges_of, models_of
from ppo_cli.config.models.bundled import EMBEDDED, preset_path
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.placement import gpu_count
from ppo_cli.config.schema.keys import find_key, table
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.values import (
    Quoted,
    is_unset,
    parse_list,
    parse_yaml,
    repeated_keys,
    unquote,
)
from ppo_cli.data_sets.files import saved_splits
from ppo_cli.errors import ConfigError, did_you_mean

DEFAULT = "default"


@dataclass(frozen=True)
class Resolved:
    """A checked configuration, where each value came from, and remarks to print."""

    config: Config
    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    verl: bool = False


CONFIG_FILE, RUN_ORIGIN = "config.yaml", "settings of "  # a run folder's file, and its origin
MAX_FILE_BYTES = 2**20  # bytes; the largest preset has 3,000


@dataclass(frozen=True)
class Entry:
    """One setting as it was given: dotted name, raw value, and where it came from."""

    name: str
    raw: Any
    origin: str


class Reset:
    """The raw value of `~key`: back to the schema's default."""


Lookup = Callable[[str], Any]


@dataclass(frozen=True)
class DerivedValue:
    """A raw value that depends on other settings; computed once these are known.

    One that `yields` gives way to a plain value for the same setting.
    """

    compute: Callable[[Lookup], Any]
    yields: bool = False


@dataclass(frozen=True)
class Expectation:
    """Something that must hold of the whole configuration, because a setting said so."""

    origin: str
    holds: Callable[[Lookup], bool]
    otherwise: str


def read_yaml(path: Path, label: str, example: str = "actor:") -> list[Entry]:
    """Return the entries of a settings file; `label` names the file in origins."""
    try:
        root = parse_yaml(read_settings_text(path, label))
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, label)) from None
    if root is None:
        raise ConfigError(
            f"{label}: the file is empty. Write settings such as '{example}' into it."
        )
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{label}: expected settings such as '{example}', found {_describe_node(root)}."
        )
    problems: list[str] = []
    entries = _flatten_yaml(root, "", label, problems)
    problems += _find_duplicates(entries)
    if problems:
        raise ConfigError(problems)
    return entries


def read_settings_text(path: Path, label: str) -> str:
    """Return the text of a file that a person wrote; ConfigError says why it cannot be read.

    Never waits, as a pipe would have it, and never reads more than LARGEST_FILE.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            problem = "this is a folder; name a YAML file."
        elif not stat.S_ISREG(status.st_mode):
            problem = "this is a pipe or a device; write the text to a file and name that."
        elif status.st_size > MAX_FILE_BYTES:
            limit = f"more than the {MAX_FILE_BYTES:,} that are read"
            problem = f"this file has {status.st_size:,} bytes, {limit}."
        else:
            return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = path.parent.glob("*") if path.parent.is_dir() else ()
        problem = f"there is no such file.{did_you_mean(path.name, [p.name for p in beside])}"
    except UnicodeDecodeError:
        problem = "this is not a text file in UTF-8."
    except (OSError, ValueError) as error:  # a path may hold what no path can
        problem = f"cannot be read ({getattr(error, 'strerror', None) or error})."
    raise ConfigError(f"{label}: {problem}")


def yaml_problem(error: yaml.YAMLError, label: str) -> str:
    """Say what keeps a file from being YAML, and in which line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{label}: not valid YAML: {error}."
    mark, began = error.problem_mark or error.context_mark, error.context_mark
    where = f"{label} line {mark.line + 1}" if mark else label
    since = f" (in what begins on line {began.line + 1})" if began else ""
    return f"{where}: not valid YAML: {error.problem or error.context}{since}."


def _flatten_yaml(
    node: yaml.MappingNode, prefix: str, label: str, problems: list[str]
) -> list[Entry]:
    entries: list[Entry] = []
    for key, value in node.value:
        where = f"{label} line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
            problems.append(f"{where}: keys are plain words here; merge keys (<<) are not read.")
            continue
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            entries += _flatten_yaml(value, f"{name}.", label, problems)
        else:
            problems += [
                f"{label} line {inner.start_mark.line + 1}: the key '{inner.value}' stands twice "
                "in one group; keep one."
                for inner in repeated_keys(value)
            ]
            entries.append(Entry(name, _raw_value(value), where))
    return entries


def _find_duplicates(entries: list[Entry]) -> list[str]:
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


def _raw_value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_raw_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _raw_value(value) for key, value in node.value}
    if node.tag.endswith(":null"):
        return None
    style = node.style if isinstance(node, yaml.ScalarNode) else None
    return Quoted(node.value) if style in ("'", '"', "|", ">") else node.value


def _describe_node(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else f"'{node.value}'"


API = "reward.api."
SWITCH = f"{API}enable"
FILE = "reward.config_file"
# What a section of a reward file stands for, other words in it, and an example.
SECTIONS = {
    **dict.fromkeys(("api", "api_reward", "api_reward_config"), "api"),
    **dict.fromkeys(("composite", "composite_reward"), "composite"),
    **dict.fromkeys(("shaping", "reward_shaping"), "shaping"),
    **dict.fromkeys(("code", "code_reward"), "code"),
    "reward_model": "model",
}
OTHER_WORDS = {
    "api": {
        "api_type": "type", "provider": "type", "model_name": "model", "api_base": "base_url",
        "endpoint": "base_url", "api_key_env": "key_env", "preset": "prompt_preset",
        "prompt": "scoring_prompt", "rpm": "max_rpm", "tpm": "max_tpm",
        "max_concurrency": "concurrency", "num_votes": "votes", "enabled": "enable",
    },
    "composite": {"enabled": "enable"},
    "model": {"model_path": "path", "name": "path", "model": "path", "api_key_env": "key_env"},
}  # fmt: skip
EXAMPLES = {
    "composite": "weights: {judge: 0.7, rule: 0.3}",
    "model": "path: DIR",
    "shaping": "overlong_buffer: 64",
    "code": "score: share",
}
# Files that are read where a run starts, once it has a judge or a reward model.
JUDGE_FILE, MODEL_FILE = "api_reward_config.yaml", "reward_model_config.yaml"
MODEL_SWITCH = "reward_model.enable"
_SECRET = re.compile(r"(?:^|_)(?:api_?keys?|key|token|secret|password)$|^authorization$")
_VARIABLE = re.compile(r"\$\{?(?:oc\.env:)?([A-Za-z_]\w*)\}?")


def find_reward_files(reward: Reward, *, named: bool) -> list[str]:
    """Return the reward files in the current folder that concern a reward; `named` takes none."""
    uses = {JUDGE_FILE: bool(judges_of(reward)), MODEL_FILE: bool(models_of(reward))}
    return [file for file, used in uses.items() if used and not named and Path(file).is_file()]


def read_reward_file(path: Path, label: str) -> list[Entry]:
    """Return the entries of a reward file under the schema's names; all problems at once."""
    file_entries = read_yaml(path.expanduser(), label, example="api:")
    if not file_entries:
        raise ConfigError(f"{label}: the file holds no setting. Write settings such as 'api:'.")
    problems: list[str] = []
    entries: list[Entry] = []
    rules = any(_plain(e.name) in ("function", "rule", "reward_function") for e in file_entries)
    for entry in file_entries:
        try:
            name = _own_name(entry, file_entries, rules=rules)
        except ValueError as error:
            problems.append(f"{entry.origin}: {error}")
            continue
        raw = entry.raw
        if name == f"{API}scale" and isinstance(raw, list) and len(raw) == 2:  # its two ends
            raw = "-".join(str(end) for end in parse_list(raw))
        entries.append(Entry(name, raw, entry.origin))
    problems += _find_duplicates(entries)
    if problems:
        raise ConfigError(problems)
    # A file that sets a judge up, and does not say whether, switches it on.
    first = next((entry for entry in entries if entry.name.startswith(API)), None)
    if first is not None and all(entry.name != SWITCH for entry in entries):
        return [Entry(SWITCH, "true", first.origin), *entries]
    return entries


def _own_name(entry: Entry, file_entries: list[Entry], *, rules: bool) -> str:
    """Return the schema's name of an entry; ValueError says why it has none."""
    parts = entry.name.split(".")
    path = [_plain(part) for part in parts]
    rooted = path[0] == "reward" and len(path) > 1
    if rooted:
        parts, path = parts[1:], path[1:]
    section = SECTIONS.get(path[0], "") if len(path) > 1 else ""
    # Names of parts, and arguments of a function, are free.
    named = path[3:] if section == "composite" and path[1] in ("parts", "weights") else path
    if "function_kwargs" not in path and any(_SECRET.search(part) for part in named):
        raise ValueError(_no_secrets(entry, file_entries))
    if path == ["timeout"] and rules and not rooted:
        raise ValueError(
            "timeout may be the judge's or the rule's; write api.timeout or reward.timeout."
        )
    empty = path[0] in ("reward", *SECTIONS) and not entry.raw
    groups = ["reward.", API] if rooted else [API, "reward."]
    if section:
        groups, path, parts = [f"reward.{section}."], path[1:], parts[1:]
        empty = section == "composite" and entry.raw == {}
    if section == "model" and path in (["enable"], ["enabled"]):
        return MODEL_SWITCH
    candidates = [_setting(group, path, parts) for group in groups]
    candidates.append(_by_flag(path, groups[0] if section else "reward."))
    name = next((name for name in candidates if name is not None), None)
    if name is None or empty:
        raise ValueError(_unknown(entry, path, section, empty=empty))
    return name


def _plain(word: str) -> str:
    """Read `--RM-Model` as `rm_model`."""
    return word.lower().replace("-", "_").strip("_")


def _setting(group: str, path: list[str], parts: list[str]) -> str | None:
    """Return the setting of a key in a group; free words below it stay as `parts` has them."""
    section = group.removeprefix("reward.").removesuffix(".")
    leaf = OTHER_WORDS.get(section, {}).get(path[0], path[0])
    names = (f"{group}{'.'.join([leaf, *path[1:]])}", f"{group}{'.'.join([leaf, *parts[1:]])}")
    setting_name = names[0] if names[0] in table() else names[1]
    return setting_name if find_key(setting_name) is not None and setting_name != FILE else None


def _by_flag(path: list[str], group: str) -> str | None:
    group_keys = (k for k in table().values() if k.name.startswith(group) and k.name != FILE)
    return next((k.name for k in group_keys if [k.flag] == [f"--{word}" for word in path]), None)


def _no_secrets(entry: Entry, file_entries: list[Entry]) -> str:
    """Say where a key belongs; its value is shown nowhere."""
    raw_values = {_plain(e.name.rsplit(".", 1)[-1]): str(e.raw) for e in file_entries}
    kind = next((raw_values[k] for k in ("type", "api_type", "rm_api_type") if k in raw_values), "")
    usual = (
        JUDGES[kind].keys
        if kind in JUDGES
        else tuple(api.keys[0] for api in JUDGES.values() if api.keys)
    )
    variable = _VARIABLE.fullmatch(str(entry.raw))
    other = variable[1] if variable else "NAME"
    return (
        f"'{entry.name}' holds a secret, and keys belong into the environment: set "
        f"{' or '.join(usual)} there, or name another variable with key_env: {other} "
        "(reward.api.key_env, --rm_key_env)."
    )


def _unknown(entry: Entry, path: list[str], section: str, *, empty: bool) -> str:
    """Say why a key of a reward file, `path` below its section, is no setting."""
    group = section or SECTIONS.get(path[0], "")
    if empty or (len(path) == 1 and path[0] in (*SECTIONS, "reward", "monitor")):
        example = EXAMPLES.get(group, "model: NAME")
        return f"{entry.name} is a group of settings; write them below it, such as {example}."
    owner = _setting(API, path[:1], path[:1]) or _by_flag(path[:1], "reward.")
    if owner is not None and len(path) > 1:
        return f"{entry.name}: {owner} is one value, not a group."
    if find_key(entry.name) is not None and not entry.name.startswith("reward."):
        return f"{entry.name} is not a setting of the reward; put it in a --config file."
    section_keys = [k for k in table().values() if k.name.startswith(f"reward.{section}")]
    leaves = [k.name.rsplit(".", 1)[-1] for k in section_keys]
    if section:
        near = did_you_mean(path[0], [*leaves, *OTHER_WORDS.get(section, {})])
        where = ".".join(entry.name.split(".")[: -len(path)])
        near = near or f" Known: {', '.join(leaves)}."
        return f"there is no setting '{path[0]}' in {where}.{near}"
    flags = [k.flag.removeprefix("--") for k in section_keys if k.flag]
    near = did_you_mean(path[-1], [*leaves, *flags, *OTHER_WORDS["api"], *SECTIONS])
    return f"there is no setting '{entry.name}' of the reward.{near}"


Reader = Callable[[Path, str], list[Entry]]
MODEL_KEYS = frozenset({"model.path", "actor_rollout_ref.model.path", "critic.model.path"})
DATA_FOLDER = "data.path"
DATA_FILE = r"[-_.].*?\.?(parquet|arrow|(json|jsonl|ndjson)(\.gz)?)"  # after the name of the split
VALIDATION = ("test", "val", "validation", "valid", "eval", "dev")  # names of files, in this order
PROMPT_KEYS = ("data.train_files", "data.val_files")
REWARD_FILE = "reward.config_file"
GPU_KEYS = frozenset({"trainer.n_gpus_per_node"})
EMBEDDED_NOTE = (
    "No GPU and no --model: training the small model that ships with ppo-cli (preset embedded)."
)
# Where GPUs are asked for, that there is none is told when they are counted.
EMBEDDED_NOTE_GPUS = EMBEDDED_NOTE.replace("No GPU and no", "No")
PROMPTS_NOTE = (
    "No --train_files: training on the prompts that ship with ppo-cli, sums such as 93 + 58."
)


@dataclass
class Layers:
    """The layers in order, and what was found wrong or worth a remark while reading them."""

    layers: list[list[Entry]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, path: Path, label: str, reader: Reader = read_yaml) -> list[Entry]:
        """Read a file as a layer of its own; a file that does not read is a problem."""
        try:
            return reader(path, label)
        except ConfigError as error:
            self.problems += error.problems
            return []


def read_layers(
    flags: Mapping[str, tuple[Any, str]],
    preset: str | None,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    origins: Mapping[str, str] | None = None,
    reward_files: Sequence[str] = (),
    run: Path | None = None,
) -> Layers:
    """Read all layers: preset < run < files < reward file < variables < flags < overrides.

    `run` is the folder of a run whose settings are the defaults. `origins` says of variables where
    they really come from, such as SLURM's. `reward_files` were named by nobody and lie below the
    settings files.
    """
    gathered = Layers()
    low = [_read_preset(gathered, preset)] if preset else []
    low += [gathered.read(Path(name), name, read_reward_file) for name in reward_files]
    if run is not None:
        entries = gathered.read(run / CONFIG_FILE, f"{RUN_ORIGIN}{run}")
        low.append([e for e in entries if e.name != REWARD_FILE])  # its settings are among them
    low += [gathered.read(Path(path), str(path)) for path in config_files]
    flag_entries = [Entry(name, raw, origin) for name, (raw, origin) in flags.items()]
    high = [
        _read_variables(environ, origins or {}),
        flag_entries,
        _read_overrides(gathered, overrides),
    ]
    _expand_data_path(low, high)
    layers = _insert_reward_file(gathered, low, high)
    if not preset and not _sets_any(layers, MODEL_KEYS) and gpu_count(environ) == 0:
        layers.insert(0, _read_preset(gathered, "embedded"))
        gathered.notes.append(EMBEDDED_NOTE_GPUS if _sets_any(layers, GPU_KEYS) else EMBEDDED_NOTE)
    elif not preset and not _sets_any(layers, PROMPT_KEYS[:1]):
        # A preset is made for prompts of its own; anything else may start on the bundled ones.
        origin = "bundled prompts (no --train_files)"
        absent = [key for key in PROMPT_KEYS if not _sets_any(layers, (key,))]
        layers.insert(0, [Entry(key, [EMBEDDED], origin) for key in absent])
        gathered.notes.append(PROMPTS_NOTE)
    gathered.layers = layers
    return gathered


def find_run_code(
    entries: Mapping[str, Entry], values: Mapping[str, Any], run: Path
) -> Iterator[str]:
    """Say which settings of a run folder would run code that comes with it, or let it run.

    Whoever made the folder does not decide what runs on this machine. Plain consents are left out
    before.
    """
    for name, entry in entries.items():
        key = find_key(name)
        if key is None or not entry.origin.startswith(RUN_ORIGIN):
            continue
        for text in (name.removeprefix(key.name), *_iterate_texts(values.get(name))):
            file = Path(os.path.expanduser(text.partition(":")[0]))
            is_code = bool(text) and (file.suffix == ".py" or name.endswith("function"))
            inside = is_code and file.resolve().is_relative_to(run.resolve())
            allows = get_origin(key.kind) is dict and "trust_remote_code" in text.replace("-", "_")
            if inside or allows:
                yield (
                    f"{entry.origin}: {name} would run code that comes with a run. If you allow "
                    f"it, name these settings yourself: --config {run / CONFIG_FILE}"
                )
                break


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield all texts of a value, the keys of groups too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (
            text for item in value.items() for inner in item for text in _iterate_texts(inner)
        )
    elif isinstance(value, list | tuple):
        yield from (text for inner in value for text in _iterate_texts(inner))


def _read_preset(gathered: Layers, name: str) -> list[Entry]:
    try:
        return gathered.read(preset_path(name), f"preset {name}")
    except ConfigError as error:
        gathered.problems += (f"flag --preset: {problem}" for problem in error.problems)
        return []


def _read_variables(environ: Mapping[str, str], origins: Mapping[str, str]) -> list[Entry]:
    """Variables that are set; an empty one counts as not set."""
    named = ((key, environ.get(key.env, "")) for key in table().values() if key.env)
    return [
        Entry(key.name, unquote(text), origins.get(str(key.env), f"env {key.env}"))
        for key, text in named
        if unquote(text)
    ]


def _read_overrides(gathered: Layers, overrides: Sequence[str]) -> list[Entry]:
    entries: list[Entry] = []
    for text in overrides:
        if text.startswith("~") and "=" not in text:
            entries.append(Entry(text[1:], Reset(), "override"))
            continue
        name, equals, raw = text.partition("=")
        name = name.lstrip("+").strip()
        if not equals or not name:
            gathered.problems.append(
                f"'{text}' is neither a flag nor an override: write key=value, such as "
                "actor.clip_ratio=0.1."
            )
            continue
        entry = Entry(name, unquote(raw), "override")
        earlier = next((e for e in entries if e.name == name), entry)
        if earlier.raw != entry.raw and not isinstance(earlier.raw, Reset):
            gathered.notes.append(
                f"{name} is given as '{earlier.raw}', then as '{entry.raw}'; the last one counts."
            )
        entries.append(entry)
    return entries


def _expand_data_path(low: list[list[Entry]], high: list[list[Entry]]) -> None:
    """Read `data.path`: a file of prompts, or a folder with files named after their split.

    Validation prompts found there lie below the settings that name the folder.
    """
    layers, val = [*low, *high], None
    for place, layer in enumerate(layers):
        for at, entry in enumerate(layer):
            if entry.name == DATA_FOLDER and isinstance(entry.raw, str):
                train = _split_files(entry.raw, ("train",)) or [entry.raw]
                layer[at] = Entry(PROMPT_KEYS[0], train, entry.origin)
                files = _split_files(entry.raw, VALIDATION)
                val = (place, Entry(PROMPT_KEYS[1], files, entry.origin)) if files else None
    if val is not None:
        low.insert(min(val[0], len(low)), [val[1]])


def _split_files(folder: str, splits: Sequence[str]) -> list[str]:
    """Return the files of the first split that a folder has: test.parquet, test-00000-of-…"""
    path = Path(folder).expanduser()
    saved = saved_splits(path)
    if split := next((split for split in splits if split in saved), None):
        return [f"{folder}:{split}"]
    names = sorted(p.name for p in path.iterdir() if p.is_file()) if path.is_dir() else []
    for split in splits:
        if matches := [name for name in names if re.fullmatch(split + DATA_FILE, name)]:
            return [str(path / name) for name in matches]
    return []


def _insert_reward_file(
    gathered: Layers, low: list[list[Entry]], high: list[list[Entry]]
) -> list[list[Entry]]:
    """Lay the file of `reward.config_file` just below the settings that name it.

    Named by a variable, flag or override, it counts as the last of the settings files.
    """
    layers = [*low, *high]
    naming = [
        (place, e) for place, layer in enumerate(layers) for e in layer if e.name == REWARD_FILE
    ]
    if not naming or is_unset(naming[-1][1].raw) or not isinstance(naming[-1][1].raw, str):
        return layers
    place, entry = naming[-1]
    label = str(entry.raw)
    inside = gathered.read(Path(label), label, read_reward_file)
    place = min(place, len(low))
    return [*layers[:place], inside, *layers[place:]]


def _sets_any(layers: list[list[Entry]], keys: Collection[str]) -> bool:
    return any(e.name in keys for layer in layers for e in layer)
