"""Runs side by side: settings that differ by content, and groups of runs that differ in seeds.

A setting that names files counts by what was in them when the run saved its newest checkpoint, or
by what is in them now where a run has saved none: copies are equal, and a file that was edited
between two runs is a difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from yaml import YAMLError

from ppo_cli.config.layers import PLACE_KEYS, is_chosen
from ppo_cli.config.schema.values import load_yaml
from ppo_cli.errors import UserError
from ppo_cli.report.metrics import recent_statistics
from ppo_cli.report.page.run_data import read_settings
from ppo_cli.report.validation import list_validations
from ppo_cli.run_folder.checkpoints import CheckpointStore, read_state
from ppo_cli.run_folder.contents import CONTENTS, ROWS, digest_contents
from ppo_cli.run_folder.lines import read_metrics

SEEDS = ("trainer.seed", "rollout.seed")
RECENT = 10  # steps whose means are compared
MAX_VALUE_CHARS = 40  # of a value in a table
MAX_NAMED = 3  # settings that name a group


@dataclass(frozen=True)
class SideBySide:
    """What differs between runs: values by key, one for each run.

    `varied` has settings that somebody set, without seeds; `other` has seeds, and what machine or
    version decided. `groups` has the indices of runs with the same varied settings, in the order of
    their first run.
    """

    varied: dict[str, list[str | None]]
    other: dict[str, list[str | None]]
    groups: list[list[int]]

    def name_group(self, group: Sequence[int]) -> str:
        """Return the settings of a group that other groups have otherwise, in one line."""
        values = [f"{key}={values[group[0]] or '-'}" for key, values in self.varied.items()]
        rest = f", {len(values) - MAX_NAMED} more" * (len(values) > MAX_NAMED)
        return ", ".join(values[:MAX_NAMED]) + rest or "all settings but the seed are equal"


def put_side_by_side(folders: Sequence[Path]) -> SideBySide:
    """Compare the settings of runs by content, and group the runs that differ in seeds alone."""
    settings = [
        {key: (value, origin) for key, value, origin in read_settings(folder)[0]}
        for folder in folders
    ]
    contents = _contents_of_runs(folders, [{k: v for k, (v, _) in s.items()} for s in settings])
    varied, other = dict[str, list[str | None]](), dict[str, list[str | None]]()
    for key in dict.fromkeys(k for of_run in settings for k in of_run):
        compared = [of_run.get(key) for of_run in contents]
        if key in PLACE_KEYS or all(value == compared[0] for value in compared):
            continue
        origins = [of_run[key][1] for of_run in settings if key in of_run]
        shown = [_shorten(of_run[key][0]) if key in of_run else None for of_run in settings]
        if len(set(shown)) == 1:
            shown = [
                f"{text} (version {v})" for text, v in zip(shown, _number(compared), strict=True)
            ]
        # A setting that an older version did not have is not a difference from a default.
        chosen = any(map(is_chosen, origins))
        if chosen and key not in SEEDS:
            varied[key] = shown
        elif chosen or None not in compared:
            other[key] = shown
    groups: dict[str, list[int]] = {}
    for index, of_run in enumerate(contents):
        same = json.dumps([of_run.get(key) for key in varied], default=str)
        groups.setdefault(same, []).append(index)
    return SideBySide(varied, other, list(groups.values()))


def tabulate_groups(
    compared: SideBySide, histories: Sequence[Sequence[Mapping[str, Any]]]
) -> list[list[str]]:
    """Return a table of the groups: settings, runs, mean and spread of reward and validation.

    The reward is the mean of a run's last RECENT steps, the validation its last. Empty where no
    group has two seeds.
    """
    seeds = compared.other.get(SEEDS[0], [None] * len(histories))
    if all(len({seeds[run] for run in group}) == 1 for group in compared.groups):
        return []
    rewards = [recent_statistics(history, RECENT).get("reward_mean_mean") for history in histories]
    validated = [list_validations(history) for history in histories]
    validations = [lines[-1]["val/reward_mean"] if lines else None for lines in validated]
    rows = [["runs that differ in the seed alone", "runs", "reward", "validation"]]
    for group in compared.groups:
        spreads = [_describe_spread([v[run] for run in group]) for v in (rewards, validations)]
        rows.append([compared.name_group(group), str(len(group)), *spreads])
    return rows


def compare_for_page(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what differs between runs, and their groups, as the page shows them."""
    if len(folders) == 1:
        return {"settings": [], "groups": []}
    compared = put_side_by_side(folders)
    settings = compared.varied | compared.other
    return {
        "settings": [
            [key, *(value or "–" for value in values)] for key, values in settings.items()
        ],
        "groups": tabulate_groups(compared, [read_metrics(folder) for folder in folders]),
    }


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return a unique name for each run: that of its folder, or the path where two have one."""
    names = [folder.resolve().name for folder in folders]
    return [
        name if names.count(name) == 1 else str(folder)
        for folder, name in zip(folders, names, strict=True)
    ]


def _shorten(value: str) -> str:
    """Return the value of a setting as it fits a table: the end of a long path tells most."""
    return value if len(value) <= MAX_VALUE_CHARS else f"…{value[1 - MAX_VALUE_CHARS :]}"


def _describe_spread(values: Sequence[float | None]) -> str:
    """Return mean and sample standard deviation of the runs of a group; "-" without a value."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return "-"
    spread = f" ± {stdev(numbers):.2g}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.3g}{spread}"


