"""`ppo reward models`: the judge models that the keys of a user may use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ppo_cli.cli.flags import Arguments, add_command, make_switch
from ppo_cli.cli.help import App
from ppo_cli.cli.reward_tables import Facts
from ppo_cli.cli.screen import print_result, titled_table
from ppo_cli.config.mixture import judges_of
from ppo_cli.config.models.known_models import shutdown_date
from ppo_cli.config.schema.reward import ApiReward, Reward
from ppo_cli.errors import ConfigError, RewardError, UserError, plural
from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.judge.prices import find_price, look_up_model
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.scoring.forecast import (
    NO_LIST,
    describe_availability,
    fetch_models,
    providers_with_keys,
)
from ppo_cli.secrets.redact import redact

app = App()
# Prices are US dollars per million tokens; "reads" is the context length.
MODEL_COLUMNS = ("model", "$ in", "$ out", "reads", "until", "price by")


def models(arguments: Arguments) -> None:
    """List the models that your judge keys may use, with prices, limits and end dates."""
    resolved = arguments.resolve()
    # Without --rm_api_type every provider with a key is asked.
    chosen = resolved.origins["reward.api.type"] != "default"
    kind = resolved.config.reward.api.type if chosen else None
    models = list(list_models(resolved.config.reward, kind))
    if not models:
        raise ConfigError(
            "No API key of a judge is set: set one, or name a type with --rm_api_type."
        )
    lines = [line for listing in models for line in _format_listing(listing)]
    print_result(models, lambda: "\n".join(lines), as_json=arguments.extras["json"])
    if failed := [
        f"{model['provider']}: {model['problem']}" for model in models if "problem" in model
    ]:
        raise RewardError("\n".join(failed))


def _format_listing(listing: Facts) -> list[str]:
    """Return the models of one provider as a table, with notes below."""
    cells: list[Sequence[str]] = [MODEL_COLUMNS] if listing["models"] else []
    for row in listing["models"] or ():
        prices = ["-" if usd is None else f"{usd:g}" for usd in (row["input"], row["output"])]
        reads = f"{row['context']:,}" if row["context"] else "-"
        cells.append([row["model"], *prices, reads, row["until"] or "-", row["source"] or "-"])
    count = "no list" if listing["models"] is None else plural(len(listing["models"]), "model")
    lines = titled_table(f"{listing['provider']}: {count}", cells, left_aligned=1)
    return lines + [f"  {note}" for note in listing["notes"]]


def list_models(settings: Reward, kind: str | None) -> Iterator[dict[str, Any]]:
    """Yield the models that each provider lists for its key, with prices.

    The providers are those of the reward's judges, else the one named `kind`, else all with a key.
    `problem` says why listing failed; `models` is None if there is no list.
    """
    # The reward's judges come first, then the provider that the user names, then all with a key.
    judges = [judge.settings for judge in judges_of(settings)]
    named = [settings.api.model_copy(update={"type": kind})] if kind else []
    keyed = [ApiReward(type=name) for name in providers_with_keys(os.environ)]
    for api in judges or named or keyed:
        yield _list_provider(api)


def _list_provider(api: ApiReward) -> dict[str, Any]:
    """Return the models of one provider as facts; `problem` if it could not be asked."""
    listing: dict[str, Any] = {"provider": api.type, "models": None, "notes": []}

    async def fetch() -> list[str] | None:
        provider = build_provider(api, environ=os.environ)
        try:
            return await fetch_models(provider)
        finally:
            await provider.close()

    try:
        names = asyncio.run(fetch())
    except (UserError, JudgeError) as error:
        return listing | {"problem": redact(str(error))}
    # What to say about the configured model; a provider may have no list.
    if api.model:
        listing["notes"].append(describe_availability(api.model, names))
    elif names is None:
        listing["notes"].append(NO_LIST)
    if names is None:
        return listing
    each = [api.model_copy(update={"model": name}) for name in names]
    listing["models"] = [_model_facts(model) for model in each]
    return listing


def _model_facts(api: ApiReward) -> dict[str, Any]:
    """A model's price in US dollars per million tokens, its context and its retirement date."""
    price, listed = find_price(api), look_up_model(api)
    day = shutdown_date(api.type, api.model or "") if api.base_url is None else None
    return {
        "model": api.model,
        "input": price and price.input,
        "output": price and price.output,
        "source": price and price.source,
        "context": listed and listed.context,
        "until": day and day.isoformat(),
    }


add_command(
    app,
    models,
    "ppo reward models --rm_api_type openai",
    [make_switch("json", "Print JSON.")],
    ("reward.api.type", "reward.api.base_url", "reward.api.key_env"),
)
