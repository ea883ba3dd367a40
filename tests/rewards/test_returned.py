"""All that a reward function can return becomes a number or a reason."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ppo_cli.processes.user_code import describe_error
from ppo_cli.records import Part, PlacedReward
from ppo_cli.rewards.base import as_plain, read_returned


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0), (0.25, 0.25), (True, 1.0), (False, 0.0), (-3, -3.0), (np.float32(0.5), 0.5),
        (np.int64(2), 2.0), (np.bool_(True), 1.0), (np.array(0.5), 0.5), (np.array([0.5]), 0.5),
        (Fraction(1, 2), 0.5), (Decimal("0.5"), 0.5), ({"score": 1}, 1.0),
        ({"score": np.float64(0.5), "acc": 1}, 0.5),
    ],
)  # fmt: skip
def test_numbers_become_scores(value: Any, score: float) -> None:
    returned = read_returned(value)
    assert (returned.value, returned.failure) == (score, "")
    assert type(returned.value) is float


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (None, "None (is a `return` missing?)"), (float("nan"), "nan"), (float("inf"), "inf"),
        (-np.inf, "-inf"), ("0.5", "text '0.5', not a number"), (b"1", "text b'1'"),
        ((1, 2), "tuple, not a number"), ([], "list"), (np.zeros(3), "ndarray"), (1j, "complex"),
        (10**400, "a number too large"), (1e200, "1e+200, too large"), (object, "type"),
        ({}, "a dict without 'score' (it has nothing)"),
        ({"reward": 1, "acc": 0}, "a dict without 'score' (it has 'reward', 'acc')"),
        ({"score": None}, "score None"), ({"score": "high"}, "score text 'high'"),
        ({"score": float("nan")}, "score nan"),
    ],
)  # fmt: skip
def test_everything_else_is_a_failure_with_its_reason(value: Any, fragment: str) -> None:
    returned = read_returned(value)
    assert returned.value is None
    assert f"returned {fragment}" in returned.failure


def test_a_dict_gives_parts_info_and_reason() -> None:
    value = {
        "score": 0.5, "acc": True, "length": np.int32(7), "bad": float("nan"), 5: 1.5,
        "reason": "half right", "answer": "72", "found": None, "steps": [1, (2, 3), {"a": {4}}],
        "gaps": [np.float32(0), np.float32(0.5)],
    }  # fmt: skip
    returned = read_returned(value)
    assert {name: part.raw for name, part in returned.parts.items()} == {
        "acc": 1.0, "length": 7.0, "bad": None, "5": 1.5
    }  # fmt: skip
    assert returned.reason == "half right"
    steps = [1, [2, 3], {"a": [4]}]
    assert returned.info == {"answer": "72", "found": None, "steps": steps, "gaps": [0.0, 0.5]}
    json.dumps(returned.info)


def test_plain_values_of_any_object_fit_into_json() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    loop: list[Any] = []
    loop.append(loop)
    plain = as_plain({"odd": Odd(), "loop": loop, "nan": float("nan"), "long": "x" * 10_000})
    json.dumps(plain, allow_nan=False)
    assert plain["odd"] == "<Odd>"
    assert len(plain["long"]) == 2000


def test_an_error_is_told_on_one_line() -> None:
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_error(KeyError()) == "KeyError"


def test_rewards_within_a_response_are_read() -> None:
    by_token = read_returned([0.5, -1, 2])
    assert by_token.value == 1.5
    assert by_token.steps == tuple(
        PlacedReward(end, value, "token") for end, value in ((1, 0.5), (2, -1.0), (3, 2.0))
    )
    by_step = read_returned({"score": 2, "step_rewards": [(4, 0.5), {"offset": 9, "value": 1}]})
    assert by_step.value == 2.0
    assert by_step.steps == (PlacedReward(4, 0.5), PlacedReward(9, 1.0))
    assert read_returned([[4, 0.25], [6, 0.5]]).value == 0.75
    assert read_returned({"token_rewards": np.array([1.0, 2.0]), "acc": 1}).parts == {
        "acc": Part(1.0, None)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        ([1, None], "returned token_rewards[1] is None"),
        ([1e308] * 10, "not a finite number of a usable size"),
        ([1, float("nan")], "returned token_rewards[1] is nan"),
        ([(1, 2, 3)], "returned step_rewards[0] is neither a pair"),
        ([(1.5, 2)], "offset 1.5 is not a whole number"),
        ([(-3, 2)], "offset -3 is not a whole number"),
        ({"score": 1, "step_rewards": 3}, "returned step_rewards is int, not a list"),
        ({"score": None, "token_rewards": [1.0]}, "returned score None"),
        ({"token_rewards": ["1"]}, "token_rewards[0] is '1'"),
    ],
)
def test_strange_placed_rewards_are_failures(value: Any, fragment: str) -> None:
    returned = read_returned(value)
    assert returned.value is None and returned.steps == ()
    assert fragment in returned.failure
