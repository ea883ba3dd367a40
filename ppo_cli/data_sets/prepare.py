"""`ppo data prepare`: well-known sets to verl-style parquet files.

A new set is one function (source -> rows of each split) and one line in RECIPES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppo_cli.atomic import replacing
from ppo_cli.data_sets import gsm8k, hh_rlhf, humaneval, math
from ppo_cli.data_sets.problems import Built
from ppo_cli.errors import DataError, MissingPart, did_you_mean, ppo


@dataclass(frozen=True)
class Recipe:
    """How one set is prepared, and where it is read from when no source is given."""

    about: str
    source: str
    build: Callable[[str], Built]


RECIPES = {
    "gsm8k": Recipe(
        "8.8k grade-school word problems; train and test.", gsm8k.HUB, gsm8k.build_gsm8k
    ),
    "humaneval": Recipe(
        "164 Python functions to complete, with their tests.",
        humaneval.HUB,
        humaneval.build_humaneval,
    ),
    "hh_rlhf": Recipe(
        "Dialogues about help and harm with two last replies: pairs, and prompts.",
        hh_rlhf.HUB,
        hh_rlhf.build_hh_rlhf,
    ),
    "math": Recipe("12.5k competition problems; train and test.", math.HUB, math.build_math),
}


@dataclass(frozen=True)
class Prepared:
    """One file that was written."""

    split: str
    path: Path
    rows: int
    note: str = ""


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a set; an unknown name is told with the known ones."""
    if name in RECIPES:
        return RECIPES[name]
    known = ", ".join(RECIPES)
    near = did_you_mean(name.lower(), RECIPES)
    raise DataError(
        f"No recipe for the data set '{name}'.{near} Known: {known}. "
        f"Your own JSONL or parquet files need no preparation; see `{ppo('data check')}`."
    )


def prepare(
    name: str, *, source: str | None = None, out: str, force: bool = False
) -> list[Prepared]:
    """Write one parquet file a split into `out`; all of them or none."""
    recipe = find_recipe(name)
    folder = Path(out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--out {folder} is a file; name a folder.")
    built = recipe.build(source or recipe.source)
    splits = built.splits
    targets = {split: folder / f"{split}.parquet" for split in splits}
    there = [path.name for path in targets.values() if path.exists()]
    if there and not force:
        raise DataError(f"{folder} already holds {' and '.join(there)}. Add --force to replace.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_all({targets[split]: rows for split, rows in splits.items()})
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error}).") from error
    files = [Prepared(split, path, len(splits[split])) for split, path in targets.items()]
    if built.left_out:
        count = len({problem.place for problem in built.left_out})
        told = f"{count} rows left out, such as {built.left_out[0]}."
        files[-1] = replace(files[-1], note=told)
    return files


def write_all(files: Mapping[Path, list[dict[str, Any]]]) -> None:
    """Write every file under a hidden name, then give them their names."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingPart("Parquet files need pyarrow: pip install pyarrow") from error
    with ExitStack() as all_written:
        for path, rows in files.items():
            fresh = all_written.enter_context(replacing(path))
            parquet.write_table(pyarrow.Table.from_pylist(rows), fresh)
