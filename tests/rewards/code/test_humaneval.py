"""HumanEval as the real case: canonical solutions score 1, broken ones 0."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.data_sets.files import Place
from ppo_cli.data_sets.prepare import humaneval_row
from ppo_cli.records import Score

RunCode = Callable[..., Score]
REAL = Path(__file__).resolve().parents[3].parent / "shared/data/humaneval/HumanEval.jsonl.gz"
SAMPLE = [
    {
        "task_id": "Sample/0",
        "prompt": 'from typing import List\n\n\ndef evens(xs: List[int]) -> List[int]:\n    """'
        'Keep even numbers.\n    >>> evens([1, 2])\n    [2]\n    """\n',
        "entry_point": "evens",
        "canonical_solution": "    return [x for x in xs if x % 2 == 0]\n",
        "test": "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
        "    assert candidate([1, 2, 4]) == [2, 4]\n    assert candidate([0]) == [0]\n",
    },
    {
        "task_id": "Sample/1",
        "prompt": "import math\n\n\ndef value(xs: list, x: float):\n"
        "    return sum([c * math.pow(x, i) for i, c in enumerate(xs)])\n\n\n"
        'def find_zero(xs: list):\n    """ Find a zero of a line. """\n',
        "entry_point": "find_zero",
        "canonical_solution": "    return -xs[0] / xs[1]\n",
        "test": "def check(candidate):\n    import random\n    rng = random.Random(42)\n"
        "    import copy\n    for _ in range(20):\n"
        "        xs = [rng.randint(1, 9), rng.randint(1, 9)]\n"
        "        assert math.fabs(value(xs, candidate(copy.deepcopy(xs)))) < 1e-4\n",
    },
]


def judge_all(rows: list[dict[str, Any]], answers: list[str], run_code: RunCode) -> list[Score]:
    truths = [
        humaneval_row(Place("HumanEval", 1), row)["reward_model"]["ground_truth"] for row in rows
    ]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run_code, answers, truths))


def whole(row: dict[str, Any], body: str) -> str:
    return f"Here it is:\n```python\n{row['prompt']}{body}```\n"


def check_both(rows: list[dict[str, Any]], run_code: RunCode) -> None:
    bodies = [row["canonical_solution"] for row in rows]
    right = [whole(row, body) for row, body in zip(rows, bodies, strict=True)]
    for found in (judge_all(rows, right, run_code), judge_all(rows, bodies, run_code)):
        assert [(f.value, f.reason or f.failure) for f in found] == [(1.0, "")] * len(rows)
    wrong = [whole(row, "    return None\n") for row in rows]
    # The body of the next task, under this task's name.
    strange = [whole(row, body) for row, body in zip(rows, bodies[1:] + bodies[:1], strict=True)]
    for broken in (wrong, strange):
        found = judge_all(rows, broken, run_code)
        assert [(f.value, f.failure) for f in found] == [(0.0, "")] * len(rows)
        assert all(f.reason for f in found)


def test_a_sample(run_code: RunCode) -> None:
    check_both(SAMPLE, run_code)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_file(), reason="the real HumanEval file is not at hand")
def test_the_real_set(run_code: RunCode) -> None:
    with gzip.open(REAL, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 164
    check_both(rows, run_code)
