"""Read a set from the Hugging Face hub: `OWNER/NAME`, `OWNER/NAME/CONFIG`, each with `:SPLIT`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ppo_cli.data_sets.files import Records, file_suffix, first_line, nearest_file
from ppo_cli.data_sets.problems import Place
from ppo_cli.errors import DataError, MissingPart

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
    """Tell whether a source that is no file on this disk can be the name of a hub set."""
    if source.startswith((".", "/", "~")) or Path(source).expanduser().exists():
        return False
    known = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".arrow")
    return not file_suffix(Path(source)).endswith(known) and bool(HUB_NAME.fullmatch(source))


def parse_hub_name(source: str) -> HubName:
    """Split `OWNER/NAME/CONFIG:SPLIT` into its parts."""
    match = HUB_NAME.fullmatch(source)
    if match is None:
        raise DataError(f"'{source}' is neither a file nor OWNER/NAME[/CONFIG][:SPLIT] on the hub.")
    return HubName(match["name"], match["config"], match["split"] or "train")


def read_hub(source: str) -> Records:
    """Load one split of a hub set; whatever keeps it away is told in one sentence."""
    hub = parse_hub_name(source)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingPart(
            f"'{source}' is no file here, and hub sets need the datasets package: "
            "pip install datasets"
        ) from error
    try:
        rows = load_dataset(hub.name, hub.config, split=hub.split).to_list()
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(tell_hub_failure(source, hub, error)) from error
    if not rows:
        raise DataError(f"{source}: split '{hub.split}' of the hub set holds no rows.")
    found = tuple((Place(source, number), row) for number, row in enumerate(rows, start=1))
    return Records(source, hub.label, found)


def tell_hub_failure(source: str, hub: HubName, error: Exception) -> str:
    """Say what was tried, why it failed, and that a local file works too."""
    config = f", config '{hub.config}'" if hub.config else ""
    near = nearest_file(Path(source))
    near = near if "Did you mean" in near else ""
    return (
        f"'{source}' is no file here, and the hub set '{hub.name}'{config}, split '{hub.split}' "
        f"did not load ({first_line(error)}); a local JSON, JSONL or parquet file works "
        f"without the hub.{near}"
    )
