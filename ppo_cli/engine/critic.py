"""The critic: values of response tokens, and one optimizer step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.algo.losses import count_mask, value_loss
from ppo_cli.config.algorithm_schema import Critic as CriticSettings
from ppo_cli.engine.device import Compute
from ppo_cli.engine.micro_batches import run_within_memory
from ppo_cli.engine.models import ValueModel
from ppo_cli.engine.optimizer import Optimizer
from ppo_cli.engine.packing import micro_batch_budget
from ppo_cli.engine.ranks import ALONE, Ranks
from ppo_cli.engine.responses import Slice, cut_slice, row_lengths
from ppo_cli.engine.sums import SumTable, Table, only_first, own_rows


class CriticLearner:
    """Trains the value model on returns, clipped around the old values."""

    def __init__(
        self,
        value_model: ValueModel,
        settings: CriticSettings,
        optimizer: Optimizer,
        compute: Compute,
        longest_response: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.value_model = value_model
        self.optimizer = optimizer
        self.budget = micro_batch_budget(
            settings.ppo_max_token_len_per_gpu, settings.ppo_micro_batch_size_per_gpu, value_model
        )
        self._settings = settings
        self._compute = compute
        self._longest_response = longest_response
        self._ranks = ranks

    def step(self, batch: TrainBatch) -> Table:
        """One optimizer step on all rows of `batch`; returns what this rank saw of it.

        `value_loss` is the loss before its coefficient, `critic_loss` what is minimised.
        """
        if batch.values_BT is None:
            raise ValueError("a critic step needs the old values")
        tokens, sequences = count_mask(batch.loss_mask_BT)
        if tokens == 0:
            return only_first(self._ranks, {"critic/empty_minibatches": (1.0, 1.0)})
        old_BT = batch.values_BT
        self.value_model.model.train()
        s = self._settings

        def accumulate(plan: Sequence[Sequence[int]]) -> SumTable:
            table = SumTable()
            for rows in plan:
                cut = cut_slice(batch, rows, self._compute.device, packed=self.budget.packed)
                result = value_loss(
                    self.values_BT(cut),
                    cut.take(old_BT),
                    cut.take(batch.returns_BT),
                    cut.loss_mask_BT(batch),
                    clip_range=s.cliprange_value,
                    mode=s.loss_agg_mode,
                    global_tokens=tokens,
                    global_sequences=sequences,
                    scale_factor=s.loss_scale_factor or float(self._longest_response),
                )
                loss = s.value_loss_coef * result.loss
                loss.backward()
                table.add("value_loss", result.loss.item(), 0)
                table.add("critic_loss", loss.item(), 0)
                table.add("critic/clip_fraction", result.clip_sum.item(), result.token_count.item())
            return table

        with self.value_model.awake():
            table = run_within_memory(
                row_lengths(batch), self.budget, accumulate, self._start_over, self._ranks
            )
            norm, stepped = self.optimizer.apply()
        rates = {"critic/skipped_steps": (0.0 if stepped else 1.0, 1.0)}
        if stepped:
            rates["critic_grad_norm"] = (norm, 1.0)
        rates["critic/lr"] = (self.optimizer.lr, 1.0)
        return own_rows(self._ranks, table) | only_first(self._ranks, rates)

    def _start_over(self) -> None:
        """Forget a pass that broke off, and the gradients so far."""
        self.value_model.forget()
        self.optimizer.zero_grad()

    def values_BT(self, cut: Slice) -> Tensor:
        """Values before each response token of a slice."""

        def value(input_ids_BL: Tensor) -> tuple[Tensor, ...]:
            return (cut.pick(self.value_model.values_BL(input_ids_BL, cut.packed)),)

        with self._compute.autocast():
            (values_N,) = self.value_model.run(value, cut.input_ids_BL)
        return cut.spread(values_N)
