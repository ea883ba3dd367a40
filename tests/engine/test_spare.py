"""A copy of this process that forks helpers: what they are given, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest

from ppo_cli.engine.spare import Spare


def serve(connection: Connection, word: str) -> None:
    """Say who this is, then echo; "exit" ends it at once."""
    heard = os.environ.get("WORD"), signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    connection.send((word, *heard, os.getpid(), os.getsid(0)))
    while (text := connection.recv()) != "exit":
        connection.send(text)
    os._exit(1)


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    module = ModuleType("ppo_spare_echo")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ppo_spare_echo", module)
    made = Spare()
    yield made
    made.close()


def begin(spare: Spare, word: str) -> tuple[Connection, int]:
    end: socket.socket = spare.start("ppo_spare_echo", {"WORD": word * 2}, word)
    connection = Connection(end.detach())
    assert connection.poll(10)
    said, variable, ignores, pid, session = connection.recv()
    assert (said, variable, ignores) == (word, word * 2, True)
    assert pid == session != os.getpid()
    return connection, pid


def await_end(pid: int) -> None:
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_helpers_live_side_by_side_and_one_that_exits_hurts_nobody(spare: Spare) -> None:
    first, one = begin(spare, "a")
    second, other = begin(spare, "b")
    assert one != other
    first.send("exit")
    with pytest.raises(EOFError):
        first.recv()
    await_end(one)
    second.send("still there")
    assert second.recv() == "still there"
    second.close()
    await_end(other)


def test_a_spare_that_was_killed_is_replaced(spare: Spare) -> None:
    connection, pid = begin(spare, "a")
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    again, other = begin(spare, "b")
    connection.close()
    again.close()
    await_end(pid)
    await_end(other)
