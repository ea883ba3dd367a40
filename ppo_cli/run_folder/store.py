"""The copy of a run folder at an address (s3://…): kept up to date, and fetched elsewhere.

The run itself is local. A thread copies what has changed: a checkpoint's files, the small ones, at
last the index. That lists the files of the copy, and what is not in it does not count: a reader has
a complete state, however an upload ended. What the local folder no longer has is deleted after
that. Each round copies the newest state, so nothing piles up while the store is away.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ppo_cli.addresses import cache_folder, check_address, restore
from ppo_cli.atomic import (
    atomic_replace,
    delete,
    delete_atomically,
    is_running,
    move_into_place,
    sweep_unfinished,
    unfinished_path,
)
from ppo_cli.digests import MANIFEST
from ppo_cli.errors import DataError, Interrupted, UserError, first_line, is_address, plural
from ppo_cli.paths import user_path
from ppo_cli.run_folder.folder import LOCK, RunFolder
from ppo_cli.run_folder.lines import LABELS_FILE, METRICS_FILE, ROLLOUTS
from ppo_cli.run_folder.restraints import RESTRAINTS_FILE
from ppo_cli.run_folder.sources import ModelSource, find_source
from ppo_cli.waits import Progress, await_result, run_in_thread

INDEX, LEASE = "index.json", "lease.json"  # of a copy: its files and links; who writes it
# In a folder: the address of its copy, and that a fetch was cut off.
MARK, FETCHING = ".store", ".fetching"
POLL_S = 2.0
LEASE_S = 60.0  # without a sign of life, another machine takes over
SKEW_S = 900.0  # two clocks may differ by this much; S3 refuses more
PLAN_S = 5.0  # a plan waits no longer for a store
# For a store that does not answer, at the start and at the end; a file may take longer at this
# speed.
PATIENCE_S, SLOWEST_BYTES_PER_S = 60.0, 1e6
READERS = 8
TRIAL = ".trial"  # a file that a plan writes and deletes
# Errors of a store that waiting does not mend.
MISTAKES = (FileNotFoundError, PermissionError, ImportError, NotImplementedError, ValueError)

# RUN/checkpoints, or one of them or a folder in it.
CHECKPOINT = re.compile(r"(\w+://.+)/checkpoints(?:/((?:step_\d+|latest|best)(?:/.*)?))?")

Files = dict[str, list[int]]  # name -> bytes and time of change in ns
Json = dict[str, Any]


def step_of(name: str) -> str:
    """Return the checkpoint that a file belongs to, such as `step_000010`; empty for others."""
    return name.split("/")[1] if name.startswith("checkpoints/step_") else ""


def is_earlier(name: str) -> bool:
    """Whether a file belongs to a run that was set aside."""
    return name.startswith("earlier_")


def scan(folder: Path) -> Files:
    """Return the files of a run folder that belong into the copy; hidden ones do not."""
    files: Files = {}
    for root, folders, names in os.walk(folder):
        # Another run may be in a folder below, with a copy of its own.
        for name in [*folders]:
            begun = any(Path(root, name, file).exists() for file in (METRICS_FILE, LOCK))
            if name[0] == "." or (begun and not is_earlier(name)):
                folders.remove(name)
        for path in (Path(root, name) for name in names if name[0] != "."):
            with suppress(FileNotFoundError):
                status = path.stat()
                files[path.relative_to(folder).as_posix()] = [status.st_size, status.st_mtime_ns]
    # SQLite writes to a second file first; the copy has one.
    for log in [name for name in files if name.endswith((".sqlite-wal", ".sqlite-shm"))]:
        entry = files.pop(log)
        if log.endswith("-wal"):
            files[log[:-4]] = max(files.get(log[:-4], entry), entry, key=lambda e: e[1])
    return files


def checkpoints_in(files: Files) -> dict[str, int]:
    """Return the complete checkpoints with the time of each."""
    manifests = (name for name in files if name.endswith(f"/{MANIFEST}") and step_of(name))
    return {step_of(name): files[name][1] for name in manifests}


def open_store(url: str) -> Any:
    """Return fsspec's file system of what is below an address; its methods raise any error."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.dirfs import DirFileSystem

    system, root = url_to_fs(url, use_listings_cache=False)
    return DirFileSystem(path=root, fs=system)


