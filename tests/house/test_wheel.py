"""A built wheel carries everything that ships and runs far from the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ppo_cli.config.models.bundled import preset_names

pytestmark = pytest.mark.slow
PIP = [sys.executable, "-m", "pip"]
BUILD = [sys.executable, "-m", "hatchling", "build"]


def call(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=cwd, env=env, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution and the wheel, as CONTRIBUTING.md builds them."""
    pytest.importorskip("hatchling", reason="scripts/setup dev installs hatchling")
    folder = tmp_path_factory.mktemp("dist")
    call([*BUILD, "-d", str(folder)], cwd=root)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return built


def test_wheel_holds_what_ships(wheel: Path, files: list[Path]) -> None:
    wheel_files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source_files = {path.as_posix() for path in files if path.parts[0] == "ppo_cli"}
    shipped = [path for path in files if path.parts[0] in {"presets", "reward_prompts"}]
    beside = {f"ppo_cli/{path.as_posix()}" for path in shipped}
    assert beside
    assert source_files | beside <= wheel_files
    assert {name for name in wheel_files if not name.startswith("ppo_cli/")} == set()


def test_source_distribution_builds_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    call(["tar", "-xf", str(archive), "-C", str(tmp_path)])
    (source,) = tmp_path.iterdir()
    assert {path.name for path in source.iterdir() if path.is_dir()} == {
        "ppo_cli", "presets", "reward_prompts", "docs", "examples"
    }  # fmt: skip
    call([*BUILD, "-t", "wheel", "-d", str(tmp_path)], cwd=source)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_wheel_runs_in_an_empty_folder(wheel: Path, root: Path, tmp_path: Path) -> None:
    place, folder = tmp_path / "far away", tmp_path / "empty"
    folder.mkdir()
    call([*PIP, "install", "--no-deps", "--no-index", "--target", str(place), str(wheel)])
    # Without .pth files (-S), which put the source tree of an editable install on the path.
    packages = [path for path in sys.path if path.endswith("-packages")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *packages])}
    python = [sys.executable, "-S", "-P"]

    def ppo(*words: str) -> str:
        return call([*python, "-m", "ppo_cli", *words], cwd=folder, env=env)

    show = (
        "import sys, ppo_cli; from ppo_cli.machine.versions import VLLM_SETUP as setup; "
        "print(ppo_cli.__file__, setup, *sys.path, sep='\\n')"
    )
    where, setup, *search = call([*python, "-c", show], cwd=folder, env=env).splitlines()
    assert Path(where).is_relative_to(place) and str(root) not in search
    assert setup == "pip install 'ppo-cli[vllm]'", "no script of the checkout is installed"
    assert ppo("--version") == f"ppo-cli {wheel.name.split('-')[1]}\n"
    presets = [line.split()[0] for line in ppo("presets", "list").splitlines()]
    assert set(presets) >= set(preset_names())
    train = ["train", "--preset", "embedded", "--max_steps", "1", "--batch_size", "8"]
    assert "Done" in ppo(*train, "--mini_batch_size", "8", "trainer.val_before_train=false")
    assert (folder / "outputs" / "checkpoints" / "latest" / "actor" / "config.json").is_file()
    assert "outputs" in ppo("runs")
