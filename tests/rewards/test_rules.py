"""Each rule on its own, and which data_source goes to which."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_cli.errors import RewardError
from ppo_cli.rewards.base import CannotScore
from ppo_cli.rewards.rules import RULES, check_sources, find_rule, get_rule


def score(rule: str, reply: str, gold: Any = None, extra: Any = None, **settings: Any) -> float:
    found = RULES[rule].score(reply, gold, extra or {}, **settings)
    slow = RULES[rule].slow
    if found is None and slow is not None:
        found = slow(reply, gold, extra or {}, **settings)
    assert found is not None
    return float(found["score"])


CASES: list[tuple[str, str, Any, float]] = [
    ("gsm8k", "48 + 24 = 72\n#### 72", "72", 1),
    ("gsm8k", "#### 72.0", "72", 1),
    ("gsm8k", "#### $1,000.", 1000, 1),
    ("gsm8k", "#### 72", "48 + 24 = 72\n#### 72", 1),
    ("gsm8k", "it is 72", "72", 0),
    ("gsm8k", "#### 27", "72", 0),
    ("gsm8k", "", "72", 0),
    ("number", "it is 72", "72", 1),
    ("number", "72 or 73", "72", 0),
    ("number", "it is 72", ["72", "73"], 1),
    ("number", "it is 72.50", "72.5", 1),
    ("arithmetic", "42", "42", 1),
    ("arithmetic", "12 + 30 = 42.", 42, 1),
    ("arithmetic", "42.5", "42", 0),
    ("arithmetic", "4.2", "2", 0),
    ("arithmetic", "142", "42", 0),
    ("arithmetic", "-42", "42", 0),
    ("arithmetic", "-42", "-42", 1),
    ("arithmetic", "<think>41</think>42", "42", 1),
    ("number", "72 or 73", "73", 0),
    ("number", "<think>a</think><answer>x = 72</answer>", "72", 1),
    ("number", "30% of 50 = 15", "15", 1),
    ("number", "So 2x + 4 = 10", "10", 0),
    ("number", "Natalia sold 72 clips altogether in April and May.", "72", 1),
    ("number", "She makes 9 * 2 = $18 every day.", "18", 1),
    ("number", "Let x = 72 and y = 3, then continue", "3", 0),
    ("number", "Suppose the answer is 72.", "72", 0),
    ("number", "答案不是72", "72", 0),
    ("number", "答えは72ではない", "72", 0),
    ("number", "It is 0.00001", 1e-05, 1),
    ("number", "It is 5", 5.0, 1),
    ("number", "The answer is 2,74", "2.74", 1),
    ("gsm8k", "<think>a</think><answer>72</answer>", "72", 1),
    ("number", "The answer is .5.", "0.5", 1),
    ("number", "The answer is .5.", "5", 0),
    ("number", "It is -.5", "-0.5", 1),
    ("number", "Answer: 3 != 5", "5", 0),
    ("number", "Answer: x >= 5", "5", 0),
    ("number", "Answer: 5 hundred", "5", 0),
    ("number", "Answer: 5 hundred", "500", 1),
    ("number", "Answer: 2 hundred fifty", "200", 0),
    ("number", "La réponse est 1 234,5 €", "1234.5", 1),
    ("number", "Die Antwort ist 1.000.000.", "1000000", 1),
    ("number", "Answer: 3 tenths", "3", 0),
    ("number", "Answer: 3 hundredths", "300", 0),
    ("gsm8k", "#### .5", "5", 0),
    ("gsm8k", "#### 72 or 73", "72", 0),
    ("choice", "The answer is (B).", "B", 1),
    ("choice", "The answer is B because A is wrong", "B", 1),
    ("choice", "The answer is B because A is wrong", "A", 0),
    ("choice", "the correct option is (C). (A) ignores friction", "C", 1),
    ("choice", "Option C is right; (A) and (B) forget the sign.", "C", 1),
    ("choice", "\\boxed{\\Delta E}\n\n**Answer: D**", "D", 1),
    ("choice", "\\boxed{\\Delta E}\n\n**Answer: D**", "E", 0),
    ("choice", "<think>A?</think><answer>(C) Paris</answer>", "C", 1),
    ("choice", "答案是B，因为A错了。", "B", 1),
    ("choice", "正解：C", "C", 1),
    ("choice", "B\n\nA is wrong.", "B", 1),
    ("choice", "A or B?", "B", 0),
    ("choice", "The answer is A or B.", "A", 0),
    ("choice", "The answer is not B", "B", 0),
    ("choice", "The wrong answer is B.", "B", 0),
    ("choice", "A) red\nB) blue", "A", 0),
    ("choice", "Answer: A dog", "A", 0),
    ("choice", "Vitamin C", "C", 0),
    ("choice", "At point A the force is F", "F", 0),
    ("choice", "不选C", "C", 0),
    ("choice", "答えはAではありません。", "A", 0),
    ("choice", "答えはAかBです。", "A", 0),
    ("choice", "答えはAです。", "A", 1),
    ("choice", "정답은 A가 아닙니다.", "A", 0),
    ("choice", "Some say the answer is A, but it is D.", "A", 0),
    ("choice", "Students often think the answer is A.", "A", 0),
    ("choice", "I think the answer is A.", "A", 1),
    ("choice", "Bob's answer is A, which is wrong", "A", 0),
    ("choice", "Let's see: the answer is A.", "A", 1),
    ("choice", "Most would choose A", "A", 0),
    ("choice", "Answer: (A)(B)", "A", 0),
    ("choice", "Answer: A (or B)", "A", 0),
    ("choice", "Answer: A as well as B", "A", 0),
    ("choice", "Answer: A ∪ B", "A", 0),
    ("choice", "Ответ: A или B", "A", 0),
    ("choice", "If option A is correct, then", "A", 0),
    ("choice", "Neither option A nor option B is correct", "B", 0),
    ("choice", "\\boxed{A} is wrong.", "A", 0),
    ("choice", "\\boxed{\\text{(C)}\\ \\text{and}\\ \\text{(D)}}", "C", 0),
    ("choice", "\\boxed{\\textbf{(C)}\\ 42}", "C", 1),
    ("choice", "Answer: [[C]]", "C", 1),
    ("choice", "C is correct.", "C", 1),
    ("choice", "【答案】C【解析】A错", "C", 1),
    ("choice", "\\boxed{\\text{Option C}}", "C", 1),
    ("choice", "(b)", "B", 1),
    ("choice", "so C", "C", 1),
    ("choice", "a dog", "A", 0),
    ("exact", " Paris. ", "paris", 1),
    ("exact", "It is Paris", "Paris", 0),
    ("exact", "Ｐaris", ["London", "Paris"], 1),
    ("contains", "It is Paris, I think", "Paris", 1),
    ("contains", "It is London", ["Paris", "London"], 1),
    ("contains", "It is Rome", "Paris", 0),
    ("contains", "It is 12 in all", 12.0, 1),
    ("contains", "It is 12.", 12.0, 1),
    ("contains", "at 12:30", 12.0, 0),
    ("contains", "version 12.1.3", 12.1, 0),
    ("contains", "12.000.000", 12.0, 0),
    ("contains", "12^2", 12.0, 0),
    ("contains", "12**2", 12.0, 0),
    ("contains", "2**12", 12.0, 0),
    ("contains", "It is **12**", 12.0, 1),
    ("contains", "It is 12½", 12.0, 0),
    ("contains", "It is 7,12", 12.0, 0),
    ("contains", "Not London. <answer>Paris</answer>", "London", 0),
    ("exact", "<think>a</think><answer>Paris</answer>", "Paris", 1),
    ("exact", "5", 5.0, 1),
    ("format", "<think>a</think>\n<answer>b</answer>", None, 1),
    ("format", "<think>a</think>b", None, 0),
    ("format", "<think>a<think>b</think></think><answer>c</answer>", None, 0),
    ("length", "x" * 2000, None, 1),
    ("length", "x" * 3000, None, 0.5),
    ("length", "x" * 9000, None, 0),
    ("length", "", None, 0),
    ("repetition", "a b c d e", None, 1),
]


def test_scores() -> None:
    wrong = [case for case in CASES if score(*case[:3]) != case[3]]
    assert wrong == []


def test_the_format_comes_from_the_row_or_the_setting() -> None:
    assert score("format", "42!", extra={"format": r"\d+!"}) == 1
    assert score("format", "42!", pattern=r"\d+") == 0
    assert score("format", "42", pattern=r"\d+") == 1
    assert score("format", "42!", extra={"format": r"\d+!"}, pattern=r"\d+") == 1


def test_the_length_limits_come_from_the_row_or_the_setting() -> None:
    assert score("length", "x" * 30, extra={"max_chars": 20}) == 0.5
    assert score("length", "x" * 5, min_chars=10) == 0.5


def test_rows_that_cannot_be_scored_say_why() -> None:
    for rule, gold, words in (
        ("gsm8k", None, "the row has no ground_truth"),
        ("gsm8k", "  ", "the row has no ground_truth"),
        ("gsm8k", "a lot", "ground_truth 'a lot' is not a number"),
        ("arithmetic", "a lot", "is not a number"),
        ("math", None, "the row has no ground_truth"),
        ("exact", [], "the row has no ground_truth"),
        ("exact", float("nan"), "the row has no ground_truth"),
        ("choice", "Paris", "is not a letter A-J"),
    ):
        with pytest.raises(CannotScore, match=words):
            score(rule, "#### 72", gold)


def test_a_pattern_that_is_no_pattern_cannot_score() -> None:
    with pytest.raises(CannotScore, match="not valid"):
        score("format", "42", pattern="(")


FRAMED = "<think>I work it out.</think>\n<answer>{}</answer>"


def test_scoring_rules_read_what_the_rule_format_accepts() -> None:
    for rule, gold in (
        ("gsm8k", "42"), ("number", "42"), ("arithmetic", "42"), ("math", "42"),
        ("choice", "C"), ("exact", "42"), ("contains", "42"),
    ):  # fmt: skip
        reply = FRAMED.format(gold)
        assert (score("format", reply), score(rule, reply, gold)) == (1, 1), rule


def test_without_an_answer_the_score_is_0_with_the_reason() -> None:
    for rule, reply, gold, reason in (
        ("number", "There are 3 cats and dogs", "3", "no answer: no <answer>"),
        ("number", "The answer is x + 5", "5", "no answer: 'x + 5' is not a number"),
        ("arithmetic", "It is 4.2", "4", "no answer: '4.2' is not an integer"),
        ("math", "<answer>5", "5", "no answer: <answer> is not closed"),
        ("choice", "A or B?", "A", "no answer: no <answer>"),
        ("gsm8k", "It is 72", "72", "no answer: no #### NUMBER"),
    ):
        returned = RULES[rule].score(reply, gold, {})
        assert returned is not None
        assert (returned["score"], returned["extracted"]) == (0.0, None)
        assert returned["reason"].startswith(reason), rule


OWN_TESTS = ("format", "length", "code")


@pytest.mark.parametrize("rule", [r for r in RULES.values() if r.name not in OWN_TESTS])
def test_every_rule_says_what_it_extracted(rule: Any) -> None:
    found = rule.score("#### 1", ["1", "A"][rule.name == "choice"], {})
    assert found is not None
    assert "extracted" in found


def test_routes() -> None:
    for source, rule in (
        ("openai/gsm8k", "gsm8k"),
        ("gsm8k", "gsm8k"),
        ("GSM8K", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("math_dapo", "math"),
        ("aime2024", "math"),
        ("ppo-cli/arithmetic", "arithmetic"),
        ("openai_humaneval", "code"),
        ("openai/openai_humaneval", "code"),
        ("HumanEval", "code"),
        ("mbpp", "code"),
        ("code", "code"),
        ("taco", "code"),
        ("exact", "exact"),
        ("contains", "contains"),
        ("format", "format"),
        ("length", "length"),
        ("", None),
        ("some/gsm8k", None),
        ("helpfulness", None),
    ):
        found = find_rule(source)
        assert (found and found.name) == rule, source


def test_known_sources_pass() -> None:
    check_sources({"openai/gsm8k", "lighteval/MATH"})
    check_sources(set())


def test_an_unknown_source_is_named_with_its_nearest_and_the_mend() -> None:
    with pytest.raises(RewardError) as caught:
        check_sources({"openai/gsm8k", "opnai/gsm8k"})
    text = str(caught.value)
    assert "'opnai/gsm8k'" in text
    assert "Did you mean 'openai/gsm8k'?" in text
    assert "--reward_function FILE:NAME" in text
    assert "--rule NAME" in text


def test_rows_without_a_source_are_told_so() -> None:
    with pytest.raises(RewardError, match="no data_source"):
        check_sources({""})


def test_many_unknown_sources_are_counted() -> None:
    with pytest.raises(RewardError, match="and 3 more"):
        check_sources({f"own/{n}" for n in range(8)})


def test_an_unknown_rule_is_told_with_its_nearest() -> None:
    with pytest.raises(RewardError, match="Did you mean 'gsm8k'"):
        get_rule("gsm8")
