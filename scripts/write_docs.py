"""Writes the pages that follow from the code: docs/settings.md and docs/moving.md.

python scripts/write_docs.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ppo_cli.cli.explain import build_schema
from ppo_cli.cli.foreign_flags import find_name, load_foreign_flags
from ppo_cli.config.mixture import MixPart
from ppo_cli.config.schema.keys import find_key
from ppo_cli.config.schema.run import Config
from ppo_cli.plugins import Names

DOCS = Path(__file__).parent.parent / "docs"
RELEASES = DOCS.parent / "tests" / "cli" / "foreign_releases.json"
INTRODUCTION = """# Settings

Every setting with its default, range, flag and environment variable. This page is written by
`python scripts/write_docs.py` from the schema. `ppo plan --all` shows the values that a command
would use and where each comes from. Which ones matter most:
[troubleshooting](troubleshooting.md#which-settings-matter).

A setting without a flag is given as `key=value` (`ppo train actor.clip_ratio_high=0.28`) or in a
YAML file (`--config FILE`). Flags may be spelled with underscores or dashes. verl's wrapper
`actor_rollout_ref.` is accepted before every key.

"Stays for" says what happens when a run is started again with another value. `start`: the run goes
on with the new value. `run`: a new run starts and says why; `--resume PATH` and `--fork` accept the
new value. `checkpoint`: a new run starts too, and no checkpoint is accepted under another value.
`eval`: the run goes on, but `ppo eval` scores its rows again.
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
    names = [rule.table for rule in field.metadata if isinstance(rule, Names)]
    if found := [*map(str, names[0])] if names else choices(field.annotation):
        return ", ".join(f"`{value}`" for value in dict.fromkeys(found))
    found = [
        (sign, getattr(one, n)) for n, sign in SIGNS for one in field.metadata if hasattr(one, n)
    ]
    return ", ".join(f"{sign} {limit:g}" for sign, limit in found)


def table(section: type[BaseModel], above: str) -> list[str]:
    """One row per setting."""
    lines = ["| key | default | values | flag, variable | stays for | meaning |"]
    lines.append("|---|---|---|---|---|---|")
    for key, field in rows(section, above):
        known = find_key(key)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        names = ", ".join(f"`{extra[n]}`" for n in ("flag", "env") if n in extra)
        meaning = (field.description or "").replace("|", "\\|")
        stays_for = known.identity if known else MixPart.identity
        cells = (f"`{key}`", default_of(field), values_of(field), names, stays_for, meaning)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def settings() -> str:
    """The reference of all settings, from the schema."""
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


TABLES = "## Flags that mean the same\n"


def moving() -> str:
    """The page as it is, with its tables of flags from the lists that the command line reads."""
    flags = load_foreign_flags()
    # Names that releases have for a flag of another name.
    names_of = {*flags["renamed"]}.union(*json.loads(RELEASES.read_text()).values())
    dotted = {find_name(n): f" or `--{n}`" for n in sorted(names_of) if find_name(n) != n}

    def names(flag: str) -> str:
        return f"`--{flag}`{dotted.get(flag, '')}"

    same = {
        flag: f"`{ours if ours.startswith('--') else ours + '=VALUE'}`"
        for flag, ours in flags["aliases"].items()
        if flag != ours  # a switch of our own
    }
    same |= {flag: f"`{ours}`" for flag, ours in flags["switches"].items()}
    same |= {
        flag: f"{' '.join(f'`{key}`' for key in keys.split())}, computed"
        for flag, keys in flags["computed"].items()
    }
    for name in ("several", "pairs"):
        same |= {
            flag: " ".join(f"`{key}=VALUE`" for key in keys.split())
            for flag, keys in flags[name].items()
        }
    values = [
        f"| {names(flag)} | `{value}` | {f'`{settings}`' if settings else 'the default'} |".replace(
            value, value.replace("|", "\\|")
        )
        for flag, meanings in sorted(flags["values"].items())
        for value, settings in meanings.items()
    ]
    ignored = [
        f"| {names(flag)} | {reason.format(ppo='ppo')} |"
        for flag, reason in sorted(flags["ignored"].items())
    ]
    other = [
        f"| {names(flag)} | {text.format(ppo='ppo')} |"
        for flag, text in sorted(flags["pointers"].items())
    ]
    defaults = [
        f"| {flags['defaults_of'][program]} | "
        + " ".join(f"`{name if '.' in name else f'--{name}'} {v}`" for name, v in rows.items())
        + " |"
        for program, rows in flags["defaults"].items()
    ]
    lines = [
        "These flags of TRL (PPO to 1.12, GRPO to 1.16), OpenRLHF (0.9 to 0.11) and Hugging Face's",
        "Trainer are accepted.",
        "",
        *("| flag | means |", "|---|---|"),
        *(f"| {names(flag)} | {ours} |" for flag, ours in sorted(same.items())),
        "",
        "Values that mean something else here, or several settings:",
        "",
        *("| flag | value | means |", "|---|---|---|", *values),
        "",
        "## What a line leaves out",
        "",
        "A line of TRL, known by its program or `--model_name_or_path`, or of OpenRLHF, known by",
        "its program or `--pretrain`, has these defaults of its program. One note lists them. The",
        "flags of the line win over them, a preset or a file does not.",
        "",
        *("| line of | leaves out |", "|---|---|", *defaults),
        "",
        "## Flags that are left out",
        "",
        "They change no result here. The plan and the run say which were left out, and why.",
        "",
        *("| flag | why |", "|---|---|", *ignored),
        "",
        "## Flags without an equivalent",
        "",
        "The command line refuses them with the advice on the right.",
        "",
        *("| flag | what to do |", "|---|---|", *other),
    ]
    above = (DOCS / "moving.md").read_text(encoding="utf-8").partition(TABLES)[0]
    return f"{above}{TABLES}\n" + "\n".join(lines) + "\n"


def schema() -> str:
    """The JSON schema that editors check files of settings with."""
    return json.dumps(build_schema(), indent=1) + "\n"


PAGES = {"settings.md": settings, "moving.md": moving, "../presets/schema.json": schema}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")
