"""Building a provider: model, address, package, identity; no call is made."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.errors import ConfigError, MissingPart, RewardError
from ppo_cli.rewards.judge import providers
from ppo_cli.rewards.judge.providers import (
    build_provider,
    monitor_settings,
    provider_class,
    resolve_base_url,
)
from tests.config.settling import settle
from tests.judge_server.asking import KEYS, SECRET, judge_api
from tests.rewards.judge.corpora import read_corpus


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "is_installed", lambda module: False)
    with pytest.raises(MissingPart, match="pip install google-genai"):
        build_provider(judge_api("gemini", "m"), environ=KEYS)
    monkeypatch.setattr(providers, "is_installed", lambda module: "decision" not in module)
    with pytest.raises(MissingPart, match="pip install --upgrade openai"):
        build_provider(judge_api("openai", "m", mode="decision"), environ=KEYS)


def test_installed_looks_without_importing() -> None:
    assert providers.is_installed("openai")
    assert not providers.is_installed("no_such_sdk")
    assert not providers.is_installed("no_such_sdk.deeper")


def test_identity_holds_what_matters_and_no_key() -> None:
    def identity(**changes: Any) -> str:
        settings = {"kind": "openai", "base_url": "http://h:1/v1", **changes}
        return build_provider(judge_api(**settings), environ=KEYS).identity

    base = identity()
    assert base == identity()
    changes: list[dict[str, Any]] = [
        {"model": "n"}, {"base_url": "http://h:2/v1"}, {"base_url": "http://h:1/v2"},
        {"temperature": 0.5}, {"votes": 3}, {"mode": "decision"}, {"kind": "dashscope"},
    ]  # fmt: skip
    assert len({base, *(identity(**change) for change in changes)}) == 1 + len(changes)
    assert SECRET not in base
    provider = build_provider(judge_api("openai", "m"), environ=KEYS)
    assert SECRET not in f"{provider!r} {provider._key!r}"


def test_a_monitor_of_the_same_type_is_asked_at_the_same_gateway() -> None:
    settings = {"base_url": "http://gateway/v1", "key_env": "GATEWAY_KEY", "temperature": 0.5}
    settings |= {"votes": 3, "mode": "decision", "price_input": 1.0, "price_output": 2.0}

    def where(**changes: Any) -> tuple[str | None, str | None]:
        monitor = {"type": "openai", "model": "n", **changes}
        judge = monitor_settings(judge_api("openai", **settings, monitor=monitor))
        alone = judge_api(monitor["type"], "n", judge.base_url, key_env=judge.key_env)
        assert judge == alone.model_copy(update={"monitor": judge.monitor})
        return judge.base_url, judge.key_env

    assert where() == ("http://gateway/v1", "GATEWAY_KEY")
    assert where(key_env="MINE") == ("http://gateway/v1", "MINE")
    assert where(type="gemini") == (None, None)
    assert where(base_url="http://other") == ("http://other", None)


def test_endpoints_come_from_the_sdks_own_variables_too() -> None:
    for kind, declaration in JUDGES.items():
        for variable in declaration.url_variables:
            needs = {name: "x" for names in declaration.needs for name in names.split()}
            keys = KEYS | dict.fromkeys(declaration.keys, "k") | needs
            near = {**keys, variable: " http://gateway/v7 "}
            address = build_provider(judge_api(kind, "m"), environ=near).base_url
            assert address == "http://gateway/v7", variable
            with pytest.raises(RewardError, match=f"{variable} 'gateway' is not an address"):
                build_provider(judge_api(kind, "m"), environ={**keys, variable: "gateway"})
    environ = {**KEYS, "OPENAI_BASE_URL": "http://gateway/v1/"}
    for typed, address in ((None, "http://gateway/v1"), ("http://mine/v1", "http://mine/v1")):
        assert build_provider(judge_api("openai", "m", typed), environ=environ).base_url == address
    usual, blank = (
        build_provider(judge_api("openai", "m"), environ=environ).base_url
        for environ in (KEYS, KEYS | {"OPENAI_BASE_URL": " "})
    )
    assert blank == usual


@pytest.mark.parametrize(
    ("region", "workspace", "host"),
    [
        ("ap-southeast-1", "ws", "ws.ap-southeast-1.maas"), ("us-east-1", "", "dashscope-intl"),
        ("cn-beijing", "", "dashscope"), ("cn-hongkong", "", "cn-hongkong.dashscope"),
    ],
)  # fmt: skip
def test_each_region_of_dashscope_has_its_host(region: str, workspace: str, host: str) -> None:
    environ = {**KEYS, "DASHSCOPE_WORKSPACE": workspace, "DASHSCOPE_REGION": region}
    built = build_provider(judge_api("dashscope", "m"), environ=environ)
    assert built.base_url == f"https://{host}.aliyuncs.com/api/v1"


@pytest.mark.parametrize("row", read_corpus("addresses", "address"))
def test_an_address_is_completed(row: dict[str, str]) -> None:
    kind, address = row["kind"], row["address"]
    for url in (row["typed"], address):
        assert resolve_base_url(provider_class(kind), judge_api(kind, "m", url), {}) == address


@pytest.mark.parametrize("row", read_corpus("addresses", "fault"))
def test_an_impossible_address_is_refused(row: dict[str, str]) -> None:
    environ = KEYS | {"OPENAI_BASE_URL": row["typed"]}
    with pytest.raises(RewardError, match=rf"OPENAI_BASE_URL.*{row['fault']}") as caught:
        build_provider(judge_api("openai", "m"), environ=environ)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=rf"reward.api.base_url.*{row['fault']}") as caught:
        settle(f"reward.api.base_url={row['typed']}")
    assert "hunter2" not in str(caught.value)
