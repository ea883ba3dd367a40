"""Writes resolved settings as YAML that can be loaded again, each with its origin."""

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
    opened: set[str] = set()
    for key, origin in resolved.origins.items():
        *groups, leaf = key.split(".")
        for depth, group in enumerate(groups):
            if (name := ".".join(groups[: depth + 1])) not in opened:
                opened.add(name)
                yield f"{'  ' * depth}{group}:"
        value = _as_yaml(mask_secrets(value_of(resolved.config, key)))
        yield f"{'  ' * len(groups)}{leaf}: {value}  # {redact(origin)}"


class _OnOneLine(yaml.SafeDumper):
    """Writes texts in quotes, so that none is taken for something else."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')


_OnOneLine.add_representer(str, _OnOneLine.represent_str)


def _as_yaml(value: Any) -> str:
    text: str = yaml.dump(
        value, Dumper=_OnOneLine, default_flow_style=True, width=10**9, allow_unicode=True,
        line_break="\n", sort_keys=False,
    )  # fmt: skip
    return text.removesuffix("...\n").strip()
