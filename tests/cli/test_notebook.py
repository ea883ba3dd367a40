"""docs/notebook.ipynb runs in a kernel, from the first cell to the last."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_cli import load_run

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_trains_and_shows(desk: Path) -> None:
    pytest.importorskip("ipykernel", reason="the dev extra has a kernel")
    shutil.copy(NOTEBOOK, "notebook.ipynb")
    # The kernel keeps its files in this folder.
    env = os.environ | {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(desk), "HOME": str(desk)}
    run = "from nbclient.cli import main; main(['--inplace', 'notebook.ipynb'])"
    done = subprocess.run(
        [sys.executable, "-c", run], capture_output=True, text=True, timeout=300, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads(Path("notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    lines = [line for cell in code for line in cell["source"] if line.strip()]
    assert len(lines) <= 15
    # A curve of ten steps that rises, and a table of responses.
    outputs = [json.dumps(cell["outputs"]) for cell in code]
    assert "BokehJS" in outputs[1] and "What is" in outputs[2]
    rewards = load_run("my-notebook-run").metrics["reward_mean"].dropna()
    assert len(rewards) == 10 and rewards.iloc[-3:].mean() > rewards.iloc[:3].mean()
