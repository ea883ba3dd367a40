"""`ppo explain` describes settings, metrics and values; `ppo presets` lists or copies presets."""

from __future__ import annotations

import json
import shlex
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.cli.help import App
from ppo_cli.cli.screen import COLUMNS, align_columns, print_result
from ppo_cli.config.mixture import MixPart
from ppo_cli.config.models.bundled import ALIASES, bundled_path, preset_names, preset_path
from ppo_cli.config.schema.keys import (
    Key,
    describe_range,
    find_key,
    keys_of,
    offered_choices,
    suggest_key,
    table,
)
from ppo_cli.errors import ConfigError, did_you_mean, ppo
from ppo_cli.planning.findings.unused import describe_unused
from ppo_cli.plugins import import_name, load_all
from ppo_cli.report.catalogue import METRICS
from ppo_cli.report.limits import Limits

# Short metric names on the line of a step. For a flag of the same name users type the dashes.
STEP_LINE_METRICS = {word: key for key, word in COLUMNS.items()} | {"val": "val/accuracy"}
# Key of a fact -> its heading in the text.
HEADINGS = {
    "key": "setting", "metric": "metric", "word": "word", "is": "is", "advice": "what to change",
    "value_of": "value of", "type": "type", "range": "range", "usual": "usual",
    "default": "default", "flag": "flag", "variable": "variable", "stays_for": "stays for",
    "healthy": "healthy", "otherwise": "what to change", "plot": "plot",
    "no_effect": "no effect if", "related": "same group", "settings": "settings of it",
    "foreign": "of others",
}  # fmt: skip
TEXT_WIDTH = 72  # of the column of facts
LIST_WIDTH = 96  # of the list of settings
INDENTED: dict[str, Any] = {
    "initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False,
}  # fmt: skip
# What a run does if it is started again with another value of a setting.
STAYS_FOR = {
    "start": "start: the run goes on with another value",
    "run": "run: another value begins a new run, but --resume PATH and --fork accept it",
    "checkpoint": "checkpoint: another value begins a new run, and no checkpoint accepts it",
    "eval": "eval: the run goes on, and ppo eval scores its rows again",
}
# The settings of each part of a mixture, by the name of the part.
MIXTURE_PARTS = "reward.composite.parts.NAME"
# Names that people use -> the name of the value or metric.
SYNONYMS = {
    "ppo": "vanilla", "reinforce": "reinforce_plus_plus", "gmpo": "geo_mean",
    "failures": "score/failed_share", "failed": "score/failed_share",
}  # fmt: skip


def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A setting, flag or variable, a group (critic), a metric, or a value: grpo.",
            show_default=False,
        ),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="List every setting.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain a setting, a metric or a value: what it does, its range, and what to change."""
    if not (name or every):
        raise ConfigError(f"Name what to explain; `{ppo('explain')} --all` lists every setting.")
    our_name, foreign = explain_foreign(name)
    synonym = SYNONYMS.get(name.lstrip("-").lower(), our_name or name)
    meant = STEP_LINE_METRICS.get(name, synonym)
    facts = find_setting_facts(meant) or find_metric_facts(meant) or find_word_facts(meant.lower())
    group = find_group(name)
    if every or (group and not facts):
        settings = {key: find_setting_facts(key) for key in group}
        print_result(settings, lambda: format_settings(settings), as_json=as_json)
        return
    if group:  # a metric, a word or a setting that has the name of a group
        facts["settings"] = f"{ppo('explain')} {name}."
    if foreign and not (facts and meant != name):
        facts = (facts or {"word": name}) | {"foreign": foreign}
    if not facts:
        names = [*(k.flag for k in table().values() if k.flag), *(m.key for m in METRICS)]
        words = {word for key in table().values() for word in key.choices}
        near = suggest_key(name) or did_you_mean(name, [*table(), *names, *words])
        raise ConfigError(f"There is no setting, metric or value '{name}'.{near}")
    print_result(facts, lambda: format_facts(facts), as_json=as_json)


def explain_foreign(name: str) -> tuple[str, list[str]]:
    """Return our name for that of another program, and lines that say what it means here."""
    for reader in load_all("readers")[0]:
        if reader.explain and any(answer := import_name(reader.explain)(name)):
            our_name, lines = answer
            return our_name, lines
    return "", []


@cache
def list_settings() -> dict[str, Key]:
    """Return every setting by dotted name, also those of a part of a mixture."""
    parts = {f"{MIXTURE_PARTS}.{name}": key for name, key in keys_of(MixPart).items()}
    del parts[f"{MIXTURE_PARTS}.name"]
    return table() | {name: replace(key, name=name) for name, key in parts.items()}


