"""The child's end of the channel of requests and answers.

The channel is a socket that the child has as its standard input, so that nothing that is printed
is taken for an answer. Programs load this file by its path with any Python of 3.9 or newer: it
imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from struct import Struct

# In front of each message: a mark, its size in bytes, and the number of the request.
HEADER = Struct("<4sQQ")
# A request or its answer; a part of an answer; and a request that nobody waits for any more.
MARK, PART, GIVEN_UP = b"\0ppo", b"\0prt", b"\0end"


class Channel:
    """Receives numbered requests and sends their answers, in any order, until the parent closes.

    `given_up` has the numbers of requests whose answers are not needed any more.
    """

    def __init__(self) -> None:
        self.given_up: set[int] = set()
        self._socket = socket.socket(fileno=os.dup(0))
        self._file = self._socket.makefile("rb")
        # Code that reads its standard input must not take requests away.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

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
        loop = asyncio.get_running_loop()
        requests: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        # A thread for sending: the parent may not read for a moment.
        sender = ThreadPoolExecutor(1)

        def read_requests() -> None:
            for request in self:
                loop.call_soon_threadsafe(requests.put_nowait, request)
            loop.call_soon_threadsafe(requests.put_nowait, None)

        async def respond(number: int, data: bytes) -> None:
            await loop.run_in_executor(sender, self.send, number, await answer(data))

        threading.Thread(target=read_requests, daemon=True).start()
        tasks = set()
        while (request := await requests.get()) is not None:
            task = asyncio.ensure_future(respond(*request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
