"""Prompts are dealt by a fixed rule, each once, and evenly."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_cli.cluster.engine import deal_prompts
from ppo_cli.records import Prompt


def prompts_of(lengths: list[int]) -> list[Prompt]:
    return [
        Prompt(uid=f"p{i}", text="", messages=(), rendered="", token_ids=(1,) * length)
        for i, length in enumerate(lengths)
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 7), st.integers(1, 300))
def test_every_prompt_once_in_order_and_evenly(lengths: list[int], n: int, limit: int) -> None:
    prompts = prompts_of(lengths)
    hands = deal_prompts(prompts, n, limit)
    assert len(hands) == n
    dealt = [prompt.uid for hand in hands for prompt in hand]
    assert sorted(dealt) == sorted(prompt.uid for prompt in prompts)
    for hand in hands:
        places = [int(prompt.uid[1:]) for prompt in hand]
        assert places == sorted(places)
    loads = [sum(len(prompt.token_ids) + limit for prompt in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(lengths, default=0) + limit
    assert deal_prompts(prompts, n, limit) == hands


def test_long_prompts_are_spread() -> None:
    hands = deal_prompts(prompts_of([1000, 10, 1000, 10]), 2, 1)
    assert [[len(p.token_ids) for p in hand] for hand in hands] == [[1000, 10], [1000, 10]]
