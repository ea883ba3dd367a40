"""Steps of the two trained models, actor and critic, with optimizers that `learner.py` builds.

Legend: B rows of a micro-batch, T response tokens, N response tokens of all rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.algo.estimators import POLICY_LOSSES
from ppo_cli.algo.kl import token_kl
from ppo_cli.algo.losses import (
    aggregate,
    choose_tokens,
    count_mask,
    policy_loss,
    positive_nll,
    value_loss,
)
from ppo_cli.algo.tokens import full_kl, gather_logprobs_entropy
from ppo_cli.config.schema.algorithm import Actor as ActorSettings
from ppo_cli.config.schema.algorithm import Critic as CriticSettings
from ppo_cli.engine.base import Sums, add_sum
from ppo_cli.engine.batches.micro_batches import Work, run_within_memory
from ppo_cli.engine.batches.packing import build_budget
from ppo_cli.engine.batches.rows import MicroBatch, build_micro_batch, row_lengths, row_prompts
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.ranks import ALONE, Ranks, gather_objects
from ppo_cli.engine.training.experts import ExpertMonitor, expert_metrics
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.planning.memory.model import KEPT_LOGITS, LOGIT_CHUNK

# Metric -> (sum over a micro-batch, number of tokens); scalars stay on the device. None as number
# of tokens stands for count 0 of `Sums`.
DeviceSums = dict[str, tuple[Tensor, Tensor | None]]


def fetch_sums(measured: Sequence[DeviceSums]) -> Sums:
    """Add up the sums of all micro-batches with a single copy from the device."""
    # One stacked tensor of all scalars, so that there is one copy.
    pairs = [(name, *pair) for part in measured for name, pair in part.items()]
    if not pairs:
        return {}
    scalars = torch.stack([t.double() for _, *pair in pairs for t in pair if t is not None])
    numbers = iter(scalars.tolist())
    sums: Sums = {}
    for name, _, count in pairs:
        add_sum(sums, name, next(numbers), 0 if count is None else next(numbers))
    return sums


@dataclass(frozen=True)
class TokenStats:
    """Log-probs and entropies of a policy at the response tokens of a micro-batch.

    `full_kl_N` is KL(policy || reference) over the whole vocabulary, if it was requested.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    full_kl_N: Tensor | None = None


def compute_token_stats(
    policy: Policy,
    micro_batch: MicroBatch,
    compute: Compute,
    temperature: float,
    *,
    with_entropy: bool,
    kl_to: Policy | None = None,
) -> TokenStats:
    """Return log-probs, entropies and, with `kl_to`, the full KL of the response tokens.

    All are taken at the sampling temperature.
    """
    # Small logits are kept for the backward pass, large ones are computed again.
    count = len(micro_batch.targets_N) * policy.model.config.get_text_config().vocab_size

    def compute_stats(input_ids_BL: Tensor) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the response tokens, and with `kl_to` the full KL."""
        hidden_NH = micro_batch.gather_states(policy.hidden_BLH(input_ids_BL, micro_batch.packed))
        logprobs_N, entropy_N = gather_logprobs_entropy(
            hidden_NH, policy.head, micro_batch.targets_N, temperature, LOGIT_CHUNK, with_entropy,
            keep=count <= KEPT_LOGITS,
        )  # fmt: skip
        if kl_to is None:
            return logprobs_N, entropy_N
        # In here, because sharded weights of the policy are only available inside `run`.
        return logprobs_N, entropy_N, *_full_kl(hidden_NH, policy, kl_to, micro_batch, temperature)

    with compute.autocast():
        return TokenStats(*policy.run(compute_stats, micro_batch.input_ids_BL))


def _full_kl(
    hidden_NH: Tensor,
    policy: Policy,
    reference: Policy,
    micro_batch: MicroBatch,
    temperature: float,
) -> tuple[Tensor, ...]:
    """Return the tuple (kl_N,), the full KL(policy || reference) of the response tokens.

    `hidden_NH` are the policy's hidden states; the reference's are computed here, without
    gradients.
    """

    def compute_kl(input_ids_BL: Tensor) -> tuple[Tensor, ...]:
        """Run the reference, and return (kl_N,), while the reference's weights are available."""
        with torch.no_grad():
            ref_hidden_NH = micro_batch.gather_states(
                reference.hidden_BLH(input_ids_BL, micro_batch.packed)
            )
        return (
            full_kl(
                hidden_NH, policy.head, ref_hidden_NH, reference.head, temperature, LOGIT_CHUNK
            ),
        )

    if reference.backbone is policy.backbone:  # LoRA: the weights are available already
        return compute_kl(micro_batch.input_ids_BL)
    return reference.run(compute_kl, micro_batch.input_ids_BL)


