"""Where a run that exploited its reward went back to, and what it has changed: restraints.json.

A restraint is written first and is `pending` until the steps after its checkpoint are gone, so that
a run which is killed at any moment goes on as the same run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ppo_cli.atomic import atomic_replace
from ppo_cli.errors import UserError
from ppo_cli.run_folder.lines import (
    JUDGES_FILE,
    METRICS_FILE,
    ROLLOUTS,
    make_earlier,
    rollouts_past,
)

RESTRAINTS_FILE = "restraints.json"
# What the page and `show` read of a run, besides its rollouts.
SHOWN = (METRICS_FILE, JUDGES_FILE, "config.yaml")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Restraint:
    """One return to an earlier step.

    The alarm began after step `after`; the run went back to the checkpoint of step `to`, 0 is its
    start. `changes` has settings with their values before and since, and is empty when the run
    stopped there. `alarm` is the sentence of the alarm, `fingerprint` the identity of the run.
    """

    after: int
    to: int
    changes: dict[str, tuple[float, float]]
    alarm: str
    fingerprint: dict[str, Any]
    pending: bool = True

    def describe(self) -> str:
        """Return in words where the run went back to, and what has changed."""
        changed = [f"{key} {now:g} in place of {old:g}" for key, (old, now) in self.changes.items()]
        where = f"step {self.to}" if self.to else "the start"
        return f"back from step {self.after} to {where}, {', '.join(changed) or 'and stopped'}"


def read_restraints(run: Path, step: int | None = None) -> list[Restraint]:
    """Return the restraints of a run, the oldest first; empty without any.

    A run that goes on after `step` undoes the last ones if they led to later steps.
    Raises UserError for a damaged file.
    """
    path = run / RESTRAINTS_FILE
    try:
        restraints = TypeAdapter(list[Restraint]).validate_json(path.read_bytes())
        while restraints and step is not None and restraints[-1].to > step:
            restraints.pop()
        return restraints
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValidationError) as error:
        cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(
            f"{path} is damaged: it cannot be read ({cause}). It says where the run went back to "
            "after an exploit. Correct it, or start again with --resume never."
        ) from error


def write_restraints(run: Path, restraints: Iterable[Restraint]) -> None:
    """Write the restraints of a run atomically."""
    with atomic_replace(run / RESTRAINTS_FILE) as fresh:
        fresh.write_text(json.dumps([asdict(r) for r in restraints], indent=1) + "\n", "utf-8")


def find_pending(run: Path) -> Restraint | None:
    """Return the restraint whose return has not ended; the run resumes from its checkpoint."""
    return next((restraint for restraint in read_restraints(run) if restraint.pending), None)


def go_back(run: Path, delete_after: Callable[[int], None]) -> Path | None:
    """End a pending return: `delete_after` deletes the checkpoints after a step.

    The responses of these steps are evidence: they are moved into a folder, which is returned. A
    run that begins again sets all of its files aside itself.
    """
    pending, earlier = find_pending(run), None
    if pending is None:
        return None
    if pending.to and (later := rollouts_past(run, pending.to)):
        earlier = make_earlier(run)
        for name in SHOWN:
            if (run / name).exists():
                shutil.copy2(run / name, earlier)
        (earlier / ROLLOUTS).mkdir()
        for path in later:
            os.replace(path, earlier / ROLLOUTS / path.name)
    delete_after(pending.to)
    end_return(run)
    return earlier


def end_return(run: Path) -> None:
    """Record that no return is pending: the run has gone back, or goes on from elsewhere."""
    if find_pending(run):
        write_restraints(run, [replace(r, pending=False) for r in read_restraints(run)])


def undo_restraints(run: Path, step: int) -> None:
    """Drop the restraints that are undone where the run goes on after `step`."""
    if len(holding := read_restraints(run, step)) < len(read_restraints(run)):
        write_restraints(run, holding)


def describe_restraints(run: Path) -> str:
    """Return in words where a run went back to; empty if it did not."""
    return "; ".join(restraint.describe() for restraint in read_restraints(run))
