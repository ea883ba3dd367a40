"""The plan of a run as text, for people."""

from __future__ import annotations

from collections.abc import Collection

from ppo_cli.config.layers import DEFAULT, INHERITED, is_chosen
from ppo_cli.planning.placement import PlanPart
from ppo_cli.planning.run_plan import RunPlan


def format_plan(
    plan: RunPlan,
    judge: PlanPart,
    *,
    every: bool = False,
    debug: bool = False,
    left_out: Collection[str] = (),
) -> list[str]:
    """Return the plan as text, with the forecast of the judges.

    Without `every`, settings at their default are only counted; without `debug` there are no
    details. `left_out` are sentences that the caller prints elsewhere.
    """
    # Settings that somebody has set come first.
    shown = sorted(
        (key for key, (_, origin) in plan.values.items() if every or is_chosen(origin)),
        key=lambda key: (not is_chosen(plan.values[key][1]), plan.values[key][1] == DEFAULT),
    )
    rows = []
    for key in shown:
        value, origin = plan.values[key]
        # The reason of a rule that decided it.
        why = f": {plan.why[key]}" if origin == DEFAULT and key in plan.why else ""
        rows.append((key, _format_value(value), origin + why))
    lines = ["Settings", *_format_settings(rows)]
    if hidden := len(plan.values) - len(rows):
        fork = any(origin == INHERITED for _, origin in plan.values.values())
        of_run = " or as in the forked run" if fork else ""
        lines.append(f"  and {hidden} at their default{of_run} (--all shows them)")
    parts = {
        "Arithmetic": plan.sentences,
        "Devices": plan.devices.sentences,
        "Memory": plan.memory.sentences,
        "Details": plan.memory.details if debug else (),
        "Disk": plan.disk.sentences,
        "Reward": plan.reward.sentences,
        "Judge": judge.sentences,
        "Notes": plan.notes,
    }
    # Sections without sentences are left out.
    for title, sentences in parts.items():
        block = [f"  {s}" for s in sentences if s not in left_out]
        lines += ["", title, *block] if block else []
    return lines


def _format_settings(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return aligned lines of key, value and origin; long values do not widen their column."""
    if not rows:
        return []
    first = max(len(row[0]) for row in rows)
    second = min(40, max(len(row[1]) for row in rows))
    return [f"  {key:<{first}}  {value:<{second}}  {origin}" for key, value, origin in rows]


def _format_value(value: object) -> str:
    """Return a setting's value as the plan shows it."""
    if value is None:
        return "unset"
    if isinstance(value, list):
        return ", ".join(_format_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_format_value(item)}' for key, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
