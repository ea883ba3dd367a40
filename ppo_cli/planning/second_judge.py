"""The default second judge, which scores a share of the responses and rewards none of them.

See rewards/judge/monitor.py. Only commands that train or plan a training add one, so that resolving
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_cli.config.layers import DEFAULT, read_yaml
from ppo_cli.config.mixture import judges_of
from ppo_cli.config.models.known_models import JUDGES, effective_provider
from ppo_cli.config.schema.keys import table
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import ConfigError
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.run_plan import RunPlan

# Providers that need no more than a key, in the order of judges.toml.
_PUBLIC = [name for name, api in JUDGES.items() if api.keys and api.url and not api.platform]
# The section of the second judge.
_MONITOR = "reward.api.monitor"


def add_second_judge(resolved: Resolved, environ: Mapping[str, str]) -> Resolved:
    """Return the settings with a second judge when none was chosen and the key of one is set.

    With a budget there is none: a judge that nobody chose must not spend it. All judges of the run
    must be at public addresses: responses that go to a private server may not go to others.
    """
    # Only next to judges that are all at public addresses.
    judges = [judge.settings for judge in judges_of(resolved.config.reward)]
    monitor_origins = (
        resolved.origins[f"{_MONITOR}.{name}"] for name in ("model", "base_url", "key_env")
    )
    if resolved.foreign or not judges or any(origin != DEFAULT for origin in monitor_origins):
        return resolved
    if any(api.monitor.model or not _is_public(api.type, api, environ) for api in judges):
        return resolved
    # A chosen provider limits the candidates; else all public ones that do not judge already.
    named = resolved.origins[f"{_MONITOR}.type"] != DEFAULT
    candidates = (resolved.config.reward.api.monitor.type,) if named else _PUBLIC
    used_types = {api.type for api in judges}
    used_keys = {api.key_env for api in judges}  # variables with the judges' own keys
    available = [
        (kind, key)
        for kind in candidates
        if kind not in used_types and _is_public(kind, None, environ)
        for key in JUDGES[kind].keys
        if key not in used_keys and environ.get(key, "").strip()
    ]
    if not available:
        # The first candidate in the order of _PUBLIC whose key is set.
        return resolved
    kind, key = available[0]
    model, share = JUDGES[kind].example, judges[0].monitor.share
    # A budget is for the judges that were chosen.
    if any(api.has_budget for api in judges):
        note = (
            f"{key} is set, but there is a budget, so no second judge is added by itself: "
            f"--rm_monitor_type {kind} --rm_monitor_model {model} names one."
        )
        return replace(resolved, notes=(*resolved.notes, note))
    note = (
        f"{key} is set, so {share:.0%} of the responses are also sent to {kind} ({model}), a "
        "second judge that rewards nothing (judge/drift); --rm_monitor_model none switches it off."
    )
    values: dict[str, Any] = {"type": kind, "model": model}
    # A run does not stop because of a judge that nobody chose.
    if resolved.origins[f"{_MONITOR}.required"] == DEFAULT:
        values["required"] = False
    changed = resolved.amend(
        {f"{_MONITOR}.{k}": v for k, v in values.items()}, f"default: {key} is set"
    )
    return replace(changed, notes=(*changed.notes, note))


def restore_second_judge(plan: RunPlan, checkpoint: Path, tell: Callable[[str], None]) -> RunPlan:
    """Return the plan with the second judge, or none, with which the checkpoint's run began.

    Drift is measured against one judge, and a run that sends its responses to one provider must not
    start to send them to another. A second judge that was chosen stays.
    """
    monitor = plan.settings.reward.api.monitor
    if monitor.model is None or monitor.required:
        return plan
    # What the run wrote when it began.
    file = checkpoint.parents[1] / "config.yaml"
    try:
        then = {e.name: e.raw for e in read_yaml(file, file.name)}
    except ConfigError:  # not of a run that this program has written
        return plan
    names = ("type", "model", "required")
    # No second judge, unless the run had one by default.
    values: dict[str, Any] = {name: table()[f"{_MONITOR}.{name}"].default for name in names}
    if then.get(f"{_MONITOR}.required") == "false":
        values = {name: str(then[f"{_MONITOR}.{name}"]) for name in ("type", "model")}
    changed = plan.amend({f"{_MONITOR}.{k}": v for k, v in values.items()}, "as the run began")
    # Say something only if the second judge changes.
    now = changed.settings.reward.api.monitor
    if now == monitor:
        return plan
    tell(
        f"This run began with {now.model or 'no model'} as its second judge and continues with it."
    )
    return changed


def _is_public(kind: str, api: ApiReward | None, environ: Mapping[str, str]) -> bool:
    """Return whether a judge is at the public address of its provider."""
    # Variables that change a provider's address make it as private as a base_url does.
    moved = any(environ.get(name, "").strip() for name in JUDGES[kind].url_variables)
    own_address = api is not None and api.base_url is not None
    return (
        kind in _PUBLIC
        and effective_provider(kind, environ) == kind
        and not moved
        and not own_address
    )
