"""Heads that --tensor_parallel_size does not divide are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.config.settling import problems, settle


def ranks(size: int, path: str) -> tuple[str, ...]:
    sizes = f"trainer.num_workers={size} trainer.tensor_parallel_size={size}"
    return (*sizes.split(), f"model.path={path}")


def split_over(*overrides: str) -> int:
    return settle(*overrides).config.trainer.tensor_parallel_size


def model(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


def test_what_divides_is_taken() -> None:
    assert split_over(*ranks(2, "embedded")) == 2


def test_a_folder_is_looked_at(tmp_path: Path) -> None:
    path = model(tmp_path, json.dumps({"num_attention_heads": 12}))
    (line,) = problems(*ranks(5, path))
    assert f"the 12 attention heads of {path}" in line
    assert line.endswith("--tensor_parallel_size 1, 2, 3, 4, 6 or 12.")


def test_a_critic_of_its_own_is_looked_at(tmp_path: Path) -> None:
    path = model(tmp_path, json.dumps({"num_attention_heads": 9, "num_key_value_heads": 3}))
    (line,) = problems(*ranks(2, "embedded"), f"critic.model.path={path}")
    assert f"2 does not divide the 9 attention heads of {path}" in line
    overrides = (*ranks(2, "embedded"), f"critic.model.path={path}", "algorithm.adv_estimator=grpo")
    assert split_over(*overrides, "rollout.n=2") == 2


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", "\x00", '{"num_attention_heads": "4"}',
        '{"num_attention_heads": 0}', '{"num_attention_heads": 4, "num_key_value_heads": [1]}',
        '{"text_config": {"num_attention_heads": 4}}',
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_left_to_the_run(text: str, tmp_path: Path) -> None:
    assert split_over(*ranks(3, model(tmp_path, text))) == 3


def test_a_hub_name_and_a_missing_file_are_left_to_the_run(tmp_path: Path) -> None:
    assert split_over(*ranks(3, "some/model")) == split_over(*ranks(3, str(tmp_path))) == 3
