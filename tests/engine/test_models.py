"""Models that load, and models that do not, each in one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families.configs import build_model

from ppo_cli.engine.models import load_policy, stop_token_ids
from ppo_cli.engine.models.policy import OwnHead, split_model, use_float32_head
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.errors import ModelError

# Families, and whether something is done to the logits behind their output layer.
OUTPUTS = {
    "gemma2": True,  # a cap
    "cohere": True,  # a scale
    "granite": True,  # a division
    "opt": False,  # a projection before the output layer
    "llama4_text": False,  # names of tensors without a prefix
    "llama": False,
}


@pytest.mark.parametrize("family", OUTPUTS)
def test_backbone_and_head_give_the_models_own_logits(family: str, tmp_path: Path) -> None:
    """A model without weights, as ranks build it, chooses the same head."""
    build_model(family).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    ids = torch.randint(1, 60, (2, 7))
    torch.testing.assert_close(
        policy.head(policy.hidden_BLH(ids)), policy.model(input_ids=ids).logits
    )
    for other in (policy, load_policy(str(tmp_path), empty=True)):
        assert isinstance(other.head, OwnHead) == OUTPUTS[family]


def test_the_head_gets_last_states_of_rows_without_gaps() -> None:
    model = build_model("llama")
    layer, ids = split_model(model).model.get_output_embeddings(), torch.arange(10).view(2, 5)
    gaps = []
    layer.register_forward_hook(lambda _, states, __: gaps.append(not states[0].is_contiguous()))
    last = model(ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, model(ids).logits[:, -1:])
    assert gaps == [False, False]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = build_model("llama")
    torch.nn.init.constant_(model.get_input_embeddings().weight, float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"not finite.*damaged \(model.embed_tokens.weight\)"):
        load_policy(str(tmp_path))


def test_weights_saved_in_bfloat16_are_trained_in_float32(tmp_path: Path) -> None:
    build_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in load_policy(str(tmp_path)).model.parameters()} == {torch.float32}
    assert {p.dtype for p in load_value_model(str(tmp_path)).model.parameters()} == {torch.float32}


def test_all_stop_tokens_count() -> None:
    model = build_model("llama")
    model.generation_config.eos_token_id = [5, 6]
    assert stop_token_ids(model, SimpleNamespace(eos_token_id=2)) == {2, 5, 6}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_in_float32_are_products_of_rounded_operands(family: str, tmp_path: Path) -> None:
    build_model(family).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    layer = policy.model.get_output_embeddings()
    states = torch.randn(5, layer.in_features, requires_grad=True)
    plain = policy.head(states)
    use_float32_head(policy.model, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = policy.head(states)
    logits[:, 3].sum().backward()
    rounded = [x.detach().bfloat16().float() for x in (states, layer.weight)]
    if family == "llama":  # gemma2 caps its logits
        torch.testing.assert_close(logits, rounded[0] @ rounded[1].T)
        torch.testing.assert_close(layer.weight.grad[3], rounded[0].sum(0).bfloat16().float())
    assert logits.dtype == torch.float32
    assert 0 < (logits - plain).abs().max() < 0.05
    with pytest.raises(ModelError, match="a Float32Head, not a plain linear layer"):
        use_float32_head(policy.model, torch.bfloat16)
