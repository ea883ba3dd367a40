"""LoRA adapters (Hu et al. 2021) through PEFT: injecting, disabling, merging and saving them.

An adapter is injected in place: the model object, its backbone and its head stay the same, and
each adapted layer adds `alpha / rank * B @ A` to its frozen weight. Tensors are published and
saved under PEFT's names, so that PEFT and any server that takes adapters can load them.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ppo_cli.config.models.folder import VALUE_HEADS
from ppo_cli.config.schema.algorithm import CriticModel
from ppo_cli.config.schema.run import Model
from ppo_cli.engine.models.attention import PackedRows
from ppo_cli.engine.models.loading import import_bitsandbytes
from ppo_cli.engine.models.policy import Policy
from ppo_cli.engine.models.value_models import value_head
from ppo_cli.errors import MissingPart, ModelError, did_you_mean
from ppo_cli.paths import user_path

# Gate and up projection of an expert in one weight; each of them has its own rank.
FUSED = 2
# The ranks of vLLM's LoRA kernels (0.32); a smaller adapter is padded.
PADDED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class LoRA:
    """The settings of an adapter that its tensors do not show.

    `fused` models have gate and up projections of experts in one weight.
    """

    rank: int
    alpha: float
    fused: bool = False

    def padded_rank(self) -> int:
        """Return the smallest rank of vLLM's kernels that fits this adapter."""
        largest = FUSED * self.rank if self.fused else self.rank
        fitting = [rank for rank in PADDED_RANKS if rank >= largest]
        if not fitting:
            raise ModelError(
                f"vLLM takes LoRA adapters up to rank {PADDED_RANKS[-1]}, not {largest}: lower "
                "--lora_rank, or publish merged weights with model.lora_merge=true."
            )
        return fitting[0]


