"""The child's end of the channel of requests and answers.

The channel is a socket that the child has as its standard input, so that nothing that is printed
is taken for an answer. Programs load this file by its path with any Python of 3.9 or newer: it
imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from struct import Struct

# In front of each message: a mark, its size in bytes, and the number of the request.
HEADER = Struct("<4sQQ")
# A request or its answer; a part of an answer; and a request that nobody waits for any more.
MARK, PART, GIVEN_UP = b"\0ppo", b"\0prt", b"\0end"


class Channel:
    """Receives numbered requests and sends their answers, in any order, until the parent closes.

    `given_up` has the numbers of requests whose answers are not needed any more. A fork names its
    `connection`; that of a program is its standard input.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.given_up: set[int] = set()
        if connection is None:
            connection = socket.socket(fileno=os.dup(0))
            # Code that reads its standard input must not take requests away.
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
        connection.settimeout(None)  # the user's code may have set another default
        self._socket = connection
        self._file = connection.makefile("rb")

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the data of each request."""
        while len(header := self._file.read(HEADER.size)) == HEADER.size:
            mark, size, number = HEADER.unpack(header)
            if mark == GIVEN_UP:
                self.given_up.add(number)
            else:
                yield number, self._file.read(size)

    def send(self, number: int, data: bytes, mark: bytes = MARK) -> None:
        """Send the answer to a request, or a PART of it."""
        self._socket.sendall(HEADER.pack(mark, len(data), number) + data)

    async def serve(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer requests side by side, so that a slow one delays no other."""
        reader, writer = await asyncio.open_connection(sock=self._socket)

        async def respond(number: int, data: bytes) -> None:
            data = await answer(data)
            writer.write(HEADER.pack(MARK, len(data), number) + data)
            await writer.drain()

        tasks = set()
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # the parent has closed
            while True:
                mark, size, number = HEADER.unpack(await reader.readexactly(HEADER.size))
                if mark == GIVEN_UP:
                    self.given_up.add(number)
                    continue
                task = asyncio.ensure_future(respond(number, await reader.readexactly(size)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
