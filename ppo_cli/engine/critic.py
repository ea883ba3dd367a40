"""The critic: values of response tokens, and one optimizer step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.algo.losses import count_mask, value_loss
from ppo_cli.config.training import Critic as CriticSettings
from ppo_cli.engine.base import Sums
from ppo_cli.engine.device import Compute
from ppo_cli.engine.micro_batches import Budget, run_within_memory
from ppo_cli.engine.models import ValueModel
from ppo_cli.engine.optimizer import Optimizer
from ppo_cli.engine.responses import Slice, cut_slice, row_lengths
from ppo_cli.engine.sums import SumTable


class CriticLearner:
    """Trains the value model on returns, clipped around the old values."""

    def __init__(
        self,
        value_model: ValueModel,
        settings: CriticSettings,
        optimizer: Optimizer,
        compute: Compute,
        longest_response: int,
    ) -> None:
        self.value_model = value_model
        self.optimizer = optimizer
        self.budget = Budget(
            settings.ppo_max_token_len_per_gpu, settings.ppo_micro_batch_size_per_gpu
        )
        self._settings = settings
        self._compute = compute
        self._longest_response = longest_response

    def step(self, batch: TrainBatch) -> Sums:
        """One optimizer step on all rows of `batch`, whatever the micro-batches."""
        if batch.values_BT is None:
            raise ValueError("a critic step needs the old values")
        tokens, sequences = count_mask(batch.loss_mask_BT)
        if tokens == 0:
            return {"critic/empty_minibatches": (1.0, 1.0)}
        old_BT = batch.values_BT
        self.value_model.model.train()
        s = self._settings

        def accumulate(plan: Sequence[Sequence[int]]) -> SumTable:
            table = SumTable()
            for rows in plan:
                cut = cut_slice(batch, rows, self._compute.device)
                result = value_loss(
                    self.values_BT(cut),
                    cut.take(old_BT),
                    cut.take(batch.returns_BT),
                    cut.take(batch.loss_mask_BT),
                    clip_range=s.cliprange_value,
                    mode=s.loss_agg_mode,
                    global_tokens=tokens,
                    global_sequences=sequences,
                    scale_factor=s.loss_scale_factor or float(self._longest_response),
                )
                (s.value_loss_coef * result.loss).backward()
                table.add("value_loss", result.loss.item(), 0)
                table.add("critic/clip_fraction", result.clip_sum.item(), result.token_count.item())
            return table

        table = run_within_memory(
            row_lengths(batch), self.budget, accumulate, self.optimizer.zero_grad
        )
        norm, stepped = self.optimizer.apply()
        table.add("critic/skipped_steps", 0.0 if stepped else 1.0, 1)
        if stepped:
            table.add("critic_grad_norm", norm, 1)
        table.add("critic/lr", self.optimizer.lr, 1)
        return table.sums()

    def values_BT(self, cut: Slice) -> Tensor:
        """Values before each response token of a slice."""
        with self._compute.autocast():
            values_BL = self.value_model.values_BL(cut.input_ids_BL)
        return cut.spread(cut.pick(values_BL))
