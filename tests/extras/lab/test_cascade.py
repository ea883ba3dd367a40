"""A cascade of two judges of known error: what it keeps of the better one, and what it saves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.judge_server import JudgeServer
from tests.judge_server.wire import fenced
from tests.scoring.commands import Bench, read
from tests.scoring.scripted import write_rows

pytestmark = pytest.mark.usefixtures("few_resamples")
SMALL_ERROR, STRONG_ERROR = 0.7, 0.03


def is_good(user: str) -> bool:
    return "a good answer" in (fenced("response", user) or "")


def dice(user: str, seed: int) -> random.Random:
    """Dice that fall the same for the same response."""
    return random.Random(f"{seed} {fenced('response', user)}")


def small(system: str, user: str) -> int:
    """Give 8 or 3, more or less: wrong about one response in 13, mostly in the middle."""
    quality = (1 if is_good(user) else -1) + dice(user, 1).gauss(0, SMALL_ERROR)
    return min(10, max(1, round(5.5 + 2.5 * quality)))


def strong(system: str, user: str) -> int:
    """Give 10 or 1, and the wrong one of them for a share of the responses."""
    return 10 if is_good(user) != (dice(user, 2).random() < STRONG_ERROR) else 1


@pytest.fixture
def cheap() -> Iterator[JudgeServer]:
    with JudgeServer(small) as running:
        yield running


@pytest.fixture
def flags(bench: Bench, cheap: JudgeServer) -> list[str]:
    """The flags of the cascade, without those that say when the cheaper judge is unsure."""
    bench.server.score = strong
    judges = f"{{small: {{model: s, base_url: {cheap.url('openai')}, price_input: 1, "
    return [
        "--use_api_reward", *bench.judge(), "--rm_price_input", "20", "--rm_price_output", "40",
        "--rm_cascade", "small", f"reward.api.judges={judges}price_output: 2}}}}",
        "--rm_max_tokens", "60",
    ]  # fmt: skip


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {n}?", "response": f"{'a good' if n % 2 else 'a bad'} answer, {n}",
         "good": n % 2, "ground_truth": "?"}
        for n in range(first, first + count)
    ]  # fmt: skip


def accuracy(scores: Sequence[float | None], labels: Sequence[int]) -> float:
    right = [(score or 0) >= 0.5 for score in scores]
    return sum(a == bool(b) for a, b in zip(right, labels, strict=True)) / len(labels)


@pytest.mark.slow
def test_a_chosen_band_keeps_the_agreement_at_a_third_of_the_calls(
    bench: Bench, cheap: JudgeServer, flags: list[str]
) -> None:
    labelled, fresh = rows(300), rows(300, first=1000)
    file = str(write_rows(bench.folder / "labelled.jsonl", *labelled))
    command = ("calibrate", file, "--labels", "good", "--repeat", "0", *flags)
    facts = bench.reward(*command, "--json").summary["cascade"]["judge"]
    kept, sent = (list(facts["figures"].values())[n] for n in (3, 4))
    assert facts["rows"] == 300 and facts["measured_on"] == 150
    assert kept["low"] < kept["value"] < kept["high"] and kept["value"] >= 0.95
    # The chosen flags, on rows that had no part in the choice, and within a budget.
    asked, calls = cheap.count, bench.server.count
    chosen = facts["flags"].split()
    args = (str(write_rows(bench.folder / "fresh.jsonl", *fresh)), *flags, *chosen)
    summary = bench.reward("score", *args, "--rm_budget_usd", "5", "--json").summary
    labels = [row["good"] for row in fresh]
    cascade = accuracy([row["score"] for row in read(bench.folder / "fresh.scored.jsonl")], labels)
    fully = [strong("", _request(row["response"])) / 10 for row in fresh]
    share = (bench.server.count - calls) / len(fresh)
    assert cascade >= 0.95 * accuracy(fully, labels) and share <= 0.3
    assert 300 <= cheap.count - asked <= 304 and summary["cost_usd"] <= 5
    assert sent["value"] == pytest.approx(share, abs=0.1)
    # The report names the flags and what they save.
    out = bench.reward(*command).out
    assert facts["flags"] in out and "that the rule was not chosen on" in out


def _request(response: str) -> str:
    return f"<response-0a>\n{response}\n</response-0a>"


def test_without_labels_the_judge_takes_their_place(bench: Bench, flags: list[str]) -> None:
    unlabelled = [{k: v for k, v in row.items() if k != "good"} for row in rows(60)]
    file = str(write_rows(bench.folder / "rows.jsonl", *unlabelled))
    summary = bench.reward("calibrate", file, *flags, "--json").summary
    figures = summary["cascade"]["judge"]["figures"]
    assert figures["a-judge alone"]["value"] == 1.0 and figures["the cascade"]["value"] >= 0.9
    ranks = summary["cascade"]["judge"]["ranks"]
    assert ranks["a-judge alone"] == {"Kendall's tau-b": 1.0, "pairs in order": 1.0}
    assert ranks["the cascade"]["pairs in order"] <= 1.0
    assert summary["cascade"]["judge"]["cost"]["cascade_usd"] > 0
    out = bench.reward("calibrate", file, *flags).out
    assert "instead of" not in out and "Set --rm_cascade_band" in out, "all from the cache"


def test_few_rows_choose_nothing(bench: Bench, flags: list[str]) -> None:
    file = str(write_rows(bench.folder / "few.jsonl", *rows(12)))
    facts = bench.reward("calibrate", file, "--labels", "good", *flags, "--json").summary["cascade"]
    assert facts["judge"]["why"] == "12 rows that both judges have scored; 20 are needed"


@pytest.mark.slow
def test_votes_are_told_apart_by_their_spread(
    bench: Bench, cheap: JudgeServer, flags: list[str]
) -> None:
    votes: dict[str, int] = {}

    def torn(system: str, user: str) -> int:
        """Agree with itself, but for one response in five, of which every other vote is wrong."""
        text = fenced("response", user) or ""
        votes[text] = votes.get(text, 0) + 1
        right = not (dice(user, 3).random() < 0.2 and votes[text] % 2)
        return 9 if is_good(user) == right else 2

    cheap.score = torn
    flags = [flag.replace("model: s,", "model: s, votes: 3,") for flag in flags]
    file = str(write_rows(bench.folder / "votes.jsonl", *rows(60)))
    facts = bench.reward("calibrate", file, "--labels", "good", *flags, "--json").summary["cascade"]
    assert facts["judge"]["flags"].startswith("--rm_cascade_spread 0.3")
    figures = facts["judge"]["figures"]
    assert 0.1 < figures["responses sent to a-judge"]["value"] < 0.3
