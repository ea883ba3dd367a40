"""This process's part in a Ray cluster: it joins, asks whether Ray still answers, and leaves."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from ppo_cli.cluster.addresses import accepts_connections, join_address
from ppo_cli.engine.leftovers import remove_stale_folders
from ppo_cli.errors import WorkerLost, first_line
from ppo_cli.secrets.redact import redact
from ppo_cli.waits import REACH_S, NoAnswer, await_result, run_in_thread

# How often the head of a joined cluster is connected to, and how often before it counts as lost.
PROBE_EVERY_S, PROBE_ATTEMPTS = 5.0, 3


class Session:
    """A connection to the Ray cluster at an address. `close` leaves the cluster."""

    def __init__(self, address: str, logs: Path) -> None:
        self._failure: str | None = None  # once set, it stays
        self._address = address
        self._probed_at = time.monotonic()
        try:
            self._join(logs)
        except BaseException:
            self.close()
            raise

    def failure(self) -> str | None:
        """Describe how Ray itself failed, or None while it works."""
        if self._failure is None:
            self._failure = self._probe()
        return self._failure

    def close(self) -> None:
        """Leave Ray. Safe to call twice."""
        self._failure = self._failure or "The cluster is closed."
        if ray.is_initialized():
            ray.shutdown()
        remove_stale_folders()

    def _join(self, logs: Path) -> None:
        """Connect this process to the Ray cluster at the address.

        Raises WorkerLost if Ray cannot be joined.
        """
        _print_into(logs / "ray.log")

        # In a thread, where Ray installs no signal handlers: it waits for a silent head for ever.
        def join() -> None:
            with _without_current_folder(logs):
                ray.init(
                    address=self._address,
                    namespace=f"ppo-{uuid.uuid4().hex}",
                    log_to_driver=False,
                    logging_level="ERROR",
                )

        try:
            await_result(run_in_thread(join), f"the Ray cluster at {self._address}", REACH_S)
            # The address given may be "auto", or a name.
            self._address = ray.get_runtime_context().gcs_address
        except NoAnswer as late:
            raise WorkerLost(
                f"{late}. Is its head at that address alive, and its port open?"
            ) from None
        except (ConnectionError, RuntimeError, TimeoutError) as error:
            reason = first_line(error)
            raise WorkerLost(f"There is no Ray to join at {self._address}: {reason}") from None

    def _probe(self) -> str | None:
        """Connect to the head of the cluster every few seconds."""
        if time.monotonic() - self._probed_at < PROBE_EVERY_S:
            return None
        # Several attempts: a busy head may refuse a connection for a moment.
        for attempt in range(PROBE_ATTEMPTS):
            if accepts_connections(self._address):
                self._probed_at = time.monotonic()
                return None
            time.sleep(0.3 * (attempt + 1))
        return f"The Ray cluster at {self._address} does not answer any more."


def node_answers(node_id: str) -> bool:
    """Whether a node's raylet accepts connections. Ray itself needs seconds to miss a node."""
    # Without its head, Ray would wait for its list of nodes forever.
    if not accepts_connections(ray.get_runtime_context().gcs_address):
        return False
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            raylet = join_address(node["NodeManagerAddress"], node["NodeManagerPort"])
            return bool(node["Alive"]) and accepts_connections(raylet)
    return not node_id


@contextmanager
def _without_current_folder(empty: Path) -> Iterator[None]:
    """Keep Ray from putting our current folder first in the workers' import path.

    Workers would import a `torch.py` in it, which this process would not.
    """
    folder = Path.cwd()
    if {"", str(folder)} & set(sys.path):
        yield
        return
    os.chdir(empty)
    try:
        yield
    finally:
        os.chdir(folder)


def _print_into(log: Path) -> None:
    """Write what Ray prints about lost workers into a log."""

    def write(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        with suppress(OSError), log.open("a") as file:
            file.write(redact("\n".join(data["lines"]) + "\n"))

    log.parent.mkdir(parents=True, exist_ok=True)
    ray._private.worker.print_to_stdstream = write  # private; tried with Ray 2.60
