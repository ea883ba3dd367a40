"""Before the first step an actor is its reference, on the CPU, on a device and over ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.step_zero import CASES
from tests.engine.tiny_families import make_model
from tests.forked import run_ranks

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("step_zero.py")
# Where it runs: how many ranks, and the device of a lone one.
NORMS = re.compile(r"norm|\bln_")
EXPERTS = re.compile(r"\.experts\.|\.gate\.weight$")
PLACES = {"cpu": (1, "cpu"), "second": (1, "second"), "ranks": (2, "cpu")}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was found in each place."""
    folder = tmp_path_factory.mktemp("models")
    for case, (kind, tied, stored, _) in CASES.items():
        make_model(kind, tie_word_embeddings=tied).to(stored).save_pretrained(folder / case / kind)
    places = {}
    for place, (size, device) in PLACES.items():
        run_ranks(WORKER, size, str(folder), device)
        places[place] = json.loads((folder / "found-0.json").read_text())
    return places


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_the_actor_is_its_reference(
    report: dict[str, dict[str, Any]], place: str, case: str
) -> None:
    assert (report[place][case]["gap"], report[place][case]["kl"]) == (0.0, 0.0)


@pytest.mark.parametrize("place", PLACES)
def test_spread_weights_give_the_log_probs_of_the_checkpoint(
    report: dict[str, dict[str, Any]], place: str
) -> None:
    spread, plain = report[place]["tied"], report[place]["tied, not spread"]
    assert spread["logprobs"] == plain["logprobs"]


def test_frozen_weights_are_held_in_bfloat16(report: dict[str, dict[str, Any]]) -> None:
    """But norms, and experts that are compared with an actor's, which are in float32."""
    for case in CASES:
        assert report["ranks"][case]["float32"] == []
        float32_weights = [n for n in report["second"][case]["float32"] if not NORMS.search(n)]
        if case == "positions from a mask":
            assert float32_weights == ["model.decoder.embed_positions.weight"]
        else:
            assert all(EXPERTS.search(name) for name in float32_weights) and (
                not float32_weights or "experts" in case
            )


def test_one_rank_computes_what_two_do(report: dict[str, dict[str, Any]]) -> None:
    """But for rounding: the states between layers are float32 on one, bfloat16 on two."""
    for case in CASES:
        alone, two = (torch.tensor(report[p][case]["logprobs"]) for p in ("cpu", "ranks"))
        assert (alone - two).abs().mean() < 0.05, case
