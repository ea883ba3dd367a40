"""Steps: the same gradients however they are cut, a seeded order, broken steps change nothing.

The loss is compared with numbers worked out by hand, and with torch's own function.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor, tensor

from ppo_cli.config.models.bundled import EMBEDDED, model_folder
from ppo_cli.engine.device import Compute
from ppo_cli.errors import ModelError, UserError
from ppo_cli.extras.lab.fitting import training
from ppo_cli.extras.lab.fitting.preferences import EncodedExample
from ppo_cli.extras.lab.fitting.training import Recipe, ScoreNetwork, Trainer
from ppo_cli.rewards.judge.rubric import Criterion, Rubric
from ppo_cli.rewards.models.base import Encoded

FLOAT32 = Compute(torch.device("cpu"), torch.float32)


def make_pairs(count: int) -> list[EncodedExample]:
    """Pairs of all lengths; the longest has 2 x 14 tokens."""
    created = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 200, (count, 2, 16), generator=created)
    return [
        EncodedExample(
            tuple(
                Encoded(tuple(row))
                for row in (
                    ids[i, 0, : 4 + i % 11].tolist(),
                    ids[i, 1, : 3 + (5 * i) % 12].tolist(),
                )
            ),
            (0.1 * (i % 3),),
        )
        for i in range(count)
    ]


def fresh_network(*, frozen: bool = False) -> ScoreNetwork:
    return training.load_to_fit(model_folder(EMBEDDED), compute=FLOAT32, seed=1, frozen=frozen)


def gradient(recipe: Recipe, pairs: list[EncodedExample]) -> dict[str, Tensor]:
    network = fresh_network()
    Trainer(network, recipe, 1e-3, 10).backward(pairs)
    return {name: p.grad for name, p in network.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("batch_tokens", [16384, 80])
def test_the_gradient_is_that_of_the_mean_loss_however_it_is_cut(batch_tokens: int) -> None:
    pairs, network = make_pairs(13), fresh_network()
    chosen = network.score_samples([p.samples[0] for p in pairs])
    rejected = network.score_samples([p.samples[1] for p in pairs])
    margin = torch.tensor([p.targets[0] for p in pairs])
    training.pair_losses(chosen, rejected, margin, 0.1).mean().backward()
    expected = {n: p.grad for n, p in network.module.named_parameters() if p.grad is not None}
    actual = gradient(Recipe(center=0.1, batch_tokens=batch_tokens), pairs)
    assert actual.keys() == expected.keys() and "score.weight" in actual
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() / grad.norm() < 1e-5, name


def limit_memory(monkeypatch: pytest.MonkeyPatch, max_samples: int) -> list[int]:
    """Let the device run out of memory on more samples than that; returns the sizes tried."""
    sizes: list[int] = []
    real = ScoreNetwork.score_samples

    def limited(self: ScoreNetwork, samples: list[Encoded]) -> Tensor:
        sizes.append(len(samples))
        if len(samples) > max_samples:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, samples)

    monkeypatch.setattr(ScoreNetwork, "score_samples", limited)
    return sizes


def test_out_of_memory_is_met_with_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a gradient left behind by the failed try would show."""
    pairs = make_pairs(8)
    expected = gradient(Recipe(), pairs)["score.weight"]
    sizes = limit_memory(monkeypatch, 8)
    result = gradient(Recipe(), pairs)["score.weight"]
    assert sizes == [16, 8, 8]
    assert torch.allclose(result, expected, rtol=1e-4, atol=1e-6)


def test_one_pair_too_much_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, 0)
    with pytest.raises(UserError, match=r"2 x 4 tokens. Lower --max_length"):
        Trainer(fresh_network(), Recipe(), 1e-3, 1).step(0, make_pairs(1))
    network = replace(
        fresh_network(), objective=training.GradeObjective(Rubric((Criterion("a", "A."),)))
    )
    row = EncodedExample((Encoded((5, 6, 7)),), (1.0,))
    with pytest.raises(UserError, match=r"a single row of 3 tokens. Lower --max_length"):
        Trainer(network, Recipe(), 1e-3, 1).step(0, [row])


