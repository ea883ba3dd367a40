"""The checkpoints of a run: complete or absent; the newest and the best are kept.

A checkpoint is written under a hidden name and renamed when it is complete, so that a name like
`step_000010` always means a complete one, even after a kill. It is written in the background, one
at a time.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ppo_cli.atomic import (
    atomic_replace,
    delete,
    delete_atomically,
    move_into_place,
    sweep_unfinished,
    unfinished_path,
)
from ppo_cli.digests import NAMED_IN, write_manifest
from ppo_cli.errors import ModelError, UserError, plural, ppo
from ppo_cli.paths import load_json, read_text, user_path
from ppo_cli.run_folder.restraints import find_pending, read_restraints

# Version of everything in a checkpoint's `state/`: raise it when the format of any part changes.
FORMAT = 2
FORMAT_BEFORE_NUMBERS = 1  # of checkpoints without a format number
STEP_NAME = re.compile(r"^step_(\d{6,})$")
# The reason in the text of a disk error of safetensors.
SAFETENSORS_DISK_ERROR = re.compile(r"([^:\s][^:]*) \(os error \d+\)")


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, keep: int | None) -> None:
        self.directory = directory
        self._keep = keep
        self._in_flight: Future[None] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Remove leftovers of killed runs; at the end, wait for the checkpoint in progress."""
        self._sweep()
        try:
            yield
        except Exception:
            # The first error is reported; one of the checkpoint would hide it.
            if self._in_flight is not None:
                self._in_flight.exception()
                self._in_flight = None
            raise
        self.wait_for_save()

    def begin_save(
        self, step: int, fill: Callable[[Path], Future[None]], *, best: bool = False
    ) -> None:
        """Start a checkpoint: `fill` gets an empty folder, which becomes the checkpoint of `step`.

        The future of `fill` finishes when all is written, or failed. With `best`, the link `best`
        points to this checkpoint, which pruning then keeps. Waits for the previous checkpoint.
        """
        self.wait_for_save()
        # Leftovers of a failed save would be in the way of the new one.
        self._sweep()
        final = self._folder(step)
        with self._remove_if_failed(step):
            unfinished_path(final).mkdir(parents=True)
            filled = fill(unfinished_path(final))
        # The rest runs when the engine has written its files, on its thread.
        in_flight: Future[None] = Future()
        self._in_flight = in_flight

        def finish(filled: Future[None]) -> None:
            """Complete a checkpoint whose files are written: digests, final name, links.

            Then old checkpoints are pruned. The result or the error goes into `in_flight`.
            """
            try:
                with self._remove_if_failed(step):
                    filled.result()
                    # The checkpoint appears under its name only when it is complete and has its
                    # digests.
                    write_manifest(unfinished_path(final))
                    move_into_place(unfinished_path(final), final)
                    self._link("latest", final.name)
                    if best:
                        self._link("best", final.name)
                    self._prune()
            except BaseException as error:  # raised by `wait_for_save`
                in_flight.set_exception(error)
            else:
                in_flight.set_result(None)

        filled.add_done_callback(finish)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is still being written."""
        return self._in_flight is not None and not self._in_flight.done()

    def raise_save_error(self) -> None:
        """Raise the error of the background checkpoint, if it has ended."""
        if not self.busy:
            self.wait_for_save()

    def wait_for_save(self) -> None:
        """Wait until the checkpoint in progress is complete; raises its error.

        UserError if the disk was the cause.
        """
        in_flight = self._in_flight
        if in_flight is not None:
            try:
                in_flight.result()
            finally:
                # Ctrl-C ends the waiting, not the writing.
                self._in_flight = None if in_flight.done() else in_flight

    @contextmanager
    def _remove_if_failed(self, step: int) -> Iterator[None]:
        """Remove a partial checkpoint if writing fails; a disk error becomes a UserError."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):
                # Free the space first: a full disk may be the cause.
                delete(unfinished_path(self._folder(step)))
            cause = _disk_failure(error)
            if cause is None:
                raise
            raise UserError(
                f"The checkpoint of step {step} could not be written to {self.directory}: "
                f"{cause}. Free some space or choose another --output_dir, then "
                "run the same command again: it resumes from the last checkpoint."
            ) from error

    def _prune(self) -> None:
        """Delete all but the newest `keep` checkpoints and the best one; None keeps all.

        Those that the run went back to stay: one is the reference.
        """
        if self._keep is None:
            return
        spared = {self._link_target("latest"), self._link_target("best")}
        spared |= {self._folder(r.to).name for r in read_restraints(self.directory.parent)}
        # The newest `keep` are not in this slice; `latest` and `best` may point to older ones.
        for step in self.steps()[: -self._keep]:
            folder = self._folder(step)
            if folder.name not in spared:
                delete_atomically(folder)

    def delete_after(self, step: int) -> None:
        """Delete checkpoints after `step`: a resumed run replaces them."""
        for later in self.steps():
            if later > step:
                delete_atomically(self._folder(later))
        # The links may point to what was just deleted.
        for link in ("latest", "best"):
            path = self.directory / link
            if path.is_symlink() and not path.exists():
                path.unlink()
        if newest := self.newest():
            self._link("latest", newest.name)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = (STEP_NAME.match(p.name) for p in self.directory.iterdir())
        return sorted(int(m.group(1)) for m in matches if m)

    def newest(self, last: int | None = None) -> Path | None:
        """The newest complete checkpoint up to the step `last`, or None."""
        steps = [step for step in self.steps() if last is None or step <= last]
        return self._folder(steps[-1]) if steps else None

    def newest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        steps = self.steps()
        return steps[-1] if steps else None

    def _folder(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _link_target(self, link: str) -> str | None:
        path = self.directory / link
        return os.readlink(path) if path.is_symlink() else None

    def _link(self, link: str, name: str) -> None:
        with atomic_replace(self.directory / link) as fresh:
            fresh.symlink_to(name)

    def _sweep(self) -> None:
        """Remove folders that killed runs left half-written or half-deleted."""
        sweep_unfinished(self.directory)


def find_resume(store: CheckpointStore, mode: str) -> Path | None:
    """The checkpoint that `--resume auto|never|PATH` means; None for a new run.

    That is the newest one, or while a return is pending the newest one up to where it leads.
    Raises ModelError if PATH is not a checkpoint.
    """
    if mode == "never":
        return None
    if mode == "auto":
        pending = find_pending(store.directory.parent)
        return store.newest(pending.to if pending else None)
    path = user_path(mode)
    if not (path / "state").is_dir():
        raise ModelError(
            f"--resume {mode} is not a checkpoint (it has no folder state/). Name a folder such as "
            f"{store.directory}/step_000010, or auto or never."
        )
    return path.resolve()


def step_of(checkpoint: Path | None) -> int:
    """The step of a checkpoint of a run; 0, the start, without one and for a folder of the user."""
    match = checkpoint and STEP_NAME.match(checkpoint.name)
    return int(match[1]) if match else 0


def read_state(folder: Path) -> dict[str, Any]:
    """Return the saved state of a checkpoint; ModelError if it cannot be resumed.

    Every resume calls this before it loads anything of the checkpoint.
    """
    path = folder / NAMED_IN
    try:
        state: dict[str, Any] = load_json(read_text(path))
        # The format comes first: other formats have other fields.
        saved_format = state.get("format", FORMAT_BEFORE_NUMBERS)
        if saved_format == FORMAT:
            state["run"]["step"], state["order"], state["reward"], state["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"The checkpoint {folder} is damaged: {path.name} cannot be read ({error}). Name "
            "another one with --resume PATH, or start again with --resume never."
        ) from error
    if saved_format != FORMAT:
        export = ppo(f"export {shlex.quote(str(folder))} --out DIR")
        raise ModelError(
            f"The checkpoint {folder} has format {saved_format}, and this version of ppo-cli only "
            f"resumes format {FORMAT}: start again in another --output_dir, or use the version "
            f"that wrote it. `{export}` still exports it as a model for --model."
        )
    return state


def refuse_late_pretraining(pretrain_steps: int, checkpoint: Path) -> None:
    """Raise UserError if the critic is to be pretrained after steps of training without that.

    Whoever goes on from a run that began with pretraining has its critic, and pretrains no more.
    """
    saved = checkpoint / NAMED_IN
    if not pretrain_steps or not saved.is_file():
        return
    run = read_state(checkpoint)["run"]
    if run["step"] > 0 and not run.get("pretraining"):
        raise UserError(
            f"{checkpoint} has {plural(run['step'], 'step')} of training, and critic pretraining "
            "comes before the first: leave --critic_pretrain_steps and --critic_pretrain_until "
            f"out, or start a new run with --model {checkpoint}/actor."
        )


def _disk_failure(error: BaseException) -> str | None:
    """The reason of a disk error; None if the error has another cause.

    Safetensors raises its own error for a full disk, which is recognised by its text.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    match = SAFETENSORS_DISK_ERROR.search(str(error))
    return match.group(1) if match else None
