"""Models spread over ranks train as they do alone: same losses, norms, weights and moments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.config.models.bundled import model_folder
from tests.engine.tiny_families import save_model
from tests.forked import run_ranks

# 63 tokens and 46 / 2 columns do not go into equal pieces.
TINY = {
    "vocab_size": 63, "hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "other": ("llama", {}),
    "damaged": ("llama", {}),
    "normed": ("qwen3", {}),
    "fused": ("phi3", {}),
    "one_kv_head": ("llama", {"num_key_value_heads": 1}),
}
pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("spread_worker.py")
Reports = list[dict[str, Any]]  # what each rank reports of a case
Report = Callable[..., Reports]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, (kind, changes) in MODELS.items():
        config = CONFIG_MAPPING[kind](**TINY | changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
        if name == "damaged":
            torch.nn.init.constant_(model.lm_head.weight, float("nan"))
        model.save_pretrained(folder / name)
    shutil.copytree(folder / "other", folder / "parted")
    config_file = folder / "parted/config.json"
    config_file.write_text(
        json.dumps(json.loads(config_file.read_text()) | {"tie_word_embeddings": True})
    )
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    return {name: str(folder / name) for name in (*MODELS, "parted", "absent")} | {
        "experts": save_model(folder, "qwen3_moe"),
        "routers": save_model(folder, "mixtral", **routers),
        "tied": str(model_folder("embedded")),
    }


@pytest.fixture(scope="module")
def report(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What each of two or four ranks reports of a case; fails with its traceback."""

    @cache
    def run(size: int) -> Reports:
        folder = tmp_path_factory.mktemp("ranks")
        (folder / "models.json").write_text(json.dumps(models))
        run_ranks(WORKER, size, str(folder))
        return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(size)]

    def of_case(case: str, ranks: int = 2) -> Reports:
        reports = [of_rank.get(case, {"error": "not reached"}) for of_rank in run(ranks)]
        for of_rank in reports:
            assert "error" not in of_rank, of_rank["error"]
        return reports

    return of_case


def check_alike(reports: Reports, model: str | None = None) -> dict[str, Any]:
    """The spread training ended where the lone one did, and all ranks saw the same norms."""
    reports = [of_rank[model] for of_rank in reports] if model else reports
    first = reports[0]
    assert all(other["norms"] == first["norms"] for other in reports)
    assert abs(first["learned"]) > 1e-3
    for name, limit in {"loss": 3e-6, "norm": 2e-6, "parameters": 5e-6, "moments": 1e-7}.items():
        assert first[name] <= limit, (name, first[name])
    return first


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("offload-1-2", 2), ("value-1-2", 2), ("untied-1-1", 2), ("heads-2-1", 2),
        ("gathered-2-1", 2), ("value-2-1", 2),
        ("untied-2-2", 4), ("heads-2-2", 4), ("offload-2-2", 4), ("untied-2-1", 4),
    ],
)  # fmt: skip
def test_ranks_train_as_one(report: Report, case: str, ranks: int) -> None:
    check_alike(report(case, ranks))


@pytest.mark.parametrize("case", ["tied-1-2", "tied-2-1"])
def test_tied_weights_stay_tied_and_every_rank_holds_its_share(report: Report, case: str) -> None:
    first = check_alike(report(case))
    assert first["tied"] and first["stored_share"] <= 0.55 and first["drift"] == 0.0
    # Generation settings come with the weights.
    assert [of_rank["stop"] for of_rank in report(case)] == [281, 281]


@pytest.mark.parametrize("case", ["parted-1-2", "parted-2-1"])
def test_files_that_untie_what_the_config_ties_are_followed_by_every_rank(
    report: Report, case: str
) -> None:
    assert not check_alike(report(case))["tied"]  # what is saved says so
    assert [of_rank["saved"] for of_rank in report(case)] == [True, True]


def test_gradient_checkpointing_changes_no_gradient(report: Report) -> None:
    for of_rank in report("checkpointed-1-2"):
        assert of_rank == {"gaps": [0.0, 0.0], "passes": [1, 2, 1, 2]}


def test_frozen_and_trained_weights_mix_in_a_layer(report: Report) -> None:
    first = check_alike(report("frozen-1-2"))
    assert first["trained"] == 9  # down projections with biases, two norms a layer, the last one
    assert first["pieces"]  # outside of `awake`, a pass without gradients frees what it gathered


