"""What a driver tells ranks and samplers before they begin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppo_cli.config.schema import Config, Transfer
from ppo_cli.engine.cluster.failures import Member


@dataclass(frozen=True)
class LearnerPlan:
    """All that a rank must know before it meets the others."""

    config: Config
    tokenizer: bytes  # pickled
    total_steps: int
    size: int
    one_node: bool
    profiles: Path  # where profiles of steps go


@dataclass(frozen=True)
class Halved:
    """A sampler, by number, ran out of memory: how many responses it samples at once now."""

    sampler: int
    rows: int


@dataclass(frozen=True)
class ExchangePlan:
    """How weights travel, to whom, and from which address of the first rank."""

    transfer: Transfer
    samplers: tuple[Member, ...]
    workers_each: int
    address: str
    timeout_s: float
