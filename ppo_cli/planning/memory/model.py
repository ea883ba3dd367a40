"""Bytes of one model on one learner rank: at rest, in an annotation and in an update.

The peak of a pass may be at one of a few points: the first gather of weights, the logits, the
backward pass of the last layer, its end, the optimizer's step. Each is a sum of what exists at that
point, and the largest counts. The terms for GPUs come from a simulation of the learner (FSDP2 of
torch 2.13); `tests/config/test_simulated_memory.py` compares the sums with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_cli.config.models.shape import FLOAT, Device, Shape
from ppo_cli.config.schema.algorithm import Actor, Critic, Sharding
from ppo_cli.config.schema.run import Config, Data, Model
from ppo_cli.planning.placement import data_ranks

# Response tokens whose logits exist at once. With 2,048 a step of 10 million parameters took
# 270 MiB more, and was no faster.
LOGIT_CHUNK = 512
# Up to this many logits of a micro-batch are saved for the backward pass instead of computed again:
# they take little memory, and much of the time of a small model (notes/lab_book.md).
KEPT_LOGITS = 1 << 24
FOUR_BITS = 1 / 2 + 1 / 64 + FLOAT / 64 / 256  # bytes of an NF4 weight with its block's scales
EIGHT_BITS = (1 + FLOAT / 256) / FLOAT  # an 8-bit code and its block's scale, relative to float32
# Float32 copies of a chunk's logits that exist at once: in a backward pass, in one with saved
# logits, in a forward pass alone. In bfloat16 the product and the two factors of the entropy are
# half a copy each, next to two in float32.
BACKWARD_LOGITS, KEPT_BACKWARD_LOGITS, FORWARD_LOGITS, HALF_FORWARD_LOGITS = 4, 3, 3, 3.5
# States as wide as the MLP: in a forward pass (gate, up, product; an adapter adds its result to
# one), and in the backward pass the gradients of the product and of both its factors.
FORWARD_INNER, ADAPTED_FORWARD_INNER, BACKWARD_INNER = 3, 4, 3
# How many of these are float32 in 4-bit layers, whose output has the precision of their input: one
# process has float32 states between layers.
IN_4_BITS_INNER, IN_4_BITS_BACKWARD_INNER = 3, 2
# A process on the CPU keeps freed memory, and glibc's aligned allocation does not fit a block into
# the hole of another of the same size: blocks of the forward passes (of an annotation, of an
# update) still count when those of the backward pass are added. Larger blocks are returned.
# The small gradients of adapters fragment what layers free, by about an output of each module.
LARGEST_UNRETURNED = 1 << 30


@dataclass(frozen=True)
class RoleBytes:
    """Bytes of a role on a device, in the phase in which the role needs most."""

    parameters: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one model: at rest, and in addition in an annotation and in an update.

    `fetched` is on the device for a whole annotation: weights that are gathered once, or that come
    from host memory. `host` is what stays in host memory. `trained` is the float32 weights.
    """

    share: RoleBytes
    rest: int
    annotate: int
    update: int
    fetched: int = 0
    host: RoleBytes = RoleBytes()
    trained: int = 0


def count_wide_head(model: Model, shape: Shape, device: Device) -> int:
    """Count the float32 copy of an actor's output layer; 0 where its own weights are used."""
    return FLOAT * shape.embedding if model.widens_head and device.half else 0


