"""`ppo reward models`: what a judge's key may use, with prices and limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ppo_cli.cli.flags import Given, switch
from ppo_cli.cli.screen import aligned, print_result
from ppo_cli.errors import ConfigError, RewardError

HEAD = ("model", "$ in", "$ out", "reads", "until", "price by")


def models(given: Given) -> None:
    """List the models that a judge's key may use, with price, limit and the day they go."""
    resolved = given.resolve()
    from ppo_cli.trust.models import listings

    chosen = resolved.origins["reward.api.type"] != "default"
    kind = resolved.config.reward.api.type if chosen else None
    found = list(listings(resolved.config.reward, kind))
    if not found:
        raise ConfigError("No key of a judge is set: set one, or name a type with --rm_api_type.")
    lines = [line for listing in found for line in _lines(listing)]
    print_result(found, lambda: "\n".join(lines), as_json=given.extras["json"])
    if failed := [f"{one['provider']}: {one['problem']}" for one in found if "problem" in one]:
        raise RewardError("\n".join(failed))


def _lines(listing: dict[str, Any]) -> Iterator[str]:
    rows, name = listing["models"], listing["provider"]
    count = "no list" if rows is None else f"{len(rows):,} models"
    yield f"{name}: {count}"
    if rows:
        yield from (f"  {line}" for line in aligned([HEAD, *map(_cells, rows)], left=1))
    yield from (f"  {note}" for note in listing["notes"])


def _cells(row: dict[str, Any]) -> list[str]:
    amounts = [f"{row[side]:g}" if row[side] is not None else "-" for side in ("input", "output")]
    reads = f"{row['context']:,}" if row["context"] else "-"
    return [row["model"], *amounts, reads, row["until"] or "-", row["source"] or "-"]


# What `ppo reward` takes to have this command.
LISTING = (
    models,
    "Example: ppo reward models --rm_api_type openai",
    [switch("json", "Print JSON.")],
    ("reward.api.",),
)
