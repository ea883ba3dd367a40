"""The files of a run with a JSON object per line: metrics, rollouts, labels and the like.

They are written line by line; readers skip an incomplete last line.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ppo_cli.atomic import UNFINISHED, atomic_replace
from ppo_cli.errors import DataError
from ppo_cli.paths import read_json_lines
from ppo_cli.secrets.redact import Redactor

# Names in a run folder.
METRICS_FILE = "metrics.jsonl"
ROLLOUTS = "rollouts"
PRETRAINING_FILE = "pretraining.jsonl"
PREFIXES = {"train": "step", "val": "val", "pretraining": "pretraining"}
LABELS_FILE = "labels.jsonl"  # labels that people gave responses in the page
CRITIC_FILE = "critic.jsonl"  # how well the critic predicts, a line per step
JUDGES_FILE = "judges.jsonl"  # what each judge is asked, as the run read it at its start
_ROLLOUT_NAME = re.compile(r"^(?:step|val)_(\d+)\.jsonl$")


def rollout_file(run_dir: Path, step: int, split: str = "train") -> Path:
    """The file with the rollouts of a step; `split` is train, val or pretraining."""
    return run_dir / ROLLOUTS / f"{PREFIXES[split]}_{step:06d}.jsonl"


def rollout_steps(run_dir: Path, split: str = "train") -> list[int]:
    """Steps that have a rollouts file, oldest first."""
    names = (p.name for p in (run_dir / ROLLOUTS).glob(f"{PREFIXES[split]}_*.jsonl"))
    return sorted(int(m.group(1)) for m in map(_ROLLOUT_NAME.match, names) if m)


def rollouts_past(run_dir: Path, step: int) -> list[Path]:
    """Return the rollout files of later steps."""
    files = {path: _ROLLOUT_NAME.match(path.name) for path in (run_dir / ROLLOUTS).glob("*")}
    return [path for path, match in files.items() if match and int(match.group(1)) > step]


def drop_rollouts_past(run_dir: Path, step: int) -> None:
    """Delete rollout files of later steps, and unfinished files of killed runs."""
    unfinished = (run_dir / ROLLOUTS).glob(f"{UNFINISHED}*")
    for path in (*unfinished, *rollouts_past(run_dir, step)):
        path.unlink()


def make_earlier(run_dir: Path) -> Path:
    """Make the first free folder of `earlier_1`, `earlier_2` …, for what a run leaves behind."""
    number = 1
    while (run_dir / f"earlier_{number}").exists():
        number += 1
    earlier = run_dir / f"earlier_{number}"
    earlier.mkdir()
    return earlier


def file_state(file: Path) -> tuple[int, int] | None:
    """Return size and modification time of a file, which change when a resumed run repeats a step.

    None without the file, as such a run may have removed it.
    """
    try:
        state = file.stat()
    except FileNotFoundError:
        return None
    return state.st_size, state.st_mtime_ns


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; an incomplete line of a killed run is skipped.

    Returns [] for a missing file; raises DataError for one that cannot be read.
    """
    try:
        return read_json_lines(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that have a step."""
    return [line for line in read_lines(path) if isinstance(line.get("step"), int)]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with a step; values that are not numbers are dropped."""
    return [
        {
            key: value
            for key, value in line.items()
            if value is None or isinstance(value, int | float)
        }
        for line in read_steps(run_dir / METRICS_FILE)
    ]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line and fsync."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_encode(line))
        # Synced, so that a line that was reported survives a crash of the machine.
        file.flush()
        os.fsync(file.fileno())


def replace_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of lines atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        redactor = Redactor()
        file.writelines(_encode(line, redactor) for line in lines)


class Encoded(str):
    """Numbers as base64, which is not redacted: some letters of it may look like a key."""

    __slots__ = ()


def plain(value: Any) -> Any:
    """Convert a value to plain JSON types: no numpy, no NaN, no secrets in values or names."""
    return json.loads(to_json(value))


def to_json(value: Any, redactor: Redactor | None = None, **layout: Any) -> str:
    """Return a value as JSON text: no numpy, no NaN, no secrets in values or names.

    Secrets are looked for once, in the whole text. A value that has one is redacted part by part
    before it is encoded: redacting JSON text could break it. `layout` is for json.JSONEncoder.
    """
    redactor = redactor or Redactor()
    encode = json.JSONEncoder(
        ensure_ascii=False, allow_nan=False, default=_convert_other, **layout
    ).encode
    try:
        text = encode(value)
    except (ValueError, TypeError):  # NaN, or names that are not text
        text = encode(_convert(value, str))
    if redactor.finds(_decode_escapes(text)):
        text = encode(_convert(value, redactor))
    return text


def _decode_escapes(text: str) -> str:
    """Return JSON text with its short escapes decoded; the redactor decodes the others."""
    if "\\" in text:
        # JSON text has no zero character, so it can stand for the backslash meanwhile.
        for escape, character in _ESCAPES:
            text = text.replace(escape, character)
    return text


_ESCAPES = (
    ("\\\\", "\0"), ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\\b", "\b"), ("\\f", "\f"),
    ('\\"', '"'), ("\0", "\\"),
)  # fmt: skip


def _convert_other(value: Any) -> Any:
    """Return a value that JSON does not have as one that it has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return list(value)
    # Imported late: most lines have no numpy values.
    import numpy as np

    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _convert(value: Any, clean: Callable[[str], str]) -> Any:
    """Convert a value to JSON types part by part; `clean` is called with each text and name."""
    if isinstance(value, str):
        return value if isinstance(value, Encoded) else clean(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        fields: dict[str, Any] = {}
        for key, inner in value.items():
            name = clean(str(key))
            while name in fields:  # two names that differ only in their secrets
                name += "*"
            fields[name] = _convert(inner, clean)
        return fields
    if isinstance(value, list | tuple):
        return [_convert(v, clean) for v in value]
    return _convert(_convert_other(value), clean)


def _encode(line: Mapping[str, Any], redactor: Redactor | None = None) -> bytes:
    # A sampler may cut a character in two: backslashreplace writes lone surrogates as \udXXX.
    return to_json(line, redactor).encode("utf-8", "backslashreplace") + b"\n"
