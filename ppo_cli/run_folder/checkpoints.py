"""The folder `checkpoints/`: whole checkpoints or none, the newest and the best kept.

A checkpoint is written under a hidden name and renamed when it is complete, so that a name
like `step_000010` always means a whole one, whenever the process was killed. It is written
while training goes on, one at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from ppo_cli.atomic import UNFINISHED, discard, install, remove, replacing, unfinished
from ppo_cli.errors import ModelError, UserError

STEP_NAME = re.compile(r"^step_(\d{6,})$")
RUST_FAILED = re.compile(r"([^:\s][^:]*) \(os error \d+\)")


class CheckpointStore:
    """All checkpoints of one run."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = keep
        self._in_flight: Future[None] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Sweep what a killed run left; on leaving, wait for the checkpoint being written."""
        self._sweep()
        try:
            yield
        except Exception:
            # This error is reported; what was saved is complete all the same.
            if self._in_flight is not None:
                self._in_flight.exception()
                self._in_flight = None
            raise
        self.settle()

    def begin(self, step: int, fill: Callable[[Path], Future[None]], *, best: bool = False) -> None:
        """Let `fill` fill an empty folder, which becomes the checkpoint of `step` in time.

        What `fill` returns is done when nothing more is written, well or not. `best` lets the
        link `best` name this one, which pruning then spares. Waits for the checkpoint before.
        """
        self.settle()
        self._sweep()
        final = self._folder(step)
        with self._whole_or_nothing(step):
            unfinished(final).mkdir(parents=True)
            filled = fill(unfinished(final))
        in_flight: Future[None] = Future()
        self._in_flight = in_flight

        def finish(filled: Future[None]) -> None:
            try:
                with self._whole_or_nothing(step):
                    filled.result()
                    install(unfinished(final), final)
                    self._point("latest", final.name)
                    if best:
                        self._point("best", final.name)
                    self._prune()
            except BaseException as error:  # raised by `settle`
                in_flight.set_exception(error)
            else:
                in_flight.set_result(None)

        filled.add_done_callback(finish)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._in_flight is not None and not self._in_flight.done()

    def check(self) -> None:
        """Raise what went wrong with the checkpoint in the background, if it has ended."""
        if not self.busy:
            self.settle()

    def settle(self) -> None:
        """Wait until the checkpoint that was begun is whole; raises what went wrong with it.

        UserError when the disk refused it.
        """
        in_flight = self._in_flight
        if in_flight is not None:
            try:
                in_flight.result()
            finally:
                # An interrupt ends the waiting, not the writing.
                self._in_flight = None if in_flight.done() else in_flight

    @contextmanager
    def _whole_or_nothing(self, step: int) -> Iterator[None]:
        """Remove what is half-written when writing fails, and say so when it was the disk."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):
                remove(unfinished(self._folder(step)))
            cause = _disk_failure(error)
            if cause is None:
                raise
            raise UserError(
                f"The checkpoint of step {step} could not be written to {self.directory}: "
                f"{cause}. Free some space or choose another --output_dir, then "
                "run the same command again: it goes on from the last checkpoint."
            ) from error

    def _prune(self) -> None:
        """Delete all but the newest `keep` checkpoints and the best one."""
        spared = {self._target("latest"), self._target("best")}
        for step in self.steps()[: -self._keep]:
            folder = self._folder(step)
            if folder.name not in spared:
                discard(folder)

    def drop_past(self, step: int) -> None:
        """Delete checkpoints after `step`: the run goes on from there on another branch."""
        for later in self.steps():
            if later > step:
                discard(self._folder(later))
        for link in ("latest", "best"):
            path = self.directory / link
            if path.is_symlink() and not path.exists():
                path.unlink()
        if newest := self.newest():
            self._point("latest", newest.name)

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        found = (STEP_NAME.match(p.name) for p in self.directory.iterdir())
        return sorted(int(m.group(1)) for m in found if m)

    def newest(self) -> Path | None:
        """The newest whole checkpoint, if there is one."""
        step = self.newest_step()
        return None if step is None else self._folder(step)

    def newest_step(self) -> int | None:
        """The step of the newest whole checkpoint, if there is one."""
        steps = self.steps()
        return steps[-1] if steps else None

    def _folder(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _target(self, link: str) -> str | None:
        path = self.directory / link
        return os.readlink(path) if path.is_symlink() else None

    def _point(self, link: str, name: str) -> None:
        with replacing(self.directory / link) as fresh:
            fresh.symlink_to(name)

    def _sweep(self) -> None:
        """Remove what killed runs left half-written or half-deleted."""
        for path in self.directory.glob(f"{UNFINISHED}*"):
            remove(path)


def find_resume(store: CheckpointStore, mode: str) -> Path | None:
    """The checkpoint that `--resume auto|never|PATH` means; None starts afresh.

    Raises ModelError when PATH is no checkpoint.
    """
    if mode == "never":
        return None
    if mode == "auto":
        return store.newest()
    path = Path(mode).expanduser()
    if not (path / "state").is_dir():
        raise ModelError(
            f"--resume {mode} is no checkpoint (it has no folder state/). Give a folder such as "
            f"{store.directory}/step_000010, or auto or never."
        )
    return path.resolve()


def _disk_failure(error: BaseException) -> str | None:
    """What the disk refused; None when it was something else.

    Safetensors has an error of its own for a full disk, recognised by its text.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = RUST_FAILED.search(str(error))
    return found.group(1) if found else None
