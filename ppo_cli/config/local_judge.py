"""A judge that the run starts itself (reward.api.type local): its Python, its place, its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppo_cli.config.bundled import model_folder
from ppo_cli.config.derived import Placement, gpus_per_node, has_package, placement_of
from ppo_cli.config.keys import Clash
from ppo_cli.config.known_models import read_json, weight_files
from ppo_cli.config.memory import FLOAT, GIB, Place, Share, device_memory
from ppo_cli.config.mixture import Judge, judges_of
from ppo_cli.config.model_checks import folder_problem, has_template
from ppo_cli.config.reward_schema import Reward
from ppo_cli.config.schema import Config
from ppo_cli.errors import ModelError

LONGEST = 8192  # tokens of a request and its answer; more would need more memory for nothing
KV_GB = 1  # of a server on the CPU
OVERHEAD = 2 * GIB  # of its processes, measured with vLLM 0.32 on the CPU


def local_judge(config: Config) -> Judge | None:
    """The judge that the run starts, if it has one."""
    return next((j for j in judges_of(config.reward) if j.settings.type == "local"), None)


def vllm_python(environ: Mapping[str, str]) -> str | None:
    """The Python that has vLLM: one that is named, this one, or that of `scripts/setup judge`."""
    if named := environ.get("PPO_VLLM_PYTHON", "").strip():
        return named
    if has_package("vllm"):
        import sys

        return sys.executable
    usual = Path(__file__).resolve().parents[2] / ".venv-judge"
    own = Path(environ.get("PPO_JUDGE_VENV", "").strip() or usual) / "bin" / "python"
    return str(own) if own.exists() else None


def longest_request(model: str) -> int | None:
    """Tokens that a server of this model takes; None for a hub's model, which vLLM looks up."""
    folder = Path(model_folder(model)).expanduser()
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    most = (config.get("text_config") or config).get("max_position_embeddings")
    return min(LONGEST, most) if isinstance(most, int) else LONGEST


def local_clashes(config: Config, gpus: int) -> Iterator[Clash]:
    """What of the settings does not go with a judge that the run starts."""
    found = [j for j in judges_of(config.reward) if j.settings.type == "local"]
    if len(found) > 1:
        yield Clash(
            tuple(judge.key + ".type" for judge in found),
            f"{len(found)} judges are to be started by the run, which starts one; serve the others "
            "yourself and name them with type openai and base_url.",
        )
    for judge in judges_of(config.reward):
        api = judge.settings
        if api.monitor.model is not None and api.monitor.type == "local":
            yield Clash(
                ("reward.api.monitor.type",),
                "a monitoring judge is not started by the run; serve it yourself and name it with "
                "--rm_monitor_type openai and --rm_monitor_base_url.",
            )
    if not found:
        return
    judge = found[0]
    for name in ("base_url", "key_env"):
        if getattr(judge.settings, name) is not None:
            yield Clash(
                judge.keys("type", name),
                f"--rm_{name} is for a server that is there already; leave it out with "
                "--rm_api_type local, or use --rm_api_type openai.",
            )
    per_node = gpus_per_node(config, gpus)
    devices = _devices(config, gpus)
    if per_node and not devices:
        yield Clash(
            ("trainer.placement", *judge.keys("type")),
            "the judge of the run has no GPU: name its own in --placement, such as "
            "train:0-5,rollout:6,judge:7.",
        )
    elif per_node and devices[-1] >= per_node:
        yield Clash(
            ("trainer.placement", *judge.keys("type")),
            f"--placement puts the judge on GPU {devices[-1]}, which is on another node; it runs "
            f"where the run begins, on GPUs 0 to {per_node - 1}.",
        )


def _devices(config: Config, gpus: int | None = None) -> tuple[int, ...]:
    try:
        placed: Placement = placement_of(config, gpus)
    except ValueError:  # told where placements are checked
        return ()
    judge = local_judge(config)
    return placed.judge or (judge.settings.local.devices if judge else ())


