"""A table of mistakes: each typed at a desk of files, told once with its mend, no trace left."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.keys import table

TRAIN = "train --preset embedded --config tiny.yaml"
TINY = """\
data: {train_files: [good.jsonl], val_files: [], train_batch_size: 4}
actor: {ppo_mini_batch_size: 4}
rollout: {n: 1}
trainer: {total_training_steps: 1}
"""
ROW = {"prompt": "What is 1 + 1?", "ground_truth": "2", "data_source": "ppo-cli/arithmetic"}
KEY = {"DASHSCOPE_API_KEY": "a-key-of-nobody"}


class Mistake(NamedTuple):
    """What is typed, and what the message must name: the thing, and the mend."""

    typed: str
    thing: str
    mend: str
    environ: Mapping[str, str] = {}
    several: bool = False


def set_desk(folder: Path, files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with some files; no GPU, no wandb, no key, no variable that is read."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "wandb", None)
    variables = [key.env for key in table().values() if key.env]
    for names in (name for api in JUDGES.values() for name in (*api.needs, *api.replaces.values())):
        variables += names.split()
    for name in chain(variables, *(api.keys for api in JUDGES.values()), ["OPENAI_BASE_URL"]):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder; an empty run folder is no trace."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if not p.is_dir()}


def assert_told_once(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Make the mistake: one message with thing and mend, exit code 2, the files as they were."""
    for variable, value in mistake.environ.items():
        monkeypatch.setenv(variable, value)
    before = contents(Path.cwd())
    code = main(shlex.split(mistake.typed))
    err = capfd.readouterr().err
    assert code == 2
    assert err.count("error: ") + err.count("things are wrong") == 1
    assert ("things are wrong" in err) == mistake.several
    assert "Traceback" not in err and "hush" not in err
    assert re.search(mistake.thing, err, re.DOTALL), err
    assert re.search(mistake.mend, err, re.DOTALL), err
    assert contents(Path.cwd()) == before
