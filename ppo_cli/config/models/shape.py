"""Sizes of a decoder from its config.json, and the bytes of it that one rank holds on a device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppo_cli.config.models.folder import EXPERT_KEYS
from ppo_cli.config.models.limits import needs_eager
from ppo_cli.config.models.weight_files import text_config

FLOAT = 4  # bytes
# On the CPU the gradient of one expert is as large as that of all experts of its layer, and is
# added to their sum. A process that keeps freed memory was measured to hold six of them.
UNRETURNED_EXPERT_GRADIENTS = 6
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers
# Families with two more norms in a layer (after attention and MLP); with norms of queries and keys.
POST_NORMS = {"gemma2", "gemma3", "gemma3_text"}
HEAD_NORMS = {"gemma3", "gemma3_text", "olmo2", "olmo3", "qwen3", "qwen3_moe"}
# Linear modules of a layer by their usual names, with the widths that they take and give.
LINEAR: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "self_attn.q_proj": (["hidden"], ["queries"]),
    "self_attn.k_proj": (["hidden"], ["keys"]),
    "self_attn.v_proj": (["hidden"], ["keys"]),
    "self_attn.o_proj": (["queries"], ["hidden"]),
    "self_attn.qkv_proj": (["hidden"], ["queries", "keys", "keys"]),
    "mlp.gate_proj": (["hidden"], ["inner"]),
    "mlp.up_proj": (["hidden"], ["inner"]),
    "mlp.down_proj": (["inner"], ["hidden"]),
    "mlp.gate_up_proj": (["hidden"], ["inner", "inner"]),
}
# A fused module -> the module that a layer has in its place.
FUSED = {"self_attn.qkv_proj": "self_attn.q_proj", "mlp.gate_up_proj": "mlp.gate_proj"}
ALL_LINEAR = "all-linear"
# Config fields of layers that are not plain decoder layers: state spaces, convolutions, latent
# attention, attention experts, and an embedding in each layer.
NOT_PLAIN = re.compile(
    r"mamba|ssm_|lru_|conv_|linear_|layers_block_type|attn_layer_|kv_lora_rank|kv_channels|"
    r"vocab_size_per_layer"
)
# Bytes for each hidden number that the norms of a layer keep in bfloat16. A norm computes in
# float32. One process has float32 states between layers: a norm keeps its input and the quotient
# (4 + 4), and five linear modules keep a bfloat16 copy of their input each. A lean norm keeps no
# quotient, and the modules behind it share one copy.
NORM_BYTES_ALONE = 2 * (4 + 4) + 5 * 2
LEAN_NORM_BYTES_ALONE = 2 * 4 + 2 * 2
POST_NORM_BYTES_ALONE = 2 * (4 + 4)
# Ranks have bfloat16 states: a norm keeps its input and result (2 + 2) and the quotient (4). A norm
# behind attention or MLP keeps its float32 input as well. `tests/config/test_simulated_memory.py`
# compares the sums with a simulation of FSDP2 (torch 2.13).
NORM_BYTES_RANKS = 2 * (2 + 4 + 2)
POST_NORM_BYTES_RANKS = 2 * (2 + 4 + 4)


@dataclass(frozen=True)
class Shape:
    """The sizes that the memory of a decoder depends on: widths of states, number of layers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    lean: bool = False  # its norms and MLPs can save less for the backward pass (on the CPU)
    experts: int = 0  # of a layer, on average over the layers
    expert_width: int = (
        0  # of all experts of a layer together; `inner` is that of a token's experts
    )
    routes: int = 0  # experts that process a token
    post_norms: bool = False
    head_norms: bool = False
    scores: bool = False  # attention keeps the scores of all pairs in memory (eager kernel)

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> Shape | None:
        """Read the fields of a config.json; None unless all layers are decoder attention layers."""
        fields = text_config(fields)

        def first(*names: str) -> Any:
            return next((fields[name] for name in names if fields.get(name) is not None), None)

        # Families spell the same size differently.
        hidden = first("hidden_size", "n_embd", "d_model")
        heads = first("num_attention_heads", "n_head", "n_heads", "num_heads")
        layers = first("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        vocabulary = first("vocab_size")
        kinds = {*(fields.get("layer_types") or ())}
        if not kinds <= ATTENTION or any(map(NOT_PLAIN.match, fields)):
            return None
        keys = first("num_key_value_heads", "num_kv_heads") or heads
        if not all(type(n) is int and n > 0 for n in (hidden, heads, layers, vocabulary, keys)):
            return None
        size = fields.get("head_dim") or hidden // heads
        inner = first(
            "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"
        )
        inner = (max(inner) if isinstance(inner, list) else inner) or 4 * hidden
        plain = cls(
            hidden=hidden,
            inner=inner,
            layers=layers,
            heads=heads,
            queries=heads * size,
            keys=(1 if fields.get("multi_query") else keys) * size,
            vocabulary=vocabulary,
            tied=bool(fields.get("tie_word_embeddings", True)),
            lean=fields.get("hidden_act") == "silu" and "rms_norm_eps" in fields,
            post_norms=fields.get("model_type") in POST_NORMS,
            head_norms=fields.get("model_type") in HEAD_NORMS,
            scores=needs_eager(fields) or fields.get("attn_logit_softcapping") is not None,
        )
        return _with_experts(plain, fields) if first(*EXPERT_KEYS) else plain

    @property
    def layer(self) -> int:
        """Number of weights in a layer of a gated decoder; biases and norms are small."""
        return 2 * self.hidden * (self.queries + self.keys) + self.mlp

    @property
    def mlp(self) -> int:
        """Number of weights in the MLP of a layer, or in all its experts."""
        return 3 * self.hidden * (self.expert_width or self.inner)

    @property
    def embedding(self) -> int:
        """Number of weights in the embedding, or in the head."""
        return self.vocabulary * self.hidden

    def parameters(self, *, head: bool = True) -> int:
        """Count all weights; a value model has no `head` over the vocabulary."""
        return self.layers * self.layer + self.embedding * (2 if head and not self.tied else 1)

    def adapter(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
        """Count the weights of a LoRA adapter on modules of the layers, as PEFT finds them.

        Gate and up projection of an expert are one weight, whose rank is twice as large. If the
        modules have unusual names, all linear modules are counted.
        """
        widths = [*self._adapted(targets)] if targets != ALL_LINEAR else []
        if widths:
            return rank * sum(widths)
        inputs = 5 * self.hidden + self.queries + self.inner
        spread = 0
        if self.experts:  # in place of one MLP: a router, and all experts
            spread = (3 * self.experts - 2) * self.hidden + 5 * self.expert_width - 3 * self.inner
        return self.layers * rank * (inputs + self.outputs + spread)

    def _adapted(self, targets: str | Sequence[str]) -> Iterator[int]:
        """Yield the widths of the targeted modules; nothing if a target is unknown."""
        patterns = [targets] if isinstance(targets, str) else targets
        modules = {
            f"model.layers.{layer}.{name}": name for layer in range(self.layers) for name in LINEAR
        }
        meant = {word: [m for m in modules if f".{m}".endswith(f".{word}")] for word in patterns}
        if isinstance(targets, str) and not meant[targets]:
            try:
                meant = {targets: [m for m in modules if re.fullmatch(targets, m)]}
            except re.error:  # the run refuses it and lists the modules
                return
        names = {module for group in meant.values() for module in group}
        routed = self.experts and any(modules[name].startswith("mlp.") for name in names)
        if not all(meant.values()) or routed:
            return
        for name in names:
            module = modules[name]
            split = FUSED.get(module, "")
            if split and name.replace(module, split) in names:  # a layer has only one of the two
                continue
            takes, gives = LINEAR[module]
            yield sum(getattr(self, width) for width in (*takes, *gives))

    @property
    def outputs(self) -> int:
        """Number of outputs of a layer's linear modules for a token."""
        return 2 * self.hidden + self.queries + 2 * self.keys + 2 * self.inner

    def expert_gradients(self, device: Device) -> int:
        """Bytes of the gradients of one layer's experts during its backward pass."""
        # On a GPU a grouped product computes the gradients of all experts at once.
        copies = UNRETURNED_EXPERT_GRADIENTS if device.keeps_freed else 1 if device.gpu else 2
        number = device.width if device.shards > 1 else FLOAT
        return copies * 3 * number * self.hidden * self.expert_width // device.tensor

    def attention_score_bytes(self, device: Device, row_tokens: int) -> int:
        """Bytes per token of eager attention in a forward pass without gradients.

        The rows have `row_tokens` tokens. It is 0 for a model that does not need eager attention
        (`scores` is False).

        In bfloat16: the scores, float32 copies before and after the softmax, two masks (windows
        have a separate one), three states, and queries, keys and values with those repeated for all
        heads. In float32: two copies of the scores.
        """
        if not self.scores:
            return 0
        state = FLOAT if device.half and device.shards == 1 else device.width
        split = device.width * (3 * self.queries + 2 * self.keys)
        split += (10 if device.half else 8) * self._score_numbers(row_tokens)
        return 3 * state * self.hidden + 2 * device.width * row_tokens + split // device.tensor

    def expert_state_bytes(self, state: int) -> int:
        """Bytes of a token in an expert layer, in a forward pass without gradients.

        For each of its experts the input, the output, and the weighted output in the order of the
        experts and in that of the tokens; and four states.
        """
        return state * self.hidden * (4 * self.routes + 4) if self.routes else 0

    def merged_experts(self, device: Device, targets: str | Sequence[str]) -> int:
        """Bytes of the experts of a layer with their adapter added; 0 if `targets` has no experts.

        PEFT adds the product of the adapter to the weights of all experts before they are used.
        """
        if not self.experts or any(self._adapted(targets)):
            return 0
        number = device.width if device.shards > 1 else FLOAT
        return 3 * number * self.hidden * self.expert_width

    def attention_score_gradients(self, device: Device, row: int) -> int:
        """Bytes of a token in the backward pass of the softmax, beyond the saved scores.

        Two float32 gradients; the scores in bfloat16 are freed by then.
        """
        return (6 if device.half else 4) * self._score_numbers(row) // device.tensor

    @property
    def _head_norm_numbers(self) -> int:
        return self.queries + self.keys if self.head_norms else 0

    def _score_numbers(self, row: int) -> int:
        return self.heads * row if self.scores else 0

    @property
    def _attention_numbers(self) -> int:
        return 2 * self.queries + 2 * self.keys + self.heads

    def layer_bytes(self, device: Device, row: int = 0, *, adapted: bool = False) -> int:
        """Bytes that autograd saves for a token in one layer; rows have `row` tokens.

        Saved are: inputs, quotients and results of two norms (6 hidden); queries, keys, values and
        results of attention with its normaliser; four states of the MLP. `lean` layers on the CPU
        save no quotient and three states of the MLP. Norms of queries and keys, and norms after
        attention and MLP, save their input and the quotient. Eager attention saves the scores
        after the cap, after the softmax in float32, and as they are multiplied. `compiled` layers
        compute norms from the states before them again, and keep three states of the MLP. In an
        `adapted` model norms are frozen: on ranks they do not save the quotient in bfloat16.
        """
        lean = self.lean and not device.gpu and device.tensor == 1 and not device.compiled
        routed = 2 * self.routes * self.hidden  # inputs and outputs of a token's experts
        inner = (3 if lean or device.compiled else 4) * self.inner
        if not device.half:
            # Attention over packed rows on the CPU saves each row's result and their concatenation.
            packed = self.queries if device.packed else 0
            split = self._attention_numbers + packed + inner + 3 * self._score_numbers(row)
            split += (1 if lean else 2) * self._head_norm_numbers
            norms = 4 if lean else 10 if self.post_norms else 6
            norms = (2 if device.compiled else norms) * self.hidden
            return FLOAT * (norms + routed + split // device.tensor)
        if device.compiled:
            norms = 2 * (device.width if device.shards > 1 else FLOAT)
        elif device.shards > 1:
            norms = NORM_BYTES_RANKS + (POST_NORM_BYTES_RANKS if self.post_norms else 0)
            norms -= 2 * device.width * adapted
        else:
            norms = LEAN_NORM_BYTES_ALONE if lean else NORM_BYTES_ALONE
            norms += POST_NORM_BYTES_ALONE if self.post_norms else 0
        split = 2 * (self._attention_numbers - self.heads + inner) + FLOAT * self.heads
        frozen = adapted and device.shards > 1
        split += (FLOAT if frozen else 6) * self._head_norm_numbers + 8 * self._score_numbers(row)
        if device.packed and not device.gpu:  # attention over rows in float32, and its result
            split += 2 * self._attention_numbers + FLOAT * self.queries
        return norms * self.hidden + device.width * routed + split // device.tensor


def _with_experts(plain: Shape, fields: Mapping[str, Any]) -> Shape | None:
    """Add the experts of a config.json; None if it does not say how many process a token."""

    def first(*names: str) -> int:
        value = next((fields[name] for name in names if fields.get(name) is not None), 0)
        return max(value) if isinstance(value, list) else value

    experts = first(*EXPERT_KEYS)
    routes = first("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    width = first("moe_intermediate_size", "intermediate_size")
    shared = first("shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or width * first(
        "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"
    )
    if not (routes and width):
        return None
    if "intermediate_size_mlp" in fields:  # Llama 4 has a shared expert and no field for it
        shared = width
    # Some layers have a plain MLP instead of experts: sizes are averages over all layers.
    dense = first("first_k_dense_replace", "moe_layer_start_index")
    dense += len(fields.get("mlp_only_layers") or ())
    step = first("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval") or 1
    sparse = len(fields.get("moe_layers") or ()) or (plain.layers - dense) // step

    def average(of_sparse: int, of_dense: int) -> int:
        total = sparse * of_sparse + (plain.layers - sparse) * of_dense
        return total // plain.layers

    return replace(
        plain,
        inner=average(routes * width + shared, plain.inner),
        expert_width=average(experts * width + shared, plain.inner),
        experts=average(experts, 0),
        routes=average(routes, 0),
    )


@dataclass(frozen=True)
class Device:
    """How one rank of the learner computes: precision, device, and how weights are sharded."""

    half: bool  # bfloat16
    gpu: bool
    shards: int  # ranks that share each weight
    tensor: int  # ranks that share each layer
    packed: bool
    keeps_freed: bool  # freed memory stays in the process (`engine.device.keep_freed_memory`)
    compiled: bool = False  # torch.compile chooses what a layer keeps

    @property
    def width(self) -> int:
        """Bytes of a number in a state between layers."""
        return 2 if self.half else FLOAT

    def sharded_bytes(self, shape: Shape, count: int) -> int:
        """Bytes on one rank of `count` float32 numbers that are sharded like a model's weights."""
        inside = shape.layers * shape.layer
        share = min(count, inside) // self.tensor + max(0, count - inside)
        return FLOAT * share // self.shards

    @property
    def frozen_width(self) -> int:
        """Bytes of a frozen weight; one process on the CPU keeps float32."""
        return self.width if self.gpu or self.shards > 1 else FLOAT

    def frozen(self, shape: Shape) -> int:
        """Bytes of a reference model's weights.

        With bfloat16, one process on the CPU has linear layers and head in bfloat16; one process on
        a GPU has everything but the experts in it, which its actor computes in float32.
        """
        if self.gpu or self.shards > 1 or not self.half:
            all_weights = self.sharded_bytes(shape, shape.parameters()) * self.frozen_width // FLOAT
            return all_weights + self.float_experts(shape)
        return FLOAT * shape.embedding + 2 * (shape.layers * shape.layer + shape.embedding)

    def float_experts(self, shape: Shape) -> int:
        """Bytes of frozen experts beyond the computing precision: one process has them in float32.

        Ranks, and a process on the CPU, have no such difference.
        """
        if not (shape.experts and self.half and self.gpu and self.shards == 1):
            return 0
        return (FLOAT - self.width) * shape.layers * 3 * shape.hidden * shape.expert_width
