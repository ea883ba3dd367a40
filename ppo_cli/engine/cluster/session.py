"""The Ray that a run works with: one of its own on this machine, or a cluster that it joins."""

from __future__ import annotations

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from ppo_cli.engine.cluster.head import LOST, end_session
from ppo_cli.engine.cluster.logs import read_tail
from ppo_cli.engine.leftovers import sweep
from ppo_cli.errors import Interrupted, WorkerLost
from ppo_cli.redact import redact

LONGEST_ROOT = 40  # Ray puts unix sockets below it, whose paths end at 107 characters
SMALL_MACHINE = 64 * 2**30
KNOCK_EVERY_S, KNOCKS = 5.0, 3
STOPPED = "Stopped while starting ({})."


class Session:
    """Starts or joins Ray; `close` ends what was started and leaves what was joined."""

    def __init__(
        self,
        *,
        gpus: int,
        logs: Path,
        address: str | None,
        timeout_s: float,
        stop_requested: Callable[[], str | None],
    ) -> None:
        self._log = logs / "ray.log"
        self._head: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._gone: str | None = None
        self._address = address
        self._knocked_at = time.monotonic()
        self._stop_requested = stop_requested
        try:
            if address is None:
                logs.mkdir(parents=True, exist_ok=True)
                self._start(gpus)
                self._address = self._await_address(timeout_s)
            self._join(str(self._address))
        except BaseException:
            self.close()
            raise

    def trouble(self) -> str | None:
        """Say what happened to Ray itself, or None while it is well."""
        if self._gone is None:
            self._gone = self._head_trouble() if self._head is not None else self._knock()
        return self._gone

    def close(self) -> None:
        """Leave Ray; end it when it is ours. Safe to call twice."""
        self._gone = self._gone or "The workers have been sent home."
        if ray.is_initialized():
            ray.shutdown()
        head, self._head = self._head, None
        if head is None:
            sweep()
            return
        assert head.stdin is not None and head.stdout is not None
        head.stdin.close()
        try:
            head.wait(10)
        except subprocess.TimeoutExpired:
            head.kill()
            head.wait()
        head.stdout.close()
        end_session(head.pid)  # what a killed head left behind
        sweep()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, gpus: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ppo-", dir=_short_root()))
        wish = {
            "folder": str(self._folder),
            "num_cpus": os.cpu_count() or 1,  # as many workers as that start at the same time
            "num_gpus": gpus,
            "object_store_memory": _object_store_bytes(),
        }
        # Its own session: Ctrl-C is for us alone. Its workers end soon after their cluster.
        settings = {
            "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
            "RAY_prestart_worker_first_driver": "0",  # ours have environments of their own
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # nobody else can reach what listens
        }
        paths = os.pathsep.join(path for path in sys.path if path)
        with self._log.open("ab") as log:
            self._head = subprocess.Popen(
                [sys.executable, "-m", "ppo_cli.engine.cluster.head", json.dumps(wish)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True, env=os.environ | settings | {"PYTHONPATH": paths},
            )  # fmt: skip

    def _await_address(self, timeout_s: float) -> str:
        assert self._head is not None and self._head.stdout is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if stop := self._stop_requested():
                raise Interrupted(STOPPED.format(stop))
            if select.select([self._head.stdout], [], [], 0.2)[0]:
                line = self._head.stdout.readline()
                if line.startswith(b"{"):
                    return str(json.loads(line)["address"])
                if not line:
                    break
        took = "it ended" if self._head.poll() is not None else f"no answer in {timeout_s:g} s"
        raise WorkerLost(f"Ray did not start on this machine: {took}. {read_tail(self._log)}")

    def _join(self, address: str) -> None:
        _keep_quiet(self._log)
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        far = ray_constants.ENABLE_RAY_CLUSTER
        # Ray takes 127.0.0.1 for this machine's name in the network, where ours does not listen.
        ray_constants.ENABLE_RAY_CLUSTER = far and self._head is None
        try:
            ray.init(
                address=address,
                namespace=f"ppo-{uuid.uuid4().hex}",
                log_to_driver=False,
                logging_level="ERROR",
            )
            # What was asked for may be "auto", or a name.
            self._address = ray.get_runtime_context().gcs_address
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise WorkerLost(f"There is no Ray to join at {address}: {words[0]}") from None
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = far
            for number, handler in kept.items():
                with suppress(ValueError):  # only the main thread has a say in signals
                    signal.signal(number, handler)

    def _head_trouble(self) -> str | None:
        code = None if self._head is None else self._head.poll()
        if code is None:
            return None
        part = next((name for name, number in LOST.items() if number == code), None)
        if part is None:
            return f"Ray on this machine ended (code {code}). {read_tail(self._log)}"
        return f"Ray on this machine lost its {part}, and with it all workers."

    def _knock(self) -> str | None:
        """Ask the head of a joined cluster, now and then, whether somebody is at home."""
        if time.monotonic() - self._knocked_at < KNOCK_EVERY_S:
            return None
        host, _, port = str(self._address).rpartition(":")
        for attempt in range(KNOCKS):
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
                self._knocked_at = time.monotonic()
                return None
            except OSError:
                time.sleep(0.3 * (attempt + 1))
        return f"The Ray cluster at {self._address} does not answer any more."


def node_answers(node_id: str) -> bool:
    """Whether somebody is at home on a node; Ray itself takes long to miss one."""
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    try:  # without its head, Ray's list of nodes would be waited for without end
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError:
        return False
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            door = (node["NodeManagerAddress"], node["NodeManagerPort"])
            try:
                socket.create_connection(door, timeout=5).close()
            except OSError:
                return False
            return bool(node["Alive"])
    return not node_id


def _keep_quiet(log: Path) -> None:
    """Ray prints what it thinks of lost workers; that belongs into a log."""

    def keep(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        with suppress(OSError), log.open("a") as file:
            file.write(redact("\n".join(data["lines"]) + "\n"))

    log.parent.mkdir(parents=True, exist_ok=True)
    ray._private.worker.print_to_stdstream = keep


def _short_root() -> str:
    """The temporary folder of this machine, or /tmp when its path is too long for sockets."""
    root = tempfile.gettempdir()
    return root if len(root) <= LONGEST_ROOT else "/tmp"


def _object_store_bytes() -> int | None:
    """Room for a batch and a set of weights on a small machine; Ray's own choice on others."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(0.1 * memory) if memory < SMALL_MACHINE else None
