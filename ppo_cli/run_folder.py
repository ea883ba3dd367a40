"""The run folder: created, locked and cleared for a new run; line files; checkpoints.

`metrics.jsonl` and `rollouts/` are written line by line; readers skip an incomplete last line.

A checkpoint is complete or absent; the newest and the best are kept. It is written under a hidden
name and renamed when it is complete, so that a name like `step_000010` always means a complete one,
even after a kill. It is written in the background, one at a time.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ppo_cli.atomic import (
    UNFINISHED,
    atomic_replace,
    delete,
    delete_atomically,
    move_into_place,
    sweep_unfinished,
    unfinished_path,
)
from ppo_cli.config.derived import pretrain_steps
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import check_folder
from ppo_cli.digests import NAMED_IN, require_intact, write_manifest
from ppo_cli.errors import DataError, ModelError, UserError, did_you_mean, plural, ppo
from ppo_cli.redact import build_redactor
from ppo_cli.spending import in_flight_file, merge_calls

if TYPE_CHECKING:
    from ppo_cli.config.schema.run import Config

# Names in a run folder; report and library read them too.
METRICS_FILE = "metrics.jsonl"
ROLLOUTS = "rollouts"
PRETRAINING_FILE = "pretraining.jsonl"
PREFIXES = {"train": "step", "val": "val", "pretraining": "pretraining"}
# Version of everything in a checkpoint's `state/`: raise it when the format of any part changes.
FORMAT = 2
FORMAT_BEFORE_NUMBERS = 1  # of checkpoints without a format number
_ROLLOUT_NAME = re.compile(r"^(?:step|val)_(\d+)\.jsonl$")


def rollout_file(run_dir: Path, step: int, split: str = "train") -> Path:
    """The file with the rollouts of a step; `split` is train, val or pretraining."""
    return run_dir / ROLLOUTS / f"{PREFIXES[split]}_{step:06d}.jsonl"


def rollout_steps(run_dir: Path, split: str = "train") -> list[int]:
    """Steps that have a rollouts file, oldest first."""
    names = (p.name for p in (run_dir / ROLLOUTS).glob(f"{PREFIXES[split]}_*.jsonl"))
    return sorted(int(m.group(1)) for m in map(_ROLLOUT_NAME.match, names) if m)


def drop_rollouts_past(run_dir: Path, step: int) -> None:
    """Delete rollout files of later steps, and unfinished files of killed runs."""
    for path in (run_dir / ROLLOUTS).glob("*"):
        match = _ROLLOUT_NAME.match(path.name)
        if path.name.startswith(UNFINISHED) or (match and int(match.group(1)) > step):
            path.unlink()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; an incomplete line of a killed run is skipped.

    Returns [] for a missing file; raises DataError for one that cannot be read.
    """
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(
            encoding="utf-8-sig", errors="replace"
        )  # an editor may add a byte-order mark
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    # A killed run may leave half a line.
    for row in text.split("\n"):
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with a step; values that are not numbers are dropped."""
    return [
        {
            key: value
            for key, value in line.items()
            if value is None or isinstance(value, int | float)
        }
        for line in read_lines(run_dir / METRICS_FILE)
        if isinstance(line.get("step"), int)
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
        # One redactor for all lines of the file.
        clean = build_redactor()
        file.writelines(_encode(line, clean) for line in lines)


class Encoded(str):
    """Numbers as base64, which `plain` does not redact: some letters of it may look like a key."""

    __slots__ = ()


def plain(value: Any, clean: Callable[[str], str] | None = None) -> Any:
    """Convert a value to plain JSON types: no numpy, no NaN, no secrets in values or names.

    Secrets are redacted before encoding: redacting JSON text could break it.
    """
    clean = clean or build_redactor()
    if isinstance(value, str):
        return value if isinstance(value, Encoded) else clean(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _with_clean_names(value, clean)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, clean) for v in value]
    # Imported late: most lines have no numpy values.
    import numpy as np

    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), clean)
    return clean(str(value))


def _with_clean_names(value: Mapping[Any, Any], clean: Callable[[str], str]) -> dict[str, Any]:
    """Return a mapping with redacted names; equal names get a star."""
    fields: dict[str, Any] = {}
    for key, inner in value.items():
        name = clean(str(key))
        while name in fields:  # two names that differ only in their secrets
            name += "*"
        fields[name] = plain(inner, clean)
    return fields


def _encode(line: Mapping[str, Any], clean: Callable[[str], str] | None = None) -> bytes:
    text = json.dumps(plain(line, clean), ensure_ascii=False, allow_nan=False)
    # A sampler may cut a character in two: backslashreplace writes lone surrogates as \udXXX.
    return text.encode("utf-8", "backslashreplace") + b"\n"


LABELS_FILE = "labels.jsonl"  # labels that people gave responses in the page
CRITIC_FILE = "critic.jsonl"  # how well the critic predicts, a line per step
JUDGES_FILE = "judges.jsonl"  # what each judge is asked, as the run read it at its start
WRITTEN_BY = "# Written by "  # first line of config.yaml, followed by versions and machine
FORK_LINE = "# Fork of {} at step {}\n"  # the second one of a fork, with its run
_FORK = re.compile(FORK_LINE.strip().format("(.+)", r"(\d+)"))
# What `set_aside` moves: everything that belongs to one run.
PARTS = (
    METRICS_FILE, PRETRAINING_FILE, ROLLOUTS, "checkpoints", "config.yaml", "tensorboard",
    "report.html", LABELS_FILE, JUDGES_FILE, CRITIC_FILE,
)  # fmt: skip

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
    """Return the settings in a run's `config.yaml` only; UserError as in `resolve`."""
    from ppo_cli.config.resolve import resolve

    files = [run / "config.yaml"]
    return resolve(flags={}, preset=None, config_files=files, overrides=[], environ={}).config


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

    def set_aside(self, *, all_of_it: bool = True) -> Path | None:
        """Move an earlier run's files to `earlier_1`, `earlier_2` …; returns the folder, or None.

        Without `all_of_it` the spending files stay: a budget covers all starts of a run. Partial
        checkpoints of a run that was killed in its first save are removed.
        """
        for store in (self.checkpoints, *self.path.glob("earlier_*/checkpoints")):
            sweep_unfinished(store)
        # Everything that a run writes, and its spending if asked for.
        present = [self.path / name for name in PARTS if (self.path / name).exists()]
        if all_of_it:
            present += sorted(self.path.glob(SPENT))
        if not present:
            return None
        # The first free number.
        number = 1
        while (self.path / f"earlier_{number}").exists():
            number += 1
        earlier = self.path / f"earlier_{number}"
        earlier.mkdir()
        for path in present:
            os.replace(path, earlier / path.name)
        return earlier


