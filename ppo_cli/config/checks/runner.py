"""Runs all checks of a configuration: what clashes, what is missing here, what deserves a remark.

Each check is a function next to the subject that it concerns (run, devices, models, rewards,
judge_server); settings without effect are declared with the settings (unused).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ppo_cli.config.checks.devices import (
    check_devices,
    device_remarks,
    missing_gpus,
    missing_packages,
    unusable_gpus,
)
from ppo_cli.config.checks.judge_server import judge_server_remarks, missing_for_judge_server
from ppo_cli.config.checks.models import (
    broken_models,
    check_heads,
    check_reward_models,
    missing_models,
)
from ppo_cli.config.checks.rewards import (
    check_judges,
    check_mixture,
    judge_remarks,
    missing_for_sdks,
    missing_keys,
    mixture_remarks,
)
from ppo_cli.config.checks.run import (
    check_batches,
    check_clip_ranges,
    check_dynamic_sampling,
    check_estimator,
    check_kl,
    check_losses,
    check_reward_sources,
    check_schedule,
    check_shaping,
    gspo_remarks,
    kl_remarks,
    range_remarks,
    unsupported_settings,
    verl_remarks,
)
from ppo_cli.config.checks.unused import find_unused
from ppo_cli.config.layers import Resolved
from ppo_cli.config.placement import gpu_count
from ppo_cli.config.schema.keys import Clash
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ppo


def missing_parts(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return a sentence for each requested thing that this machine or program does not have."""
    config, visible = resolved.config, gpu_count() if gpus is None else gpus
    # What this machine lacks, then what the settings ask for in vain.
    return [
        *(missing_gpus(config, visible, environ) if config.trainer.engine != "verl" else []),
        *unusable_gpus(config, visible, environ),
        *missing_packages(config, visible),
        *refused_settings(resolved, visible),
    ]


def refused_settings(resolved: Resolved, gpus: int | None = None) -> list[str]:
    """Return a sentence for each setting that no machine can honour, or that has no effect."""
    visible = gpu_count() if gpus is None else gpus
    # What no machine supports, then what has no effect in this run.
    return [*unsupported_settings(resolved.config), *find_unused(resolved, visible)[0]]


def remarks(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return remarks: what does not stop a run but may surprise."""
    visible = gpu_count() if gpus is None else gpus
    config = resolved.config
    # In the order of the plan: settings, rewards, devices.
    return [
        *find_unused(resolved, visible)[1],
        *range_remarks(resolved),
        *kl_remarks(config),
        *gspo_remarks(config),
        *(verl_remarks(resolved) if resolved.verl else ()),
        *judge_remarks(config),
        *judge_server_remarks(config),
        *mixture_remarks(config.reward),
        *device_remarks(config, visible, environ),
    ]


def missing_inputs(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each missing input: models, prompts, keys, reward models."""
    # Models, then the judges' keys and SDKs, then what reward models and a judge's server need.
    problems = [
        *broken_models(config),
        *missing_keys(config, environ),
        *missing_for_sdks(config, environ),
        *missing_models(config, environ),
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


def find_clashes(config: Config, environ: Mapping[str, str], *, verl: bool) -> list[Clash]:
    """Return every clash between settings; a line of verl may have some without effect."""
    # Settings of the run first, then devices, models and rewards.
    return [
        *check_batches(config),
        *check_estimator(config),
        *check_dynamic_sampling(config),
        *check_clip_ranges(config),
        *check_losses(config),
        *([] if verl else check_kl(config)),
        *check_devices(config, gpu_count(environ), environ),
        *check_heads(config),
        *check_schedule(config),
        *check_reward_sources(config),
        *check_shaping(config),
        *check_mixture(config),
        *check_judges(config),
        *check_reward_models(config, gpu_count(environ)),
    ]
