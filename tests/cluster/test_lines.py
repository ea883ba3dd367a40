"""One JSON object a line, whatever comes over the wire."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ppo_cli.cluster.addresses import LONGEST, Broken, Line, words


@pytest.fixture
def wire() -> Iterator[tuple[Line, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        other = socket.create_connection(door.getsockname())
        line = Line(door.accept()[0])
    yield line, other
    line.close()
    other.close()


def test_messages_arrive_in_order_and_whole(wire: tuple[Line, socket.socket]) -> None:
    line, other = wire
    far = Line(other)
    far.send("one", text="grüß\n")
    far.send("two")
    assert line.read(5) == {"type": "one", "text": "grüß\n"}
    assert line.read(5) == {"type": "two"}


def test_pieces_are_put_together(wire: tuple[Line, socket.socket]) -> None:
    line, other = wire
    other.sendall(b'{"type"')
    assert line.read(0.05) is None
    other.sendall(b': "slow"}\n')
    assert line.read(5) == {"type": "slow"}


def test_waiting_has_an_end(wire: tuple[Line, socket.socket]) -> None:
    begun = time.monotonic()
    assert wire[0].read(0.1) is None
    assert 0.05 < time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n",
        b"[1]\n",
        b'{"type": 3}\n',
        b"{}\n",
        b"\xff\xfe\n",
        b"[" * 5000 + b"\n",
    ],
)
def test_garbage_is_refused(wire: tuple[Line, socket.socket], garbage: bytes) -> None:
    wire[1].sendall(garbage)
    with pytest.raises(Broken, match="no message"):
        wire[0].read(5)


def test_a_line_without_end_is_refused(wire: tuple[Line, socket.socket]) -> None:
    line, other = wire
    sender = threading.Thread(target=other.sendall, args=(b"x" * (2 * LONGEST),), daemon=True)
    sender.start()
    with pytest.raises(Broken, match="without end"):
        line.read(5)
    line.close()
    sender.join(5)


def test_the_end_is_seen(wire: tuple[Line, socket.socket]) -> None:
    wire[1].close()
    with pytest.raises(Broken, match="closed the connection"):
        wire[0].read(5)


def test_closing_wakes_the_reader(wire: tuple[Line, socket.socket]) -> None:
    line, _ = wire
    threading.Timer(0.1, line.close).start()
    begun = time.monotonic()
    with pytest.raises(Broken):
        line.read(20)
    assert time.monotonic() - begun < 15
    with pytest.raises(Broken):
        line.send("late")
    with pytest.raises(Broken):
        line.read(1)


def test_what_is_too_long_does_not_leave(wire: tuple[Line, socket.socket]) -> None:
    with pytest.raises(ValueError, match="above"):
        wire[0].send("big", text="x" * LONGEST)


def test_words_are_safe_to_print() -> None:
    assert words("a\x1b[31mb\nc") == "a [31mb c"
    assert len(words("x" * 5000)) == 200
    assert words(None) == "None"