# Names of checkpoints, the files that show a model, and the text of safetensors' disk errors.
STEP_NAME = re.compile(r"^step_(\d{6,})$")
MODEL_FILES = ("config.json", "adapter_config.json")
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
        """Delete all but the newest `keep` checkpoints and the best one; None keeps all."""
        if self._keep is None:
            return
        spared = {self._link_target("latest"), self._link_target("best")}
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

    def newest(self) -> Path | None:
        """The newest complete checkpoint, or None."""
        step = self.newest_step()
        return None if step is None else self._folder(step)

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

    Raises ModelError if PATH is not a checkpoint.
    """
    if mode == "never":
        return None
    if mode == "auto":
        return store.newest()
    path = Path(mode).expanduser()
    if not (path / "state").is_dir():
        raise ModelError(
            f"--resume {mode} is not a checkpoint (it has no folder state/). Name a folder such as "
            f"{store.directory}/step_000010, or auto or never."
        )
    return path.resolve()


def read_state(folder: Path) -> dict[str, Any]:
    """Return the saved state of a checkpoint; ModelError if it cannot be resumed.

    Every resume calls this before it loads anything of the checkpoint.
    """
    path = folder / NAMED_IN
    try:
        state: dict[str, Any] = json.loads(path.read_text())
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


def refuse_late_pretraining(config: Config, checkpoint: Path) -> None:
    """Raise UserError if the critic is to be pretrained after steps of training without that.

    Whoever goes on from a run that began with pretraining has its critic, and pretrains no more.
    """
    saved = checkpoint / NAMED_IN
    if not pretrain_steps(config) or not saved.is_file():
        return
    run = json.loads(saved.read_text())["run"]
    if run["step"] > 0 and not run.get("pretraining"):
        raise UserError(
            f"{checkpoint} has {plural(run['step'], 'step')} of training, and critic pretraining "
            "comes before the first: leave --critic_pretrain_steps and --critic_pretrain_until "
            f"out, or start a new run with --model {checkpoint}/actor."
        )


@dataclass(frozen=True)
class ModelSource:
    """A model: the name as typed, the path to load, and the run that it belongs to."""

    name: str
    path: str
    run: Path | None = None


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


def find_source(word: str) -> ModelSource:
    """The model that MODEL, RUN, RUN@STEP or a checkpoint means; ModelError if there is none."""
    path, which = word, ""
    if "@" in word and not Path(word).expanduser().exists():
        # An @ separates the checkpoint, unless it is part of an existing path.
        path, _, which = word.rpartition("@")
    folder = Path(path).expanduser()
    # A model folder or a hub name is used as it is.
    if not which and (not folder.is_dir() or (folder / "config.json").exists()):
        check_folder(model_folder(path), "MODEL")
        return ModelSource(word, model_folder(path))
    model = find_model(folder, which or None, critic=False).resolve()
    run = model.parents[2]
    return ModelSource(word, str(model), run if (run / "config.yaml").is_file() else None)


def find_model(source: Path, checkpoint: str | None, *, critic: bool) -> Path:
    """The folder of the model in a run or checkpoint; ModelError if there is none."""
    if not source.is_dir():
        near = [p.name for p in source.parent.iterdir()] if source.parent.is_dir() else []
        raise ModelError(
            f"There is no folder {source}.{did_you_mean(source.name, near)} Name a run (an "
            "--output_dir) or a checkpoint."
        )
    # A run folder, one checkpoint, or one model: tried in this order.
    store = _find_store(source)
    if store is not None:
        return _model_in_checkpoint(_choose_checkpoint(store, checkpoint), critic=critic)
    if checkpoint is not None:
        raise ModelError(f"{source} is not a run, so --checkpoint has nothing to choose from.")
    if has_model(source):
        if critic and source.name != "critic":
            raise ModelError(f"{source} is one model: leave --critic out, or name its checkpoint.")
        return source
    return _model_in_checkpoint(source, critic=critic)


def _find_store(source: Path) -> CheckpointStore | None:
    """The checkpoints of a run folder, or of the folder `checkpoints/` itself."""
    for folder in (source / "checkpoints", source):
        store = CheckpointStore(folder, keep=1)
        if store.steps():
            return store
    if (source / "checkpoints").is_dir() or (source / "metrics.jsonl").exists():
        raise ModelError(
            f"{source} has no complete checkpoint yet. A run writes one every --save_freq steps "
            "and one at the end."
        )
    return None


def _choose_checkpoint(store: CheckpointStore, checkpoint: str | None) -> Path:
    """The checkpoint that `--checkpoint best|latest|10|step_000010|PATH` means; None is the latest.

    ModelError if it does not exist.
    """
    newest = store.newest()
    assert newest is not None
    # By a fixed word, by step, by name, or by path.
    if checkpoint is None or checkpoint == "latest":
        return newest
    if checkpoint.isdigit():
        checkpoint = f"step_{int(checkpoint):06d}"
    names = [f"step_{step:06d}" for step in store.steps()]
    if checkpoint in names or checkpoint == "best":
        path = store.directory / checkpoint
        if not path.is_dir():
            raise ModelError(
                f"{store.directory} has no best checkpoint: only validation (--val_files) shows "
                f"which one it is. There are {', '.join(names)}."
            )
        return path
    path = Path(checkpoint).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"There is no checkpoint {checkpoint} in {store.directory}, and no such folder."
            f"{did_you_mean(checkpoint, [*names, 'best', 'latest'])} There are {', '.join(names)}."
        )
    return path


def _model_in_checkpoint(checkpoint: Path, *, critic: bool) -> Path:
    """Return the actor's or critic's folder in a checkpoint; ModelError if missing."""
    folder = checkpoint / ("critic" if critic else "actor")
    if has_model(folder):
        return folder
    # A damaged checkpoint gets its own message first.
    require_intact(checkpoint, below=folder.name)
    if critic and has_model(checkpoint / "actor"):
        raise ModelError(f"{checkpoint} has no critic: its advantage estimator does not use one.")
    raise ModelError(
        f"{checkpoint} is neither a run, a checkpoint nor a model: {folder.name}/ with a "
        "config.json is missing."
    )


def has_model(folder: Path) -> bool:
    """Whether a folder is a saved model or adapter."""
    return any((folder / name).exists() for name in MODEL_FILES)


def _disk_failure(error: BaseException) -> str | None:
    """The reason of a disk error; None if the error has another cause.

    Safetensors raises its own error for a full disk, which is recognised by its text.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    match = SAFETENSORS_DISK_ERROR.search(str(error))
    return match.group(1) if match else None
