"""Commas in the names of prompt files: part of a name that exists, else between two names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_cli.planning.resolve import resolve


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a,b.jsonl", "e, f.jsonl", "c.jsonl", "x,y,z.jsonl", "sub,dir/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "saved,set").mkdir()
    return tmp_path


def train_files(desk: Path, **layers: Any) -> tuple[str, ...]:
    empty: dict[str, Any] = {"flags": {}, "config_files": [], "overrides": [], "environ": {}}
    return resolve(preset="embedded", **empty | layers).config.data.train_files


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a,b.jsonl", ("a,b.jsonl",)),
        ("e, f.jsonl", ("e, f.jsonl",)),
        ("./a,b.jsonl", ("./a,b.jsonl",)),
        ("c.jsonl,a,b.jsonl", ("c.jsonl", "a,b.jsonl")),
        ("x,y,z.jsonl, c.jsonl", ("x,y,z.jsonl", "c.jsonl")),
        ("a,b.jsonl,x,y,z.jsonl", ("a,b.jsonl", "x,y,z.jsonl")),
        ("sub,dir/d.jsonl,c.jsonl", ("sub,dir/d.jsonl", "c.jsonl")),
        ("saved,set:test", ("saved,set:test",)),
        ("c.jsonl,none.jsonl", ("c.jsonl", "none.jsonl")),
        ("openai/gsm8k:train,c.jsonl", ("openai/gsm8k:train", "c.jsonl")),
    ],
)
def test_a_comma_in_the_name_of_an_existing_file(
    desk: Path, text: str, names: tuple[str, ...]
) -> None:
    assert train_files(desk, flags={"data.train_files": ((text,), "flag")}) == names
    assert train_files(desk, environ={"PPO_TRAIN_FILES": text}) == names
    assert train_files(desk, overrides=[f"data.train_files={text}"]) == names
    assert train_files(desk, overrides=[f"data.train_files=[{text}]"]) == names
    (desk / "s.yaml").write_text(f"data:\n  train_files: [{text.strip(',')}]\n")
    assert train_files(desk, config_files=[desk / "s.yaml"]) == names
    (desk / "s.yaml").write_text(f"data:\n  train_files: {text}\n")
    assert train_files(desk, config_files=[desk / "s.yaml"]) == names


def test_absolute_and_quoted_names(desk: Path) -> None:
    name_with_comma = str(desk / "a,b.jsonl")
    several = ((name_with_comma, "c.jsonl"), "flag")
    assert train_files(desk, flags={"data.train_files": several}) == (name_with_comma, "c.jsonl")
    quoted = "data.train_files=['a,b.jsonl', c.jsonl, \"no,file\"]"
    assert train_files(desk, overrides=[quoted]) == ("a,b.jsonl", "c.jsonl", "no,file")
    (desk / "a").touch()  # quotes keep what is in them apart
    quoted = 'data.train_files=[\'a\', b.jsonl, {"prompt": "p", "x": 1}, [c]]'
    rows = '{"prompt": "p", "x": 1}', "[c]"  # no file has such a name, which is told
    assert train_files(desk, overrides=[quoted]) == ("a", "b.jsonl", *rows)
