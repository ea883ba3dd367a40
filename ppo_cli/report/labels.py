"""Labels that people give to responses in the page: `labels.jsonl` in the run folder.

A label belongs to a response, not to a step and a line: when a run resumes from an earlier
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
from ppo_cli.run_folder.lines import (
    LABELS_FILE,
    PREFIXES,
    file_state,
    read_lines,
    replace_lines,
    rollout_file,
)

LOCK = ".labels.lock"  # locked while a label is written
# Fields whose digest is a response's id.
IDENTITY = ("split", "step", "uid", "sample", "prompt", "response")
# Other fields of a label's line, for `ppo reward calibrate --labels label`.
FIELDS = (*IDENTITY, "ground_truth", "data_source", "score", "parts")
EPISODE = ("opening", "turns")


def compute_response_id(line: Mapping[str, Any]) -> str:
    """Return the permanent id of a response: a digest of its texts, step and prompt."""
    values = [line.get(name) for name in IDENTITY]
    # Responses of one turn keep the ids that they had before there were others.
    values += [line["turns"]] if line.get("turns") else []
    return digest_text(json.dumps(values, default=str), 16)


def read_labels(run_dir: Path) -> list[dict[str, Any]]:
    """Return the labels of a run, each with the `response_id` of its response.

    Lines of older versions get an id from their texts. Lines that people wrote without a response
    have none.
    """
    lines = read_lines(run_dir / LABELS_FILE)
    return [
        {"response_id": compute_response_id(line)} | line if "response" in line else line
        for line in lines
    ]


def read_labels_by_place(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return labels by the current place of their response, `split:step:line`."""
    return {
        f"{label['split']}:{label['step']}:{line}": label
        for label in read_labels(run_dir)
        for line in _find_scores(run_dir, label) or ()
    }


def read_labels_with_scores(run_dir: Path) -> list[dict[str, Any]]:
    """Return labels with the current score and parts of their response.

    Labels whose step was repeated with other responses are left out.
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
    """Return line numbers and scores of a label's response in its step's file; None if unknown."""
    split, step = label.get("split"), label.get("step")
    if "response_id" not in label or split not in PREFIXES or not isinstance(step, int):
        return None
    file = rollout_file(run_dir, step, split)
    if (state := file_state(file)) is None:
        return None
    return _read_scores(file, split, step, state).get(str(label["response_id"]), {})


@lru_cache(maxsize=1024)
def _read_scores(
    file: Path, split: str, step: int, state: tuple[int, int]
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return scores by response id and line; `state` renews the cache if the file changes."""
    scores: dict[str, dict[int, dict[str, Any]]] = {}
    for number, line in enumerate(read_lines(file)):
        name = compute_response_id(line | {"split": split, "step": step})
        score = {key: line.get(key) for key in ("score", "parts")}
        scores.setdefault(name, {})[number] = score
    return scores


def write_label(
    run_dir: Path, response: Mapping[str, Any], label: float | None, comment: str
) -> dict[str, Any]:
    """Save the label or comment of a response and return its line; without both it is removed.

    `response` is a line of the run with its `id`, `split`, `step` and `response_id`. Raises
    UserError if the file cannot be written.
    """
    try:
        with _lock(run_dir):
            labels = read_labels(run_dir)
            # A response has one label: replace an earlier one.
            others = [x for x in labels if x.get("response_id") != response["response_id"]]
            line: dict[str, Any] = {}
            if label is not None or comment:
                line = {name: response.get(name) for name in ("id", "response_id", *FIELDS)}
                line |= {name: response[name] for name in EPISODE if name in response}
                line |= {"label": label, "comment": comment}
                others.append(line)
            replace_lines(run_dir / LABELS_FILE, others)
    except (OSError, DataError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(f"The label cannot be written: {reason}.") from error
    return line


@contextmanager
def _lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run's labels, across threads and processes."""
    with (run_dir / LOCK).open("a") as file:
        # Closing the file releases the lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
