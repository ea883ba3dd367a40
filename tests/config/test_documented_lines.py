"""The lines about several devices that README and docs/scaling.md show: each one can be planned."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config import derived, layers, requirements, resolve

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^(?P<env>(?:[A-Z_]+=\S+ )*)(?:\S*ppo plan|\./train\.sh)\b(?P<args>[^#]*)", re.M)
ASIDE = re.compile(r"`(?P<args>--placement [^`]+|--n_gpus [^`]+)`")


def documented() -> list[tuple[str, str]]:
    """Return the variables and the arguments of each line, with `…` left out."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## More than one device")[1].split("\n## ")[0]
    text = section + (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    found = [(m["env"], m["args"]) for m in LINE.finditer(text)]
    found += [("", m["args"]) for m in ASIDE.finditer(text)]
    return [(env, re.sub(r"--\w+ …|…", "", args)) for env, args in found]


def test_there_are_lines_to_plan() -> None:
    assert len(documented()) >= 8


@pytest.mark.parametrize(("env", "args"), documented())
def test_a_documented_line_can_be_planned(
    env: str, args: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (resolve, derived, layers, requirements):
        if hasattr(module, "gpu_count"):
            gpus = 0 if "--num_workers" in args else 8
            monkeypatch.setattr(module, "gpu_count", lambda *_, gpus=gpus: gpus)
    for variable in shlex.split(env):
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(requirements, "has_package", lambda name: True)
    main(["plan", *shlex.split(args)])
    said = capsys.readouterr()
    wrong = [line for line in said.err.splitlines() if "things are wrong" not in line]
    # The files that a preset names are there once they have been prepared.
    assert [line for line in wrong if "no such file" not in line] == []
    assert "Devices" in said.out
    assert "visible" not in said.out
