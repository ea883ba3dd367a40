"""The source tree as the house tests see it: what git tracks, or what lies there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = {"__pycache__", "outputs", "dist", "build", "node_modules"}


def list_tracked() -> list[Path] | None:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [Path(name) for name in done.stdout.decode().split("\0") if name]


def is_source(path: Path) -> bool:
    hidden = any(part.startswith(".") and part not in {".ci", ".gitignore"} for part in path.parts)
    return not hidden and not BUILT & set(path.parts)


def walk_tree() -> list[Path]:
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [path for path in found if is_source(path)]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Source files, relative to the root; from a zip or an sdist there is no git to ask."""
    listed = list_tracked() if (ROOT / ".git").exists() else None
    present = [path for path in (listed or walk_tree()) if (ROOT / path).is_file()]
    assert present
    return sorted(present)


@pytest.fixture(scope="session")
def package_files(files: list[Path]) -> list[Path]:
    return [p for p in files if p.parts[0] == "ppo_cli" and p.suffix == ".py"]


@pytest.fixture(scope="session")
def python_files(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".py"]
