"""What a judge's tokens cost: from the settings, a file of the user's, or the bundled list."""

from __future__ import annotations

import fnmatch
import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from ppo_cli.config.layers import read_settings_text
from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.config.values import load_yaml
from ppo_cli.errors import RewardError, did_you_mean
from ppo_cli.rewards.judge.exchange import Usage

BUNDLED = Path(__file__).with_name("prices.yaml")
PROVIDERS = ("openai", "claude", "gemini", "dashscope")
_FIELDS = ("input", "output", "cached_input")
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
    """Return the price of a judge's model, or None when nobody knows it."""
    if (own := _from_settings(api)) is not None:
        return own
    files = [BUNDLED] if api.prices is None else [Path(api.prices).expanduser(), BUNDLED]
    for file in files:
        if (price := _from_file(file, api)) is not None:
            return price
    # With a budget in dollars, free is for the user to say: a local proxy may cost.
    if api.budget_usd is None and api.base_url is not None and is_local(api.base_url):
        return Price(0.0, 0.0, None, "a judge on this machine")
    return None


def is_local(base_url: str) -> bool:
    """Say whether an endpoint lies on this machine."""
    host = urlsplit(base_url if "//" in base_url else f"//{base_url}").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _from_settings(api: ApiReward) -> Price | None:
    if api.price_input is None and api.price_output is None:
        return None
    if api.price_input is None or api.price_output is None:
        given, missing = ("output", "input") if api.price_input is None else ("input", "output")
        raise RewardError(
            f"--rm_price_{given} was given without --rm_price_{missing}: a price needs both, in US "
            "dollars for a million tokens."
        )
    return Price(api.price_input, api.price_output, None, "the settings")


def _from_file(file: Path, api: ApiReward) -> Price | None:
    table = load_prices(file).get(api.type, {})
    if api.model is None:
        return None
    # A gateway's name (openai/gpt-4o-mini) and a dated one cost what the plain one does.
    plain = api.model.rsplit("/", 1)[-1]
    for name in (api.model, plain, _VERSION.sub("", plain)):
        fitting = [pattern for pattern in table if fnmatch.fnmatchcase(name, pattern)]
        if fitting:
            return table[max(fitting, key=lambda pattern: _specificity(pattern, name))]
    return None


def _specificity(pattern: str, name: str) -> tuple[bool, int, int]:
    literal = re.sub(r"\[[^]]*\]|[*?]", "", pattern)
    return pattern == name, len(literal), -pattern.count("*")


def load_prices(file: Path) -> dict[str, dict[str, Price]]:
    """Read a price file into provider -> pattern -> price; RewardError names what is wrong."""
    content = _read_yaml(file)
    _check_keys(file, content, ("checked", "prices"), "the file")
    listed = content.get("prices")
    if not isinstance(listed, Mapping):
        raise RewardError(f"The price file {file} has no `prices:` with a section per provider.")
    _check_keys(file, listed, PROVIDERS, "prices")
    source = "the bundled list" if file == BUNDLED else str(file)
    if content.get("checked") is not None:
        source += f" of {content['checked']}"
    return {
        provider: _section(file, provider, models, source) for provider, models in listed.items()
    }


def _read_yaml(file: Path) -> Mapping[str, Any]:
    try:
        content = load_yaml(read_settings_text(file))
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise RewardError(f"Cannot read the price file {file} (--rm_prices): {why}.") from None
    except yaml.YAMLError as problem:
        where = getattr(problem, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise RewardError(f"The price file {file} (--rm_prices) is not YAML{line}.") from None
    except ValueError as problem:
        raise RewardError(f"The price file {file} (--rm_prices): {problem}") from None
    if not isinstance(content, Mapping):
        raise RewardError(f"The price file {file} (--rm_prices) has no `prices:` section.")
    return content


def _section(file: Path, provider: str, models: Any, source: str) -> dict[str, Price]:
    if not isinstance(models, Mapping):
        raise RewardError(f"In the price file {file}, prices.{provider} must map models to prices.")
    found = {}
    for pattern, entry in models.items():
        where = f"prices.{provider}.{pattern}"
        if not isinstance(entry, Mapping):
            raise RewardError(
                f"In the price file {file}, {where} must look like {{input: 0.15, output: 0.6}}."
            )
        _check_keys(file, entry, _FIELDS, where)
        amounts = {field: _amount(file, where, entry, field) for field in _FIELDS}
        if amounts["input"] is None or amounts["output"] is None:
            raise RewardError(f"In the price file {file}, {where} needs both `input` and `output`.")
        found[str(pattern)] = Price(
            amounts["input"], amounts["output"], amounts["cached_input"], source
        )
    return found


def _amount(file: Path, where: str, entry: Mapping[str, Any], field: str) -> float | None:
    value = entry.get(field)
    if value is None:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0:
        raise RewardError(
            f"In the price file {file}, {where}.{field} is {value!r}; it must be US dollars for a "
            "million tokens."
        )
    return float(value)


def _check_keys(file: Path, found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in found:
        if key not in known:
            raise RewardError(
                f"In the price file {file}, {where} has an unknown key {key!r}."
                f"{did_you_mean(str(key), known)} Known: {', '.join(known)}."
            )
