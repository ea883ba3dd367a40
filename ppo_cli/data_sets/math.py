r"""MATH (Hendrycks et al. 2021): competition problems whose solutions box the answer."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo_cli.data_sets.files import Record, Records, read_bytes, split_sources
from ppo_cli.data_sets.problems import Built, Place, RowError, RowProblem, raise_problems
from ppo_cli.data_sets.rows import read_records, read_source

HUB = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Reason step by step, and put the final answer in \boxed{}."
BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def build_math(source: str) -> Built:
    """Return the verl rows of each split, read from a file, a folder or the hub."""
    splits: dict[str, list[dict[str, Any]]] = {}
    problems: list[RowProblem] = []
    for split, files in split_sources(source).items():
        rows: list[dict[str, Any]] = []
        for file in files:
            found, bad = read_records(read_problems(file), read_row)
            rows += found
            problems += bad
        for index, row in enumerate(rows):
            row["extra_info"] = {"split": split, "index": index, **row["extra_info"]}
        splits[split] = rows
    raise_problems(problems)
    return Built(splits)


def read_problems(file: str) -> Records:
    """Read a file of rows, or one of the original set: a single problem."""
    path = Path(file)
    if path.suffix == ".json":
        with suppress(ValueError):
            record = json.loads(read_bytes(path))
            if isinstance(record, dict) and "problem" in record:
                return Records(file, path.stem, ((Place(file, 1), record),))
    return read_source(file)


def read_row(place: Place, record: Record) -> dict[str, Any]:
    """Return one row in verl's layout; the rule `math` scores its data source."""
    for column in ("problem", "solution"):
        value = record.get(column)
        if not isinstance(value, str) or not value.strip():
            raise RowError(column, "is missing or no text; MATH rows have it")
    problem, solution = record["problem"], record["solution"]
    answer = boxed_answer(solution)
    if not answer:
        raise RowError("solution", r"has no final answer in \boxed{…}")
    kind = {name: str(record.get(name) or "") for name in ("level", "type")}
    return {
        "data_source": HUB,
        "prompt": [{"role": "user", "content": f"{problem}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"problem": problem, "solution": solution, **kind},
    }


def boxed_answer(solution: str) -> str:
    r"""Return what the last box holds: `\boxed{\frac{1}{2}}`, or `\boxed 2`; empty without one."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return ""
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0].rstrip(".,")
    depth = 0
    # A brace behind a backslash is one to be seen, not one that groups.
    for match in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return rest[1 : match.start()].strip()
    return ""
