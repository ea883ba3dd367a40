"""What a config.json tells of the sizes of a decoder, and what one rank holds of it on a device."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppo_cli.config.models.folder import EXPERT_KEYS
from ppo_cli.config.models.limits import needs_eager
from ppo_cli.config.models.weight_files import text_config

FLOAT = 4  # bytes
# The gradient of one expert is as large as that of all experts of its layer, and is added to their
# sum; a process that keeps what it frees was measured to hold six.
KEPT_EXPERTS = 6
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers
# Families with two more norms in a layer, behind attention and MLP; with norms of queries and keys.
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
FUSED = {"self_attn.qkv_proj": "self_attn.q_proj", "mlp.gate_up_proj": "mlp.gate_proj"}
ALL_LINEAR = "all-linear"
# Keys of other layers: state spaces, convolutions, latent attention, experts of attention, and
# embeddings for each layer.
NOT_PLAIN = re.compile(
    r"mamba|ssm_|lru_|conv_|linear_|layers_block_type|attn_layer_|kv_lora_rank|kv_channels|"
    r"vocab_size_per_layer"
)


@dataclass(frozen=True)
class Shape:
    """What memory depends on in a decoder: widths of states, and how many layers there are."""

    hidden: int
    inner: int
    layers: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    lean: bool = False  # norms and units of which the learner keeps less (`lean_layers`)
    experts: int = 0  # of a layer, on average over the layers
    held: int = 0  # widths of all experts of a layer together; `inner` are those that a token takes
    routes: int = 0  # experts that a token takes
    post_norms: bool = False
    head_norms: bool = False
    scores: bool = False  # attention holds the scores of all pairs: no kernel caps them

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Shape | None:
        """Read a config.json; None for one that is not a decoder whose layers all attend."""
        told = text_config(told)

        def first(*names: str) -> Any:
            return next((told[name] for name in names if told.get(name) is not None), None)

        hidden = first("hidden_size", "n_embd", "d_model")
        heads = first("num_attention_heads", "n_head", "n_heads", "num_heads")
        layers = first("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        vocabulary = first("vocab_size")
        kinds = {*(told.get("layer_types") or ())}
        if not kinds <= ATTENTION or any(map(NOT_PLAIN.match, told)):
            return None
        if not all(type(n) is int and n > 0 for n in (hidden, heads, layers, vocabulary)):
            return None
        size = told.get("head_dim") or hidden // heads
        keys = first("num_key_value_heads", "num_kv_heads") or heads
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
            keys=(1 if told.get("multi_query") else keys) * size,
            vocabulary=vocabulary,
            tied=bool(told.get("tie_word_embeddings", True)),
            lean=told.get("hidden_act") == "silu" and "rms_norm_eps" in told,
            post_norms=told.get("model_type") in POST_NORMS,
            head_norms=told.get("model_type") in HEAD_NORMS,
            scores=needs_eager(told) or told.get("attn_logit_softcapping") is not None,
        )
        return _with_experts(plain, told) if first(*EXPERT_KEYS) else plain

    @property
    def layer(self) -> int:
        """Weights of a layer of a gated decoder; biases and norms are small."""
        inner = self.held or self.inner
        return 2 * self.hidden * (self.queries + self.keys) + 3 * self.hidden * inner

    @property
    def embedding(self) -> int:
        """Weights of the embedding, or of the head."""
        return self.vocabulary * self.hidden

    def parameters(self, *, head: bool = True) -> int:
        """Count all weights; a value model has no `head` over the vocabulary."""
        return self.layers * self.layer + self.embedding * (2 if head and not self.tied else 1)

    def adapter(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR) -> int:
        """Count the weights of a LoRA adapter on modules of the layers, as PEFT finds them.

        Gate and up projection of an expert are one weight, whose rank is twice as large. What is
        adapted in layers whose modules have other names is not known: all are counted.
        """
        widths = [*self._adapted(targets)] if targets != ALL_LINEAR else []
        if widths:
            return rank * sum(widths)
        inputs = 5 * self.hidden + self.queries + self.inner
        spread = 0
        if self.experts:  # in place of one MLP: a router, and all experts
            spread = (3 * self.experts - 2) * self.hidden + 5 * self.held - 3 * self.inner
        return self.layers * rank * (inputs + self.outputs + spread)

    def _adapted(self, targets: str | Sequence[str]) -> Iterator[int]:
        """Widths of the modules that are named, or match a pattern; none where one is unknown."""
        words = [targets] if isinstance(targets, str) else targets
        modules = {
            f"model.layers.{layer}.{name}": name for layer in range(self.layers) for name in LINEAR
        }
        meant = {word: [m for m in modules if f".{m}".endswith(f".{word}")] for word in words}
        if isinstance(targets, str) and not meant[targets]:
            try:
                meant = {targets: [m for m in modules if re.fullmatch(targets, m)]}
            except re.error:  # which a run refuses with the names of the modules
                return
        names = {module for group in meant.values() for module in group}
        routed = self.experts and any(modules[name].startswith("mlp.") for name in names)
        if not all(meant.values()) or routed:
            return
        for name in names:
            module = modules[name]
            split = FUSED.get(module, "")
            if split and name.replace(module, split) in names:  # a layer has one or the other
                continue
            takes, gives = LINEAR[module]
            yield sum(getattr(self, width) for width in (*takes, *gives))

    @property
    def outputs(self) -> int:
        """Numbers that the linear modules of a layer give for a token."""
        return 2 * self.hidden + self.queries + 2 * self.keys + 2 * self.inner

    def expert_gradients(self, device: Device) -> int:
        """Bytes of the gradients of one layer's experts while a backward pass computes them."""
        # On a GPU one product gives those of all experts at once.
        copies = KEPT_EXPERTS if device.keeps_freed else 1 if device.gpu else 2
        number = device.width if device.shards > 1 else FLOAT
        return copies * 3 * number * self.hidden * self.held // device.tensor

    def scored_bytes(self, device: Device, row: int) -> int:
        """Bytes of a token in attention that holds scores, in a forward pass without gradients.

        In bfloat16 the scores, float32 ones before and after the softmax, two masks (windows have
        one of their own), three states, and queries, keys and values with those repeated for all
        heads; in float32 two copies of the scores.
        """
        if not self.scores:
            return 0
        state = FLOAT if device.half and device.shards == 1 else device.width
        split = device.width * (3 * self.queries + 2 * self.keys)
        split += (10 if device.half else 8) * self._scored(row)
        return 3 * state * self.hidden + 2 * device.width * row + split // device.tensor

    def routed_bytes(self, state: int) -> int:
        """Bytes of a token among experts in a forward pass without gradients.

        What each of its experts is given, gives, and gives after its weight, and four states.
        """
        return state * self.hidden * (3 * self.routes + 4) if self.routes else 0

    def scored_gradients(self, device: Device, row: int) -> int:
        """Bytes of a token in the backward pass of the softmax beyond the scores that are kept.

        Two float32 gradients, where the scores in bfloat16 are given back.
        """
        return (6 if device.half else 4) * self._scored(row) // device.tensor

    @property
    def _normed_heads(self) -> int:
        return self.queries + self.keys if self.head_norms else 0

    def _scored(self, row: int) -> int:
        return self.heads * row if self.scores else 0

    @property
    def _attention(self) -> int:
        return 2 * self.queries + 2 * self.keys + self.heads

    def layer_bytes(self, device: Device, row: int = 0) -> int:
        """Bytes that autograd keeps of a token in one layer; rows have `row` tokens.

        These are inputs, quotients and results of two norms (6 hidden), queries, keys, values and
        results of attention with its normaliser, and four states of the MLP; where layers are
        `lean` on the CPU, a norm keeps no quotients and the MLP three states.
        In bfloat16, norms compute in float32. Without sharding the states between layers are
        float32 too, and each of five linear modules keeps its own copy of what it is given, or
        both of a lean norm's result share one. Norms of queries and keys, and those behind
        attention and MLP, keep what they get and the quotient. Scores are kept after the cap,
        after the softmax in float32, and as they are multiplied.
        """
        lean = self.lean and not device.gpu and device.tensor == 1
        routed = 2 * self.routes * self.hidden  # what experts are given, and what they give
        inner = (3 if lean else 4) * self.inner
        if not device.half:
            # Attention to packed rows on the CPU keeps each row's result and all together.
            packed = self.queries if device.packed else 0
            split = self._attention + packed + inner + 3 * self._scored(row)
            split += (1 if lean else 2) * self._normed_heads
            norms = (4 if lean else 10 if self.post_norms else 6) * self.hidden
            return FLOAT * (norms + routed + split // device.tensor)
        alone, ranks = (12 if lean else 26), 16
        if self.post_norms:  # whose float32 quotients stay
            alone, ranks = alone + 16, ranks + 20
        norms = (ranks if device.shards > 1 else alone) * self.hidden
        split = 2 * (self._attention - self.heads + inner) + FLOAT * self.heads
        split += 6 * self._normed_heads + 8 * self._scored(row)
        if device.packed and not device.gpu:  # attention to rows in float32, and its result
            split += 2 * self._attention + FLOAT * self.queries
        return norms + device.width * routed + split // device.tensor


def _with_experts(plain: Shape, told: Mapping[str, Any]) -> Shape | None:
    """Add the experts of a config.json; None where it does not tell how many a token takes."""

    def first(*names: str) -> int:
        value = next((told[name] for name in names if told.get(name) is not None), 0)
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
    if "intermediate_size_mlp" in told:  # Llama 4 has a shared expert without a word
        shared = width
    dense = first("first_k_dense_replace", "moe_layer_start_index")
    dense += len(told.get("mlp_only_layers") or ())
    step = first("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval") or 1
    sparse = len(told.get("moe_layers") or ()) or (plain.layers - dense) // step

    def average(of_sparse: int, of_dense: int) -> int:
        whole = sparse * of_sparse + (plain.layers - sparse) * of_dense
        return whole // plain.layers

    return replace(
        plain,
        inner=average(routes * width + shared, plain.inner),
        held=average(experts * width + shared, plain.inner),
        experts=average(experts, 0),
        routes=average(routes, 0),
    )


@dataclass(frozen=True)
class Device:
    """How the learner computes on a device: what one rank holds and how it computes."""

    half: bool  # bfloat16
    gpu: bool
    shards: int  # ranks that share each weight
    tensor: int  # ranks that share each layer
    packed: bool
    keeps_freed: bool  # whether freed memory stays in the process (`keep_freed_memory`)

    @property
    def width(self) -> int:
        """Bytes of a state."""
        return 2 if self.half else FLOAT

    def held(self, shape: Shape, count: int) -> int:
        """Bytes of `count` float32 numbers spread as the weights of a model are."""
        inside = shape.layers * shape.layer
        share = min(count, inside) // self.tensor + max(0, count - inside)
        return FLOAT * share // self.shards

    @property
    def frozen_width(self) -> int:
        """Bytes of a frozen weight, but for what one process on the CPU holds."""
        return self.width if self.gpu or self.shards > 1 else FLOAT

    def frozen(self, shape: Shape) -> int:
        """Bytes of a reference's weights.

        In bfloat16 one process on the CPU holds its linear layers, the head among them, so; one on
        a GPU all but experts, which an actor of one process computes in float32.
        """
        if self.gpu or self.shards > 1 or not self.half:
            whole = self.held(shape, shape.parameters()) * self.frozen_width // FLOAT
            in_float = shape.experts and self.half and self.shards == 1
            experts = shape.layers * 3 * shape.hidden * shape.held if in_float else 0
            return whole + (FLOAT - self.width) * experts
        return FLOAT * shape.embedding + 2 * (shape.layers * shape.layer + shape.embedding)

    def gathered(self, shape: Shape, whole: bool) -> int:
        """Bytes of the weights that are whole while one works: embeddings, and two layers."""
        if self.shards == 1:
            return 0
        layers = shape.layers if whole else min(2, shape.layers)
        root = shape.embedding * (1 if shape.tied else 2)
        return self.width * (root + layers * shape.layer // self.tensor)
