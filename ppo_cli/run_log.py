"""The line files of a run folder: metrics.jsonl and rollouts/, written whole, read kindly."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ppo_cli.redact import redact

METRICS_FILE = "metrics.jsonl"
ROLLOUTS = "rollouts"
PREFIXES = {"train": "step", "val": "val"}
_ROLLOUT_NAME = re.compile(r"^(?:step|val)_(\d+)\.jsonl$")


def rollout_file(run_dir: Path, step: int, split: str = "train") -> Path:
    """The file that holds the rollouts of a step; `split` is train or val."""
    return run_dir / ROLLOUTS / f"{PREFIXES[split]}_{step:06d}.jsonl"


def rollout_steps(run_dir: Path, split: str = "train") -> list[int]:
    """Steps whose rollouts are there, oldest first."""
    names = (p.name for p in (run_dir / ROLLOUTS).glob(f"{PREFIXES[split]}_*.jsonl"))
    return sorted(int(m.group(1)) for m in map(_ROLLOUT_NAME.match, names) if m)


def drop_rollouts_past(run_dir: Path, step: int) -> None:
    """Delete rollout files of later steps, and what a killed run left half-written."""
    for path in (run_dir / ROLLOUTS).glob("*"):
        found = _ROLLOUT_NAME.match(path.name)
        if path.name.startswith(".unfinished-") or (found and int(found.group(1)) > step):
            path.unlink()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a line that a killed run left torn is passed over."""
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    for row in text.split("\n"):
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without torn ones."""
    return [x for x in read_lines(run_dir / METRICS_FILE) if isinstance(x.get("step"), int)]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line and see it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_encode(line))
        file.flush()
        os.fsync(file.fileno())


def replace_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of lines under another name, then give it its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".unfinished-{path.name}")
    with fresh.open("wb") as file:
        file.writelines(_encode(line) for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def plain(value: Any) -> Any:
    """Turn anything into what JSON can say: no numpy, no NaN, no secrets."""
    import numpy as np

    if isinstance(value, str):
        return redact(value) if len(value) > 5 else value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int) else redact(str(value))


def _encode(line: Mapping[str, Any]) -> bytes:
    text = json.dumps(plain(line), ensure_ascii=False, allow_nan=False)
    # A sampler may cut a character in half: backslashreplace writes the half as JSON's \udXXX.
    return text.encode("utf-8", "backslashreplace") + b"\n"
