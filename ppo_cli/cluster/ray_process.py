"""Ray on this machine: a process that starts and watches it, and its supervisor in the run.

A run on one machine, node 0 of several and the nodes that join it all start Ray here. `RayProcess`
is the supervisor. It starts the program at the end of this file below the reaper, which ends all of
Ray when the run ends, however that happens. Signals meant for the run do not reach Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppo_cli.atomic import is_running
from ppo_cli.cluster.addresses import is_on_loopback
from ppo_cli.cluster.worker_process import read_tail
from ppo_cli.engine.leftovers import claim_folder, remove_stale_folders
from ppo_cli.errors import Interrupted, WorkerLost
from ppo_cli.processes.program import Program
from ppo_cli.processes.reaper import STOP_S

SECRET_VARIABLE = "PPO_CLUSTER_SECRET"
# The path of a unix socket has at most 107 bytes. Ray puts up to 79 after its folder.
LONGEST_ROOT_BYTES = 28
# Ray makes its folder readable for all users. So it is inside one that only this user can enter.
INNER_FOLDER = "r"
READY_FILE = "ready.json"
# On a machine with less memory Ray's own 30 percent are too much for its object store.
SMALL_MACHINE_BYTES = 64 * 2**30
# Ray gives its raylet 30 s to register, which is not always enough on a busy machine.
TOO_SLOW = b"The current node timed out during startup"
# The parts of Ray that a node cannot work without -> exit code of the program when one is lost.
PART_EXIT_CODES = {"gcs_server": 40, "raylet": 41}
POLL_S = 0.1
# Ray binds to 127.0.0.1 instead of the machine's address, so nobody else can connect. Without it,
# Ray replaces 127.0.0.1 by the machine's address, where a head on the loopback does not listen.
LOCAL_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
SETTINGS = {
    # Workers end soon after their cluster.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    # Our workers have environments that a worker started in advance would not have.
    "RAY_prestart_worker_first_driver": "0",
    # A killed node is noticed within 5 s: Ray asks each node once a second.
    "RAY_health_check_period_ms": "1000",
}


@dataclass(frozen=True)
class RayOptions:
    """What a node of Ray offers, and the cluster that it joins (None: it is the head)."""

    num_cpus: int
    num_gpus: int
    head_address: str | None = None
    port: int = 0  # of the head; 0: any
    node_address: str | None = None
    labels: Mapping[str, str] | None = None


class RayProcess:
    """Supervises one node of Ray. `close` ends it."""

    def __init__(
        self,
        options: RayOptions,
        *,
        label: str = "this machine",
        log: Path | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._options = options
        self._label = label
        self._environ = environ
        self._log = log
        self._parts: dict[str, int] = {}
        self._closed = False
        remove_stale_folders(Path(_short_root()))  # of a run that was killed together with its Ray
        self._start()

    def await_address(
        self, timeout_s: float, stop_requested: Callable[[], str | None] = lambda: None
    ) -> str:
        """Wait until Ray runs; returns the address of its head.

        Starts it again when Ray finds the machine too slow. Raises WorkerLost when it does not
        run in time, Interrupted when a stop is requested.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if reason := stop_requested():
                raise Interrupted(f"Stopped while starting ({reason}).")
            running = self._process.poll() is None
            with contextlib.suppress(FileNotFoundError):
                ready = json.loads((self.folder / READY_FILE).read_text())
                self._parts = ready["parts"]
                return str(ready["address"])
            if not running:
                if TOO_SLOW not in self.log.read_bytes()[self._log_start :]:
                    break
                self._end()
                self._start()
            time.sleep(POLL_S)
        ended = self._process.poll() is not None
        cause = "it ended" if ended else f"no answer in {timeout_s:g} s"
        raise WorkerLost(f"Ray did not start on {self._label}: {cause}. {read_tail(self.log)}")

    def failure(self) -> str | None:
        """Describe how Ray ended, or None while it runs."""
        code = self._process.poll()
        part = next((name for name, pid in self._parts.items() if not is_running(pid)), None)
        if code is None:
            if part is None:
                return None
            # The program knows which part was lost first. It then ends the others.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(STOP_S)
        part = next((name for name, number in PART_EXIT_CODES.items() if number == code), part)
        if part is None:
            return f"Ray on {self._label} ended (code {code}). {read_tail(self.log)}"
        return f"Ray on {self._label} lost its {part}, and with it all workers."

    @property
    def pid(self) -> int:
        """The process id of the reaper."""
        return self._process.pid

    def close(self) -> None:
        """End Ray and all its processes, and remove its folder. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._end()
            remove_stale_folders()

    def _start(self) -> None:
        """Create Ray's folder and start its process; if that fails, the folder is deleted."""
        self.folder = Path(tempfile.mkdtemp(prefix="ppo-", dir=_short_root()))
        self.log = self._log or self.folder / "ray.log"
        try:
            claim_folder(self.folder)
            self._process = self._spawn()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _spawn(self) -> Program:
        """Start the process that runs Ray."""
        # The secret is for this process alone, and Ray must not look for another cluster.
        hidden = ("RAY_ADDRESS", SECRET_VARIABLE)
        inherited = {name: value for name, value in self._environ.items() if name not in hidden}
        options = json.dumps(asdict(self._options))
        command = [sys.executable, "-P", "-m", __name__, str(self.folder), options]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            environ = inherited | SETTINGS | import_paths()
            head = self._options.head_address
            if is_on_loopback(head or self._options.node_address):
                environ |= LOCAL_ONLY
            return Program(command, environ=environ, log=log, folder=self.folder)

    def _end(self) -> None:
        """End Ray's process and delete its folder."""
        self._process.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def import_paths() -> dict[str, str]:
    """The variable that lets another program import what this process can import."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _short_root() -> str:
    """The temporary folder of this machine, or /tmp when its path is too long for sockets."""
    root = tempfile.gettempdir()
    return root if len(os.fsencode(root)) <= LONGEST_ROOT_BYTES else "/tmp"


def main() -> None:
    """Start Ray, write its address into the folder in argv, and end when a part of Ray ends."""
    # Private API, used as `ray start` does; tried with Ray 2.60. It saves two processes and
    # about 3 s per start: `ray start` cannot leave out the autoscaler and starts more modules.
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    folder, options = Path(sys.argv[1]), RayOptions(**json.loads(sys.argv[2]))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parameters: dict[str, Any] = {
        "num_cpus": options.num_cpus,
        "num_gpus": options.num_gpus,
        "node_ip_address": options.node_address,
        "labels": options.labels,
        "temp_dir": str(folder / INNER_FOLDER),
        "object_store_memory": int(memory_bytes / 10)
        if memory_bytes < SMALL_MACHINE_BYTES
        else None,
        "include_dashboard": False,
        "dashboard_agent_listen_port": 0,  # two nodes may be on one machine
        "no_monitor": True,  # nobody requests more nodes
        "include_log_monitor": False,  # workers write their own logs
    }
    if options.head_address is None:
        parameters["gcs_server_port"] = options.port
    else:
        parameters["gcs_address"] = options.head_address
    is_head = options.head_address is None
    node = Node(RayParams(**parameters), head=is_head, shutdown_at_exit=False, spawn_reaper=True)
    parts = {
        name: node.all_processes[name][0].process.pid
        for name in PART_EXIT_CODES
        if name in node.all_processes
    }
    unfinished = folder / f"{READY_FILE}.unfinished"
    unfinished.write_text(json.dumps({"address": node.gcs_address, "parts": parts}))
    unfinished.replace(folder / READY_FILE)
    while True:
        time.sleep(POLL_S)
        for name, _ in node.dead_processes():
            if name in PART_EXIT_CODES:
                # Ray's own shutdown would wait for processes that have already exited.
                os._exit(PART_EXIT_CODES[name])


if __name__ == "__main__":
    main()
