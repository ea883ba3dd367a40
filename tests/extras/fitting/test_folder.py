"""A fitted model lies whole in its folder or not at all, and nothing else is overwritten."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import ConfigError, UserError
from ppo_cli.extras.fitting.fit import ModelFolder


def write(folder: ModelFolder, text: str = "x", record: dict[str, Any] | None = None) -> None:
    folder.write(lambda path: (path / "config.json").write_text(text), record or {"finished": 0})


def fail_to_write(path: Path) -> None:
    (path / "config.json").write_text("half")
    raise OSError(28, "no space left")


def test_a_folder_is_made_and_replaced_by_a_better_model(tmp_path: Path) -> None:
    (tmp_path / "deep" / "rm").mkdir(parents=True)
    folder = ModelFolder(tmp_path / "deep" / "rm")
    write(folder, "first")
    write(folder, "second", {"finished": False})
    folder.finish({"finished": True})
    assert (tmp_path / "deep/rm/config.json").read_text() == "second"
    assert json.loads((tmp_path / "deep/rm/fit.json").read_text()) == {"finished": True}
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["rm"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "rm")
    write(folder, "first")
    with pytest.raises(UserError, match=r"could not be written.*no space.*--out"):
        folder.write(fail_to_write, {})
    assert (tmp_path / "rm" / "config.json").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["rm"]


def test_a_fitted_model_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write(ModelFolder(tmp_path / "rm"), "first")
    with pytest.raises(ConfigError, match=r"already has a fitted model.*--overwrite"):
        ModelFolder(tmp_path / "rm")
    second = ModelFolder(tmp_path / "rm", overwrite=True)
    assert (tmp_path / "rm" / "config.json").read_text() == "first"
    write(second, "second")
    assert (tmp_path / "rm" / "config.json").read_text() == "second"


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_files_are_never_replaced(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="files that no fit wrote"):
        ModelFolder(tmp_path, overwrite=overwrite)
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        ModelFolder(tmp_path / "thesis.tex", overwrite=overwrite)
