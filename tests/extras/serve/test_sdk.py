"""The Tinker SDK and the loop of its cookbook against our server, in .venv-tinker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tinker_rl_loop
from ppo_cli.config.models.bundled import model_folder
from tests.extras.serve.conftest import Client, serving
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("PPO_TINKER_VENV", ROOT / ".venv-tinker")) / "bin" / "python"
CHECKS = Path(__file__).with_name("sdk_checks.py")
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="the SDK is not installed: scripts/setup_tinker"
)


def start(*words: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(PYTHON), *map(str, words)], env=tinker_rl_loop.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


@pytest.fixture
def run() -> Iterator[Callable[..., str]]:
    def run_to_the_end(*words: Any, **options: Any) -> str:
        process = start(*words, **options)
        try:
            output, _ = process.communicate(timeout=500)
        finally:
            process.kill()
        assert process.returncode == 0, output[-3000:]
        return output

    yield run_to_the_end


def test_the_client_of_the_sdk(url: str, run: Callable[..., str]) -> None:
    assert "all checks passed" in run(CHECKS, url)


def test_the_loop_of_the_page(url: str, run: Callable[..., str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "loop.py").write_text(block.replace("http://127.0.0.1:8765", url))
    assert re.search(r"\[.*\] [01]\.0 \[-?\d", run(tmp_path / "loop.py"))


def test_a_client_that_is_killed_leaves_the_server_to_others(
    url: str, connect: Callable[[str], Client]
) -> None:
    process = start(CHECKS, url, "for ever")
    try:
        assert process.stdout is not None and process.stdout.readline() == "sampling\n"
    finally:
        process.kill()
        process.communicate()
    client = connect(url)
    assert client.create(8)
    wait_until(lambda: client.http.post("healthz").status_code == 200)


@pytest.mark.slow
def test_rl_loop_of_the_cookbook_unmodified_twice_with_the_same_bits(
    run: Callable[..., str], tmp_path: Path
) -> None:
    tinker_rl_loop.write_working_directory(tmp_path, Path(model_folder("embedded")))
    flags, saved = ("--served_name", tinker_rl_loop.NAME), tmp_path / "saved"
    with serving(saved, *flags) as (url, _):
        run(tinker_rl_loop.WARM_UP, url, "0", 80, cwd=tmp_path)
    runs = []
    for name in ("1", "2"):
        shutil.copytree(tmp_path / "0", tmp_path / name)
        with serving(saved, *flags) as (url, _):
            run("-m", *tinker_rl_loop.recipe(url, name, steps=6), cwd=tmp_path)
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        lines = [json.loads(line) for line in metrics]
        final = json.loads((tmp_path / name / "checkpoints.jsonl").read_text().splitlines()[-1])
        folder = saved.joinpath(*final["state_path"].removeprefix("tinker://").split("/"))
        digests = {
            file.relative_to(folder): sha256(file.read_bytes()).hexdigest()
            for file in folder.rglob("*.safetensors")
        }
        runs.append(([{k: v for k, v in x.items() if k != "time/total"} for x in lines], digests))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) == 6 and any("grad_norm" in line for line in runs[0][0])
