"""The folder of a run: created, locked, and cleared for a new run; whether a run is active."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ppo_cli.atomic import atomic_replace, sweep_unfinished
from ppo_cli.config.layers import AS_BEGUN
from ppo_cli.errors import DataError, UserError
from ppo_cli.paths import load_json, read_text
from ppo_cli.run_folder.checkpoints import CheckpointStore
from ppo_cli.run_folder.lines import (
    CRITIC_FILE,
    JUDGES_FILE,
    LABELS_FILE,
    METRICS_FILE,
    PRETRAINING_FILE,
    ROLLOUTS,
    make_earlier,
    read_lines,
)
from ppo_cli.run_folder.restraints import RESTRAINTS_FILE
from ppo_cli.spending import in_flight_file, merge_calls

if TYPE_CHECKING:
    from ppo_cli.config.schema.run import Config

WRITTEN_BY = "# Written by "  # first line of config.yaml, followed by versions and machine
FORK_LINE = "# Fork of {} at step {}\n"  # the second one of a fork, with its run
_FORK = re.compile(FORK_LINE.strip().format("(.+)", r"(\d+)"))
# What `set_aside` moves: everything that belongs to one run.
PARTS = (
    METRICS_FILE, PRETRAINING_FILE, ROLLOUTS, "checkpoints", "config.yaml", "plan.json",
    "tensorboard", "report.html", LABELS_FILE, JUDGES_FILE, CRITIC_FILE,
)  # fmt: skip
PLAN_FILE = "plan.json"  # what holds in the run, and why
LOCK = ".lock"  # locked while a run is active
SPENT = "judge_calls*"  # files of the module `spending`, for each judge


def paid_calls(run_dir: Path) -> list[dict[str, Any]]:
    """The paid calls of a run's judges, over all its sessions.

    Calls in flight count with their highest cost.
    """
    # A run killed before its first call ended has only the file of calls in flight.
    files = sorted({file.with_suffix(".jsonl") for file in run_dir.glob(SPENT)})
    return [
        call
        for file in files
        for call in merge_calls(read_lines(in_flight_file(file)), read_lines(file))
    ]


def check_run_folder(run: Path) -> None:
    """Raise DataError if a folder is not a run."""
    if not run.is_dir():
        raise DataError(f"{run}: there is no such folder. RUN is the --output_dir of a run.")
    # A run that only spent money so far counts as a run too.
    begun = (run / METRICS_FILE).exists() or (run / "rollouts").is_dir()
    if not begun and not paid_calls(run):
        raise DataError(
            f"{run} is not a run folder: it has no {METRICS_FILE}. RUN is the --output_dir of "
            "a run; a run writes its first line after its first step."
        )


def read_fork(run: Path) -> tuple[Path, int] | None:
    """The run and the step that a run was forked from; None if it is not a fork."""
    file = run / "config.yaml"
    match = _FORK.search(file.read_text("utf-8", "replace")) if file.is_file() else None
    return (Path(match[1]), int(match[2])) if match else None


def list_ancestors(run: Path) -> list[tuple[Path, int]]:
    """The runs before a fork, the nearest first, each with the step at which it was forked."""
    ancestors: list[tuple[Path, int]] = []
    while (fork := read_fork(run)) is not None and fork not in ancestors:
        ancestors.append(fork)
        run = fork[0]
    return ancestors


def run_settings(run: Path) -> Config:
    """Return the settings of a run: those in its `config.yaml`, and what `plan.json` decided.

    Runs of older versions have no plan: what is unset is then decided for this machine. UserError
    as in `resolve`.
    """
    from ppo_cli.config.schema.keys import with_settings
    from ppo_cli.planning.resolve import resolve

    files = [run / "config.yaml"]
    resolved = resolve(flags={}, preset=None, config_files=files, overrides=[], environ={})
    return with_settings(resolved.config, read_decisions(run))


def read_decisions(run: Path) -> dict[str, Any]:
    """Return what the plan of a run has decided or kept, and nobody has set; empty without one."""
    from ppo_cli.config.mixture import find_declaration

    try:
        values = load_json(read_text(run / PLAN_FILE))["values"]
        decisions = {
            key: fact["value"]
            for key, fact in values.items()
            if "why" in fact or fact["origin"] == AS_BEGUN
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {key: value for key, value in decisions.items() if find_declaration(key)}


class RunFolder:
    """The folder of a run; `flag` is the flag that named it, for messages."""

    def __init__(self, path: Path, flag: str = "--output_dir") -> None:
        self.path = path
        self._flag = flag
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self._created: list[Path] = []

    def prepare(self) -> None:
        """Create the folder and test that it can be written; UserError if not."""
        # Remember which folders are new, to remove them if the run never starts.
        self._created = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # A disk may be full or read-only although the folder exists: write something.
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"x" * 4096)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"{self._flag} {self.path}: a file is in the way; choose another folder."
            ) from error
        except OSError as error:
            raise UserError(
                f"{self._flag} {self.path} cannot be written: {error.strerror}. Choose another "
                "folder or free some space."
            ) from error

    def drop_if_empty(self) -> None:
        """Remove the folders that `prepare` created, if they are still empty."""
        with suppress(OSError):
            if self._created:
                for path in (self.logs, *self._created):
                    if path.exists():
                        path.rmdir()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against other runs; UserError if another run has the lock.

        The system releases the lock of a killed process. On file systems without locks this does
        nothing.
        """
        claim = self._lock()
        try:
            yield
        finally:
            if claim is not None:
                with suppress(OSError):
                    (self.path / LOCK).unlink()
                claim.close()

    def _lock(self) -> IO[str] | None:
        """Return the open lock file; None on file systems without locks."""
        with suppress(OSError):
            attempts = 3  # a reader that checks whether a run is active holds the lock briefly
            while True:
                # A regular file opened for writing: NFS can lock nothing else.
                claim = (self.path / LOCK).open("a")
                try:
                    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # The file may have been deleted and created again between opening and locking
                    # it.
                    if os.path.samestat(os.fstat(claim.fileno()), (self.path / LOCK).stat()):
                        return claim
                except BlockingIOError:
                    if not attempts:
                        claim.close()
                        raise UserError(
                            f"{self._flag} {self.path} belongs to a run that is still active. Wait "
                            "for its end, or choose another folder."
                        ) from None
                    attempts -= 1
                    time.sleep(0.1)
                except FileNotFoundError:
                    pass
                claim.close()  # of a run that has just ended and deleted the file
        return None

    def write_config(self, text: str) -> None:
        """Write `config.yaml` atomically."""
        with atomic_replace(self.path / "config.yaml") as fresh:
            fresh.write_text(text)

    def write_plan(self, plan: Mapping[str, Any]) -> None:
        """Write `plan.json` atomically: what holds in the run, and why."""
        with atomic_replace(self.path / PLAN_FILE) as fresh:
            fresh.write_text(json.dumps(plan, ensure_ascii=False, indent=1) + "\n", "utf-8")

    def set_aside(self, *, spared: Sequence[str] = ()) -> Path | None:
        """Move an earlier run's files to `earlier_1`, `earlier_2` …; returns the folder, or None.

        Of spending and restraints, which cover all starts of a run, the `spared` ones stay. Partial
        checkpoints of a run that was killed in its first save are removed.
        """
        for store in (self.checkpoints, *self.path.glob("earlier_*/checkpoints")):
            sweep_unfinished(store)
        present = [self.path / name for name in PARTS if (self.path / name).exists()]
        for pattern in (name for name in (SPENT, RESTRAINTS_FILE) if name not in spared):
            present += sorted(self.path.glob(pattern))
        if not present:
            return None
        earlier = make_earlier(self.path)
        for path in present:
            os.replace(path, earlier / path.name)
        return earlier


def run_state(run: Path, step: int, total_steps: int | None) -> str:
    """Return whether a run is `running`, `done`, `stopped` or `failed`, from its lock and steps.

    A run that is asked to stop (Ctrl-C, a budget, an outage) saves its last step and removes its
    lock. One that raises saves nothing; one that is killed leaves the lock's file.
    """
    if is_active(run):
        return "running"
    if total_steps and step >= total_steps:
        return "done"
    saved = CheckpointStore(run / "checkpoints", 1).newest_step()
    was_killed = (run / LOCK).exists()
    return "failed" if was_killed or saved is None or saved < step else "stopped"


def is_active(run: Path) -> bool:
    """Whether a process is running this run, which it shows by locking a file."""
    try:
        with (run / LOCK).open() as claim:
            fcntl.flock(claim, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
