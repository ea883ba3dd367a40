"""The resolved configuration as YAML that can be loaded again, each value with its origin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from ppo_cli.config.keys import value_of
from ppo_cli.config.resolve import Resolved
from ppo_cli.redact import mask_secrets, redact

HEAD = "# Resolved settings, each with where it came from. Use again: ppo train --config FILE\n"


def config_yaml(resolved: Resolved) -> str:
    """Return every setting as YAML with its origin as a comment, without secrets."""
    return HEAD + "\n".join(_lines(resolved)) + "\n"


def _lines(resolved: Resolved) -> Iterator[str]:
    open_groups: list[str] = []
    for key, origin in resolved.origins.items():
        *groups, leaf = key.split(".")
        shared = _shared(open_groups, groups)
        for depth in range(shared, len(groups)):
            yield f"{'  ' * depth}{groups[depth]}:"
        open_groups = groups
        value = _as_yaml(mask_secrets(value_of(resolved.config, key)))
        yield f"{'  ' * len(groups)}{leaf}: {value}  # {redact(origin)}"


def _shared(a: list[str], b: list[str]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def _as_yaml(value: Any) -> str:
    """Write a value on one line; texts are quoted so that none is taken for something else."""
    if isinstance(value, str):
        return _quoted(redact(value))
    if isinstance(value, tuple | list):
        return f"[{', '.join(_as_yaml(item) for item in value)}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{_quoted(k)}: {_as_yaml(v)}" for k, v in value.items())
        return f"{{{inside}}}"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9)
    return text.removesuffix("...\n").strip()


def _quoted(text: str) -> str:
    said: str = yaml.safe_dump(
        text, default_style='"', width=10**9, allow_unicode=True, line_break="\n"
    )
    return said.strip()
