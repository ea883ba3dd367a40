"""Thoughts of every known family are taken out, of judges' replies and of policies' responses."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.thoughts import UnfinishedThought, strip_leading_thought, strip_reasoning
from tests.rewards.tables import table

# Opening and closing mark as models write them.
MARKED = table(__file__, "marks")


def test_each_family_is_known_to_both() -> None:
    wrong = []
    for opening, closing in MARKED:
        text = f"{opening}maybe Score: 3{closing}Score: 8"
        if (strip_leading_thought(text), strip_reasoning(text)[-8:]) != ("Score: 8", "Score: 8"):
            wrong.append(text)
        if "maybe" in strip_reasoning(text):
            wrong.append(text)
        with contextlib.suppress(UnfinishedThought):
            wrong.append(f"{opening}: {strip_leading_thought(f'{opening}maybe Score: 3')}")
        if strip_reasoning(f"{opening}maybe 3"):
            wrong.append(f"{opening} in a response")
    assert wrong == []


@pytest.mark.parametrize(("text", "answer"), table(__file__, "leading"))
def test_only_one_thought_at_the_front_of_a_reply_goes(text: str, answer: str) -> None:
    assert strip_leading_thought(text) == answer


@pytest.mark.parametrize(
    "text", ["<think>a</thinking>8", "thought\nmaybe 8", "<think>", "\n[THINK]8"]
)
def test_an_unfinished_thought_is_no_reply(text: str) -> None:
    with pytest.raises(UnfinishedThought):
        strip_leading_thought(text)


@pytest.mark.parametrize(("text", "answer"), table(__file__, "anywhere"))
def test_reasoning_is_stripped_from_a_response(text: str, answer: str) -> None:
    assert strip_reasoning(text) == answer


@given(st.text(alphabet="ab \n", max_size=20), st.text(alphabet="ab .", min_size=1, max_size=20))
def test_the_answer_is_left_of_any_thought(thought: str, answer: str) -> None:
    for name in ("think", "thinking", "reasoning"):
        assert strip_reasoning(f"<{name}>{thought}</{name}>{answer}") == answer.strip()
        assert strip_reasoning(f"{thought}</{name}>{answer}") == answer.strip()


@pytest.mark.parametrize("unit", ["<think>", "</think>", "<|", "<|channel|>analysis", "[", "\n "])
def test_no_input_is_slow(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    began = time.process_time()
    strip_reasoning(text)
    with contextlib.suppress(UnfinishedThought):
        strip_leading_thought(text)
    assert time.process_time() - began < 20.0