def test_weights_that_stay_whole_train_alike_and_are_pieces_again_after(report: Report) -> None:
    reports = report("whole-1-2")
    for model in ("policy", "value", "lora"):
        check_alike(reports, model)
    assert all(of_rank["pieces"] for of_rank in reports)
    mixed = reports[0]["bfloat16"]
    assert 0 < mixed["loss"] < 2e-3 and mixed["norm"] < 1e-2


@pytest.mark.parametrize("case", ["lora-1-2", "lora-2-1"])
def test_adapters_train_alike(report: Report, case: str) -> None:
    assert check_alike(report(case))["adapters"] == 2 * 7 * 2
    check_alike(report(case), "value")


def test_adapters_of_experts_train_and_merge_alike(report: Report) -> None:
    assert check_alike(report("experts-1-2"))["merged"] <= 5e-6


def test_bfloat16_computes_in_it_and_keeps_float32_weights(report: Report) -> None:
    first = report("bfloat16-1-2")[0]
    assert first["dtypes"] == ["torch.float32"]
    for model in (first["policy"], first["value"]):
        assert 0 < model["loss"] < 2e-3 and model["norm"] < 1e-2


@pytest.mark.parametrize("case", ["spoilt-1-2", "spoilt-2-1"])
def test_a_gradient_broken_on_one_rank_stops_the_step_on_all(report: Report, case: str) -> None:
    assert report(case) == [{"moved": 0.0, "moments": 0}] * 2


@pytest.mark.parametrize("case", ["refused-1-2", "refused-2-1"])
def test_a_model_that_does_not_load_is_refused_on_all_ranks(report: Report, case: str) -> None:
    first, second = report(case)
    assert first == second
    assert "ModelError" in first["damaged"] and "not finite" in first["damaged"]
    assert "ModelError" in first["absent"] and "no model folder" in first["absent"]
    assert bool(first["one_kv_head"]) is (case == "refused-2-1")  # two ranks cannot split one head


def test_an_error_of_one_rank_is_raised_on_all_and_sums_are_exact(report: Report) -> None:
    for rank, of_rank in enumerate(report("together-1-2")):
        assert of_rank == {"results": rank, "sums": f"[{1 + 2.0**-39!r}, nan]"}


def test_a_pass_that_broke_off_leaves_a_model_that_works(report: Report) -> None:
    for of_rank in report("broken_off-1-2"):
        assert of_rank["gap"] < 1e-6


@pytest.mark.parametrize(
    "case",
    [
        "packed-1-2", "idle-1-2", "packed-2-1", "packed_whole-1-2", "packed_whole-1-1",
        "packed_whole-2-1", "routers-1-2", "reference-1-2",
    ],
)  # fmt: skip
def test_two_ranks_with_packed_rows_train_as_one_with_padded_ones(
    report: Report, case: str
) -> None:
    first = report(case)[0]
    assert first["counts"] == 0 and max(first["annotated"], first["means"]) < 2e-5, first
    assert first["weights"] < 2e-6, first


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("memory-1-2", 2),
        ("memory_copies-1-1", 2),
        ("memory_whole-1-2", 2),
        ("memory_copies-1-2", 4),
    ],
)
def test_memory_that_runs_out_on_one_rank_halves_on_all_and_changes_nothing(
    report: Report, case: str, ranks: int
) -> None:
    """The second rank runs out of memory in each place, and all end where a lone rank does."""
    reports = report(case, ranks)
    assert len(reports[0]) >= 2
    for where, first in reports[0].items():
        refused = [of_rank[where]["refused"] > 0 for of_rank in reports]
        assert refused == [rank == 1 for rank in range(ranks)]
        assert all(of_rank[where]["row_limits"] == [1.0] for of_rank in reports)
        assert max(first[name] for name in ("annotated", "counts", "means")) < 2e-5, (where, first)
        assert first["weights"] < 2e-6, (where, first)


@pytest.mark.parametrize(("case", "ranks"), [("published-1-2", 2), ("published-2-2", 4)])
def test_weights_cast_before_they_travel_are_the_same_in_half_the_bytes(
    report: Report, case: str, ranks: int
) -> None:
    plain, merged = report(case, ranks)[0]["sent"]
    assert plain[0] == 2 * plain[1] > 0
    assert merged[0] > merged[1] > plain[1]  # what is merged travels in float32


def test_a_reference_in_host_memory_comes_once_for_all_micro_batches(report: Report) -> None:
    # Home; to annotations and updates, and back.
    assert report("reference-1-2")[0]["moves"] == 1 + 2 * (2 + 2)
