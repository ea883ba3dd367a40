"""The notebooks run in a kernel, from the first cell to the last."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppo_cli import load_run
from tests.judge_server import JudgeServer

ROOT = Path(__file__).resolve().parents[2]


def run_cells(notebook: Path, desk: Path) -> list[dict[str, Any]]:
    """Run a notebook in place; returns its code cells with their outputs."""
    pytest.importorskip("ipykernel", reason="the dev extra has a kernel")
    # The kernel keeps its files in this folder.
    env = os.environ | {
        "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(desk), "HOME": str(desk),
        "XDG_CACHE_HOME": str(desk / "cache"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    run = f"from nbclient.cli import main; main(['--inplace', {str(notebook)!r}])"
    done = subprocess.run(
        [sys.executable, "-c", run], capture_output=True, text=True, timeout=900, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.weekly
def test_a_gpu_is_tried_and_reported(desk: Path) -> None:
    notebook = json.loads((ROOT / "notebooks" / "try_on_a_gpu.ipynb").read_text(encoding="utf-8"))
    (parameters,) = (cell for cell in notebook["cells"] if "tags" in cell["metadata"])
    run = "--preset embedded --max_steps 4 --batch_size 32 --mini_batch_size 32 --test_freq -1"
    with JudgeServer() as server:
        judge = (
            "--use_api_reward --rm_api_type openai --rm_model m --rm_key_env JUDGE_KEY "
            f"--rm_base_url {server.url('openai')}"
        )
        parameters["source"] = [
            "import os\n", 'os.environ["JUDGE_KEY"] = "sk-of-nobody-1234567890"\n',
            f'model, run, judge = "embedded", "{run}", "{judge}"',
        ]  # fmt: skip
        Path("try.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        *_, page, report = run_cells(Path("try.ipynb"), desk)
    assert "srcdoc" in json.dumps(page["outputs"])
    text = Path("report.json").read_text(encoding="utf-8")
    figures = json.loads(text)
    assert "loss_scale_halvings" in json.dumps(report["outputs"])
    states = {check["check"]: check["state"] for check in figures["self_test"]["checks"]}
    assert {"differs", "failed"}.isdisjoint(states.values()), states
    assert len(figures["run"]["reward"]) == figures["run"]["steps"] == 4
    assert figures["run"]["step_s"] > 0 and figures["run"]["model"] == "embedded"
    private = ("sk-of-nobody", socket.gethostname(), str(desk), desk.parent.name)
    assert not [word for word in private if word in text]
    # The report becomes a row of the page.
    script = runpy.run_path(str(ROOT / "scripts" / "write_machines.py"))
    Path("reports").mkdir()
    shutil.copy("report.json", "reports")
    assert "| embedded, float32, gae, hf, 128 responses a step, 4 steps |" in script["page"](
        Path("reports")
    )


def test_the_page_of_machines_has_their_reports() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_machines.py"))
    written = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert written == script["page"](script["REPORTS"]), "run: python scripts/write_machines.py"


@pytest.mark.slow
def test_the_notebook_trains_and_shows(desk: Path) -> None:
    shutil.copy(ROOT / "docs" / "notebook.ipynb", "notebook.ipynb")
    code = run_cells(Path("notebook.ipynb"), desk)
    lines = [line for cell in code for line in cell["source"] if line.strip()]
    assert len(lines) <= 15
    # A curve of ten steps that rises, and a table of responses.
    outputs = [json.dumps(cell["outputs"]) for cell in code]
    assert "BokehJS" in outputs[1] and "What is" in outputs[2]
    rewards = load_run("my-notebook-run").metrics["reward_mean"].dropna()
    assert len(rewards) == 10 and rewards.iloc[-3:].mean() > rewards.iloc[:3].mean()
