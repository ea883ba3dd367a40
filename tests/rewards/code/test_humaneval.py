"""HumanEval as the real case: canonical solutions score 1, broken ones 0."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.records import Score
from tests.rewards.tables import table

RunCode = Callable[..., Score]
REAL = Path(__file__).resolve().parents[3].parent / "shared/data/humaneval/HumanEval.jsonl.gz"
SAMPLE = table(__file__, "sample")


def judge_all(rows: list[dict[str, Any]], answers: list[str], run_code: RunCode) -> list[Score]:
    # As `ppo data prepare humaneval` writes them.
    truths = [
        json.dumps({name: row[name] for name in ("test", "entry_point", "prompt")}) for row in rows
    ]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run_code, answers, truths))


def fenced(row: dict[str, Any], body: str) -> str:
    return f"Here it is:\n```python\n{row['prompt']}{body}```\n"


def check_both(rows: list[dict[str, Any]], run_code: RunCode) -> None:
    bodies = [row["canonical_solution"] for row in rows]
    right = [fenced(row, body) for row, body in zip(rows, bodies, strict=True)]
    for scores in (judge_all(rows, right, run_code), judge_all(rows, bodies, run_code)):
        assert [(f.value, f.reason or f.failure) for f in scores] == [(1.0, "")] * len(rows)
    wrong = [fenced(row, "    return None\n") for row in rows]
    # The body of the next task, under this task's name.
    strange = [fenced(row, body) for row, body in zip(rows, bodies[1:] + bodies[:1], strict=True)]
    for broken in (wrong, strange):
        scores = judge_all(rows, broken, run_code)
        assert [(f.value, f.failure) for f in scores] == [(0.0, "")] * len(rows)
        assert all(f.reason for f in scores)


def test_a_sample(run_code: RunCode) -> None:
    check_both(SAMPLE, run_code)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason="the real HumanEval file is not at hand")
def test_the_real_set(run_code: RunCode) -> None:
    with gzip.open(REAL, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 164
    check_both(rows, run_code)
