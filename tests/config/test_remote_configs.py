"""Plans of hub models without their files: from the hub, from its copy here, from the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ppo_cli.config.models import remote_configs
from ppo_cli.config.models.bundled import MODELS, preset_names
from ppo_cli.config.models.shape import Shape
from ppo_cli.planning.memory.devices import counted_models
from ppo_cli.planning.memory.plan import (
    fit_memory,
    memory_plan,
)
from ppo_cli.planning.resolve import resolve
from tests.loopback import Loopback

ROWS = tomllib.loads(
    Path(remote_configs.__file__).with_name("shapes.toml").read_text(encoding="utf-8")
)["model"]
TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row["names"][0] for row in ROWS])
def test_shapes_have_the_published_number_of_parameters(row: dict[str, Any]) -> None:
    shape = Shape.from_config(row["config"])
    assert shape is not None
    assert shape.parameters() == pytest.approx(row["parameters"], rel=0.01)


def test_table_has_each_name_once_and_those_of_the_presets() -> None:
    names = [name for row in ROWS for name in row["names"]]
    assert len(names) == len(set(names)) and len(ROWS) >= 40
    assert remote_configs.remote_config("someone/Qwen2.5-7B-ft") == ({}, "")


@pytest.mark.parametrize("preset", preset_names())
def test_presets_of_hub_models_show_their_memory_without_network(preset: str) -> None:
    resolved = resolve(flags={}, preset=preset, config_files=(), overrides=(), environ={})
    fitted = fit_memory(resolved)
    config = fitted.config
    hub = [path for path in counted_models(config) if path not in MODELS and "models/" not in path]
    part = memory_plan(resolved.requested, fitted, resolved.machine)
    if hub:
        assert part.facts["devices"] and set(part.facts["shapes"]) == set(hub)
        lines = [line for line in part.sentences if line.startswith("shape of ")]
        assert lines == [f"shape of {path}: from the bundled table" for path in hub]


class Hub(Loopback):
    """Gives the config of two models, one of them with a token; hangs for another."""

    def __init__(self) -> None:
        super().__init__("hub")
        self.calls: list[str] = []

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        if "slow" in request.path:
            return await self._hang(4)
        with_token = request.headers.get("Authorization") == "Bearer of-a-test"
        if request.path == "/meta-llama/Llama-3.1-8B/resolve/main/config.json" or (
            request.path.startswith("/team/private/") and not with_token
        ):
            return web.json_response({"error": "gated"}, status=401)
        if request.path.startswith("/team/") and request.path.endswith("/config.json"):
            return web.json_response(TINY)
        return web.Response(status=404)


def ask(
    hub: Hub, folder: Path, *names: str, deadline_s: float = 60, **variables: str
) -> list[list[Any]]:
    """What another process finds out about models: fields and source of each."""
    program = (
        "import json, sys; from ppo_cli.config.models import remote_configs as r; "
        f"r.DEADLINE_S = {deadline_s}; "
        "print(json.dumps([r.remote_config(name) for name in sys.argv[1:]]))"
    )
    environ = {
        **os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "HF_HUB_OFFLINE": "0",
        "XDG_CACHE_HOME": str(folder), "HF_HOME": str(folder), **variables,
    }  # fmt: skip
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=300, check=True)
    answers: list[list[Any]] = json.loads(done.stdout)
    return answers


@pytest.mark.slow
def test_config_is_fetched_once_and_the_table_answers_for_the_rest(tmp_path: Path) -> None:
    names = ("team/open", "team/private", "meta-llama/Llama-3.1-8B", "team/open-ft/x", "no/model")
    with Hub() as hub:
        answers = ask(hub, tmp_path, *names)
        assert answers[0] == [TINY, "the hub"]
        assert answers[1] == [{}, ""]
        assert answers[2][0]["num_hidden_layers"] == 32 and answers[2][1] == "the bundled table"
        assert answers[3:] == [[{}, ""]] * 2
        assert len(hub.calls) == 4, "what is no name of the hub was asked for"
        # With a token, and what is here already without a call.
        again = ask(hub, tmp_path, "team/open", "team/private", HF_TOKEN="of-a-test")
        assert again == [[TINY, "the hub"]] * 2 and len(hub.calls) == 5
        # Switched off, and too slow: one attempt for all models.
        assert ask(hub, tmp_path, "team/other", HF_HUB_OFFLINE="1") == [[{}, ""]]
        slow = ask(hub, tmp_path, "team/slow", "Qwen/Qwen3-8B", deadline_s=1)
        assert slow[0] == [{}, ""] and slow[1][1] == "the bundled table"
        assert len(hub.calls) <= 6  # none where this machine is too busy to ask within the second