def write_adapter(folder: Path, lora: LoRA, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter's tensors and config into a new folder, in PEFT's format."""
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    # vLLM matches target modules by their last name.
    owners = {name.partition(".lora_")[0] for name in tensors}
    settings = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({owner.rpartition(".")[2] for owner in owners}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@torch.no_grad()
def name_as_files(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's tensors by the names of the model's files, as vLLM expects them.

    Experts that are separate in the files are separate here. `model` may have no weights.
    """
    named: dict[str, Tensor] = {}
    for key, a in tensors.items():
        if not key.endswith(A_WEIGHT):
            continue
        owner = key.removeprefix(PREFIX).removesuffix(A_WEIGHT)
        b, base = tensors[PREFIX + owner + B_WEIGHT], _base_name(owner)
        parameters = model.get_submodule(base).named_parameters(recurse=False)
        stacks = {leaf: weight for leaf, weight in parameters if weight.dim() == 3}
        if not stacks:
            (name,) = revert_weight_conversion(model, {f"{base}.weight": b})
            module = PREFIX + name.removesuffix(".weight")
            named |= {module + A_WEIGHT: a, module + B_WEIGHT: b}
            continue
        leaf = _stack_of(owner, stacks, (b.shape[0], a.shape[1]), tensors)
        a_Eri, b_Eor = split_experts(a, b, len(stacks[leaf]))
        files = revert_weight_conversion(model, {f"{base}.{leaf}": b_Eor})
        experts = {name: EXPERT.search(name) for name in files}
        for name, expert in experts.items():
            if expert is None:  # one weight in the files too: PEFT's form is vLLM's
                named |= {key: a, PREFIX + owner + B_WEIGHT: b}
            else:
                module = PREFIX + name.removesuffix(".weight")
                named |= {module + A_WEIGHT: a_Eri[int(expert[1])], module + B_WEIGHT: files[name]}
    return named


def _stack_of(
    owner: str, stacks: Mapping[str, Tensor], sizes: tuple[int, int], tensors: Mapping[str, Tensor]
) -> str:
    """Return the expert weight of an adapter; with both adapted, PEFT nests the first inside."""
    base, leaves = _base_name(owner), [*stacks]
    if owner != base:
        return leaves[0]
    if f"{PREFIX}{base}.base_layer{A_WEIGHT}" in tensors:
        return leaves[-1]
    return next(leaf for leaf in leaves if set(stacks[leaf].shape[1:]) == set(sizes))


# PEFT's names of files, adapters and tensors.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Our key in the adapter's `auto_mapping`, and its values.
QUANTIZATION, NF4, NOT_QUANTISED = "base_quantization", "nf4", "none"
ALL_LINEAR = "all-linear"
ADAPTER = "default"  # PEFT's name for the only adapter of a model
PREFIX = "base_model.model."  # what PEFT puts before names in its files
A_WEIGHT, B_WEIGHT = ".lora_A.weight", ".lora_B.weight"
EXPERT = re.compile(r"\.experts\.(\d+)\.")
PIECE = re.compile(rf"\.(lora_[AB])\.{ADAPTER}\.")


@dataclass(frozen=True)
class AdapterOff(Policy):
    """A policy with its adapter disabled; it shares all weights with the policy."""

    def hidden_BLH(self, input_ids_BL: Tensor, packed: PackedRows | None = None) -> Tensor:
        """Return the last hidden states without the adapter."""
        with without_adapter(self.model):
            return super().hidden_BLH(input_ids_BL, packed)


def reference_of(policy: Policy) -> Policy:
    """Return the reference of an adapted policy: the policy with its adapter disabled."""
    p = policy
    return AdapterOff(p.model, p.backbone, p.head, p.weights_context, p.packing, p.shares_prompts)


def adapt(
    settings: Model | CriticModel, seed: int, report: Callable[[str], None] = lambda text: None
) -> Callable[[Any], Any] | None:
    """Return a function that injects an adapter into a loaded model in place; None without LoRA.

    B starts at zero; A is drawn from `seed`, the same on every device. All other weights are
    frozen except a value head. Calls `report` with a sentence if `all-linear` leaves experts out.
    Raises ModelError for `target_modules` that match nothing.
    """
    if settings.lora_rank == 0:
        return None

    def inject(model: Any) -> Any:
        """Add an adapter in place, freeze all other weights but a value head; return the model."""
        # Targets are chosen by us, exactly, and passed to PEFT.
        peft = _import_peft()
        if settings.quantization is not None:
            _hold_in_4_bits(model)
        head = value_head(model)
        key = f"{'model' if head is None else 'critic.model'}.target_modules"
        targets = _choose_targets(model, settings.target_modules, key)
        if settings.target_modules == ALL_LINEAR:
            for note in _describe_frozen(model, targets, key):
                report(note)
        rank, alpha = settings.lora_rank, settings.lora_alpha
        alpha = int(alpha) if alpha == int(alpha) else alpha
        lora = peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,
            rank_pattern=dict.fromkeys(targets.fused, FUSED * rank),
            alpha_pattern=dict.fromkeys(targets.fused, FUSED * alpha),
            target_modules=targets.modules,
            target_parameters=targets.parameters or None,
            lora_dropout=0.0,
            bias="none",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in targets.linear),
            task_type="CAUSAL_LM" if head is None else "TOKEN_CLS",
            exclude_modules=None if head is None else [head],
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # PEFT 0.21 says that the rank patterns of experts match nothing; they do match.
            unmatched = "The following (rank|alpha)_pattern keys did not match"
            warnings.filterwarnings("ignore", unmatched)
            torch.manual_seed(seed)
            adapted = peft.inject_adapter_in_model(lora, model, ADAPTER)
        if head is not None:
            getattr(model, head).requires_grad_(True)
        return adapted

    return inject


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Context in which the model computes without its adapter; no weight changes."""
    layers = _layers(model)
    for layer in layers.values():
        layer.enable_adapters(False)
    # PEFT freezes a disabled adapter. FSDP2 reads `requires_grad` once, when weights are first
    # gathered, and would then never reduce the adapter's gradients in the right dtype.
    for name, tensor in model.named_parameters():
        if PIECE.search(name):
            tensor.requires_grad_(True)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)


def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the live tensors of the adapter and a value head, by PEFT's names, in a fixed order."""
    for name, tensor in model.named_parameters():
        if PIECE.search(name) or name.partition(".")[0] in VALUE_HEADS:
            yield PREFIX + PIECE.sub(r".\1.", name), tensor


