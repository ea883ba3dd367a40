"""The price of a judge's tokens.

Read from the settings, the user's price file, the short list `prices.yaml` of this package, or
genai-prices, in this order. The last is a package with the prices and context lengths of many
providers' models; the short list has what it lacks, and so wins. Called by the ledger, the
forecast and the list of models.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.reward import ApiReward, JudgeType
from ppo_cli.errors import did_you_mean
from ppo_cli.paths import user_path
from ppo_cli.rewards.judge.calls import Usage
from ppo_cli.rewards.judge.written import FileModel, read_file

BUNDLED = Path(__file__).with_name("prices.yaml")
_VERSION = re.compile(r"-(?:20\d\d-?\d\d-?\d\d|latest)$")
# Fields of genai-prices for costs besides those of input and output tokens.
_OTHER_COSTS = ("requests_kcount", "output_reasoning_mtok", "output_citation_mtok")


@dataclass(frozen=True)
class Price:
    """US dollars for a million tokens, and where the figures come from."""

    input: float
    output: float
    cached_input: float | None
    source: str

    def cost(self, usage: Usage) -> float:
        """Return what these tokens cost, in US dollars."""
        cached = min(usage.cached_input, usage.input)
        cached_price = self.input if self.cached_input is None else self.cached_input
        millionths = (usage.input - cached) * self.input + cached * cached_price
        return (millionths + usage.output * self.output) / 1e6


def find_price(api: ApiReward) -> Price | None:
    """Return the price of a judge's model, or None when no source knows it."""
    if api.price_input is not None and api.price_output is not None:
        return Price(api.price_input, api.price_output, None, "the settings")
    for file in _price_files(api):
        if (price := _price_in_file(file, api)) is not None:
            return price
    if (model := look_up_model(api)) is not None and model.price is not None:
        return model.price
    if api.type == "local":
        return Price(0.0, 0.0, None, "the run's own judge")
    # A local proxy may cost money: under a budget in dollars the user has to say that it is free.
    if api.budget_usd is None and api.base_url is not None and is_local(api.base_url):
        return Price(0.0, 0.0, None, "a judge on this machine")
    return None


def batch_price(price: Price | None, api: ApiReward) -> Price | None:
    """Return what the same tokens cost in a batch: the share that the price files name."""
    # The user's file may name another share than the bundled one.
    shares = [read_prices(file).batch.get(api.type) for file in _price_files(api)]
    share = next((share for share in shares if share is not None), 1.0)
    if price is None:
        return None
    cached = None if price.cached_input is None else share * price.cached_input
    return Price(share * price.input, share * price.output, cached, price.source)


