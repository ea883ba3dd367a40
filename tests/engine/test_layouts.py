"""Families give the same numbers packed, with shared prompts, on two ranks and with LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from tests.engine.layouts import COMPARED, FAMILIES, LORA, OF_EACH_KIND, ROWS, UNSPLIT, train
from tests.engine.packed_steps import RATE, gaps, settings
from tests.engine.tiny_families import SIZE, save_model
from tests.forked import run_ranks
from tests.rounding import allowed

TERMS = sum(prompt + response for prompt, response in ROWS) * SIZE["hidden_size"] * 2
WORKER = Path(__file__).with_name("layouts.py")


def marks_of(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.slow if kind in OF_EACH_KIND else pytest.mark.weekly


def assert_alike(results: dict[str, float]) -> None:
    """To rounding: annotations, losses, gradient norms; of weights a share of AdamW's step."""
    assert results["counts"] == 0 and results["weights"] < 2e-3 * RATE, results
    assert max(results["annotated"], results["means"]) < allowed(TERMS), results


@pytest.mark.parametrize(
    "adapter",
    [pytest.param({}, id="whole"), pytest.param(LORA, id="adapter", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("qwen2", "gemma3_text") else marks_of(kind))
        for kind in FAMILIES
    ],
)
def test_rows_are_the_same_padded_packed_and_with_shared_prompts(
    kind: str, adapter: dict[str, Any], tmp_path: Path
) -> None:
    path = save_model(tmp_path, kind)
    padded = train(path, **adapter)
    for shared in (False, True):
        assert_alike(gaps(train(path, packing=True, share_prompts=shared, **adapter), padded))


def test_rows_of_states_are_padded(tmp_path: Path) -> None:
    """A state goes on from one packed row to the next."""
    config = settings(
        model={"path": save_model(tmp_path, "mamba2"), "packing": None},
        algorithm={"adv_estimator": "grpo"},
    )
    learner = Learner(config, load_tokenizer(model_folder("embedded")), total_steps=1)
    assert learner.policy.packing is None


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("ranks")
    for kind in COMPARED:
        save_model(folder, kind)
    run_ranks(WORKER, 2, str(folder))
    results: dict[str, dict[str, float]] = json.loads((folder / "gaps-0.json").read_text())
    return results


TWO_RANKS = [(kind, f"{kind}-1-{len(adapter)}") for kind in FAMILIES for adapter in ({}, LORA)]
# Layers split over both: norms of queries and keys, which the adapter freezes, stay frozen.
SPLIT = [(kind, f"{kind}-2-1") for kind in FAMILIES if kind not in UNSPLIT]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks_of(kind)) for kind, case in (*TWO_RANKS, *SPLIT)]
)
def test_two_ranks_give_what_one_process_gives(
    case: str, two_ranks: dict[str, dict[str, float]]
) -> None:
    """Families in pieces, whole and with an adapter, and with an adapter on split layers."""
    assert_alike(two_ranks[case])
