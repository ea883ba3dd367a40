"""Each rule on its own, and which data_source goes to which."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_cli.errors import RewardError
from ppo_cli.rewards.base import CannotScore
from ppo_cli.rewards.rules import RULES, check_sources, find_rule
from tests.rewards.tables import table


def score(rule: str, reply: str, gold: Any = None, extra: Any = None, **settings: Any) -> float:
    result = RULES[rule].score(reply, gold, extra or {}, **settings)
    slow = RULES[rule].in_worker
    if result is None and slow is not None:
        result = slow(reply, gold, extra or {}, **settings)
    assert result is not None
    return float(result["score"])


LENGTHS = [
    ("length", "x" * count, None, score) for count, score in ((2000, 1), (3000, 0.5), (9000, 0))
]
CASES = [*table(__file__, "scores"), *LENGTHS]


def test_scores() -> None:
    wrong = [case for case in CASES if score(*case[:3]) != case[3]]
    assert wrong == []


@pytest.mark.parametrize(
    ("rule", "reply", "extra", "settings", "result"), table(__file__, "limits")
)
def test_patterns_and_limits_come_from_the_row_or_the_setting(
    rule: str, reply: str, extra: Any, settings: Any, result: float
) -> None:
    assert score(rule, reply, extra=extra, **settings) == result


def test_rows_that_cannot_be_scored_say_why() -> None:
    for rule, gold, fragment in table(__file__, "cannot score"):
        with pytest.raises(CannotScore, match=fragment):
            score(rule, "#### 72", gold)


def test_a_pattern_that_is_no_pattern_cannot_score() -> None:
    with pytest.raises(CannotScore, match="not valid"):
        score("format", "42", pattern="(")


@pytest.mark.parametrize(
    "rule", ["gsm8k", "number", "arithmetic", "math", "exact", "contains", "choice"]
)
def test_scoring_rules_read_what_the_rule_format_accepts(rule: str) -> None:
    gold = "C" if rule == "choice" else "42"
    reply = f"<think>I work it out.</think>\n<answer>{gold}</answer>"
    assert (score("format", reply), score(rule, reply, gold)) == (1, 1)


def test_without_an_answer_the_score_is_0_with_the_reason() -> None:
    for rule, reply, gold, reason in table(__file__, "no answer"):
        returned = RULES[rule].score(reply, gold, {})
        assert returned is not None
        assert (returned["score"], returned["extracted"]) == (0.0, None)
        assert returned["reason"].startswith(reason), rule


OWN_TESTS = ("format", "length", "code", "reasoning_gym")


@pytest.mark.parametrize("rule", [r for r in RULES.values() if r.name not in OWN_TESTS])
def test_every_rule_says_what_it_extracted(rule: Any) -> None:
    result = rule.score("#### 1", ["1", "A"][rule.name == "choice"], {})
    assert result is not None
    assert "extracted" in result


def test_routes() -> None:
    for source, rule in table(__file__, "routes"):
        match = find_rule(source)
        assert (match and match.name) == rule, source


@pytest.mark.parametrize(
    ("sources", "fragment"),
    [({"openai/gsm8k", "opnai/gsm8k"}, "'opnai/gsm8k'.* Did you mean 'openai/gsm8k'"),
     ({"openai/gsm8k", "opnai/gsm8k"}, "--reward_function FILE:NAME.*--rule NAME"),
     ({""}, "no data_source"), ({f"own/{n}" for n in range(8)}, "and 3 more")],
)  # fmt: skip
def test_unknown_sources_are_named_with_what_to_do(sources: set[str], fragment: str) -> None:
    with pytest.raises(RewardError, match=fragment):
        check_sources(sources)