class ModelLearner:
    """Takes optimizer steps with one model, on this rank's share of the rows.

    `reference` is a frozen model that the loss may use. `name` is "actor" or "critic".
    """

    name: str
    norm: str  # the name of the gradient norm metric

    def __init__(
        self,
        model: Policy | ValueModel,
        reference: Policy | None,
        settings: ActorSettings | CriticSettings,
        tokens: int,  # of a micro-batch
        optimizer: Optimizer,
        compute: Compute,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._reference = reference
        models = [model] if reference is None else [model, reference]
        self._contexts = [part.weights_context for part in models]
        self._kept_awake: list[Policy | ValueModel] = [model]  # for a whole step
        # The loss runs both models on one micro-batch, so they share a budget.
        self.budget = build_budget(tokens, settings.ppo_micro_batch_size_per_gpu, *models)
        self._aggregation: dict[str, Any] = {
            "mode": settings.loss_agg_mode,
            "scale_factor": settings.loss_scale_factor,
        }
        self._compute = compute
        self._ranks = ranks

    def step(self, batch: TrainBatch) -> Sums:
        """Take one optimizer step on all rows of `batch`; returns this rank's metrics."""
        # Nothing to learn from: no step.
        tokens, sequences = count_mask(batch.loss_mask_BT)
        if tokens == 0:
            return {f"{self.name}/empty_minibatches": (1.0, 1.0)} if self._ranks.rank == 0 else {}
        # Every micro-batch is normalised by the counts of the whole mini-batch.
        aggregation = self._aggregation | {"global_tokens": tokens, "global_sequences": sequences}
        model, scale = self.model, self.optimizer.loss_scale.value
        measured: list[DeviceSums] = []

        def accumulate(rows: Sequence[int], last: bool) -> None:
            micro_batch = self._cut(batch, rows)
            # Gradients are reduced over the ranks once, with the last micro-batch.
            model.weights_context.sync_gradients(last)
            # Metrics stay on the device until the step is over.
            measured.append({})
            loss = self._loss(batch, micro_batch, aggregation, measured[-1])
            (loss * scale).backward()

        def restart() -> None:
            measured.clear()
            self._start_over()

        # Weights stay on the device for the whole step.
        with ExitStack() as awake:
            for part in self._kept_awake:
                awake.enter_context(part.awake())
            self._prepare(batch)
            self._run_micro_batches(batch, accumulate, restart)
            # Clip and step, or skip a gradient that is not finite.
            norm, stepped = self.optimizer.apply()
        observed = self._observe()
        # Read here, because the host has just waited for the device.
        sums = fetch_sums(measured) if self._ranks.reports_results else {}
        if self._ranks.rank == 0:
            # A step that only halved the scale is not a sign of trouble.
            halved = self.optimizer.loss_scale.value < scale
            sums[f"{self.name}/skipped_steps"] = (float(not stepped and not halved), 1.0)
            if self.optimizer.loss_scale.dynamic:
                sums[f"{self.name}/loss_scale"] = (scale, 1.0)
                sums[f"{self.name}/loss_scale_halvings"] = (float(halved), 1.0)
            if stepped:
                sums[self.norm] = (norm, 1.0)
            sums[f"{self.name}/lr"] = (self.optimizer.lr, 1.0)
            sums |= observed
        return sums

    def _run_micro_batches(
        self, batch: TrainBatch, work: Work, restart: Callable[[], None]
    ) -> None:
        prompts = row_prompts(batch.input_ids_BL, batch.prompt_len_B)
        run_within_memory(
            row_lengths(batch), self.budget, work, restart, self._ranks, prompts, self._contexts
        )

    def _cut(self, batch: TrainBatch, rows: Sequence[int]) -> MicroBatch:
        budget = self.budget
        return build_micro_batch(
            batch, rows, self._compute.device, packed=budget.packed, shared=budget.shared
        )

    def _start_over(self) -> None:
        """Drop the gradients of an interrupted step."""
        self.optimizer.zero_grad()

    def _prepare(self, batch: TrainBatch) -> None:
        """Compute what the losses of micro-batches need from the whole mini-batch."""

    def _observe(self) -> Sums:
        """Return metrics of the whole mini-batch, the same on all ranks; all ranks call."""
        return {}

    @abstractmethod
    def _loss(
        self,
        batch: TrainBatch,
        micro_batch: MicroBatch,
        aggregation: dict[str, Any],
        measured: DeviceSums,
    ) -> Tensor:
        """Return a micro-batch's part of the loss; `aggregation` has the mini-batch's counts.

        Adds its metrics to `measured`. Nothing in it may wait for the device.
        """


class ActorLearner(ModelLearner):
    """Trains the policy with a policy loss such as the clipped surrogate."""

    name, norm = "actor", "grad_norm"

    def __init__(
        self,
        policy: Policy,
        reference: Policy | None,
        settings: ActorSettings,
        tokens: int,
        optimizer: Optimizer,
        compute: Compute,
        temperature: float,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(policy, reference, settings, tokens, optimizer, compute, ranks)
        self._policy = policy
        self._settings = settings
        self._kl_to: Policy | None = None  # the reference, if the loss needs it in every pass
        if reference is not None and settings.use_kl_loss and settings.kl_loss_type == "full":
            self._kl_to = reference
            self._kept_awake.append(reference)
        self._temperature = temperature
        self._chosen_BT: Tensor | None = None  # of the mini-batch under way
        self._experts = ExpertMonitor(policy.model, policy.backbone)

    def _start_over(self) -> None:
        super()._start_over()
        self._experts.reset(self.optimizer.loss_scale.value)

    def _observe(self) -> Sums:
        """Return how evenly the tokens of the mini-batch were spread over experts."""
        if not self._experts.present:
            return {}
        loads = self._experts.loads() if self._ranks.reports_results else None
        return expert_metrics(gather_objects(self._ranks, loads))

    @torch.no_grad()
    def _prepare(self, batch: TrainBatch) -> None:
        """Run all tokens through the current weights first, if a loss needs that.

        clip_cov and kl_cov choose tokens over the whole mini-batch; router losses need the number
        of tokens of each expert.
        """
        s, kind = self._settings, self._settings.policy_loss.loss_mode
        self._experts.reset(self.optimizer.loss_scale.value)
        if not POLICY_LOSSES[kind].chooses and not self._experts.balances:
            return

        # Each rank fills its own rows; the sum over ranks is complete.
        own_BT = torch.zeros_like(batch.old_logprobs_BT)

        def restart() -> None:
            own_BT.zero_()
            self._experts.reset_assignments()

        def collect(rows: Sequence[int], last: bool) -> None:
            """Run a micro-batch: count expert assignments, and store log-probs in `own_BT`."""
            micro_batch = self._cut(batch, rows)
            with self._experts.recording(micro_batch, counts=True):
                seen = compute_token_stats(
                    self._policy, micro_batch, self._compute, self._temperature, with_entropy=False
                )
            if rows and self._ranks.reports_results:
                own_BT[micro_batch.row_B, : micro_batch.width] = micro_batch.scatter(
                    seen.logprobs_N
                ).cpu()

        restart()
        self._run_micro_batches(batch, collect, restart)
        if self._experts.balances:
            assignments = self._experts.assignments() if self._ranks.reports_results else None
            self._experts.set_assignments(gather_objects(self._ranks, assignments))
        if not POLICY_LOSSES[kind].chooses:
            return
        # All ranks choose the same tokens from the same log-probs.
        self._chosen_BT = choose_tokens(
            kind,
            torch.stack(gather_objects(self._ranks, own_BT)).sum(0),
            batch.old_logprobs_BT,
            batch.advantages_BT,
            batch.loss_mask_BT,
            share=getattr(s.policy_loss, f"{kind}_ratio"),
            clip_low=s.clip_ratio_low,
            clip_high=s.clip_ratio_high,
            cov_low=s.policy_loss.clip_cov_lb,
            cov_high=s.policy_loss.clip_cov_ub,
        )

    def _loss(
        self,
        batch: TrainBatch,
        micro_batch: MicroBatch,
        aggregation: dict[str, Any],
        measured: DeviceSums,
    ) -> Tensor:
        """Return the weighted surrogate - entropy + KL; the metric `actor_loss` is its sum.

        The metric `policy_loss` is the surrogate alone.
        """
        s = self._settings
        # The surrogate, with the full KL in the same pass if it is needed.
        mask_BT = micro_batch.loss_mask_BT(batch)
        with_entropy = s.entropy_coeff > 0
        with self._experts.recording(micro_batch):
            seen = compute_token_stats(
                self._policy, micro_batch, self._compute, self._temperature,
                with_entropy=with_entropy, kl_to=self._kl_to,
            )  # fmt: skip
        new_BT = micro_batch.scatter(seen.logprobs_N)
        surrogate = policy_loss(
            new_BT,
            micro_batch.select(batch.old_logprobs_BT),
            micro_batch.select(batch.advantages_BT),
            mask_BT,
            kind=s.policy_loss.loss_mode,
            clip_low=s.clip_ratio_low,
            clip_high=s.clip_ratio_high,
            dual_clip=s.clip_ratio_c,
            chosen_BT=None if self._chosen_BT is None else micro_batch.select(self._chosen_BT),
            kl_coef=s.policy_loss.ppo_kl_coef,
            tau_pos=s.tau_pos,
            tau_neg=s.tau_neg,
            is_weight_BT=micro_batch.select(batch.is_weight_BT),
            **aggregation,
        )
        loss, count = surrogate.loss, surrogate.token_count
        measured |= {
            "policy_loss": (loss.detach(), None),
            "ppo_ratio": (surrogate.ratio_sum, count),
            "clip_fraction": (surrogate.clip_sum, count),
            "actor/clip_lower": (surrogate.clip_lower_sum, count),
            "actor/approx_kl": (surrogate.approx_kl_sum, count),
        }
        # Likelihood of right answers, entropy bonus, KL to the reference, and router losses.
        if s.positive_nll_coef > 0:
            positive_BT = (batch.scores_B >= s.positive_score)[:, None] & batch.loss_mask_BT
            nll = positive_nll(
                new_BT, mask_BT, micro_batch.select(positive_BT),
                global_positives=int(positive_BT.sum()),
            )  # fmt: skip
            loss = loss + s.positive_nll_coef * nll
            measured["actor/positive_nll"] = nll.detach(), None
        if with_entropy:
            entropy = aggregate(micro_batch.scatter(seen.entropy_N), mask_BT, **aggregation)
            loss = loss - s.entropy_coeff * entropy
            measured["actor/entropy_loss"] = entropy.detach(), None
        if s.use_kl_loss:
            kl = aggregate(self._kl_BT(batch, micro_batch, seen, new_BT), mask_BT, **aggregation)
            loss = loss + s.kl_loss_coef * kl
            measured["actor/kl_loss"] = kl.detach(), None
        # Router losses are in the gradients already; here they are only added to the metric.
        total = loss.detach().double()
        for name, value, coef in self._experts.pop_losses():  # added to the layers already
            measured[name] = value, None
            total = total + coef * value.double()
        measured["actor_loss"] = total, None
        return loss

    def _kl_BT(
        self, batch: TrainBatch, micro_batch: MicroBatch, seen: TokenStats, new_BT: Tensor
    ) -> Tensor:
        """Return the KL to the reference, (B, T); raises ValueError without a reference.

        `new_BT` are the actor's current log-probs. The full KL is used if `seen` has it.
        """
        if self._reference is None or batch.ref_logprobs_BT is None:
            raise ValueError("a KL loss needs a reference model")
        if seen.full_kl_N is not None:
            return micro_batch.scatter(seen.full_kl_N)
        return token_kl(
            new_BT, micro_batch.select(batch.ref_logprobs_BT), self._settings.kl_loss_type
        )


class CriticLearner(ModelLearner):
    """Trains the value model on returns, clipped around the old values."""

    name, norm = "critic", "critic_grad_norm"

    def __init__(
        self,
        value_model: ValueModel,
        settings: CriticSettings,
        tokens: int,
        optimizer: Optimizer,
        compute: Compute,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(value_model, None, settings, tokens, optimizer, compute, ranks)
        self.value_model = value_model
        self._settings = settings

    def values_BT(self, micro_batch: MicroBatch) -> Tensor:
        """Return the values before each response token of a micro-batch."""

        def value(input_ids_BL: Tensor) -> tuple[Tensor, ...]:
            return (
                micro_batch.gather_states(
                    self.value_model.values_BL(input_ids_BL, micro_batch.packed)
                ),
            )

        with self._compute.autocast():
            (values_N,) = self.value_model.run(value, micro_batch.input_ids_BL)
        return micro_batch.scatter(values_N)

    def _loss(
        self,
        batch: TrainBatch,
        micro_batch: MicroBatch,
        aggregation: dict[str, Any],
        measured: DeviceSums,
    ) -> Tensor:
        """Return the weighted value loss (`critic_loss`); `value_loss` is unweighted."""
        if batch.values_BT is None:
            raise ValueError("a critic step needs the old values")
        # Old values are those of the annotation, before any update.
        result = value_loss(
            self.values_BT(micro_batch),
            micro_batch.select(batch.values_BT),
            micro_batch.select(batch.returns_BT),
            micro_batch.loss_mask_BT(batch),
            clip_range=self._settings.cliprange_value,
            **aggregation,
        )
        loss = self._settings.value_loss_coef * result.loss
        measured |= {
            "value_loss": (result.loss.detach(), None),
            "critic_loss": (loss.detach(), None),
            "critic/clip_fraction": (result.clip_sum, result.token_count),
        }
        return loss
