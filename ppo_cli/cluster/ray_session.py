"""A Ray of a run's own on this machine, and the part of a process in any Ray.

`python -m ppo_cli.cluster.ray_session '{"folder": …}'` is the head of such a Ray, in a
session of its own: it starts Ray, prints its address and the process ids of its parts as a JSON
line, and watches. When stdin ends (the owner closed it or died) or a part of Ray dies, it takes
down all that belongs to its session. Signals meant for the owner do not reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray

from ppo_cli.atomic import is_running
from ppo_cli.cluster.worker_process import read_tail
from ppo_cli.engine.leftovers import claim_folder, remove_stale_folders
from ppo_cli.errors import Interrupted, WorkerLost, first_line
from ppo_cli.redact import redact

# Ray puts unix sockets 79 bytes below it, and their paths end at 107.
LONGEST_ROOT = 28
# Ray opens its folder to all users, so it lies in one that only this user enters.
INNER = "r"
SMALL_MACHINE = 64 * 2**30
ENDS_S = 10.0
# Ray gives its own process 30 s to register, which a busy machine does not always keep.
TOO_SLOW = b"The current node timed out during startup"
STOPPED = "Stopped while starting ({})."
# Nobody else can reach what listens, and Ray looks for it at 127.0.0.1.
HERE_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class OwnRay:
    """Ray's head in a session of its own; joining it is another matter."""

    def __init__(self, *, gpus: int, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / "ray.log"
        self._gpus = gpus
        self._closed = False
        self._started = False
        self._parts: dict[str, int] = {}
        remove_stale_folders(Path(_short_root()))  # of a run that was killed together with its Ray
        self._begin()

    def _begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ppo-", dir=_short_root()))
        try:
            self._head = self._start()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        claim_folder(self.folder)
        wish = {
            "folder": str(self.folder),
            "num_cpus": os.cpu_count() or 1,  # as many workers as that start at the same time
            "num_gpus": self._gpus,
            "object_store_memory": _object_store_bytes(),
        }
        # Its own session: Ctrl-C is for us alone. Its workers end soon after their cluster.
        settings = HERE_ONLY | {
            "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
            "RAY_prestart_worker_first_driver": "0",  # ours have environments of their own
        }
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, json.dumps(wish)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True, env=os.environ | settings | import_paths(),
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """The head's process id, which is that of its session too."""
        return self._head.pid

    def await_address(self, timeout_s: float, stop_requested: Callable[[], str | None]) -> str:
        """Wait until it can be joined, and say where.

        It is started again where it found the machine too slow. Raises WorkerLost when it cannot
        be joined in time, Interrupted when a stop is asked for.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if stop := stop_requested():
                raise Interrupted(STOPPED.format(stop))
            assert self._head.stdout is not None
            if select.select([self._head.stdout], [], [], 0.2)[0]:
                line = self._head.stdout.readline()
                if line.startswith(b"{"):
                    self._started = True
                    told = json.loads(line)
                    self._parts = told["parts"]
                    return str(told["address"])
                if not line and TOO_SLOW in self._log.read_bytes()[self._log_start :]:
                    self._end()
                    self._begin()
                elif not line:
                    break
        took = "it ended" if self._head.poll() is not None else f"no answer in {timeout_s:g} s"
        raise WorkerLost(f"Ray did not start on this machine: {took}. {read_tail(self._log)}")

    def trouble(self) -> str | None:
        """Say how it ended, or None while it runs."""
        code = self._head.poll()
        part = next((name for name, pid in self._parts.items() if not is_running(pid)), None)
        if code is None:
            if part is None:
                return None
            # The head may take seconds to see it, on a busy machine, and workers that went with the
            # part are missed before that. It alone knows which part went first: it ends the others.
            with suppress(subprocess.TimeoutExpired):
                code = self._head.wait(ENDS_S)
        if code is not None:
            part = next((name for name, number in LOST.items() if number == code), None)
        if part is None:
            return f"Ray on this machine ended (code {code}). {read_tail(self._log)}"
        return f"Ray on this machine lost its {part}, and with it all workers."

    def close(self) -> None:
        """End it and all that belongs to it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._end()
        remove_stale_folders()

    def _end(self) -> None:
        head = self._head
        assert head.stdin is not None and head.stdout is not None
        head.stdin.close()
        try:
            # While it starts it does not look whether its owner has gone.
            head.wait(ENDS_S if self._started else 0)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait()
        head.stdout.close()
        end_session(head.pid)  # what a killed head left behind
        shutil.rmtree(self.folder, ignore_errors=True)


def import_paths() -> dict[str, str]:
    """The variable by which another program imports what this process does."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _short_root() -> str:
    """The temporary folder of this machine, or /tmp when its path is too long for sockets."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= LONGEST_ROOT else "/tmp"


def _object_store_bytes() -> int | None:
    """Room for a batch and a set of weights on a small machine; Ray's own choice on others."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(0.1 * memory) if memory < SMALL_MACHINE else None


KNOCK_EVERY_S, KNOCKS = 5.0, 3


class Session:
    """This process's part in the Ray cluster at an address; `close` leaves it as it was."""

    def __init__(self, address: str, logs: Path) -> None:
        self._gone: str | None = None
        self._address = address
        self._knocked_at = time.monotonic()
        try:
            self._join(logs)
        except BaseException:
            self.close()
            raise

    def trouble(self) -> str | None:
        """Say what happened to Ray itself, or None while it is well."""
        if self._gone is None:
            self._gone = self._knock()
        return self._gone

    def close(self) -> None:
        """Leave Ray. Safe to call twice."""
        self._gone = self._gone or "The cluster is closed."
        if ray.is_initialized():
            ray.shutdown()
        remove_stale_folders()

    def _join(self, logs: Path) -> None:
        _keep_quiet(logs / "ray.log")
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with _workers_import_as_we_do(logs):
                ray.init(
                    address=self._address,
                    namespace=f"ppo-{uuid.uuid4().hex}",
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            # What was asked for may be "auto", or a name.
            self._address = ray.get_runtime_context().gcs_address
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            said = first_line(error)
            raise WorkerLost(f"There is no Ray to join at {self._address}: {said}") from None
        finally:
            for number, handler in kept.items():
                with suppress(ValueError):  # only the main thread has a say in signals
                    signal.signal(number, handler)

    def _knock(self) -> str | None:
        """Ask the head of a joined cluster, now and then, whether somebody is at home."""
        if time.monotonic() - self._knocked_at < KNOCK_EVERY_S:
            return None
        for attempt in range(KNOCKS):
            if _listens(self._address):
                self._knocked_at = time.monotonic()
                return None
            time.sleep(0.3 * (attempt + 1))
        return f"The Ray cluster at {self._address} does not answer any more."


def node_answers(node_id: str) -> bool:
    """Whether somebody is at home on a node; Ray itself takes long to miss one."""
    # Without its head, Ray's list of nodes would be waited for without end.
    if not _listens(ray.get_runtime_context().gcs_address):
        return False
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            door = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            return bool(node["Alive"]) and _listens(door)
    return not node_id


def _listens(address: str) -> bool:
    """Whether somebody takes connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _workers_import_as_we_do(no_modules: Path) -> Iterator[None]:
    """Keep Ray from putting our current folder first where workers look for modules.

    A `torch.py` that lies there by chance is not for them unless it is for us.
    """
    here = Path.cwd()
    if {"", str(here)} & set(sys.path):
        yield
        return
    os.chdir(no_modules)
    try:
        yield
    finally:
        os.chdir(here)


def _keep_quiet(log: Path) -> None:
    """Ray prints what it thinks of lost workers; that belongs in a log."""

    def keep(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        with suppress(OSError), log.open("a") as file:
            file.write(redact("\n".join(data["lines"]) + "\n"))

    log.parent.mkdir(parents=True, exist_ok=True)
    ray._private.worker.print_to_stdstream = keep


PARTS = ("gcs_server", "raylet")  # those that a cluster cannot be without
LOST = {name: 40 + i for i, name in enumerate(PARTS)}  # exit codes
POLL_S = 0.3
SESSION_ENDS_S = 5.0


def main() -> int:
    """Start, tell, watch, take down; returns the exit code."""
    wish = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        return _serve(wish)
    finally:
        end_session(os.getpid())
        remove_stale_folders()
        shutil.rmtree(wish["folder"], ignore_errors=True)


def _serve(wish: dict[str, Any]) -> int:
    import ray
    from ray._private import parameter

    # Nobody asks for more nodes here, and workers' logs are read by us: two processes less.
    parameter.RayParams = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
    ray.init(
        num_cpus=wish["num_cpus"],
        num_gpus=wish["num_gpus"],
        object_store_memory=wish["object_store_memory"],
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=str(Path(wish["folder"], INNER)),
    )
    # `init` took SIGTERM for itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parts = _find_parts()
    try:
        address = ray.get_runtime_context().gcs_address
        print(json.dumps({"address": address, "parts": parts}), flush=True)
    except BrokenPipeError:  # the owner died meanwhile
        return 0
    while True:
        lost = next((name for name, pid in parts.items() if not is_running(pid)), None)
        if lost is not None:
            return LOST[lost]
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not sys.stdin.readline():
            return 0


def _find_parts() -> dict[str, int]:
    """Process ids of Ray's own processes, which are our children."""
    found = {}
    for pid, name, parent, _ in _processes():
        if parent == os.getpid() and name in PARTS:
            found[name] = pid
    return found


def end_session(session: int) -> None:
    """Kill all processes of a session except this one, groups of their own included.

    Waits a moment until they have ended and their memory and files are freed.
    """
    deadline = time.monotonic() + SESSION_ENDS_S
    while time.monotonic() < deadline:
        found = [pid for pid, _, _, theirs in _processes() if theirs == session]
        alive = [pid for pid in found if pid != os.getpid() and is_running(pid)]
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _processes() -> list[tuple[int, str, int, int]]:
    """List (pid, name, parent, session) of what runs on this machine."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            # The name stands in brackets and may hold anything, brackets too.
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            fields = tail.split()
            found.append((int(entry.name), head.partition("(")[2], int(fields[1]), int(fields[3])))
    return found


if __name__ == "__main__":
    # No interpreter shutdown: Ray's own farewells would wait for what is gone by now.
    code = 1
    try:
        code = main()
    except BaseException:
        # Not the hook that Ray has put in its place: that one asks what is gone by now.
        sys.__excepthook__(*sys.exc_info())
    sys.stderr.flush()
    os._exit(code)
