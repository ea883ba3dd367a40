"""Runs all checks of a configuration: what clashes, what is missing here, what deserves a remark.

What does not fit together is a row of the section that has the settings (`Conflict`). What several
sections, files or this machine decide is a function `check_…` next to its subject (run, devices,
models, rewards). Both are found here. Settings without effect are declared with the settings
(unused).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from ppo_cli.config.checks import devices, models, rewards, run
from ppo_cli.config.checks.judge_server import judge_server_remarks, missing_for_judge_server
from ppo_cli.config.checks.unused import find_unused
from ppo_cli.config.layers import Resolved
from ppo_cli.config.placement import gpu_count, visible_gpus
from ppo_cli.config.schema.keys import Clash, Scene, find_conflicts, range_remarks
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ppo


def _find_checks() -> Iterator[Callable[[Scene], Iterator[Clash]]]:
    """Yield the functions that check several sections."""
    for module in (run, devices, models, rewards):
        for name, value in vars(module).items():
            if name.startswith("check_") and value.__module__ == module.__name__:
                yield value


def find_clashes(config: Config, environ: Mapping[str, str]) -> list[Clash]:
    """Return every clash between settings."""
    scene = Scene(config, gpu_count(environ), environ)
    # Rows of the sections, then what several of them decide.
    clashes = [clash for check in _find_checks() for clash in check(scene)]
    return [*find_conflicts(config), *clashes]


def missing_parts(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return a sentence for each requested thing that this machine or program does not have."""
    config, visible = resolved.config, visible_gpus(gpus)
    # What this machine lacks, then what the settings ask for in vain.
    on_verl = config.trainer.engine == "verl"
    return [
        *([] if on_verl else devices.missing_gpus(config, visible, environ)),
        *devices.unusable_gpus(config, visible, environ),
        *devices.missing_packages(config, visible),
        *refused_settings(resolved, visible),
    ]


def refused_settings(resolved: Resolved, gpus: int | None = None) -> list[str]:
    """Return a sentence for each setting that no machine can honour, or that has no effect."""
    visible = visible_gpus(gpus)
    # What no machine supports, then what has no effect in this run.
    return [*run.unsupported_settings(resolved.config), *find_unused(resolved, visible)[0]]


def remarks(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return remarks: what does not stop a run but may surprise."""
    visible = visible_gpus(gpus)
    config = resolved.config
    # In the order of the plan: settings, rewards, devices.
    return [
        *find_unused(resolved, visible)[1],
        *range_remarks(config, resolved.origins),
        *run.kl_remarks(config),
        *run.gspo_remarks(config),
        *rewards.judge_remarks(config),
        *judge_server_remarks(config),
        *rewards.mixture_remarks(config.reward),
        *devices.device_remarks(config, visible, environ),
    ]


def missing_inputs(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each missing input: models, prompts, keys, reward models."""
    # Models, then the judges' keys and SDKs, then what reward models and a judge's server need.
    problems = [
        *models.broken_models(config),
        *rewards.missing_keys(config, environ),
        *rewards.missing_for_sdks(config, environ),
        *models.missing_models(config, environ),
        *missing_for_judge_server(config, environ),
    ]
    # Prompts.
    if not config.data.train_files:
        problems.append(
            "There are no prompts to train on: name them with --train_files FILE. "
            f"`{ppo('data prepare gsm8k --source openai/gsm8k --out data/gsm8k')}` makes a set, "
            "and --preset embedded trains on the bundled one."
        )
    return problems