@dataclass(frozen=True)
class ModelOnRank:
    """A model on one learner rank; `part`: settings of a trained model, None for a reference."""

    config: Config
    device: Device
    shape: Shape
    part: Actor | Critic | None
    mini: int  # prompts of a mini-batch
    sharding: Sharding

    def count(self) -> ModelBytes:
        """Count its bytes at rest, in an annotation and in an update."""
        at_home = self.sharding.param_offload and self.device.gpu
        rest = 0 if at_home else self.weights
        # One process, and ranks with shards of a reference, move offloaded weights to the device
        # for the whole pass.
        stays_on_device = self.device.shards == 1 or (
            self.part is None and self.config.loads_reference_once
        )
        fetched = (self.weights - rest if stays_on_device else 0) + self.gathered_once
        host = RoleBytes(parameters=self.weights - rest)
        if self.part is None:
            return ModelBytes(
                RoleBytes(parameters=self.weights), rest, self.annotation(), 0, fetched, host
            )
        moments, gradients, step = self.moments, self.gradients, self.gradients
        if at_home and self.device.shards > 1:  # ranks receive gradients and step in host memory
            host, moments = replace(host, gradients=self.trained, moments=moments), 0
        elif self.sharding.optimizer_offload and self.device.gpu:
            step += moments
            host = replace(host, moments=moments)
        share = RoleBytes(self.weights, gradients, moments, self.activations, self.update_logits)
        return ModelBytes(
            share,
            rest + (moments if step == gradients else 0),
            self.annotation(),
            fetched + max(*self.update_peaks().values(), step),
            fetched,
            host,
            self.trained,
        )

    @property
    def is_critic(self) -> bool:
        """Whether it has a value head instead of one over the vocabulary."""
        return self.part is self.config.critic

    @property
    def lora_rank(self) -> int:
        """The rank of its LoRA adapter; 0 if all weights are trained, or none."""
        model = self.config.critic.model if self.is_critic else self.config.model
        return model.lora_rank if self.part is not None else 0

    @property
    def attention_frozen(self) -> bool:
        """Whether only its MLPs are trained; norms and head are small."""
        return self.is_critic and self.config.critic.model.freeze_attention

    @property
    def trains_all(self) -> bool:
        """Whether all its weights are trained."""
        return not (self.lora_rank or self.attention_frozen)

    @property
    def in_4_bits(self) -> bool:
        """Whether the linear layers under the adapter are quantised to NF4."""
        model = self.config.critic.model if self.is_critic else self.config.model
        return self.part is not None and model.quantization is not None

    @property
    def trained(self) -> int:
        """Bytes of the trained float32 weights on this rank."""
        if self.lora_rank:
            model = self.config.critic.model if self.is_critic else self.config.model
            adapter = self.shape.adapter(self.lora_rank, model.target_modules)
            return FLOAT * adapter // self.device.shards
        if self.attention_frozen:
            return self.device.sharded_bytes(self.shape, self.shape.layers * self.shape.mlp)
        return self.device.sharded_bytes(self.shape, self.shape.parameters(head=not self.is_critic))

    @property
    def weights(self) -> int:
        """Bytes of all its weights on this rank."""
        if self.part is None:
            return self.device.frozen(self.shape)
        if self.trains_all:
            return self.trained
        base = self.device.sharded_bytes(self.shape, self.shape.parameters(head=not self.is_critic))
        if self.attention_frozen:
            base -= self.trained
        width = self.device.frozen_width
        base = base * width // FLOAT + self.device.float_experts(self.shape)
        if self.in_4_bits:
            base -= int((width - FOUR_BITS) * self.shape.layers * self.shape.layer)
        return base + self.trained

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of this rank on the device."""
        at_home = self.device.gpu and self.device.shards > 1 and self.sharding.param_offload
        return 0 if at_home else self.trained

    @property
    def moments(self) -> int:
        """Bytes of AdamW's two moments."""
        assert self.part is not None
        bits = EIGHT_BITS if self.part.optim.optimizer == "AdamW8bit" else 1
        return int(2 * self.trained * bits)

    # What ranks gather (FSDP2): the root group (embedding and head) for a whole pass; each layer,
    # and the embedding of a critic that trains it, only while it computes.

    @property
    def root(self) -> int:
        """Number of weights in the FSDP2 root group: embedding and untied head, unless separate."""
        if self.embedding:
            return 0
        return self.shape.embedding * (1 if self.shape.tied or self.is_critic else 2)

    @property
    def embedding(self) -> int:
        """Number of weights of the embedding if it is a separate FSDP2 group, 0 if it is not."""
        return self.shape.embedding if self.is_critic and self.trains_all else 0

    @property
    def layer(self) -> int:
        """Number of weights of a layer on one of its tensor-parallel ranks."""
        return self.shape.layer // self.device.tensor

    @property
    def gathered_once(self) -> int:
        """Bytes of the gathered weights if they stay gathered through a step, 0 if they do not."""
        if self.device.shards == 1 or not self.sharding.stays_whole:
            return 0
        numbers = self.root + self.embedding + self.shape.layers * self.layer
        return self.device.width * numbers

    @property
    def first_gather(self) -> int:
        """Bytes at the start of a pass: the first gather's receive buffer and its copy."""
        if self.device.shards == 1 or self.gathered_once:
            return 0
        return 2 * self.device.width * max(self.embedding, self.root + self.layer)

    @property
    def gathered(self) -> int:
        """Bytes during a pass: the root group, a layer, and the buffer of the prefetched one."""
        if self.device.shards == 1 or self.gathered_once:
            return 0
        return self.device.width * (self.root + min(2, self.shape.layers) * self.layer)

    @property
    def freed_layer(self) -> int:
        """Bytes of the gathered layer that is freed before the logits are computed."""
        return self.device.width * self.layer if self.gathered else 0

    @property
    def cast(self) -> int:
        """Bytes of the bfloat16 copies of weights that autocast makes in a forward pass.

        Copies of trained weights stay to its end; a copy of a frozen float32 weight only for one
        product. Ranks have none.
        """
        if self.in_4_bits:
            return self._dequantised
        if not self.device.half or self.device.shards > 1:
            return 0
        head = 0 if self.is_critic else self.shape.embedding
        if self.part is None or self.lora_rank:
            if self.device.frozen_width < FLOAT:
                return 0
            return self.device.width * max(self.shape.hidden * self.shape.inner, head)
        return self.device.width * (self.shape.layers * self.shape.layer + head)

    @property
    def _dequantised(self) -> int:
        """Bytes of a dequantised 4-bit layer while it is used: float32, and its bfloat16 copy."""
        width = FLOAT + (self.device.width if self.device.half else 0)
        return width * self.shape.hidden * max(self.shape.inner, self.shape.queries)

    @property
    def _float32_excess(self) -> int:
        """Bytes that a float32 state of a 4-bit MLP takes beyond the computing precision."""
        wide = self.in_4_bits and self.state_bytes > self.device.width
        return (FLOAT - self.device.width) * self.shape.inner if wide else 0

    # Annotation.

    def annotation(self) -> int:
        """Bytes of a forward pass without gradients, in addition to `rest` and `fetched`."""
        config, shape, device = self.config, self.shape, self.device
        longest = _longest(config.data)
        budget = config.ref.log_prob_max_token_len_per_gpu
        all_rows = -(-config.data.train_batch_size * config.rollout.n // data_ranks(config))
        tokens = min(all_rows * longest, max(longest, budget))
        inner = ADAPTED_FORWARD_INNER if self.lora_rank else FORWARD_INNER
        inner -= device.compiled  # the product takes the place of a factor
        states = tokens * (
            (2 if device.compiled else 4) * self.state_bytes * shape.hidden
            + inner * device.width * shape.inner // device.tensor
            + IN_4_BITS_INNER * self._float32_excess
        )
        scored = tokens * shape.attention_score_bytes(device, longest)
        routed = tokens * shape.expert_state_bytes(self.state_bytes)
        peak = max(
            max(states, routed) + self._merged_experts,
            scored,
            self._logits(tokens) - self.freed_layer,
        )
        return max(self.first_gather, self.gathered + self.cast + peak)

    @property
    def _wide_head(self) -> int:
        return 0 if self.is_critic else count_wide_head(self.config.model, self.shape, self.device)

    def _logits(self, tokens: int) -> int:
        """Bytes of the logits of a micro-batch with this number of tokens; 0 for a critic."""
        if self.is_critic:
            return 0
        config, chunk = self.config, FLOAT * self.shape.vocabulary
        answers = config.data.max_response_length / _longest(config.data)
        full = "algorithm.kl_penalty" in config.full_kls
        copies = HALF_FORWARD_LOGITS if self.device.half else FORWARD_LOGITS
        logits = int(copies * chunk) * min(LOGIT_CHUNK, int(tokens * answers))
        return logits * (2 if full else 1) + self._wide_head

    @property
    def state_bytes(self) -> int:
        """Bytes of a number in the states between layers."""
        return FLOAT if self.device.half and self.device.shards == 1 else self.device.width

    # Update.

    @property
    def tokens(self) -> int:
        """Number of tokens in the largest micro-batch."""
        assert self.part is not None
        longest, rows = _longest(self.config.data), self._rows
        if self.part.ppo_micro_batch_size_per_gpu is not None:
            rows = min(rows, self.part.ppo_micro_batch_size_per_gpu)
        budget = self.part.ppo_max_token_len_per_gpu
        return min(rows * longest, max(longest, budget))

    @property
    def _rows(self) -> int:
        return -(-self.mini * self.config.rollout.n // data_ranks(self.config))

    @property
    def _layer_bytes(self) -> int:
        longest, adapted = _longest(self.config.data), self.lora_rank > 0
        return self.shape.layer_bytes(self.device, longest, adapted=adapted)

    @property
    def _merged_experts(self) -> int:
        model = self.config.critic.model if self.is_critic else self.config.model
        targets = model.target_modules
        return self.shape.merged_experts(self.device, targets) if self.lora_rank else 0

    @property
    def recomputes(self) -> bool:
        """Whether layers are recomputed in the backward pass (gradient checkpointing)."""
        model = self.config.critic.model if self.is_critic else self.config.model
        return model.enable_gradient_checkpointing

    @property
    def activations(self) -> int:
        """Bytes that a forward pass saves for the backward pass."""
        state = self.shape.hidden * self.state_bytes
        layer = state if self.recomputes else self._layer_bytes
        saved = self.tokens * (2 * state + self.shape.layers * layer)
        if self.lora_rank and self.device.keeps_freed:
            at_once = 1 if self.recomputes else self.shape.layers
            saved += self.tokens * at_once * self.shape.outputs * FLOAT
        return saved + (0 if self.recomputes else self.shape.layers * self._merged_experts)

    @property
    def update_logits(self) -> int:
        """Bytes of the logits and their gradients in an update."""
        if self.is_critic:
            return 0
        config, device = self.config, self.device
        tokens = int(self.tokens * config.data.max_response_length / _longest(config.data))
        chunk = FLOAT * self.shape.vocabulary * min(LOGIT_CHUNK, tokens)
        all_logits = self.shape.vocabulary * tokens
        saved = FLOAT * all_logits if all_logits <= KEPT_LOGITS else 0
        backward = KEPT_BACKWARD_LOGITS if saved else BACKWARD_LOGITS
        full = "actor.kl_loss_type" in config.full_kls
        unreturned = device.keeps_freed and chunk <= LARGEST_UNRETURNED
        copies = (
            backward + (BACKWARD_LOGITS if full else 0) + unreturned * (FORWARD_LOGITS + backward)
        )
        return saved + chunk * copies + 2 * self._wide_head  # and its gradient

    def update_peaks(self) -> dict[str, int]:
        """Bytes at each point of an update that may be its peak, except the optimizer's step."""
        device, shape = self.device, self.shape
        several = self.tokens < self._rows * _longest(self.config.data)
        # Gradients of earlier micro-batches; unsharded if they are reduced at the end of the step.
        earlier = self.gradients if several else 0
        if self.gathered_once:
            earlier *= device.shards
        ranks, trains_all = device.shards > 1, self.trains_all
        number = device.width if ranks else FLOAT  # of a gradient before it is reduced
        head = number * shape.embedding if trains_all and not self.is_critic else 0
        # The gradient of a tied table waits for that of the embedding; a sharded one for the root.
        waits = head if ranks or shape.tied else 0
        open_ = earlier + self.activations + self.gathered
        layer = self._layer_at_work()
        layer_gradients = self.layer if trains_all else shape.mlp // device.tensor
        reduced = FLOAT * layer_gradients if ranks and not self.lora_rank else 0
        casts = not self.lora_rank or device.frozen_width == FLOAT
        if device.half and not ranks and not self.in_4_bits and casts:
            copies = 1 if self.recomputes else shape.layers
            open_ += copies * device.width * shape.layer
        # Root gradients, and the buffer in which they are reduced.
        tables = self.root + self.embedding
        root = (number + FLOAT) * tables if ranks else FLOAT * shape.embedding + waits
        # The embedding is gathered next, instead of a layer.
        ahead = device.width * max(0, self.embedding - self.layer) if self.gathered else 0
        end = max(self.gradients, earlier)
        return {
            "the first gather": earlier + self.first_gather,
            "the forward pass": open_ + self.cast + self._logits(self.tokens) - self.freed_layer,
            "the logits": open_ + self.update_logits + head - self.freed_layer,
            "the last layer": open_ + reduced + waits + layer,
            "the first layer": end + self.gathered + ahead + reduced + waits + layer,
            "the embedding": end + reduced + (root if trains_all else 0),
        }

    def _layer_at_work(self) -> int:
        """Bytes of one layer during its backward pass."""
        device, shape = self.device, self.shape
        inner = BACKWARD_INNER * device.width * shape.inner // device.tensor
        inner += (IN_4_BITS_INNER + IN_4_BITS_BACKWARD_INNER) * self._float32_excess
        # Without checkpointing its states are part of the activations. The CPU's allocator does not
        # reuse their memory.
        states = self._layer_bytes if self.recomputes or not device.gpu else 0
        inside = self.tokens * (states + inner)
        scored = shape.attention_score_gradients(device, _longest(self.config.data))
        # Two of the four states of the MLP remain when all gradients of experts exist, and none in
        # the backward pass of attention.
        state = device.width * shape.inner // device.tensor
        inside = max(inside, self.tokens * (states - 4 * state + scored))
        if self._merged_experts:
            # The gradients of the experts' outputs before and after they were weighted, in both
            # orders.
            rows = self.state_bytes * shape.hidden * (3 * shape.routes + 1)
            merged = self._merged_experts if self.recomputes else 0
            inside = max(inside, self.tokens * (states + rows) + merged)
        if shape.experts and not self.lora_rank:
            experts, saved = shape.expert_gradients(device), self.tokens * states
            routed = saved - 2 * self.tokens * state if device.gpu else inside
            inside = max(inside, routed + experts)
        return inside + (self._dequantised if self.in_4_bits else 0)


def _longest(data: Data) -> int:
    return data.max_prompt_length + data.max_response_length