@torch.no_grad()
def load_adapter(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy an adapter's tensors into a model prepared by `adapt`; ModelError if they do not fit."""
    # Names first, then shapes.
    live = dict(adapter_tensors(model))
    if live.keys() != tensors.keys():
        unmatched = sorted(live.keys() ^ tensors.keys())
        raise ModelError(
            f"The adapter does not fit the model: {unmatched[0]} and {len(unmatched) - 1} more are "
            "on one side only. model.lora_rank and model.target_modules must be those it was made "
            "with."
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
    *,
    live: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the adapter merged, under the names of the base model, one by one.

    `full` gathers a live tensor; it is called for the same tensors in the same order on every
    rank. If it casts, `exact` gathers without casting, for buffers and for weights that are still
    to be merged. `live` are the model's tensors, by default all parameters. A tied output head is
    left out. No live tensor is changed.
    """
    adapted = {
        f"{_base_name(name)}.{getattr(layer, 'parameter_name', 'weight')}": layer
        for name, layer in _layers(model).items()
    }
    for adapted_name, tensor in (live or dict(model.named_parameters())).items():
        if PIECE.search(adapted_name):
            continue
        name = _base_name(adapted_name)
        layer = adapted.get(name)
        if layer is not None:
            merged = _merge(layer, tensor, exact or full)
            yield name, merged if exact is None else full(merged)
        else:
            is_weight = isinstance(tensor, torch.nn.Parameter)
            yield name, (full if is_weight else exact or full)(tensor)


def write_adapter_config(
    directory: Path, model: Any, base: str, quantization: str | None = None
) -> None:
    """Write `adapter_config.json`.

    `base` is the user's model path or hub name, `quantization` what training did to its weights.
    """
    # The copy gets what only matters in a file.
    saved = copy.copy(model.peft_config[ADAPTER])
    local = user_path(base)
    saved.base_model_name_or_path = str(local.resolve()) if local.is_dir() else base
    saved.inference_mode = True
    # PEFT's field for facts about the base, which it reads only if there is no task_type.
    saved.auto_mapping = {QUANTIZATION: quantization or NOT_QUANTISED}
    if (head := value_head(model)) is not None:
        saved.modules_to_save = [head]  # trained beside the adapter, and saved whole
    if not isinstance(saved.target_modules, str):
        saved.target_modules = sorted(saved.target_modules)
    saved.save_pretrained(str(directory))


def load_adapted(model: Any, folder: Path) -> Any:
    """Put the adapter saved in `folder` on its base model; `merge_adapter` merges it.

    Raises ValueError when it is the adapter of another model.
    """
    peft = _import_peft()
    tensors = peft.utils.load_peft_weights(str(folder), device="cpu")
    # Tokens may have been added to the base before training.
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {m: PREFIX + name for name, m in model.named_modules() if m in (embeddings, head)}
    rows = tensors.get(f"{ends[embeddings]}.weight", embeddings.weight).shape[0]
    if rows > embeddings.weight.shape[0]:
        embeddings = model.resize_token_embeddings(rows, mean_resizing=False)
        head = model.get_output_embeddings()
    # Merging into a weight that both ends share would change the end that has no adapter.
    adapts_ends = any(
        name.startswith(tuple(f"{end}." for end in ends.values())) for name in tensors
    )
    if adapts_ends and head is not None and head.weight is embeddings.weight:
        head.weight = nn.Parameter(embeddings.weight.detach().clone())
    with warnings.catch_warnings():
        # About missing tensors, which are checked below, ranks of experts and shared weights.
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(model, str(folder))
        needed, possible = (
            peft.get_peft_model_state_dict(adapted, save_embedding_layers=with_ends).keys()
            for with_ends in (False, True)
        )
    if unmatched := sorted((needed - tensors.keys()) | (tensors.keys() - needed - possible)):
        raise ValueError(f"{unmatched[0]} and {len(unmatched) - 1} more are on one side only")
    return adapted


@torch.no_grad()
def merge_adapter(adapted: Any) -> Any:
    """Return the base model with its adapter merged; its ends stay tied only if they are equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weights that were shared: below
        model = adapted.merge_and_unload()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    tied = {name for name in model.all_tied_weights_keys if name.rpartition(".")[0] in names}
    if tied:
        equal = torch.equal(head.weight, embeddings.weight)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = equal  # PEFT may have changed it
        for name in () if equal else tied:
            del model.all_tied_weights_keys[name]
    return model


def _import_peft() -> Any:
    """Return the module peft; raises MissingPart if it is not installed."""
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
    """Quantise the weights of linear layers to 4 bits in place (QLoRA, Dettmers et al. 2023).

    Blocks of 64 weights share a scale, which is stored in 8 bits; the codes are NF4, optimal for
    normally distributed weights. Embeddings, output layer and value head stay in float32.
    """
    bnb = import_bitsandbytes("model.quantization nf4")
    for name, layer in _linear_modules(model).items():
        if isinstance(layer, Conv1D):
            raise ModelError(
                f"model.quantization: {name} is no linear layer of torch, and only those can be "
                "held in 4 bits; leave it out."
            )
        # Computes in the dtype of its input: float32, or what autocast takes.
        layer_4bit = bnb.nn.Linear4bit(layer.in_features, layer.out_features, device="meta")
        weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        layer_4bit.weight, layer_4bit.bias = weight.to(layer.weight.device), layer.bias
        model.set_submodule(name, layer_4bit)
    model.is_loaded_in_4bit = True  # what PEFT asks for


@torch.no_grad()
def round_to_4_bits(model: Any) -> None:
    """Round the weights that QLoRA held in 4 bits to what training computed with, in place."""
    bnb = import_bitsandbytes("merging an adapter of a model in nf4")
    layers: Any = _linear_modules(model).values()
    for layer in layers:
        packed = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
        packed = packed.to(layer.weight.device)
        layer.weight.copy_(bnb.functional.dequantize_4bit(packed.data, packed.quant_state))


def _layers(model: Any) -> dict[str, Any]:
    """The adapted layers by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _base_name(name: str) -> str:
    """Return the name of a module or tensor in the model without an adapter."""
    return name.replace(".base_layer", "")


def _merge(layer: Any, tensor: Tensor, full: Callable[[Tensor], Tensor]) -> Tensor:
    """Return W + scale * B @ A in float32; with stacked experts, one product per expert."""
    # A and B of all experts are two matrices in PEFT's files.
    weight = full(tensor)
    a, b = (full(part[ADAPTER].weight).float() for part in (layer.lora_A, layer.lora_B))
    if weight.dim() == 3:
        a_Eri, b_Eor = split_experts(a, b, len(weight))
        change = b_Eor @ a_Eri
        # Stacked experts are (experts, out, in), as in a linear layer, unless they say otherwise.
        out_first = not getattr(layer.get_base_layer(), "is_transposed", False)
        change = change if change.shape == weight.shape and out_first else change.mT
    else:
        change = (b @ a).T if layer.fan_in_fan_out else b @ a
    merged: Tensor = weight.float() + layer.scaling[ADAPTER] * change
    return merged


def split_experts(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return (experts, rank, in) and (experts, out, rank) from PEFT's two matrices."""
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)


@dataclass(frozen=True)
class _Targets:
    """The targets of LoRA in PEFT's terms: modules, and parameters of non-linear modules.

    `fused` are patterns of parameters that contain two layers, both of which are targets.
    """

    modules: str | list[str]
    linear: list[nn.Module]
    parameters: list[str] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)


