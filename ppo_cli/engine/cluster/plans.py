"""What a driver tells workers to become. Models are imported where they live, not at the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppo_cli.config.effective import Transfer
from ppo_cli.config.schema import Config
from ppo_cli.engine.cluster.failures import Member

if TYPE_CHECKING:
    from ppo_cli.engine.cluster.roles import LearnerRole, SamplerRole


@dataclass(frozen=True)
class LearnerPlan:
    """All that a rank must know before it meets the others."""

    config: Config
    tokenizer: bytes  # pickled
    total_steps: int
    size: int
    one_node: bool


@dataclass(frozen=True)
class ExchangePlan:
    """How weights travel, to whom, and from which address of the first rank."""

    transfer: Transfer
    samplers: tuple[Member, ...]
    workers_each: int
    address: str
    timeout_s: float


def start_learner(rank: int, plan: LearnerPlan) -> LearnerRole:
    """Become one rank of the learner."""
    from ppo_cli.engine.cluster.roles import LearnerRole

    return LearnerRole(rank, plan)


def start_sampler(config: Config, tokenizer: bytes, transfer: Transfer) -> SamplerRole:
    """Become a sampler."""
    from ppo_cli.engine.cluster.roles import SamplerRole

    return SamplerRole(config, tokenizer, transfer)