def is_local(base_url: str) -> bool:
    """Return whether an endpoint is on this machine."""
    host = urlsplit(base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _spellings(model: str) -> list[str]:
    """Return a model's name, without a gateway's prefix, and without a date."""
    # `openai/gpt-4o-mini` at a gateway, `gpt-4o-2024-05-13`, `qwen-plus-latest`.
    plain = model.rsplit("/", 1)[-1]
    return list(dict.fromkeys((model, plain, _VERSION.sub("", plain))))


# --- price files ----------------------------------------------------------------------------------

Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Amounts(FileModel):
    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cached_input is not None and self.cached_input > self.input:
            raise ValueError(f"cached_input ({self.cached_input:g}) is above input")
        return self


class PriceFile(FileModel):
    """Prices by provider and model (or pattern), and the share of them that batches cost."""

    prices: dict[JudgeType, dict[str, _Amounts]]
    batch: dict[JudgeType, Dollars] = Field(default_factory=dict)
    checked: Any = None


def read_prices(file: Path) -> PriceFile:
    """Read a price file; RewardError names what is wrong."""
    return read_file(file, PriceFile, f"--rm_prices {file}")


def _price_files(api: ApiReward) -> list[Path]:
    return [BUNDLED] if api.prices is None else [user_path(api.prices), BUNDLED]


def _price_in_file(file: Path, api: ApiReward) -> Price | None:
    """Return the price of the most specific pattern that fits the model's name."""
    content = read_prices(file)
    table = content.prices.get(api.type, {})
    source = "ppo-cli's list" if file == BUNDLED else str(file)
    if content.checked is not None:
        source += f" of {content.checked}"
    for name in _spellings(api.model) if api.model else ():
        fitting = [pattern for pattern in table if fnmatch.fnmatchcase(name, pattern)]
        if fitting:
            amounts = table[max(fitting, key=lambda pattern: _specificity(pattern, name))]
            return Price(amounts.input, amounts.output, amounts.cached_input, source)
    return None


def _specificity(pattern: str, name: str) -> tuple[bool, int, int]:
    """Return a sort key: the name itself, then more literal characters, then fewer stars."""
    literal = re.sub(r"\[[^]]*\]|[*?]", "", pattern)
    return pattern == name, len(literal), -pattern.count("*")


# --- genai-prices (0.2.3) -------------------------------------------------------------------------


@dataclass(frozen=True)
class ListedModel:
    """What genai-prices has of a model; `context` is the most tokens that it reads."""

    price: Price | None
    context: int | None


def look_up_model(api: ApiReward) -> ListedModel | None:
    """Return the highest price and the context of a judge's model in the genai-prices package.

    Returns None if the package does not list the model. A provider with the judge's base URL takes
    precedence over the provider of the judge's type: gateways mostly pass its prices on.
    """
    provider, all_providers = _listed_provider(api.type, api.base_url)
    if provider is None or api.model is None:
        return None
    models = (
        provider.find_model(name, all_providers=all_providers) for name in _spellings(api.model)
    )
    model = next((model for model in models if model is not None), None)
    return None if model is None else ListedModel(_highest_price(model), model.context_window)


def model_hint(kind: str, model: str) -> str:
    """Return ` Did you mean 'x'?` for a name that no list knows; empty where one knows it."""
    api = ApiReward(type=kind, model=model)
    if _price_in_file(BUNDLED, api) is not None or look_up_model(api) is not None:
        return ""
    provider, _ = _listed_provider(kind, None)
    table = read_prices(BUNDLED).prices.get(api.type, {})
    # Patterns are no names to suggest.
    names = [name for name in table if not re.search(r"[*?[]", name)]
    names += [model.id for model in provider.models] if provider else []
    return did_you_mean(model.rsplit("/", 1)[-1], dict.fromkeys([JUDGES[kind].example, *names]))


def _listed_provider(kind: str, base_url: str | None) -> tuple[Any, list[Any]]:
    """Return a provider of genai-prices (None where it has none), and all of its providers."""
    from genai_prices.data_snapshot import get_snapshot

    snapshot = get_snapshot()
    listed = JUDGES[kind].listed
    for provider_id, url in ((None, base_url), (listed, None)):
        if provider_id or url:
            try:
                return snapshot.find_provider(None, provider_id, url), snapshot.providers
            except LookupError:
                continue
    return None, []


def _highest_price(model: Any) -> Price | None:
    """Return the highest token prices of any hour, today or in 30 days, for the shortest context.

    None for a model without a price for input and output tokens, or with separate charges for
    requests, reasoning or citations: then these prices are not an upper bound.
    """
    from genai_prices import __version__

    # Some providers charge less at night, or until an announced day that a run may go past: the
    # budget counts the highest price.
    now = datetime.now(UTC)
    days = (now, now + timedelta(days=30))
    hours = [model.get_prices(day.replace(hour=hour)) for day in days for hour in range(24)]
    others = [getattr(prices, name, None) for prices in hours for name in _OTHER_COSTS]
    read, written, cached = (
        max((_first_tier(getattr(prices, field)) for prices in hours), key=lambda usd: usd or 0.0)
        for field in ("input_mtok", "output_mtok", "cache_read_mtok")
    )
    if read is None or written is None or any(amount is not None for amount in others):
        return None
    return Price(read, written, cached, f"genai-prices {__version__}")


def _first_tier(amount: Any) -> float | None:
    """Return a price, or its first step where it rises with the length of the prompt."""
    base = getattr(amount, "base", amount)
    return None if base is None else float(base)
