"""The gate: worthless replies are recognised without a judge, short answers are never touched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards.judge.sanitise import no_content_reason
from tests.rewards.judge.corpora import read_corpus

PROMPT = "What is the capital of France, and since when has it been so?"


def test_no_reply_of_the_corpus_is_misjudged() -> None:
    """Signs, lead-ins in many languages, repeated prompts and short answers; null is content."""
    wrong = []
    for row in read_corpus("gate"):
        prompt, response = row.get("prompt", PROMPT), row["response"]
        reason = no_content_reason(prompt, response, row.get("reference"))
        if reason != row["reason"]:
            wrong.append((row, reason))
    assert wrong == []


@given(st.integers() | st.floats(allow_nan=False) | st.characters(categories=["Lu", "Ll", "Nd"]))
def test_numbers_and_letters_are_answers(answer: object) -> None:
    assert no_content_reason(PROMPT, str(answer)) is None


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_text_raises_and_blanks_around_it_change_nothing(prompt: str, response: str) -> None:
    reason = no_content_reason(prompt, response)
    assert reason == no_content_reason(prompt, f"\n {response}\t")
    assert reason != "empty response" or not any(c.isalnum() for c in response)
    excused = no_content_reason(prompt, response, ground_truth=f"{response}")
    assert excused in (None, "empty response")
