"""Where a run that exploited its reward went back to, and what it has changed: restraints.json.

A restraint is written first and is `pending` until the steps after its checkpoint are gone, so that
a run which is killed at any moment goes on as the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.paths import load_json, read_text
from ppo_cli.run_folder.checkpoints import CheckpointStore

RESTRAINTS_FILE = "restraints.json"


@dataclass(frozen=True)
class Restraint:
    """One return to an earlier step.

    The alarm began after step `after`; the run went back to the checkpoint of step `to`, 0 is its
    start. `changes` has settings with their values before and since, and is empty when the run
    stopped there. `alarm` is the sentence of the alarm.
    """

    after: int
    to: int
    changes: dict[str, tuple[float, float]]
    alarm: str
    pending: bool = True

    def describe(self) -> str:
        """Return in words where the run went back to, and what has changed."""
        changed = [f"{key} {now:g} in place of {old:g}" for key, (old, now) in self.changes.items()]
        where = f"step {self.to}" if self.to else "the start"
        return f"back from step {self.after} to {where}, {', '.join(changed) or 'and stopped'}"


def read_restraints(run: Path) -> list[Restraint]:
    """Return the restraints of a run, the oldest first; empty without any."""
    if not (run / RESTRAINTS_FILE).exists():
        return []
    lines: list[dict[str, Any]] = load_json(read_text(run / RESTRAINTS_FILE))
    return [Restraint(**line) for line in lines]


def write_restraints(run: Path, restraints: Iterable[Restraint]) -> None:
    """Write the restraints of a run atomically."""
    with atomic_replace(run / RESTRAINTS_FILE) as fresh:
        fresh.write_text(json.dumps([asdict(r) for r in restraints], indent=1) + "\n", "utf-8")


def go_back(run: Path, store: CheckpointStore) -> None:
    """Delete the checkpoints after that of a pending restraint: the run resumes from that one."""
    restraints = read_restraints(run)
    if restraints and restraints[-1].pending:
        store.delete_after(restraints[-1].to)
        write_restraints(run, [*restraints[:-1], replace(restraints[-1], pending=False)])


def describe_restraints(run: Path) -> str:
    """Return in words where a run went back to; empty if it did not."""
    return "; ".join(restraint.describe() for restraint in read_restraints(run))
