"""Runs all checks of a configuration: what clashes, what is missing here, what deserves a remark.

What does not fit together is a row of the section that has the settings (`Conflict`). What several
sections, files or this machine decide is a function `check_…` next to its subject (run, devices,
models, rewards). Both are found here. Settings without effect are declared with the settings
(unused).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from ppo_cli.config.schema.keys import Clash, Scene, find_conflicts, range_remarks
from ppo_cli.errors import ppo
from ppo_cli.plan.findings import devices, models, rewards, run
from ppo_cli.plan.findings.judge_server import judge_server_remarks, missing_for_judge_server
from ppo_cli.plan.findings.unused import find_unused
from ppo_cli.plan.resolved import Resolved


def _find_checks() -> Iterator[Callable[[Scene], Iterator[Clash]]]:
    """Yield the functions that check several sections."""
    for module in (run, devices, models, rewards):
        for name, value in vars(module).items():
            if name.startswith("check_") and value.__module__ == module.__name__:
                yield value


def find_clashes(scene: Scene) -> list[Clash]:
    """Return every clash between settings."""
    # Rows of the sections, then what several of them decide.
    clashes = [clash for check in _find_checks() for clash in check(scene)]
    return [*find_conflicts(scene.config), *clashes]


def missing_parts(resolved: Resolved, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each requested thing that this machine or program does not have."""
    # What this machine lacks, then what the settings ask for in vain.
    on_verl = resolved.config.trainer.engine == "verl"
    return [
        *([] if on_verl else devices.missing_gpus(resolved, environ)),
        *devices.unusable_gpus(resolved, environ),
        *devices.missing_packages(resolved),
        *refused_settings(resolved),
    ]


def refused_settings(resolved: Resolved) -> list[str]:
    """Return a sentence for each setting that no machine can honour, or that has no effect."""
    # What no machine supports, then what has no effect in this run.
    return [*run.unsupported_settings(resolved), *find_unused(resolved)[0]]


def remarks(resolved: Resolved, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return remarks: what does not stop a run but may surprise."""
    config = resolved.config
    # In the order of the plan: settings, rewards, devices.
    return [
        *find_unused(resolved)[1],
        *range_remarks(config, resolved.origins),
        *run.kl_remarks(config),
        *run.gspo_remarks(config),
        *rewards.judge_remarks(config),
        *judge_server_remarks(config),
        *rewards.mixture_remarks(config.reward),
        *devices.device_remarks(resolved, environ),
    ]


def missing_inputs(resolved: Resolved, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each missing input: models, prompts, keys, reward models."""
    config = resolved.config
    # Models, then the judges' keys and SDKs, then what reward models and a judge's server need.
    problems = [
        *models.broken_models(config),
        *rewards.missing_keys(config, environ),
        *rewards.missing_for_sdks(config, environ),
        *models.missing_models(config, environ),
        *missing_for_judge_server(resolved, environ),
    ]
    # Prompts.
    if not config.data.train_files:
        problems.append(
            "There are no prompts to train on: name them with --train_files FILE. "
            f"`{ppo('data prepare gsm8k --source openai/gsm8k --out data/gsm8k')}` makes a set, "
            "and --preset embedded trains on the bundled one."
        )
    return problems