def find_group(name: str) -> list[str]:
    """Return the settings of a group, such as `critic` or `reward.api`; "" has them all."""
    start = f"{name.rstrip('.')}." if name else ""
    return [key for key in list_settings() if key.startswith(start)]


# Python type of a setting -> description.
KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def describe_type(key: Key) -> str:
    """Return the type of a setting as text, such as `list: number, or unset`."""
    if get_origin(key.kind) is dict:
        return "group of values by name"
    if get_origin(key.kind) is tuple and not key.is_list:
        return "pair of numbers"
    kind = get_args(key.kind)[0] if key.is_list else key.kind
    word = "word" if key.choices else KINDS.get(kind, "text")
    return f"{'list: ' if key.is_list else ''}{word}{', or unset' if key.optional else ''}"


def find_setting_facts(name: str) -> dict[str, Any]:
    """Return a setting's facts by its key, the end of its key, flag or variable; {} if unknown.

    The end of several keys finds none of them. Facts without a value are left out.
    """
    spelt = "--" + name.removeprefix("--").replace("-", "_")
    settings = list_settings()
    key = next((k for k in settings.values() if name == k.env or spelt == k.flag), None)
    key = key or settings.get(name) or (None if find_group(name) else find_key(name))
    # `clip_ratio` means actor.clip_ratio, unless several keys end with the name.
    ending = [k for k in table().values() if k.name.endswith(f".{name}")]
    key = ending[0] if key is None and len(ending) == 1 else key
    if key is None:
        return {}
    usual = f"{key.usual[0]:g} to {key.usual[1]:g}" if key.usual else ""
    group = key.name.rpartition(".")[0]
    facts = {
        "key": key.name,
        "is": key.help,
        "advice": key.advice,
        "type": describe_type(key),
        "range": describe_range(key),
        "usual": usual,
        "default": "unset" if key.default in (None, (), "") else key.default,
        "flag": key.flag,
        "variable": key.env,
        "stays_for": key.identity,
        "no_effect": list(describe_unused(key.name)) if key.name in table() else [],
        "related": [k for k in table() if k.rpartition(".")[0] == group and k != key.name],
    }  # fmt: skip
    return {what: fact for what, fact in facts.items() if fact not in (None, "", [])}


def find_metric_facts(name: str) -> dict[str, Any]:
    """Return a metric's facts, also for its validation name `val/...`; {} if it is unknown."""
    for key in (name, name.removeprefix("val/")):
        words = key.replace("_", " ").lower()
        if metric := next((m for m in METRICS if m.matches(key) or m.plot.lower() == words), None):
            # Ranges of the default settings: no run is given here.
            limits = Limits()
            low, high = metric.band(limits, ()) if metric.band else (None, None)
            bounds = [(low, "at least"), (high, "at most")]
            facts = {
                "metric": key if metric.matches(key) else metric.key,
                "is": metric.what,
                "plot": metric.plot,
                "healthy": ", ".join(f"{word} {b:g}" for b, word in bounds if b is not None),
                "otherwise": metric.change.format(kl_setting=limits.kl_setting),
            }
            return {what: fact for what, fact in facts.items() if fact}
    return {}


def find_word_facts(word: str) -> dict[str, Any]:
    """Return the facts of a value of settings with a fixed choice; {} if none has it."""
    settings = [key for key in table().values() if word in offered_choices(key.choices)]
    if not settings:
        return {}
    kinds = [kinds[word] for kinds in (ESTIMATORS, POLICY_LOSSES) if word in kinds]
    uses = [
        f"{key.name}: {key.help} ({f'{key.flag} ' if key.flag else f'{key.name}='}{word})"
        for key in settings
    ]
    advice = [key.advice for key in settings if key.advice]
    facts = {"word": word, "is": [k.summary for k in kinds], "advice": advice, "value_of": uses}
    return {what: fact for what, fact in facts.items() if fact}


def format_facts(facts: dict[str, Any]) -> str:
    """Return facts as aligned lines of heading and value, with long values wrapped."""
    rows: list[tuple[str, str]] = []
    for what, fact in facts.items():
        entries = fact if isinstance(fact, list) else [fact]
        if what == "stays_for":
            entries = [STAYS_FOR[fact]]
        elif what == "default":
            entries = [format_default(fact)]
        elif what == "related":  # names within their group
            entries = [", ".join(name.rpartition(".")[2] for name in entries)]
        lines = [part for entry in entries for part in textwrap.wrap(str(entry), TEXT_WIDTH)]
        rows += [(HEADINGS[what] if not i else "", line) for i, line in enumerate(lines)]
    return "\n".join(align_columns(rows))


