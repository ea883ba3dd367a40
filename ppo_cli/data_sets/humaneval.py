"""HumanEval: functions to complete, each with tests that a sandbox runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppo_cli.data_sets.files import SUFFIXES, Record, file_suffix
from ppo_cli.data_sets.problems import Built, Place, RowProblem, raise_problems
from ppo_cli.data_sets.rows import read_source
from ppo_cli.errors import DataError

HUB = "openai/openai_humaneval"
SOURCE = "openai_humaneval"
SPLIT = "test"
COLUMNS = ("task_id", "prompt", "entry_point", "test")
INSTRUCTION = (
    "Complete the following Python function. Answer with the whole function, with the imports "
    "that it needs, in one ```python block."
)


def build_humaneval(source: str) -> Built:
    """Return the verl rows of the one split, read from a file, a folder or the hub."""
    rows: list[dict[str, Any]] = []
    problems: list[RowProblem] = []
    for one in list_sources(source):
        raw = read_source(one)
        problems.extend(raw.problems)
        for place, record in raw.records:
            problem = find_problem(place, record)
            if problem is None:
                rows.append(build_row(record, len(rows)))
            else:
                problems.append(problem)
    raise_problems(problems)
    return Built({SPLIT: rows})


def list_sources(source: str) -> list[str]:
    """Return the file itself, the one set of a folder (shards in order), or a name on the hub."""
    path = Path(source).expanduser()
    if path.is_file():
        return [str(path)]
    if not path.is_dir():
        return [f"{source}:{SPLIT}"]
    for place in (path, path / "openai_humaneval"):
        for pattern in ("HumanEval*", "humaneval*", f"{SPLIT}*"):
            found = sorted(one for one in place.glob(pattern) if file_suffix(one) in SUFFIXES)
            if found:
                return [str(one) for one in found]
    raise DataError(
        f"{path} holds no HumanEval file; expected HumanEval.jsonl.gz, or test-*.parquet."
    )


def find_problem(place: Place, record: Record) -> RowProblem | None:
    """Return what is wrong with a row of the original set, or None."""
    for column in COLUMNS:
        value = record.get(column)
        if not isinstance(value, str) or not value.strip():
            return RowProblem(place, column, "is missing or no text; HumanEval rows have it")
    if "def check(" not in record["test"]:
        return RowProblem(place, "test", "has no function check(candidate)")
    return None


def build_row(record: Record, index: int) -> dict[str, Any]:
    """Return one row in verl's layout; the rule `code` reads its ground truth."""
    tests = {name: record[name] for name in ("test", "entry_point", "prompt")}
    question = f"{INSTRUCTION}\n\n```python\n{record['prompt'].rstrip()}\n```"
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": {"split": SPLIT, "index": index, "task_id": record["task_id"]},
    }
