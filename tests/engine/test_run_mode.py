"""The mode in which a family is run: its declaration, the settings, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from families.configs import FAMILIES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.config.models.bundled import MODELS, model_folder
from ppo_cli.config.schema.run import Model
from ppo_cli.engine.batches.packing import RunMode, choose_run_mode
from ppo_cli.engine.pretrained import load_config
from ppo_cli.errors import ModelError
from tests.forked import ROOT

ROWS, PADDED, EAGER = RunMode("sdpa", True), RunMode("sdpa", False), RunMode("eager", False)


def choose(kind: str, changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    config = CONFIG_MAPPING[kind](**FAMILIES.get(kind, {}) | (changes or {}))
    return choose_run_mode("m", config, Model(path="m", **settings))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("llama", ROWS), ("gpt2", ROWS), ("qwen2_moe", ROWS), ("mistral", PADDED), ("gemma2", EAGER),
     ("gemma3", PADDED), ("gpt_oss", EAGER), ("mamba", EAGER), ("blenderbot", EAGER)],
)  # fmt: skip
def test_the_fastest_mode_that_is_known_to_be_exact_is_chosen(kind: str, mode: RunMode) -> None:
    chosen, remarks = choose(kind)
    assert chosen == mode
    assert ("Attention of m is eager" in " ".join(remarks)) is (mode.kernel == "eager")
    assert ("Rows of m are padded" in " ".join(remarks)) is not mode.packed


def test_windows_and_settings_keep_rows_padded() -> None:
    assert choose("mistral", {"sliding_window": None})[0] == ROWS
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    assert choose("qwen2", window)[0] == PADDED
    assert choose("llama", packing=False) == (PADDED, [])
    assert choose("llama", attn_implementation="eager")[0] == EAGER


def test_packed_rows_are_refused_where_they_are_not_known_to_be_exact() -> None:
    assert choose("mistral", packing=True)[0] == ROWS
    assert choose("gemma2", packing=True)[0] == RunMode("eager", True)
    for kind in ("bloom", "blenderbot"):
        with pytest.raises(ModelError, match="cannot be trained on packed rows"):
            choose(kind, packing=True)


def test_code_of_a_model_is_not_that_of_the_family() -> None:
    config = type("Own", (CONFIG_MAPPING["llama"],), {"__module__": "own"})()
    assert choose_run_mode("m", config, Model(path="m"))[0] == EAGER


@pytest.mark.parametrize("name", MODELS)
def test_the_bundled_models_are_packed(name: str) -> None:
    config = load_config(model_folder(name), "--model", False)
    assert choose_run_mode(name, config, Model(path=name)) == (ROWS, [])


def test_families_run_in_the_mode_in_which_the_page_has_compared_them() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (sdpa|eager) \| (\w+)[^|]* \| (.*) \|$", page, re.M)
    compared = {
        kind: RunMode(kernel, rows == "packed")
        for kernel, rows, kinds in lines
        for kind in re.findall(r"`(\w+)` [\d.]+e-\d+", kinds)
    }
    assert compared == {kind: choose(kind)[0] for kind in FAMILIES}
