"""When a value or a printed line counts as what the row expects."""

from __future__ import annotations

from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from ppo_cli.rewards.code.tester import same_output, same_value
from tests.rewards.tables import table

INF, NAN = float("inf"), float("nan")
FINITE = [0, 1, 42, -7, 10**30, 0.5, 1e308, -1e-9, [1, 2, 3], [[1.5], 2], {"a": 1.0}, "5", True]
# What is never the answer where something finite is due.
ENDLESS = [
    INF, -INF, NAN, complex(INF, 0), complex(NAN, NAN), Decimal("Infinity"), Decimal("NaN"),
    Decimal("sNaN"), "inf", "nan", "1e999",
]  # fmt: skip


def shaped_as(pattern: Any, value: Any) -> Any:
    """Return a container like another that holds this value everywhere."""
    if isinstance(pattern, list):
        return [shaped_as(part, value) for part in pattern]
    return {"a": value} if isinstance(pattern, dict) else value


def equals(value: Any, expected: Any) -> bool:
    try:
        return same_value(value, expected)
    except Exception:
        return False


def test_what_is_not_finite_equals_nothing_finite() -> None:
    wrong = [
        (form, expected)
        for expected in FINITE
        for value in ENDLESS
        for form in (value, shaped_as(expected, value), [value], (value,), {"a": value})
        if equals(form, expected) or equals(expected, form)
    ]
    assert wrong == []


def test_what_is_not_finite_equals_itself_where_it_is_due() -> None:
    for value in (INF, -INF, NAN):
        assert same_value(value, value)
        assert same_value([1, (value, 2.0)], [1, [value, 2.0]])
        assert same_value(value, [value])
    for value, expected in ((INF, -INF), (INF, NAN), (NAN, INF), (1.0, NAN), (10**400, INF)):
        assert not equals(value, expected)


NEAR = [
    (1e6 + 0.5, 1e6), (0.1 + 0.2, 0.3), (3, 3.0), (1e300, 1e300), (0, 1e-7),
    # Rounding errors of integers.
    (4 - 1e-9, 4), (1e9 + 7, 10**9 + 7), (0.0, 0), (2.0**53, 2**53),
]  # fmt: skip
FAR = [
    (1e300, 42), (1e6 + 2, 1e6), (-1e-3, 0), (1e300, 0.0), (10**400, 1.5),
    # An estimate of an integer.
    (1e9, 10**9 + 7), (1e6 + 0.5, 10**6), (2.0**63, 2**63 + 1), (float(10**30), 10**30 + 1),
    (1.5, 10**400),
]  # fmt: skip


def test_the_tolerance_is_that_of_the_expected_number() -> None:
    for value, expected in NEAR:
        assert same_value(value, expected) and same_value([value], [expected])
    for value, expected in FAR:
        assert not equals(value, expected)
    assert same_output("1000000007.0 3.9999999999", "1000000007 4")


@pytest.mark.parametrize(
    ("equal", "value", "expected"),
    [
        (True, {"a": 0.1 + 0.2}, {"a": 0.3}), (True, [[0.1 + 0.2], 1], [[[0.3], 1]]),
        (True, {"b": [1, (2,)], "a": 1}, {"a": 1, "b": (1, [2])}), (True, (), []), (True, {}, {}),
        (False, {"a": 1}, {"a": 1, "b": 2}), (False, {"a": 1, "b": 2}, {"a": 1}),
        (False, {"a": 1}, {"b": 1}), (False, {"a": 1}, {"a": 2}), (False, [1, 2], [1]),
        (False, [1], [1, 2]), (False, [2, 1], [1, 2]), (False, 1, [1, 1]), (False, [1], 1),
        (False, {}, []), (False, [["a"]], ["a", "a"]),
    ],
)  # fmt: skip
def test_groups_are_equal_key_by_key_and_lists_item_by_item(
    equal: bool, value: Any, expected: Any
) -> None:
    assert same_value(value, expected) is equal


def test_other_types_are_compared_as_they_are() -> None:
    for value in (complex(1, 2), Decimal("1.5"), Fraction(1, 3), deque([1]), {1, 2}, b"x", None):
        assert same_value(value, value)
    for value, expected in (
        (True, 1), (1, True), ("1", 1), (Decimal(1), 1), (Fraction(1), 1), (1 + 0j, 1),
        ({1: 2, "1": 3}, {"1": 3}),
    ):  # fmt: skip
        assert not same_value(value, expected)


@pytest.mark.parametrize(
    "printed", ["1.e999", "-1.e999", "1.0e400", ".1e999", "inf", "nan", "1e999."]
)
def test_a_printed_infinity_is_no_number(printed: str) -> None:
    for expected in ("5", "14", "0", "5.5", "1e308", "-1.5e300"):
        assert not same_output(printed, expected)
        assert not same_output(expected, printed)
    assert not same_output(f"{printed} {printed}\n{printed}", "5 6\n7")
    assert same_output(f"{printed}\n", printed)
    assert not same_output("2.e999", "3.e999")


def test_printed_decimals_may_be_near() -> None:
    for printed, expected in table(__file__, "near"):
        assert same_output(printed, expected)
    for printed, expected in table(__file__, "not near"):
        assert not same_output(printed, expected)