def test_steps_lower_the_loss_and_two_fits_are_equal() -> None:
    pairs = make_pairs(6)
    ends = []
    for _ in range(2):
        network = fresh_network()
        trainer = Trainer(network, Recipe(), 1e-3, 12)
        losses = [trainer.step(number, pairs).loss for number in range(12)]
        assert losses[-1] < 0.5 * losses[0]
        ends.append(network.module.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_frozen_body_stays_as_it_is() -> None:
    network = fresh_network(frozen=True)
    before = {n: p.clone() for n, p in network.module.named_parameters()}
    trainer = Trainer(network, Recipe(freeze_body=True), 1e-2, 5)
    first = trainer.step(0, make_pairs(6))
    assert first.figures.accuracy == 0.5 and first.updated  # the head begins at zero
    changed = {n for n, p in network.module.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"score.weight"}


@torch.no_grad()
def set_first_weight(network: ScoreNetwork, value: float) -> None:
    network.module.score.weight[0, 0] = value


def test_a_broken_step_changes_nothing_and_a_row_of_them_stops() -> None:
    network = fresh_network()
    set_first_weight(network, math.nan)
    before = {n: p.clone() for n, p in network.module.named_parameters()}
    trainer = Trainer(network, Recipe(), 1e-3, 10)
    for number in range(4):
        assert not trainer.step(number, make_pairs(3)).updated
    assert trainer.skipped == 4
    with pytest.raises(ModelError, match=r"not finite in 5 steps in a row.*Lower --lr"):
        trainer.step(4, make_pairs(3))
    for name, parameter in network.module.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num()), name
    set_first_weight(network, 0.0)
    assert trainer.step(5, make_pairs(3)).updated
    set_first_weight(network, math.nan)
    assert not trainer.step(6, make_pairs(3)).updated  # the first of a new row


@pytest.mark.parametrize(
    ("pairs", "limits", "steps"),
    [(100, {}, 4), (96, {"epochs": 2}, 6), (100, {"max_steps": 3}, 3), (100, {"max_steps": 9}, 4)],
)
def test_the_number_of_steps(pairs: int, limits: dict[str, int], steps: int) -> None:
    recipe = Recipe(batch_size=32, **limits)  # type: ignore[arg-type]
    assert training.count_steps(pairs, recipe) == steps
    assert len(list(training.iterate_batches(make_pairs(pairs), recipe, steps))) == steps


def test_every_epoch_has_every_pair_in_its_own_order() -> None:
    pairs, recipe = make_pairs(10), Recipe(batch_size=4, epochs=2)
    result = list(training.iterate_batches(pairs, recipe, 6))
    first, second = (list(chain(*result[:3])), list(chain(*result[3:])))
    assert [len(batch) for batch in result] == [4, 4, 2, 4, 4, 2]
    assert sorted(map(id, first)) == sorted(map(id, second)) == sorted(map(id, pairs))
    assert first != second
    assert result == list(training.iterate_batches(pairs, recipe, 6))
    assert result != list(training.iterate_batches(pairs, Recipe(batch_size=4, seed=1), 6))


def test_the_learning_rate_suits_what_is_trained() -> None:
    assert training.choose_lr(Recipe(lr=3e-4), 10**9) == 3e-4
    assert training.choose_lr(Recipe(), 10**9) == 1e-5
    assert training.choose_lr(Recipe(), 10**5) == 1e-3
    assert training.choose_lr(Recipe(freeze_body=True), 10**9) == 1e-3