def missing_for_judge(config: Config, environ: Mapping[str, str]) -> list[str]:
    """What a judge that the run starts lacks: vLLM, a model, a chat template, memory."""
    judge = local_judge(config)
    if judge is None or not judge.settings.model:
        return []
    said = []
    if vllm_python(environ) is None:
        said.append(
            "A judge that the run starts needs vLLM: run `scripts/setup vllm`, or on a machine "
            "without a GPU `scripts/setup judge`, or name a Python that has it in PPO_VLLM_PYTHON."
        )
    name = judge.settings.model
    folder = Path(model_folder(name)).expanduser()
    if (folder / "config.json").is_file():
        said.append(folder_problem(folder, "--rm_model", tokenizer=True))
        if not said[-1] and not has_template(folder):
            said.append(
                f"The judge {name} has no chat template: a judge must be an instruct model, not a "
                "base model."
            )
    elif name.startswith((".", "/", "~")):
        said.append(f"The judge {name} is no model folder: it has no config.json.")
    place, there = judge_place(config), device_memory(config)
    if place is not None and there is not None and place.fits is False:
        said.append(
            f"The judge {name} needs about {place.needed / GIB:.3g} GiB on each of its devices, "
            f"which have {there / GIB:.3g} GiB: take a smaller --rm_model, or give it more GPUs."
        )
    return [sentence for sentence in said if sentence]


def local_remarks(config: Config) -> Iterator[str]:
    """What of a judge that the run starts may surprise."""
    judge = local_judge(config)
    if judge is None:
        return
    same = (model_folder(str(judge.settings.model)), model_folder(config.model.path))
    if same[0] == same[1]:
        yield (
            f"The judge is {config.model.path}, the model that is trained, as it is before the "
            "first step: it likes its own mistakes. Measure it first (`ppo reward calibrate`), "
            "and watch validation scores that do not come from it."
        )


def judge_place(config: Config) -> Place | None:
    """What the server takes of each of its devices; None where its weights are not at hand."""
    judge = local_judge(config)
    if judge is None or not judge.settings.model:
        return None
    folder = Path(model_folder(judge.settings.model)).expanduser()
    try:
        weights = sum(file.stat().st_size for file in weight_files(folder))
    except (ModelError, OSError):
        weights = 0
    if not weights:
        return None
    there, devices = device_memory(config), _devices(config)
    if not gpus_per_node(config):
        if not has_bfloat16() and read_json(folder / "config.json").get("dtype") == "bfloat16":
            weights = weights * FLOAT // 2
        share = Share(parameters=weights, kv_cache=KV_GB * GIB)
        need = weights + KV_GB * GIB + OVERHEAD
        return Place("the judge's server", there, {"judge": share}, {"judging": need})
    own = weights // max(1, len(devices))
    taken = int(judge.settings.local.gpu_memory_utilization * there) if there else own
    share = Share(parameters=own, kv_cache=max(0, taken - own))
    return Place("a GPU of the judge", there, {"judge": share}, {"judging": max(own, taken)})


def has_bfloat16() -> bool:
    """Whether the processor computes in bfloat16; without, it is slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return True
    return any(word in flags for word in ("avx512_bf16", "amx_bf16", " bf16"))


def with_devices(config: Config) -> Reward:
    """The reward's settings, with the GPUs that the placement gives the judge."""
    api, devices = config.reward.api, _devices(config)
    local = api.local.model_copy(update={"devices": devices})
    update: dict[str, Any] = {"api": api.model_copy(update={"local": local})}
    return config.reward.model_copy(update=update)


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a server on the CPU, as scripts/local_judge.sh sets them."""
    cores = os.cpu_count() or 2
    return {
        "OMP_NUM_THREADS": environ.get("PPO_JUDGE_THREADS") or str((cores + 1) // 2),
        # With a fixed binding the server would share its core with whatever runs there.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": environ.get("PPO_JUDGE_KV_GB") or str(KV_GB),
    }
