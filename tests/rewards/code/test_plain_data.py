"""Values as bytes and back: what is plain comes back equal, and bytes of a foe do no harm."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards.code.channel import (
    Malformed,
    NotTransferable,
    decode,
    encode,
    refuse_number,
    refuse_object,
)

_KEYS = st.one_of(st.integers(), st.text(), st.booleans(), st.none(), st.binary())
_PLAIN = st.recursive(
    st.one_of(_KEYS, st.floats(allow_nan=False), st.complex_numbers(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner), st.dictionaries(_KEYS, inner), st.sets(_KEYS),
        st.frozensets(_KEYS), st.lists(inner).map(tuple),
    ),
    max_leaves=20,
)  # fmt: skip


def there_and_back(value: Any) -> Any:
    return decode(encode(value, refuse_object), refuse_number)


@given(_PLAIN)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_malformed(data: bytes) -> None:
    try:
        decode(data, refuse_number)
    except Malformed:
        return


@pytest.mark.parametrize(
    "value",
    [
        -(10**300), math.inf, -math.inf, "\ud800", bytearray(b"x"), range(1, 9, 2),
        Fraction(1, 3), Decimal("1.10"), deque([1, 2]), ...,
    ],
)  # fmt: skip
def test_rarer_values(value: Any) -> None:
    back = there_and_back(value)
    assert (type(back), back) == (type(value), value)
    assert math.isnan(there_and_back(math.nan))


def test_subclasses_come_back_as_their_base() -> None:
    class Colour(IntEnum):
        RED = 1

    pair = namedtuple("pair", "a b")
    for value, kind in (
        (Colour.RED, int), (pair(1, 2), tuple), (Counter("aab"), dict), (OrderedDict(a=1), dict),
    ):  # fmt: skip
        assert (type(there_and_back(value)), there_and_back(value)) == (kind, value)


def test_objects_travel_as_numbers() -> None:
    objects: list[Any] = []

    def number_of(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    thing = object()
    data = encode([1, thing], number_of)
    assert decode(data, lambda number: objects[number]) == [1, thing]
    with pytest.raises(Malformed):
        decode(data, refuse_number)


def test_what_is_too_large_or_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for value, fragment in ((deep, "deep"), ("x" * (9 << 20), "MB"), ([0] * 10**7, "MB")):
        with pytest.raises(NotTransferable, match=fragment):
            encode(value, refuse_object)
    with pytest.raises(Malformed, match="deep"):
        decode(b"l\x01\0\0\0" * 1000 + b"N", refuse_number)
