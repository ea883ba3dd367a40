"""`ppo explain NAME`: what a setting or a metric is, its range, and what to change."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

import typer

from ppo_cli.cli.foreign_flags import listed
from ppo_cli.cli.screen import COLUMNS, aligned, print_result
from ppo_cli.config.keys import Key, find, range_words, suggest, table
from ppo_cli.config.requirements import effects_of
from ppo_cli.errors import ConfigError, did_you_mean
from ppo_cli.report.catalogue import METRICS
from ppo_cli.report.health import Limits

# The words on a line of a step; a flag of the same name is asked for with its dashes.
ON_A_LINE = {word: key for key, word in COLUMNS.items()} | {"val": "val/accuracy"}
HEADINGS = {
    "key": "setting", "metric": "metric", "is": "is", "type": "type", "range": "range",
    "usual": "usual", "default": "default", "flag": "flag", "variable": "variable",
    "healthy": "healthy", "otherwise": "otherwise", "plot": "plot", "no_effect": "no effect if",
    "beside": "beside it",
}  # fmt: skip


def explain(
    name: Annotated[
        str, typer.Argument(metavar="KEY|FLAG|METRIC", help="A setting, its flag, or a metric.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a setting or a metric is: its range, what it goes with, what to change."""
    meant = ON_A_LINE.get(name) or listed()["aliases"].get(name.lstrip("-"), name)
    found = setting_facts(meant) or metric_facts(meant)
    if not found:
        known = [*(k.flag for k in table().values() if k.flag), *(m.key for m in METRICS)]
        near = suggest(name) or did_you_mean(name, [*table(), *known])
        raise ConfigError(f"There is no setting and no metric '{name}'.{near}")
    print_result(found, lambda: explained(found), as_json=as_json)


KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def type_words(key: Key) -> str:
    """What kind of value a setting takes, in words."""
    if get_origin(key.kind) is dict:
        return "group of values by name"
    kind = get_args(key.kind)[0] if key.is_list else key.kind
    word = "word" if key.choices else KINDS.get(kind, "text")
    return f"{'list: ' if key.is_list else ''}{word}{', or unset' if key.optional else ''}"


def setting_facts(name: str) -> dict[str, Any]:
    """What the schema says of a setting, by its key, flag or variable; {} for no setting."""
    spelt = "--" + name.removeprefix("--").replace("-", "_")
    key = next((k for k in table().values() if name == k.env or spelt == k.flag), find(name))
    if key is None:
        return {}
    usual = f"{key.usual[0]:g} to {key.usual[1]:g}" if key.usual else ""
    group = key.name.rpartition(".")[0]
    facts = {
        "key": key.name,
        "is": key.help,
        "type": type_words(key),
        "range": range_words(key),
        "usual": usual,
        "default": "unset" if key.default in (None, ()) else key.default,
        "flag": key.flag,
        "variable": key.env,
        "no_effect": list(effects_of(key.name)),
        "beside": [k for k in table() if k.rpartition(".")[0] == group and k != key.name],
    }  # fmt: skip
    return {what: said for what, said in facts.items() if said not in (None, "", [])}


def metric_facts(name: str) -> dict[str, Any]:
    """What is known of a metric, that of a validation too; {} for none that is known."""
    for key in (name, name.removeprefix("val/")):
        if metric := next((m for m in METRICS if m.matches(key)), None):
            limits = Limits()
            low, high = metric.band(limits, ()) if metric.band else (None, None)
            bounds = [(low, "at least"), (high, "at most")]
            facts = {
                "metric": name,
                "is": metric.what,
                "plot": metric.plot,
                "healthy": ", ".join(f"{word} {b:g}" for b, word in bounds if b is not None),
                "otherwise": metric.change.format(kl_setting=limits.kl_setting),
            }
            return {what: said for what, said in facts.items() if said}
    return {}


def explained(found: dict[str, Any]) -> str:
    """The facts as text, one a line."""
    rows = []
    for what, said in found.items():
        for i, one in enumerate(said if isinstance(said, list) else [said]):
            rows.append((HEADINGS[what] if not i else "", str(one)))
    return "\n".join(aligned(rows))


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(
    epilog="Example: ppo explain clip_ratio   or: ppo explain kl_divergence",
    context_settings={"ignore_unknown_options": True},  # a flag may be what is asked for
)(explain)
