"""The copy of a run folder at an address (s3://…): kept up to date, and fetched elsewhere.

The run itself is local. A thread copies what has changed: first a checkpoint's files, then the
small ones, at last the index. That lists the files of the copy, and what is not in it does not
count: a reader has a complete state, however an upload ended. What the local folder no longer has
is deleted after that. Each round copies the newest state, so nothing piles up while the store is
away.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.addresses import cache_folder, check_address, restore
from ppo_cli.atomic import atomic_replace, delete, is_running, sweep_unfinished, unfinished_path
from ppo_cli.digests import MANIFEST
from ppo_cli.errors import DataError, Interrupted, UserError, first_line, is_address, plural
from ppo_cli.run_folder import LABELS_FILE, ROLLOUTS, RunFolder

INDEX = "index.json"  # of a copy: its files with bytes and time, and the links
LEASE = "lease.json"  # who writes the copy
FETCHING = ".fetching"  # in a folder whose fetch was cut off
MARK = ".store"  # in a folder: the address of its copy
POLL_S = 2.0
LEASE_S = 60.0  # without a sign of life, another machine takes over
PATIENCE_S = 60.0  # for a store that does not answer, at the start and at the end
READERS = 8
# Stores in which a file appears when it is complete; elsewhere it is renamed into place.
OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "memory")
_CHECKPOINT = re.compile(r"checkpoints/(step_\d+)/")

Files = dict[str, list[int]]  # name -> bytes and time of change in ns


def scan(folder: Path) -> Files:
    """Return the files of a run folder that belong into the copy; hidden ones do not."""
    files: Files = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in (name for name in names if not name.startswith(".")):
            path = Path(root, name)
            with suppress(FileNotFoundError):
                status = path.stat()
                files[path.relative_to(folder).as_posix()] = [status.st_size, status.st_mtime_ns]
    # SQLite writes to a second file first; the copy has one.
    for log in (name for name in list(files) if name.endswith((".sqlite-wal", ".sqlite-shm"))):
        size, changed = files.pop(log)
        if log.endswith("-wal") and (main := files.get(log[:-4])):
            files[log[:-4]] = [main[0] + size, max(main[1], changed)]
    return files


def step_of(name: str) -> str:
    """Return the checkpoint that a file belongs to, such as `step_000010`; empty for others."""
    match = _CHECKPOINT.match(name)
    return match[1] if match else ""


def is_earlier(name: str) -> bool:
    """Whether a file belongs to a run that was set aside."""
    return name.startswith("earlier_")


def checkpoints_in(files: Files) -> dict[str, int]:
    """Return the complete checkpoints with the time of each."""
    manifests = (name for name in files if name.endswith(f"/{MANIFEST}"))
    return {step_of(name): files[name][1] for name in manifests if step_of(name)}


class Store:
    """The files at an address. All methods raise the errors of the address's file system."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        self._fs, self._root = url_to_fs(url, use_listings_cache=False)
        self._is_object = urlsplit(url).scheme in OBJECTS

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file; None if there is none."""
        try:
            content: dict[str, Any] = json.loads(self._fs.cat_file(f"{self._root}/{name}"))
            return content
        except FileNotFoundError:
            return None

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file."""
        with tempfile.NamedTemporaryFile("w") as file:
            json.dump(content, file)
            file.flush()
            self.put(Path(file.name), name)

    def put(self, local: Path, name: str) -> None:
        """Copy a file to the store, where it appears when it is complete."""
        target = f"{self._root}/{name}"
        if self._is_object:
            self._fs.put_file(str(local), target)
            return
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        fresh = f"{target}.part"
        self._fs.put_file(str(local), fresh)
        self._fs.mv(fresh, target)

    def get(self, name: str, local: Path) -> None:
        """Copy a file from the store."""
        self._fs.get_file(f"{self._root}/{name}", str(local))

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")


