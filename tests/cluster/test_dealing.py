"""Prompts are dealt by a fixed rule, each once, and evenly."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_cli.cluster.engine import deal_prompts
from ppo_cli.records import Prompt


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 7), st.integers(1, 300))
def test_every_prompt_once_in_order_and_evenly(
    lengths: list[int], samplers: int, limit: int
) -> None:
    prompts = [Prompt(f"p{i}", "", (), "", (1,) * n) for i, n in enumerate(lengths)]
    hands = deal_prompts(prompts, samplers, limit)
    assert len(hands) == samplers
    dealt = [prompt.uid for hand in hands for prompt in hand]
    assert sorted(dealt) == sorted(prompt.uid for prompt in prompts)
    for hand in hands:
        places = [int(prompt.uid[1:]) for prompt in hand]
        assert places == sorted(places)
    loads = [sum(len(prompt.token_ids) + limit for prompt in hand) for hand in hands]
    assert max(loads) - min(loads) <= max(lengths, default=0) + limit
    assert deal_prompts(prompts, samplers, limit) == hands
