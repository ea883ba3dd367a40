"""`config.yaml` of a run: what was set, with its origin, and behind it what holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.planning.resolved import Resolved
from ppo_cli.secrets.redact import mask_secrets, redact

HOLDS = "; holds: "  # in a comment, between an origin and what the run has decided
YAML_HEADER = (
    "# Resolved settings, each with where it came from. Use again: ppo train --config FILE\n"
)


def config_yaml(resolved: Resolved, settings: Config, why: Mapping[str, str]) -> str:
    """Return every setting as YAML with its origin as a comment, without secrets."""
    lines: list[str] = []
    opened: set[str] = set()
    for key, origin in resolved.origins.items():
        *groups, leaf = key.split(".")
        # Open each group once, in the order of the schema.
        for depth, group in enumerate(groups):
            if (name := ".".join(groups[: depth + 1])) not in opened:
                opened.add(name)
                lines.append(f"{'  ' * depth}{group}:")
        value = as_yaml(mask_secrets(value_of(resolved.requested, key)))
        decision = ""
        if key in why:
            decision = f"{HOLDS}{as_yaml(value_of(settings, key))} ({why[key]})"
        lines.append(f"{'  ' * len(groups)}{leaf}: {value}  # {redact(origin + decision)}")
    return YAML_HEADER + "\n".join(lines) + "\n"


class _OnOneLine(yaml.SafeDumper):
    """Writes texts in quotes, so that YAML reads none as another type."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')


_OnOneLine.add_representer(str, _OnOneLine.represent_str)


def as_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    # Flow style on one line: a comment with the origin follows it.
    text: str = yaml.dump(
        value, Dumper=_OnOneLine, default_flow_style=True, width=10**9, allow_unicode=True,
        line_break="\n", sort_keys=False,
    )  # fmt: skip
    return text.removesuffix("...\n").strip()
