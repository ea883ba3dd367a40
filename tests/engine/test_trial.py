"""The trial at the start: what it chooses, what it finds, what it tells, and what it keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.config.models.bundled import MODELS, model_folder
from ppo_cli.engine import trial
from ppo_cli.engine.batches.rows import MicroBatch
from ppo_cli.engine.cpu.lean_layers import GatedUnit
from ppo_cli.engine.models import gradient_checkpointing, policy
from ppo_cli.engine.models.attention import BY_ROWS, attend_by_rows
from ppo_cli.engine.models.small_models import shrink_config
from ppo_cli.engine.pretrained import load_config
from ppo_cli.engine.ranks import ALONE
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.engine.trial import RunMode, TrialConditions, Verdict, choose_run_mode, run_trial
from ppo_cli.errors import ModelError
from tests.settings import complete

LONG = 100_000  # rows that cross every window
RUN = TrialConditions(sampler=HFSampler, lean=True, checkpointing=True, longest_row=LONG)
CRITIC = replace(RUN, sampler=None, critic=True)
BOTH = pytest.mark.parametrize("conditions", [RUN, CRITIC], ids=["policy", "critic"])
ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
SHAPE = ENDS | {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
OLD = ENDS | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PACKED, PADDED, EAGER = RunMode("sdpa", True), RunMode("sdpa", False), RunMode("eager", False)
VERDICT = Verdict(PADDED, rejected={"packing": "its rows"})
FAMILIES: dict[str, tuple[dict[str, Any], RunMode]] = {
    "llama": (SHAPE, PACKED),
    "gpt2": (OLD, PACKED),  # learned positions
    "qwen2_moe": (SHAPE | {"num_experts": 4}, PACKED),
    "granite": (SHAPE | {"logits_scaling": 8.0}, PACKED),
    "mistral": (SHAPE | {"sliding_window": 32}, PADDED),
    "gemma2": (SHAPE, EAGER),  # capped attention
    "gemma3": ({"text_config": SHAPE | {"final_logit_softcapping": 30.0}}, PADDED),
    "gpt_oss": (SHAPE | {"num_local_experts": 4}, EAGER),  # sinks
    "bloom": (OLD, EAGER),  # slopes
}


def make_config(kind: str = "llama", **changes: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**FAMILIES[kind][0] | changes)
    return config


@pytest.mark.parametrize("kind", FAMILIES)
@BOTH
def test_the_fastest_exact_way_is_chosen(kind: str, conditions: TrialConditions) -> None:
    verdict = run_trial(make_config(kind), conditions)
    assert (verdict.mode, verdict.differences, verdict.untried) == (FAMILIES[kind][1], {}, "")


@pytest.mark.parametrize("name", MODELS)
@BOTH
def test_the_verdict_that_ships_is_that_of_a_trial(name: str, conditions: TrialConditions) -> None:
    """With the versions of constraints.txt, which BUNDLED_VERSIONS repeats; others get a trial."""
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").split()
    named = zip(("transformers", "torch"), trial.BUNDLED_VERSIONS, strict=True)
    assert {f"{package}=={version}" for package, version in named} <= set(pins)
    config = load_config(model_folder(name), "--model", False)
    for lean, recomputes in ((True, False), (False, True)):
        tried = replace(conditions, lean=lean, checkpointing=recomputes)
        assert run_trial(config, tried) == trial.BUNDLED_VERDICT
    installed = (transformers.__version__, torch.__version__.partition("+")[0])
    known = installed == trial.BUNDLED_VERSIONS
    assert trial.is_bundled(model_folder(name), conditions) == known
    assert not trial.is_bundled(model_folder(name), replace(conditions, kernel="eager"))


def test_a_state_that_is_not_attention_keeps_a_critic_from_packing() -> None:
    verdict = run_trial(CONFIG_MAPPING["mamba"](hidden_size=64, num_hidden_layers=2), CRITIC)
    assert not verdict.mode.packed and not verdict.differences


DECODE, BACKWARD, PICK = HFSampler._decode, GatedUnit.backward, MicroBatch.gather_states


def shift_positions(sampler: HFSampler, running: Any, sampling: Any) -> Any:
    starts, running.starts_R = running.starts_R, running.starts_R - 1
    try:
        return DECODE(sampler, running, sampling)
    finally:
        running.starts_R = starts


def halve_gate(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(0.5 * part for part in BACKWARD(ctx, grad))


def lose_gradient(block: Any, *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        return type(block).forward(block, *args, **options)


LEARNER = ["annotation", "update"]
MISTAKES: dict[str, tuple[Any, str, Any, list[str]]] = {
    "positions of the sampler": (HFSampler, "_decode", shift_positions, ["sampler"]),
    "a gradient": (GatedUnit, "backward", staticmethod(halve_gate), ["update"]),
    "a recomputed block": (gradient_checkpointing, "_recompute", lose_gradient, ["update"]),
    # The sampler has the whole model; annotation and update have its head.
    "no cap": (policy, "_choose_head", lambda model, _: model.get_output_embeddings(), LEARNER),
    "values of other tokens": (
        MicroBatch, "gather_states", lambda cut, states: PICK(cut, states).roll(1, 0), LEARNER,
    ),
    "values that are not finite": (
        MicroBatch, "gather_states", lambda cut, states: PICK(cut, states) * torch.nan, LEARNER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_in_its_part(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, parts = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, replacement)
    config = make_config("gemma2" if mistake == "no cap" else "llama")
    differences = run_trial(config, CRITIC if "values" in mistake else RUN).differences
    assert [*differences] == parts
    assert parts != ["update"] or "gradient of model." in differences["update"]


def test_a_mask_that_shows_other_rows_keeps_rows_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend_to_all_rows(*states: Any, **options: Any) -> Any:
        *others, mask = states
        is_packed = mask is not None and mask.dtype == torch.int32
        return attend_by_rows(*others, None if is_packed else mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, BY_ROWS, attend_to_all_rows)
    verdict = run_trial(make_config(), RUN)
    assert verdict.mode == PADDED and "annotation" in verdict.rejected["packing"]


def test_a_wrong_gradient_is_not_hidden_by_larger_ones() -> None:
    exact = {"large": torch.tensor([1000.0]), "small": torch.tensor([5.0])}
    differences: dict[str, str] = {}
    trial.compare_gradients(differences, exact | {"small": torch.tensor([5.5])}, exact)
    assert differences["update"].startswith("the gradient of small ")


def judge(
    path: Path, kind: str = "llama", changes: dict[str, Any] | None = None, **settings: Any
) -> tuple[Verdict, list[str]]:
    """The verdict of a run on a model of which the trial sees the config alone."""
    make_config(kind, **changes or {}).save_pretrained(path)
    run = complete({"model": {"path": str(path), **settings}})
    return choose_run_mode(str(path), run, ALONE, sampler=HFSampler, checkpointing=True)


@pytest.fixture(autouse=True)
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ppo-cli" / "trials"


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("gemma2", "sdpa computes something else"),
        ("gpt_oss", "transformers has no sdpa attention for this family"),
    ],
)
def test_eager_attention_is_told_with_its_reason(kind: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    padded = f"Rows of {path} are padded: packing does not suit its attention."
    assert judge(path, kind)[1] == [f"Attention of {path} is eager: {reason}.", padded]
    with pytest.raises(ModelError, match=r"^model.attn_implementation=sdpa does not.*eager"):
        judge(path, kind, attn_implementation="sdpa")
    verdict, remarks = judge(path, kind, attn_implementation="eager")
    assert verdict.mode == EAGER and remarks == [padded]


def test_packed_rows_in_eager_attention_are_chosen_where_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model"
    verdict, remarks = judge(path, "gemma2", packing=True)
    assert verdict.mode == RunMode("eager", packed=True)
    assert remarks == [f"Attention of {path} is eager: sdpa computes something else."]
    with pytest.raises(ModelError, match="attn_implementation=sdpa does not compute"):
        judge(path, "gemma2", packing=True, attn_implementation="sdpa")


def test_packing_that_was_asked_for_is_refused_where_it_is_not_exact(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be trained on packed rows"):
        judge(tmp_path, "bloom", packing=True)
    assert judge(tmp_path, "mistral", packing=True)[0].mode == PACKED  # by masks


def test_a_difference_that_remains_is_told_without_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFSampler, "_decode", shift_positions)
    with pytest.raises(ModelError, match=r"^The sampler does not compute.*vLLM") as error:
        judge(tmp_path)
    assert "lr" not in str(error.value)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[TrialConditions]:
    """The conditions of trials, each of which gives VERDICT at once."""
    tried: list[TrialConditions] = []
    monkeypatch.setattr(trial, "run_trial", lambda _, args: tried.append(args) or VERDICT)
    return tried


def test_a_trial_leaves_the_random_state_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    judge(tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("change", ["", "layers", "code", "torch", "transformers", "damaged"])
def test_a_verdict_is_kept_until_what_it_depends_on_changes(
    change: str,
    tmp_path: Path,
    verdicts: Path,
    tried: list[TrialConditions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge(tmp_path / "model")
    (file,) = verdicts.iterdir()
    if change == "code":
        monkeypatch.setattr(trial, "_digest_code", lambda: b"edited")
    elif change == "damaged":
        file.write_text("{")
    elif change in ("torch", "transformers"):
        monkeypatch.setattr(getattr(trial, change), "__version__", "0.0.0")
    changes = {"num_hidden_layers": 3} if change == "layers" else {}
    assert judge(tmp_path / "other", changes=changes)[0] == VERDICT
    assert len(tried) == 1 + bool(change)
    assert len([*verdicts.iterdir()]) == 1 + (change not in ("", "damaged"))


def test_a_trial_is_of_the_rows_and_layers_of_the_run(
    tmp_path: Path, tried: list[TrialConditions]
) -> None:
    judge(tmp_path)
    data = complete({}).data
    assert tried[0].longest_row == data.max_prompt_length + data.max_response_length
    assert tried[0].lean and tried[0].checkpointing


def test_a_model_of_which_none_can_be_built_small_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "MOST_PARAMETERS", 10)
    verdict, remarks = judge(tmp_path)
    assert verdict.mode == EAGER and "million parameters" in verdict.untried
    assert len(remarks) == 1 and "was not tried" in remarks[0]


def test_a_small_model_has_each_kind_of_layer_and_only_windows_that_rows_cross() -> None:
    def shrink(kind: str, longest_row: int = LONG, **changes: Any) -> Any:
        return shrink_config(CONFIG_MAPPING[kind](**changes), longest_row)

    gemma = shrink("gemma3_text")
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert gemma.sliding_window == 8 and gemma.hidden_size < 100
    assert shrink("gemma3_text", 1024).sliding_window == 4096
    deepseek = shrink("deepseek_v3")
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)
    assert deepseek.n_routed_experts == 4
    heads = {"hidden_size": 2048, "num_attention_heads": 16, "attention_multiplier": 1 / 128}
    granite = shrink("granite", **heads)
    assert granite.attention_multiplier * granite.hidden_size == granite.num_attention_heads
    assert shrink("qwen3_next").layer_types == ["linear_attention", "full_attention"]
    assert shrink_config(make_config(), LONG, narrow=False).hidden_size == 64
    assert json.loads(shrink_config(make_config(), LONG).to_json_string())["vocab_size"] == 64
