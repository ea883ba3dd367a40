"""The run folder: made, checked, cleared for a new run; and its line files.

`metrics.jsonl` and `rollouts/` are written as whole lines; a reader skips a cut last line.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ppo_cli.atomic import UNFINISHED, replacing
from ppo_cli.errors import UserError
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
        if path.name.startswith(UNFINISHED) or (found and int(found.group(1)) > step):
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
    """Write a file of lines atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh, fresh.open("wb") as file:
        file.writelines(_encode(line) for line in lines)


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


PARTS = ("metrics.jsonl", "rollouts", "checkpoints", "config.yaml", "tensorboard", "report.html")

LOCK = ".lock"  # while a run goes on
SPENT = "judge_calls*.jsonl"  # a line a paid call; a file for each judge


class RunFolder:
    """Paths inside `--output_dir`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._made: list[Path] = []

    def prepare(self) -> None:
        """Make the folder and see that it can be written to; raises UserError if not."""
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"x" * 4096)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"--output_dir {self.path}: a file is in the way; choose another folder."
            ) from error
        except OSError as error:
            raise UserError(
                f"--output_dir {self.path} cannot be written: {error.strerror}. Choose another "
                "folder or free some space."
            ) from error

    def drop_if_empty(self) -> None:
        """Take away the folders that `prepare` made, as long as nothing is in them."""
        with suppress(OSError):
            if self._made:
                for path in (self.logs, *self._made):
                    if path.exists():
                        path.rmdir()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs out meanwhile; raises UserError when there is one in the folder.

        The system ends the claim of a process that is killed. File systems without such claims
        keep nobody out.
        """
        claim = self._claim()
        try:
            yield
        finally:
            if claim is not None:
                with suppress(OSError):
                    (self.path / LOCK).unlink()
                claim.close()

    def _claim(self) -> IO[str] | None:
        with suppress(OSError):
            while True:
                # A file, and open for writing: between machines nothing else can be claimed.
                claim = (self.path / LOCK).open("a")
                try:
                    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(claim.fileno()), (self.path / LOCK).stat()):
                        return claim
                except BlockingIOError:
                    claim.close()
                    raise UserError(
                        f"--output_dir {self.path} belongs to a run that still goes on. Let it "
                        "end, or choose another folder."
                    ) from None
                except FileNotFoundError:
                    pass
                claim.close()  # of a run that has just ended, which took the file away
        return None

    def write_config(self, text: str) -> None:
        """Write `config.yaml` atomically."""
        with replacing(self.path / "config.yaml") as fresh:
            fresh.write_text(text)

    def set_aside(self, *, all_of_it: bool = True) -> Path | None:
        """Move what an earlier run left to `earlier_1`, `earlier_2` …; return where it is now.

        What it spent stays, unless `all_of_it` goes: a budget is for all starts of a run.
        """
        present = [self.path / name for name in PARTS if (self.path / name).exists()]
        if all_of_it:
            present += sorted(self.path.glob(SPENT))
        if not present:
            return None
        number = 1
        while (self.path / f"earlier_{number}").exists():
            number += 1
        earlier = self.path / f"earlier_{number}"
        earlier.mkdir()
        for path in present:
            os.replace(path, earlier / path.name)
        return earlier


def differences(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Say in what a checkpoint's run differs from this one; empty where it is the same.

    `saved` is a checkpoint's state. What an older checkpoint did not note counts as the same.
    """
    before = saved["fingerprint"]
    changed = [key for key, value in identity.items() if before.get(key, value) != value]
    return ", ".join(
        f"{key} (other rows)"
        if key == "data.train_files"
        else f"{key} (was {before[key]}, now {identity[key]})"
        for key in changed
    )
