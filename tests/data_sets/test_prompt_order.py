"""The order of prompts: full batches, nothing lost, the same on resume and on every machine."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.errors import DataError

# A busy machine must not fail a test for being slow.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def orders(draw: st.DrawFn) -> dict[str, Any]:
    size, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**31 - 1))
    batch_size = draw(st.integers(1, size))
    return {"size": size, "batch_size": batch_size, "seed": seed, "shuffle": draw(st.booleans())}


def order_at(step: int, how: dict[str, Any]) -> PromptOrder:
    """An order from which some batches have been taken."""
    order = PromptOrder(**how)
    for _ in range(step):
        order.take()
    return order


def epochs_of(order: PromptOrder, count: int) -> list[list[int]]:
    """The prompts of each epoch, as they were taken."""
    steps = order.steps_per_epoch
    return [[i for _ in range(steps) for i in order.take()] for _ in range(count)]


@given(orders())
@UNHURRIED
def test_no_prompt_comes_twice_in_an_epoch_and_none_is_left_out_twice(how: dict[str, Any]) -> None:
    everything = set(range(how["size"]))
    left_out: set[int] = set()
    order = PromptOrder(**how)
    for _ in range(4):
        batches = [order.take() for _ in range(order.steps_per_epoch)]
        assert {len(batch) for batch in batches} == {how["batch_size"]}, "every batch is full"
        indices = [index for batch in batches for index in batch]
        assert set(indices) <= everything
        assert len(indices) == len(set(indices))
        assert left_out <= set(indices)
        left_out = everything - set(indices)
        assert len(left_out) == how["size"] % how["batch_size"]


@given(orders(), st.integers(0, 60), st.integers(1, 60))
@settings(UNHURRIED, max_examples=200)
def test_resume_at_any_point_equals_no_stop(how: dict[str, Any], before: int, after: int) -> None:
    uninterrupted, resumed = order_at(before, how), order_at(1, how)
    resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    assert [resumed.take() for _ in range(after)] == [uninterrupted.take() for _ in range(after)]
    assert resumed.state_dict() == uninterrupted.state_dict()


@given(orders(), st.integers(0, 60), st.integers(1, 20))
@UNHURRIED
def test_peeking_tells_what_will_be_taken_and_moves_nothing(
    how: dict[str, Any], before: int, ahead: int
) -> None:
    order = order_at(before, how)
    state = json.dumps(order.state_dict())
    seen = [order.peek(k) for k in range(1, ahead + 1)]
    assert order.peek() == seen[0]
    assert json.dumps(order.state_dict()) == state
    assert seen == [order.take() for _ in range(ahead)]
    with pytest.raises(ValueError, match="must be at least 1"):
        order.peek(0)


def test_the_order_is_the_same_on_every_machine() -> None:
    order = PromptOrder(8, 4, seed=42)
    indices = [order.take() for _ in range(4)]
    assert indices == [[4, 1, 3, 6], [0, 7, 2, 5], [1, 2, 5, 3], [6, 0, 4, 7]]


def test_the_global_random_numbers_are_not_touched() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    epochs_of(PromptOrder(20, 5, seed=3), 2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_seeds_and_epochs_differ() -> None:
    orders = [epochs_of(PromptOrder(50, 10, seed), 3) for seed in range(5)]
    assert len({tuple(epoch) for order in orders for epoch in order}) == 15


def test_without_shuffling_the_file_order_holds() -> None:
    order = PromptOrder(5, 2, seed=9, shuffle=False)
    assert order.steps_per_epoch == 2
    assert [order.take() for _ in range(6)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1]]


def test_too_few_prompts_for_a_batch_is_told() -> None:
    with pytest.raises(DataError, match=r"^3 prompts cannot fill a batch of 8. Lower --batch_s"):
        PromptOrder(3, 8, seed=0)
    with pytest.raises(DataError, match="must be at least 1"):
        PromptOrder(3, 0, seed=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 11}, "it saw 10, now there are 11. Resume with the same data files"),
        ({"fingerprint": "b"}, "it saw 10, now there are 10, with other contents."),
        ({"seed": 2}, "made with seed 1, this run asks for 2. Give the same seed"),
        ({"shuffle": False}, "made with shuffle True, this run asks for False"),
    ],
)
def test_other_prompts_or_another_seed_are_refused(changed: dict[str, Any], message: str) -> None:
    how = {"size": 10, "batch_size": 3, "seed": 1, "shuffle": True, "fingerprint": "a"}
    state = PromptOrder(**how).state_dict()
    other = PromptOrder(**{**how, **changed})
    before = other.state_dict()
    with pytest.raises(DataError, match=re.escape(message)):
        other.load_state_dict(state)
    assert other.state_dict() == before


@given(orders(), st.integers(0, 20), st.data())
@UNHURRIED
def test_another_batch_size_may_go_on(
    how: dict[str, Any], before: int, data: st.DataObject
) -> None:
    order = order_at(before, how)
    other = PromptOrder(**{**how, "batch_size": data.draw(st.integers(1, how["size"]))})
    other.load_state_dict(order.state_dict())
    for _ in range(5):
        batch = other.take()
        assert len(batch) == len(set(batch)) == other.batch_size
