"""Settings in which nothing is unset, as engines and pages get them, and machines for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ppo_cli.config.schema.environment import Environment
from ppo_cli.config.schema.reward import ApiReward, ModelReward
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.machine.device_record import Feature
from ppo_cli.machine.gpus import Gpu
from ppo_cli.machine.machine import PACKAGES, Machine
from ppo_cli.planning import config_file
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.planning.resolved import Resolved

GIB = 1 << 30
CPU = Machine(packages=frozenset(PACKAGES), cores=4, host_bytes=64 * GIB)


def with_gpus(
    gpus: int, size: int = 80 * GIB, *, proven: Collection[Feature] = (),
    packages: Collection[str] = PACKAGES, host_bytes: int | None = 2000 * GIB,
) -> Machine:  # fmt: skip
    """A machine with this many equal GPUs of `size` bytes."""
    card = Gpu("NVIDIA H100 80GB HBM3", "GPU-h1000", size, (9, 0))
    return Machine(
        gpus=(card,) * gpus, proven=frozenset(proven), packages=frozenset(packages), cores=4,
        host_bytes=host_bytes,
    )  # fmt: skip


def complete(settings: Config | Mapping[str, Any], machine: Machine = CPU) -> Config:
    """These settings with all others decided for a machine."""
    return fit_memory(settle(Config.model_validate(settings), machine)).config


def resolved(settings: Config, machine: Machine = CPU) -> Resolved:
    """These settings as a command resolves them on a machine."""
    return Resolved(settings, complete(settings, machine), {}, machine, {})


def config_yaml(resolved: Resolved) -> str:
    """The config.yaml that a run with these settings writes."""
    fitted = fit_memory(resolved)
    return config_file.config_yaml(resolved, fitted.config, fitted.why)


def complete_judge(**settings: Any) -> ApiReward:
    """These settings of a judge with all others decided."""
    return settle(Config.model_validate({"reward": {"api": settings}}), CPU).config.reward.api


def complete_reward_model(**settings: Any) -> ModelReward:
    """These settings of a reward model with all others decided."""
    return settle(Config.model_validate({"reward": {"model": settings}}), CPU).config.reward.model


def complete_environment(**settings: Any) -> Environment:
    """These settings of an environment with all others decided."""
    return settle(Config.model_validate({"environment": settings}), CPU).config.environment
