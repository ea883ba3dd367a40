"""Which proxy leads to an address, and that NO_PROXY exempts a judge from a SOCKS proxy."""

from __future__ import annotations

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ppo_cli.rewards.judge.calls import JudgeError, Reply
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.proxies import client_settings, proxy_for
from tests.judge_server import JudgeServer
from tests.judge_server.asking import SECRET, ask_once, judge_at
from tests.loopback import Loopback
from tests.rewards.judge.corpora import read_corpus

SOCKS = "socks5://127.0.0.1:9"
VARIABLES = ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize("row", read_corpus("addresses", "no_proxy"))
def test_no_proxy_exempts_what_it_names(
    monkeypatch: pytest.MonkeyPatch, row: dict[str, Any]
) -> None:
    monkeypatch.setenv("ALL_PROXY", SOCKS)
    monkeypatch.setenv("NO_PROXY", row["no_proxy"])
    assert proxy_for(f"http://{row['host']}/v1") == (None if row["exempt"] else SOCKS)


def test_the_proxy_of_the_scheme_wins_over_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", SOCKS)
    monkeypatch.setenv("HTTPS_PROXY", "proxy.local:3128")
    assert proxy_for("https://example.com") == "http://proxy.local:3128"
    assert proxy_for("http://example.com") == SOCKS


def test_without_a_socks_proxy_a_client_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    settings = client_settings("http://example.com")
    assert list(settings) == ["verify"]
    # Certificates are read once for each file that the environment names.
    assert client_settings("http://example.org") == settings
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        client_settings("http://example.com")


@pytest.mark.parametrize(
    ("variable", "entries"),
    [("ALL_PROXY", "127.0.0.0/8"), ("HTTP_PROXY", "*"), ("all_proxy", "127.0.0.1")],
)
def test_no_proxy_exempts_a_judge_from_a_socks_proxy(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wire: str, entries: str, variable: str
) -> None:
    monkeypatch.setenv(variable, SOCKS)
    monkeypatch.setenv("NO_PROXY", entries)
    server.keys = {SECRET}
    assert isinstance(ask_once(judge_at(server, wire)), Reply)


def test_no_proxy_exempts_a_judge_from_a_proxy_that_httpx_does_not_know(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "wss://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert isinstance(ask_once(judge_at(server, "openai")), Reply)


@pytest.mark.skipif(find_spec("socksio") is not None, reason="SOCKS works")
def test_a_socks_proxy_that_leads_to_the_judge_needs_a_package(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str], wire: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("ALL_PROXY", SOCKS)
    error = ask_once(judge_at(server, wire))
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (Failure.FATAL, "sdk")
    assert "pip install" in str(error) and "socks" in str(error)
    assert server.count == 0
    gc.collect()
    assert not caplog.records
    assert "Traceback" not in capsys.readouterr().err


class Proxy(Loopback):
    """An HTTP proxy that answers everything itself."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=418, text="through the proxy")


def test_an_http_proxy_of_the_scheme_is_used_next_to_a_socks_proxy(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    with Proxy("proxy") as proxy:
        monkeypatch.setenv("ALL_PROXY", SOCKS)
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        error = ask_once(judge_at(server, wire))
    assert isinstance(error, JudgeError)
    assert error.status == 418
    assert server.count == 0
