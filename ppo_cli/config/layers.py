"""Reads the layers of settings in order, and merges them: the last value of a setting counts.

Layers are a preset, a run folder, settings files, reward files, variables, flags and overrides;
`read_layers` has their order.
All hand over raw values with their origins; planning/resolve turns the merged values into a Config.
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

from ppo_cli.addresses import refuse_address
from ppo_cli.config.mixture import judges_of, models_of
from ppo_cli.config.models.bundled import EMBEDDED, preset_path
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.keys import find_key, sections, table
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.values import (
    Quoted,
    is_unset,
    parse_yaml,
    read_free,
    read_value,
    repeated_keys,
    unquote,
)
from ppo_cli.data_sets.files import saved_splits
from ppo_cli.errors import ConfigError, did_you_mean
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import user_path

DEFAULT = "default"


# The settings that a run folder keeps, and the origin of values from there.
CONFIG_FILE, RUN_ORIGIN = "config.yaml", "settings of "  # a run folder's file, and its origin
BESIDE_SETTINGS = ("plan.json", "metrics.jsonl")  # what tells that file from a person's
INHERITED = "fork"  # origin of a value that a fork has from its run
AS_BEGUN = "as the run began"  # origin of a decision that a resume has kept
PLACE_KEYS = (
    "trainer.output_dir",
    "trainer.store",
    "trainer.resume_mode",
)  # of each run, never worth comparing
MAX_FILE_BYTES = 2**20  # bytes; the largest preset has 3,000


@dataclass(frozen=True)
class Entry:
    """One setting as it was written: dotted name, raw value, and origin."""

    name: str
    raw: Any
    origin: str


def is_chosen(origin: str) -> bool:
    """Whether a value was set for this run: neither a default nor from the run of a fork."""
    return origin not in (DEFAULT, INHERITED, AS_BEGUN)


def describe_fork(run: str, step: int, origins: Mapping[str, str]) -> str:
    """Return `fork of RUN at step 6; differs in KEY, KEY` for a run with these origins."""
    changed = [k for k, origin in origins.items() if is_chosen(origin) and k not in PLACE_KEYS]
    # A run that continues a checkpoint by --resume has settings of its own.
    if INHERITED not in origins.values() or not changed:
        return f"fork of {run} at step {step}"
    return f"fork of {run} at step {step}; differs in {', '.join(changed)}"


class Reset:
    """The raw value of `~key`: return to the default of the schema."""


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
        shown = "a list" if isinstance(root, yaml.SequenceNode) else f"'{root.value}'"
        raise ConfigError(f"{label}: expected settings such as '{example}', found {shown}.")
    # All problems of the file at once.
    problems: list[str] = []
    entries = _flatten_yaml(root, "", label, problems)
    problems += _find_duplicates(entries)
    if problems:
        raise ConfigError(problems)
    return entries


def read_settings_text(path: Path, label: str) -> str:
    """Return the text of a file that a person wrote; ConfigError says why it cannot be read.

    Never waits for a pipe, and never reads more than MAX_FILE_BYTES.
    """
    try:
        refuse_address(path)
        # Look before opening: a pipe would block.
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
    """Return why a file is not YAML, with the line."""
    # The line of the problem, and of the construct that it is in, if YAML names them.
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{label}: not valid YAML: {error}."
    mark, began = error.problem_mark or error.context_mark, error.context_mark
    where = f"{label} line {mark.line + 1}" if mark else label
    since = f" (in what begins on line {began.line + 1})" if began else ""
    return f"{where}: not valid YAML: {error.problem or error.context}{since}."


def _flatten_yaml(
    node: yaml.MappingNode, prefix: str, label: str, problems: list[str]
) -> list[Entry]:
    """Return the entries of a YAML group by dotted name; adds what is wrong to `problems`."""
    entries: list[Entry] = []
    for key, value in node.value:
        where = f"{label} line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
            problems.append(f"{where}: keys are plain words here; merge keys (<<) are not read.")
            continue
        name = f"{prefix}{key.value}"
        # A group is flattened; an empty one stays a value.
        if isinstance(value, yaml.MappingNode) and value.value:
            entries += _flatten_yaml(value, f"{name}.", label, problems)
        else:
            problems += [
                f"{label} line {inner.start_mark.line + 1}: the key '{inner.value}' is repeated "
                "in one group; keep one."
                for inner in repeated_keys(value)
            ]
            entries.append(Entry(name, _raw_value(value), where))
    return entries


def _find_duplicates(entries: list[Entry]) -> list[str]:
    """Return a problem for each setting that is in a file twice."""
    first: dict[str, Entry] = {}
    problems = []
    # YAML keeps the last of two equal keys silently, so compare the flat names.
    for entry in entries:
        earlier = first.setdefault(entry.name, entry)
        if earlier is not entry:
            line = earlier.origin.rsplit(" ", 1)[-1]
            problems.append(
                f"{entry.origin}: {entry.name} was set on line {line} already; keep one of them."
            )
    return problems


def _raw_value(node: yaml.Node) -> Any:
    """Return a YAML node as text, list or dict, without converting types."""
    if isinstance(node, yaml.SequenceNode):
        return [_raw_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _raw_value(value) for key, value in node.value}
    if node.tag.endswith(":null"):
        return None
    # A quoted text stays a text: "null" in quotes is not empty.
    style = node.style if isinstance(node, yaml.ScalarNode) else None
    return Quoted(node.value) if style in ("'", '"', "|", ">") else node.value


REWARD_FILE = "reward.config_file"
JUDGE_SWITCH = "reward.api.enable"
# Section of a reward file -> the settings that it holds. The schema's own groups work as well.
SECTIONS = {
    "api_reward": "reward.api",
    "reward_model": "reward.model",
    "composite_reward": "reward.composite",
}
# Files that are read in the folder where a run starts, once it has a judge or a reward model.
JUDGE_FILE, MODEL_FILE = "api_reward_config.yaml", "reward_model_config.yaml"
# Words in the name of a key that is meant for a secret.
_SECRET = re.compile(r"(?:^|_)(?:api_?keys?|key|token|secret|password)$|^authorization$", re.I)
_VARIABLE = re.compile(r"\$\{?(?:oc\.env:)?([A-Za-z_]\w*)\}?")


def find_reward_files(reward: Reward, *, named: bool) -> list[str]:
    """Return the reward files in the current folder that this reward reads.

    With `named`, a reward file was named by a setting, so that none is looked for.
    """
    uses = {JUDGE_FILE: bool(judges_of(reward)), MODEL_FILE: bool(models_of(reward))}
    return [file for file, used in uses.items() if used and not named and Path(file).is_file()]


def read_reward_file(path: Path, label: str) -> list[Entry]:
    """Return the entries of a reward file under the schema's names; all problems at once.

    In such a file `reward.` may be left out, and the judge, the reward model and the mixture have
    the section names of SECTIONS.
    """
    entries, problems = [], []
    file_entries = read_yaml(user_path(path), label, example="api_reward:")
    if not file_entries:
        problems.append(
            f"{label}: the file holds no setting. Write settings such as 'api_reward:'."
        )
    # Translate each section's name, and refuse secrets, unknown keys, and a file within a file.
    for entry in file_entries:
        section, _, key = entry.name.removeprefix("reward.").partition(".")
        name = ".".join(filter(None, (SECTIONS.get(section, f"reward.{section}"), key)))
        if _holds_secret(name):
            problems.append(f"{entry.origin}: {_refuse_secret(entry, file_entries)}")
        elif name == REWARD_FILE or find_key(name) is None:
            problems.append(f"{entry.origin}: {_refuse_unknown(entry, name)}")
        else:
            entries.append(Entry(name, entry.raw, entry.origin))
    problems += _find_duplicates(entries)
    if problems:
        raise ConfigError(problems)
    # A file that sets up a judge switches it on, unless the file itself sets the switch.
    first = next((entry for entry in entries if entry.name.startswith("reward.api.")), None)
    if first is not None and all(entry.name != JUDGE_SWITCH for entry in entries):
        return [Entry(JUDGE_SWITCH, "true", first.origin), *entries]
    return entries


def _holds_secret(name: str) -> bool:
    """Tell whether a key is meant for a secret; parts and function arguments have free names."""
    # Below composite.parts, the part's name and its source come first; they are not keys.
    parts = name.replace("-", "_").split(".")
    if parts[1] == "composite":
        parts = parts[4:]
    return "function_kwargs" not in parts and any(_SECRET.search(part) for part in parts)


def _refuse_secret(entry: Entry, file_entries: list[Entry]) -> str:
    """Say where a key belongs; the message does not repeat its value."""
    # Name the variable of the provider that the file chooses, or of all providers.
    raw_values = {e.name.rsplit(".", 1)[-1]: str(e.raw) for e in file_entries}
    provider = JUDGES.get(raw_values.get("type", ""))
    usual = provider.keys if provider else [api.keys[0] for api in JUDGES.values() if api.keys]
    variable = _VARIABLE.fullmatch(str(entry.raw))
    other = variable[1] if variable else "NAME"
    return (
        f"'{entry.name}' holds a secret, and keys are read from the environment only: set "
        f"{' or '.join(usual)} there, or name another variable with key_env: {other} "
        "(reward.api.key_env, --rm_key_env)."
    )


def _refuse_unknown(entry: Entry, name: str) -> str:
    """Say why a key of a reward file is not a setting of the reward, with the nearest one."""
    # A group where a value is expected, a setting of another section, or a wrong word.
    if name in sections():
        example = next(key for key in table() if key.startswith(f"{name}."))
        leaf = example.removeprefix(f"{name}.")
        return f"{entry.name} is a group of settings; write them below it, such as {leaf}."
    if find_key(entry.name) is not None and entry.name != REWARD_FILE:
        return f"{entry.name} is not a setting of the reward; put it in a --config file."
    # The nearest name: in the same group, then among the sections, then the same leaf elsewhere.
    group, _, leaf = name.rpartition(".")
    keys = [key for key in table() if key.startswith("reward.")]
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == group]
    if group in sections():
        near = did_you_mean(leaf, [*siblings, *(SECTIONS if group == "reward" else ())])
    else:
        near = did_you_mean(entry.name.split(".")[0], SECTIONS)
    elsewhere = [key for key in keys if key.endswith(f".{leaf.removeprefix('rm_')}")]
    if not near and elsewhere:
        near = f" Did you mean '{elsewhere[0]}'?"
    elif not near and group != "reward":
        near = f" Known: {', '.join(siblings)}."
    return f"there is no setting '{entry.name}' of the reward.{near}"


Reader = Callable[[Path, str], list[Entry]]
# A line that names a model does not train the bundled one.
MODEL_KEYS = frozenset({"model.path", "actor_rollout_ref.model.path", "critic.model.path"})
# data.path is an older name for train_files and val_files in one folder.
DATA_FOLDER = "data.path"
DATA_FILE = r"[-_.].*?\.?(parquet|arrow|(json|jsonl|ndjson)(\.gz)?)"  # after the name of the split
VALIDATION = ("test", "val", "validation", "valid", "eval", "dev")  # names of files, in this order
PROMPT_KEYS = ("data.train_files", "data.val_files")
GPU_KEYS = frozenset({"trainer.n_gpus_per_node"})
EMBEDDED_NOTE = "No GPU and no --model: training the small bundled model (preset embedded)."
# For a command that asks for GPUs: missing ones are reported when they are counted.
EMBEDDED_NOTE_GPUS = EMBEDDED_NOTE.replace("No GPU and no", "No")
PROMPTS_NOTE = "No --train_files: training on the bundled prompts, sums such as 93 + 58."


@dataclass
class Layers:
    """The layers in order, with the problems and remarks from reading them."""

    layers: list[list[Entry]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # settings whose value could not be worked out
    foreign: bool = False  # written for another program
    of_runs: list[str] = field(default_factory=list)  # how origins of what a run wrote begin

    def read(self, path: Path, label: str, reader: Reader = read_yaml) -> list[Entry]:
        """Return a file as a layer; one that cannot be read is recorded as a problem."""
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
    machine: Machine,
    origins: Mapping[str, str] | None = None,
    foreign: Mapping[str, tuple[str, str]] | None = None,
    reward_files: Sequence[str] = (),
    run: Path | None = None,
) -> Layers:
    """Read all layers: another program's defaults < preset < run < files < variables < flags <
    overrides.

    `run` is the folder of a run whose settings are the defaults. `origins` names where variables
    and overrides really come from, such as SLURM. A reward file is just below the layer that names
    it; `reward_files` were found, not named: they are below `run`.
    """
    gathered = Layers(foreign=foreign is not None)
    # Low layers are files; high ones are variables, flags and overrides.
    low = [[Entry(name, raw, origin) for name, (raw, origin) in (foreign or {}).items()]]
    low += [_read_preset(gathered, preset)] if preset else []
    low += [gathered.read(Path(name), name, read_reward_file) for name in reward_files]
    if run is not None:
        gathered.of_runs.append(RUN_ORIGIN)
        entries = gathered.read(run / CONFIG_FILE, f"{RUN_ORIGIN}{run}")
        low.append([e for e in entries if e.name != REWARD_FILE])  # its settings are among them
    for path in map(Path, config_files):
        low.append(gathered.read(path, str(path)))
        if path.name == CONFIG_FILE and any((path.parent / n).exists() for n in BESIDE_SETTINGS):
            gathered.of_runs.append(f"{path} line ")
    flag_entries = [Entry(name, raw, origin) for name, (raw, origin) in flags.items()]
    high = [
        _read_variables(environ, origins or {}),
        flag_entries,
        _read_overrides(gathered, overrides, origins or {}),
    ]
    _expand_data_path(low, high)
    layers = _insert_reward_file(gathered, low, high)
    # Nothing names a model or prompts: take those that ship with the program.
    if not preset and not _sets_any(layers, MODEL_KEYS) and not machine.gpus:
        layers.insert(0, _read_preset(gathered, "embedded"))
        gathered.notes.append(EMBEDDED_NOTE_GPUS if _sets_any(layers, GPU_KEYS) else EMBEDDED_NOTE)
    elif not preset and not _sets_any(layers, PROMPT_KEYS[:1]):
        # Presets name their own prompts; any other run may start on the bundled ones.
        origin = "bundled prompts (no --train_files)"
        absent = [key for key in PROMPT_KEYS if not _sets_any(layers, (key,))]
        layers.insert(0, [Entry(key, [EMBEDDED], origin) for key in absent])
        gathered.notes.append(PROMPTS_NOTE)
    gathered.layers = layers
    return gathered


def find_run_code(
    entries: Mapping[str, Entry], values: Mapping[str, Any], run: Path
) -> Iterator[str]:
    """Yield a problem for each setting of a run folder that would run code from that folder.

    The author of a folder does not decide what runs on this machine. Consents such as
    trust_remote_code were left out when the layers were merged.
    """
    for name, entry in entries.items():
        key = find_key(name)
        if key is None or not entry.origin.startswith(RUN_ORIGIN):
            continue
        # Keys of a free-form setting are texts as well.
        for text in (name.removeprefix(key.name), *_iterate_texts(values.get(name))):
            file = Path(os.path.expanduser(text.partition(":")[0]))
            # A Python file, or a function named with its file.
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
    """Yield all strings in nested mappings (also keys), lists and tuples; skips other values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (
            text for item in value.items() for inner in item for text in _iterate_texts(inner)
        )
    elif isinstance(value, list | tuple):
        yield from (text for inner in value for text in _iterate_texts(inner))


