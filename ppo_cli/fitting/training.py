"""Steps of a fit: the recipe, Bradley-Terry loss of pairs, updates in micro-batches, evaluation.

Legend: P pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_cli.config.algorithm_schema import Optim
from ppo_cli.engine.micro_batches import Budget, plan_micro_batches, run_within_memory
from ppo_cli.engine.optimizer import Optimizer
from ppo_cli.errors import ModelError
from ppo_cli.fitting.network import ScoreNetwork
from ppo_cli.fitting.preferences import EncodedPair
from ppo_cli.report.tracker import Advance

SMALL_MODEL = 10_000_000
HEAD_LR, SMALL_LR, USUAL_LR = 1e-3, 1e-3, 1e-5


@dataclass(frozen=True)
class Recipe:
    """How the weights are trained; ranges are those of the flags of `ppo reward fit`."""

    epochs: int = 1
    max_steps: int | None = None  # unset: all of the epochs
    lr: float | None = None  # unset: chosen by what is trained
    warmup: float = 0.05  # share of the steps with a rising rate
    weight_decay: float = 0.01
    grad_clip: float = 1.0  # 0: no limit
    batch_size: int = 32  # pairs
    batch_tokens: int = 16384  # in memory at once, padding included
    center: float = 0.0  # weight of (chosen + rejected)^2
    freeze_body: bool = False
    dtype: str | None = None  # unset: bfloat16 on a GPU, else float32
    seed: int = 42  # of head, split and order


@dataclass(frozen=True)
class FitSettings:
    """Files in, folder out, and the recipe between them."""

    data: tuple[str, ...]
    model: str
    out: Path
    recipe: Recipe
    val_data: tuple[str, ...] = ()
    val_share: float = 0.1
    max_length: int | None = None
    template: str | None = None
    skip_bad_rows: bool = False
    overwrite: bool = False


def choose_lr(recipe: Recipe, parameters: int) -> float:
    """Return the learning rate asked for, or one that suits what is trained."""
    if recipe.lr is not None:
        return recipe.lr
    if recipe.freeze_body:
        return HEAD_LR
    return SMALL_LR if parameters < SMALL_MODEL else USUAL_LR


def pair_losses(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor, center: float) -> Tensor:
    """Loss of each pair: -log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2.

    The first term is the negative log-likelihood of Bradley & Terry (1952), as in eq. 1 of
    Ouyang et al. 2022 (arXiv 2203.02155), with the margin of Touvron et al. 2023 (2307.09288).
    The second keeps scores around 0 (Eisenstein et al. 2023, 2312.09244): the first does not
    change when all scores of a prompt move together.
    """
    losses_P = -F.logsigmoid(chosen_P - rejected_P - margin_P)
    if center:
        losses_P = losses_P + center * (chosen_P + rejected_P) ** 2
    return losses_P


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


MOST_BROKEN = 5


TOO_MUCH = (
    "a single pair of 2 x {} tokens. Lower --max_length, train the head alone with --freeze_body, "
    "or take a smaller --model."
)


@dataclass(frozen=True)
class Stepped:
    """What a step came to, before its update."""

    figures: Figures
    loss: float  # with centring
    grad_norm: float
    updated: bool


class Trainer:
    """Holds what changes from step to step."""

    def __init__(self, network: ScoreNetwork, recipe: Recipe, lr: float, total_steps: int) -> None:
        self.network = network
        self._recipe = recipe
        # Both samples of a pair lie in a micro-batch: the loss couples them.
        self._budget = Budget(max(1, recipe.batch_tokens // 2), too_much=TOO_MUCH)
        self._broken = 0
        self.skipped = 0
        self._optimizer = Optimizer(
            network.module,
            Optim(
                lr=lr, lr_warmup_steps_ratio=recipe.warmup, lr_scheduler_type="cosine",
                min_lr_ratio=0.1, weight_decay=recipe.weight_decay,
            ),
            total_steps=total_steps,
            grad_clip=recipe.grad_clip,
            clip_grad_value=None,
        )  # fmt: skip

    def step(self, number: int, pairs: Sequence[EncodedPair]) -> Stepped:
        """Do step `number`, counted from 0; one that is not finite changes nothing."""
        self._optimizer.set_progress(number)
        self._optimizer.zero_grad()
        chosen_P, rejected_P = self._backward(pairs)
        norm, updated = self._optimizer.apply()
        margin_P = torch.tensor([pair.margin for pair in pairs])
        loss = float(pair_losses(chosen_P, rejected_P, margin_P, self._recipe.center).mean())
        self._broken = 0 if updated else self._broken + 1
        self.skipped += not updated
        if self._broken == MOST_BROKEN:
            raise ModelError(
                f"Loss or gradient was not finite in {MOST_BROKEN} steps in a row (up to step "
                f"{number + 1}): the fit cannot go on. Lower --lr, try --dtype float32, or see "
                "whether the weights of --model are whole."
            )
        return Stepped(figures_of(chosen_P, rejected_P, margin_P), loss, norm, updated)

    def _backward(self, pairs: Sequence[EncodedPair]) -> tuple[Tensor, Tensor]:
        """Leave the gradient of the mean loss; returns the scores."""
        scores = torch.empty(2, len(pairs))

        def work(plan: list[list[int]]) -> None:
            for group in plan:
                scores[:, group] = self._backward_group([pairs[i] for i in group], len(pairs))

        run_within_memory(
            [pair.length for pair in pairs], self._budget, work, self._optimizer.zero_grad
        )
        return scores[0], scores[1]

    def _backward_group(self, pairs: Sequence[EncodedPair], step_pairs: int) -> Tensor:
        samples = [p.chosen for p in pairs] + [p.rejected for p in pairs]
        both = self.network.score_samples(samples).view(2, len(pairs))
        margin_P = torch.tensor([pair.margin for pair in pairs], device=both.device)
        losses_P = pair_losses(both[0], both[1], margin_P, self._recipe.center)
        (losses_P.sum() / step_pairs).backward()
        return both.detach().cpu()


def steps_of(pairs: int, recipe: Recipe) -> int:
    """Return how many steps a fit has."""
    whole = recipe.epochs * -(-pairs // recipe.batch_size)
    return min(whole, recipe.max_steps) if recipe.max_steps else whole


def batches(
    pairs: Sequence[EncodedPair], recipe: Recipe, total_steps: int
) -> Iterator[list[EncodedPair]]:
    """Yield the pairs of each step, every epoch in a seeded order of its own."""
    done, epoch = 0, 0
    while done < total_steps:
        order = list(range(len(pairs)))
        random.Random(f"order {recipe.seed} {epoch}").shuffle(order)
        for start in range(0, len(order), recipe.batch_size):
            if done == total_steps:
                return
            yield [pairs[i] for i in order[start : start + recipe.batch_size]]
            done += 1
        epoch += 1