def read_json(store: Any, name: str) -> Json | None:
    """Return a JSON file of a store; None if there is none."""
    with suppress(FileNotFoundError):
        # From 0: else S3 is asked for the size first, and says no reason why that fails.
        return dict(json.loads(store.cat_file(name, start=0)))
    return None


def read_index(store: Any) -> Json | None:
    """Return the index of a copy; None if there is none. Raises ValueError if it leads outside."""
    index = read_json(store, INDEX)
    for name in (*index["files"], *index["links"], *index["links"].values()) if index else ():
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"its {INDEX} names a file outside the run: {name}")
    return index


def put(store: Any, name: str, content: Path | Json) -> None:
    """Write a file to a store, where it appears when it is complete."""
    # That is so in object stores; elsewhere it is renamed into place.
    target = name
    if not store.fs.async_impl:
        target = f"{name}.part"
        store.makedirs(name.rpartition("/")[0], exist_ok=True)
    if isinstance(content, Path):
        store.put_file(str(content), target)
    else:
        store.pipe_file(target, json.dumps(content).encode())
    if target != name:
        store.mv(target, name)


def fetch(store: Any, index: Json, folder: Path, progress: Progress) -> None:
    """Bring a folder to the state of the index; a fetch that is cut off is repeated next time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FETCHING).touch()
    files: Files = {name: entry for name, entry in index["files"].items() if not is_earlier(name)}
    present = scan(folder)
    for name in present.keys() - files.keys():
        if name.startswith(f"{ROLLOUTS}/"):
            delete(folder / name)
    steps = checkpoints_in(files)
    for path in (folder / "checkpoints").glob("step_*"):
        if path.name not in steps:
            delete_atomically(path)
    # A checkpoint gets its name when it is complete.
    missing = steps.items() - checkpoints_in(present).items()
    partial = {step: unfinished_path(folder / "checkpoints" / step) for step, _ in missing}
    for path in partial.values():
        delete(path)

    def get(name: str) -> None:
        step, entry, local = step_of(name), files[name], present.get(name)
        # Labels may have been given here since.
        newer = name == LABELS_FILE and local is not None and local[1] > entry[1]
        if newer or local == entry or (step and step not in partial):
            return
        path = partial[step] / name.split("/", 2)[2] if step else folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for log in ("-wal", "-shm"):  # of the database that is replaced
            delete(path.with_name(path.name + log))
        progress.note(entry[0] / SLOWEST_BYTES_PER_S)
        with atomic_replace(path) as fresh:
            store.get_file(name, str(fresh))
            os.utime(fresh, ns=(entry[1], entry[1]))

    def get_all() -> None:
        for name in remaining:
            get(name)

    remaining = iter([*files])
    readers = [run_in_thread(get_all) for _ in range(READERS)]
    wait(readers)
    for reader in readers:
        reader.result()
    for step, path in partial.items():
        move_into_place(path, folder / "checkpoints" / step)
    for link, step in index["links"].items():
        with atomic_replace(folder / "checkpoints" / link) as fresh:
            fresh.symlink_to(step)
    (folder / FETCHING).unlink(missing_ok=True)


def try_store(url: str) -> tuple[list[str], list[str]]:
    """Read and write at an address for a plan; return notes on what it cannot try, and problems.

    A plan may be made where there are neither network nor credentials, so these are no problems.
    """

    def try_all() -> None:
        store = open_store(url)
        read_index(store)
        put(store, TRIAL, {})
        store.rm_file(TRIAL)

    try:
        await_result(run_in_thread(try_all), "it", PLAN_S)
    except MISTAKES as error:
        return [], [f"{url} cannot be used: {first_line(error)}."]
    except Exception as error:  # each file system raises errors of its own
        return [
            f"Whether {url} can be read and written could not be checked here "
            f"({first_line(error)}): `train` checks it before it loads a model."
        ], []
    return [], []


def localise(word: str | os.PathLike[str], *, small: bool = False) -> Path:
    """Return the local path of RUN, RUN@STEP or a checkpoint: what is at an address is copied.

    `small` leaves the checkpoints out. Raises DataError if there is no run at the address.
    """
    text = restore(word)
    if text.startswith("file:"):
        return Path("/", text.removeprefix("file://"))
    if not is_address(text):
        return user_path(word)
    parent, slash, name = text.rstrip("/").rpartition("/")
    name, at, step = name.partition("@")
    url, progress = f"{parent}{slash}{name}", Progress()

    def fetch_run() -> Path | None:
        # A run may itself be in a folder called checkpoints.
        match = CHECKPOINT.fullmatch(url)
        for place, below in [*([(match[1], match[2] or "")] if match else ()), (url, "")]:
            check_address(place)
            store = open_store(place)
            folder = user_path(cache_folder("glances" if small else "copies", place))
            if (index := read_index(store)) is None:
                continue
            if small:
                index["files"] = {name: entry for name, entry in index["files"].items()
                                  if not step_of(name) or name.endswith(MANIFEST)}  # fmt: skip
            fetch(store, index, folder, progress)
            return folder / "checkpoints" / below if below else Path(f"{folder}{at}{step}")
        return None

    try:
        path = await_result(run_in_thread(fetch_run), url, PATIENCE_S, progress=progress)
    except Exception as error:  # each file system raises errors of its own
        raise DataError(f"{url} cannot be read: {first_line(error)}.") from error
    if path is None:
        raise DataError(f"{url} has no run: {INDEX} is missing there.")
    return path


def find_source_anywhere(word: str) -> ModelSource:
    """As `find_source`, also for a run at an address, which is copied."""
    return find_source(str(localise(word)) if is_address(word) else word)


def make_lease() -> Json:
    """Return who writes the copy, and when that was true."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "time": time.time()}


