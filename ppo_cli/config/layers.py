"""Where settings come from: one list of entries per layer, lowest first."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_cli.config.bundled import EMBEDDED, preset_path
from ppo_cli.config.hardware import gpu_count
from ppo_cli.config.keys import table
from ppo_cli.config.reward_file import read_reward_file
from ppo_cli.config.values import given_text, is_unset
from ppo_cli.config.yaml_file import Entry, read_yaml
from ppo_cli.errors import ConfigError

Reader = Callable[[Path, str], list[Entry]]
MODEL_KEYS = frozenset({"model.path", "actor_rollout_ref.model.path", "critic.model.path"})
DATA_FOLDER = "data.path"
DATA_FILE = r"[-_.].*?\.?(parquet|(json|jsonl|ndjson)(\.gz)?)"  # after the name of the split
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


class Reset:
    """The raw value of `~key`: back to the schema's default."""


@dataclass
class Gathered:
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


def gather(
    flags: Mapping[str, tuple[Any, str]],
    preset: str | None,
    config_files: Sequence[Path],
    overrides: Sequence[str],
    environ: Mapping[str, str],
    origins: Mapping[str, str] | None = None,
    reward_files: Sequence[str] = (),
) -> Gathered:
    """Read all layers: preset < files < reward file < variables < flags < overrides.

    `origins` says of variables where they really come from, such as SLURM's. `reward_files` were
    named by nobody and lie below the settings files.
    """
    found = Gathered()
    low = [_preset(found, preset)] if preset else []
    low += [found.read(Path(name), name, read_reward_file) for name in reward_files]
    low += [found.read(Path(path), str(path)) for path in config_files]
    given = [Entry(name, raw, origin) for name, (raw, origin) in flags.items()]
    high = [_variables(environ, origins or {}), given, _overrides(found, overrides)]
    low, high = _with_data_folder(low, high)
    layers = _with_reward_file(found, low, high)
    if not preset and not _names(layers, MODEL_KEYS) and gpu_count(environ) == 0:
        layers.insert(0, _preset(found, "embedded"))
        found.notes.append(EMBEDDED_NOTE_GPUS if _names(layers, GPU_KEYS) else EMBEDDED_NOTE)
    elif not preset and not _names(layers, PROMPT_KEYS[:1]):
        # A preset is made for prompts of its own; anything else may start on the bundled ones.
        origin = "bundled prompts (no --train_files)"
        absent = [key for key in PROMPT_KEYS if not _names(layers, (key,))]
        layers.insert(0, [Entry(key, [EMBEDDED], origin) for key in absent])
        found.notes.append(PROMPTS_NOTE)
    found.layers = layers
    return found


def _preset(found: Gathered, name: str) -> list[Entry]:
    try:
        return found.read(preset_path(name), f"preset {name}")
    except ConfigError as error:
        found.problems += (f"flag --preset: {problem}" for problem in error.problems)
        return []


def _variables(environ: Mapping[str, str], origins: Mapping[str, str]) -> list[Entry]:
    """Variables that are set; an empty one counts as not set."""
    named = ((key, environ.get(key.env, "")) for key in table().values() if key.env)
    return [
        Entry(key.name, given_text(text), origins.get(str(key.env), f"env {key.env}"))
        for key, text in named
        if given_text(text)
    ]


def _overrides(found: Gathered, overrides: Sequence[str]) -> list[Entry]:
    entries: list[Entry] = []
    for text in overrides:
        if text.startswith("~") and "=" not in text:
            entries.append(Entry(text[1:], Reset(), "override"))
            continue
        name, equals, raw = text.partition("=")
        name = name.lstrip("+").strip()
        if not equals or not name:
            found.problems.append(
                f"'{text}' is neither a flag nor an override: write key=value, such as "
                "actor.clip_ratio=0.1."
            )
            continue
        entry = Entry(name, given_text(raw), "override")
        earlier = next((e for e in entries if e.name == name), entry)
        if earlier.raw != entry.raw and not isinstance(earlier.raw, Reset):
            found.notes.append(
                f"{name} is given as '{earlier.raw}', then as '{entry.raw}'; the last one counts."
            )
        entries.append(entry)
    return entries


def _with_data_folder(
    low: list[list[Entry]], high: list[list[Entry]]
) -> tuple[list[list[Entry]], list[list[Entry]]]:
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
    return low, high


def _split_files(folder: str, splits: Sequence[str]) -> list[str]:
    """Return the files of the first split that a folder has: test.parquet, test-00000-of-…"""
    path = Path(folder).expanduser()
    names = sorted(p.name for p in path.iterdir() if p.is_file()) if path.is_dir() else []
    for split in splits:
        if found := [name for name in names if re.fullmatch(split + DATA_FILE, name)]:
            return [str(path / name) for name in found]
    return []


def _with_reward_file(
    found: Gathered, low: list[list[Entry]], high: list[list[Entry]]
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
    inside = found.read(Path(label), label, read_reward_file)
    place = min(place, len(low))
    return [*layers[:place], inside, *layers[place:]]


def _names(layers: list[list[Entry]], keys: Collection[str]) -> bool:
    return any(e.name in keys for layer in layers for e in layer)
