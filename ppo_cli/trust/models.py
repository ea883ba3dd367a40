"""Which models a judge's key may use, and what is known of each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ppo_cli.config.known_models import JUDGES, missing_settings, retirement
from ppo_cli.config.mixture import judges_of
from ppo_cli.config.reward_schema import ApiReward, Reward
from ppo_cli.errors import UserError, did_you_mean
from ppo_cli.redact import redact
from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.judge.prices import disagreement, find_price, second_list
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.judge.providers.base import SdkProvider

PATIENCE_S = 30.0
NO_LIST = "nothing lists here what the key may use"


def listings(
    settings: Reward, kind: str | None, environ: Mapping[str, str] = os.environ
) -> Iterator[dict[str, Any]]:
    """Yield what each provider lists to its key.

    The providers are those of the reward's judges, else the one named `kind`, else all that have
    a key. `problem` says why a list is not to be had; `models` is None where there is no list.
    """
    judges = [judge.settings for judge in judges_of(settings)]
    named = [settings.api.model_copy(update={"type": kind})] if kind else []
    for api in judges or named or [ApiReward(type=name) for name in with_keys(environ)]:
        yield _listing(api, environ)


def with_keys(environ: Mapping[str, str]) -> Iterator[str]:
    """Give the types of judge that these variables let in."""
    for name, known in JUDGES.items():
        keyed = any(environ.get(key, "").strip() for key in known.keys)
        ready = known.needs and known.keyless
        if (keyed or ready) and not missing_settings(name, environ, base_url=None, key_env=None):
            yield name


async def usable(provider: SdkProvider) -> list[str] | None:
    """The models that a provider lists to its key, sorted; raises only JudgeError."""
    found = await provider.within(PATIENCE_S, provider.models)
    return None if found is None else sorted(set(found))


def among(model: str, names: list[str] | None) -> str:
    """Say whether a model is among those that are listed."""
    if names is None:
        return NO_LIST
    # One name may stand for its newest version, and a gateway puts its own before it.
    if any(name == model or name.startswith(f"{model}-") for name in names):
        return f"the key may use {len(names):,} models, this one too"
    near = did_you_mean(model, names)
    return f"the key may use {len(names):,} models, and {model} is none of them.{near}"


def _listing(api: ApiReward, environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"provider": api.type, "models": None, "notes": []}
    try:
        provider = build_provider(api, environ=environ)
        names = asyncio.run(_closed(provider))
    except (UserError, JudgeError) as error:
        return found | {"problem": redact(str(error))}
    if api.model:
        found["notes"].append(among(api.model, names))
    elif names is None:
        found["notes"].append(NO_LIST)
    if names is None:
        return found
    each = [api.model_copy(update={"model": name}) for name in names]
    found["models"] = [_known(one) for one in each]
    found["notes"] += [said for one in each if (said := disagreement(one))]
    return found


async def _closed(provider: SdkProvider) -> list[str] | None:
    try:
        return await usable(provider)
    finally:
        await provider.close()


def _known(api: ApiReward) -> dict[str, Any]:
    """A model's price in US dollars for a million tokens, its limit and the day it goes."""
    price, listed = find_price(api), second_list(api)
    day = retirement(api.type, api.model or "") if api.base_url is None else None
    return {
        "model": api.model,
        "input": price and price.input,
        "output": price and price.output,
        "source": price and price.source,
        "context": listed and listed.context,
        "until": day and day.isoformat(),
    }
