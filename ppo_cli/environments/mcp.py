"""Tools of MCP servers, each shared by the episodes of an environment process, or of one episode.

Inside the environment process, whose Python needs the package `mcp`. A call that takes too long or
ends its server costs its own episode: the server is replaced, and calls that waited beside it are
asked again, each alone. A server that does not start again ends the process, which the pool
replaces.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

START_S = 30.0  # a server has this long to start again
SPARES = 4  # servers at once for calls that are asked again


class ServerEnded(Exception):
    """A server has ended, or has forgotten the session."""


async def load(
    specs: list[dict[str, Any]], timeout: float, make_tool: Callable[..., Any],
    tool_error: type[Exception], worker: Any, passed: list[str],
) -> list[Any]:  # fmt: skip
    """Start the servers and return their tools; raises the worker's Problems.

    `make_tool` takes a schema, what to run, no hints (a server checks arguments itself), the
    source, and the server. `tool_error` is what the policy reads. A server at an address has
    `timeout` seconds.
    """
    try:
        import mcp
    except ImportError:
        raise worker.Problems(
            f"--mcp: the Python of the environment lacks the package mcp. Install it with: "
            f"{sys.executable} -m pip install 'mcp>=2,<3'"
        ) from None
    tools = []
    for spec in specs:
        server = Server(mcp, spec, timeout, worker, passed, tool_error)
        client = await server.start()
        cursor = None
        names, chosen = list[str](), spec.get("tools")
        while True:
            page = await client.list_tools(cursor=cursor)
            names += [tool.name for tool in page.tools]
            for tool in page.tools:
                if chosen and tool.name not in chosen:
                    continue
                function = {
                    "name": tool.name, "description": tool.description or tool.title or tool.name,
                    "parameters": tool.input_schema,
                }  # fmt: skip
                run = functools.partial(server.call, tool.name)
                schema = {"type": "function", "function": function}
                tools.append(make_tool(schema, run, None, spec["label"], server))
            cursor = page.next_cursor
            if not cursor:
                break
        if unknown := [name for name in chosen or () if name not in names]:
            raise worker.Problems(
                f"{spec['label']}: the server has no tool {', '.join(unknown)}. It has: "
                f"{', '.join(names)}."
            )
    return tools


@dataclass(eq=False)
class Connection:
    """A client, what closes it, when it last answered, and when its latest answered call began."""

    client: Any
    close: Callable[[], None]
    answered: float = 0.0
    latest: float = 0.0


@dataclass(eq=False)
class Open:
    """A call under way; `shared`: others were under way with it."""

    connection: Connection
    started: float
    shared: bool


class Server:
    """A server: its clients, and which calls are under way."""

    def __init__(
        self, mcp: Any, spec: dict[str, Any], timeout: float, worker: Any, passed: list[str],
        tool_error: type[Exception], *, is_own: bool = False,
    ) -> None:  # fmt: skip
        self._mcp, self._spec, self._timeout = mcp, spec, timeout
        self._is_own = is_own  # of one episode
        self.name = str(spec["name"])
        self._worker, self._passed, self._tool_error = worker, passed, tool_error
        self._current: Any = None  # a Connection, after the start
        self._open: set[Open] = set()
        self._lock = asyncio.Lock()
        self._slots, self._spares = asyncio.Semaphore(SPARES), list[Connection]()

    async def start(self) -> Any:
        """Connect; returns the client, or raises the worker's Problems."""
        self._current = await self._connect()
        client = self._current.client
        self.name = self.name or str(getattr(client.server_info, "name", ""))
        return client

    def copy(self) -> Server:
        """Return a server of the same kind for one episode, which is to be started."""
        fields = self._mcp, self._spec, self._timeout, self._worker, self._passed, self._tool_error
        return Server(*fields, is_own=True)

    def close(self) -> None:
        """End the server, as far as this process has started it."""
        for connection in filter(None, (self._current, *self._spares)):
            connection.close()

    async def call(self, name: str, /, **arguments: Any) -> str:
        """Return the text of a result, or raise what the policy reads."""
        async with self._lock:  # while it starts again
            pass
        call = Open(self._current, time.monotonic(), bool(self._open))
        for other in self._open:
            other.shared = True
        self._open.add(call)
        try:
            result = await self._ask(call.connection.client, name, arguments)
            call.connection.answered = time.monotonic()
            call.connection.latest = max(call.connection.latest, call.started)
        except (self._worker.TimedOut, ServerEnded) as error:
            await self._replace(call.connection)
            # Others may be the reason, also those before it in a queue, unless the server answered
            # later calls, while this one hung.
            late = call.connection.answered > call.started + self._timeout / 2
            passed = late and call.connection.latest > call.started
            if not call.shared or (passed and not isinstance(error, ServerEnded)):
                raise
            result = await self._ask_alone(name, arguments)
        finally:
            self._open.discard(call)
        text = "\n".join(_read_block(block) for block in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise self._tool_error(text)
        return text

    async def _ask(self, client: Any, name: str, arguments: dict[str, Any]) -> Any:
        """Return a result; an error is the tool's if the server still answers."""
        call = functools.partial(client.call_tool, name, arguments)
        try:
            return await self._worker.run_call(call, timeout=self._timeout)
        except self._mcp.MCPError as error:
            try:
                listing = functools.partial(client.list_tools, cache_mode="bypass")
                await self._worker.run_call(listing, timeout=self._timeout)
            except self._mcp.MCPError:
                raise ServerEnded("the call ended its MCP server") from None
            raise self._tool_error(error.message) from None

    async def _ask_alone(self, name: str, arguments: dict[str, Any]) -> Any:
        """Ask a server that nobody else asks."""
        try:
            await asyncio.wait_for(self._slots.acquire(), self._timeout + START_S)
        except asyncio.TimeoutError:  # noqa: UP041  (another class before Python 3.11)
            raise ServerEnded("other calls ended its MCP server") from None
        try:
            spare = self._spares.pop() if self._spares else await self._connect()
            keeps = True
            try:
                return await self._ask(spare.client, name, arguments)
            except (self._worker.TimedOut, ServerEnded):
                keeps = False
                spare.close()
                raise
            finally:
                self._spares += [spare] if keeps else []
        finally:
            self._slots.release()

    async def _replace(self, connection: Connection) -> None:
        """Start the server again, if this connection, which failed, is still in use."""
        async with self._lock:
            if connection is not self._current:
                return
            self._worker.RESTARTS.append(self._spec["label"])
            asyncio.get_running_loop().call_later(self._timeout, connection.close)
            try:
                await self.start()
            except self._worker.Problems as problems:
                if self._is_own:
                    raise ServerEnded("the call ended its MCP server") from None
                print(*problems.lines, file=sys.stderr, flush=True)
                os._exit(1)

    async def _connect(self) -> Connection:
        spec, worker = self._spec, self._worker
        remote = "url" in spec
        try:
            if remote:
                http: Any = importlib.import_module("mcp.client.streamable_http")
                client = http.create_mcp_http_client(headers=spec.get("headers"))
                server: Any = http.streamable_http_client(spec["url"], http_client=client)
            else:
                # The package adds HOME, PATH and the like.
                env = {name: os.environ[name] for name in self._passed} | spec.get("env", {})
                server = self._mcp.StdioServerParameters(
                    command=spec["command"], args=spec.get("args", []), env=env, cwd=spec.get("cwd")
                )
            # A command may download packages before it answers.
            limit = self._timeout if remote else None
            entering = worker.enter(self._mcp.Client(server))
            return Connection(*await asyncio.wait_for(entering, limit))
        except BaseException as error:
            while getattr(error, "exceptions", None):  # the package wraps errors in groups
                error = error.exceptions[0]  # type: ignore[attr-defined]
            text = worker.describe_error(error)
            if remote:
                raise worker.Problems(
                    f"{spec['label']} does not answer: {text}. Start the server, and write its "
                    "address with its path, as in http://127.0.0.1:8000/mcp."
                ) from error
            raise worker.Problems(
                f"{spec['label']} does not start: {text}. Name the command of a server that "
                "speaks MCP over stdin and stdout, or its http:// address."
            ) from error


def _read_block(block: Any) -> str:
    texts = (getattr(part, "text", None) for part in (block, getattr(block, "resource", None)))
    return next((text for text in texts if text is not None), f"[{block.type}: not a text]")
