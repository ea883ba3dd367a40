"""Names say what they hold: words that say nothing are rare, and comments say why."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

# As names, these words leave it to the reader to find out what is meant.
VAGUE = frozenset([
    "found", "said", "told", "given", "known", "asked", "one", "own", "whole", "most", "words",
    "some", "ours", "theirs", "wanted", "taken", "held", "left", "more", "again", "still", "here",
    "there", "kept", "made",
])  # fmt: skip
NOT_A_LINE = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def count_names(source: str) -> tuple[int, list[str]]:
    """How many variables, parameters and attributes a file names, and the vague ones."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                names.append(name)
    return len(names), [name for name in names if name.strip("_") in VAGUE]


def count_comments(source: str) -> tuple[int, int]:
    """Lines that are only a comment, and all lines of code, docstrings and comments."""
    comments, others = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in NOT_A_LINE:
            others.update(range(token.start[0], token.end[0] + 1))
    return len(comments - others), len(comments | others)


@pytest.mark.parametrize(("folder", "per_thousand"), [("ppo_cli", 1.0), ("tests", 3.0)])
def test_vague_names_are_rare(
    folder: str, per_thousand: float, root: Path, files: list[Path]
) -> None:
    paths = [path for path in files if path.suffix == ".py" and path.parts[0] == folder]
    counts = {str(path): count_names((root / path).read_text()) for path in paths}
    vague = {path: names for path, (_, names) in counts.items() if names}
    total = sum(count for count, _ in counts.values())
    assert 1000 * sum(map(len, vague.values())) <= per_thousand * total, vague


def test_four_lines_in_a_hundred_are_comments(root: Path, files: list[Path]) -> None:
    paths = [path for path in files if path.suffix == ".py" and path.parts[0] == "ppo_cli"]
    counts = [count_comments((root / path).read_text()) for path in paths]
    assert sum(comments for comments, _ in counts) >= 0.04 * sum(lines for _, lines in counts)


def test_vague_names_and_comments_are_seen() -> None:
    source = "def read(given):\n    # why\n    found = given.known  # beside\n    return found\n"
    assert count_names(source) == (5, ["given", "found", "known", "found", "given"])
    assert count_comments(source) == (1, 4)
