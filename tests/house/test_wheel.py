"""A built wheel carries everything that ships and runs far from the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PIP = [sys.executable, "-m", "pip"]


def call(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=cwd, env=env, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="scripts/setup dev installs hatchling")
    out = tmp_path_factory.mktemp("wheel")
    alone = ["--no-deps", "--no-build-isolation", "--no-index"]
    call([*PIP, "wheel", *alone, "-w", str(out), str(root)])
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_what_ships(wheel: Path, files: list[Path]) -> None:
    wheel_files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source_files = {path.as_posix() for path in files if path.parts[0] == "ppo_cli"}
    shipped = [path for path in files if path.parts[0] in {"presets", "reward_prompts"}]
    beside = {f"ppo_cli/{path.as_posix()}" for path in shipped}
    assert beside
    assert source_files | beside <= wheel_files
    assert {name for name in wheel_files if not name.startswith("ppo_cli/")} == set()


def test_installed_wheel_finds_its_files(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "far away"
    call([*PIP, "install", "--no-deps", "--no-index", "--target", str(place), str(wheel)])
    env = {**os.environ, "PYTHONPATH": str(place)}
    where = [sys.executable, "-P", "-c", "import ppo_cli; print(ppo_cli.__file__)"]
    assert Path(call(where, cwd=tmp_path, env=env).strip()).is_relative_to(place)
    plan = [sys.executable, "-P", "-m", "ppo_cli", "plan", "--preset", "embedded"]
    output = call(plan, cwd=tmp_path, env=env)
    assert "training rows" in output, "the bundled prompts were not found"
    name = "from ppo_cli.config.machine.torch_build import VLLM_SETUP; print(VLLM_SETUP)"
    setup = call([sys.executable, "-P", "-c", name], cwd=tmp_path, env=env)
    assert setup == "pip install 'ppo-cli[vllm]'\n", "no script of the checkout is installed"
