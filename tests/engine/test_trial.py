"""The trial at the start: what it chooses, what it finds, what it tells, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
)

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine import trial
from ppo_cli.engine.batches.rows import MicroBatch
from ppo_cli.engine.cpu.lean_layers import GatedUnit
from ppo_cli.engine.models import gradient_checkpointing, policy
from ppo_cli.engine.models.attention import BY_ROWS, attend_by_rows
from ppo_cli.engine.models.loading import load_config
from ppo_cli.engine.models.policy import OwnHead
from ppo_cli.engine.models.small_models import shrink_config
from ppo_cli.engine.ranks import ALONE
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.engine.trial import RunMode, TrialConditions, Verdict, choose_run_mode, run_trial
from ppo_cli.errors import ModelError

LONG = 100_000  # rows that cross every window
RUN = TrialConditions(sampler=HFSampler, lean=True, checkpointing=True, longest_row=LONG)
CRITIC = replace(RUN, sampler=None, critic=True)
SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
PACKED, PADDED, EAGER = RunMode("sdpa", True), RunMode("sdpa", False), RunMode("eager", False)
ENDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}


def llama() -> PreTrainedConfig:
    return LlamaConfig(**SHAPE, **ENDS)


FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], RunMode]] = {
    "plain": (llama, PACKED),
    "learned positions": (lambda: GPT2Config(n_embd=64, n_layer=2, n_head=4, **ENDS), PACKED),
    "experts": (lambda: Qwen2MoeConfig(**SHAPE, num_experts=4, **ENDS), PACKED),
    "scaled logits": (lambda: GraniteConfig(**SHAPE, logits_scaling=8.0, **ENDS), PACKED),
    "window": (lambda: MistralConfig(**SHAPE, sliding_window=32, **ENDS), PADDED),
    "capped attention": (lambda: Gemma2Config(**SHAPE, **ENDS), EAGER),
    "logits capped in a part": (
        lambda: Gemma3Config(
            text_config=Gemma3TextConfig(**SHAPE, final_logit_softcapping=30.0, **ENDS)
        ),
        PADDED,
    ),
    "sinks": (lambda: GptOssConfig(**SHAPE, num_local_experts=4, **ENDS), EAGER),
    "slopes": (lambda: BloomConfig(hidden_size=64, n_layer=2, n_head=4, **ENDS), EAGER),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("conditions", [RUN, CRITIC], ids=["policy", "critic"])
def test_the_fastest_exact_way_is_chosen(name: str, conditions: TrialConditions) -> None:
    build, mode = FAMILIES[name]
    verdict = run_trial(build(), conditions)
    assert (verdict.mode, verdict.differences, verdict.untried) == (mode, {}, "")


@pytest.mark.parametrize("conditions", [RUN, CRITIC], ids=["policy", "critic"])
def test_the_verdict_that_ships_is_that_of_a_trial(conditions: TrialConditions) -> None:
    """With the versions that are installed here: edit BUNDLED_VERSIONS with constraints.txt."""
    config = load_config(model_folder("embedded"), "--model", False)
    for lean, recomputes in ((True, False), (False, True)):
        tried = replace(conditions, lean=lean, checkpointing=recomputes)
        assert run_trial(config, tried) == trial.BUNDLED_VERDICT
    assert trial._is_bundled(model_folder("embedded"), conditions)
    assert not trial._is_bundled(model_folder("embedded"), replace(conditions, kernel="eager"))


def test_a_state_that_is_not_attention_keeps_a_critic_from_packing() -> None:
    verdict = run_trial(MambaConfig(hidden_size=64, num_hidden_layers=2), CRITIC)
    assert not verdict.mode.packed and not verdict.differences


def shift_positions(sampler: HFSampler, running: Any, sampling: Any) -> Any:
    starts, running.starts_R = running.starts_R, running.starts_R - 1
    try:
        return DECODE(sampler, running, sampling)
    finally:
        running.starts_R = starts


DECODE = HFSampler._decode


def attend_to_all_rows(*states: Any, **options: Any) -> Any:
    *others, mask = states
    is_packed = mask is not None and mask.dtype == torch.int32
    return attend_by_rows(*others, None if is_packed else mask, **options)


def halve_gate(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return tuple(0.5 * part for part in BACKWARD(ctx, grad))


BACKWARD = GatedUnit.backward


def test_a_wrong_position_of_the_sampler_is_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFSampler, "_decode", shift_positions)
    assert [*run_trial(llama(), RUN).differences] == ["sampler"]


def test_a_mask_that_shows_other_rows_keeps_rows_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    monkeypatch.setitem(AttentionInterface._global_mapping, BY_ROWS, attend_to_all_rows)
    verdict = run_trial(llama(), RUN)
    assert verdict.mode == PADDED and "annotation" in verdict.rejected["packing"]


def test_a_gradient_that_is_wrong_is_the_updates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedUnit, "backward", staticmethod(halve_gate))
    differences = run_trial(llama(), RUN).differences
    assert [*differences] == ["update"] and "gradient of model." in differences["update"]


def test_blocks_are_tried_as_they_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_gradient(block: Any, *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            return type(block).forward(block, *args, **options)

    monkeypatch.setattr(gradient_checkpointing, "_recompute", lose_gradient)
    assert [*run_trial(llama(), RUN).differences] == ["update"]


def test_logits_without_their_cap_are_the_learners_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler has the whole model; annotation and update have its head."""
    monkeypatch.setattr(policy, "_choose_head", lambda model, _: model.get_output_embeddings())
    config = Gemma2Config(**SHAPE, **ENDS)
    assert [*run_trial(config, RUN).differences] == ["annotation", "update"]
    monkeypatch.undo()
    assert isinstance(policy.split_model(trial._build(config, "eager", RUN).model).head, OwnHead)


