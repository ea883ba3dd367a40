"""`ppo reward` with a judge behind a real wire: the same path, the same cache and budget."""

from __future__ import annotations

import pytest

from tests.scoring.commands import KEY, Bench


@pytest.fixture
def flags(bench: Bench) -> list[str]:
    return ["--use_api_reward", *bench.judge()]


def test_scoring_again_costs_nothing(bench: Bench) -> None:
    args = ("score", bench.sums(6), *bench.priced("openai"))
    outcome, rows = bench.reward(*args), bench.scored()
    assert outcome.err == "" and "cost" in outcome.out
    assert [row["score"] for row in rows] == [0.0, 1.0] * 3
    assert rows[1]["parts"] == {"judge": {"raw": 10.0, "scaled": 1.0}}
    assert rows[1]["info"]["judge_tokens"] > 0 and rows[1]["info"]["cost_usd"] > 0
    assert all(row["reason"] for row in rows)
    calls_before = bench.server.count
    summary = bench.reward(*args, "--json").summary
    assert (summary["scored"], summary["cached"]) == (6, 6)
    assert bench.server.count - calls_before <= 1, "only the probe at the start may ask again"
    assert [row["score"] for row in bench.scored()] == [0.0, 1.0] * 3


@pytest.mark.parametrize(("rows", "every", "checks"), [(64, "50", 2), (63, "50", 0), (64, "0", 0)])
def test_many_rows_are_preceded_by_questions_with_known_answers(
    bench: Bench, flags: list[str], rows: int, every: str, checks: int
) -> None:
    outcome = bench.reward("score", bench.sums(rows), *flags, "--rm_canary_every", every)
    assert ("2 questions with a known answer" in "".join(outcome)) is bool(checks)
    assert bench.server.count == 1 + rows + checks


def test_budget_ends_it_resumably(bench: Bench, flags: list[str]) -> None:
    args = ("score", bench.sums(40), *flags, "--rm_concurrency", "2", "--rm_max_tokens", "50")
    err = bench.reward(*args, "--rm_budget_tokens", "9000", code=3).err
    assert "budget" in err and "come from the cache" in err
    failures = [row["failure"] for row in bench.scored() if row["score"] is None]
    assert 0 < len(failures) < 40 and set(failures) == {"not asked"}
    calls_before = bench.server.count
    bench.reward(*args)
    assert [row["score"] for row in bench.scored()] == [0.0, 1.0] * 20
    assert bench.server.count - calls_before <= len(failures) + 1


def test_calls_under_way_at_a_stop_are_in_the_cost(bench: Bench, flags: list[str]) -> None:
    bench.server.fail("hang", said="10 + 1 = ?")
    bench.server.fail("truncated", said="11 + 1 = ?")  # asked again for twice as many tokens
    # An answer is 7 tokens: 418 dollars are enough for the first calls, not for the longer one.
    dollar_a_token = ("--rm_price_input", "0", "--rm_price_output", "1000000")
    limits = ("--rm_max_tokens", "200", "--rm_timeout", "2", "--rm_budget_usd", "418")
    rows = [
        {"prompt": f"{n} + 1 = ?", "ground_truth": "13", "response": "13."} for n in (12, 10, 11)
    ]
    args = ("score", bench.write(*rows), *flags, *dollar_a_token, *limits, "--json")
    outcome = bench.reward(*args, code=3)
    assert outcome.summary["calls"] == bench.server.count
    assert "may cost up to $4e+02" in outcome.err
    assert 200 < outcome.summary["cost_usd"] == outcome.summary["tokens_out"] <= 418


def test_a_wrong_key_is_told_at_once(bench: Bench, flags: list[str]) -> None:
    bench.server.keys = {"another-key-12345"}
    outcome = bench.reward("score", bench.sums(6), *flags, code=2)
    assert outcome.out == "" and "401" in outcome.err and KEY not in outcome.err
    assert not (bench.folder / "a.scored.jsonl").exists()
