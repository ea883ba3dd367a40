"""What a machine showed, as one file to send: its self-test, and the figures of a run.

The file has no secrets, no names of the host and the user, and no paths.
`scripts/write_machines.py` makes rows of docs/machines.md from such files.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppo_cli.config.models.bundled import MODELS
from ppo_cli.config.models.folder import read_config
from ppo_cli.config.models.shape import Shape
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import UserError, plural
from ppo_cli.machine.device_record import DeviceRecord
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import load_json, read_text, user_path
from ppo_cli.planning.work import ForwardFlops, find_speed
from ppo_cli.run_folder.folder import PLAN_FILE, run_settings
from ppo_cli.run_folder.lines import read_metrics
from ppo_cli.secrets.redact import redact

FORMAT = 1
WARM_UP = 1  # steps that compile and allocate, left out of the times
# Names of users in paths of their homes.
HOMES = re.compile(r"(?i:(?<=/home/)|(?<=/users/))[^\s/'\":,;)\]]+")
# A path without its last part. A part has up to four words, of which none begins another path.
_WORD = r"(?:[^\s/'\":]|(?<=\w)[':](?=\w))+"
_PART = rf"{_WORD}(?: +(?![.~$-]){_WORD}){{0,3}}/+"
PATH = re.compile(
    r"(?:(?!https?:)\b[a-z][\w+]*://+|\bfile:/+"  # an address
    r"|(?<![\w.])(?:~[\w.-]*|\.{1,2}|\$\w+|\$\{\w+\})/+"  # from a folder
    rf"|(?:(?<![\w.:/])|(?<=:)(?!//)|(?<=-[A-Z])|(?=/(?i:home|users)/))/+(?={_PART}))"
    rf"(?:{_PART})*"
)


def make_report(
    record: DeviceRecord, machine: Machine, run: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the report of this machine, with the figures of a run (`describe_run`), if any."""
    gpus = [
        {
            "name": gpu.name,
            "memory_gib": round(gpu.memory_bytes / 2**30, 1),
            "compute_capability": gpu.compute_capability,
        }
        for gpu in machine.gpus
    ]
    report = {
        "format": FORMAT,
        "gpus": gpus,
        "processor": f"{platform.machine()}, {machine.cores} cores",
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "self_test": asdict(record),
        "run": run,
    }
    cleaned: dict[str, Any] = remove_names(report)
    return cleaned


def remove_names(value: Any) -> Any:
    """Return the value without secrets, host and user names, and folders in all its texts."""
    if isinstance(value, Mapping):
        return {key: remove_names(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [remove_names(part) for part in value]
    if not isinstance(value, str):
        return value
    text = PATH.sub("", HOMES.sub("USER", redact(value)))
    host, *domains = socket.gethostname().split(".")
    users = (os.path.basename(os.path.expanduser("~")), find_user())
    # A longer name of the host is one too.
    rest = r"(?:\.[\w-]+)*" if domains else ""
    names = [(host, rf"(?i:{re.escape(host)}){rest}", "HOST")]
    names += [(user, re.escape(user), "USER") for user in users]
    for name, pattern, stand_in in names:
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![^\W_]){pattern}(?![^\W_])", stand_in, text)
    return text


def find_user() -> str:
    """Return the user's name; the number of a user without one, as in containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def describe_run(run: Path) -> dict[str, Any]:
    """Return the settings that set the pace of a run, its times, MFU and curves.

    Raises UserError for a run without two steps.
    """
    measured = read_metrics(run)  # with the validation before the first step
    lines = [line for line in measured if "time/step_s" in line]
    steps = lines[WARM_UP:]
    if not steps:
        raise UserError(
            f"{run} has {plural(len(lines), 'step')}: a report needs {WARM_UP + 1} or "
            "more. --output_dir names the run, --max_steps how many steps it has."
        )
    config = run_settings(run)
    seconds = statistics.median(line["time/step_s"] for line in steps)
    phases = ("rollout", "annotate", "update_actor", "update_critic", "publish")
    path = str(config.model.path)
    return {
        # A folder's name is the user's own.
        "model": path if path in MODELS or not user_path(path).exists() else "a folder",
        "dtype": config.model.dtype,
        "estimator": config.algorithm.adv_estimator,
        "sampler": config.rollout.name,
        "gpus": config.trainer.n_gpus_per_node * config.trainer.nnodes,
        "responses_per_step": config.data.train_batch_size * config.rollout.n,
        "steps": len(lines),
        "step_s": round(seconds, 2),
        "phases_s": {
            phase: round(statistics.median(times), 2)
            for phase in phases
            if (times := [line[key] for line in steps if (key := f"time/{phase}_s") in line])
        },
        "tokens_per_s": round(statistics.median(_column(steps, "perf/tokens_per_s"))),
        "mfu": _measure_mfu(config, _read_gpu(run), steps),
        "skipped_steps": int(sum(_column(lines, "actor/skipped_steps"))),
        "loss_scale_halvings": int(sum(_column(lines, "actor/loss_scale_halvings"))),
        "reward": [round(reward, 4) for reward in _column(lines, "reward_mean")],
        "validation": [round(score, 4) for score in _column(measured, "val/reward_mean")],
    }


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if line.get(name) is not None]


def _read_gpu(run: Path) -> str | None:
    """Return the GPU that the plan of a run names: it may have been made on another machine."""
    try:
        gpus = load_json(read_text(run / PLAN_FILE))["placement"].get("gpus")
    except (OSError, ValueError, KeyError):
        return None
    return str(gpus[0]) if gpus else None


def _measure_mfu(
    config: Config, gpu: str | None, steps: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return the MFU of annotations and updates, which one learner does one after the other.

    `gpu` is the name of the run's GPU. None without GPUs, for a GPU whose speed is not known, and
    for models that are not plain.
    """
    speed = find_speed(gpu) if gpu else None
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    shape = Shape.from_config(read_config(config.model.path))
    if speed is None or not gpus or shape is None or shape.experts:
        return None
    shares: list[float] = []
    for line in steps:
        # Lengths of prompts are not measured: rows are counted from all tokens of the step.
        tokens = line["perf/tokens_per_s"] * line["time/step_s"]
        rows = config.data.train_batch_size * config.rollout.n
        responses = rows * line["response_length_mean"]
        forward = ForwardFlops.count(shape, tokens, tokens * (tokens / rows + 1) / 2, responses)
        policies = int(not config.algorithm.rollout_correction.bypass_mode) + config.uses_reference
        needed = forward.annotate(policies, int(config.uses_critic))
        needed += config.actor.ppo_epochs * forward.update(critic=config.uses_critic)
        parts = ("annotate", "update_actor", "update_critic")
        seconds = sum(line.get(f"time/{part}_s", 0.0) for part in parts)
        shares.append(needed / (seconds * gpus * speed.tflops * 1e12))
    return round(statistics.median(shares), 4)