@pytest.mark.parametrize(
    "spoil",
    [lambda values: values.roll(1, 0), lambda values: values * float("nan")],
    ids=["of other tokens", "not finite"],
)
def test_wrong_values_are_found_out(
    spoil: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatch, "gather_states", lambda cut, states: spoil(PICK(cut, states)))
    assert [*run_trial(llama(), CRITIC).differences] == ["annotation", "update"]


PICK = MicroBatch.gather_states


def judge(path: Path, config: PreTrainedConfig, **settings: Any) -> tuple[Verdict, list[str]]:
    """The verdict of a run on a model of which the trial sees the config alone."""
    config.save_pretrained(path)
    run = Config.model_validate({"model": {"path": str(path), **settings}})
    return choose_run_mode(str(path), run, ALONE, sampler=HFSampler, checkpointing=True)


@pytest.fixture(autouse=True)
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ppo-cli" / "trials"


def test_a_kernel_that_computes_something_else_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("capped attention", "sinks"):
        config = FAMILIES[name][0]()
        with pytest.raises(ModelError, match=r"^model.attn_implementation=sdpa does not.*eager"):
            judge(tmp_path / name, config, attn_implementation="sdpa")
    verdict, remarks = judge(tmp_path / "eager", config, attn_implementation="eager")
    assert verdict.mode == EAGER and not any("Attention" in remark for remark in remarks)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("capped attention", "sdpa computes something else"),
        ("sinks", "transformers has no sdpa attention for this family"),
    ],
)
def test_eager_attention_is_told_with_its_reason(name: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    _, remarks = judge(path, FAMILIES[name][0]())
    assert remarks == [
        f"Attention of {path} is eager: {reason}.",
        f"Rows of {path} are padded: packing does not suit its attention.",
    ]  # fmt: skip


def test_packed_rows_in_eager_attention_are_chosen_where_asked_for(tmp_path: Path) -> None:
    path, config = tmp_path / "model", FAMILIES["capped attention"][0]()
    verdict, remarks = judge(path, config, packing=True)
    assert verdict.mode == RunMode("eager", packed=True)
    assert remarks == [f"Attention of {path} is eager: sdpa computes something else."]
    with pytest.raises(ModelError, match="attn_implementation=sdpa does not compute"):
        judge(path, config, packing=True, attn_implementation="sdpa")


def test_packing_that_was_asked_for_is_refused_where_it_is_not_exact(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be trained on packed rows"):
        judge(tmp_path / "model", FAMILIES["slopes"][0](), packing=True)
    verdict, _ = judge(tmp_path / "window", FAMILIES["window"][0](), packing=True)
    assert verdict.mode == PACKED  # by masks


def test_a_difference_that_remains_is_told_without_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFSampler, "_decode", shift_positions)
    with pytest.raises(ModelError, match=r"^The sampler does not compute.*vLLM") as error:
        judge(tmp_path / "model", llama())
    assert "lr" not in str(error.value)


def test_a_verdict_is_kept_until_the_config_or_our_code_changes(
    tmp_path: Path, verdicts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = torch.random.get_rng_state()
    first, _ = judge(tmp_path / "model", llama())
    assert torch.equal(state, torch.random.get_rng_state())
    tried = []
    monkeypatch.setattr(trial, "run_trial", lambda *_: tried.append(1) or Verdict(PACKED))
    assert judge(tmp_path / "other", llama())[0] == first and not tried
    judge(tmp_path / "longer", LlamaConfig(**{**SHAPE, "num_hidden_layers": 3}, **ENDS))
    monkeypatch.setattr(trial, "_digest_code", lambda: b"edited")
    judge(tmp_path / "model", llama())
    assert len(tried) == 2 and len([*verdicts.iterdir()]) == 3
    next(verdicts.iterdir()).write_text("{")
    for file in verdicts.iterdir():
        file.write_text("{")
    judge(tmp_path / "model", llama())
    assert len(tried) == 3


def test_a_wrong_gradient_is_not_hidden_by_larger_ones() -> None:
    exact = {"large": torch.tensor([1000.0]), "small": torch.tensor([5.0])}
    differences: dict[str, str] = {}
    trial._compare_gradients(differences, exact | {"small": torch.tensor([5.5])}, exact)
    assert differences["update"].startswith("the gradient of small ")


def test_a_trial_is_of_the_rows_and_layers_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[TrialConditions] = []
    monkeypatch.setattr(
        trial, "run_trial", lambda _, conditions: tried.append(conditions) or Verdict(PACKED)
    )
    judge(tmp_path / "model", llama())
    data = Config().data
    assert tried[0].longest_row == data.max_prompt_length + data.max_response_length
    assert tried[0].lean and tried[0].checkpointing


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_a_verdict_is_of_the_versions_that_were_tried(
    library: str, tmp_path: Path, verdicts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "run_trial", lambda *_: Verdict(PACKED))
    judge(tmp_path / "model", llama())
    monkeypatch.setattr(getattr(trial, library), "__version__", "0.0.0")
    judge(tmp_path / "model", llama())
    assert len([*verdicts.iterdir()]) == 2


def test_a_model_of_which_none_can_be_built_small_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "MOST_PARAMETERS", 10)
    verdict, remarks = judge(tmp_path / "model", llama())
    assert verdict.mode == EAGER and "million parameters" in verdict.untried
    assert len(remarks) == 1 and "was not tried" in remarks[0]


def test_a_small_model_has_each_kind_of_layer_and_only_windows_that_rows_cross() -> None:
    shrink = shrink_config
    gemma = shrink(Gemma3TextConfig(), LONG)
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert gemma.sliding_window == 8 and gemma.hidden_size < 100
    assert shrink(Gemma3TextConfig(), 1024).sliding_window == 4096
    deepseek = shrink(DeepseekV3Config(), LONG)
    assert (deepseek.num_hidden_layers, deepseek.first_k_dense_replace) == (2, 1)
    assert deepseek.n_routed_experts == 4
    heads = {"hidden_size": 2048, "num_attention_heads": 16, "attention_multiplier": 1 / 128}
    granite = shrink(GraniteConfig(**heads), LONG)
    assert granite.attention_multiplier * granite.hidden_size == granite.num_attention_heads
    hybrid = shrink(Qwen3NextConfig(), LONG)
    assert hybrid.layer_types == ["linear_attention", "full_attention"]
    assert shrink(llama(), LONG, narrow=False).hidden_size == 64
    assert json.loads(shrink(llama(), LONG).to_json_string())["vocab_size"] == 64
