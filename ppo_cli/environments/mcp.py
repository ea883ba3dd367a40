"""Tools of MCP servers: a connection per server and environment process, shared by its episodes.

Inside the environment process, whose Python needs the package `mcp`. When a server ends, or has
forgotten the session, so does the process: the pool replaces it, with new connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

# How servers that were started again say that they do not know a client, and how the package says
# that the connection is lost.
LOST = re.compile(
    "Connection closed|SSE stream |Session (not found|terminated)"
    "|(Not Found|Bad Request): .*(session|initialized)"
)


async def load(
    commands: list[str], timeout: float, make_tool: Callable[..., Any],
    tool_error: type[Exception], worker: Any, passed: list[str],
) -> list[Any]:  # fmt: skip
    """Start the servers and return their tools; raises the worker's Problems.

    `make_tool` takes a schema, what to run, no hints (a server checks arguments itself), and the
    source. `tool_error` is what the policy reads. A server at an address has `timeout` seconds.
    """
    try:
        import mcp
    except ImportError:
        raise worker.Problems(
            f"--mcp: the Python of the environment lacks the package mcp. Install it with: "
            f"{sys.executable} -m pip install 'mcp>=2,<3'"
        ) from None
    tools = []
    for command in commands:
        client = await _start(mcp, command, timeout, worker, passed)
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                function = {
                    "name": tool.name, "description": tool.description or tool.title or tool.name,
                    "parameters": tool.input_schema,
                }  # fmt: skip
                run = _make_call(mcp, client, tool.name, command, tool_error)
                schema = {"type": "function", "function": function}
                tools.append(make_tool(schema, run, None, f"--mcp {command!r}"))
            cursor = page.next_cursor
            if not cursor:
                break
    return tools


async def _start(mcp: Any, command: str, timeout: float, worker: Any, passed: list[str]) -> Any:
    """Return a connected client of a server."""
    remote = re.match("https?://", command)
    try:
        server: Any = command
        if not remote:
            program, *arguments = shlex.split(command)
            # The package adds HOME, PATH and the like.
            env = {name: os.environ[name] for name in passed}
            server = mcp.StdioServerParameters(command=program, args=arguments, env=env)
        # A command may download packages before it answers.
        return await asyncio.wait_for(worker.enter(mcp.Client(server)), timeout if remote else None)
    except BaseException as error:
        while getattr(error, "exceptions", None):  # the package wraps errors in groups
            error = error.exceptions[0]  # type: ignore[attr-defined]
        text = worker.describe_error(error)
        if remote:
            raise worker.Problems(
                f"--mcp {command!r} does not answer: {text}. Start the server, and write its "
                "address with its path, as in http://127.0.0.1:8000/mcp."
            ) from error
        raise worker.Problems(
            f"--mcp {command!r} does not start: {text}. Name the command of a server that speaks "
            "MCP over stdin and stdout, or its http:// address."
        ) from error


def _make_call(
    mcp: Any, client: Any, name: str, command: str, tool_error: type[Exception]
) -> Callable[..., Any]:
    async def call(**arguments: Any) -> str:
        try:
            result = await client.call_tool(name, arguments)
        except mcp.MCPError as error:
            if LOST.match(error.message):
                print(f"the MCP server {command} has ended", file=sys.stderr, flush=True)
                os._exit(1)
            raise tool_error(error.message) from None
        text = "\n".join(_read_block(block) for block in result.content)
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise tool_error(text)
        return text

    return call


def _read_block(block: Any) -> str:
    texts = (getattr(part, "text", None) for part in (block, getattr(block, "resource", None)))
    return next((text for text in texts if text is not None), f"[{block.type}: not a text]")
