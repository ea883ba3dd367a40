"""LoRA (Hu et al. 2021) by PEFT: adapters inside a model, on, off, merged and saved.

An adapter is put into the model in place: the model stays what it was, backbone and head too,
and each adapted layer adds `alpha / rank * B @ A` to its frozen weight. Names outside are those
of PEFT's files, so that its own loader, or any server that takes adapters, reads ours."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ppo_cli.config.algorithm_schema import CriticModel
from ppo_cli.config.schema import Model
from ppo_cli.engine.models import Policy
from ppo_cli.engine.optimizer import import_bitsandbytes
from ppo_cli.engine.rows import PackedRows
from ppo_cli.engine.value_models import VALUE_HEADS, value_head
from ppo_cli.errors import MissingPart, ModelError, did_you_mean

# Ranks that vLLM's LoRA kernels are made for; a smaller adapter is padded.
PADDED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class LoRA:
    """What an adapter's tensors do not say of it."""

    rank: int
    alpha: float

    def padded_rank(self) -> int:
        """The least rank that vLLM can hold this adapter in."""
        fitting = [rank for rank in PADDED_RANKS if rank >= self.rank]
        if not fitting:
            raise ModelError(
                f"vLLM takes LoRA adapters up to rank {PADDED_RANKS[-1]}, not {self.rank}: lower "
                "--lora_rank, or publish merged weights with model.lora_merge=true."
            )
        return fitting[0]


