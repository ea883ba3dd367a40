"""What leaves an adapted model: merged weights, files that PEFT reads, tensors for samplers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppo_cli.engine.base import Sampling
from ppo_cli.engine.models import load_policy
from ppo_cli.engine.models.lora import (
    ADAPTER_WEIGHTS,
    adapt,
    adapter_tensors,
    load_adapter,
    load_merged,
    merged_tensors,
    write_adapter_config,
)
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.errors import ModelError
from ppo_cli.records import Prompt
from tests.engine.adapted_models import (
    FAMILIES,
    IDS,
    adapted,
    config,
    gathered,
    gemma,
    gpt2,
    llama,
    logits,
    qwen,
    trained,
)
from tests.rounding import assert_near

TERMS = 7 * 32 * 2  # tokens, width, layers


@pytest.mark.parametrize("make", FAMILIES)
def test_merged_weights_give_the_same_logits(make: Callable[[], Any]) -> None:
    model = trained(adapted(make))
    before = copy.deepcopy(model.state_dict())
    tensors = dict(merged_tensors(model, gathered))
    base = make()
    assert list(tensors) == [name for name, _ in base.named_parameters()]
    base.load_state_dict(tensors, strict=False)
    assert_near(logits(base), logits(model), terms=TERMS)
    assert not torch.allclose(logits(make()), logits(model), atol=1e-3)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_merging_asks_for_whole_tensors_in_one_order() -> None:
    def requests(model: Any) -> list[torch.Size]:
        seen: list[torch.Size] = []

        def full(tensor: Tensor) -> Tensor:
            seen.append(tensor.shape)
            return gathered(tensor)

        list(merged_tensors(model, full))
        return seen

    model = adapted(llama)
    assert requests(model) == requests(trained(adapted(llama)))
    assert len(requests(model)) == len(list(model.parameters()))


def test_a_sampler_takes_the_adapter_alone() -> None:
    source, target = trained(adapted(llama)), adapted(llama, seed=5)
    assert not torch.equal(logits(target), logits(source))
    load_adapter(target, {name: gathered(t) for name, t in adapter_tensors(source)})
    assert torch.equal(logits(target), logits(source))
    prompt = Prompt("p", "p", (), "", (5, 6, 7), data_source="", ground_truth="")

    def sampled(model: Any) -> tuple[int, ...]:
        sampler = HFSampler(
            model, eos_token_ids=frozenset({2}), pad_token_id=0, max_num_seqs=4,
            detokenize=lambda ids, context: "",
        )  # fmt: skip
        (rollout,) = sampler.generate([prompt], Sampling(0.0, max_tokens=12), 1)
        torch.testing.assert_close(
            torch.from_numpy(rollout.sampler_logprobs),
            sampler_view(model, prompt.token_ids + rollout.token_ids)[-len(rollout.token_ids) :],
            atol=1e-5,
            rtol=0,
        )
        return rollout.token_ids

    assert sampled(target) == sampled(source)


@torch.no_grad()
def sampler_view(model: Any, ids: tuple[int, ...]) -> Tensor:
    ids_L = torch.tensor(ids)
    scores_LV = model(input_ids=ids_L[None]).logits[0, :-1].log_softmax(-1)
    return scores_LV.gather(-1, ids_L[1:, None]).squeeze(-1)


@pytest.mark.parametrize(
    ("other", "report"),
    [
        ({"lora_rank": 4}, "is (4, "),
        ({"target_modules": ("q_proj",)}, "model.target_modules must be"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(other: dict[str, Any], report: str) -> None:
    tensors = dict(adapter_tensors(adapted(llama, **other)))
    with pytest.raises(ModelError) as error:
        load_adapter(adapted(llama), tensors)
    assert report in str(error.value)


@pytest.mark.parametrize("make", [llama, qwen, gpt2])
def test_peft_reads_what_is_saved(make: Callable[[], Any], tmp_path: Path) -> None:
    base_dir, folder = tmp_path / "base", tmp_path / "actor"
    make().save_pretrained(base_dir)
    model = trained(adapted(make))
    folder.mkdir()
    write_adapter_config(folder, model, str(base_dir))
    save_file({n: gathered(t) for n, t in adapter_tensors(model)}, folder / ADAPTER_WEIGHTS)
    report = json.loads((folder / "adapter_config.json").read_text())
    assert report["base_model_name_or_path"] == str(base_dir)
    assert report["target_modules"] == sorted(report["target_modules"])
    assert (report["r"], report["lora_alpha"], report["lora_dropout"]) == (3, 6, 0.0)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    reference = PeftModel.from_pretrained(base, folder)
    assert_near(logits(reference), logits(model), terms=TERMS)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    assert_near(logits(load_merged(base, folder)), logits(model), terms=TERMS)


def test_a_loaded_policy_keeps_its_split(tmp_path: Path) -> None:
    gemma().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    inject = adapt(config().model, 42)
    assert inject is not None
    assert inject(policy.model) is policy.model
    trained(policy.model)
    torch.testing.assert_close(policy.head(policy.hidden_BLH(IDS)), logits(policy.model))


@pytest.mark.parametrize(
    ("expected", "leaves"),
    [
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        ("q_proj", {"q_proj"}),
        (r".*\.(up|down)_proj", {"up_proj", "down_proj"}),
        ("All-Linear", {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj",
                        "gate_proj"}),
        (("self_attn.o_proj",), {"o_proj"}),
    ],
)  # fmt: skip
def test_target_modules(expected: Any, leaves: set[str]) -> None:
    names = [name for name, _ in adapter_tensors(adapted(llama, target_modules=expected))]
    assert {name.split(".")[-3] for name in names} == leaves
    assert len(names) == 2 * 2 * len(leaves)


@pytest.mark.parametrize(
    ("expected", "report"),
    [
        ("q_porj", "no module 'q_porj'. Did you mean 'q_proj'?"),
        (("q_proj", "v_prj"), "no module 'v_prj'. Did you mean 'v_proj'?"),
        ("q_proj,v_proj", "A list is written [a,b]."),
        ("*_proj", "is neither the name of a module nor a pattern"),
        ("lm_head", "lm_head, which LoRA cannot adapt. It adapts the linear"),
        (("embed_tokens",), "embed_tokens, which LoRA cannot adapt"),
        (("self_attn",), "output layer, here: down_proj, gate_proj"),
        (".*", "which LoRA cannot adapt"),
        ((), "model.target_modules is empty"),
    ],
)
def test_target_modules_that_fit_nothing(expected: Any, report: str) -> None:
    with pytest.raises(ModelError) as error:
        adapted(llama, target_modules=expected)
    assert report in str(error.value)
    assert "model.target_modules" in str(error.value)
