"""ppo-cli as a library: the page's own lines, frames, errors, and what an import costs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ppo_cli
from ppo_cli import load_run, plan, train
from ppo_cli.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_page_runs_as_it_stands(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    first, functions, _, last = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    for block in (first, last, functions):  # the third is that of tests/loop/test_session.py
        exec(compile(block, "library.md", "exec"), scope)
    run = scope["run"]
    assert list(run.metrics.index)[-2:] == [1, 2]
    assert len(run.rollouts.query("step == 1 and split == 'train'")) == 8 * 4
    assert run.rollouts.score.isin([0.0, 1.0]).all()
    assert capsys.readouterr().out.startswith("2\n")


def test_mistakes_are_errors(desk: Path) -> None:
    with pytest.raises(ConfigError, match="no setting lrr"):
        plan(lrr=1)
    with pytest.raises(ConfigError, match="argument lr: "):
        plan(lr=-1.0)
    with pytest.raises(ConfigError, match=r"override actor\.clip"):
        plan(overrides={"actor.clip": 0.1})
    for what in (plan, train):
        with pytest.raises(ConfigError, match=r"^len\(obj, /\) in this call cannot be called with"):
            what(preset="embedded", reward_function=len)
    with pytest.raises(DataError, match="no such folder"):
        load_run("nowhere")
    assert plan(preset="embedded", train_files=["embedded"], epochs=2).values[
        "trainer.total_epochs"
    ] == (2, "argument epochs")
    with pytest.raises(AttributeError):
        ppo_cli.nothing  # noqa: B018


def test_an_import_is_light() -> None:
    code = (
        "import sys, ppo_cli; from ppo_cli import load_run, plan;"
        "print([m for m in ('torch', 'transformers', 'pandas', 'ray') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.stdout == "[]\n", done.stderr
