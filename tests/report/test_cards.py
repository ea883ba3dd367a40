"""The summary, the page and the cards: their sentences are compared with the numbers in the files.

As in test_statements.py, the rules say what the words mean, not how the sentence is made.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_cli.cli.screen import format_summary
from ppo_cli.report.critic import pool_steps
from ppo_cli.report.metrics import DOUBTFUL, summarise
from ppo_cli.report.page.run_data import answer_questions, describe_verdict
from ppo_cli.report.validation import compare_validations, count_scores, list_validations
from ppo_cli.run_folder.lines import replace_lines, rollout_file
from tests.settings import complete

N = r"(-?[\d,]+(?:\.\d+)?(?:e[-+]?\d+)?)"
CONFIGS = [
    complete({}),
    complete({"reward": {"parts": ["judge:0.5", "rule:format:0.5"],
                         "api": {"model": "m", "votes": 2}}}),
    complete({"data": {"val_files": ["embedded"]}}),
]  # fmt: skip
VALUES = st.sampled_from([0.0, 0.25, 0.2500001, 0.5, 1.0])
SAVED = st.lists(st.integers(1, 12), max_size=3, unique=True).map(sorted)
CALLS = st.lists(
    st.sampled_from(["ok", "ok", "timeout", "http_500", "truncated", "ambiguous", "in_flight"]),
    max_size=9,
)


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A run with validations every few steps, some metrics of judges, parts and episodes."""
    every, is_accuracy = draw(st.sampled_from([1, 4, 50])), draw(st.booleans())
    start, slope = draw(VALUES), draw(st.sampled_from([-0.02, 0.0, 1e-7, 0.05]))
    optional = {
        "judge/noise": 0.2, "judge/noise_responses": 8.0, "judge/votes": 2.0, "judge/cached": 3.0,
        "judge/place_noise": 0.1, "judge/place_repeats": 0.8, "judge/place_pieces": 30.0,
        "judge/place_followed": 0.5, "judge/monitor_correlation": -0.3, "score/failed": 1.0,
        "environment/turns_mean": 2.5, "environment/tool_error_share": 0.25,
        "environment/cut_turns_share": 0.5, "explained_variance": -177.75,
        "reward/judge": 0.4, "reward/judge/std": 0.1, "reward/format": 0.1, "score/std": 0.2,
    }  # fmt: skip
    measured = draw(st.sets(st.sampled_from(sorted(optional))))
    lines: list[dict[str, Any]] = []
    for step in range(draw(st.integers(1, 12)) + 1):
        line: dict[str, Any] = {"step": step}
        if step:
            line["reward_mean"] = start + slope * step
            line |= {key: optional[key] for key in measured}
        if step % every == 0:
            line["val/reward_mean"] = draw(VALUES)
            line |= {"val/accuracy": line["val/reward_mean"]} if is_accuracy else {}
        lines.append(line)
    return lines


def write_run(run: Path, history: list[dict[str, Any]], calls: list[str], prompts: int) -> None:
    """Write the paid calls, and the responses of each validation with the mean of its line."""
    for line in history:
        if prompts and (mean := line.get("val/reward_mean")) is not None:
            rows = [{"uid": str(i), "score": mean} for i in range(prompts)]
            replace_lines(rollout_file(run, line["step"], "val"), rows)
    paid = [{"id": i, "outcome": name, "usd": 0.01, "model": "m"} for i, name in enumerate(calls)]
    replace_lines(run / "judge_calls.jsonl", paid)


def check_totals(text: str, calls: list[str], history: list[dict[str, Any]]) -> None:
    """The clauses on paid calls add up to what the files have."""
    groups = {"in flight": {"in_flight"}, "failed": {"timeout", "http_500"},
              "not read": {"truncated", "ambiguous"}}  # fmt: skip
    counts = Counter(calls)
    for clause, names in groups.items():
        match = re.search(rf"{N} {clause}(?: \(([^)]*)\))?", text)
        expected = sum(counts[name] for name in names)
        assert (int(match[1]) if match else 0) == expected, text
        if match and clause != "in flight":
            causes = {c.split()[0]: int(c.split()[1]) for c in match[2].split(", ")}
            assert causes == {name: counts[name] for name in names if counts[name]}, text
    reused = sum(line.get("judge/cached", 0) for line in history)
    assert text.startswith(f"{len(calls)} call")
    assert abs(float(text.rpartition("$")[2]) - 0.01 * len(calls)) < 0.006, text
    assert (f"{reused:.0f} verdicts reused" in text) == bool(reused), text


