"""`ppo reward models`: what a key may use, by each provider's own list."""

from __future__ import annotations

import json

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.models.known_models import JUDGES
from tests.judge_server import JudgeServer
from tests.judge_server.asking import SECRET, WIRES
from tests.judge_server.server import MODELS


@pytest.mark.parametrize("wire", WIRES)
def test_a_provider_lists_what_its_key_may_use(
    wire: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JUDGES[WIRES[wire]].keys[0], SECRET)
    with JudgeServer() as server:
        line = ["--rm_api_type", WIRES[wire], "--rm_base_url", server.url(wire)]
        assert main(["reward", "models", *line, "--json"]) == 0
        (model,) = json.loads(capsys.readouterr().out)
        if wire == "dashscope-compatible":
            assert (model["models"], model["notes"]) == (
                None, ["this provider does not list the models of a key"]
            )  # fmt: skip
            return
        rows = {row["model"]: row for row in model["models"]}
        assert list(rows) == sorted(MODELS)
        server.keys = {"another"}
        assert main(["reward", "models", *line]) == 2
    captured = capsys.readouterr()
    assert f"{WIRES[wire]}: no list" in captured.out and SECRET not in captured.out + captured.err
    assert "401" in captured.err and f"{WIRES[wire]}: " in captured.err


def test_prices_shutdowns_and_a_wrong_name_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with JudgeServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url("openai"))
        assert main(["reward", "models"]) == 0
        lines = capsys.readouterr().out.splitlines()
        judge = ["--use_api_reward", "--rm_api_type", "openai", "--rm_model", "gpt-4o-mimi"]
        assert main(["reward", "models", *judge]) == 0
        output = capsys.readouterr().out
    assert lines[0] == "openai: 5 models"
    (row,) = [line.split() for line in lines if "gpt-4o-mini" in line]
    assert row[:3] == ["gpt-4o-mini", "0.15", "0.6"] and row[4] == "2027-01-14"
    assert "5 models, but not gpt-4o-mimi. Did you mean 'gpt-4o-mini'?" in output
