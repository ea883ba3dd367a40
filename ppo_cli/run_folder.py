"""The run folder on the disk: made, checked, cleared for a new run; line files; checkpoints.

`metrics.jsonl` and `rollouts/` are written as whole lines; a reader skips a cut last line.

A checkpoint is whole or not there; the newest and the best are kept. It is written under a hidden
name and renamed when it is complete, so that a name like `step_000010` always means a whole one,
whenever the process was killed. It is written while training goes on, one at a time.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
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
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import check_folder
from ppo_cli.digests import require_intact, write_manifest
from ppo_cli.errors import DataError, ModelError, UserError, did_you_mean
from ppo_cli.redact import build_redactor
from ppo_cli.spending import in_flight_file, merge_calls

if TYPE_CHECKING:
    from ppo_cli.config.schema.run import Config

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
    """The whole lines of a file; a line that a killed run left torn is passed over.

    Raises DataError where the file is there and cannot be read.
    """
    lines: list[dict[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")  # an editor may mark it
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    for row in text.split("\n"):
        try:
            line = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without torn ones and without what is no number."""
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
    """Append one line and see it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(_encode(line))
        file.flush()
        os.fsync(file.fileno())


def replace_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of lines atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(path) as fresh, fresh.open("wb") as file:
        clean = build_redactor()
        file.writelines(_encode(line, clean) for line in lines)


def plain(value: Any, clean: Callable[[str], str] | None = None) -> Any:
    """Turn anything into what JSON can say: no numpy, no NaN, no secrets in values or names.

    Secrets go before JSON is made: a text that is JSON already could break.
    """
    clean = clean or build_redactor()
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _with_clean_names(value, clean)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, clean) for v in value]
    import numpy as np

    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), clean)
    return clean(str(value))


def _with_clean_names(value: Mapping[Any, Any], clean: Callable[[str], str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, inner in value.items():
        name = clean(str(key))
        while name in fields:  # two names that differ in their secrets alone
            name += "*"
        fields[name] = plain(inner, clean)
    return fields


def _encode(line: Mapping[str, Any], clean: Callable[[str], str] | None = None) -> bytes:
    text = json.dumps(plain(line, clean), ensure_ascii=False, allow_nan=False)
    # A sampler may cut a character in half: backslashreplace writes the half as JSON's \udXXX.
    return text.encode("utf-8", "backslashreplace") + b"\n"


LABELS_FILE = "labels.jsonl"  # what people gave responses in the page
WRITTEN_BY = "# Written by "  # of config.yaml, before versions and machine
PARTS = (
    "metrics.jsonl", "rollouts", "checkpoints", "config.yaml", "tensorboard", "report.html",
    LABELS_FILE,
)  # fmt: skip

LOCK = ".lock"  # while a run goes on
SPENT = "judge_calls*"  # the files of `spending`, for each judge


def paid_calls(run_dir: Path) -> list[dict[str, Any]]:
    """The calls that a run's judges were paid for, over all its sessions.

    Those in flight count at their worst case.
    """
    files = sorted({file.with_suffix(".jsonl") for file in run_dir.glob(SPENT)})
    return [
        call
        for file in files
        for call in merge_calls(read_lines(in_flight_file(file)), read_lines(file))
    ]


def check_run_folder(run: Path) -> None:
    """Raise DataError for a folder that is no run."""
    if not run.is_dir():
        raise DataError(f"{run}: there is no such folder. RUN is what --output_dir named.")
    begun = (run / METRICS_FILE).exists() or (run / "rollouts").is_dir()
    if not begun and not paid_calls(run):
        raise DataError(
            f"{run} is not a run folder: it has no {METRICS_FILE}. RUN is what --output_dir "
            "named; a run writes its first line after its first step."
        )


def run_settings(run: Path) -> Config:
    """Return the settings in `config.yaml` of a run, and no others; UserError as in `resolve`."""
    from ppo_cli.config.resolve import resolve

    files = [run / "config.yaml"]
    return resolve(flags={}, preset=None, config_files=files, overrides=[], environ={}).config


class RunFolder:
    """Paths inside `--output_dir`, or whatever flag named the folder."""

    def __init__(self, path: Path, flag: str = "--output_dir") -> None:
        self.path = path
        self._flag = flag
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
                f"{self._flag} {self.path}: a file is in the way; choose another folder."
            ) from error
        except OSError as error:
            raise UserError(
                f"{self._flag} {self.path} cannot be written: {error.strerror}. Choose another "
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
            glances = 3  # who looks whether a run goes on holds the file for an instant
            while True:
                # A file, and open for writing: between machines nothing else can be claimed.
                claim = (self.path / LOCK).open("a")
                try:
                    fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(os.fstat(claim.fileno()), (self.path / LOCK).stat()):
                        return claim
                except BlockingIOError:
                    if not glances:
                        claim.close()
                        raise UserError(
                            f"{self._flag} {self.path} belongs to a run that still goes on. Let it "
                            "end, or choose another folder."
                        ) from None
                    glances -= 1
                    time.sleep(0.1)
                except FileNotFoundError:
                    pass
                claim.close()  # of a run that has just ended, which took the file away
        return None

    def write_config(self, text: str) -> None:
        """Write `config.yaml` atomically."""
        with atomic_replace(self.path / "config.yaml") as fresh:
            fresh.write_text(text)

    def set_aside(self, *, all_of_it: bool = True) -> Path | None:
        """Move what an earlier run left to `earlier_1`, `earlier_2` …; return where it is now.

        What it spent stays, unless `all_of_it` goes: a budget is for all starts of a run. Partial
        checkpoints, of a run that was killed in its first save, are removed.
        """
        for store in (self.checkpoints, *self.path.glob("earlier_*/checkpoints")):
            sweep_unfinished(store)
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


STEP_NAME = re.compile(r"^step_(\d{6,})$")
MODEL_FILES = ("config.json", "adapter_config.json")
RUST_FAILED = re.compile(r"([^:\s][^:]*) \(os error \d+\)")


class CheckpointStore:
    """All checkpoints of one run."""

    def __init__(self, directory: Path, keep: int | None) -> None:
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
            unfinished_path(final).mkdir(parents=True)
            filled = fill(unfinished_path(final))
        in_flight: Future[None] = Future()
        self._in_flight = in_flight

        def finish(filled: Future[None]) -> None:
            try:
                with self._whole_or_nothing(step):
                    filled.result()
                    write_manifest(unfinished_path(final))
                    move_into_place(unfinished_path(final), final)
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
                delete(unfinished_path(self._folder(step)))
            cause = _disk_failure(error)
            if cause is None:
                raise
            raise UserError(
                f"The checkpoint of step {step} could not be written to {self.directory}: "
                f"{cause}. Free some space or choose another --output_dir, then "
                "run the same command again: it goes on from the last checkpoint."
            ) from error

    def _prune(self) -> None:
        """Delete all but the newest `keep` checkpoints and the best one; None keeps all."""
        if self._keep is None:
            return
        spared = {self._target("latest"), self._target("best")}
        for step in self.steps()[: -self._keep]:
            folder = self._folder(step)
            if folder.name not in spared:
                delete_atomically(folder)

    def drop_past(self, step: int) -> None:
        """Delete checkpoints after `step`: the run goes on from there on another branch."""
        for later in self.steps():
            if later > step:
                delete_atomically(self._folder(later))
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
        with atomic_replace(self.directory / link) as fresh:
            fresh.symlink_to(name)

    def _sweep(self) -> None:
        """Remove what killed runs left half-written or half-deleted."""
        sweep_unfinished(self.directory)


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


@dataclass(frozen=True)
class ModelSource:
    """A model as it was typed, what loads, and the run that it is of."""

    name: str
    path: str
    run: Path | None = None


def find_source(word: str) -> ModelSource:
    """The model that MODEL, RUN, RUN@STEP or a checkpoint means; raises ModelError if none is."""
    path, which = word, ""
    if "@" in word and not Path(word).expanduser().exists():
        path, _, which = word.rpartition("@")
    folder = Path(path).expanduser()
    if not which and (not folder.is_dir() or (folder / "config.json").exists()):
        check_folder(path, "MODEL")
        return ModelSource(word, model_folder(path))
    model = find_model(folder, which or None, critic=False).resolve()
    run = model.parents[2]
    return ModelSource(word, str(model), run if (run / "config.yaml").is_file() else None)


def find_model(source: Path, checkpoint: str | None, *, critic: bool) -> Path:
    """The folder of the model that is meant; raises ModelError when there is none."""
    if not source.is_dir():
        near = [p.name for p in source.parent.iterdir()] if source.parent.is_dir() else []
        raise ModelError(
            f"There is no folder {source}.{did_you_mean(source.name, near)} Name a run (what "
            "--output_dir named) or a checkpoint."
        )
    store = _store_of(source)
    if store is not None:
        return _part_of(_choose(store, checkpoint), critic=critic)
    if checkpoint is not None:
        raise ModelError(f"{source} is no run, so --checkpoint has nothing to choose from.")
    if holds_model(source):
        if critic and source.name != "critic":
            raise ModelError(f"{source} is one model: leave --critic out, or name its checkpoint.")
        return source
    return _part_of(source, critic=critic)


def _store_of(source: Path) -> CheckpointStore | None:
    """The checkpoints of a run folder, or of the folder `checkpoints/` itself."""
    for folder in (source / "checkpoints", source):
        store = CheckpointStore(folder, keep=1)
        if store.steps():
            return store
    if (source / "checkpoints").is_dir() or (source / "metrics.jsonl").exists():
        raise ModelError(
            f"{source} has no whole checkpoint yet. A run writes one each --save_freq steps, and "
            "one at its end."
        )
    return None


def _choose(store: CheckpointStore, checkpoint: str | None) -> Path:
    """The checkpoint that `--checkpoint best|latest|10|step_000010|PATH` means."""
    newest = store.newest()
    assert newest is not None
    if checkpoint is None or checkpoint == "latest":
        return newest
    if checkpoint.isdigit():
        checkpoint = f"step_{int(checkpoint):06d}"
    known = [f"step_{step:06d}" for step in store.steps()]
    if checkpoint in known or checkpoint == "best":
        path = store.directory / checkpoint
        if not path.is_dir():
            raise ModelError(
                f"{store.directory} has no best checkpoint: only validation (--val_files) shows "
                f"which one it is. There are {', '.join(known)}."
            )
        return path
    path = Path(checkpoint).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"There is no checkpoint {checkpoint} in {store.directory}, and no such folder."
            f"{did_you_mean(checkpoint, [*known, 'best', 'latest'])} There are {', '.join(known)}."
        )
    return path


def _part_of(checkpoint: Path, *, critic: bool) -> Path:
    folder = checkpoint / ("critic" if critic else "actor")
    if holds_model(folder):
        return folder
    require_intact(checkpoint, below=folder.name)
    if critic and holds_model(checkpoint / "actor"):
        raise ModelError(f"{checkpoint} has no critic: its advantages need none.")
    raise ModelError(
        f"{checkpoint} is neither a run, a checkpoint nor a model: {folder.name}/ with a "
        "config.json is missing."
    )


def holds_model(folder: Path) -> bool:
    """Whether a folder is a saved model, whole or an adapter."""
    return any((folder / name).exists() for name in MODEL_FILES)


def _disk_failure(error: BaseException) -> str | None:
    """What the disk refused; None when it was something else.

    Safetensors has an error of its own for a full disk, recognised by its text.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = RUST_FAILED.search(str(error))
    return found.group(1) if found else None
