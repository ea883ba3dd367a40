"""What a model makes of pairs: loss, accuracy, margin, and the spread of its scores.

Legend: P pairs, B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ppo_cli.engine.micro_batches import Budget, plan_micro_batches
from ppo_cli.fitting.loss import pair_losses
from ppo_cli.fitting.network import ScoreNetwork
from ppo_cli.fitting.samples import EncodedPair
from ppo_cli.report.tracker import Advance


@dataclass(frozen=True)
class Figures:
    """Means over pairs; `mean` and `std` are of the scores of all responses."""

    loss: float
    accuracy: float
    margin: float
    mean: float
    std: float

    def better_than(self, other: Figures | None) -> bool:
        """Higher accuracy; on a tie, the lower loss."""
        return other is None or (self.accuracy, -self.loss) > (other.accuracy, -other.loss)

    def as_dict(self) -> dict[str, float]:
        """Return the figures by name."""
        return asdict(self)


@torch.no_grad()
def measure(
    network: ScoreNetwork, pairs: Sequence[EncodedPair], batch_tokens: int, advance: Advance
) -> Figures:
    """Score every pair and sum up; the loss is the plain one, without centring."""
    samples = [s for pair in pairs for s in (pair.chosen, pair.rejected)]
    scores_B = torch.empty(len(samples))
    lengths = [len(s.ids) for s in samples]
    for group in plan_micro_batches(lengths, Budget(batch_tokens)):
        scores_B[group] = network.score_samples([samples[i] for i in group]).float().cpu()
        advance(len(group))
    margin_P = torch.tensor([pair.margin for pair in pairs])
    return figures_of(scores_B[0::2], scores_B[1::2], margin_P)


def figures_of(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Figures:
    """Sum up scores; a tie counts half in the accuracy."""
    chosen_P, rejected_P = chosen_P.double(), rejected_P.double()
    all_B = torch.cat([chosen_P, rejected_P])
    right_P = (chosen_P > rejected_P).double() + 0.5 * (chosen_P == rejected_P).double()
    return Figures(
        loss=float(pair_losses(chosen_P, rejected_P, margin_P.double(), 0.0).mean()),
        accuracy=float(right_P.mean()),
        margin=float((chosen_P - rejected_P).mean()),
        mean=float(all_B.mean()),
        std=float(all_B.std(correction=0)),
    )
