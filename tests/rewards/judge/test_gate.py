"""The gate: worthless replies are seen without a judge, short answers are never touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards.judge.sanitise import no_content_reason

PROMPT = "What is the capital of France, and since when has it been so?"


SIGNS = [
    "", " ", "\n\n\t", "\u200b", "\u200b\u2060\ufeff", "\x00", ".", ":", ",", ";", "...", "…",
    "—", "-", "?", "!!!", "。", "：", "、", "* * *", "---", "====", "+++", "$$", "━━━━",
    "%", "[]", "{}", "()", '""', "''", "*", "&", "#", "\\", "....",
    "■■■■", "\ufffd", "####", "```", "```\n```", "```python\n\n```", "\\boxed{}",
    "$\\boxed{}$", "\\boxed{ }.", "<answer></answer>", "{", "()(", "| | |", "_",
]  # fmt: skip


def test_nothing_but_signs() -> None:
    assert [text for text in SIGNS if not no_content_reason(PROMPT, text)] == []


def test_what_shows_nothing_is_empty() -> None:
    shown = [
        "\u2800", "\u3164", "\uffa0", "\u00a0", "\u2003\u3000", "\u2800\n\u2800", "\u115f\u1160",
        "\u0301", "\u0301\u20e3", "\ufffc", "\U000e0041\U000e0042", "\u2065", "\ue000",
        "\u2800\u0301", "\u2800.\u2800", "```\n\u2800\n```", "\\boxed{\u2800}", "\u180e\u200b",
        "\u2800Solution:\u2800", "\U0001d159", "\U00013441", "\U00016fe4", "\u061c\u00ad",
    ]  # fmt: skip
    assert [text for text in shown if not no_content_reason(PROMPT, text)] == []
    assert no_content_reason(PROMPT, "\u2800\u3164") == "empty response"
    assert no_content_reason(PROMPT, "\u28004\u2800") is None
    assert no_content_reason(PROMPT, "\u280b") is None  # braille with dots


LEAD_INS = [
    "Solution", "Solution:", "**Solution:**", "## Solution", "solution :", "SOLUTION:",
    "Thought process:", "Thought process", "My thought process:", "Answer:", "**Answer**:",
    "**Answer:**", "The answer is", "The answer is:", "The final answer is: $\\boxed{}$",
    "Final answer:", "Let's solve this problem step by step.",
    "Let’s solve this step by step.", "Let's think step by step",
    "Okay, let's think step by step.", "Let me think step by step:",
    "Let's break this problem down step by step.", "Let us solve this problem.",
    "Let's break down the problem into smaller parts.", "I will solve this problem.",
    "Sure! Let's solve the problem step by step.", "Step by step solution:", "Step 1:",
    "Here is the solution:", "Here's my answer:", "To solve this problem,", "Explanation:",
    "Reasoning:", "Analysis:", "Proof:", "Solution:\n\nAnswer:", "Thought process:\n\n---\n",
    "Let's solve this problem step by step. Solution:", "# Solution\n\n## Final Answer\n",
    "解", "解：", "解:", "解答：", "答案：", "答：", "解题过程：", "思考过程：",
    "让我们一步一步思考。", "让我们一步一步地解决这个问题。", "かいせつ", "解説：", "答え：",
    "풀이:", "정답:", "Respuesta", "Respuesta:", "Proceso de pensamiento:",
    "Let me think about this carefully.", "Here's a step-by-step solution:",
    "Here is the step by step solution to the problem:", "让我们一步一步地思考。",
    "To solve this problem, we need to think step by step.", "我们来逐步分析这个问题：",
    "We will solve this problem step by step as follows:", "Let me work through it carefully.",
    "Resolvamos este problema paso a paso.", "Réponse :",
    "Résolvons ce problème étape par étape.", "Lösung:", "Antwort:", "Gedankengang:",
    "Lösen wir dieses Problem Schritt für Schritt.", "Soluzione:", "Risposta:", "Resposta:",
    "Решение:", "Ответ:", "الحل:", "समाधान:", "Lời giải:",
]  # fmt: skip


def test_lead_ins_in_many_languages() -> None:
    reasons = {
        text: no_content_reason(PROMPT, text)
        for lead_in in LEAD_INS
        for text in (lead_in, f"\n{lead_in}  \n\n")
    }
    assert reasons == dict.fromkeys(reasons, "a lead-in without an answer")


ANSWERS = [
    "4", "-3", "+5", "0", "0.5", "42.", "1/2", "1,000", "50%", "$5", "€", "B", "(B)", "[C]",
    "A:", "B.", "a", "Q", "yes", "No", "no.", "Yes!", "x", "x = 3", "π", "∅", "∞", "½", "√2",
    "≥", "→", "三", "是", "はい", "네", "да", "نعم", "हाँ",
    "+", "=", "<", "&&", "👍", "👍👍👍", "😀", "♥", "Ok", "Hi!", "Paris",
    "paris.", "None", "null", "True", "...4", "- 4", "**4**", "`4`", "\\boxed{4}",
    "$\\boxed{\\emptyset}$", "#### 42", "Solution: 4", "The answer is 4", "The answer is B.",
    "Answer: (A)", "解：4", "答案：是", "Answer:\n4",
    "Let's solve this problem step by step. 2 + 2 = 4.", "Thought process: easy. So 4.",
    "Result", "answer", "Proof", "Reply", "output.", "First", "Step 1", "Explanation",
    "Let's think about it.", "Let me think.", "Here is the house.", "我们来分析",
    "我们吃饭吧。",
    "Let's go to the park.", "Let us see a movie together tonight",
    "I will look for a new home.", "Sure", "Thanks!", "I don't know.", "print()",
    "def f(): pass", "x -> y", "a|b", "¬p", "∧", "```python\nprint(4)\n```", "No solution",
    "The solution is x=2", "Solution A", "!=", "^", "~x",
]  # fmt: skip


def test_short_answers_are_never_touched() -> None:
    assert [text for text in ANSWERS if no_content_reason(PROMPT, text)] == []


@given(st.integers() | st.floats(allow_nan=False) | st.characters(categories=["Lu", "Ll", "Nd"]))
def test_numbers_and_letters_are_answers(answer: object) -> None:
    assert no_content_reason(PROMPT, str(answer)) is None


@pytest.mark.parametrize(
    ("prompt", "response", "reference"),
    [
        ("What is a homogeneous mixture called?", "Solution", "solution"),
        ("Which sign ends a sentence?", ".", "."),
        ("Say it: how are you today, my friend?", "Say it: how are you today, my friend?",
         "Say it: how are you today, my friend?"),
    ],
)  # fmt: skip
def test_what_equals_the_reference_is_content(prompt: str, response: str, reference: str) -> None:
    assert no_content_reason(prompt, response) is not None
    assert no_content_reason(prompt, response, reference) is None


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("What is 92 + 72?", "What is 92 + 72?"), ("Add 95 and 50.", "add 95 and 50"),
        ("What is 3+4?", "what is 3 + 4"), ("What is 3+4?", "Q: What is 3+4?"),
        ("What is 3+4?", "**Question:** What is 3+4?"), ("2 + 2 = ?", "2 + 2"),
        ("法国的首都是哪里？请你用中文回答我", "法国的首都是哪里？请你用中文回答我"),
        ("How are you?", "How are you?"), ("Name a colour", "Name a colour!"),
    ],
)  # fmt: skip
def test_a_short_prompt_repeated(prompt: str, response: str) -> None:
    assert no_content_reason(prompt, response) == "only the prompt repeated"
    assert no_content_reason(prompt, response, "something else") == "only the prompt repeated"
    assert no_content_reason(prompt, response, response.upper() + " ") is None


@pytest.mark.parametrize(
    ("sign", "reference"),
    [("%", "%"), ("[]", "[]"), ("{}", " {} "), ("...", "..."), ("[]", []), ("{}", {})],
)
def test_bare_punctuation_counts_only_where_it_is_the_reference(sign: str, reference: Any) -> None:
    assert no_content_reason(PROMPT, sign) is not None
    assert no_content_reason(PROMPT, sign, "?") is not None
    assert no_content_reason(PROMPT, sign, reference) is None


def test_an_empty_reference_excuses_nothing() -> None:
    assert no_content_reason(PROMPT, "", "") == "empty response"
    assert no_content_reason(PROMPT, ":", 42) is not None


def test_a_lone_sign_that_the_prompt_offers_is_an_answer() -> None:
    assert no_content_reason("Which sign is right: + or -?", "-") is None
    assert no_content_reason("Which of '!', '?' ends a question?", "?") is None
    assert no_content_reason("What is two minus one?", "-") is not None


REPEATED = [
    PROMPT, PROMPT.upper(), PROMPT.rstrip("?"), f"{PROMPT}\n{PROMPT}", f"  {PROMPT} ",
    f"Question: {PROMPT}", f"**{PROMPT}**", f"> {PROMPT}", PROMPT.replace(",", ""),
    PROMPT.replace(", and", ""), f"{PROMPT} {PROMPT} {PROMPT}", PROMPT.replace(" ", "  "),
]  # fmt: skip


def test_the_prompt_repeated() -> None:
    reasons = {text: no_content_reason(PROMPT, text) for text in REPEATED}
    assert reasons == dict.fromkeys(REPEATED, "only the prompt repeated")


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        (PROMPT, f"{PROMPT} Paris."),
        (PROMPT, "The capital of France is Paris, and it has been so since 508."),
        (PROMPT, PROMPT.replace("France", "Spain")),
        ("Hello", "Hello"),
        ("hello!", "Hello."),
        ("What is 5 - 3?", "What is 5 + 3?"),
        ("3+4?", "7"),
        ("Is 2 < 3?", "Is 2 > 3?"),
        ("Repeat after me: the cat sat on the mat today", "the cat sat on the mat today"),
        (
            "Copy this text: " + "one two three four five six seven eight nine ten " * 5,
            "one two three four five six seven eight nine ten " * 5,
        ),
        ("Mend: teh cat sat on the mat and slept", "Mend: the cat sat on the mat and slept"),
        (
            "The capital of France is ____ and it lies on the river Seine in the north",
            "The capital of France is Paris and it lies on the river Seine in the north",
        ),
        ("def add(a, b):\n    # to be filled in", "def add(a, b):\n    return a + b"),
        ("法国的首都是哪里？请用中文回答", "法国的首都是巴黎"),
    ],
)
def test_answers_that_hold_the_prompt_or_resemble_it(prompt: str, response: str) -> None:
    assert no_content_reason(prompt, response) is None


@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_is_taken(prompt: str, response: str) -> None:
    """And no blanks around it change what is said of it."""
    reason = no_content_reason(prompt, response)
    assert reason == no_content_reason(prompt, f"\n {response}\t")
    assert reason != "empty response" or not any(c.isalnum() for c in response)
    excused = no_content_reason(prompt, response, ground_truth=f"{response}")
    assert excused in (None, "empty response")
