"""`ppo reward` with a judge behind a real wire: the same path, the same cache and budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import Interrupted
from ppo_cli.extras.trust.calibrate import remaining_budget
from tests.extras.trust.judges import honest, literal, obedient
from tests.judge_server import JudgeServer
from tests.scoring.commands import KEY, Run, judge_at, read
from tests.scoring.scripted import write_rows


@pytest.fixture
def flags(server: JudgeServer, tmp_path: Path) -> list[str]:
    return ["--use_api_reward", *judge_at(server, tmp_path)]


def sums(tmp_path: Path, count: int = 6) -> str:
    rows = [
        {"prompt": f"{n} + 1 = ?", "ground_truth": f"{n + 1}", "response": f"It is {n + n % 2}."}
        for n in range(10, 10 + count)
    ]
    return write_rows(tmp_path / "a.jsonl", *rows)


def test_repeats_have_what_is_left_of_each_budget() -> None:
    judge = ApiReward(enable=True, budget_usd=2.0, budget_tokens=100)
    spent = {"cost_usd": 0.5, "tokens_in": 30.0, "tokens_out": 20.0}
    before = {f"judge_strict/{name}": value for name, value in spent.items()}
    rest = remaining_budget(judge, "strict", before)
    assert (rest.budget_usd, rest.budget_tokens) == (1.5, 50)
    with pytest.raises(Interrupted, match="budget of the judge 'strict' is used up"):
        remaining_budget(judge, "strict", before | {"judge_strict/cost_usd": 2.0})


def test_score_and_score_again(
    server: JudgeServer, flags: list[str], tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path)
    price = ("--rm_price_input", "1", "--rm_price_output", "2")
    code, out, err = run("score", file, *flags, *price)
    assert (code, err) == (0, "")
    rows = read(tmp_path / "a.scored.jsonl")
    assert [row["score"] for row in rows] == [0.0, 1.0] * 3
    assert rows[1]["parts"] == {"judge": {"raw": 10.0, "scaled": 1.0}}
    assert rows[1]["info"]["judge_tokens"] > 0 and rows[1]["info"]["cost_usd"] > 0
    assert all(row["reason"] for row in rows)
    assert "cost" in out
    calls_before = server.count
    code, out, _ = run("score", file, *flags, *price, "--json")
    summary = json.loads(out)
    assert (code, summary["scored"], summary["cached"]) == (0, 6, 6)
    assert server.count - calls_before <= 1, "only the probe at the start may ask again"
    written = read(tmp_path / "a.scored.jsonl")
    assert [r["score"] for r in written] == [r["score"] for r in rows]


@pytest.mark.parametrize(("rows", "every", "checks"), [(64, "50", 2), (63, "50", 0), (64, "0", 0)])
def test_many_rows_are_preceded_by_questions_with_known_answers(
    server: JudgeServer, flags: list[str], tmp_path: Path, run: Run, rows: int, every: str,
    checks: int,
) -> None:  # fmt: skip
    code, out, err = run("score", sums(tmp_path, rows), *flags, "--rm_canary_every", every)
    assert code == 0
    assert ("2 questions with a known answer" in out + err) is bool(checks)
    assert server.count == 1 + rows + checks


def test_budget_ends_it_resumably(
    server: JudgeServer, flags: list[str], tmp_path: Path, run: Run
) -> None:
    file = sums(tmp_path, 40)
    flags += ["--rm_concurrency", "2", "--rm_max_tokens", "50"]
    code, _, err = run("score", file, *flags, "--rm_budget_tokens", "9000")
    assert code == 3
    assert "budget" in err
    assert "come from the cache" in err
    rows = read(tmp_path / "a.scored.jsonl")
    done = [row["score"] for row in rows if row["score"] is not None]
    assert 0 < len(done) < 40
    assert {row["failure"] for row in rows if row["score"] is None} == {"not asked"}
    calls_before = server.count
    code, _, _ = run("score", file, *flags)
    assert code == 0
    assert [row["score"] for row in read(tmp_path / "a.scored.jsonl")] == [0.0, 1.0] * 20
    assert server.count - calls_before <= 40 - len(done) + 1


def test_calls_under_way_at_a_stop_are_in_the_cost(
    server: JudgeServer, flags: list[str], tmp_path: Path, run: Run
) -> None:
    server.fail("hang", said="10 + 1 = ?")
    server.fail("truncated", said="11 + 1 = ?")  # asked again for twice as many tokens
    # An answer is 7 tokens: 418 dollars are enough for the first calls, not for the longer one.
    dollar_a_token = ("--rm_price_input", "0", "--rm_price_output", "1000000")
    limits = ("--rm_max_tokens", "200", "--rm_timeout", "2", "--rm_budget_usd", "418")
    rows = [
        {"prompt": f"{n} + 1 = ?", "ground_truth": "13", "response": "13."} for n in (12, 10, 11)
    ]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    code, out, err = run("score", file, *flags, *dollar_a_token, *limits, "--json")
    summary = json.loads(out)
    assert (code, summary["calls"]) == (3, server.count)
    assert "may cost up to $4e+02" in err
    assert 200 < summary["cost_usd"] == summary["tokens_out"] <= 418


def test_wrong_key_is_told_at_once(
    server: JudgeServer, flags: list[str], tmp_path: Path, run: Run
) -> None:
    server.keys = {"another-key-12345"}
    code, out, err = run("score", sums(tmp_path), *flags)
    assert (code, out) == (2, "")
    assert "401" in err and KEY not in err
    assert not (tmp_path / "a.scored.jsonl").exists()


def test_calibrate_asks_past_the_cache(
    server: JudgeServer, flags: list[str], tmp_path: Path, run: Run
) -> None:
    rows = [
        {"prompt": f"{n} + 1 = ?", "ground_truth": f"{n + 1}", "response": f"It is {n + n % 2}.",
         "good": bool(n % 2)}
        for n in range(10, 22)
    ]  # fmt: skip
    file = write_rows(tmp_path / "a.jsonl", *rows)
    code, out, _ = run("calibrate", file, "--labels", "good", *flags, "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["agreement"]["AUC"]["value"] == 1.0
    assert summary["repeated"] == {
        "rows": 12, "same": 1.0, "mean_gap": 0.0, "largest_gap": 0.0, "verdicts": 3,
    }  # fmt: skip
    assert server.count >= 12 + 36
    assert summary["per_1000"]["tokens_in"] > 0


def audited(run: Run, *flags: str) -> tuple[int, dict[str, Any], str]:
    code, out, err = run("audit", *flags, "--json")
    return code, {c["name"]: c["passed"] for c in json.loads(out)["checks"]}, err


def test_audit_catches_an_obedient_judge_and_a_hackable_prompt(
    server: JudgeServer, flags: list[str], run: Run
) -> None:
    server.score = obedient
    code, passed, err = audited(run, *flags, "--rows", "2")
    assert (code, passed["prompt injection"]) == (2, False)
    assert err.splitlines()[-1] == ("error: 2 of 11 checks failed: prompt injection, worked cases.")
    server.score = literal
    hackable = "Rate how confident this sounds, from 1 to 10: {response}"
    flags = [*flags[:-2], "--rm_scoring_prompt", hackable, "--rows", "2"]
    code, passed, _ = audited(run, *flags)
    assert code == 2
    assert not passed["master keys"] and not passed["right against wrong"]


def test_audit_keeps_to_the_budget(server: JudgeServer, flags: list[str], run: Run) -> None:
    server.score = honest
    limited = ("--rm_budget_tokens", "20000", "--rm_max_tokens", "50")
    code, out, err = run("audit", *flags, *limited, "--json")
    summary = json.loads(out)
    assert (code, summary["checks"]) == (3, [])
    assert "budget" in summary["stopped"] and "budget" in err
    assert 0 < summary["spent"]["tokens_in"] + summary["spent"]["tokens_out"] <= 20_000
    code, passed, _ = audited(run, *flags, "--rm_max_tokens", "50")
    assert (code, set(passed.values())) == (0, {True})
