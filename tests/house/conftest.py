"""The source tree as the house tests see it: what git tracks, or what lies there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = {"__pycache__", "outputs", "dist", "build", "node_modules"}
# Files with mistakes, for the commands of tests/messages.txt.
MISTAKES = Path("tests/messages")


def list_tracked() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    done = subprocess.run(command, capture_output=True, timeout=30, check=True)
    return [Path(name) for name in done.stdout.decode().split("\0") if name]


def is_source(path: Path) -> bool:
    hidden = any(part.startswith(".") and part not in {".ci", ".gitignore"} for part in path.parts)
    return not hidden and not BUILT & set(path.parts)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Source files, relative to the root; from a zip or an sdist there is no git to ask."""
    if (ROOT / ".git").exists():
        paths = list_tracked()
    else:
        paths = [path for p in ROOT.rglob("*") if is_source(path := p.relative_to(ROOT))]
    present = sorted(p for p in paths if (ROOT / p).is_file() and MISTAKES not in p.parents)
    assert present
    return present


@pytest.fixture(scope="session")
def python_sources(files: list[Path]) -> dict[str, str]:
    """The text of each Python file, by its path."""
    python_files = [path for path in files if path.suffix == ".py"]
    return {path.as_posix(): (ROOT / path).read_text(encoding="utf-8") for path in python_files}


@pytest.fixture(scope="session")
def modules(python_sources: dict[str, str]) -> dict[str, str]:
    """The text of each module of the package, by its name: `engine.base`, `loop`, `engine`."""
    sources = {}
    for path, source in python_sources.items():
        room, *parts = Path(path).with_suffix("").parts
        if room == "ppo_cli":
            sources[".".join(parts).removesuffix(".__init__")] = source
    return sources
