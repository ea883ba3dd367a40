"""The price of a judge's tokens.

It comes from the settings, a file, the bundled list, or genai-prices, a package of its own
(the extra `prices`) that lists models of many providers, with prices and limits. What
the bundled list knows, that list decides.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import ipaddress
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.config.schema.reward import ApiReward, JudgeType
from ppo_cli.errors import did_you_mean
from ppo_cli.rewards.judge.calls import Usage
from ppo_cli.rewards.judge.written import FileModel, read_file

BUNDLED = Path(__file__).with_name("prices.yaml")
_VERSION = re.compile(r"-(?:20\d\d-?\d\d-?\d\d|latest)$")


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
        cheap = self.input if self.cached_input is None else self.cached_input
        millionths = (usage.input - cached) * self.input + cached * cheap
        return (millionths + usage.output * self.output) / 1e6


def find_price(api: ApiReward) -> Price | None:
    """Return the price of a judge's model, or None when nobody knows it.

    The settings are asked first, then the user's file, the bundled list and genai-prices.
    """
    if api.price_input is not None and api.price_output is not None:
        return Price(api.price_input, api.price_output, None, "the settings")
    for file in _files(api):
        if (price := _from_file(file, api)) is not None:
            return price
    if (listed := look_up_model(api)) is not None and listed.price is not None:
        return listed.price
    if api.type == "local":
        return Price(0.0, 0.0, None, "the run's own judge")
    # With a budget in dollars, free is for the user to say: a local proxy may cost.
    if not api.counts_dollars and api.base_url is not None and is_local(api.base_url):
        return Price(0.0, 0.0, None, "a judge on this machine")
    return None


def batch_price(price: Price | None, api: ApiReward) -> Price | None:
    """Return what the same tokens cost in a batch: the share that the price files name."""
    shares = [read_prices(file).batch.get(api.type) for file in _files(api)]
    share = next((share for share in shares if share is not None), 1.0)
    if price is None:
        return None
    cached = None if price.cached_input is None else share * price.cached_input
    return Price(share * price.input, share * price.output, cached, price.source)


def is_local(base_url: str) -> bool:
    """Say whether an endpoint lies on this machine."""
    host = urlsplit(base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _from_file(file: Path, api: ApiReward) -> Price | None:
    content = read_prices(file)
    table = content.prices.get(api.type, {})
    if api.model is None:
        return None
    source = "the bundled list" if file == BUNDLED else str(file)
    if content.checked is not None:
        source += f" of {content.checked}"
    # A gateway's name (openai/gpt-4o-mini) and a dated one cost what the plain one does.
    plain = api.model.rsplit("/", 1)[-1]
    for name in (api.model, plain, _VERSION.sub("", plain)):
        fitting = [pattern for pattern in table if fnmatch.fnmatchcase(name, pattern)]
        if fitting:
            amounts = table[max(fitting, key=lambda pattern: _specificity(pattern, name))]
            return Price(amounts.input, amounts.output, amounts.cached_input, source)
    return None


def _specificity(pattern: str, name: str) -> tuple[bool, int, int]:
    literal = re.sub(r"\[[^]]*\]|[*?]", "", pattern)
    return pattern == name, len(literal), -pattern.count("*")


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


def _files(api: ApiReward) -> list[Path]:
    return [BUNDLED] if api.prices is None else [Path(api.prices).expanduser(), BUNDLED]


def read_prices(file: Path) -> PriceFile:
    """Read a price file; RewardError names what is wrong."""
    return read_file(file, PriceFile, f"--rm_prices {file}")


@dataclass(frozen=True)
class Listed:
    """What genai-prices has of a model; `context` is how many tokens it reads at most."""

    price: Price | None
    context: int | None


def look_up_model(api: ApiReward) -> Listed | None:
    """What genai-prices has of a judge's model; None without the package or the model.

    Behind an address of one's own a model is looked for at the provider that has the address.
    """
    provider, every = _shelf(api.type, api.base_url)
    if provider is None or api.model is None:
        return None
    names = dict.fromkeys((api.model, api.model.rsplit("/", 1)[-1]))
    models = [provider.find_model(name, all_providers=every) for name in names]
    model = next((one for one in models if one is not None), None)
    return None if model is None else Listed(_list_price(model), model.context_window)


def disagreement(api: ApiReward) -> str:
    """Say that the bundled list and genai-prices differ about a model; empty where they do not."""
    ours, listed = _from_file(BUNDLED, api), look_up_model(api)
    theirs = None if listed is None else listed.price
    if ours is None or theirs is None or (ours.input, ours.output) == (theirs.input, theirs.output):
        return ""
    return (
        f"two prices of {api.model}: {_said(ours)} by {ours.source}, which counts, and "
        f"{_said(theirs)} by {theirs.source}; --rm_price_input and --rm_price_output decide"
    )


def model_hint(kind: str, model: str) -> str:
    """Return ` Did you mean 'x'?` for a name that no list knows; empty where one knows it."""
    api = ApiReward(type=kind, model=model)
    if _from_file(BUNDLED, api) is not None or look_up_model(api) is not None:
        return ""
    provider, _ = _shelf(kind, None)
    listed = read_prices(BUNDLED).prices.get(api.type, {})
    names = [name for name in listed if not re.search(r"[*?[]", name)]
    names += [model.id for model in provider.models] if provider else []
    return did_you_mean(model.rsplit("/", 1)[-1], dict.fromkeys([JUDGES[kind].example, *names]))


def _shelf(kind: str, base_url: str | None) -> tuple[Any, list[Any]]:
    """A provider's models in genai-prices, or None, and all of its providers."""
    if importlib.util.find_spec("genai_prices") is None:
        return None, []
    from genai_prices.data_snapshot import get_snapshot

    lists = get_snapshot()
    provider_id = None if base_url else JUDGES[kind].listed
    if not (base_url or provider_id):
        return None, []
    try:
        return lists.find_provider(None, provider_id, base_url), lists.providers
    except LookupError:
        return None, []


def _list_price(model: Any) -> Price | None:
    """The price at the smallest context tier and the dearest hour of the day."""
    from genai_prices import __version__

    now = datetime.now(UTC)
    hours = [model.get_prices(now.replace(hour=hour)) for hour in range(24)]
    beside = [getattr(prices, name, None) for prices in hours for name in _NOT_ONLY_TOKENS]
    read, written, cached = (
        max((_base(getattr(prices, f"{side}_mtok")) for prices in hours), key=lambda x: x or 0.0)
        for side in ("input", "output", "cache_read")
    )
    if read is None or written is None or any(amount is not None for amount in beside):
        return None
    return Price(read, written, cached, f"genai-prices {__version__}")


# What a call costs beside its tokens, or instead of them.
_NOT_ONLY_TOKENS = ("requests_kcount", "output_reasoning_mtok", "output_citation_mtok")


def _base(amount: Any) -> float | None:
    """The first step of a price that rises with the length of the prompt, or the price."""
    base = getattr(amount, "base", amount)
    return None if base is None else float(base)


def _said(price: Price) -> str:
    return f"${price.input:g} in, ${price.output:g} out"
