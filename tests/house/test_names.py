"""Names say what they hold: words that say nothing are rare."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

# As names, these words leave it to the reader to find out what is meant.
VAGUE = frozenset([
    "found", "said", "told", "given", "known", "asked", "one", "own", "whole", "most", "words",
    "some", "ours", "theirs", "wanted", "taken", "held", "left", "more", "again", "still", "here",
    "there", "kept", "made",
])  # fmt: skip
SAY_NOTHING = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "base_trainer"}


def count_names(source: str) -> tuple[int, list[str]]:
    """How many variables, parameters and attributes a file names, and the vague ones."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                names.append(name)
    return len(names), [name for name in names if name.strip("_") in VAGUE]


@pytest.mark.parametrize(("folder", "per_thousand"), [("ppo_cli", 1.0), ("tests", 3.0)])
def test_vague_names_are_rare(
    folder: str, per_thousand: float, root: Path, files: list[Path]
) -> None:
    paths = [path for path in files if path.suffix == ".py" and path.parts[0] == folder]
    counts = {str(path): count_names((root / path).read_text()) for path in paths}
    vague = {path: names for path, (_, names) in counts.items() if names}
    total = sum(count for count, _ in counts.values())
    assert 1000 * sum(map(len, vague.values())) <= per_thousand * total, vague


def test_vague_names_are_seen() -> None:
    source = "def read(given):\n    found = given.known\n    return found\n"
    assert count_names(source) == (5, ["given", "found", "known", "found", "given"])


def test_no_file_name_that_says_nothing(files: list[Path]) -> None:
    def empty_words(path: Path) -> set[str]:
        return SAY_NOTHING & {Path(part).stem for part in path.parts}

    assert empty_words(Path("ppo_cli/utils.py"))
    assert [str(path) for path in files if empty_words(path)] == []
