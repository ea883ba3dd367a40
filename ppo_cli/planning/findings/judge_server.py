"""Checks of a judge that the run starts itself (reward.api.type local), and its server's needs.

It needs a Python with vLLM, a place and memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from ppo_cli.config.mixture import judges_of
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import folder_problem, has_template
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.reward import Reward
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.torch_build import GpuFault, read_build
from ppo_cli.machine.versions import ROOT, VLLM_SETUP
from ppo_cli.paths import user_path
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.planning.memory.devices import GIB, KV_GB, count_judge_server
from ppo_cli.planning.placement import Placement, local_judge, placement_of


def vllm_python(environ: Mapping[str, str]) -> str | None:
    """Return the Python that has vLLM: a named one, this one, or that of `scripts/setup judge`."""
    if named := environ.get("PPO_VLLM_PYTHON", "").strip():
        return named
    if find_spec("vllm"):
        return sys.executable
    # The environment that `scripts/setup judge` makes, unless PPO_JUDGE_VENV names another.
    usual = ROOT / ".venv-judge"
    python = Path(environ.get("PPO_JUDGE_VENV", "").strip() or usual) / "bin" / "python"
    return str(python) if python.exists() else None


def judge_fault(machine: Machine, environ: Mapping[str, str]) -> GpuFault | None:
    """Return why the judge's server cannot use the GPUs here; None when it can or has none."""
    python = vllm_python(environ)
    if python == sys.executable:
        return machine.gpu_fault(1)
    # Another Python: only its torch build is known without starting it.
    build = read_build(python) if python and machine.gpus else None
    if build is None or build.cuda is not None:
        return None
    unset = "unset PPO_VLLM_PYTHON; " if environ.get("PPO_VLLM_PYTHON", "").strip() else ""
    return GpuFault(
        f"The judge's server has a GPU here, but {build}, the one of {python}",
        f"run `{unset}{VLLM_SETUP}`",
    )


def check_judge_server(reward: Reward, placement: Placement, per_node: int) -> Iterator[Finding]:
    """Yield clashes of settings with a judge that the run starts; a node has `per_node` GPUs."""
    # The run starts one server.
    local_judges = [j for j in judges_of(reward) if j.settings.type == "local"]
    if len(local_judges) > 1:
        yield Finding(
            tuple(judge.key + ".type" for judge in local_judges),
            f"{len(local_judges)} judges are to be started by the run, which starts one; serve the "
            "others "
            "yourself and name them with type openai and base_url.",
        )
    for judge in judges_of(reward):
        api = judge.settings
        if api.monitor.model is not None and api.monitor.type == "local":
            yield Finding(
                ("reward.api.monitor.type",),
                "a monitoring judge is not started by the run; serve it yourself and name it with "
                "--rm_monitor_type openai and --rm_monitor_base_url.",
            )
    if not local_judges:
        return
    judge = local_judges[0]
    # Settings of a server that exists already.
    for name in ("base_url", "key_env"):
        if getattr(judge.settings, name) is not None:
            yield Finding(
                judge.keys("type", name),
                f"--rm_{name} is for a server that already runs; leave it out with "
                "--rm_api_type local, or use --rm_api_type openai.",
            )
    # Its GPUs must be on the node where the run starts.
    devices = placement.judge or judge.settings.local.devices
    if per_node and not devices:
        yield Finding(
            ("trainer.placement", *judge.keys("type")),
            "the judge of the run has no GPU: name its own in --placement, such as "
            "train:0-5,rollout:6,judge:7.",
        )
    elif per_node and devices[-1] >= per_node:
        yield Finding(
            ("trainer.placement", *judge.keys("type")),
            f"--placement puts the judge on GPU {devices[-1]}, which is on another node; it runs "
            f"where the run begins, on GPUs 0 to {per_node - 1}.",
        )


def missing_for_judge_server(scene: Scene) -> list[str]:
    """Return what a judge that the run starts lacks: vLLM, a model, a chat template, memory."""
    config, environ = scene.config, scene.environ
    judge = local_judge(config.reward)
    if judge is None or not judge.settings.model:
        return []
    problems = []
    if vllm_python(environ) is None:
        problems.append(
            f"A judge that the run starts needs vLLM: run `{VLLM_SETUP}`, or on a machine "
            "without a GPU `scripts/setup judge`, or name a Python that has it in PPO_VLLM_PYTHON."
        )
    elif config.trainer.n_gpus_per_node and (fault := judge_fault(scene.machine, environ)):
        problems.append(str(fault))
    # The model: an instruct model in a folder, or a hub name.
    name = judge.settings.model
    folder = user_path(model_folder(name))
    if (folder / "config.json").is_file():
        problems.append(folder_problem(folder, "--rm_model", tokenizer=True))
        if not problems[-1] and not has_template(folder):
            problems.append(
                f"The judge {name} has no chat template: a judge must be an instruct model, not a "
                "base model."
            )
    elif name.startswith((".", "/", "~")):
        problems.append(f"The judge {name} is no model folder: it has no config.json.")
    place = count_judge_server(judge, placement_of(config), config.trainer, scene.machine)
    if place is not None and place.capacity is not None and place.fits is False:
        problems.append(
            f"The judge {name} needs about {place.needed / GIB:.3g} GiB on each of its devices, "
            f"which have {place.capacity / GIB:.3g} GiB: use a smaller --rm_model, or more GPUs."
        )
    return [sentence for sentence in problems if sentence]


def judge_server_remarks(reward: Reward, model: str) -> Iterator[str]:
    """Remark on a judge that is `model`, the trained one."""
    judge = local_judge(reward)
    if judge is None:
        return
    same = (model_folder(str(judge.settings.model)), model_folder(model))
    if same[0] == same[1]:
        yield (
            f"The judge is {model}, the model that is trained, as it is before the "
            "first step: it likes its own mistakes. Measure it first (`ppo reward calibrate`), "
            "and watch validation scores that do not come from it."
        )


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a server on the CPU, as scripts/local_judge.sh sets them."""
    # Half of the cores: the other half trains.
    cores = os.cpu_count() or 2
    return {
        "OMP_NUM_THREADS": environ.get("PPO_JUDGE_THREADS") or str((cores + 1) // 2),
        # With a fixed binding the server would share its cores with other processes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": environ.get("PPO_JUDGE_KV_GB") or str(KV_GB),
    }
