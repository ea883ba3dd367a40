"""Prices come from the settings, a file, a short list or genai-prices, and say from where."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.models.known_models import JUDGES, shutdown_date
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.calls import Usage
from ppo_cli.rewards.judge.costs import Ledger
from ppo_cli.rewards.judge.prices import (
    BUNDLED,
    Price,
    _highest_price,
    batch_price,
    find_price,
    is_local,
    look_up_model,
    model_hint,
    read_prices,
)
from tests.rewards.judge.corpora import read_corpus


def api(model: str | None = "gpt-4o-mini", kind: str = "openai", **settings: object) -> ApiReward:
    return ApiReward.model_validate({"type": kind, "model": model, **settings})


@pytest.mark.parametrize(
    ("price", "usage", "cost"),
    [
        (Price(1.0, 10.0, 0.1, ""), Usage(1_000_000, 100_000, 400_000), 0.6 + 0.04 + 1.0),
        (Price(1.0, 0.0, None, ""), Usage(1_000_000, 0, 900_000), 1.0),
        (Price(1.0, 0.0, 0.5, ""), Usage(100, 0, 10_000), 50e-6),
    ],
    ids=["cached", "no price of cached input", "more cached than read"],
)
def test_the_cost_of_a_call(price: Price, usage: Usage, cost: float) -> None:
    assert price.cost(usage) == pytest.approx(cost)


def test_the_short_list_names_its_date_and_wins_over_genai_prices() -> None:
    for kind, models in read_prices(BUNDLED).prices.items():
        for model, amounts in models.items():
            price = find_price(api(model.replace("*", "8"), kind))
            assert price is not None and price.input == amounts.input
            assert price.source == f"ppo-cli's list of {read_prices(BUNDLED).checked}"
            assert look_up_model(api(model.replace("*", "8"), kind)) is None, "only what it lacks"
    for api_type in set(JUDGES) - {"local"}:
        shares = batch_price(Price(1.0, 2.0, None, ""), api(kind=api_type))
        assert shares is not None and shares.input in (0.5, 1.0)


@pytest.mark.parametrize(
    ("kind", "expected", "models"),
    [
        ("openai", (0.15, 0.6), ("gpt-4o-mini", "gpt-4o-mini-2024-07-18", "openai/gpt-4o-mini")),
        ("openai", (5.0, 15.0), ("gpt-4o-2024-05-13",)),
        ("openai", (0.3, 1.2), ("ft:gpt-4o-mini-2024-07-18:mine::x",)),
        ("claude", (1.0, 5.0), ("claude-haiku-4-5-20251001",)),
        ("claude", (5.0, 25.0), ("claude-opus-4-8",)),
        ("gemini", (0.1, 0.4), ("models/gemini-2.5-flash-lite",)),
        ("dashscope", (0.4, 1.2), ("qwen-plus", "qwen-plus-latest")),
        ("dashscope", (0.5, 3.0), ("qwen3.6-plus", "qwen3.6-plus-2026-04-02")),
        # No price is guessed; genai-prices has no list of DashScope.
        ("openai", None, ("gpt-5.9", "llama-3", "no-such-model", None)),
        ("claude", None, ("gpt-4o-mini",)),
        ("dashscope", None, ("qwen-future", "gpt-4o-mini")),
    ],
)
def test_a_model_is_found_under_its_usual_spellings(
    kind: str, expected: tuple[float, float] | None, models: tuple[str | None, ...]
) -> None:
    for model in models:
        price = find_price(api(model, kind))
        assert (price and (price.input, price.output)) == expected, model


ROOT = Path(__file__).resolve().parents[3]
NAMING = ("README*.md", "docs/*.md", "presets/*", "reward_prompts/*", "examples/*", "deploy/*",
          "llms.txt", "ppo_cli/cli/*.py", "ppo_cli/config/schema/*.py")  # fmt: skip
NAMES = {
    "openai": r"gpt-\d[\w.-]*\w|o\d-[a-z-]+",
    "claude": r"claude-(?:\d|[a-z]+-\d)[\w.-]*",
    "gemini": r"gemini-\d[\w.-]*\w",
    "dashscope": r"(?<!/)qwen[\d.]*-(?:plus|max|flash|turbo|coder)(?:-\w+)*",
}


def test_models_that_documents_presets_and_help_name_have_a_price_and_are_current() -> None:
    models = {(kind, judge.example) for kind, judge in JUDGES.items() if kind != "local"}
    for file in (file for pattern in NAMING for file in ROOT.glob(pattern) if file.is_file()):
        # A copy of the settings is not read.
        text = "" if file.name == "schema.json" else file.read_text(encoding="utf-8")
        models |= {(kind, name) for kind, form in NAMES.items() for name in re.findall(form, text)}
    assert {kind for kind, _ in models} == set(JUDGES) - {"local"} and len(models) >= 10
    assert not [model for model in models if find_price(api(model[1], model[0])) is None]
    assert not [model for model in models if shutdown_date(*model)]


@pytest.mark.parametrize(("days", "price"), [(-1, 2.0), (20, 2.0), (60, 1.0)])
def test_a_higher_price_counts_30_days_before_it_begins(days: int, price: float) -> None:
    from genai_prices.types import (
        ClauseEquals,
        ConditionalPrice,
        ModelInfo,
        ModelPrice,
        StartDateConstraint,
    )

    one, two = (ModelPrice(input_mtok=Decimal(n), output_mtok=Decimal(n)) for n in (1, 2))
    begin = StartDateConstraint(datetime.now(UTC).date() + timedelta(days=days))
    prices = [ConditionalPrice(prices=one), ConditionalPrice(begin, prices=two)]
    model = ModelInfo("m", ClauseEquals("m"), prices=prices)
    highest = _highest_price(model)
    assert highest is not None and (highest.input, highest.output) == (price, price)


def test_a_provider_that_charges_for_each_call_has_no_price() -> None:
    assert find_price(api("sonar", base_url="https://api.perplexity.ai")) is None


def test_the_settings_win() -> None:
    price = find_price(api(price_input=1.0, price_output=2.0))
    assert price == Price(1.0, 2.0, None, "the settings")


def write(folder: Path, text: str) -> str:
    file = folder / "prices.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_file_of_the_users_wins_over_the_bundled_list(tmp_path: Path) -> None:
    file = write(tmp_path, "prices:\n  openai:\n    gpt-4o-mini: {input: 9, output: 9}\n")
    prices = [find_price(api(model, prices=file)) for model in ("gpt-4o-mini", "gpt-4o")]
    assert [price.input for price in prices if price] == [9.0, 2.5]
    assert prices[0] is not None and prices[0].source == file


def test_the_most_specific_pattern_wins(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "prices:\n  openai:\n    '*': {input: 1, output: 1}\n    my-*: {input: 2, output: 2}\n"
        "    my-judge-?: {input: 3, output: 3}\n    my-judge-7: {input: 4, output: 4}\n",
    )
    prices = [
        find_price(api(name, prices=file)) for name in ("x", "my-x", "my-judge-8", "my-judge-7")
    ]
    assert [price.input for price in prices if price] == [1, 2, 3, 4]


@pytest.mark.parametrize("row", read_corpus("mistakes", "prices"))
def test_a_wrong_file_is_named_with_its_key(row: dict[str, str], tmp_path: Path) -> None:
    file = write(tmp_path, row["prices"])
    with pytest.raises(RewardError, match=re.escape(row["message"])) as caught:
        find_price(api("m", prices=file))
    assert f"--rm_prices {file}" in str(caught.value)


@pytest.mark.parametrize("row", read_corpus("addresses", "local"))
def test_local_endpoints_are_free(row: dict[str, Any]) -> None:
    assert is_local(row["url"]) is row["local"]
    price = find_price(api("my-llama", base_url=row["url"]))
    assert (price is not None and price.cost(Usage(10**6, 10**6)) == 0) is row["local"]


# --- genai-prices -------------------------------------------------------------------------------

# Models of its list that the bundled one lacks, by provider and address.
ELSEWHERE = [
    ("openai", "o3-pro", None),
    ("openai", "o3-pro-2025-06-10", None),
    ("claude", "claude-3-5-haiku-latest", None),
    ("gemini", "models/gemini-2.0-flash", None),
    ("openai", "o3-pro", "https://gateway.example.org/v1"),
    ("openai", "deepseek-chat", "https://api.deepseek.com/v1"),
    ("openai", "meta-llama/llama-3.3-70b-instruct", "https://openrouter.ai/api/v1"),
]


@pytest.mark.parametrize(("kind", "model", "base_url"), ELSEWHERE)
def test_what_the_bundled_list_lacks_comes_from_genai_prices(
    kind: str, model: str, base_url: str | None
) -> None:
    from genai_prices import Usage as TheirUsage
    from genai_prices import __version__, calc_price

    price = find_price(api(model, kind, base_url=base_url))
    assert price is not None and price.source == f"genai-prices {__version__}"
    where = (
        {"provider_api_url": base_url}
        if base_url and "example" not in base_url
        else {"provider_id": JUDGES[kind].listed}
    )
    calculated = calc_price(
        TheirUsage(input_tokens=1000, output_tokens=500), model.removeprefix("models/"), **where
    )
    cost = price.cost(Usage(input=1000, output=500))
    assert cost >= float(calculated.total_price) - 1e-12, "no hour of the day costs more"
    if "deepseek" not in model:
        assert cost == pytest.approx(float(calculated.total_price))


def test_a_wrong_name_brings_up_the_nearest() -> None:
    assert model_hint("openai", "gpt-6-lunna") == " Did you mean 'gpt-6-luna'?"
    assert model_hint("claude", "claude-haku-5-5") == " Did you mean 'claude-haiku-5-5'?"
    for model in ("gpt-4o-mini", "gpt-4o-mini-2024-07-18", "ft:gpt-4o-mini:mine::x"):
        assert model_hint("openai", model) == ""
    assert model_hint("openai", "entirely-different") == ""
    with pytest.raises(RewardError, match=r"is not known\. Did you mean 'gpt-6-luna'"):
        Ledger(None, budget_usd=1.0, budget_tokens=None, provider="openai", model="gpt-6-lunna")
