"""Models spread over ranks train as they do alone: same losses, norms, weights and moments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ppo_cli.config.models.bundled import model_folder
from tests.engine.spread_training import STEPS
from tests.engine.tiny_families import save_model
from tests.forked import run_ranks

# 63 tokens and 46 / 2 columns do not go into equal pieces.
TINY = {
    "vocab_size": 63, "hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 1} | {
    "eos_token_id": 2
}
pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("spread_worker.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    commands = {
        "untied": LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
        "other": LlamaForCausalLM(LlamaConfig(**TINY)),
        "damaged": LlamaForCausalLM(LlamaConfig(**TINY)),
        "normed": Qwen3ForCausalLM(Qwen3Config(**TINY)),
        "fused": Phi3ForCausalLM(Phi3Config(**TINY)),
        "one_kv_head": LlamaForCausalLM(LlamaConfig(**TINY | {"num_key_value_heads": 1})),
        "no_plan": GPT2LMHeadModel(GPT2Config(**SMALL)),
    }
    torch.nn.init.constant_(commands["damaged"].lm_head.weight, float("nan"))
    for bias in (
        n for m in commands.values() for name, n in m.named_parameters() if "bias" in name
    ):
        torch.nn.init.normal_(bias, std=0.1)
    for name, model in commands.items():
        model.save_pretrained(folder / name)
    shutil.copytree(folder / "other", folder / "parted")
    config = json.loads((folder / "parted/config.json").read_text())
    (folder / "parted/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return {name: str(folder / name) for name in (*commands, "parted")} | {
        "experts": save_model(folder, "qwen3_moe"),
        "routers": save_model(
            folder, "mixtral", output_router_logits=True, router_aux_loss_coef=0.3
        ),
        "tied": str(model_folder("embedded")),
        "absent": str(folder / "absent"),
    }


def train_spread(size: int, folder: Path, models: dict[str, str]) -> list[dict[str, Any]]:
    """What each rank found."""
    (folder / "models.json").write_text(json.dumps(models))
    run_ranks(WORKER, size, str(folder))
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def two(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train_spread(2, tmp_path_factory.mktemp("two"), models)


@pytest.fixture(scope="module")
def four(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train_spread(4, tmp_path_factory.mktemp("four"), models)


def of_case(ranks: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    """What each rank found in a case; its traceback if it failed there."""
    reports = [rank.get(case) for rank in ranks]
    for rank_report in reports:
        assert rank_report is not None and "error" not in rank_report, (rank_report or {}).get(
            "error", "not reached"
        )
    return reports  # type: ignore[return-value]


def check_alike(ranks: list[dict[str, Any]], case: str, model: str | None = None) -> dict[str, Any]:
    """The spread training ended where the lone one did, and all ranks saw the same norms."""
    reports = of_case(ranks, case)
    reports = [rank_report[model] for rank_report in reports] if model else reports
    first = reports[0]
    assert all(other["norms"] == first["norms"] for other in reports)
    assert abs(first["learned"]) > 1e-3
    for what, limit in {"loss": 3e-6, "norm": 2e-6, "parameters": 5e-6, "moments": 1e-7}.items():
        assert first[what] <= limit, (case, what, first[what])
    return first


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("offload_case-1-2", id="parameters in host memory"),
        pytest.param("value_case-1-2", id="a value model"),
        pytest.param("untied_case-1-1", id="two replicas"),
        pytest.param("heads_case-2-1", id="tensor parallel, norms over heads"),
        pytest.param("gathered_case-2-1", id="tensor parallel, fused projections"),
        pytest.param("value_case-2-1", id="tensor parallel, a value model"),
    ],
)
def test_two_ranks_train_as_one(two: list[dict[str, Any]], case: str) -> None:
    check_alike(two, case)


@pytest.mark.parametrize("case", ["tied_case-1-2", "tied_case-2-1"])
def test_tied_weights_stay_tied_and_every_rank_holds_its_share(
    two: list[dict[str, Any]], case: str
) -> None:
    reports = check_alike(two, case)
    assert reports["tied"] and reports["held"] <= 0.55
    assert reports["drift"] == 0.0
    assert reports["stop"] == 281  # generation settings come with the weights
    assert of_case(two, case)[1]["stop"] == 281


@pytest.mark.parametrize("case", ["parted_case-1-2", "parted_case-2-1"])
def test_files_that_untie_what_the_config_ties_are_followed_by_every_rank(
    two: list[dict[str, Any]], case: str
) -> None:
    assert not check_alike(two, case)["tied"]  # what is saved says so
    assert [reports["saved"] for reports in of_case(two, case)] == [True, True]


@pytest.mark.parametrize("case", ["tied_case-1-2", "tied_case-2-1"])
def test_whole_weights_and_moments_go_back_into_pieces(
    two: list[dict[str, Any]], case: str
) -> None:
    for reports in of_case(two, case):
        back = reports["put_back"]
        assert back["parameters"] == back["moments"] == 0.0
        assert "no whole tensor of shape (282, 128)" in back["refused"]


def test_gradient_checkpointing_changes_no_gradient(two: list[dict[str, Any]]) -> None:
    for reports in of_case(two, "checkpointed_case-1-2"):
        assert reports == {"gaps": [0.0, 0.0], "passes": [1, 2, 1, 2]}


def test_frozen_and_trained_weights_mix_in_a_layer(two: list[dict[str, Any]]) -> None:
    reports = check_alike(two, "frozen_case-1-2")
    assert reports["trained"] == 9  # down projections with biases, two norms a layer, the last one
    assert reports["pieces"]  # outside of `awake`, a pass without gradients frees what it gathered


def test_weights_that_stay_whole_are_gathered_and_reduced_once_a_step(
    two: list[dict[str, Any]],
) -> None:
    for model in ("policy", "value", "lora"):
        check_alike(two, "whole_case-1-2", model)
    for reports in of_case(two, "whole_case-1-2"):
        assert reports["told"] == dict.fromkeys(("gathers", "reductions"), STEPS * reports["parts"])
        assert reports["pieces"]
    mixed = of_case(two, "whole_case-1-2")[0]["bfloat16"]
    assert 0 < mixed["loss"] < 2e-3 and mixed["norm"] < 1e-2


@pytest.mark.parametrize("case", ["lora_case-1-2", "lora_case-2-1"])
def test_adapters_train_alike_and_the_reference_is_asked_inside(
    two: list[dict[str, Any]], case: str
) -> None:
    reports = check_alike(two, case)
    assert reports["adapters"] == 2 * 7 * 2
    spread, alone = reports["kls"]
    assert spread == pytest.approx(alone, rel=1e-5) and alone[0] > 0
    check_alike(two, case, "value")


def test_adapters_of_experts_train_and_merge_alike(two: list[dict[str, Any]]) -> None:
    assert check_alike(two, "experts_case-1-2")["merged"] <= 5e-6


def test_a_reference_of_its_own_is_asked_inside(two: list[dict[str, Any]]) -> None:
    spread, alone = of_case(two, "nested_case-1-2")[0]["kls"]
    assert spread == pytest.approx(alone, rel=1e-5) and alone[0] > 0


def test_bfloat16_computes_in_it_and_keeps_float32_weights(two: list[dict[str, Any]]) -> None:
    reports = of_case(two, "bfloat16_case-1-2")[0]
    assert reports["dtypes"] == ["torch.float32"]
    for model in (reports["policy"], reports["value"]):
        assert 0 < model["loss"] < 2e-3 and model["norm"] < 1e-2


@pytest.mark.parametrize("case", ["spoilt_case-1-2", "spoilt_case-2-1"])
def test_a_gradient_broken_on_one_rank_stops_the_step_on_all(
    two: list[dict[str, Any]], case: str
) -> None:
    for reports in of_case(two, case):
        assert reports == {"moved": 0.0, "moments": 0}


def test_a_model_that_does_not_load_is_told_on_all_ranks(two: list[dict[str, Any]]) -> None:
    first, second = of_case(two, "refused_case-1-2")
    assert first == second
    assert "ModelError" in first["damaged"] and "not finite" in first["damaged"]
    assert "ModelError" in first["absent"] and "no model folder" in first["absent"]


def test_a_pass_that_broke_off_leaves_a_model_that_works(two: list[dict[str, Any]]) -> None:
    for reports in of_case(two, "broken_off_case-1-2"):
        assert reports["failed"] == 2 and reports["gap"] < 1e-6


@pytest.mark.parametrize(
    "case",
    [
        "packed_case-1-2", "idle_case-1-2", "packed_case-2-1",
        "packed_whole_case-1-2", "packed_whole_case-1-1", "packed_whole_case-2-1",
        "routers_case-1-2",
    ],
)  # fmt: skip
def test_two_ranks_with_packed_rows_train_as_one_with_padded_ones(
    two: list[dict[str, Any]], case: str
) -> None:
    reports = of_case(two, case)[0]
    assert reports["counts"] == 0 and max(reports["annotated"], reports["means"]) < 2e-5, reports
    assert reports["weights"] < 2e-6, reports


@pytest.mark.parametrize(
    "case", ["memory_case-1-2", "memory_copies_case-1-1", "memory_whole_case-1-2"]
)
def test_memory_that_runs_out_on_one_rank_halves_on_all_and_changes_nothing(
    two: list[dict[str, Any]], case: str
) -> None:
    check_halving(of_case(two, case))


def test_memory_that_runs_out_in_one_of_two_copies_in_pieces_halves_on_all(
    four: list[dict[str, Any]],
) -> None:
    check_halving(of_case(four, "memory_copies_case-1-2"))


def check_halving(ranks: list[dict[str, Any]]) -> None:
    """The second rank ran out of memory in each place, and all ended where a lone rank does."""
    assert len(ranks[0]) >= 2
    for where, first in ranks[0].items():
        assert [rank[where]["refused"] > 0 for rank in ranks] == [n == 1 for n in range(len(ranks))]
        assert all(rank[where]["held"] == [1.0] for rank in ranks)
        figures = [first[name] for name in ("annotated", "counts", "means", "weights")]
        assert max(figures) < 2e-5 and first["weights"] < 2e-6, (where, first)


def test_weights_cast_before_they_travel_are_the_same_in_half_the_bytes(
    two: list[dict[str, Any]], four: list[dict[str, Any]]
) -> None:
    for ranks, case in ((two, "published_case-1-2"), (four, "published_case-2-2")):
        plain, merged = of_case(ranks, case)[0]["sent"]
        assert plain[0] == 2 * plain[1] > 0
        assert merged[0] > merged[1] > plain[1]  # what is merged travels in float32


def test_a_reference_in_host_memory_comes_once_for_all_micro_batches(
    two: list[dict[str, Any]],
) -> None:
    reports = of_case(two, "reference_case-1-2")[0]
    assert reports.pop("moves") == 1 + 2 * (2 + 2)  # home; to annotations and updates, and back
    assert reports["counts"] == 0 and max(reports["annotated"], reports["means"]) < 2e-5, reports


def test_four_ranks_train_as_one(four: list[dict[str, Any]]) -> None:
    for case in ("untied_case-2-2", "heads_case-2-2", "offload_case-2-2", "untied_case-2-1"):
        check_alike(four, case)


@pytest.mark.parametrize("case", ["untied_case-2-2", "untied_case-2-1"])
def test_whole_tensors_go_back_where_two_axes_cut_the_same(
    four: list[dict[str, Any]], case: str
) -> None:
    for reports in of_case(four, case):
        assert reports["put_back"]["parameters"] == reports["put_back"]["moments"] == 0.0
