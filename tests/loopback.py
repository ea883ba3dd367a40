"""A server in a thread of the test: how it starts, pauses, hangs up and ends, and when it fails.

Bounded: it listens on 127.0.0.1 only, limits a request's size, and ends with its `with` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

HTML = "<!doctype html><html><body><h1>Sign in to this network</h1></body></html>"


@dataclass
class Occasion:
    """When a fault of some `kind` strikes: the next `times` calls, a `share` of them, or all.

    The first `after` calls are let through.
    """

    kind: str | int
    times: int | None = None
    share: float | None = None
    after: int = 0

    def comes(self, dice: random.Random) -> bool:
        """Say whether this call meets the fault; counts it when it does."""
        if self.after > 0:
            self.after -= 1
            return False
        if self.share is not None and dice.random() >= self.share:
            return False
        if self.times is None:
            return True
        self.times -= 1
        return self.times >= 0


class Loopback(ABC):
    """A server on 127.0.0.1; `port` holds where, once it is entered."""

    def __init__(self, name: str, *, port: int = 0, largest: int = 8 * 2**20) -> None:
        self.port = port
        self._name, self._largest = name, largest
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready = threading.Event()

    def pause(self) -> None:
        """Stop listening and cut open connections: connecting is refused until `resume`."""
        self._call(self._unlisten()).result(60)

    def resume(self) -> None:
        """Listen again, on the same port."""
        self._call(self._listen()).result(60)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(60):
            raise RuntimeError(f"the {self._name} did not start within 60 s")
        return self

    def __exit__(self, *exc: object) -> None:
        self._call(self._close()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    @abstractmethod
    async def _handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, for any path."""

    def _call(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._gone = asyncio.Event()
        app = web.Application(client_max_size=self._largest)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site: web.TCPSite | None = None
        await self._listen()

    async def _listen(self) -> None:
        if self._site is not None:
            return
        self._gone.clear()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024, reuse_address=True)
        await site.start()
        self._site = site
        self.port = self._runner.addresses[0][1]

    async def _unlisten(self) -> None:
        self._gone.set()
        if self._site is not None:
            await self._site.stop()
            self._site = None
        for connection in list(self._runner.server.connections if self._runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()

    async def _close(self) -> None:
        await self._unlisten()
        await self._runner.cleanup()

    async def _hang(self, seconds: float) -> web.Response:
        """Keep a caller waiting; pausing or closing the server ends it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), seconds)
        return web.Response(status=503)


async def cut(request: web.Request, beginning: bytes) -> web.StreamResponse:
    """Send a part of what was promised, then drop the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = 1000
    await response.prepare(request)
    await response.write(beginning)
    if request.transport is not None:
        request.transport.close()
    return response
