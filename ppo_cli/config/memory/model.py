"""What one model takes of one learner rank: at rest, in an annotation and in an update.

A pass has a few moments that may be its highest: the first gather of weights, the logits, the
backward pass of the last layer, its end, the optimizer's step. Each is a sum of what exists at
that moment, and the highest counts. The terms on GPUs were found in a simulation of the learner
(FSDP2 of torch 2.13); `tests/config/test_simulated_memory.py` compares the sums with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_cli.config.derived import loads_reference_once, micro_batch_tokens
from ppo_cli.config.models.shape import FLOAT, Device, Shape
from ppo_cli.config.placement import data_ranks
from ppo_cli.config.schema.algorithm import Actor, Critic, Sharding
from ppo_cli.config.schema.run import Config

# Response tokens whose logits exist at once. With 2,048 a step of 10 million parameters took
# 270 MiB more, and was no faster.
LOGIT_CHUNK = 512
# Logits of a micro-batch that are kept for its backward pass, not computed again: few numbers are
# little memory, and all the more time of a small model (docs/log.md).
KEPT_LOGITS = 1 << 24
FOUR_BITS = 1 / 2 + 1 / 64 + FLOAT / 64 / 256  # bytes of a weight in NF4, and of sizes of blocks
EIGHT_BITS = (1 + FLOAT / 256) / FLOAT  # a code, and a block's size, as a share of a float32
# Float32 copies of a chunk's logits at once: in a backward pass, in one beside kept logits, in a
# forward pass alone. In bfloat16 the product and the two factors of the entropy are half a copy
# each, next to two in float32.
BACKWARD_LOGITS, KEPT_BACKWARD_LOGITS, FORWARD_LOGITS, HALF_FORWARD_LOGITS = 4, 3, 3, 3.5
# States as wide as the MLP: in a forward pass (gate, up, product; an adapter adds its own result
# to one), and in the backward pass the gradients of the product and of both its factors.
FORWARD_INNER, ADAPTED_FORWARD_INNER, BACKWARD_INNER = 3, 4, 3
# Of these, states that are float32 where layers in 4 bits give what they get: one process has
# float32 states between layers.
IN_4_BITS_INNER, IN_4_BITS_BACKWARD_INNER = 3, 2
# A process on the CPU keeps what it frees, and glibc's aligned allocation does not fit a block
# into the hole of one of the same size: blocks of the forward passes (of an annotation, of an
# update) are still held when those of the backward pass are added. Larger ones are given back.
# The small gradients of adapters lie between what layers free, about an output of each module.
LARGEST_HELD = 1 << 30


@dataclass(frozen=True)
class Share:
    """Bytes that a role takes of a device, in the phase in which it takes most."""

    parameters: int = 0
    gradients: int = 0
    moments: int = 0
    activations: int = 0
    logits: int = 0
    kv_cache: int = 0


@dataclass(frozen=True)
class Work:
    """What one model needs: at rest, and beyond it in an annotation and in an update.

    `brought` is on the device for all of an annotation: weights that are gathered once, or that
    come from host memory. `host` is what it keeps there. `trained` are bytes of float32 weights.
    """

    share: Share
    rest: int
    annotate: int
    update: int
    brought: int = 0
    host: Share = Share()
    trained: int = 0


@dataclass(frozen=True)
class Model:
    """A model on one learner rank; `part` holds the settings of a trained one."""

    config: Config
    device: Device
    shape: Shape
    part: Actor | Critic | None
    mini: int  # prompts of a mini-batch
    sharding: Sharding

    def count(self) -> Work:
        """Count it at rest, in an annotation and in an update."""
        at_home = self.sharding.param_offload and self.device.gpu
        rest = 0 if at_home else self.weights
        # One process, and ranks with their pieces of a reference, bring what is offloaded to the
        # device for as long as they work with it.
        whole = self.device.shards == 1 or (self.part is None and loads_reference_once(self.config))
        brought = (self.weights - rest if whole else 0) + self.gathered_once
        host = Share(parameters=self.weights - rest)
        if self.part is None:
            return Work(Share(parameters=self.weights), rest, self.annotation(), 0, brought, host)
        moments, gradients, step = self.moments, self.gradients, self.gradients
        if at_home and self.device.shards > 1:  # ranks get their gradients and step there
            host, moments = replace(host, gradients=self.trained, moments=moments), 0
        elif self.sharding.optimizer_offload and self.device.gpu:
            step += moments
            host = replace(host, moments=moments)
        share = Share(self.weights, gradients, moments, self.activations, self.update_logits)
        return Work(
            share,
            rest + (moments if step == gradients else 0),
            self.annotation(),
            brought + max(*self.update_moments().values(), step),
            brought,
            host,
            self.trained,
        )

    @property
    def is_critic(self) -> bool:
        """Whether a value head stands in place of the one over the vocabulary."""
        return self.part is self.config.critic

    @property
    def lora_rank(self) -> int:
        """The rank of its adapter; 0 where all weights are trained, or none."""
        model = self.config.critic.model if self.is_critic else self.config.model
        return model.lora_rank if self.part is not None else 0

    @property
    def in_4_bits(self) -> bool:
        """Whether the linear layers under the adapter are in NF4."""
        model = self.config.critic.model if self.is_critic else self.config.model
        return self.part is not None and model.quantization is not None

    @property
    def trained(self) -> int:
        """Bytes of the float32 weights of this rank that are trained."""
        if self.lora_rank:
            model = self.config.critic.model if self.is_critic else self.config.model
            adapter = self.shape.adapter(self.lora_rank, model.target_modules)
            return FLOAT * adapter // self.device.shards
        return self.device.held(self.shape, self.shape.parameters(head=not self.is_critic))

    @property
    def weights(self) -> int:
        """Bytes of all its weights on this rank."""
        if self.part is None:
            return self.device.frozen(self.shape)
        if not self.lora_rank:
            return self.trained
        base = self.device.held(self.shape, self.shape.parameters(head=not self.is_critic))
        width = self.device.frozen_width
        base = base * width // FLOAT
        if self.in_4_bits:
            base -= int((width - FOUR_BITS) * self.shape.layers * self.shape.layer)
        return base + self.trained

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that this rank keeps on the device."""
        at_home = self.device.gpu and self.device.shards > 1 and self.sharding.param_offload
        return 0 if at_home else self.trained

    @property
    def moments(self) -> int:
        """Bytes of AdamW's two moments."""
        assert self.part is not None
        bits = EIGHT_BITS if self.part.optim.optimizer == "AdamW8bit" else 1
        return int(2 * self.trained * bits)

    # What ranks gather (FSDP2): the root group, which is the embedding and the head, for all of
    # a pass; a layer, and the embedding of a critic that trains it, for their own work.

    @property
    def root(self) -> int:
        """Numbers of the embedding and of a head of its own, where they are gathered together."""
        if self.embedding:
            return 0
        return self.shape.embedding * (1 if self.shape.tied or self.is_critic else 2)

    @property
    def embedding(self) -> int:
        """Numbers of an embedding that is gathered by itself."""
        return self.shape.embedding if self.is_critic and not self.lora_rank else 0

    @property
    def layer(self) -> int:
        """Numbers of a layer on ranks that share it."""
        return self.shape.layer // self.device.tensor

    @property
    def gathered_once(self) -> int:
        """Bytes of the weights where they stay gathered through a step."""
        if self.device.shards == 1 or not self.sharding.stays_whole:
            return 0
        numbers = self.root + self.embedding + self.shape.layers * self.layer
        return self.device.width * numbers

    @property
    def first_gather(self) -> int:
        """Bytes at the begin of a pass: what is gathered, as it comes and in its place."""
        if self.device.shards == 1 or self.gathered_once:
            return 0
        return 2 * self.device.width * max(self.embedding, self.root + self.layer)

    @property
    def gathered(self) -> int:
        """Bytes within a pass: the root, a layer, and the buffer of the one after or before it."""
        if self.device.shards == 1 or self.gathered_once:
            return 0
        return self.device.width * (self.root + min(2, self.shape.layers) * self.layer)

    @property
    def cast(self) -> int:
        """Bytes of the weights in bfloat16 that one process holds through a forward pass.

        Autocast keeps copies of weights that are trained; of frozen ones in float32, only for one
        product.
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
        """Bytes of a linear layer in 4 bits while it is used: float32, and what is multiplied."""
        width = FLOAT + (self.device.width if self.device.half else 0)
        return width * self.shape.hidden * max(self.shape.inner, self.shape.queries)

    @property
    def _widened(self) -> int:
        """Bytes that a float32 state of the MLP takes beyond the computing precision."""
        wide = self.in_4_bits and self.state_bytes > self.device.width
        return (FLOAT - self.device.width) * self.shape.inner if wide else 0

    # Annotation.

    def annotation(self) -> int:
        """Bytes of a forward pass without gradients, beyond `rest` and `brought`."""
        config, shape, device = self.config, self.shape, self.device
        longest = _longest(config)
        budget = micro_batch_tokens(config, config.ref.log_prob_max_token_len_per_gpu)
        all_rows = -(-config.data.train_batch_size * config.rollout.n // data_ranks(config))
        tokens = min(all_rows * longest, max(longest, budget))
        inner = ADAPTED_FORWARD_INNER if self.lora_rank else FORWARD_INNER
        states = tokens * (
            4 * self.state_bytes * shape.hidden
            + inner * device.width * shape.inner // device.tensor
            + IN_4_BITS_INNER * self._widened
        )
        scored = tokens * shape.scored_bytes(device, longest)
        routed = tokens * shape.routed_bytes(self.state_bytes)
        most = max(states, scored, routed, self._logits(tokens))
        return max(self.first_gather, self.gathered + self.cast + most)

    def _logits(self, tokens: int) -> int:
        if self.is_critic:
            return 0
        config, chunk = self.config, FLOAT * self.shape.vocabulary
        answers = config.data.max_response_length / _longest(config)
        full = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full"
        copies = HALF_FORWARD_LOGITS if self.device.half else FORWARD_LOGITS
        return int(copies * chunk) * min(LOGIT_CHUNK, int(tokens * answers)) * (2 if full else 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of a number of the states between layers."""
        return FLOAT if self.device.half and self.device.shards == 1 else self.device.width

    # Update.

    @property
    def tokens(self) -> int:
        """The most tokens of a micro-batch."""
        assert self.part is not None
        longest, rows = _longest(self.config), self._rows
        if self.part.ppo_micro_batch_size_per_gpu is not None:
            rows = min(rows, self.part.ppo_micro_batch_size_per_gpu)
        budget = micro_batch_tokens(self.config, self.part.ppo_max_token_len_per_gpu)
        return min(rows * longest, max(longest, budget))

    @property
    def _rows(self) -> int:
        return -(-self.mini * self.config.rollout.n // data_ranks(self.config))

    @property
    def _layer_bytes(self) -> int:
        return self.shape.layer_bytes(self.device, _longest(self.config))

    @property
    def recomputes(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        model = self.config.critic.model if self.is_critic else self.config.model
        switch = model.enable_gradient_checkpointing
        if switch is None:
            switch = self.config.model.enable_gradient_checkpointing
        return switch is not False

    @property
    def activations(self) -> int:
        """Bytes that a forward pass keeps for the backward pass."""
        state = self.shape.hidden * self.state_bytes
        layer = state if self.recomputes else self._layer_bytes
        kept = self.tokens * (2 * state + self.shape.layers * layer)
        if self.lora_rank and self.device.keeps_freed:
            at_once = 1 if self.recomputes else self.shape.layers
            kept += self.tokens * at_once * self.shape.outputs * FLOAT
        return kept

    @property
    def update_logits(self) -> int:
        """Bytes of the logits in an update."""
        if self.is_critic:
            return 0
        config, device = self.config, self.device
        tokens = int(self.tokens * config.data.max_response_length / _longest(config))
        chunk = FLOAT * self.shape.vocabulary * min(LOGIT_CHUNK, tokens)
        whole = self.shape.vocabulary * tokens
        kept = FLOAT * whole if whole <= KEPT_LOGITS else 0
        backward = KEPT_BACKWARD_LOGITS if kept else BACKWARD_LOGITS
        full = config.actor.use_kl_loss and config.actor.kl_loss_type == "full"
        held = device.keeps_freed and chunk <= LARGEST_HELD
        copies = backward + (BACKWARD_LOGITS if full else 0) + held * (FORWARD_LOGITS + backward)
        return kept + chunk * copies

    def update_moments(self) -> dict[str, int]:
        """Bytes at each moment of an update that may be its highest, but the step itself."""
        device, shape = self.device, self.shape
        several = self.tokens < self._rows * _longest(self.config)
        # Gradients of the micro-batches before this one; whole where they are reduced at the end.
        earlier = self.gradients if several else 0
        if self.gathered_once:
            earlier *= device.shards
        ranks, trains_all = device.shards > 1, not self.lora_rank
        number = device.width if ranks else FLOAT  # of a gradient before it is reduced
        head = number * shape.embedding if trains_all and not self.is_critic else 0
        # The gradient of a tied table waits for that of the embedding, one in pieces for the root.
        waits = head if ranks or shape.tied else 0
        open_ = earlier + self.activations + self.gathered
        layer = self._layer_at_work()
        reduced = FLOAT * self.layer if ranks and trains_all else 0
        casts = trains_all or device.frozen_width == FLOAT
        if device.half and not ranks and not self.in_4_bits and casts:
            copies = 1 if self.recomputes else shape.layers
            open_ += copies * device.width * shape.layer
        # Root gradients as they are and in the buffer in which they are reduced.
        tables = self.root + self.embedding
        root = (number + FLOAT) * tables if ranks else FLOAT * shape.embedding + waits
        # The embedding is gathered next, in the place of a layer.
        ahead = device.width * max(0, self.embedding - self.layer) if self.gathered else 0
        end = max(self.gradients, earlier)
        return {
            "the first gather": earlier + self.first_gather,
            "the forward pass": open_ + self.cast + self._logits(self.tokens),
            "the logits": open_ + self.update_logits + head,
            "the last layer": open_ + reduced + waits + layer,
            "the first layer": end + self.gathered + ahead + reduced + waits + layer,
            "the embedding": end + reduced + (root if trains_all else 0),
        }

    def _layer_at_work(self) -> int:
        """Bytes of one layer in its backward pass."""
        device, shape = self.device, self.shape
        inner = BACKWARD_INNER * device.width * shape.inner // device.tensor
        inner += (IN_4_BITS_INNER + IN_4_BITS_BACKWARD_INNER) * self._widened
        # Without checkpointing its states are among the activations. The CPU's allocator gives
        # what they leave to nothing else.
        states = self._layer_bytes if self.recomputes or not device.gpu else 0
        inside = self.tokens * (states + inner)
        scored = shape.scored_gradients(device, _longest(self.config))
        # Two of the four states of the MLP are left when all gradients of experts are there, and
        # none in the backward pass of attention.
        state = device.width * shape.inner // device.tensor
        inside = max(inside, self.tokens * (states - 4 * state + scored))
        if shape.experts and not self.lora_rank:
            experts, kept = shape.expert_gradients(device), self.tokens * states
            routed = kept - 2 * self.tokens * state if device.gpu else inside
            inside = max(inside, routed + experts)
        return inside + (self._dequantised if self.in_4_bits else 0)


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length