def fetch(store: Store, index: dict[str, Any], folder: Path) -> None:
    """Bring a folder to the state of the index; a fetch that is cut off is repeated next time."""
    from concurrent.futures import ThreadPoolExecutor

    folder.mkdir(parents=True, exist_ok=True)
    (folder / FETCHING).touch()
    files: Files = {name: entry for name, entry in index["files"].items() if not is_earlier(name)}
    present = scan(folder)
    for name in present.keys() - files.keys():
        if name.startswith(("checkpoints/", f"{ROLLOUTS}/")):
            delete(folder / name)
    # A checkpoint gets its name when it is complete.
    complete = checkpoints_in(present)
    steps = checkpoints_in(files)
    kept = {step for step, time_ns in steps.items() if complete.get(step) == time_ns}
    partial = {step: unfinished_path(folder / "checkpoints" / step) for step in steps.keys() - kept}

    def get(name: str) -> None:
        step = step_of(name)
        if present.get(name) == files[name] or step in kept:
            return
        if name == LABELS_FILE and present.get(name, (0, 0))[1] > files[name][1]:
            return  # given here since
        path = partial[step] / name.split("/", 2)[2] if step else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for log in ("-wal", "-shm"):  # of the database that is replaced
            delete(path.with_name(path.name + log))
        with atomic_replace(path) as fresh:
            store.get(name, fresh)
            os.utime(fresh, ns=(files[name][1], files[name][1]))

    for path in partial.values():
        delete(path)
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(get, files))
    for step, path in partial.items():
        delete(folder / "checkpoints" / step)
        os.replace(path, folder / "checkpoints" / step)
    for link, step in index["links"].items():
        with atomic_replace(folder / "checkpoints" / link) as fresh:
            fresh.symlink_to(step)
    (folder / MARK).write_text(store.url)
    (folder / FETCHING).unlink()


def localise(word: str | os.PathLike[str], *, small: bool = False) -> Path:
    """Return the local path of RUN, RUN@STEP or a checkpoint: what is at an address is copied.

    `small` leaves the checkpoints out. Raises DataError if there is no run at the address.
    """
    text = restore(word)
    if text.startswith("file:"):
        return Path("/", text.removeprefix("file://"))
    if not is_address(text):
        return Path(word).expanduser()
    text, at, step = text.partition("@")
    url, _, below = text.partition("/checkpoints/")
    try:
        check_address(url)
        store = Store(url)
        index = store.read(INDEX)
        if index is None:
            raise DataError(f"{url} has no run: {INDEX} is missing there.")
        if small:
            index["files"] = {
                name: entry
                for name, entry in index["files"].items()
                if not step_of(name) or name.endswith(MANIFEST)
            }
        folder = Path(cache_folder("glances" if small else "copies", url)).expanduser()
        fetch(store, index, folder)
    except UserError:
        raise
    except ValueError as error:
        raise DataError(f"{error}.") from None
    except Exception as error:  # each file system raises errors of its own
        raise DataError(f"{url} cannot be read: {first_line(error)}.") from error
    return folder / "checkpoints" / below if below else Path(f"{folder}{at}{step}")