def check_measures(lines: list[str], verdict: str, has_validation: bool) -> None:
    """What is said to have declined or improved did so in the printed numbers."""
    for line in lines:
        if match := re.search(rf"{N} -> {N} \(declined\)", line):
            assert float(match[1]) > float(match[2]), line
    name = "validation" if has_validation else "reward"
    changes = [m for line in lines if (m := re.match(rf"{name}.*? {N} -> {N}", line))]
    if verdict in ("Learned", "Got worse"):
        grew = float(changes[0][2]) > float(changes[0][1])
        assert grew == (verdict == "Learned") and changes[0][1] != changes[0][2], lines


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(histories(), CALLS, SAVED, st.sampled_from(CONFIGS), st.sampled_from([0, 3, 8]))
def test_cards_and_summary_say_what_their_numbers_say(
    history: list[dict[str, Any]], calls: list[str], saved: list[int], config: Any, prompts: int
) -> None:
    with TemporaryDirectory() as folder:
        run = Path(folder)
        write_run(run, history, calls, prompts)
        summary = summarise(history, run, config, session=(9, 5.0), resume_command="ppo train")
        validations = list_validations(history)
        lines = format_summary(summary, ascii_only=True)
        check_measures(lines, summary.verdict, len(validations) > 1)
        cards = dict(summary.judge)
        if "calls" in cards:
            check_totals(cards["calls"], calls, history)
        assert ("calls" in cards) == bool(calls or any("judge/cached" in x for x in history))
        for name, text in summary.episodes:
            share = re.match(rf"{N}%", text)
            key = {"tool errors": "tool_error_share"}.get(name)
            if share and key:
                means = fmean(x[f"environment/{key}"] for x in history[1:])
                assert abs(float(share[1]) / 100 - means) < 0.001, text
        # The step to keep, and whether its gain is more than chance.
        answers = {q: a for q, a, _ in answer_questions(summary, config, saved, validations)}
        keep, gain = answers["step to keep"], answers["is the gain real?"]
        if len(validations) > 1:
            scores = {int(v["step"]): float(v["val/reward_mean"]) for v in validations}
            best = int(re.match(r"step (\d+)", keep)[1])  # type: ignore[index]
            assert scores[best] == max(scores.values()), keep
            assert f"the best of {len(scores)};" in keep
            assert ("saved as checkpoint" in keep) == (best in saved)
            if near := re.search(r"nearest checkpoint is step_(\d+)", keep):
                assert abs(int(near[1]) - best) == min(abs(s - best) for s in saved)
            change = float(re.search(r"(?:accuracy|reward) ([+-]\S+)", gain)[1])  # type: ignore[index]
            begin, end = map(int, re.search(r"from step (\d+) to (\d+)", gain).groups())  # type: ignore[union-attr]
            assert abs(scores[end] - scores[begin] - change) <= 0.06 * abs(change) + 1e-9, gain
            interval = re.search(r"interval ([+-]\S+) to ([+-]\S+?),", gain)
            count = count_scores(config.data, config.rollout)
            last = next(v for v in validations if v["step"] == end)
            sign = compare_validations(count, run, validations[0], last).sign
            answer = {1: ("yes", "doubtful"), -1: ("no, it fell",), 0: ("it may be chance",)}[sign]
            assert gain.startswith(answer) and (sign == 0 or interval), gain
            if interval and sign:
                assert float(interval[1]) * sign > 0 and float(interval[2]) * sign > 0, gain
        else:
            assert "not known without" in keep and "not known without" in gain
        verdict = "".join(text for text, _ in describe_verdict(summary, 20, validations, [], 0.0))
        assert "Nothing to check." in verdict and verdict.startswith(summary.verdict)
        assert (summary.verdict == DOUBTFUL) <= bool(summary.warnings)


ROW = st.tuples(st.integers(1, 40), st.integers(1, 400), st.floats(0, 50), st.floats(0, 90))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(st.lists(ROW, min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_critic_explains_at_most_all_of_what_varies(steps: list[list[Any]]) -> None:
    lines = [
        {"step": i, "positions": rows, "tenths": [(1, 0.5, 0.5)]} for i, rows in enumerate(steps)
    ]
    pooled = pool_steps(lines)
    assert pooled["name"].endswith(f"{len(steps) - 1}")
    for bucket, (name, tokens, explained) in enumerate(pooled["positions"][:1]):
        varied = sum(rows[0][2] for rows in steps)
        wrong = sum(rows[0][3] for rows in steps)
        if name == "1":
            assert tokens == sum(rows[bucket][1] for rows in steps)
            assert varied > 0 and abs(explained - (1 - wrong / varied)) < 1e-9 and explained <= 1
