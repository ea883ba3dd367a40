"""Thoughts of every known family are taken out, of judges' replies and of policies' responses."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.thoughts import UnfinishedThought, strip_leading_thought, strip_reasoning

# Opening and closing mark as models write them.
MARKED = [
    ("<think>\n", "\n</think>\n\n"),
    ("<THINK>", "</Think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
    ("<unused94>thought\n", "<unused95>"),
    ("<|channel|>analysis<|message|>",
     "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|start|>assistant<|channel|>analysis<|message|>",
     "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
    ("analysisWe look.", "assistantfinal"),
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  8\n", "8"),
        ("</think>\n8", "8"),
        ("<|channel|>final<|message|>8", "8"),
        ("It is fine.\n</think>\n\n8", "8"),
        ('It says "</think>\n8', 'It says "</think>\n8'),
        ("It is fine.\n[/THINK]\n8", "It is fine.\n[/THINK]\n8"),
        ("<think>a</think><think>b</think>8", "<think>b</think>8"),
        ("<think>a</reasoning></think>8", "8"),
        ('{"reason": "<think> is open", "score": 4}', '{"reason": "<think> is open", "score": 4}'),
        ("Analysis: good\n8", "Analysis: good\n8"),
        ("<cot>a</cot>8", "<cot>a</cot>8"),
    ],
)
def test_only_one_thought_at_the_front_of_a_reply_goes(text: str, answer: str) -> None:
    assert strip_leading_thought(text) == answer


@pytest.mark.parametrize(
    "text", ["<think>a</thinking>8", "thought\nmaybe 8", "<think>", "\n[THINK]8"]
)
def test_an_unfinished_thought_is_no_reply(text: str) -> None:
    with pytest.raises(UnfinishedThought):
        strip_leading_thought(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4", "4"),
        ("  keeps its spaces \n", "  keeps its spaces \n"),
        ("<think>\na\n</think>\n\n4\n", "4"),
        ("one <think>x</think> two <think>y</think> three", "one  two  three"),
        ("a lot of thought</think>4", "4"),
        ("a</think>b</think>4", "4"),
        ("<think>a</think>b</think>4", "4"),
        ("<think>I write <think> in here</think>4", "4"),
        ("<think><reasoning>a</reasoning> b</think>4", "4"),
        ("<think>never closed, the answer is 4", ""),
        ("\n <think>never closed", ""),
        ("<think>a</think><think>never closed", ""),
        ("<think>a</reasoning> 4", ""),
        ("The tag <think> opens a block", "The tag <think> opens a block"),
        ("<think></think>", ""),
        ("thinking about it: 4", "thinking about it: 4"),
        ("<think >4", "<think >4"),
    ],
)
def test_reasoning_is_stripped_from_a_response(text: str, answer: str) -> None:
    assert strip_reasoning(text) == answer


@given(st.text(alphabet="ab \n", max_size=20), st.text(alphabet="ab .", min_size=1, max_size=20))
def test_whatever_is_thought_the_answer_is_left(thought: str, answer: str) -> None:
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