def is_mine(lease: Json) -> bool:
    """Whether a lease is of this process, or of one of this machine that has ended."""
    same_host = lease["host"] == os.uname().nodename
    return bool(same_host and (lease["pid"] == os.getpid() or not is_running(lease["pid"])))


class Lease:
    """The right to write the copy: taken, and renewed in a thread until `release`.

    `successor` says who has taken over, if another machine has. Raises UserError if one is active.
    """

    def __init__(
        self, url: str, store: Any, tell: Callable[[str], None], progress: Progress | None = None
    ) -> None:
        self.url, self.store, self.tell, self.successor = url, store, tell, ""
        self.progress = progress or Progress()
        self._ended = threading.Event()
        lease = newer = read_json(store, LEASE)
        if lease and not is_mine(lease) and time.time() - lease["time"] < SKEW_S:
            tell(f"{url} may be in use on {lease['host']}: waiting a minute for a sign of it.")
            until = time.monotonic() + LEASE_S
            while newer == lease and time.monotonic() < until:
                time.sleep(POLL_S)
                newer = read_json(store, LEASE)
                self.progress.note()
            if newer and newer != lease:
                raise UserError(
                    f"{url} belongs to a run that is active on {newer['host']}. Wait for its end, "
                    "or choose another --output_dir."
                )
        put(store, LEASE, make_lease())
        self.progress.note()
        self._renewal = run_in_thread(self._renew)

    def release(self) -> None:
        """Let another machine write the copy at once."""
        self._ended.set()
        with suppress(Exception):  # without an answer, others wait for LEASE_S
            await_result(self._renewal, self.url, POLL_S, progress=Progress())
            if not self.successor:
                removal = run_in_thread(lambda: self.store.rm_file(LEASE))
                await_result(removal, self.url, POLL_S, progress=Progress())

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_S / 3):
            with suppress(Exception):  # the mirror tells that a store is down
                lease = read_json(self.store, LEASE)
                if lease is not None and not is_mine(lease):
                    self.successor = f"{lease['host']} writes to {self.url} now"
                    self.tell(f"{self.successor}: this run goes on without a copy.")
                    return
                put(self.store, LEASE, make_lease())


