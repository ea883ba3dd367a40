"""One worker process as its pool sees it: start, send, receive, kill."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, cast

from ppo_cli.rewards.worker import Call, Order, Task

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# The path entry goes again, so that it shadows nothing of the user's own environment.
START = (
    "import sys; sys.path.insert(0, sys.argv[2]); import ppo_cli; sys.path.remove(sys.argv[2]); "
    "from ppo_cli.rewards.worker import main; main(int(sys.argv[1]))"
)
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
STALLED_SECONDS = 5
SECONDS_TO_START = 120.0
SECONDS_TO_LEAVE = 1.5
MOST_LOG = 1 << 16


class WorkerProcess:
    """A fresh interpreter with a socket to it; nothing of this process is copied into it."""

    def __init__(self, task: Task) -> None:
        ours, theirs = socket.socketpair()
        # A worker that neither reads nor writes must not hold the pool up for ever.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED_SECONDS, 0))
        self._log = cast("BinaryIO", tempfile.TemporaryFile("ab+"))  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(theirs.fileno()), PACKAGE_PARENT],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(),
                # A Ctrl-C at the terminal is for the trainer, which finishes its step first.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self.start_deadline = time.monotonic() + SECONDS_TO_START
        with contextlib.suppress(OSError):
            self.connection.send(task)

    def send(self, number: int, call: Call, timeout: float) -> None:
        """Hand over one call; raises OSError when the worker is gone or stuck."""
        self.connection.send(Order(number, call, timeout))

    def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError when the worker is gone."""
        message = self.connection.recv()
        if os.fstat(self._log.fileno()).st_size > MOST_LOG:
            os.ftruncate(self._log.fileno(), 0)
        return message

    def say_end(self) -> tuple[str, bool]:
        """Wait for a process that has hung up; return how it ended and whether by its limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_LEAVE)
        code = self.process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"the worker process ended by signal {name}{self._last_words()}", (
                -code == signal.SIGPROF
            )
        return f"the worker process ended with exit code {code}{self._last_words()}", False

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def hang_up(self) -> None:
        """Tell the worker to leave by itself."""
        self.connection.close()

    def kill(self, patience: float = 0.0) -> None:
        """End the process and all that it has started; waits until it is gone."""
        self.connection.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


def _environment() -> dict[str, str]:
    fixed = dict.fromkeys(ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"}
    # Sets of strings in one order in every process: the same response, the same score.
    return {**os.environ, **fixed, "PYTHONHASHSEED": "0"}
