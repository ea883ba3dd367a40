"""What a check of several settings finds: a clash, or a setting that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppo_cli.config.schema import Config


@dataclass(frozen=True)
class Clash:
    """Settings that do not fit together, and what to do about it."""

    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Idle:
    """When a setting changes nothing; `absent` means that its part is not there.

    A setting of memory or speed (`tuning`) is only remarked on: results are what was asked for.
    """

    when: Callable[[Config], bool]
    text: str
    absent: bool = False
    tuning: bool = False
