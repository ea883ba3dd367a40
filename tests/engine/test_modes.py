"""Gradient checkpointing in evaluation mode, the only one there is: nothing is drawn at random.

That models sample, annotate and train without dropout is in `test_model_families.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ppo_cli.engine.models import load_policy
from ppo_cli.engine.models.gradient_checkpointing import checkpoint_blocks
from ppo_cli.errors import ModelError
from tests.engine.tiny_families import make_model, save_model
from tests.marks import quick_only

NOISY = ("llama", "gpt2", "opt", "xglm", "mixtral", "phimoe", "gemma4_text")
KINDS = (*NOISY, "qwen3_moe", "qwen3_next", "falcon_mamba", "gpt_oss")


def test_a_model_keeps_the_dropout_of_its_config(tmp_path: Path) -> None:
    policy = load_policy(save_model(tmp_path, "gpt2"))
    policy.model.save_pretrained(tmp_path / "saved")
    saved = AutoConfig.from_pretrained(tmp_path / "saved")
    assert [saved.resid_pdrop, saved.embd_pdrop, saved.attn_pdrop] == [0.1, 0.1, 0.1]


@pytest.mark.parametrize("kind", quick_only(KINDS, "llama", "mixtral", "falcon_mamba"))
def test_blocks_that_are_computed_again_change_no_gradient(kind: str) -> None:
    ids = torch.randint(5, 250, (3, 17), generator=torch.Generator().manual_seed(1))

    def differentiate(model: Any) -> tuple[dict[str, torch.Tensor], int]:
        """Gradients, and bytes that were kept for them."""
        sizes: dict[int, int] = {}

        def hold(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return gradients, sum(sizes.values())

    plain, checkpointed = make_model(kind), make_model(kind)
    checkpoint_blocks(checkpointed)
    (expected, most_bytes), (actual, bytes_kept) = map(differentiate, (plain, checkpointed))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert bytes_kept < 0.8 * most_bytes


class OwnBlock(torch.nn.Linear):
    calls = 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        OwnBlock.calls += 1
        return super().forward(states)


def test_blocks_that_a_models_own_code_names_are_computed_again() -> None:
    model: Any = torch.nn.Sequential(OwnBlock(4, 4))
    model._no_split_modules = ["OwnBlock"]
    checkpoint_blocks(model)
    model(torch.ones(1, 4)).sum().backward()
    assert OwnBlock.calls == 2


def test_a_model_without_blocks_is_refused() -> None:
    model = make_model("llama")
    model.model.layers = torch.nn.ModuleList()
    model._no_split_modules = None
    with pytest.raises(ModelError, match=r"model\.enable_gradient_checkpointing=false"):
        checkpoint_blocks(model)