def _choose_targets(model: Any, setting: str | Sequence[str], key: str) -> _Targets:
    """Return PEFT's targets for a setting; raises ModelError for names that cannot be adapted.

    A single string can be a name or a pattern; PEFT itself would take every string as a pattern.
    """
    # All layers that LoRA could adapt, by name.
    linear, parameters = _adaptable_modules(model), _parameters_by_name(model)
    renames = peft_renames(model.config)
    if isinstance(setting, str) and setting.lower() == ALL_LINEAR:
        # As in PEFT, this includes experts and routers in families where they were linear layers.
        names = [*linear, *(name for name in parameters if _leaf(name) in renames)]
        if not parameters and not renames and linear.keys() == _linear_modules(model).keys():
            return _Targets(ALL_LINEAR, [*linear.values()])
        return _as_peft(linear, parameters, renames, names, key)
    modules = [name for name, _ in model.named_modules()]

    def mean(word: str) -> list[str]:
        named, parameter_names = _named(word, modules), _named(word, parameters)
        # A name of linear layers includes experts in families where they were linear layers.
        return [*named, *parameter_names] if renames or not named else named

    matches = {word: mean(word) for word in ([setting] if isinstance(setting, str) else setting)}
    if isinstance(setting, str) and not matches[setting]:
        names = [*modules, *parameters]
        matches = {setting: [name for name in names if _matches(setting, name, key)]}
    else:
        setting = list(matches)
    if not matches:
        raise ModelError(
            f"{key} is empty: name the modules that LoRA adapts, or leave it at {ALL_LINEAR}."
        )
    for word, meant in matches.items():
        if not meant:
            raise _unknown_target(word, [*linear, *parameters], key)
        for name in meant:
            if name not in linear and name not in parameters:
                raise ModelError(
                    f"{key}: '{word}' means {name}, which LoRA cannot adapt. It adapts the linear "
                    "layers between embeddings and output layer, here: "
                    f"{_leaves([*linear, *parameters])}. Weights that several layers share are "
                    "not among them."
                )
    names = [name for meant in matches.values() for name in meant]
    if not parameters and not renames:
        return _Targets(setting, [linear[name] for name in names])
    return _as_peft(linear, parameters, renames, names, key)