def _read_preset(gathered: Layers, name: str) -> list[Entry]:
    """Return the entries of a preset; an unknown name becomes a problem."""
    try:
        return gathered.read(preset_path(name), f"preset {name}")
    except ConfigError as error:
        gathered.problems += (f"flag --preset: {problem}" for problem in error.problems)
        return []


def _read_variables(environ: Mapping[str, str], origins: Mapping[str, str]) -> list[Entry]:
    """Return the variables that are set and not empty."""
    named = ((key, environ.get(key.env, "")) for key in table().values() if key.env)
    return [
        Entry(key.name, unquote(text), origins.get(str(key.env), f"env {key.env}"))
        for key, text in named
        if unquote(text)
    ]


def _read_overrides(
    gathered: Layers, overrides: Sequence[str], origins: Mapping[str, str]
) -> list[Entry]:
    """Return the entries of `key=value` and `~key` arguments."""
    entries: list[Entry] = []
    for text in overrides:
        # `~key` resets, `+key=value` is Hydra's way to add.
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
        # Overrides are in order: a key that comes twice takes its last value, with a note.
        entry = Entry(name, unquote(raw), origins.get(name, "override"))
        earlier = next((e for e in entries if e.name == name), entry)
        if earlier.raw != entry.raw and not isinstance(earlier.raw, Reset):
            gathered.notes.append(
                f"{name} is given as '{earlier.raw}', then as '{entry.raw}'; the last one counts."
            )
        entries.append(entry)
    return entries


