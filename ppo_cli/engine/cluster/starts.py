"""What workers become. Models are imported where they live, not at the driver that says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppo_cli.config.schema import Config, Transfer
from ppo_cli.engine.cluster.plans import LearnerPlan

if TYPE_CHECKING:
    from ppo_cli.engine.cluster.roles import LearnerRole, SamplerRole


def start_learner(rank: int, plan: LearnerPlan) -> LearnerRole:
    """Become one rank of the learner."""
    from ppo_cli.engine.cluster.roles import LearnerRole

    return LearnerRole(rank, plan)


def start_sampler(
    number: int, config: Config, tokenizer: bytes, transfer: Transfer, profiles: Path
) -> SamplerRole:
    """Become a sampler."""
    from ppo_cli.engine.cluster.roles import SamplerRole

    return SamplerRole(number, config, tokenizer, transfer, profiles)
