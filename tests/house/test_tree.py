"""The tree in CONTRIBUTING.md is the disk's, and nothing tracked names a machine."""

from __future__ import annotations

import re
from pathlib import Path

# Spelt in pieces so that this file does not find itself.
PLACES = "|".join(["work", "root", "opt", r"home/[a-z]\w*", r"Users/\w+"])
MACHINE_PATHS = re.compile(rf"(?<![\w.~$}}/-])/(?:{PLACES})/")


def read_tree(page: str) -> dict[str, str]:
    """Path -> comment, from the block that starts with `ppo-cli/`."""
    block = re.search(r"^```text\nppo-cli/\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block, "the page has no ```text block that starts with ppo-cli/"
    entries: dict[str, str] = {}
    parents: list[str] = []
    for line in block[1].splitlines():
        name, _, comment = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        parents = [*parents[:depth], name.rstrip("/")]
        entries["/".join(parents)] = comment.strip().lstrip("# ")
    return entries


def rooms_on_disk(files: list[Path]) -> set[str]:
    """Top entries of the tree, and those inside ppo_cli/ and scripts/; llms.txt lists docs/."""
    rooms = {path.parts[0] for path in files}
    for folder in ("ppo_cli", "scripts", ".ci"):
        rooms |= {"/".join(p.parts[:2]) for p in files if p.parts[0] == folder}
    rooms |= {"/".join(p.parts[:3]) for p in files if p.match("ppo_cli/extras/*/*.py")}
    return rooms - {".gitignore", "ppo_cli/__init__.py"}


def test_tree_equals_the_disk(root: Path, files: list[Path]) -> None:
    entries = read_tree((root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    on_disk = rooms_on_disk(files)
    gone = [entry for entry in entries if not (root / entry).exists()]
    assert gone == [], "in CONTRIBUTING.md, not on the disk"
    assert sorted(on_disk - set(entries)) == [], "on the disk, not in CONTRIBUTING.md"
    assert [name for name, comment in entries.items() if not comment] == []


def test_tree_is_read() -> None:
    page = "```text\nppo-cli/\n  a/       # rooms\n    b.py   # a file\n  c.md     # last\n```\n"
    assert read_tree(page) == {"a": "rooms", "a/b.py": "a file", "c.md": "last"}


def test_no_path_of_a_machine(root: Path, files: list[Path]) -> None:
    problems = []
    for path in files:
        data = (root / path).read_bytes()
        if b"\0" in data or path.suffix in {".safetensors", ".parquet"}:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
            if MACHINE_PATHS.search(line):
                problems.append(f"{path}:{number}: {line.strip()[:80]}")
    assert problems == []


def test_paths_of_machines_are_seen() -> None:
    assert MACHINE_PATHS.search("open('" + "/ro" + "ot/x')")
    assert MACHINE_PATHS.search("cd " + "/ho" + "me/jo/x")
    assert not MACHINE_PATHS.search("https://example.org/work/x and a/work/b")


def test_scripts_can_be_run(root: Path) -> None:
    scripts = ("setup", "check", "check_anywhere", "check_slurm", "check_gpu")
    for name in ("train.sh", ".ci/run", *(f"scripts/{script}" for script in scripts)):
        assert (root / name).stat().st_mode & 0o100, f"{name} is not executable"
