"""Desks: folders with files, in which the tests type commands."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import pytest

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
