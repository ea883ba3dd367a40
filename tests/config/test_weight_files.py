"""What a model's folder lacks, read from its config.json and the headers of its weight files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.models.folder import folder_problem

LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "tie_word_embeddings": False}
LAYER = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.up_proj.weight", "norm.weight")
NAMES = frozenset(
    ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    + [f"model.layers.{number}.{name}" for number in range(3) for name in LAYER]
)
AGAIN = "Fetch or save the checkpoint again, or name another with --model."


def write_safetensors(file: Path, names: Iterable[str], length: int = 4) -> None:
    """Write a file in which each tensor has `length` bytes; the same numbers stand for all."""
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in names}
    ).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * length)


def problem(folder: Path, names: Iterable[str] | None, head: bool = True, **config: Any) -> str:
    config = {key: value for key, value in (LLAMA | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if names is not None:
        write_safetensors(folder / "model.safetensors", names)
    return folder_problem(folder, "--model", tokenizer=False, head=head)


def without(*fragments: str) -> frozenset[str]:
    return frozenset(name for name in NAMES if not any(word in name for word in fragments))


def renamed(change: Callable[[str], str]) -> frozenset[str]:
    return frozenset(map(change, NAMES))


@pytest.mark.parametrize(
    ("names", "fragments"),
    [
        (without("lm_head"), "missing tensors: those of the output layer, such as lm_head.weight"),
        (without("embed"), "missing tensors: those of the embedding, such as model.embed_tokens"),
        (without("layers.1.mlp"), "(missing tensors: model.layers.1.mlp.up_proj.weight)"),
        (without("layers.0.self"), "model.layers.0.self_attn.k_proj.weight, model.layers.0.self_"),
        (without("layers.1."), "(missing tensors: model.layers.1.*)"),
        (without("layers.2."), "(missing tensors: model.layers.2.*)"),
        (NAMES | {f"model.layers.3.{name}" for name in LAYER},
         "(unexpected tensors: model.layers.3.*)"),
        (renamed("module.{}".format), "unexpected tensors: module.lm_head.weight, module.model."),
        (renamed("_orig_mod.{}".format), "and 12 more)"),
        (renamed("model.{}".format), "unexpected tensors: model.lm_head.weight, model.model.embed"),
        (renamed("base_model.model.{}".format), "unexpected tensors: base_model.model.lm_head."),
    ],
)  # fmt: skip
def test_tensors_that_are_lost_or_named_otherwise(
    names: frozenset[str], fragments: str, tmp_path: Path
) -> None:
    text = problem(tmp_path, names)
    assert fragments in text
    assert text.startswith(f"The files in {tmp_path} do not fit its config.json (")
    assert text.endswith(AGAIN)


HYBRID = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (NAMES, {}),
        (without("lm_head"), {"tie_word_embeddings": True}),
        (without("lm_head"), {"tie_word_embeddings": None}),  # not mentioned
        (without("embed"), {"tie_word_embeddings": True}),
        (without("lm_head") | {"embed_out.weight"}, {}),
        (renamed(lambda name: name.removeprefix("model.")), {}),  # saved from a backbone
        (renamed(lambda name: name.replace("model.", "transformer.decoder.")), {}),
        (NAMES | {"model.layers.3.eh_proj.weight"}, {}),  # predicts further tokens
        (without("layers.1.self_attn.k"), HYBRID),  # another kind of layer
        (without("layers.2.self_attn.k"), {"num_kv_shared_layers": 1}),
        (renamed("code.{}".format), {"auto_map": {"AutoModelForCausalLM": "code.Model"}}),
        (
            renamed("thinker.{}".format) | {"vision.blocks.0.a.weight"},
            {"vision_config": {"depth": 1}},
        ),
    ],
)
def test_what_other_families_do_is_no_loss(
    names: frozenset[str], config: dict[str, Any], tmp_path: Path
) -> None:
    assert problem(tmp_path, names, **config) == ""


def test_a_critic_needs_no_output_layer(tmp_path: Path) -> None:
    assert problem(tmp_path, without("lm_head"), head=False) == ""


def test_a_folder_without_its_weights(tmp_path: Path) -> None:
    assert "There are no weights in" in problem(tmp_path, None)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", NAMES)
    assert "There are no weights in" in problem(tmp_path, None)  # without an index it is not read
    index = {"weight_map": dict.fromkeys(NAMES, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problem(tmp_path, None) == ""
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problem(tmp_path, None) == (
        f"{tmp_path} lacks 1 of its 2 weight files (model-00002-of-00002.safetensors): "
        "fetch the rest."
    )


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    assert str(tmp_path / "generation_config.json") in problem(tmp_path, NAMES)


def test_a_file_that_ends_too_soon_is_damaged(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", NAMES, length=3)
    assert "model.safetensors is damaged or cut off (it has " in problem(tmp_path, None)