def format_default(value: Any) -> str:
    """Return a default as YAML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def format_settings(settings: dict[str, dict[str, Any]]) -> str:
    """Return each setting with its help, and a line of default, range, flag and variable."""
    lines = [f"stays for  {meaning}" for meaning in STAYS_FOR.values()]
    for key, facts in settings.items():
        names = [facts[what] for what in ("flag", "variable") if what in facts]
        parts = [
            f"default {format_default(facts['default'])}", facts.get("range", facts["type"]),
            ", ".join(names), f"stays for {facts['stays_for']}",
        ]  # fmt: skip
        lines += ["", key, *textwrap.wrap(facts.get("is", ""), LIST_WIDTH, **INDENTED)]
        lines += textwrap.wrap("; ".join(filter(None, parts)), LIST_WIDTH, **INDENTED)
    return "\n".join(lines)


explain_app = App()
explain_app.command(
    epilog="ppo explain --lr\nppo explain critic\nppo explain kl_divergence\nppo explain grpo",
    context_settings={"ignore_unknown_options": True},  # `ppo explain --lr` asks about a flag
)(explain)


presets_app = App(
    help="List the presets, show one, or copy one to edit.",
    epilog="ppo presets show gsm8k",
)


@presets_app.command("list", epilog="ppo presets list")
def list_presets(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the presets with the purpose of each."""
    comments = {name: _read_first_comment(name) for name in preset_names()}
    rows = []
    for name, comment in comments.items():
        short = [alias for alias, full in ALIASES.items() if full == name]
        rows.append((name, comment + (f" (also: {', '.join(short)})" if short else "")))
    print_result(comments, lambda: "\n".join(align_columns(rows)), as_json=as_json)


@presets_app.command(epilog="ppo presets show embedded > mine.yaml")
def show(name: str = typer.Argument(help="Name of a preset.")) -> None:
    """Print the file of a preset with its comments."""
    print(preset_path(name).read_text(encoding="utf-8"), end="")


@presets_app.command(epilog="ppo presets copy embedded mine.yaml")
def copy(
    name: Annotated[str, typer.Argument(help="Name of a preset.")],
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Copy a preset with its comments to a file, to edit and use with --config."""
    text = preset_path(name).read_text(encoding="utf-8")
    # The schema is next to the presets, not next to the copy.
    text = text.replace(SCHEMA_LINE, f"{SCHEMA_MARK}{bundled_path('presets', 'schema.json')}", 1)
    try:
        # "x" fails if the file exists.
        with file.open("x", encoding="utf-8") as fresh:
            fresh.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already; name another file.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}.") from error
    line = ppo(shlex.join(["train", "--config", str(file)]))
    print(json.dumps({"preset": name, "file": str(file)}) if as_json else f"Use it: {line}")


@presets_app.command(epilog="ppo presets schema > schema.json")
def schema() -> None:
    """Print the JSON schema of a file of settings, for editors that complete and check YAML.

    A file names it in its first line: # yaml-language-server: $schema=schema.json
    """
    print(json.dumps(build_schema(), indent=1))


# The comment by which editors find the schema of a YAML file.
SCHEMA_MARK = "# yaml-language-server: $schema="
SCHEMA_LINE = f"{SCHEMA_MARK}schema.json"


def build_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a file of settings."""
    from ppo_cli.config.schema.run import Config

    built: dict[str, Any] = Config.model_json_schema()
    # A setting with a rule may be null in a file: it is unset there, and the rule decides it.
    for section in built["$defs"].values():
        for field in section.get("properties", {}).values():
            null, kinds = {"type": "null"}, field.get("anyOf")
            if field.get("default", 0) is not None or (kinds and null in kinds):
                continue
            if kinds:
                kinds.append(null)
            else:
                field["type"] = [field["type"], "null"]
                if "enum" in field:
                    field["enum"].append(None)
    # Names at the top of a file that are not ours, but are read.
    for reader in load_all("readers")[0]:
        built["properties"] |= {n: {"description": text} for n, text in reader.sections.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | built


def _read_first_comment(name: str) -> str:
    """Return the first comment of a preset's file, which says what the preset is for."""
    text = preset_path(name).read_text(encoding="utf-8").removeprefix(f"{SCHEMA_LINE}\n")
    return text.partition("\n")[0].removeprefix("#").strip()
