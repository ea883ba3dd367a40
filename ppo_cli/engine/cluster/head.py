"""A program of its own: a Ray for one run, in a session of its own, that ends with its owner.

`python -m ppo_cli.engine.cluster.head '{"folder": …}'` starts Ray, prints its address and the
process ids of its parts as a JSON line, and watches: when stdin ends (the owner closed it or
died) or a part of Ray dies, it takes down all that belongs to its session. Signals meant for the
owner do not reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from ppo_cli.atomic import lives
from ppo_cli.engine.leftovers import sweep

PARTS = ("gcs_server", "raylet")  # those that a cluster cannot be without
LOST = {name: 40 + i for i, name in enumerate(PARTS)}  # exit codes
POLL_S = 0.3
ENDS_S = 5.0


def main() -> int:
    """Start, tell, watch, take down; returns the exit code."""
    wish = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        return _serve(wish)
    finally:
        end_session(os.getpid())
        sweep()
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
        _temp_dir=wish["folder"],
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
        lost = next((name for name, pid in parts.items() if not lives(pid)), None)
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
    deadline = time.monotonic() + ENDS_S
    while time.monotonic() < deadline:
        found = [pid for pid, _, _, theirs in _processes() if theirs == session]
        alive = [pid for pid in found if pid != os.getpid() and lives(pid)]
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
