"""Resolve the name of a source: a file, a saved set, a set on the hub, or a folder of splits.

A hub set is `OWNER/NAME` or `OWNER/NAME/CONFIG`, each with `:SPLIT` if wanted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ppo_cli.addresses import download
from ppo_cli.config.models.known_models import announce_download, hub_cache
from ppo_cli.data_sets.files import (
    SPLITS,
    SUFFIXES,
    Records,
    check_readable,
    file_suffix,
    nearest_file,
    read_batches,
    read_file,
    saved_folder,
    saved_splits,
)
from ppo_cli.errors import DataError, first_line, is_address
from ppo_cli.paths import user_path

HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?"
)


@dataclass(frozen=True)
class HubName:
    """A hub set in parts; the split is `train` when none is given."""

    name: str
    config: str | None
    split: str

    @property
    def label(self) -> str:
        """Return a short name for the uids of its rows."""
        parts = [self.name.rsplit("/", 1)[-1], self.config, self.split]
        return "-".join(part for part in parts if part)


def is_hub_name(source: str) -> bool:
    """Whether a source is not a local file: it can be the name of a hub set, or is an address.

    A word without a slash is a mistyped file, unless that set is in the cache.
    """
    if is_address(source):
        return True
    if source.startswith((".", "/", "~")) or user_path(source).exists():
        return False
    if saved_folder(source) is not None:
        return False
    # A missing file is a mistake, not a hub name.
    of_files = (*SUFFIXES, ".csv", ".tsv", ".txt", ".gz", ".feather", ".ipc")
    match = HUB_NAME.fullmatch(source)
    if match is None or file_suffix(Path(source)).endswith(of_files):
        return False
    return "/" in match["name"] or (hub_cache() / f"datasets--{match['name']}").is_dir()


def check_present(source: str) -> None:
    """Raise DataError for a file that cannot be read; nothing is asked of the hub."""
    if not is_hub_name(source):
        check_readable(source)


def parse_hub_name(source: str) -> HubName:
    """Split `OWNER/NAME/CONFIG:SPLIT` into its parts."""
    # The config and the split are optional.
    match = HUB_NAME.fullmatch(source)
    if match is None:
        raise DataError(f"'{source}' is neither a file nor OWNER/NAME[/CONFIG][:SPLIT] on the hub.")
    return HubName(match["name"], match["config"], match["split"] or "train")


def read_hub(source: str) -> Records:
    """Load one split of a hub set; every failure is reported in one sentence."""
    if is_address(source):
        return read_file(str(download(source)))
    hub = parse_hub_name(source)
    announce_download(hub.name)
    from datasets import load_dataset
    from pyarrow.lib import ArrowException

    # The hub, its cache and Arrow raise many kinds of errors.
    try:
        data_set = load_dataset(hub.name, hub.config, split=hub.split)
        records, problems = read_batches(source, data_set.data.table.to_batches())
    except (OSError, ValueError, RuntimeError, ArrowException) as error:
        config = f", config '{hub.config}'" if hub.config else ""
        near = nearest_file(Path(source))
        raise DataError(
            f"'{source}' is not a local file, and the hub set '{hub.name}'{config}, split "
            f"'{hub.split}' did not load ({first_line(error)}); a local JSON, JSONL or parquet "
            f"file works without the hub.{near if 'Did you mean' in near else ''}"
        ) from error
    if not records and not problems:
        raise DataError(f"{source}: split '{hub.split}' of the hub set holds no rows.")
    files = tuple(Path(file["filename"]) for file in data_set.cache_files)
    return Records(source, hub.label, records, tuple(problems), files=files)


def read_source(source: str, at_most: int | None = None) -> Records:
    """Read the raw records of a file (at most `at_most`) or of a hub set."""
    if not source.strip():
        raise DataError("An empty name was given where a prompt file or a hub set is expected.")
    return read_hub(source) if is_hub_name(source) else read_file(source, at_most)


def split_sources(source: str) -> dict[str, list[str]]:
    """Return the sources of each split: files of a folder, one file, or names on the hub.

    The last split name in a file's path decides (`train-00000.parquet`, `test/algebra/1.json`);
    without one, a single file is `train`.
    """
    path = user_path(source)
    if path.is_file():
        return {_split_of(path.name) or SPLITS[0]: [str(path)]}
    if not path.is_dir():
        return {split: [f"{source}:{split}"] for split in SPLITS}
    if saved := saved_splits(path):
        return {split: [f"{source}:{split}"] for split in SPLITS if split in saved}
    by_split: dict[str, list[str]] = {}
    for file in sorted(path.rglob("*")):
        if file_suffix(file) in SUFFIXES and file.is_file():
            by_split.setdefault(_split_of(str(file.relative_to(path))), []).append(str(file))
    # Files without a split name are ignored.
    named = {split: by_split[split] for split in SPLITS if split in by_split}
    if not named:
        raise DataError(
            f"{path} holds no file of a split; expected train.jsonl and test.jsonl (.gz too), "
            "parquet files, or folders `train` and `test`."
        )
    return named


def _split_of(name: str) -> str:
    splits = [word for word in re.findall("[a-z]+", name.lower()) if word in SPLITS]
    return splits[-1] if splits else ""
