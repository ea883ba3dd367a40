"""The judge's card: the same rows in the summary, in `ppo show` and on the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_cli.cli.screen import format_summary
from ppo_cli.cli.show import format_steps
from ppo_cli.report.judge_card import describe_judges
from ppo_cli.report.metrics import summarise
from ppo_cli.report.page.run_data import RunData
from ppo_cli.run_folder.lines import append_line, read_metrics
from tests.settings import complete

CONFIG = """\
reward:
  api: {model: strong, votes: 2, max_votes: 4}
  parts: ['judge:0.5', 'rule:format:0.5']
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps: verdicts differ by 0.3 and 0.1 of scores that spread by 0.4."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    for step, noise in ((1, 0.3), (2, 0.1)):
        line = {
            "judge/noise": noise, "judge/noise_responses": 8.0, "judge/votes": 1.0 + step,
            "judge/length_correlation": 0.2 * step, "judge/monitor_correlation": 0.8,
            "reward/correlation/judge/format": 0.5, "reward/judge/std": 0.4,
            "judge/label_correlation": 0.3 * step, "reward_mean": 0.5,
        }  # fmt: skip
        append_line(tmp_path / "metrics.jsonl", {"step": step, **line})
    for model, seconds in (("strong", 1.0), ("strong", 3.0), ("cheap", 0.5)):
        call = {"outcome": "ok", "usd": 0.5, "input": 90, "output": 10, "model": model}
        append_line(tmp_path / "judge_calls.jsonl", {**call, "latency_s": seconds})
    lost = {"outcome": "timeout", "usd": 0.1, "input": 40, "output": 0, "model": "cheap"}
    append_line(tmp_path / "judge_calls.jsonl", lost)
    return tmp_path


def test_the_card_has_what_the_run_measured(run: Path) -> None:
    data = RunData(run, "run").read()
    # The noise: sqrt((0.09 + 0.01) / 2); of two votes it is 0.05 / 2 of the variance 0.16.
    assert data["judge"] == (
        ("calls", "4 calls, 1 failed (timeout 1), 0 retries, $1.60"),
        ("noise", "standard deviation 0.22 of repeated verdicts (16 responses), 16% of the "
                  "variance of the scores"),
        ("votes", "2.5 a response"),
        ("length", "correlation 0.30 with the score"),
        ("agreement", "correlation 0.80 with the second judge, 0.50 with the rule format, 0.60 "
                      "with the labelled responses"),
        ("strong", "$0.50 and 100 tokens a verdict, 2 s (95 %: 2.9 s)"),
        ("cheap", "$0.60 and 140 tokens a verdict, 0.5 s (95 %: 0.5 s)"),
    )  # fmt: skip


def test_summary_and_terminal_show_the_same_rows(run: Path) -> None:
    history = read_metrics(run)
    card = RunData(run, "run").read()["judge"]
    shown = format_steps(run, history, history)
    summary = summarise(history, run, complete({}), session=(2, 1.0), resume_command="ppo")
    lines = format_summary(summary)
    assert all(text in shown for _, text in card) and "The judge" in shown
    assert any(line.startswith("judge: calls") and line.endswith("$1.60") for line in lines)


def test_a_run_without_verdicts_has_no_card(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward_mean": 0.5}) + "\n")
    assert describe_judges(tmp_path, complete({}).reward, read_metrics(tmp_path)) == []


def test_a_cascade_says_what_each_judge_was_asked_and_paid(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "reward: {api: {enable: true, model: strong, cascade: {model: small}}}\n"
    )
    for step, escalated in ((1, 0.2), (2, 0.4)):
        line = {
            "judge/escalated": escalated, "judge/cheap_calls": 600.0, "judge/strong_calls": 3.0,
            "judge/cheap_cost_usd": 0.01, "judge/strong_cost_usd": 0.2, "reward_mean": 0.5,
        }  # fmt: skip
        append_line(tmp_path / "metrics.jsonl", {"step": step, **line})
    assert RunData(tmp_path, "run").read()["judge"] == (
        ("cascade", "30% went on to the judge (small 1,200 calls, $0.02; strong 6 calls, $0.40)"),
    )
