"""What a check of several settings finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clash:
    """Settings that do not fit together, and what to do about it."""

    keys: tuple[str, ...]
    text: str
