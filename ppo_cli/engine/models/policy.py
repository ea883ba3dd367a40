"""Load tokenizers, policies and value models, and say in one sentence when that fails.

A policy is used as backbone + head, so that logits are computed only where they are needed;
a trial checks that the two together give the model's own logits (`engine/trial.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

from ppo_cli.engine.models.attention import PackedRows, Packing
from ppo_cli.engine.models.loading import load_config, load_part, load_weights
from ppo_cli.errors import ModelError

Work = Callable[..., tuple[Tensor, ...]]
Adapt = Callable[[Any], Any]


class WeightsContext(Protocol):
    """Where work on a model is done when its weights are not simply there."""

    def __call__(self, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Do the work with all weights at hand."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Context in which the weights stay where the work is."""
        ...

    def sync_gradients(self, now: bool) -> None:
        """Say whether the backward pass to come, while awake, adds up the gradients of ranks."""
        ...

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch: count which collectives its work joins."""
        ...

    def begin_replay(self) -> None:
        """Have work that takes the place of what broke off join only what is left of these."""
        ...

    def reset(self) -> None:
        """Come to rest after work, or its backward, that broke off."""
        ...


@dataclass(frozen=True)
class _SplitModel:
    """What policies and value models have in common: being asked where their weights are."""

    model: Any
    backbone: nn.Module
    head: Callable[[Tensor], Tensor]
    weights_context: WeightsContext | None = None
    packing: Packing | None = None
    shares_prompts: bool = False  # rows of one prompt compute it once

    def hidden_BLH(self, input_ids_BL: Tensor, packed: PackedRows | None = None) -> Tensor:
        """Last hidden states of right-padded rows, where causal attention needs no mask.

        With `packed` there is one row, in which those lie end to end; see `packing.pack`.
        """
        packing = {} if packed is None else packed.arguments(self.packing)
        out = self.backbone(input_ids=input_ids_BL, use_cache=False, **packing)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def run(self, fn: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call `fn` where all weights are at hand; outside of it they may be elsewhere."""
        return fn(*tensors) if self.weights_context is None else self.weights_context(fn, *tensors)

    def awake(self) -> AbstractContextManager[None]:
        """Context that keeps weights on the device: for a whole step, or for a sampler."""
        return nullcontext() if self.weights_context is None else self.weights_context.awake()

    def sync_gradients(self, now: bool) -> None:
        """Say whether the backward pass to come, while awake, adds up the gradients of ranks.

        Say it of each micro-batch: True of the last one.
        """
        if self.weights_context is not None:
            self.weights_context.sync_gradients(now)

    def begin_micro_batch(self) -> None:
        """Begin a micro-batch; see `micro_batches.run_within_memory`, as of `begin_replay`."""
        if self.weights_context is not None:
            self.weights_context.begin_micro_batch()

    def begin_replay(self) -> None:
        """Have the next work take the place of what broke off since `begin_micro_batch`."""
        if self.weights_context is not None:
            self.weights_context.begin_replay()

    def reset(self) -> None:
        """Forget a forward or backward pass that broke off, as when memory ran out."""
        if self.weights_context is not None:
            self.weights_context.reset()


@dataclass(frozen=True)
class Policy(_SplitModel):
    """A causal language model, split where its vocabulary begins."""


@dataclass(frozen=True)
class ValueModel(_SplitModel):
    """A backbone with one number a token."""

    head: nn.Module

    def values_BL(self, input_ids_BL: Tensor, packed: PackedRows | None = None) -> Tensor:
        """Values at each position, in float32."""
        hidden_BLH = self.hidden_BLH(input_ids_BL, packed)
        with torch.autocast(input_ids_BL.device.type, enabled=False):
            values_N1: Tensor = self.head(hidden_BLH.float().flatten(0, 1))
        return values_N1.view(input_ids_BL.shape)


Adapted = TypeVar("Adapted", Policy, ValueModel)


def load_tokenizer(path: str, *, trust_remote_code: bool = False, flag: str = "--model") -> Any:
    """Load a tokenizer; errors name the flag."""
    tokenizer = load_part(
        AutoTokenizer, path, "tokenizer", flag, trust_remote_code=trust_remote_code
    )
    if pad_token_id(tokenizer) is None:
        raise ModelError(f"The tokenizer of {path} has neither a pad nor an end-of-text token.")
    return tokenizer


def count_embeddings(model: Any) -> int:
    """For how many tokens a model has embeddings."""
    return int(model.get_input_embeddings().weight.shape[0])


def pad_token_id(tokenizer: Any, vocabulary_size: int | None = None) -> int:
    """What rows are padded with: the end-of-text token where a tokenizer has no pad token.

    The tokenizer stays without one: checkpoints and exports keep it as the base has it. Token 0
    stands in for one that the model has no embedding for; no other token sees it.
    """
    token_id: int = tokenizer.pad_token_id
    token_id = tokenizer.eos_token_id if token_id is None else token_id
    return token_id if vocabulary_size is None or token_id < vocabulary_size else 0