@dataclass
class Mirror:
    """Keeps the copy of a run folder up to date, in a thread of its own."""

    store: Store
    folder: Path
    tell: Callable[[str], None]
    index: dict[str, Any]
    _copied: Files = field(default_factory=dict)  # what the store has, in the index or not
    _is_down: bool = False
    _taken_by: str | None = None
    _ended: threading.Event = field(default_factory=threading.Event)  # no more rounds
    _closed: threading.Event = field(default_factory=threading.Event)  # no more signs of life
    _rounds: threading.Thread | None = None

    def start(self) -> None:
        """Begin to copy."""
        sweep_unfinished(self.folder)
        self._copied = dict(self.index["files"])
        self._rounds = threading.Thread(target=self._copy_changes, daemon=True)
        self._rounds.start()
        threading.Thread(target=self._renew_lease, daemon=True).start()

    def close(self) -> str:
        """Copy what is left; return why it could not be done, or an empty string."""
        self._ended.set()
        files = scan(self.folder).items()
        left = [entry[0] for name, entry in files if self._copied.get(name) != entry]
        if left:
            amount = f"{plural(len(left), 'file')} ({sum(left) / 1e6:,.1f} MB)"
            self.tell(f"Copying the last {amount} to {self.store.url}.")
        assert self._rounds is not None
        self._rounds.join()
        until = time.monotonic() + PATIENCE_S
        while problem := self._try_to_copy():
            if self._taken_by or time.monotonic() > until:
                break
            time.sleep(POLL_S)
        self._closed.set()
        if not self._taken_by:
            with suppress(Exception):
                self.store.remove(LEASE)
        return problem

    def _copy_changes(self) -> None:
        """Copy in rounds, at most a quarter of the time; a large round delays the next one."""
        pause = POLL_S
        while not self._ended.wait(pause):
            began = time.monotonic()
            self._try_to_copy()
            pause = max(POLL_S, 3 * (time.monotonic() - began))

    def _renew_lease(self) -> None:
        """Write a sign of life, unless another machine has taken over."""
        while not self._closed.wait(LEASE_S / 3):
            with suppress(Exception):  # a store that is down is told by the other thread
                lease = self.store.read(LEASE)
                if lease is not None and not _is_mine(lease):
                    self._taken_by = f"{lease['host']} writes to {self.store.url} now"
                    self.tell(f"{self._taken_by}: this run goes on, but it is not copied any more.")
                    return
                self.store.write(LEASE, make_lease())

    def _try_to_copy(self) -> str:
        """Copy once; return why it failed, which is told once, or an empty string."""
        try:
            while self._taken_by is None and self._copy():
                pass
        except Exception as error:  # each file system raises errors of its own
            problem = f"{self.store.url} does not answer ({first_line(error)})"
            if not self._is_down:
                self.tell(f"{problem}. The run goes on; the copy is tried again.")
            self._is_down = True
            return problem
        if self._is_down:
            self.tell(f"{self.store.url} answers again.")
        self._is_down = False
        return self._taken_by or ""

    def _copy(self) -> bool:
        """Copy the newest checkpoint and the small files; return whether something is left."""
        now = scan(self.folder)
        changed = [name for name, entry in now.items() if self._copied.get(name) != entry]
        gone = [name for name in self._copied if name not in now and not is_earlier(name)]
        if not now or not (changed or gone):
            return False
        indexed, present = checkpoints_in(self.index["files"]), checkpoints_in(now)
        pending = {step for step in map(step_of, changed) if step in present}
        newest = max(pending, default="")
        try:
            held = self._hold(name for name in changed if newest and step_of(name) == newest)
        except FileNotFoundError:  # the run has deleted it meanwhile
            return True
        # Where a run was set aside or went back: first it is copied under its new name, and
        # checkpoints that are no longer its own leave the index; then files are replaced.
        self._put(self.folder, filter(is_earlier, changed), now)
        last = max(present, default="")
        stale = {step for step, time_ns in indexed.items()
                 if present.get(step) != time_ns and (step in present or step > last)}  # fmt: skip
        if stale:
            files = self.index["files"] | {n: e for n, e in self._copied.items() if is_earlier(n)}
            self._publish({n: e for n, e in files.items() if step_of(n) not in stale})
        self._put(held, scan(held), now)
        delete(held)
        small = (name for name in changed if not step_of(name) and not is_earlier(name))
        self._put(self.folder, small, now)
        # The index lists complete checkpoints; then what it does not list is deleted.
        partial = {step_of(name) for name, entry in now.items() if self._copied.get(name) != entry}
        steps = {"", *(present.keys() - partial)}
        self._publish({
            name: entry for name, entry in self._copied.items()
            if step_of(name) in steps and name not in gone
        })  # fmt: skip
        for name in gone:
            self.store.remove(name)
            del self._copied[name]
        return len(pending) > 1

    def _hold(self, names: Iterable[str]) -> Path:
        """Return a hidden folder with links to files, which the run may delete meanwhile."""
        held = unfinished_path(self.folder / "copying")
        delete(held)
        held.mkdir()
        for name in names:
            (held / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(self.folder / name, held / name)
        return held

    def _put(self, folder: Path, names: Iterable[str], now: Files) -> None:
        """Copy files; one that is gone meanwhile is left to the next round."""
        for name in names:
            self._copied.pop(name, None)
            try:
                self._put_file(folder / name, name)
            except FileNotFoundError:
                if (folder / name).exists():
                    raise
                continue
            self._copied[name] = now[name]

    def _put_file(self, path: Path, name: str) -> None:
        """Copy a file; of a database that is being written, a consistent state."""
        if path.suffix != ".sqlite":
            self.store.put(path, name)
            return
        import sqlite3

        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder, "state")
            with (
                closing(sqlite3.connect(path)) as source,
                closing(sqlite3.connect(state)) as target,
            ):
                source.backup(target)
            self.store.put(state, name)

    def _publish(self, files: Files) -> None:
        """Write the index of these files, and of the links to checkpoints among them."""
        steps = checkpoints_in(files)
        links = {path.name: os.readlink(path) for path in self.folder.glob("checkpoints/*")
                 if path.is_symlink() and os.readlink(path) in steps}  # fmt: skip
        index = {"files": files, "links": links}
        self.store.write(INDEX, index)
        self.index = index
        (self.folder / MARK).write_text(self.store.url)


