"""GSM8K: grade-school word problems whose answers end with `#### NUMBER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppo_cli.data_sets.files import SPLITS, SUFFIXES, Record, file_suffix
from ppo_cli.data_sets.problems import Built, Place, RowProblem, raise_problems
from ppo_cli.data_sets.rows import read_source
from ppo_cli.errors import DataError

HUB = "openai/gsm8k"
INSTRUCTION = (
    "Reason step by step. Finish with a last line that holds only the result, "
    "written as `#### answer`."
)


def build_gsm8k(source: str) -> Built:
    """Return the verl rows of both splits, read from a folder or from the hub."""
    return Built({split: build_split(split, split_sources(source, split)) for split in SPLITS})


def split_sources(source: str, split: str) -> list[str]:
    """Return the files of a split in a folder (shards in order), or its name on the hub."""
    folder = Path(source).expanduser()
    if folder.is_file():
        raise DataError(f"{folder} is a file; --source takes the folder of both splits.")
    if not folder.is_dir():
        name = f"{HUB}/main" if source == HUB else source
        return [f"{name}:{split}"]
    for place in (folder, folder / "main"):
        exact = [place / f"{split}{suffix}" for suffix in SUFFIXES]
        files = [path for path in exact if path.is_file()][:1]
        shards = sorted(p for p in place.glob(f"{split}-*") if file_suffix(p) in SUFFIXES)
        if files or shards:
            return [str(path) for path in files or shards]
    raise DataError(
        f"{folder} holds no '{split}' split; expected {split}.jsonl or {split}.parquet."
    )


def build_split(split: str, sources: list[str]) -> list[dict[str, Any]]:
    """Return the verl rows of one split; rows without a final answer are told together."""
    rows: list[dict[str, Any]] = []
    problems: list[RowProblem] = []
    for source in sources:
        raw = read_source(source)
        problems.extend(raw.problems)
        for place, record in raw.records:
            problem = find_problem(place, record)
            if problem is None:
                rows.append(build_row(record, split, len(rows)))
            else:
                problems.append(problem)
    raise_problems(problems)
    return rows


def find_problem(place: Place, record: Record) -> RowProblem | None:
    """Return what is wrong with a row of the original set, or None."""
    for column in ("question", "answer"):
        value = record.get(column)
        if not isinstance(value, str) or not value.strip():
            return RowProblem(place, column, "is missing or no text; GSM8K rows have it")
    if not final_answer(record["answer"]):
        return RowProblem(place, "answer", "has no final '#### NUMBER'")
    return None


def final_answer(answer: str) -> str:
    """Return what stands behind the last `####`, without thousands commas."""
    _, mark, last = answer.rpartition("####")
    return last.strip().replace(",", "") if mark else ""


def build_row(record: Record, split: str, index: int) -> dict[str, Any]:
    """Return one row in verl's layout."""
    question, answer = record["question"], record["answer"]
    return {
        "data_source": HUB,
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(answer)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }
