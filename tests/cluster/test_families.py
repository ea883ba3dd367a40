"""Families of models under Ray, two learner ranks and a sampler, against one process.

A process drives one cluster at a time: these are not in the file whose tests share an engine.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.engine.learner import LocalEngine
from ppo_cli.records import Prompt
from tests.cluster.test_cluster_engine import (
    assert_same,
    make_config,
    start_engine,
    train_step,
)
from tests.cluster.test_cluster_engine import prompts as prompts
from tests.cluster.test_cluster_engine import tokenizer as tokenizer
from tests.engine.tiny_families import save_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "kind, adapter",
    [
        pytest.param("gemma2", {}, id="windows and caps"),
        pytest.param("granite", {"lora_rank": 4}, id="scaled logits and an adapter"),
        pytest.param("qwen3_moe", {}, id="experts"),
    ],
)
def test_families_give_what_one_process_gives(
    kind: str, adapter: dict[str, Any], address: str, tokenizer: Any, prompts: list[Prompt],
    tmp_path: Path,
) -> None:  # fmt: skip
    config = make_config(path=save_model(tmp_path, kind), **adapter)
    local = LocalEngine(config, tokenizer, total_steps=8)
    with closing(start_engine(config, tokenizer, tmp_path / "logs", address)) as engine:
        for version in range(2):
            pad = tokenizer.pad_token_id
            assert_same(train_step(engine, prompts, pad), train_step(local, prompts, pad), version)