def _number(values: Sequence[Any]) -> list[int]:
    """Return for each value the number of its first place among the different ones, from 1."""
    order: list[Any] = []
    for value in values:
        order += [value] * (value not in order)
    return [order.index(value) + 1 for value in values]


def _contents_of_runs(
    folders: Sequence[Path], texts: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Return the settings of each run as they compare: digests in place of paths."""
    saved = [_read_fingerprint(folder) for folder in folders]
    # A digest that was saved and one of today compare nothing, so all runs need the same kind.
    use_saved = all(saved)
    contents = []
    for folder, values, fingerprint in zip(folders, texts, saved, strict=True):
        digests: dict[str, str] = fingerprint.get(CONTENTS, {}) if use_saved else {}
        parsed: dict[str, Any] = {}
        for key, text in values.items():
            value: Any = text
            with suppress(YAMLError):  # of a file that another program has written
                value = load_yaml(text)  # `16` and `16.0` are equal
            parsed[key] = _replace_paths(value, folder.absolute(), digests)
            if use_saved and key in ROWS and value:
                parsed[key] = fingerprint.get(key)
        contents.append(parsed)
    return contents


def _read_fingerprint(folder: Path) -> dict[str, Any]:
    """Return what identifies a run, of its newest checkpoint; empty if it has none."""
    checkpoint = CheckpointStore(folder / "checkpoints", 1).newest()
    if checkpoint is None:
        return {}
    try:
        fingerprint: dict[str, Any] = read_state(checkpoint)["fingerprint"]
        return fingerprint
    except UserError:  # damaged, or of another version
        return {}


def _replace_paths(value: Any, folder: Path, digests: Mapping[str, str]) -> Any:
    """Return a value with a digest in place of each file and model folder that it names."""
    if isinstance(value, Mapping):
        return {key: _replace_paths(inner, folder, digests) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace_paths(inner, folder, digests) for inner in value]
    if not isinstance(value, str):
        return value
    path, colon, name = value.partition(":")
    # A checkpoint names files in the run folder from there, and the folder may have moved.
    saved = [d for name, d in digests.items() if path == name or path.endswith(f"/{name}")]
    now = [digest for _, digest in digest_contents(path)]
    return f"{[*saved, *now, path.removeprefix(f'{folder}/')][0]}{colon}{name}"
