"""Small random models of a family, for the trial at the start of a run.

A config is shrunk by its field names, which families share: few layers that cover each kind of
layer, few experts and tokens, windows and chunks that a few dozen tokens cross, and narrow states.
Values that a family derives from its sizes stay consistent, because all widths are divided by one
number and the number of heads is kept. If no model can be built then, widths are kept too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

# Patterns of field names. Layers: their number, and where or how often their kind changes.
LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|decoder_layers|num_blocks)$")
# Fields that change the kind of layers from some index on, counted from the first or last layer.
FIRST_LAYERS = re.compile(r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$")
LAST_LAYERS = re.compile(r"^num_kv_shared_layers$")
PERIODS = re.compile(r"(_period|_interval|_every_n_layers|_step|_frequency|window_pattern)$")
MOST_LAYERS = 8
# Attention windows and blocks, which the trial's rows of up to 38 tokens must cross.
WINDOWS = re.compile(
    r"sliding_window(_size)?$|window_size$|^attention_chunk_size$|^local_attention$|^floor_scale$"
    r"|^index_topk$"
)
BLOCKS = re.compile(r"^(index_)?block_size$|(^|_)chunk_size$")  # tokens computed at once
WINDOW = 8
CAPS = re.compile(r"soft_?cap")
CAP = 0.5  # the trial's logits have a spread of about 1, so this cap has an effect
# Vocabulary and ids of special tokens.
WORDS = re.compile(r"vocab_size")
VOCABULARY = 64
TOKEN_IDS = re.compile(r"_token_ids?$|_token_index$|^pad_index$")
SPECIAL = 8  # ids of special tokens are mapped below this
# Experts: how many, how many per token, and their groups.
EXPERTS = re.compile(r"^(n_routed|num_local|num|moe_num)_experts$|^zero_expert_num$")
CHOSEN = re.compile(r"experts_per_tok(en)?$|^moe_topk$|^moe_k$")
GROUPS = {"n_group": 2, "topk_group": 1}
# Widths; fields that match `KEPT` are counts and not widths.
WIDTHS = re.compile(
    r"hidden|intermediate|ffn|_embd$|d_model|_dim$|dim_head$|rank$|dff|dim_ff|d_inner|n_inner"
    r"|kv_channels|lru_width|d_ssm|d_head|headdim|embedding_size|dim_model"
)
KEPT = re.compile(r"layers|num_|n_head|conv|kernel|state|dt_rank|step_rank|act|drop|multip|_lr$")
INDEPENDENT = re.compile(r"intermediate|ffn|rank|dff|dim_ff|inner")  # need not be divisible
DIVISORS = (32, 16, 8, 4, 2)
NARROWEST = 8  # the smallest head size
# Scale of random matrices: attention is then neither uniform nor on a single token.
GAIN = 1.5
MOST_PARAMETERS = 100_000_000


def shrink_config(
    config: PreTrainedConfig, longest_row: int, *, narrow: bool = True
) -> PreTrainedConfig:
    """Return a copy of a config with small sizes; widths change only with `narrow`.

    Windows longer than the run's longest row keep their size.
    """
    return type(config).from_dict(_shrink_fields(config.to_dict(), longest_row, narrow))


def _shrink_fields(fields: dict[str, Any], longest_row: int, narrow: bool) -> dict[str, Any]:
    """Return the fields of a config, nested ones too, with a small value for each size.

    Windows of at least `longest_row` tokens are kept. Widths are divided only if `narrow`.
    """
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _shrink_fields(value, longest_row, narrow)
        elif WINDOWS.search(name) and type(value) is int and value >= longest_row:
            small[name] = value
        else:
            small[name] = _shrink_field(name, value)
    _cut_layers(small)
    if narrow and (divisor := _divisor(small)):
        _narrow_widths(small, divisor)
    return small


def _shrink_field(name: str, value: Any) -> Any:
    """Return the value of one config field, limited by the pattern that its name matches.

    The patterns are those of windows, blocks, vocabulary, experts, soft caps and ids of special
    tokens. Other values are unchanged; `_cut_layers` and `_narrow_widths` shrink layers and widths.
    """
    if TOKEN_IDS.search(name):
        if isinstance(value, list):
            return [_shrink_field(name, item) for item in value]
        return value % SPECIAL if type(value) is int and value >= SPECIAL else value
    if CAPS.search(name) and isinstance(value, int | float) and value:
        return min(float(value), CAP)
    if type(value) is not int:
        return value
    limits = {WINDOWS: WINDOW, BLOCKS: WINDOW, WORDS: VOCABULARY, EXPERTS: 4, CHOSEN: 2}
    limit = next((limits[names] for names in limits if names.search(name)), None)
    limit = GROUPS.get(name, limit)
    return value if limit is None else min(value, limit)


def _cut_layers(fields: dict[str, Any]) -> None:
    """Keep the first layer of each kind, at least two layers in total."""
    counts = [name for name in fields if LAYERS.match(name) and type(fields[name]) is int]
    if not counts:
        return
    # Collect all fields that say something about single layers.
    layers = fields[counts[0]]
    lists = {n: v for n, v in fields.items() if isinstance(v, list) and len(v) == layers}
    marks = {n: {*v} for n, v in fields.items() if _names_layers(v, layers)}
    first = {n: v for n, v in fields.items() if FIRST_LAYERS.match(n) and type(v) is int}
    last = {n: v for n, v in fields.items() if LAST_LAYERS.match(n) and type(v) is int}
    tables = {
        n: {int(at): part for at, part in v.items()}
        for n, v in fields.items()
        if isinstance(v, dict) and v and all(str(at).isdigit() for at in v) and n != "id2label"
    }
    # The kind of a layer is what all these fields say about it.
    kinds = [
        (
            *(repr(v[i]) for n, v in lists.items() if n not in marks),
            *(i in places for places in marks.values()),
            *(repr(table.get(i)) for table in tables.values()),
            *(i < count for count in first.values()),
            *(i >= layers - count for count in last.values()),
        )
        for i in range(layers)
    ]
    periods = [v for n, v in fields.items() if PERIODS.search(n) and type(v) is int]
    periods += [len(v) for n, v in fields.items() if n == "block_types" and isinstance(v, list)]
    # Without such fields, keep one period of layers.
    if lists or marks or first or last:
        layer_indices = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    else:
        layer_indices = [*range(max([2, *periods, *(count + 1 for count in first.values())]))]
    layer_indices = [i for i in layer_indices if i < layers][:MOST_LAYERS]
    layer_indices = sorted({*layer_indices, *range(layers)[: 2 * (len(layer_indices) < 2)]})
    # Write all fields again for the layers that are kept.
    for name in counts:
        fields[name] = len(layer_indices)
    for name, values in lists.items():
        fields[name] = [values[i] for i in layer_indices]
    for name, places in marks.items():
        fields[name] = [at for at, i in enumerate(layer_indices) if i in places]
    for name, table in tables.items():
        fields[name] = {str(at): table[i] for at, i in enumerate(layer_indices) if i in table}
    for name, count in first.items():
        fields[name] = sum(i < count for i in layer_indices)
    for name, count in last.items():
        fields[name] = sum(i >= layers - count for i in layer_indices)
    if "moe_layer_end_index" in fields:
        fields["moe_layer_end_index"] = len(layer_indices) - 1
    if "attention_types" in fields and "attention_layers" in fields:  # GPT-Neo's other name for it
        fields["attention_types"] = [[fields["attention_layers"], 1]]


def _names_layers(value: Any, layers: int) -> bool:
    """Whether a list holds the indices of some layers."""
    if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
        return False
    return all(a < b for a, b in pairwise(value)) and value[-1] < layers > 2


def _divisor(fields: Mapping[str, Any]) -> int | None:
    """Return the largest common divisor of widths that leaves heads large enough; None if none."""
    heads = next((fields[n] for n in ("num_attention_heads", "n_head", "n_heads", "num_heads")
                  if type(fields.get(n)) is int), 1)  # fmt: skip
    hidden = next((fields[n] for n in ("hidden_size", "n_embd", "d_model", "embed_dim")
                   if type(fields.get(n)) is int), 0)  # fmt: skip
    exact = [v for n, v in _widths(fields) if not INDEPENDENT.search(n)]
    if not fields.get("head_dim") and hidden % heads == 0:
        exact.append(hidden // heads)
    fitting = (
        d for d in DIVISORS
        if all(v % (2 * d) == 0 and v // d >= NARROWEST for v in exact)
    )  # fmt: skip
    return next(fitting, None)


def _widths(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        is_width = WIDTHS.search(name) and not KEPT.search(name)
        if is_width and type(value) is int and value > NARROWEST:
            yield name, value


def _narrow_widths(fields: dict[str, Any], divisor: int) -> None:
    """Divide the widths of a config in place, also in its tables of layers; heads are kept.

    INDEPENDENT widths become multiples of NARROWEST. Attention scales and RoPE tables are adapted.
    """
    for name, value in [*_widths(fields)]:
        fields[name] = max(NARROWEST, value // divisor // NARROWEST * NARROWEST
                           if INDEPENDENT.search(name) else value // divisor)  # fmt: skip
    for name, value in fields.items():
        if isinstance(value, list) and "intermediate" in name:
            fields[name] = [max(NARROWEST, v // divisor) for v in value]
    for table in fields.values():  # of layers that differ
        if isinstance(table, dict) and all(isinstance(part, dict) for part in table.values()):
            for part in table.values():
                part.update({n: v // divisor for n, v in _widths(part)})
    # Attention scales, which families derive from their head size.
    if isinstance(fields.get("query_pre_attn_scalar"), int):
        fields["query_pre_attn_scalar"] = max(1, fields["query_pre_attn_scalar"] // divisor)
    if isinstance(fields.get("attention_multiplier"), float):
        fields["attention_multiplier"] *= divisor
    for rope in _ropes(fields):
        for name in ("short_factor", "long_factor"):
            if isinstance(rope.get(name), list):
                rope[name] = rope[name][::divisor]
        if isinstance(rope.get("mrope_section"), list):
            rope["mrope_section"] = [part // divisor for part in rope["mrope_section"]]


def _ropes(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(fields.get(name), dict):
            yield fields[name]
            yield from (v for v in fields[name].values() if isinstance(v, dict))


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Draw weights with which every part of the model affects its logits.

    With transformers' own initialisation attention is nearly uniform and many weights are zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor)

    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    for tensor in model.parameters():
        if tensor.dim() < 2:
            tensor.add_(0.2 * normal(tensor))
        else:  # embeddings are often the output layer, too
            scale = 3.0 if tensor in embeddings else GAIN
            tensor.copy_(normal(tensor) * scale * tensor.shape[-1] ** -0.5)
