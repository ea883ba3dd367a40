"""Classifiers on encoders (DeBERTa, RoBERTa, BERT …), with the pooler of their own class.

What lies outside the body runs in float32: its inputs are cast on the way in.

Legend: B samples, L tokens, O outputs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import ModelError
from ppo_cli.rewards.local_model.base import Scores
from ppo_cli.rewards.local_model.body import check_finite, freeze, load_module, pack_left
from ppo_cli.rewards.local_model.last_token import RowWeights, row_weights
from ppo_cli.rewards.local_model.weights import Checkpoint, is_spare


class EncoderNetwork:
    """Scores by the class's own forward pass, on rows that begin with their first token."""

    def __init__(self, module: Any, outputs: RowWeights) -> None:
        self.module: nn.Module = freeze(module)
        self._outputs = outputs
        # A table of one type knows no second text; families without a table take no types.
        self._takes_types = int(getattr(module.config, "type_vocab_size", 0) or 0) > 1

    @torch.inference_mode()
    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        """Score a padded batch; token types are used by the families that know them."""
        device = next(self.module.parameters()).device
        types_BL = None if type_ids_BL is None else type_ids_BL.to(device)
        ids_BL, mask_BL, types_BL = pack_left(ids_BL.to(device), mask_BL.to(device), types_BL)
        inputs = {"input_ids": ids_BL, "attention_mask": mask_BL.long()}
        if types_BL is not None and self._takes_types:
            inputs["token_type_ids"] = types_BL
        return self._outputs.scores(self.module(**inputs).logits.float())


def load_encoder(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, settings: ModelReward
) -> EncoderNetwork:
    """Load an encoder's sequence classifier; its head comes from the checkpoint in float32."""
    kind = _class_of(config, checkpoint)
    rows = _count_rows(checkpoint, config)
    config.num_labels = rows
    with torch.device("meta"):
        bare = kind(config)
    body = f"{kind.base_model_prefix}."
    heads = [name for name, _ in bare.named_parameters() if not name.startswith(body)]
    raw = checkpoint.head(heads)
    check_finite(raw.items(), checkpoint.folder)
    own = set(bare.state_dict())
    weights = {
        name: checkpoint.lazy(name)
        for name in checkpoint.names
        if name in own or (name.startswith(body) and not is_spare(name))
    }
    outputs = row_weights(checkpoint.folder, rows, config, settings.outputs)
    module = load_module(kind, checkpoint, config, weights, dtype)
    _restore_head(module, kind.base_model_prefix, raw)
    return EncoderNetwork(module, outputs)


def _class_of(config: Any, checkpoint: Checkpoint) -> Any:
    kinds = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) not in kinds:
        raise ModelError(
            f"{checkpoint.folder}: transformers knows no sequence classifier for the model type "
            f"{config.model_type}."
        )
    with warnings.catch_warnings():  # DeBERTa's module still uses torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        return kinds[type(config)]


def _count_rows(checkpoint: Checkpoint, config: Any) -> int:
    """Rows of the output layer: what the checkpoint has, not what a default config says."""
    for name in ("classifier.weight", "classifier.out_proj.weight"):
        if name in checkpoint.names:
            return checkpoint.shape(name)[0]
    return int(config.num_labels)


def _restore_head(module: Any, body: str, raw: dict[str, Tensor]) -> None:
    """Put the head back as it was saved, in float32, and cast what flows into it."""
    parameters = dict(module.named_parameters())
    for name, tensor in raw.items():
        parameters[name].data = tensor.clone()
    for name, child in module.named_children():
        if name != body:
            child.float()
            child.register_forward_pre_hook(_to_float32)


def _to_float32(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.float() if floating else value

    return tuple(cast(value) for value in inputs)
