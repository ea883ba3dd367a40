"""The core runs with the folder ppo_cli/extras deleted and none of its entry points installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SMALL = "--batch_size 8 --mini_batch_size 8 --test_freq -1"


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package alone, which hides the installed one and its metadata."""
    site = tmp_path_factory.mktemp("site")
    left_out = shutil.ignore_patterns("extras", "__pycache__")
    shutil.copytree(root / "ppo_cli", site / "ppo_cli", ignore=left_out)
    for folder in ("presets", "reward_prompts"):
        shutil.copytree(root / folder, site / "ppo_cli" / folder)
    info = site / "ppo_cli-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ppo-cli\nVersion: 0\n")
    return site


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--help", 0, "train"),
        (f"train --preset embedded --max_steps 1 {SMALL}", 0, "step 1/1"),
        ("plan actor_rollout_ref.actor.optim.lr=1e-6", 2, "Did you mean 'actor.optim.lr'"),
        ("bridge verl", 2, "There is no command 'bridge'"),
        (
            "reward score rows.jsonl --use_api_reward --rm_api_type openai --rm_model m --batch",
            2,
            "the batch API of openai is in the plug-in ppo_cli.extras.lab, which is not installed",
        ),
    ],
)
def test_the_core_runs_alone(site: Path, tmp_path: Path, line: str, code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ppo_cli", *line.split()], cwd=tmp_path, check=False, text=True,
        env={**os.environ, "PYTHONPATH": str(site)}, timeout=300, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code and words in done.stdout, done.stdout
