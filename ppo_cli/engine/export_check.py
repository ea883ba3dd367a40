"""Compares what an exported folder computes with the checkpoint that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppo_cli.engine.models.loading import load_weights
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.pretrained import load_config
from ppo_cli.errors import ModelError
from ppo_cli.machine.memory import host_memory

TOKENS = 65  # of the row that is compared: 64 log-probs
LIMIT = 1e-3  # nats; the order of additions in memory explains less
# Larger models would take minutes to load twice, or more memory than other programs leave.
MOST_PARAMETERS = 10_000_000_000
MEMORY_SHARE = 0.8


def load_whole_model(
    path: str, flag: str, *, critic: bool, trust_remote_code: bool, what: str = "base model"
) -> Any:
    """Load a model in float32; eager attention of critics exists in all families."""
    if critic:
        return load_value_model(
            path, trust_remote_code=trust_remote_code, attn_implementation="eager", flag=flag
        ).model
    model, _ = load_weights(
        AutoModelForCausalLM,
        path,
        what,
        flag,
        config=load_config(path, flag, trust_remote_code),
        trust_remote_code=trust_remote_code,
    )
    return model


@torch.no_grad()
def compute_outputs(model: Any) -> Tensor:
    """Return the log-probs of a fixed row of tokens, or a critic's values of it."""
    config = model.config.get_text_config()
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    # Placeholders of images and the like are at the end of vocabularies.
    generator = torch.Generator().manual_seed(0)
    ids_1L = torch.randint(max(config.vocab_size // 2, 1), (1, length), generator=generator)
    logits_1LV: Tensor = model(input_ids=ids_1L, use_cache=False).logits.float()
    if logits_1LV.shape[-1] == 1:
        return logits_1LV.flatten()
    logprobs_1LV = logits_1LV[:, :-1].log_softmax(-1)
    return logprobs_1LV.gather(-1, ids_1L[:, 1:, None]).flatten()


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round a model's weights to a dtype in place; it computes in float32 as before."""
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(dtype))


def limit_of_check(parameters: int) -> str:
    """Return why a model of this size is not compared; empty if it is."""
    if parameters > MOST_PARAMETERS:
        return f"it has more than {MOST_PARAMETERS // 10**9} billion parameters"
    if 4 * parameters > MEMORY_SHARE * host_memory():
        return f"in float32 it takes {4 * parameters / 1e9:.0f} GB of memory, too much here"
    return ""


def compare_outputs(
    out: Path, exact: Tensor, expected: Tensor, *, critic: bool, trust_remote_code: bool
) -> str:
    """Load the written folder, and return a sentence about what it computes.

    `exact` are the outputs of the checkpoint, `expected` those with weights rounded to the dtype
    of the folder. Raises ModelError if the folder computes others.
    """
    model = load_whole_model(
        str(out), "--out", critic=critic, trust_remote_code=trust_remote_code, what="export"
    )
    outputs = compute_outputs(model)
    gap = float((outputs - expected).abs().max())
    what = "values" if critic else "log-probs"
    reader = f"transformers {transformers.__version__}"
    if not gap <= LIMIT * (1 + float(expected.abs().max()) * critic):
        raise ModelError(
            f"What was written is not the checkpoint's model: {reader} computes other {what}, up "
            f"to {gap:.2g} apart. Nothing was kept. Try another version of transformers, and "
            "report this family of models."
        )
    rounding = float((expected - exact).abs().max())
    rounded = f"; rounding the weights moved them by up to {rounding:.2g}" if rounding else ""
    return f"{len(outputs)} {what} equal the checkpoint's within {gap:.1g} ({reader}){rounded}"
