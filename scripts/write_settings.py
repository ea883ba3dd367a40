"""Writes docs/settings.md, the reference of all settings, from the schema.

python scripts/write_settings.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ppo_cli.config.mixture import MixPart
from ppo_cli.config.schema import Config

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
INTRODUCTION = """# Settings

Every setting with its default, range, flag and environment variable. This page is written by
`python scripts/write_settings.py` from the schema. `ppo plan` shows the values that a command
would use and where each comes from. Which ones matter most:
[troubleshooting](troubleshooting.md#which-settings-matter).

A setting without a flag is given as `key=value` (`ppo train actor.clip_ratio_high=0.28`) or in a
YAML file (`--config FILE`). Flags may be spelled with underscores or dashes. verl's wrapper
`actor_rollout_ref.` is accepted before every key.
"""
SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def rows(section: type[BaseModel], above: str) -> Iterator[tuple[str, FieldInfo]]:
    """Key and field of every setting of a section and of the sections below it."""
    for name, field in section.model_fields.items():
        inner = field.default_factory
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from rows(inner, f"{above}{name}.")
        else:
            yield above + name, field


def default_of(field: FieldInfo) -> str:
    """The default as it is written in YAML; empty where there is none."""
    value: Any = field.get_default(call_default_factory=True)
    if value is None or field.is_required():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value != "" else ""


def choices(kind: Any) -> list[str]:
    """The values of a Literal, also within a union or a tuple."""
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return [value for inner in get_args(kind) for value in choices(inner)]


def values_of(field: FieldInfo) -> str:
    """What the setting may be: choices or limits."""
    if found := choices(field.annotation):
        return ", ".join(f"`{value}`" for value in dict.fromkeys(found))
    found = [
        (sign, getattr(one, n)) for n, sign in SIGNS for one in field.metadata if hasattr(one, n)
    ]
    return ", ".join(f"{sign} {limit:g}" for sign, limit in found)


def table(section: type[BaseModel], above: str) -> list[str]:
    """One row per setting."""
    lines = ["| key | default | values | flag, variable | meaning |", "|---|---|---|---|---|"]
    for key, field in rows(section, above):
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        names = ", ".join(f"`{extra[n]}`" for n in ("flag", "env") if n in extra)
        meaning = (field.description or "").replace("|", "\\|")
        cells = (f"`{key}`", default_of(field), values_of(field), names, meaning)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for name, field in Config.model_fields.items():
        section = field.default_factory
        assert isinstance(section, type) and issubclass(section, BaseModel)
        lines += [f"## {name}", "", field.description or "", "", *table(section, f"{name}."), ""]
    lines += [
        "## Parts of a mixture",
        "",
        "Under `reward.composite.parts.NAME` or `composite_reward.parts.NAME` in a reward file;",
        "see [rewards](rewards.md#mixtures).",
        "",
        *table(MixPart, ""),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