def _as_peft(
    linear: Mapping[str, nn.Module], parameters: Mapping[str, str], renames: Collection[str],
    chosen_names: Iterable[str], key: str,
) -> _Targets:  # fmt: skip
    """Return exact targets: in some families PEFT would extend names to more layers."""
    # Names of gate and up projections that one parameter holds.
    names = set(chosen_names)
    halves: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        if _leaf(name) in renames and name != parameter:
            halves.setdefault(parameter, []).append(name)
    fused = {parameter: pair for parameter, pair in halves.items() if len(pair) == FUSED}
    for parameter, pair in fused.items():
        if len(names.intersection(pair)) == 1:
            missing = next(name for name in pair if name not in names)
            raise ModelError(
                f"{key}: {' and '.join(sorted(pair))} are one weight ({parameter}): name "
                f"{_leaf(missing)} as well."
            )
    # Routers and experts are given to PEFT as parameters, all other layers as modules.
    chosen = {parameters[name] for name in names if name in parameters}
    # PEFT would mistake the names of these layers for expert names.
    chosen |= {f"{n}.weight" for n in names & linear.keys() if _leaf(n) in renames}
    modules = sorted(n for n in names & linear.keys() if _leaf(n) not in renames)
    both = {parameter for parameter, pair in fused.items() if names.issuperset(pair)}
    return _Targets(
        modules,
        [linear[name] for name in modules],
        sorted(chosen),
        sorted({rf".*\.{_leaf(parameter)}" for parameter in both}),
    )


def peft_renames(config: Any) -> dict[str, str]:
    """Return the names that PEFT maps to experts and routers in this family."""
    # Imported on use, like peft. Private tables without a public name, tried with PEFT 0.21.
    conversion: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
    family = conversion._MODEL_TO_CONVERSION_PATTERN.get(config.model_type, "")
    renames: dict[str, str] = conversion._MOE_TARGET_MODULE_MAPPING.get(family, {})
    return renames