def test_every_setting_of_a_recipe_reaches_the_optimizer() -> None:
    recipe = Recipe(warmup=0.25, weight_decay=0.3, grad_clip=0.0625, batch_tokens=100)
    network, pairs, sizes = fresh_network(), make_pairs(13), []
    trainer = Trainer(network, recipe, 2e-3, 8)
    real = network.score_samples

    def noted(samples: list[Encoded]) -> Tensor:
        sizes.append(len(samples) * max(len(sample.ids) for sample in samples))
        return real(samples)

    network.score_samples = noted  # type: ignore[method-assign, assignment]
    optimizer, rates = trainer.optimizer, []
    initial = {n: p.detach().clone() for n, p in network.module.named_parameters()}
    for number in range(8):
        assert trainer.step(number, pairs).grad_norm > 0.0625
        rates.append(optimizer.lr)
        if number == 0:  # clipped: a tenth of it is what AdamW remembers after one step
            squares = [t.square().sum() for n, t in optimizer.moments().items() if "avg" in n
                       and not n.endswith("_sq")]  # fmt: skip
            assert torch.stack(squares).sum().sqrt().item() == pytest.approx(0.00625, rel=1e-4)
            moments = optimizer.moments()
            for name, before in initial.items():
                first, second = (moments[f"{name}.{m}"] for m in ("exp_avg", "exp_avg_sq"))
                step = (first / 0.1) / ((second / 0.001).sqrt() + 1e-8)
                decayed = before * (1 - rates[0] * (0.3 if before.ndim > 1 else 0.0))
                after = dict(network.module.named_parameters())[name]
                torch.testing.assert_close(after.detach(), decayed - rates[0] * step)
    floor = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]
    assert rates == pytest.approx([2e-3 * share for share in (1 / 3, 2 / 3, *floor)])
    assert max(sizes) <= 100 and len(sizes) > 8


NONE = torch.zeros(3)


def test_hand_worked_numbers() -> None:
    # Differences of 0, ln 3 and -ln 3: chances of 1/2, 3/4 and 1/4 that the chosen one wins.
    chosen = tensor([1.0, math.log(3), 0.0])
    rejected = tensor([1.0, 0.0, math.log(3)])
    expected = [math.log(2), math.log(4 / 3), math.log(4)]
    losses = training.pair_losses(chosen, rejected, NONE, 0.0)
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    # The margin is taken off the lead; centring adds the square of the sum, and it alone sees
    # both scores move together.
    losses = training.pair_losses(tensor([3.0]), tensor([-1.0]), tensor([4.0]), 0.25)
    assert losses.item() == pytest.approx(math.log(2) + 0.25 * 4.0)
    moved = training.pair_losses(chosen + 7, rejected + 7, NONE, 0.0)
    assert moved.tolist() == pytest.approx(expected, rel=1e-5)


def test_equals_torch_and_stays_finite_far_out() -> None:
    difference = tensor([-1e4, -30.0, 0.3, 30.0, 1e4])
    losses = training.pair_losses(difference, torch.zeros(5), torch.zeros(5), 0.0)
    assert torch.equal(losses, -torch.nn.functional.logsigmoid(difference))
    assert losses[0] == 1e4 and losses[-1] == 0


def figures_of(*scores: list[float]) -> training.Figures:
    pairs = [EncodedExample((), (0.0,))] * len(scores[0])
    return training.PairObjective().figures(tensor(scores)[:, :, None], pairs)


def test_figures_count_ties_half() -> None:
    figures = figures_of([1.0, 2.0, 3.0, 0.0], [0.0, 2.0, 5.0, 0.0])
    assert figures.accuracy == 0.5  # one right, one wrong, two ties
    assert figures.margin == pytest.approx((1 + 0 - 2 + 0) / 4)
    assert figures.mean == pytest.approx(13 / 8)
    assert figures.std == pytest.approx(math.sqrt(43 / 8 - (13 / 8) ** 2))


def test_the_better_figures_have_the_higher_accuracy_then_the_lower_loss() -> None:
    good = figures_of([5.0], [0.0])
    less = figures_of([1.0], [0.0])
    wrong = figures_of([0.0], [0.1])
    assert good.better_than(less) and less.better_than(wrong) and wrong.better_than(None)
    assert not less.better_than(good) and not good.better_than(good)
