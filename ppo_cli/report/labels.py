"""Labels that people give responses in the page: `labels.jsonl` in the run folder.

A label belongs to a response, not to a step and a line: when a run goes on from an earlier
checkpoint, other responses take these places.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from ppo_cli.digests import digest_text
from ppo_cli.errors import DataError, UserError
from ppo_cli.run_folder import LABELS_FILE, PREFIXES, read_lines, replace_lines, rollout_file

LOCK = ".labels.lock"  # while a label is written
IDENTITY = ("split", "step", "uid", "sample", "prompt", "response")
# What a line has besides: all that `ppo reward calibrate --labels label` reads.
FIELDS = (*IDENTITY, "ground_truth", "data_source", "score", "parts")


def response_id(line: Mapping[str, Any]) -> str:
    """Return what names a response for good: a digest of its texts and of where it is from."""
    parts = json.dumps([line.get(name) for name in IDENTITY], default=str)
    return digest_text(parts, 16)


def read_labels(run_dir: Path) -> list[dict[str, Any]]:
    """The labels of a run, each with the `response_id` of its response.

    Versions before the id wrote the same texts. A line without a response, which somebody wrote
    by hand, has none.
    """
    lines = read_lines(run_dir / LABELS_FILE)
    return [
        {"response_id": response_id(line)} | line if "response" in line else line for line in lines
    ]


def read_labels_by_place(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The labels by the place where their response is now, as the page names it."""
    return {
        f"{label['split']}:{label['step']}:{line}": label
        for label in read_labels(run_dir)
        for line in _find_scores(run_dir, label) or ()
    }


def read_labels_with_scores(run_dir: Path) -> list[dict[str, Any]]:
    """The labels, each with the score and the parts that its response has in the run now.

    Those whose step was done again with other responses are left out.
    """
    labels = []
    for label in read_labels(run_dir):
        scores = _find_scores(run_dir, label)
        if scores is None:
            labels.append(label)
        elif scores:
            labels.append(label | next(iter(scores.values())))
    return labels


def _find_scores(run_dir: Path, label: Mapping[str, Any]) -> Mapping[int, dict[str, Any]] | None:
    """The lines and scores of a label's response in the file of its step; None where unknown."""
    split, step = label.get("split"), label.get("step")
    if "response_id" not in label or split not in PREFIXES or not isinstance(step, int):
        return None
    file = rollout_file(run_dir, step, split)
    try:
        state = file.stat()
    except FileNotFoundError:
        return None
    scores = _read_scores(file, split, step, state.st_size, state.st_mtime_ns)
    return scores.get(str(label["response_id"]), {})


@lru_cache(maxsize=1024)
def _read_scores(
    file: Path, split: str, step: int, *state: int
) -> dict[str, dict[int, dict[str, Any]]]:
    """Lines and scores of a step's responses by their ids; `state` changes when the file does."""
    scores: dict[str, dict[int, dict[str, Any]]] = {}
    for number, line in enumerate(read_lines(file)):
        name = response_id(line | {"split": split, "step": step})
        score = {key: line.get(key) for key in ("score", "parts")}
        scores.setdefault(name, {})[number] = score
    return scores


def write_label(
    run_dir: Path, response: Mapping[str, Any], label: float | None, comment: str
) -> dict[str, Any]:
    """Keep the label or comment of a response and return its line; without both it is removed.

    `response` is a line of the run with its `id`, `split`, `step` and `response_id`.
    """
    try:
        with _lock(run_dir):
            labels = read_labels(run_dir)
            others = [x for x in labels if x.get("response_id") != response["response_id"]]
            line: dict[str, Any] = {}
            if label is not None or comment:
                line = {name: response.get(name) for name in ("id", "response_id", *FIELDS)}
                line |= {"label": label, "comment": comment}
                others.append(line)
            replace_lines(run_dir / LABELS_FILE, others)
    except (OSError, DataError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"The label cannot be written: {reason}.") from error
    return line


@contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    """Let one thread of one process at a time change the labels of a run."""
    with (run_dir / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
