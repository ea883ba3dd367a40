"""Processes that a launcher forks for us, and the launcher: `sandlock_launcher`, seen from here."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ppo_cli.rewards.code.boot import ENVIRONMENT, program
from ppo_cli.rewards.code.sandlock_launcher import NUMBER, READY

SECONDS_TO_ANSWER = 60.0
SECONDS_TO_CLOSE = 60.0
_LONGEST_WORDS = 4096


class Forked:
    """A process that is no child of ours. Until `release`, its number is nobody else's."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._code: int | None = None
        self._lost = False
        channel.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal), or None while it runs."""
        if self._code is None:
            with contextlib.suppress(BlockingIOError):
                self._code = self._receive()
        return self._code

    def _receive(self) -> int:
        try:
            data = self._channel.recv(NUMBER.size)
        except ConnectionError:
            data = b""
        if not data:
            self._lost = True
            return -signal.SIGKILL
        return int(NUMBER.unpack(data)[0])

    def wait(self, timeout: float) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired when it takes longer."""
        if self.poll() is None:
            listener = select.poll()
            listener.register(self._channel, select.POLLIN)
            listener.poll(1000 * timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("sandlock", timeout)
        return code

    def is_lost(self) -> bool:
        """Say whether it was killed because its launcher died, which is no fault of its own."""
        self.poll()
        return self._lost

    def release(self) -> None:
        """Let the launcher kill what still lives, and reap it."""
        self._channel.close()


class Launcher:
    """A program that forks; started when first needed, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(
        self,
        command: Sequence[str],
        plan: dict[str, Any],
        *,
        streams: tuple[int, int, int],
        folder: str,
    ) -> Forked:
        """Start a command; OSError when the launcher dies over it twice.

        The folder is removed when the command is released.
        """
        order = json.dumps([plan, list(command)]).encode()
        for _ in range(2):
            process = self._running()
            try:
                return self._ask(NUMBER.pack(len(order)) + order, streams, folder)
            except (ConnectionError, TimeoutError, struct.error):
                self._bury(process)
        raise OSError("the launcher of sandlock has died twice over one start")

    def close(self) -> None:
        """End the launcher with all that it has forked; the next `fork` starts another."""
        with self._lock:
            self._end(SECONDS_TO_CLOSE)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is None:
                try:
                    self._process, self._control = self._start()
                    _greet(self._control)
                except BaseException:
                    self._end(0.0)
                    raise
            return self._process

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the launcher. It watches this process by itself, whichever thread starts it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", *program("sandlock_launcher", [os.getpid()])],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=ENVIRONMENT,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return process, ours

    def _ask(self, order: bytes, streams: tuple[int, int, int], folder: str) -> Forked:
        ours, theirs = socket.socketpair()
        try:
            ours.settimeout(SECONDS_TO_ANSWER)
            with theirs:
                self._send(os.fsencode(folder), [theirs.fileno(), *streams])
            pid = int(NUMBER.unpack(ours.recv(NUMBER.size))[0])
            if pid < 0:
                raise OSError(-pid, f"sandlock cannot fork: {os.strerror(-pid)}")
            ours.sendall(order)
        except BaseException:
            ours.close()
            raise
        return Forked(pid, ours)

    def _send(self, folder: bytes, fds: list[int]) -> None:
        with self._lock:
            if self._control is None:
                raise ConnectionError("another thread has cleared the launcher away")
            socket.send_fds(self._control, [folder], fds)

    def _bury(self, process: subprocess.Popen[bytes]) -> None:
        """Clear a launcher away that does not answer, unless another thread has done so."""
        with self._lock:
            if self._process is process:
                self._end(0.0)

    def _end(self, patience: float) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
            self._process.kill()
            self._process.wait(SECONDS_TO_CLOSE)
            self._process = None


def _greet(control: socket.socket) -> None:
    """Wait until a launcher is ready; OSError tells why it is not."""
    control.settimeout(SECONDS_TO_ANSWER)
    words = control.recv(_LONGEST_WORDS)
    if words != READY:
        raise OSError(words.decode("utf-8", "replace") or "its launcher ends at once")
