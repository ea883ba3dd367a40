"""A copy of this process, made early, whose own copies become helpers within milliseconds.

Importing what an engine needs takes seconds; a fork of a process that has imported it takes none.
But only a young process may fork: one that reads data and samples has threads, whose locks the
copy would inherit and never see opened. So the copy is made first, and waits.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import NoReturn


class Spare:
    """Forks helpers; they and it end with this process, however that ends."""

    def __init__(self) -> None:
        self._door = _first_copy()

    def start(self, module: str, environ: Mapping[str, str], *args: str) -> socket.socket:
        """Let a new process call `serve(connection, *args)` of a module; returns our end of it.

        It is a process of its own session, with these variables and without our output.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._door, [b"!"], [theirs.fileno()])
            except OSError:  # the copy was killed: another one, though late
                self.close()
                self._door = _first_copy()
                socket.send_fds(self._door, [b"!"], [theirs.fileno()])
        first = pickle.dumps((module, dict(environ), args))
        connection = Connection(os.dup(ours.fileno()))
        try:
            connection.send_bytes(first)
        finally:
            connection.close()
        return ours

    def close(self) -> None:
        """Let the copy end. Helpers stay until their connections end."""
        self._door.close()


def _first_copy() -> socket.socket:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any thread
        pid = os.fork()
    if pid:
        theirs.close()
        return ours
    try:
        _leave_home(theirs.fileno())
        _fork_on_demand(theirs)
    finally:
        os._exit(1)


def _leave_home(door: int) -> None:
    """Hold nothing by which others would wait for us, and hear no signal meant for the owner."""
    os.setsid()
    gc.freeze()  # objects whose files are closed under them must never be tidied up
    os.closerange(3, door)
    os.closerange(door + 1, os.sysconf("SC_OPEN_MAX"))
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


def _fork_on_demand(door: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        asked, handles, _, _ = socket.recv_fds(door, 1, 1)
        if not asked:  # the owner is gone
            os._exit(0)
        if os.fork() == 0:
            door.close()
            _serve(Connection(handles[0]))
        os.close(handles[0])


def _serve(connection: Connection) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        module, environ, args = pickle.loads(connection.recv_bytes())
        os.environ.clear()
        os.environ.update(environ)
        importlib.import_module(module).serve(connection, *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