def _expand_data_path(low: list[list[Entry]], high: list[list[Entry]]) -> None:
    """Replace a folder in `data.path` by its prompt files: one, or those named after a split.

    Validation prompts in the folder become a layer below the settings that name the folder.
    """
    # The last setting wins, so a later folder replaces an earlier one's validation files.
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
    """Return the files of the first of these splits in a folder: test.parquet, test-00000-of-…"""
    # A saved data set has its splits inside; any other folder has files named after them.
    path = user_path(folder)
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
    """Insert the file of `reward.config_file` just below the settings that name it.

    Named by a variable, flag or override, it counts as the last settings file.
    """
    layers = [*low, *high]
    naming = [
        (place, e) for place, layer in enumerate(layers) for e in layer if e.name == REWARD_FILE
    ]
    if not naming or is_unset(naming[-1][1].raw) or not isinstance(naming[-1][1].raw, str):
        return layers
    place, entry = naming[-1]
    label = str(entry.raw)
    # Named by a high layer, the file is still below all of them.
    inside = gathered.read(Path(label), label, read_reward_file)
    place = min(place, len(low))
    return [*layers[:place], inside, *layers[place:]]


def _sets_any(layers: list[list[Entry]], keys: Collection[str]) -> bool:
    return any(e.name in keys for layer in layers for e in layer)


def merge_layers(layers: Sequence[Sequence[Entry]]) -> dict[str, Entry]:
    """Return the winning entry of each setting: the last one, unless a later layer resets it."""
    entries: dict[str, Entry] = {}
    for layer in layers:
        for entry in layer:
            # An entry replaces free-form keys below it, and moves to the end of the order.
            for name in [n for n in entries if n == entry.name or n.startswith(f"{entry.name}.")]:
                del entries[name]
            if not isinstance(entry.raw, Reset):
                entries[entry.name] = entry
    return entries


def read_entry(entry: Entry) -> Any:
    """Return the typed value of an entry; ValueError says what is wrong with its raw value."""
    key = find_key(entry.name)
    assert key is not None
    return read_value(key, entry.raw) if key.name == entry.name else read_free(entry.raw)
