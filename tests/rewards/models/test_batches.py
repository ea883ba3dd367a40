"""Batches keep to their budget, pad to the right, and shrink when memory runs out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ppo_cli.errors import RewardError
from ppo_cli.rewards.models.base import (
    Batch,
    Budget,
    Encoded,
    LoadedModel,
    Scores,
    body_dtype,
    pad,
    plan_batches,
    score_batches,
)


class Small:
    """A network that sums ids, and has room for so many padded tokens only."""

    def __init__(self, room: int, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.module: nn.Module = nn.Linear(1, 1)
        self.room, self.error = room, error
        self.shapes: list[tuple[int, ...]] = []

    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        if ids_BL.numel() > self.room:
            raise self.error("out of memory")
        self.shapes.append(tuple(ids_BL.shape))
        return Scores((ids_BL * mask_BL).sum(1).float())


def samples_of(*lengths: int) -> list[Encoded]:
    return [Encoded(tuple(range(1, length + 1))) for length in lengths]


def score(network: Small, budget: Budget, *lengths: int) -> list[Batch]:
    model = LoadedModel("seqcls", "", network, None, 512, 9)
    return list(score_batches(model, samples_of(*lengths), budget))


def listed(batches: list[Batch]) -> tuple[list[int], list[float]]:
    """Return the samples and their scores, batch after batch."""
    indices = [i for batch in batches for i in batch.indices]
    return indices, [row.score for batch in batches for row in batch.rows]


@given(
    st.lists(st.integers(1, 40), max_size=30).map(lambda x: sorted(x, reverse=True)),
    st.integers(1, 100),
)
def test_every_sample_once_and_within_the_budget(lengths: list[int], tokens: int) -> None:
    batches = plan_batches(lengths, tokens)
    assert [i for batch in batches for i in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= tokens


def test_padding_is_right_and_typed() -> None:
    samples = [Encoded((1, 2, 3), (0, 1, 1)), Encoded((4,), (1,))]
    ids, mask, types = pad(samples, 9, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert types is not None and types.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert pad(samples_of(2), 9, torch.device("cpu"))[2] is None


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_out_of_memory_halves_the_batch_and_goes_on(error: type[Exception]) -> None:
    network, budget = Small(20, error), Budget(64)
    batches = score(network, budget, 8, 8, 8, 8, 4, 4, 4, 4, 4)
    assert listed(batches) == (list(range(9)), [36.0] * 4 + [10.0] * 5)
    assert budget.tokens == 16
    assert network.shapes == [(2, 8), (2, 8), (4, 4), (1, 4)]
    assert [(batch.tokens, batch.padded) for batch in batches] == [(16, 16)] * 3 + [(4, 4)]


def test_a_later_batch_that_does_not_fit_is_halved_in_its_place() -> None:
    network = Small(10)
    batches = score(network, Budget(12), 10, 4, 4, 4)
    assert listed(batches) == ([0, 1, 2, 3], [55.0, 10.0, 10.0, 10.0])
    assert network.shapes == [(1, 10), (1, 4), (1, 4), (1, 4)]


def test_a_single_sample_that_does_not_fit_stops_with_what_to_lower() -> None:
    with pytest.raises(RewardError, match=r"single sample of 30 tokens.*max_length"):
        score(Small(20), Budget(64), 30, 2)


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="out of memory"):
        score(Small(0, ValueError), Budget(64), 3)


def test_the_body_says_the_precision() -> None:
    module = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.Linear(8, 1))
    assert body_dtype(module) == torch.bfloat16
    assert body_dtype(nn.Sequential(nn.Linear(8, 1).bfloat16(), nn.Linear(8, 8))) == torch.float32
