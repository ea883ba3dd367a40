"""Audits of scripted rewards, and what their checks found."""

from __future__ import annotations

import json
from typing import Any

from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.extras.lab.audit.attacks import load_items
from ppo_cli.extras.lab.audit.audit import audit
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import Reward

Checks = dict[str, dict[str, Any]]


def run_audit(
    settings: RewardSettings, reward: Reward, *, rows: int = 6, data: str | None = None
) -> dict[str, Any]:
    """Audit a reward on bundled tasks or those of a file; the result is plain JSON."""
    items = load_items(settings, file=data, preset=None, max_rows=rows)
    result = audit(reward, settings, items, screen=Screen())
    json.dumps(result, allow_nan=False)
    return result


def by_name(result: dict[str, Any]) -> Checks:
    return {check["name"]: check for check in result["checks"]}


def failed(checks: Checks) -> set[str]:
    return {name for name, check in checks.items() if check["passed"] is False}
