"""Rows over ranks: every row once, as many turns on each rank, work that is about even."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistBackendError

from ppo_cli.engine.batches.micro_batches import Budget, plan_rank_micro_batches, run_within_memory
from ppo_cli.engine.models.policy import WeightsContext
from ppo_cli.engine.ranks import OutOfMemoryElsewhere, Ranks
from ppo_cli.errors import UserError, WorkerLost


def shares(
    lengths: list[int], budget: Budget, ranks: int, tensor: int = 1
) -> list[list[list[int]]]:
    return [
        plan_rank_micro_batches(lengths, budget, Ranks(rank, ranks, tensor))
        for rank in range(ranks)
    ]


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    tokens=st.integers(16, 1000),
    rows=st.none() | st.integers(1, 8),
    ranks=st.integers(1, 5),
    packed=st.booleans(),
)
def test_every_row_is_computed_once_and_all_ranks_take_as_many_turns(
    lengths: list[int], tokens: int, rows: int | None, ranks: int, packed: bool
) -> None:
    groups = shares(lengths, Budget(tokens, rows, packed=packed), ranks)
    rows_of_all = sorted(i for mine in groups for group in mine for i in group)
    assert rows_of_all == list(range(len(lengths)))
    assert len({len(mine) for mine in groups}) == 1
    for group in (group for mine in groups for group in mine if len(group) > 1):
        row_lengths = [lengths[i] for i in group]
        assert (sum(row_lengths) if packed else len(group) * max(row_lengths)) <= tokens
        assert rows is None or len(group) <= rows


def fail_with(error: Exception) -> Callable[..., None]:
    """Work on a micro-batch that fails."""

    def work(rows: Sequence[int], last: bool) -> None:
        raise error

    return work


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def test_fewer_rows_than_ranks_leave_some_ranks_idle() -> None:
    assert shares([5, 4], Budget(100), 3) == [[[0]], [[1]], [[]]]


def test_one_micro_batch_is_split_so_that_all_ranks_work() -> None:
    groups = shares([10] * 8, Budget(1000), 2)
    assert [[len(group) for group in mine] for mine in groups] == [[4], [4]]


def test_tensor_parallel_neighbours_compute_the_same_rows() -> None:
    groups = shares(list(range(1, 9)), Budget(40), 4, tensor=2)
    assert groups[0] == groups[1]
    assert groups[2] == groups[3]
    assert groups[0] != groups[2]


@given(lengths=st.lists(st.integers(1, 512), min_size=64, max_size=128), ranks=st.integers(2, 4))
def test_the_work_is_about_even(lengths: list[int], ranks: int) -> None:
    groups = shares(lengths, Budget(2048), ranks)
    work = [
        sum(len(group) * max(lengths[i] for i in group) for group in mine if group)
        for mine in groups
    ]
    assert max(work) - min(work) <= 2048


def test_no_rank_always_has_the_heavier_micro_batch() -> None:
    lengths = [80, 70, 60, 50, 40, 30, 20, 10]  # each a micro-batch of its own
    assert shares(lengths, Budget(100, rows=1), 2) == [[[0], [3], [4], [7]], [[1], [2], [5], [6]]]
    work = [sum(lengths[i] for (i,) in mine) for mine in shares(lengths, Budget(100, rows=1), 4)]
    assert work == [90] * 4


def test_ranks_that_share_layers_do_not_try_again() -> None:
    pair = Ranks(1, 2, tensor_size=2, mesh=object())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"Learner rank 1 ran out of memory .* up to 4 sequences"):
        run_within_memory([9] * 8, Budget(36), fail_with(NO_MEMORY), lambda: None, pair)


class Flags(Ranks):
    """A rank whose others fail in some of the rounds; what it says is kept."""

    fail: tuple[int, ...]
    rounds: list[bool]

    def exchange_failures(self, *, failed: bool = False) -> None:
        round_ = len(self.rounds)
        self.rounds.append(failed)
        if round_ in self.fail and not failed:
            raise OutOfMemoryElsewhere


def second_of_two(*fail: int) -> Flags:
    ranks = Flags(1, 2, mesh=object())  # type: ignore[arg-type]
    object.__setattr__(ranks, "fail", fail)
    object.__setattr__(ranks, "rounds", [])
    return ranks


class Context(WeightsContext):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin_micro_batch(self) -> None:
        self.calls.append("begin")

    def begin_replay(self) -> None:
        self.calls.append("stand in")

    def reset(self) -> None:
        self.calls.append("forget")


@pytest.mark.parametrize(
    ("fail", "fits", "failures", "tried", "rows"),
    [
        ((), 9, [False], [8], None),
        ((0,), 9, [False] * 4, [8, 3, 3, 2], 4),  # the other fails
        ((), 4, [True, *[False] * 3], [8, 0, 3, 3, 2], 4),  # this one fails, and says so
        ((0,), 4, [True, *[False] * 3], [8, 0, 3, 3, 2], 4),  # both do
        ((2,), 4, [True, *[False] * 11], [8, 0, 3, 3, *[1] * 8, 0], 1),  # and in a later one
    ],
)
def test_ranks_turn_back_together_and_halve_alike(
    fail: tuple[int, ...], fits: int, failures: list[bool], tried: list[int], rows: int | None
) -> None:
    ranks, context = second_of_two(*fail), Context()
    budget, seen, restarts = Budget(10_000), [], []

    def work(rows: Sequence[int], last: bool) -> None:
        seen.append(len(rows))
        if len(rows) > fits:
            raise NO_MEMORY

    # 17 rows: one rank has 9 at first, the other 8; both count what all have.
    run_within_memory([7] * 17, budget, work, lambda: restarts.append(1), ranks, contexts=[context])
    assert (ranks.rounds, seen, budget.rows) == (failures, tried, rows)
    assert len(restarts) == context.calls.count("forget") == budget.halvings + failures.count(True)
    assert context.calls.count("begin") == len(tried) - failures.count(True)


NCCL = "NCCL error in: x.cpp:77, unhandled cuda error\nLast error:\n"


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (NO_MEMORY, UserError, r"Learner rank 1 .* shortest sequence alone"),
        # The others wait in it: a rank that asked them to turn back would wait for them, too.
        (DistBackendError(f"{NCCL}Failed to CUDA calloc 10485760 bytes"), WorkerLost,
         r"rank 1 ran out of memory inside of a collective.*10485"),
        (DistBackendError(f"{NCCL}Cuda failure 'invalid'"), WorkerLost,
         r"rank 1 failed .*cuda error; Cuda failure 'invalid'\. NCCL_DEBUG=INFO"),
    ],
    ids=["it cannot even stand in", "inside of a collective", "what NCCL cannot do"],
)  # fmt: skip
def test_a_rank_that_cannot_go_on_says_why(
    error: Exception, kind: type[Exception], message: str
) -> None:
    ranks = second_of_two()
    with pytest.raises(kind, match=message):
        run_within_memory([7] * 4, Budget(100), fail_with(error), lambda: None, ranks)
    assert ranks.rounds == []
