"""Micro-batches: every row once, within the budget, even, and smaller after OOM."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import DistBackendError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppo_cli.engine.batches.micro_batches import Budget, plan_micro_batches, run_within_memory
from ppo_cli.errors import UserError, is_out_of_memory

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(LENGTHS)
@settings(max_examples=100, deadline=None)
def test_sorted_by_length_so_that_neighbours_pad_little(lengths) -> None:
    plan = plan_micro_batches(lengths, Budget(512))
    flat = [lengths[i] for group in plan for i in group]
    assert flat == sorted(lengths, reverse=True)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_tenth_is_padding_at_most_unless_micro_batches_are_small(lengths) -> None:
    plan = plan_micro_batches(lengths, Budget(16384))
    sizes = [len(group) * max(lengths[i] for i in group) for group in plan]
    small = all(size <= 1024 or len(group) == 1 for size, group in zip(sizes, plan, strict=True))
    assert small or sum(sizes) * 0.9 <= sum(lengths)


@pytest.mark.parametrize(
    ("lengths", "budget", "sizes"),
    [
        pytest.param([3000, *[10] * 100], Budget(16384, packed=True), [101], id="packed"),
        pytest.param([10] * 12, Budget(100), [6, 6], id="even"),
        pytest.param([500, 10, 10], Budget(100), [1, 2], id="a row above the budget"),
        pytest.param([], Budget(100), [], id="none"),
    ],
)
def test_sizes_of_micro_batches(lengths: list[int], budget: Budget, sizes: list[int]) -> None:
    assert [len(group) for group in plan_micro_batches(lengths, budget)] == sizes


def run_out(rows: Sequence[int], last: bool) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_out_of_memory_halves_restarts_and_is_remembered() -> None:
    budget, tried, restarts = Budget(10_000), [], []

    def work(rows: Sequence[int], last: bool) -> None:
        tried.append(len(rows))
        if tried[-1] > 5:
            raise RuntimeError("[alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    run_within_memory([7] * 40, budget, work, lambda: restarts.append(1))
    assert tried == [40, 20, 10] + [5] * 8 and len(restarts) == 3
    assert (budget.rows, budget.halvings) == (5, 3)


def test_packed_rows_are_halved_by_their_tokens_and_the_light_groups_stay_whole() -> None:
    lengths, tried, done = [4096] * 4 + [160] * 100, [], []
    budget = Budget(16_384, packed=True)

    def work(rows: Sequence[int], last: bool) -> None:
        tried.append(sum(lengths[i] for i in rows))
        if tried[-1] > 9000:
            run_out(rows, last)
        done.append(len(rows))

    run_within_memory(lengths, budget, work, lambda: None)
    assert budget.halvings == 1 and budget.current_limit() == ("tokens", tried[0] // 2)
    assert sum(done) == 104 and max(done) > 40


@pytest.mark.parametrize("packed", [False, True])
def test_a_resumed_run_takes_up_halvings_of_its_own_kind(packed: bool) -> None:
    tried = Budget(1000, packed=packed)

    def resumed(budget: Budget) -> Budget:
        budget.load_state(tried.state())
        return budget

    assert resumed(Budget(1000, packed=packed)) == Budget(1000, packed=packed)
    tried.halve(longest=100, most_rows=8, most_tokens=800)
    limit = ("tokens", 400) if packed else ("rows", 4)
    assert resumed(Budget(1000, packed=packed)) == tried and tried.current_limit() == limit
    # A smaller setting of the resumed run stays, a larger one yields to what memory allowed.
    smaller = resumed(Budget(300, rows=3, packed=packed))
    assert smaller.current_limit() == (("tokens", 300) if packed else ("rows", 3))
    assert smaller.halvings == 1
    assert resumed(Budget(9000, rows=90, packed=packed)).current_limit() == limit
    assert resumed(Budget(1000, packed=not packed)) == Budget(1000, packed=not packed)


def test_one_row_that_does_not_fit_is_told() -> None:
    with pytest.raises(UserError, match="single sequence of 900 tokens"):
        run_within_memory([900, 3], Budget(10_000), run_out, lambda: None)


def test_weights_that_leave_no_room_are_told() -> None:
    """FSDP2's own gather finds no room for its buffer."""

    class NoRoom(DefaultAllGather):
        def allocate(self, *_: Any, **__: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = nn.Linear(4, 4)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        sharded: Any = model
        sharded.set_custom_all_gather(NoRoom())

        def work(rows: Sequence[int], last: bool) -> None:
            model(torch.zeros(len(rows), 4))

        budget = Budget(10_000, advise=lambda cause: "Use more GPUs.")
        expected = r"weights that a rank gathers .* single sequence of 900 tokens. Use more GPUs."
        with pytest.raises(UserError, match=expected):
            run_within_memory([900], budget, work, sharded.reset_iter_state)
    finally:
        dist.destroy_process_group()


def test_other_errors_pass_through() -> None:
    def work(rows: Sequence[int], last: bool) -> None:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        run_within_memory([3], Budget(100), work, lambda: None)
    assert not is_out_of_memory(ValueError("not enough memory"))


@pytest.mark.parametrize(
    "text", ["Failed to CUDA calloc 10485760 bytes", "Cuda failure 2 'out of memory'"]
)
def test_nccl_without_memory_is_out_of_memory(text: str) -> None:
    error = "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\n"
    assert is_out_of_memory(DistBackendError(error + text))
    assert not is_out_of_memory(DistBackendError(error))


def test_an_import_that_fails_under_a_limit_is_out_of_memory() -> None:
    numpy_error = ImportError("please exit the numpy source tree")
    numpy_error.__cause__ = ImportError("_multiarray_umath.so: failed to map segment")
    torch_error = ImportError("cannot import name 'x'", name="torch._dynamo.utils")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 43, hard))
    try:
        assert is_out_of_memory(numpy_error) and is_out_of_memory(torch_error)
        assert not is_out_of_memory(ImportError("No module named 'mine'", name="mine"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert not is_out_of_memory(numpy_error) and not is_out_of_memory(torch_error)
