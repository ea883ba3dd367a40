"""Policies and value models, split into backbone and head, and the loading of policies.

With the split, logits are computed only where they are needed. The sweep of families checks that
backbone and head together give the model's own logits (`tests/engine/test_model_families.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ppo_cli.engine.models.attention import PackedRows, Packing
from ppo_cli.engine.models.loading import load_weights
from ppo_cli.engine.pretrained import load_config
from ppo_cli.errors import ModelError

# Work on a model: tensors in, tensors out, so that FSDP2 can attach hooks to them.
Work = Callable[..., tuple[Tensor, ...]]
# Injects an adapter into a model.
Adapt = Callable[[Any], Any]


class WeightsContext:
    """Makes a model's weights available for work. These always are; others are cut or elsewhere."""

    _depth = 0  # of nested uses

    def __call__(self, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Do the work with all weights available."""
        return work(*tensors)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Context in which the weights stay on the device, for a whole step or for a sampler."""
        if self._depth == 0:
            self._wake()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._rest()

    def _wake(self) -> None:
        """Bring the weights to the device, before the first of nested uses."""

    def _rest(self) -> None:
        """Take them back, after the last of nested uses."""

    def sync_gradients(self, now: bool) -> None:
        """Set whether the next backward pass, while awake, reduces the gradients of the ranks.

        Called for each micro-batch, with True for the last one.
        """

    def begin_micro_batch(self) -> None:
        """Start counting the collectives of a micro-batch (`micro_batches.run_within_memory`)."""

    def begin_replay(self) -> None:
        """Let the next pass join only the collectives that remain of the micro-batch."""

    def reset(self) -> None:
        """Return to a clean state after an interrupted forward or backward pass."""


@dataclass(frozen=True)
class _SplitModel:
    """A model split into backbone and head, run through its `weights_context`."""

    model: Any
    backbone: nn.Module
    head: Callable[[Tensor], Tensor]
    weights_context: WeightsContext = field(default_factory=WeightsContext)
    packing: Packing | None = None
    shares_prompts: bool = False  # rows of one prompt compute it once

    def hidden_BLH(self, input_ids_BL: Tensor, packed: PackedRows | None = None) -> Tensor:
        """Return the last hidden states of right-padded rows; causal attention needs no mask.

        With `packed` there is a single row, the concatenation of the packed ones.
        """
        # Boundaries go in as arguments of the backbone.
        packing = {} if packed is None else packed.arguments(self.packing)
        out = self.backbone(input_ids=input_ids_BL, use_cache=False, **packing)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def run(self, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Do the work with all weights available; outside of it they may be cut or offloaded."""
        return self.weights_context(work, *tensors)

    def awake(self) -> AbstractContextManager[None]:
        """Context that keeps the weights on the device."""
        return self.weights_context.awake()


@dataclass(frozen=True)
class Policy(_SplitModel):
    """A causal language model, split before its output layer."""


@dataclass(frozen=True)
class ValueModel(_SplitModel):
    """A backbone with a head of one number per token."""

    head: nn.Module

    def values_BL(self, input_ids_BL: Tensor, packed: PackedRows | None = None) -> Tensor:
        """Return the values at each position, in float32."""
        hidden_BLH = self.hidden_BLH(input_ids_BL, packed)
        # The value head stays in float32 under autocast.
        with torch.autocast(input_ids_BL.device.type, enabled=False):
            values_N1: Tensor = self.head(hidden_BLH.float().flatten(0, 1))
        return values_N1.view(input_ids_BL.shape)


Adapted = TypeVar("Adapted", Policy, ValueModel)


def count_embeddings(model: Any) -> int:
    """Return for how many tokens a model has embeddings."""
    return int(model.get_input_embeddings().weight.shape[0])


def load_policy(
    path: str,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    empty: bool = False,
    flag: str = "--model",
) -> Policy:
    """Load a causal LM in float32; an `empty` one has all tensors on the meta device."""
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
    # An empty model has no numbers to check.
    policy = split_model(model)
    if not empty:
        _require_finite(policy, path)
    return policy


def adapted(loaded: Adapted, adapt: Adapt | None) -> Adapted:
    """Apply `adapt` to a loaded model, and split it again: modules may have been replaced."""
    if adapt is None:
        return loaded
    model = adapt(loaded.model)
    if isinstance(loaded, ValueModel):
        return replace(loaded, model=model)
    # The head may be a module that the adapter replaced.
    return replace(split_model(loaded.model), model=model)


def read_stop_token_ids(path: str, model_config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of a model in a folder, without loading it."""
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(model_config)
    return stop_token_ids(SimpleNamespace(generation_config=generation), tokenizer)


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation config and of the tokenizer."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ModelError("The model has no end-of-sequence token: responses could never end.")
    return frozenset(int(i) for i in ids)


def split_model(model: Any) -> Policy:
    """Split a causal LM into backbone and head."""
    name = backbone_name(model)
    # A hook works for the bare layer and for the model's own forward pass.
    if (layer := model.get_output_embeddings()) is not None:
        layer.register_forward_pre_hook(_make_contiguous)
    return Policy(model=model, backbone=getattr(model, name), head=_choose_head(model, name))


def _make_contiguous(_layer: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy views: given a view of the last states, oneDNN copies the weights for each row."""
    return tuple(state.contiguous() for state in states)


class Float32Head(nn.Linear):
    """An output layer whose products are summed and returned in float32.

    Operands are rounded to `operands`, as samplers hold them. Logits in bfloat16 differ by up to
    half a unit between two programs, which MiniMax-M1 (arXiv 2506.13585) found to be
    most of the gap between sampler and trainer; ScaleRL (arXiv 2510.13786) and TRL
    (`cast_lm_head_to_fp32`) compute them so too, and vLLM with `head_dtype`.
    """

    operands: torch.dtype

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits in float32, also under autocast."""
        with torch.autocast(states.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            rounded, weight = (x.to(self.operands).float() for x in (states, self.weight))
            return nn.functional.linear(rounded, weight, bias)


def use_float32_head(model: Any, operands: torch.dtype) -> None:
    """Let the output layer of a loaded model compute in float32; ModelError if it cannot."""
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear:
        raise ModelError(
            f"model.float32_head: the output layer of this model is a {type(layer).__name__}, not "
            "a plain linear layer. Leave it out, or leave the layer out of model.target_modules."
        )
    head: Any = layer
    head.__class__, head.operands = Float32Head, operands


def backbone_name(model: Any) -> str:
    """Return the attribute of the backbone; Llama 4 declares a prefix that it does not have."""
    parts = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    prefix = str(model.base_model_prefix)
    return prefix if hasattr(model, prefix) or len(parts) != 1 else parts[0]


class _States(tuple[Tensor]):
    """A backbone's output: hidden states, and None for every other attribute."""

    @property
    def last_hidden_state(self) -> Tensor:
        """Return the hidden states."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _PassThrough:
    """Replaces a backbone: returns the hidden states that it gets as `inputs_embeds`."""

    def __init__(self, backbone: Any) -> None:
        self._backbone = backbone

    def __call__(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        return _States((inputs_embeds,))

    def __getattr__(self, name: str) -> Any:
        """Return the backbone's attribute; a model inside it (OPT's decoder) is replaced too."""
        value = getattr(self._backbone, name)
        return self if isinstance(value, PreTrainedModel) else value


class OwnHead:
    """Computes logits by the model's own forward pass around a pass-through backbone.

    This includes scales, caps and biases that a family applies after its output layer.
    """

    def __init__(self, model: Any, backbone: str) -> None:
        # A shallow copy shares all modules but the backbone.
        self._model = copy.copy(model)
        through = _PassThrough(getattr(model, backbone))
        self._model.__dict__["_modules"] = {**model._modules, backbone: through}

    def __call__(self, hidden_XH: Tensor) -> Tensor:
        """Return the logits of states with any leading axes."""
        rows_1NH = hidden_XH.reshape(1, -1, hidden_XH.shape[-1])
        # `forward` skips hooks: the caller of the head runs FSDP2's.
        logits_1NV = self._model.forward(inputs_embeds=rows_1NH, use_cache=False).logits
        return logits_1NV.view(*hidden_XH.shape[:-1], -1)  # type: ignore[no-any-return]


def _choose_head(model: Any, backbone: str) -> Callable[[Tensor], Tensor]:
    """Return the output layer if the model's logits are its plain output, else an `OwnHead`.

    An `OwnHead` computes logits by the model's own forward pass (caps, scales). The layer's
    computation is replaced during the comparison, so weights are not needed.
    """
    # Compare the model's own logits with those of the bare layer.
    layer, own_head = model.get_output_embeddings(), OwnHead(model, backbone)
    if layer is None:
        return own_head
    size = getattr(layer, "out_features", None) or layer.weight.shape[0]
    width = layer.weight.shape[-1] if not hasattr(layer, "in_features") else layer.in_features
    # Up to 40, because caps of logits are 30 and above.
    hidden_LH = torch.linspace(-40.0, 40.0, 3 * width, device="cpu").view(3, width)

    def spread(states: Tensor) -> Tensor:
        return states[..., :1].repeat(*[1] * (states.dim() - 1), size)

    previous = layer.__dict__.get("forward")
    layer.forward = spread
    try:
        unchanged = torch.equal(own_head(hidden_LH), spread(hidden_LH))
    except Exception:  # the forward pass needs more than states
        unchanged = True
    finally:
        del layer.forward
        if previous is not None:
            layer.forward = previous
    return layer if unchanged else own_head


@torch.no_grad()
def _require_finite(policy: Policy, path: str) -> None:
    """Raise ModelError with the damaged tensors if a few tokens give logits that are not finite."""
    # A few tokens are enough: damaged weights spread to all logits.
    ids = torch.arange(1, 7)[None, :] % policy.model.get_input_embeddings().weight.shape[0]
    if policy.head(policy.hidden_BLH(ids)).isfinite().all():
        return
    damaged = [n for n, p in policy.model.named_parameters() if not p.isfinite().all()]
    named = f" ({damaged[0]}{f' and {len(damaged) - 1} more' * (len(damaged) > 1)})"
    raise ModelError(
        f"{path} gives logits that are not finite: its weights are damaged{named * bool(damaged)}."
    )
