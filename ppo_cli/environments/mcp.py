"""Tools of MCP servers, each shared by the episodes of an environment process, or of one episode.

Inside the environment process, whose Python needs the package `mcp`. A call that takes too long or
ends its server costs its own episode: the server is replaced, and the calls under way there are
asked again, each alone. A server that does not start again ends the process, which the pool
replaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

START_S = 30.0  # a server has this long to start again
SPARES = 4  # servers kept, or started at once, for calls asked again; one that hangs lets others go
# For a server that answers no call to list its tools, and to end after an answer.
LOOK_S = 0.5
REST_S = 0.1  # from an answer of a spare to its next call: it may end or stop after an answer
EXIT_S = 2.0  # for a server to end after its stdin is closed, and again after SIGTERM
CHUNK_BYTES, MAX_PARTS = 1 << 16, 1_000  # read at once; of a result
MAX_STARTS = 4  # where a message is looked for in a line that is not one
MAX_LINE, ID_BYTES = 8 << 20, 200  # bytes of a message, and those at its ends that have its id
# Where a message has its id, before or after the result, which may have records with ids.
ID_AT_START = re.compile(rb'\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)')
ID_AT_END = re.compile(rb'"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')
MESSAGE = re.compile(rb'\{\s*"(?:jsonrpc|result|error|id)"\s*:')  # where one may begin in a line
STRIDE = 1_000_003  # between ids on the wire: an answer whose id is off by a few is nobody's
TOO_LONG = b"""{"jsonrpc": "2.0", "id": %s, "error": {
    "code": -32000, "message": "the answer has more than 8 MiB"}}"""


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
    """A client, what closes it, and whether it has answered a call as a spare."""

    client: Any
    close: Callable[[], None]
    used: bool = False


@dataclass(eq=False)
class Open:
    """A call under way; `shared`: others may be guilty if it fails."""

    connection: Connection
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
        self._answered = -math.inf  # when a call was
        self._lock = asyncio.Lock()
        self._turns, self._spares = worker.Turns(SPARES), list[Connection]()

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
        # One that was answered just now may leave a server that answers no more.
        shared = bool(self._open) or time.monotonic() < self._answered + LOOK_S
        call = Open(self._current, shared)
        for other in self._open:
            other.shared = True
        self._open.add(call)
        try:
            result = await self._ask(call.connection.client, name, arguments)
            self._answered = time.monotonic()
        except (self._worker.TimedOut, ServerEnded):
            await self._replace(call.connection)
            # Others may be the reason if there were any: those before it in a queue or in a pipe,
            # or one that read the server's stdin, so that the server never saw this request.
            if self._is_own or not call.shared:
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
            if not await self._lives(client, self._timeout):
                raise ServerEnded("the call ended its MCP server") from None
            raise self._tool_error(error.message) from None

    async def _lives(self, client: Any, limit: float) -> bool:
        listing = functools.partial(client.list_tools, cache_mode="bypass")
        try:
            await self._worker.run_call(listing, timeout=limit)
        except (self._mcp.MCPError, self._worker.TimedOut):
            return False
        return True

    async def _ask_alone(self, name: str, arguments: dict[str, Any]) -> Any:
        """Ask a server that nobody else asks.

        A call may change things outside, so it runs again only if a call before it may have ended
        or harmed the server.
        """
        async with self._turns.take(self._timeout + START_S, self._find_spare) as spare:
            try:
                try:
                    result = await self._ask(spare.client, name, arguments)
                except (ServerEnded, self._worker.TimedOut):
                    if not spare.used:  # a call before may have ended or harmed it
                        raise
                    spare.close()
                    spare = await self._connect()
                    result = await self._ask(spare.client, name, arguments)
            except self._tool_error:
                self._keep(spare)
                raise
            except BaseException:
                spare.close()
                raise
            await asyncio.sleep(REST_S)
            self._keep(spare)
            return result

    async def _find_spare(self) -> Connection:
        while self._spares:
            spare = self._spares.pop()
            if await self._lives(spare.client, LOOK_S):  # the call before may have ended it
                return spare
            spare.close()
        return await self._connect()

    def _keep(self, spare: Connection) -> None:
        """Keep a server for the next call that is asked again, for a time."""
        if len(self._spares) == SPARES:
            spare.close()
            return
        spare.used = True
        self._spares.append(spare)

        def end() -> None:
            if spare in self._spares:
                self._spares.remove(spare)
                spare.close()

        asyncio.get_running_loop().call_later(self._timeout, end)

    async def _replace(self, connection: Connection) -> None:
        """Start the server again, if this connection, which failed, is still in use."""
        async with self._lock:
            if connection is not self._current:
                return
            self._worker.RESTARTS.append(self._spec["label"])
            asyncio.get_running_loop().call_later(self._timeout, connection.close)
            try:
                try:
                    await self.start()
                except self._worker.Problems:
                    # Not beside the old one, which may have a port of its own or all threads.
                    connection.close()
                    await asyncio.sleep(2 * EXIT_S + LOOK_S)
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
                server = open_server(spec, env, worker.reaper)
            # A command may download packages before its first answer.
            limit = self._timeout if remote else START_S if self._current else None
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


@contextlib.asynccontextmanager
async def open_server(
    spec: dict[str, Any], env: dict[str, str], reaper: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a command; yields the streams from which a client reads, and to which it writes.

    Other than the package's own: a long message takes time in proportion to its length and is
    answered as an error above MAX_LINE, notifications are left out, and nothing stays running.
    """
    anyio: Any = importlib.import_module("anyio")
    defaults: Any = importlib.import_module("mcp.client.stdio").get_default_environment()
    wrap: Any = importlib.import_module("mcp.shared.message").SessionMessage
    types: Any = importlib.import_module("mcp_types").jsonrpc_message_adapter
    process = await asyncio.create_subprocess_exec(
        spec["command"], *spec.get("args", []), env=defaults | env, cwd=spec.get("cwd"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def kill(_: Any = None) -> None:
        reaper.kill_below(process.pid)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    ended = asyncio.ensure_future(process.wait())
    ended.add_done_callback(kill)  # at once: later its id may be that of another process
    received, messages = anyio.create_memory_object_stream(math.inf)
    requests, to_send = anyio.create_memory_object_stream(math.inf)
    closed = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)

    async def read() -> None:
        line, head, complains = bytearray(), b"", True  # the head is that of too long a line
        with received, contextlib.suppress(*closed):
            while chunk := await stdout.read(CHUNK_BYTES):
                await asyncio.sleep(0)  # others run beside a flood
                first, *others = chunk.split(b"\n")
                line += first
                if len(line) > MAX_LINE:
                    head = head or bytes(line[:ID_BYTES])
                    del line[:-ID_BYTES]
                if not others:
                    continue
                if head:
                    number = ID_AT_END.search(line[-ID_BYTES:]) or ID_AT_START.match(head)
                    line, head = bytearray(TOO_LONG % number[1] if number else b""), b""
                for text in (bytes(line), *others[:-1]):
                    # Notifications are left out.
                    if text.isspace() or not text or (b'"method"' in text and b'"id"' not in text):
                        continue
                    # A print without an end of line, or half a message, may be in front of it.
                    starts = (match.start() for match in MESSAGE.finditer(text))
                    for start in (0, *itertools.islice(filter(None, starts), MAX_STARTS)):
                        with contextlib.suppress(ValueError, RecursionError):
                            fields = json.loads(text[start:])
                            if isinstance(fields, dict) and "method" not in fields:
                                fields["id"] = _read_id(fields.get("id"))
                            message = types.validate_python(fields, by_name=False)
                            # A server that prints what it received does not ask us.
                            if start and "method" in fields:
                                continue
                            break
                    else:
                        if complains:
                            what = f"{spec['label']} printed what is not a message: {text[:80]!r}"
                            print(what, file=sys.stderr, flush=True)
                        complains = False
                        continue
                    content = getattr(message, "result", {}).get("content")
                    if isinstance(content, list) and len(content) > MAX_PARTS:
                        mark = f"… {len(content) - MAX_PARTS:,} parts left out …"
                        content[MAX_PARTS:] = [{"type": "text", "text": mark}]
                    received.send_nowait(wrap(message))
                line = bytearray(others[-1])

    async def write() -> None:
        # A server that reads no more has ended, even if it still writes.
        with received, to_send, contextlib.suppress(*closed):
            async for request in to_send:
                fields = request.message.model_dump(mode="json", by_alias=True, exclude_unset=True)
                if "method" in fields and "id" in fields:
                    fields["id"] *= STRIDE
                if fields.get("method") == "notifications/cancelled":
                    fields["params"]["requestId"] *= STRIDE
                stdin.write(json.dumps(fields).encode() + b"\n")
                await stdin.drain()

    tasks = [asyncio.ensure_future(read()), asyncio.ensure_future(write())]
    try:
        yield messages, requests
    finally:
        requests.close()
        messages.close()
        stdin.close()
        await asyncio.wait([ended], timeout=EXIT_S)
        if not ended.done():
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
            await asyncio.wait([ended], timeout=EXIT_S)
        if not ended.done():
            ended.remove_done_callback(kill)
            kill()
        await asyncio.wait(tasks, timeout=EXIT_S)
        for task in tasks:
            task.cancel()


def _read_id(written: Any) -> Any:
    """Return the id of the request that an answer is for; as it is, that of none."""
    try:
        number, rest = divmod(int(written), STRIDE)
    except (TypeError, ValueError, OverflowError):
        return written
    return written if rest else number


def _read_block(block: Any) -> str:
    texts = (getattr(part, "text", None) for part in (block, getattr(block, "resource", None)))
    return next((text for text in texts if text is not None), f"[{block.type}: not a text]")
