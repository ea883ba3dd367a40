"""Each test of the command line runs in an empty folder; a file may define another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.mistakes import set_desk


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_desk(tmp_path, {}, monkeypatch)