class Mirror:
    """Keeps the copy of a run folder up to date, in a thread of its own, until `close`."""

    def __init__(self, lease: Lease, folder: Path) -> None:
        self.lease, self._folder, self._progress = lease, folder, lease.progress
        self._url, self._store, self._tell = lease.url, lease.store, lease.tell
        self._index: Json = read_index(self._store) or {"files": {}, "links": {}}
        self._copied: Files = dict(self._index["files"])  # in the store, in the index or not
        self._problem = ""  # why the last round failed
        self._ending = threading.Event()
        sweep_unfinished(folder)
        self._rounds = run_in_thread(self._copy_changes)

    def close(self) -> str:
        """Copy what is left; return why it could not be done, or an empty string."""
        self._ending.set()
        files = scan(self._folder).items()
        if missing := [entry[0] for name, entry in files if self._copied.get(name) != entry]:
            amount = f"{plural(len(missing), 'file')} ({sum(missing) / 1e6:,.1f} MB)"
            self._tell(f"Copying the last {amount} to {self._url}.")
        self._progress.note()
        problem = ""
        try:
            await_result(self._rounds, self._url, PATIENCE_S, progress=self._progress)
        except Interrupted as late:
            problem = first_line(late)
        return self.lease.successor or self._problem or problem

    def _copy_changes(self) -> None:
        """Copy in rounds, at most a quarter of the time; a large round delays the next one.

        At the end it is tried for PATIENCE_S.
        """
        pause = POLL_S
        while not self._ending.wait(pause) and not self.lease.successor:
            began = time.monotonic()
            self._try_to_copy()
            pause = max(POLL_S, 3 * (time.monotonic() - began))
        until = time.monotonic() + PATIENCE_S
        while not self._try_to_copy() and not self.lease.successor and time.monotonic() < until:
            time.sleep(POLL_S)

    def _try_to_copy(self) -> bool:
        """Copy all that has changed; return whether that worked. A failure is told once."""
        before, self._problem = self._problem, ""
        try:
            while not self.lease.successor and self._copy():
                pass
        except Exception as error:  # each file system raises errors of its own
            self._problem = f"{self._url} does not answer ({first_line(error)})"
            if not before:
                self._tell(f"{self._problem}. The run goes on; the copy is tried again.")
            return False
        if before:
            self._tell(f"{self._url} answers again.")
        return True

    def _copy(self) -> bool:
        """Copy the newest checkpoint and the small files; return whether something is left."""
        now = scan(self._folder)
        changed = [name for name, entry in now.items() if self._copied.get(name) != entry]
        gone = [name for name in self._copied if name not in now and not is_earlier(name)]
        if not now or not (changed or gone):
            return False
        indexed, present = checkpoints_in(self._index["files"]), checkpoints_in(now)
        pending = {step_of(name) for name in changed} & present.keys()
        # Links to the newest checkpoint, which the run may delete meanwhile.
        newest = [name for name in changed if pending and step_of(name) == max(pending)]
        linked = unfinished_path(self._folder / "copying")
        delete(linked)
        try:
            for name in newest:
                (linked / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(self._folder / name, linked / name)
        except FileNotFoundError:  # deleted already
            return True
        # Where a run was set aside or went back: first it is copied under its new name, and
        # checkpoints that are no longer its own leave the index; then files are replaced.
        self._put(self._folder, filter(is_earlier, changed), now)
        last = max(present, default="")
        stale = {step for step, time_ns in indexed.items()
                 if present.get(step) != time_ns and (step in present or step > last)}  # fmt: skip
        if stale:
            files = self._index["files"] | {n: e for n, e in self._copied.items() if is_earlier(n)}
            self._publish({n: e for n, e in files.items() if step_of(n) not in stale})
        self._put(linked, newest, now)
        delete(linked)
        small = (name for name in changed if not step_of(name) and not is_earlier(name))
        self._put(self._folder, small, now)
        # The index lists complete checkpoints; then what it does not list is deleted.
        partial = {step_of(name) for name, entry in now.items() if self._copied.get(name) != entry}
        steps = {"", *(present.keys() - partial)}
        self._publish({name: entry for name, entry in self._copied.items()
                       if step_of(name) in steps and name not in gone})  # fmt: skip
        for name in gone:
            with suppress(FileNotFoundError):
                self._store.rm_file(name)
            del self._copied[name]
        return len(pending) > 1

    def _put(self, folder: Path, names: Iterable[str], now: Files) -> None:
        """Copy files; one that is gone meanwhile is left to the next round."""
        import sqlite3

        for name in names:
            path = folder / name
            self._copied.pop(name, None)
            with tempfile.TemporaryDirectory() as temporary:
                # Of a database that is being written, a consistent state.
                if path.suffix == ".sqlite":
                    state = Path(temporary, "state")
                    with closing(sqlite3.connect(path)) as a, closing(sqlite3.connect(state)) as b:
                        a.backup(b)
                    path = state
                self._progress.note(now[name][0] / SLOWEST_BYTES_PER_S)
                try:
                    put(self._store, name, path)
                except FileNotFoundError:
                    if path.exists():
                        raise
                    continue
            self._copied[name] = now[name]

    def _publish(self, files: Files) -> None:
        """Write the index of these files, and of the links to checkpoints among them."""
        steps = checkpoints_in(files)
        links = {path.name: os.readlink(path) for path in self._folder.glob("checkpoints/*")
                 if path.is_symlink() and os.readlink(path) in steps}  # fmt: skip
        # Before the index: a killed run knows its copy.
        (self._folder / MARK).write_text(self._url)
        self._index = {"files": files, "links": links}
        put(self._store, INDEX, self._index)


def fetch_if_newer(lease: Lease, folder: RunFolder) -> None:
    """Fetch a copy whose last checkpoint is newer than that of the folder.

    Raises UserError if the folder has another run, which would replace the copy.
    """
    index, present = read_index(lease.store) or {"files": {}}, scan(folder.path)
    files, mark = index["files"], folder.path / MARK
    # A run that went back has deleted its newest checkpoints: that is newer than they are.
    times = ((*checkpoints_in(f).values(), f.get(RESTRAINTS_FILE, (0, 0))[1])
             for f in (files, present))  # fmt: skip
    newest, local = map(max, times)
    cut_off, is_run = (folder.path / FETCHING).exists(), not all(map(is_earlier, present))
    is_other = is_run and not cut_off and not (mark.exists() and mark.read_text() == lease.url)
    if files and is_other and newest <= local:
        raise UserError(
            f"{lease.url} has another run than {folder.path}. Choose another address, or an empty "
            "--output_dir to go on with that run."
        )
    if not files or not (cut_off or newest > local or not is_run):
        return
    # Numbers of earlier runs that are in the store only are taken.
    for name in {name.partition("/")[0] for name in filter(is_earlier, files)}:
        (folder.path / name).mkdir(exist_ok=True)
    if is_other and (earlier := folder.set_aside()):
        lease.tell(f"The run in {folder.path} is another one: it is moved to {earlier}.")
    size = sum(entry[0] for name, entry in files.items() if not is_earlier(name))
    lease.tell(f"Fetching {size / 1e6:,.1f} MB from {lease.url}.")
    fetch(lease.store, index, folder.path, lease.progress)
    mark.write_text(lease.url)


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
    address = url.rstrip("/")
    progress, given_up, problems = Progress(), threading.Event(), list[str]()
    until = time.monotonic() + PATIENCE_S

    def open_copy() -> Mirror:
        """Try until it works, for PATIENCE_S, and as long as somebody waits for it."""
        lease = None
        with ExitStack() as on_failure:
            while True:
                try:
                    if lease is None:
                        lease = Lease(address, open_store(address), tell, progress)
                        on_failure.callback(lease.release)
                    fetch_if_newer(lease, folder)
                    if given_up.is_set():  # a late answer: another machine may write now
                        raise Interrupted(f"Nobody waits for {address} any more.")
                    mirror = Mirror(lease, folder.path)
                    on_failure.pop_all()
                    return mirror
                except (UserError, Interrupted):
                    raise
                except Exception as error:  # each file system raises errors of its own
                    if isinstance(error, MISTAKES) or "Credential" in type(error).__name__:
                        raise UserError(
                            f"{address} cannot be used: {first_line(error)}."
                        ) from error
                    if not problems:
                        problems.append(f"{address} does not answer ({first_line(error)})")
                        tell(f"{problems[0]}: trying again for {PATIENCE_S:g} s.")
                    if given_up.wait(POLL_S) or time.monotonic() > until:
                        raise

    try:
        mirror = await_result(run_in_thread(open_copy), address, PATIENCE_S, tell, progress)
    except UserError:
        raise
    except Exception as late:  # its last one, or the end of the wait
        raise Interrupted(f"{(*problems, late)[0]}. Go on with: {command}") from late
    finally:
        given_up.set()
    try:
        yield
    except BaseException:
        if problem := mirror.close():
            tell(f"Not everything is copied: {problem}. The same command copies it.")
        raise
    else:
        if problem := mirror.close():
            raise Interrupted(
                f"The run is in {folder.path}, but not everything is copied: {problem}. Copy it "
                f"with: {command}"
            )
    finally:
        mirror.lease.release()