def load_policy(
    path: str,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    empty: bool = False,
    flag: str = "--model",
) -> Policy:
    """Load a causal LM in float32.

    An `empty` one has no weights: every tensor is on the meta device.
    """
    model, _ = load_weights(
        AutoModelForCausalLM,
        path,
        "causal language model",
        flag,
        empty=empty,
        config=load_config(path, flag, trust_remote_code),
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    policy = split_model(model)
    if not empty:
        _require_finite(policy, path)
    return policy


def adapted(loaded: Adapted, adapt: Adapt | None) -> Adapted:
    """What was loaded, over what `adapt` made of its model; modules may have been exchanged."""
    if adapt is None:
        return loaded
    model = adapt(loaded.model)
    if isinstance(loaded, ValueModel):
        return replace(loaded, model=model)
    return replace(split_model(loaded.model), model=model)


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the generation config and the tokenizer together."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ModelError("The model has no end-of-sequence token: responses could never end.")
    return frozenset(int(i) for i in ids)


def split_model(model: Any) -> Policy:
    """A causal LM as backbone and head."""
    name = backbone_name(model)
    if (layer := model.get_output_embeddings()) is not None:
        layer.register_forward_pre_hook(_make_contiguous)
    return Policy(model=model, backbone=getattr(model, name), head=_choose_head(model, name))


def _make_contiguous(_layer: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy a view: for the last states of rows oneDNN copies the weights once for each row."""
    return tuple(state.contiguous() for state in states)


def backbone_name(model: Any) -> str:
    """The attribute that holds the backbone; Llama 4 declares a prefix that it does not have."""
    parts = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    prefix = str(model.base_model_prefix)
    return prefix if hasattr(model, prefix) or len(parts) != 1 else parts[0]


class _States(tuple[Tensor]):
    """The output of a backbone: hidden states, and None for all else that a head may read."""

    @property
    def last_hidden_state(self) -> Tensor:
        """The states."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _PassThrough:
    """Takes the place of a backbone: returns the hidden states that it gets as embeddings."""

    def __init__(self, backbone: Any) -> None:
        self._backbone = backbone

    def __call__(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        return _States((inputs_embeds,))

    def __getattr__(self, name: str) -> Any:
        """The backbone's attribute; of a model inside it, as OPT calls one, nothing is computed."""
        value = getattr(self._backbone, name)
        return self if isinstance(value, PreTrainedModel) else value


class OwnHead:
    """The model's own way from hidden states to logits: its forward pass around a pass-through.

    Scales, caps and biases that a family applies behind its output layer are thus included.
    """

    def __init__(self, model: Any, backbone: str) -> None:
        self._model = copy.copy(model)
        through = _PassThrough(getattr(model, backbone))
        self._model.__dict__["_modules"] = {**model._modules, backbone: through}

    def __call__(self, hidden_XH: Tensor) -> Tensor:
        """Logits of states of any leading axes."""
        rows_1NH = hidden_XH.reshape(1, -1, hidden_XH.shape[-1])
        # Not through hooks: FSDP's are run by whoever calls the head.
        logits_1NV = self._model.forward(inputs_embeds=rows_1NH, use_cache=False).logits
        return logits_1NV.view(*hidden_XH.shape[:-1], -1)  # type: ignore[no-any-return]


def _choose_head(model: Any, backbone: str) -> Callable[[Tensor], Tensor]:
    """The output layer alone where the model changes nothing behind it, else its own way.

    What the layer would compute is replaced, so that a model without weights chooses the same.
    """
    layer, own_head = model.get_output_embeddings(), OwnHead(model, backbone)
    if layer is None:
        return own_head
    size = getattr(layer, "out_features", None) or layer.weight.shape[0]
    width = layer.weight.shape[-1] if not hasattr(layer, "in_features") else layer.in_features
    # Up to 40: caps of logits are 30 and above.
    hidden_LH = torch.linspace(-40.0, 40.0, 3 * width, device="cpu").view(3, width)

    def spread(states: Tensor) -> Tensor:
        return states[..., :1].repeat(*[1] * (states.dim() - 1), size)

    previous = layer.__dict__.get("forward")
    layer.forward = spread
    try:
        unchanged = torch.equal(own_head(hidden_LH), spread(hidden_LH))
    except Exception:  # of a forward pass that needs more than states; the trial compares its head
        unchanged = True
    finally:
        del layer.forward
        if previous is not None:
            layer.forward = previous
    return layer if unchanged else own_head


@torch.no_grad()
def _require_finite(policy: Policy, path: str) -> None:
    """Raise ModelError, with the names of tensors, where a few tokens give no finite logits."""
    ids = torch.arange(1, 7)[None, :] % policy.model.get_input_embeddings().weight.shape[0]
    if policy.head(policy.hidden_BLH(ids)).isfinite().all():
        return
    damaged = [n for n, p in policy.model.named_parameters() if not p.isfinite().all()]
    named = f" ({damaged[0]}{f' and {len(damaged) - 1} more' * (len(damaged) > 1)})"
    raise ModelError(
        f"{path} gives logits that are not finite: its weights are damaged{named * bool(damaged)}."
    )