def make_lease() -> dict[str, Any]:
    """Return who writes the copy, and when that was true."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "time": time.time()}


def _is_mine(lease: dict[str, Any]) -> bool:
    """Whether a lease is of this process, or of one of this machine that has ended."""
    mine = make_lease()
    if lease["host"] != mine["host"]:
        return False
    return bool(lease["pid"] == mine["pid"] or not is_running(lease["pid"]))


def _take_lease(store: Store, tell: Callable[[str], None]) -> None:
    """Become the one who writes the copy; UserError if another one shows a sign of life."""
    lease = store.read(LEASE)
    if lease is not None and not _is_mine(lease) and time.time() - lease["time"] < LEASE_S:
        tell(f"{store.url} was written by {lease['host']} a moment ago: waiting for its end.")
        until = time.monotonic() + LEASE_S
        while time.monotonic() < until:
            time.sleep(POLL_S)
            newer = store.read(LEASE)
            if newer is None:
                break
            if newer != lease:
                raise UserError(
                    f"{store.url} belongs to a run that is active on {newer['host']}. Wait for "
                    "its end, or choose another --output_dir."
                )
    store.write(LEASE, make_lease())


@contextmanager
def mirrored(
    url: str | None, folder: RunFolder, tell: Callable[[str], None], command: str
) -> Iterator[None]:
    """Keep a copy of a locked run folder at `url` while the block runs; fetch a newer one first.

    Raises UserError if the address cannot be used, and Interrupted with `command` if it does not
    answer at the start, or if something is not copied at the end.
    """
    if url is None:
        yield
        return
    until, problem = time.monotonic() + PATIENCE_S, ""
    while True:
        try:
            store = Store(url)
            _take_lease(store, tell)
            index = store.read(INDEX) or {"files": {}, "links": {}}
            _fetch_if_newer(store, index, folder, tell)
            break
        except UserError:
            raise
        except (FileNotFoundError, PermissionError, ImportError) as error:
            raise UserError(f"{url} cannot be used: {first_line(error)}.") from error
        except Exception as error:  # each file system raises errors of its own
            if time.monotonic() > until:
                raise Interrupted(
                    f"{url} does not answer ({first_line(error)}). Go on with: {command}"
                ) from error
            if not problem:
                problem = first_line(error)
                tell(f"{url} does not answer ({problem}): trying again.")
            time.sleep(POLL_S)
    mirror = Mirror(store, folder.path, tell, index)
    mirror.start()
    try:
        yield
    except BaseException:
        if problem := mirror.close():
            tell(f"Not everything is copied: {problem}. The same command copies it.")
        raise
    if problem := mirror.close():
        raise Interrupted(
            f"The run is complete in {folder.path}, but not everything is copied: {problem}. Copy "
            f"it with: {command}"
        )


def _fetch_if_newer(
    store: Store, index: dict[str, Any], folder: RunFolder, tell: Callable[[str], None]
) -> None:
    """Fetch a copy whose last checkpoint is newer than that of the folder."""
    files, present = index["files"], scan(folder.path)
    there = max(checkpoints_in(files).values(), default=0)
    here = max(checkpoints_in(present).values(), default=0)
    cut_off = (folder.path / FETCHING).exists()
    is_run = not all(map(is_earlier, present))
    if not files or not (cut_off or there > here or not is_run):
        return
    # Numbers of earlier runs that are in the store only are taken.
    for name in {name.partition("/")[0] for name in filter(is_earlier, files)}:
        (folder.path / name).mkdir(exist_ok=True)
    mark = folder.path / MARK
    if is_run and not cut_off and (not mark.exists() or mark.read_text() != store.url):
        tell(f"The run in {folder.path} is another one: it is moved to {folder.set_aside()}.")
    size = sum(entry[0] for name, entry in files.items() if not is_earlier(name))
    tell(f"Fetching {size / 1e6:,.1f} MB from {store.url}.")
    fetch(store, index, folder.path)