def _parameters_by_name(model: Any) -> dict[str, str]:
    """Return the names by which experts and routers can be targeted -> their parameter.

    A router has the name of its module. Experts have the name of their parameter, and those of
    the linear layers that they replaced, where PEFT knows them.
    """
    linear, ends = _linear_modules(model), _ends(model)
    renames = peft_renames(model.config)
    by_name: dict[str, str] = {}
    for name, module in model.named_modules():
        if name in linear or any(module is end for end in ends):
            continue
        if isinstance(module, nn.Embedding) or type(module).__module__.startswith("torch.nn"):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 2 and leaf == "weight":
                by_name[name] = f"{name}.{leaf}"
            elif parameter.dim() == 3:
                by_name[f"{name}.{leaf}"] = f"{name}.{leaf}"
                olds = [old for old, new in renames.items() if new == leaf and old != leaf]
                by_name |= {f"{name}.{old}": f"{name}.{leaf}" for old in olds}
    return by_name


def _describe_frozen(model: Any, targets: _Targets, key: str) -> Iterator[str]:
    """Yield sentences about the layers of this model that `all-linear` does not adapt."""
    weights = _parameters_by_name(model)
    experts = [
        n
        for n, parameter in weights.items()
        if n == parameter and parameter not in targets.parameters
    ]
    if experts:
        yield (
            f"LoRA leaves the experts of this model as they are ({_leaves(experts)}): they are not "
            f"linear layers. To adapt them too, name all layers in {key}."
        )
    others = _linear_modules(model).keys() - _adaptable_modules(model).keys()
    if others:
        yield (
            f"LoRA leaves {_leaves(others)} of this model as they are: PEFT does not adapt them, "
            "or several layers share their weight."
        )


def _ends(model: Any) -> list[nn.Module]:
    """Return embeddings and heads, which are never adapted."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if (head := value_head(model)) is not None:
        ends.append(getattr(model, head))
    return ends


def _linear_modules(model: Any) -> dict[str, nn.Module]:
    """Return linear modules by name, without embeddings, heads and routers with several outputs."""
    ends = _ends(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not any(module is end for end in ends)
        and _returns_states(module)
    }


def _adaptable_modules(model: Any) -> dict[str, nn.Module]:
    """Return the linear modules that an adapter can be merged into, by name.

    Excludes weights that several layers share (Zamba 2), because each layer would have its own
    adapter, and modules that PEFT refuses: kernels read a Mamba block's `out_proj` directly.
    """
    # Imported on use, like peft. A private check without a public name, tried with PEFT 0.21.
    check: Any = importlib.import_module("peft.tuners.tuners_utils")
    linear, refused = _linear_modules(model), set[str]()
    uses = Counter(id(module.weight) for module in linear.values())
    for leaf in set(map(_leaf, linear)):
        try:
            check._check_lora_target_modules_mamba(_import_peft().LoraConfig(), model, leaf)
        except ValueError:
            refused.add(leaf)
    return {n: m for n, m in linear.items() if uses[id(m.weight)] == 1 and _leaf(n) not in refused}


def _returns_states(module: nn.Module) -> bool:
    """Whether a linear module returns a single tensor, to which an adapter can add."""
    # Custom linear layers are tried on zeros.
    kind = type(module)
    if kind.forward is nn.Linear.forward or kind.__module__.startswith("bitsandbytes"):
        return True
    probe: Any = copy.copy(module)
    zeros = {n: None if p is None else torch.zeros(p.shape) for n, p in module._parameters.items()}
    probe.__dict__["_parameters"] = zeros
    size = probe.weight.shape[0 if isinstance(module, Conv1D) else 1]
    with torch.no_grad():
        return isinstance(kind.forward(probe, torch.zeros(1, size)), Tensor)


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


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _leaves(names: Iterable[str]) -> str:
    return ", ".join(sorted({_leaf(name) for name in names}))