def write_adapter(folder: Path, lora: LoRA, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and config into a new folder; the tensors' names tell the adapted modules."""
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    owners = {name.partition(".lora_")[0] for name in tensors}
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({owner.rpartition(".")[2] for owner in owners}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
ADAPTER = "default"  # PEFT's name for the only adapter of a model
PREFIX = "base_model.model."  # what PEFT puts before names in its files
PIECE = re.compile(rf"\.(lora_[AB])\.{ADAPTER}\.")


@dataclass(frozen=True)
class AdapterOff(Policy):
    """A policy as it was before its adapter was trained; weights are shared, none is copied."""

    def hidden_BLH(self, input_ids_BL: Tensor, packed: PackedRows | None = None) -> Tensor:
        """Last hidden states without the adapter; nothing in them is trained."""
        with without_adapter(self.model):
            return super().hidden_BLH(input_ids_BL, packed)


def reference_of(policy: Policy) -> Policy:
    """The reference of an adapted policy: itself with the adapter off."""
    p = policy
    return AdapterOff(p.model, p.backbone, p.head, p.around, p.packing, p.shares_prompts)


def adapt(settings: Model | CriticModel, seed: int) -> Callable[[Any], Any] | None:
    """What puts an adapter into a loaded causal LM or value model, in place; None without LoRA.

    B starts at zero; A is drawn from `seed`, on whatever device the model lies. All other
    weights are frozen but a value head. Raises ModelError for `target_modules` that fit nothing.
    """
    if settings.lora_rank == 0:
        return None

    def inject(model: Any) -> Any:
        peft = _import_peft()
        if settings.quantization is not None:
            _hold_in_4_bits(model)
        head = value_head(model)
        key = f"{'model' if head is None else 'critic.model'}.target_modules"
        targets, chosen = _choose_targets(model, settings.target_modules, key)
        alpha = settings.lora_alpha
        lora = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
            target_modules=targets,
            lora_dropout=0.0,
            bias="none",
            fan_in_fan_out=all(isinstance(module, Conv1D) for module in chosen),
            task_type="CAUSAL_LM" if head is None else "TOKEN_CLS",
            exclude_modules=None if head is None else [head],
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = peft.inject_adapter_in_model(lora, model, ADAPTER)
        if head is not None:
            getattr(model, head).requires_grad_(True)
        return adapted

    return inject


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Compute as the base model inside; no weight moves or changes."""
    layers = _layers(model)
    for layer in layers.values():
        layer.enable_adapters(False)
    # PEFT freezes what it switches off. Sharding looks at that once, when weights are first
    # gathered, and would then never reduce the adapter's gradients in the dtype it should.
    for name, tensor in model.named_parameters():
        if PIECE.search(name):
            tensor.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The live tensors of the adapter, and of a value head, under PEFT's names, in one order."""
    for name, tensor in model.named_parameters():
        if PIECE.search(name) or name.partition(".")[0] in VALUE_HEADS:
            yield PREFIX + PIECE.sub(r".\1.", name), tensor


@torch.no_grad()
def load_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy an adapter's tensors into a model that `adapt` prepared; all of them, no other."""
    live = dict(adapter_tensors(model))
    if live.keys() != tensors.keys():
        odd = sorted(live.keys() ^ tensors.keys())
        raise ModelError(
            f"The adapter does not fit the model: {odd[0]} and {len(odd) - 1} more are on one "
            "side only. model.lora_rank and model.target_modules must be those it was made with."
        )
    for name, tensor in live.items():
        if tensor.shape != tensors[name].shape:
            raise ModelError(
                f"The adapter does not fit the model: {name} is {tuple(tensors[name].shape)}, "
                f"the model takes {tuple(tensor.shape)}. model.lora_rank must be what it was."
            )
        tensor.copy_(tensors[name])


@torch.no_grad()
def merged_tensors(
    model: Any,
    full: Callable[[Tensor], Tensor],
    exact: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The weights with the adapter added, under the names of the base model, one by one.

    `full` makes a whole tensor of a live one; it is called for the same tensors in
    the same order on every rank. Where it casts, `exact` does the same without, for what is
    still to be merged. A tied output head is left out. Nothing live is changed.
    """
    layers = _layers(model)
    for name, tensor in model.named_parameters():
        if PIECE.search(name):
            continue
        owner, _, leaf = name.rpartition(".base_layer.")
        if not owner:
            yield name, full(tensor)
        elif leaf == "weight":
            yield f"{owner}.{leaf}", _merge(layers[owner], exact or full)
        else:
            yield f"{owner}.{leaf}", full(tensor)


def write_adapter_config(directory: Path, model: Any, base: str) -> None:
    """Write `adapter_config.json`; `base` is the user's model path or hub name."""
    saved = copy.copy(model.peft_config[ADAPTER])
    local = Path(base).expanduser()
    saved.base_model_name_or_path = str(local.resolve()) if local.is_dir() else base
    saved.inference_mode = True
    if (head := value_head(model)) is not None:
        saved.modules_to_save = [head]  # trained beside the adapter, and saved whole
    if not isinstance(saved.target_modules, str):
        saved.target_modules = sorted(saved.target_modules)
    saved.save_pretrained(str(directory))


def load_merged(model: Any, folder: Path) -> Any:
    """Put the adapter saved in `folder` into its base model for good; returns that model.

    Raises ValueError when it is the adapter of another model.
    """
    with warnings.catch_warnings():
        # What PEFT only warns of is looked at below.
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        adapted = _import_peft().PeftModel.from_pretrained(model, str(folder))
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as file:
        saved = set(file.keys())
    live = (name for name, _ in adapter_tensors(adapted.get_base_model()))
    # PEFT keeps the head of the base model beside the one that was saved.
    kept = {name.replace(f".modules_to_save.{ADAPTER}", "") for name in live}
    odd = sorted(saved ^ {name for name in kept if ".original_module." not in name})
    if odd:
        raise ValueError(f"{odd[0]} and {len(odd) - 1} more are on one side only")
    return adapted.merge_and_unload()


def _import_peft() -> Any:
    # Imported on use: runs without LoRA need not wait for it.
    try:
        import peft
    except ImportError as error:
        raise MissingPart(
            "LoRA (--lora_rank) needs the package peft: pip install peft, or leave --lora_rank "
            "out to train all weights."
        ) from error
    return peft


def _hold_in_4_bits(model: Any) -> None:
    """Put the weights of linear layers into 4 bits, in place (QLoRA, Dettmers et al. 2023).

    Blocks of 64 weights share a size, which is in 8 bits itself; codes are those of NF4, best for
    normal weights. Embeddings, output layer and value head stay in float32.
    """
    bnb = import_bitsandbytes("model.quantization nf4")
    for name, layer in _linear_modules(model).items():
        if isinstance(layer, Conv1D):
            raise ModelError(
                f"model.quantization: {name} is no linear layer of torch, and only those can be "
                "held in 4 bits; leave it out."
            )
        # Computes in the dtype of its input: float32, or what autocast takes.
        held = bnb.nn.Linear4bit(layer.in_features, layer.out_features, device="meta")
        weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        held.weight, held.bias = weight.to(layer.weight.device), layer.bias
        model.set_submodule(name, held)
    model.is_loaded_in_4bit = True  # what PEFT asks for


def _layers(model: Any) -> dict[str, Any]:
    """The adapted layers by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _merge(layer: Any, full: Callable[[Tensor], Tensor]) -> Tensor:
    """W + scale * B @ A, computed in float32."""
    weight = full(layer.base_layer.weight)
    a, b = (full(part[ADAPTER].weight).float() for part in (layer.lora_A, layer.lora_B))
    change = layer.scaling[ADAPTER] * (b @ a)
    merged: Tensor = weight.float() + (change.T if layer.fan_in_fan_out else change)
    return merged.to(weight.dtype)


def _choose_targets(
    model: Any, wanted: str | Sequence[str], key: str
) -> tuple[str | list[str], list[nn.Module]]:
    """What to tell PEFT, and the modules that it means; refuses names that mean none.

    A single word may be a name or a pattern: PEFT itself would take any word as a pattern.
    """
    linear = _linear_modules(model)
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        return ALL_LINEAR, list(linear.values())
    names = [name for name, _ in model.named_modules()]
    found = {
        word: _named(word, names) for word in ([wanted] if isinstance(wanted, str) else wanted)
    }
    if isinstance(wanted, str) and not found[wanted]:
        found = {wanted: [name for name in names if _matches(wanted, name, key)]}
    else:
        wanted = list(found)
    if not found:
        raise ModelError(
            f"{key} is empty: name the modules that LoRA adapts, or leave it at {ALL_LINEAR}."
        )
    for word, meant in found.items():
        if not meant:
            raise _unknown_target(word, linear, key)
        for name in meant:
            if name not in linear:
                raise ModelError(
                    f"{key}: '{word}' means {name}, which LoRA cannot adapt. It adapts the linear "
                    f"layers between embeddings and output layer, here: {_leaves(linear)}."
                )
    return wanted, [linear[name] for meant in found.values() for name in meant]


def _linear_modules(model: Any) -> dict[str, nn.Module]:
    """Linear modules by name, without embeddings and heads, which are never adapted."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if (head := value_head(model)) is not None:
        ends.append(getattr(model, head))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and not any(module is end for end in ends)
    }


def _named(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == word or name.endswith(f".{word}")]


def _matches(pattern: str, name: str, key: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ModelError(
            f"{key}: '{pattern}' is neither the name of a module nor a pattern: {error}."
        ) from error


def _unknown_target(word: str, linear: Iterable[str], key: str) -> ModelError:
    hint = did_you_mean(word, {name.rpartition(".")[2] for name in linear})
    listed = " A list is written [a,b]." if "," in word else ""
    return ModelError(
        f"{key}: the model has no module '{word}'.{hint}{listed} Linear layers here: "
        f"{_leaves(linear)}; or {ALL_LINEAR} for all of them."
    )


def _leaves(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
