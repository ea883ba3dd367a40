"""Settings files: lines, duplicates, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.config.layers import read_yaml
from ppo_cli.config.schema.values import Quoted
from ppo_cli.errors import ConfigError


def read(tmp_path: Path, text: str) -> list[tuple[str, object, str]]:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return [(e.name, e.raw, e.origin) for e in read_yaml(path, "x.yaml")]


def test_entries_remember_their_line(tmp_path: Path) -> None:
    text = "# top\na:\n  b: 1e-6\n  c: [x, 'y']\nd.e: null\nf: {}\n"
    assert read(tmp_path, text) == [
        ("a.b", "1e-6", "x.yaml line 3"),
        ("a.c", ["x", "y"], "x.yaml line 4"),
        ("d.e", None, "x.yaml line 5"),
        ("f", {}, "x.yaml line 6"),
    ]


def test_quotes_are_remembered(tmp_path: Path) -> None:
    ((_, raw, _),) = read(tmp_path, "a: 'null'\n")
    assert isinstance(raw, Quoted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n  b: 1\n  b: 2\n", "x.yaml line 3: a.b was set on line 2 already"),
        ("a: {b: 1}\na.b: 2\n", "x.yaml line 2: a.b was set on line 1 already"),
        ("a: [1,\nb: 2\n", "(in what begins on line 1)"),
        ("a:\n\tb: 1\n", "x.yaml line 2: not valid YAML"),
        ("- a\n- b\n", "x.yaml: expected settings such as 'actor:', found a list."),
        ("hello\n", "found 'hello'"),
        ("# nothing\n", "x.yaml: the file is empty"),
        ("", "x.yaml: the file is empty"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "x.yaml line 3: keys are plain words"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_a_folder_or_bytes_are_no_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this is a folder"):
        read_yaml(tmp_path, "x")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_yaml(tmp_path / "b.yaml", "b.yaml")
