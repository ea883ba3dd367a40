"""The Ray that a run works with: one of its own on this machine, or a cluster that it joins."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from ppo_cli.engine.cluster.own_ray import OwnRay
from ppo_cli.engine.leftovers import sweep
from ppo_cli.errors import WorkerLost
from ppo_cli.redact import redact

KNOCK_EVERY_S, KNOCKS = 5.0, 3


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
        self._head: OwnRay | None = None
        self._gone: str | None = None
        self._address = address
        self._knocked_at = time.monotonic()
        try:
            if address is None:
                self._head = OwnRay(gpus=gpus, logs=logs)
                self._address = self._head.await_address(timeout_s, stop_requested)
            self._join(str(self._address))
        except BaseException:
            self.close()
            raise

    def trouble(self) -> str | None:
        """Say what happened to Ray itself, or None while it is well."""
        if self._gone is None:
            self._gone = self._head.trouble() if self._head is not None else self._knock()
        return self._gone

    def close(self) -> None:
        """Leave Ray; end it when it is ours. Safe to call twice."""
        self._gone = self._gone or "The workers have been sent home."
        if ray.is_initialized():
            ray.shutdown()
        head, self._head = self._head, None
        if head is None:
            sweep()
        else:
            head.close()

    def _join(self, address: str) -> None:
        _keep_quiet(self._log)
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        far = ray_constants.ENABLE_RAY_CLUSTER
        # Ray takes 127.0.0.1 for this machine's name in the network, where ours does not listen.
        ray_constants.ENABLE_RAY_CLUSTER = far and self._head is None
        try:
            with _workers_import_as_we_do(self._log.parent):
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
    """Ray prints what it thinks of lost workers; that belongs into a log."""

    def keep(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        with suppress(OSError), log.open("a") as file:
            file.write(redact("\n".join(data["lines"]) + "\n"))

    log.parent.mkdir(parents=True, exist_ok=True)
    ray._private.worker.print_to_stdstream = keep
