"""A second judge by default, where the key of another public provider is at hand.

It reads a share of the responses and rewards none (rewards/judge/monitor.py). Only commands that
train or plan a training ask for one: this is no part of resolving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppo_cli.config.keys import table
from ppo_cli.config.known_models import JUDGES, asked_at
from ppo_cli.config.layers import read_yaml
from ppo_cli.config.mixture import judges_of
from ppo_cli.config.resolve import DEFAULT, Resolved
from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.errors import ConfigError

# Providers that need no more than a key.
_PUBLIC = ("claude", "openai", "gemini", "dashscope")
_GROUP = "reward.api.monitor"


def with_second_judge(resolved: Resolved, environ: Mapping[str, str]) -> Resolved:
    """Return the settings with a second judge, where none was asked for and one can be had.

    None where a budget is set: what nobody asked for must not use it up. All judges of the run
    must be at public addresses: what is judged at an own server may not be meant for others.
    """
    judges = [judge.settings for judge in judges_of(resolved.config.reward)]
    asked = (resolved.origins[f"{_GROUP}.{name}"] for name in ("model", "base_url", "key_env"))
    if resolved.verl or not judges or any(origin != DEFAULT for origin in asked):
        return resolved
    if any(api.monitor.model or not _is_public(api.type, api, environ) for api in judges):
        return resolved
    named = resolved.origins[f"{_GROUP}.type"] != DEFAULT
    wanted = (resolved.config.reward.api.monitor.type,) if named else _PUBLIC
    taken = {api.type for api in judges}
    own = {api.key_env for api in judges}  # of the first judge, whatever the variable's name says
    there = [
        (kind, key)
        for kind in wanted
        if kind not in taken and _is_public(kind, None, environ)
        for key in JUDGES[kind].keys
        if key not in own and environ.get(key, "").strip()
    ]
    if not there:
        return resolved
    kind, key = there[0]
    model, share = JUDGES[kind].example, judges[0].monitor.share
    if any(api.counts_dollars or api.budget_tokens is not None for api in judges):
        note = (
            f"{key} is set, but there is a budget, so no second judge reads along unasked: "
            f"--rm_monitor_type {kind} --rm_monitor_model {model} names one."
        )
        return replace(resolved, notes=(*resolved.notes, note))
    note = (
        f"{key} is set, so {share:.0%} of the responses are also sent to {kind} ({model}), a "
        "second judge that rewards nothing (judge/drift); --rm_monitor_model none switches it off."
    )
    values: dict[str, Any] = {"type": kind, "model": model}
    if resolved.origins[f"{_GROUP}.required"] == DEFAULT:
        values["required"] = False
    found = _laid(resolved, values, f"default: {key} is set")
    return replace(found, notes=(*found.notes, note))


def as_begun(resolved: Resolved, checkpoint: Path | None, tell: Callable[[str], None]) -> Resolved:
    """Return the settings with the second judge, or none, that the run of a checkpoint began with.

    A drift is measured against one and the same judge, and a run that has sent its responses to
    one provider does not begin to send them to another. What was asked for stays.
    """
    monitor = resolved.config.reward.api.monitor
    if checkpoint is None or monitor.model is None or monitor.required:
        return resolved
    file = checkpoint.parents[1] / "config.yaml"
    try:
        then = {e.name: e.raw for e in read_yaml(file, file.name)}
    except ConfigError:  # not of a run that this program has written
        return resolved
    names = ("type", "model", "required")
    values: dict[str, Any] = {name: table()[f"{_GROUP}.{name}"].default for name in names}
    if then.get(f"{_GROUP}.required") == "false":
        values = {name: str(then[f"{_GROUP}.{name}"]) for name in ("type", "model")}
    found = _laid(resolved, values, "as the run began")
    now = found.config.reward.api.monitor
    if now == monitor:
        return resolved
    tell(f"This run began with {now.model or 'no model'} as its second judge, and goes on so.")
    return found


def _is_public(kind: str, api: ApiReward | None, environ: Mapping[str, str]) -> bool:
    """Whether a judge is asked at the public address of its provider."""
    moved = any(environ.get(name, "").strip() for name in JUDGES[kind].url_variables)
    own = api is not None and api.base_url is not None
    return kind in _PUBLIC and asked_at(kind, environ) == kind and not moved and not own


def _laid(resolved: Resolved, values: Mapping[str, Any], origin: str) -> Resolved:
    """Return the settings with these values of the second judge."""
    reward = resolved.config.reward
    monitor = reward.api.monitor.model_copy(update=dict(values))
    api = reward.api.model_copy(update={"monitor": monitor})
    config = resolved.config.model_copy(update={"reward": reward.model_copy(update={"api": api})})
    origins = resolved.origins | {f"{_GROUP}.{name}": origin for name in values}
    return replace(resolved, config=config, origins=origins)
