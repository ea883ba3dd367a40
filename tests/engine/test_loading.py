"""Files that do not hold what their config.json describes, and files that rightly hold more."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from families.configs import build_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_policy, load_tokenizer
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.errors import ModelError
from tests.settings import complete


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the weight file of a model after `change` has edited its tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def wrap(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


def lose_expert(tensors: dict[str, Tensor]) -> None:
    """Of both layers, so that the headers agree."""
    for layer in range(2):
        tensors.pop(f"model.layers.{layer}.block_sparse_moe.experts.1.w1.weight")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing tensors: lm_head.weight)"),
        (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight)"),
        (wrap, "(unexpected tensors: module.lm_head.weight, "),
        (lambda t: t.update(other=torch.zeros(1)), "unexpected tensors: other)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(8)}),
            "tensors of another shape: model.norm.weight [8] instead of [64])",
        ),
        (lose_expert, "model.layers.1.mlp.experts.gate_up_proj"),
    ],
    ids=["no head", "no norm", "wrapped", "one too many", "another shape", "no expert"],
)
def test_weights_that_do_not_fit_the_config_are_named(
    change: Callable[[dict[str, Tensor]], object], named: str, tmp_path: Path
) -> None:
    build_model("mixtral" if change is lose_expert else "llama").save_pretrained(tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(ModelError, match=re.escape(named)):
        load_policy(str(tmp_path))
    with nullcontext() if "lm_head.weight)" in named else pytest.raises(ModelError):
        load_value_model(str(tmp_path))


def test_buffers_that_older_versions_saved_are_no_weights(tmp_path: Path) -> None:
    build_model("gpt_neo").save_pretrained(tmp_path)
    buffers = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    masks = {
        f"transformer.h.{layer}.attn.attention.{name}": buffer.clone()
        for layer in range(2)
        for name, buffer in buffers.items()
    }
    change_weights(tmp_path, lambda t: t.update(masks))
    load_policy(str(tmp_path), attn_implementation="eager")


def test_a_hub_name_without_a_hub_is_told() -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing could not be loaded.*--model"):
        load_policy("nobody/nothing")


# A head under another name; towers for images.
@pytest.mark.parametrize("family", ["gpt_neox", "llama4"])
def test_what_a_text_part_or_a_critic_leaves_in_the_files_is_no_fault(
    family: str, tmp_path: Path
) -> None:
    build_model(family).save_pretrained(tmp_path)
    load_policy(str(tmp_path))
    load_value_model(str(tmp_path))
    change_weights(tmp_path, lambda t: t.update({"v_head.summary.weight": torch.zeros(1, 16)}))
    for load in (load_policy, load_value_model):
        with pytest.raises(ModelError, match=r"unexpected tensors: v_head.summary.weight\)"):
            load(str(tmp_path))


def test_layers_that_predict_further_ahead_are_no_fault(tmp_path: Path) -> None:
    build_model("glm4_moe", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    for layer in (2, 3):
        added = f"model.layers.{layer}.eh_proj.weight"
        change_weights(tmp_path, lambda t, name=added: t.update({name: torch.zeros(2)}))
        with nullcontext() if layer == 2 else pytest.raises(ModelError, match=re.escape(added)):
            load_policy(str(tmp_path))


def test_a_generation_config_that_transformers_does_not_load_is_named(tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"cache_implementation": "weird"}')
    with pytest.raises(ModelError, match=r"generation_config.json that cannot be used.*\(weird\)"):
        load_policy(str(tmp_path))


def test_a_reference_is_named_by_its_setting(tmp_path: Path) -> None:
    shutil.copytree(model_folder("embedded"), tmp_path / "model")
    change_weights(tmp_path / "model", lambda t: t.update(other=torch.zeros(1)))
    config = complete({
        "model": {"path": "embedded"}, "ref": {"path": str(tmp_path / "model")},
        "actor": {"use_kl_loss": True},
    })  # fmt: skip
    with pytest.raises(ModelError, match=r"unexpected tensors: other\).* --ref_model\.$"):
        Learner(config, load_tokenizer(model_folder("embedded")), total_steps=1)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no model_type.* --ref_model\.$"):
        Learner(config, load_tokenizer(model_folder("embedded")), total_steps=1)
