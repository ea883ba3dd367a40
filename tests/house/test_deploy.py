"""Files for Docker, SkyPilot and Kubernetes agree with the settings and with the pins."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_cli.config.models.bundled import bundled_path, preset_names
from ppo_cli.config.schema.keys import table
from ppo_cli.errors import is_address
from ppo_cli.extras.lab.prepare import RECIPES

# Variables that are no settings.
OTHERS = {"PRESET", "OUTPUT_DIR", "HF_TOKEN", "PPO_CLUSTER_SECRET", "PPO_TORCH", "RAY_ADDRESS"}
SKY = {  # as SkyPilot sets them on a node
    "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
}  # fmt: skip


@pytest.fixture
def variables() -> set[str]:
    return {key.env for key in table().values() if key.env} | OTHERS


def read_dockerfile(root: Path) -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, comments left out."""
    text = (root / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (word, rest.strip()) for word, _, rest in (i.partition(" ") for i in joined.split("\n"))
    ]


def test_images_are_pinned_run_as_a_user_and_take_the_pinned_packages(root: Path) -> None:
    instructions = [(word, rest) for word, rest in read_dockerfile(root) if word]
    stages = [rest.split() for word, rest in instructions if word == "FROM"]
    assert [words[2] for words in stages] == ["source", "cpu", "cuda"]
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", stages[0][0])
    assert {words[0] for words in stages[1:]} == {"source"}
    # Nothing after the user is given up is run by root.
    words = [word for word, _ in instructions]
    assert dict(instructions)["USER"] == "ppo" and words.index("USER") < words.index("ENTRYPOINT")
    runs = [rest for word, rest in instructions if word == "RUN"]
    for run in runs:
        assert subprocess.run(["bash", "-n", "-c", run], check=False).returncode == 0
    setup = (root / "scripts" / "setup").read_text()
    pins = {line.partition("==")[0] for line in (root / "constraints.txt").read_text().splitlines()}
    for profile, run, extra in zip(("run", "vllm"), runs[1::2], runs[2::2], strict=True):
        packages = shlex.split(extra.partition("/app/constraints.txt ")[2])
        assert packages and {name.partition("[")[0] for name in packages} <= pins
        build, script, chosen = shlex.split(run)
        assert script == "/app/scripts/setup" and chosen == profile and f"'{profile}'" in setup
        assert build.partition("=")[2] in setup
    ignored = (root / ".dockerignore").read_text().split()
    assert {".git", ".venv*", "outputs*"} <= set(ignored)


def assert_prepares_rows(script: str, preset: str, train: str) -> None:
    """A script of a shell that makes the files of the preset's rows before it trains."""
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    (name, folder) = re.findall(r"ppo data prepare (\w+) --out (\S+?);?(?:\s|$)", script)[0]
    data = yaml.safe_load((bundled_path("presets") / f"{preset}.yaml").read_text())["data"]
    assert name in RECIPES and train in script
    assert {Path(file).parent for file in (*data["train_files"], *data["val_files"])} == {
        Path(folder)
    }


def test_skypilot_gives_each_node_its_variables(root: Path, variables: set[str]) -> None:
    task: dict[str, Any] = yaml.safe_load((root / "deploy" / "sky.yaml").read_text())
    assert {*task["envs"], *task["secrets"]} <= variables
    assert task["envs"]["PRESET"] in preset_names() and is_address(task["envs"]["OUTPUT_DIR"])
    assert_prepares_rows(task["setup"], task["envs"]["PRESET"], "")
    # What the run command exports on the second node.
    exports, start = task["run"].strip().rsplit("\n", 1)
    names = re.findall(r"\b([A-Z_]+)=", exports)
    assert set(names) <= variables
    echo = "; ".join(f"echo {name}=${name}" for name in names)
    done = subprocess.run(
        ["bash", "-ec", f"{exports}\n{echo}"], env=SKY | {"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert dict(line.split("=") for line in done.stdout.split()) == {
        "NNODES": "2", "NODE_RANK": "1", "N_GPUS": "8", "MASTER_ADDR": "10.0.0.1",
    }  # fmt: skip
    assert shlex.split(start)[0] == "./train.sh"


def test_kubernetes_has_the_nodes_that_the_run_waits_for(root: Path, variables: set[str]) -> None:
    job: dict[str, Any] = yaml.safe_load((root / "deploy" / "kuberay.yaml").read_text())
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    env = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert set(env) <= variables and all(isinstance(value, str) for value in env.values())
    workers = cluster["workerGroupSpecs"]
    assert int(env["NNODES"]) == 1 + sum(group["replicas"] for group in workers)
    for group in (cluster["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == env["N_GPUS"]
        assert pod["securityContext"]["runAsNonRoot"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
    pins = (root / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pins
    assert env["PRESET"] in preset_names()
    assert_prepares_rows(spec["entrypoint"], env["PRESET"], "ppo train --preset $PRESET ")
