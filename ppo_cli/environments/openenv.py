"""OpenEnv servers as environments: `openenv:URL`, one WebSocket session per episode.

Inside the environment process, whose Python needs the package `websockets`. The protocol is that of
`openenv.core.env_client`: {"type": "reset" | "step" | "close", "data": …} to URL/ws, answered with
observation, reward and done. A message of the policy becomes an action in one of three ways: the
arguments of its first tool call; its content, if that is a JSON object; else its content as the
field `environment.kwargs.field`, by default the only required text of the action's schema.
A server whose actions are calls of tools (OpenEnv's `MCPEnvironment`) lists them for the policy;
each call is an action, and a message without one ends the episode.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

SCHEMA_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 8 << 20


class Session:
    """An episode on a server, whose actions take the policy's text as `field` or call `tools`."""

    def __init__(self, url: str, field: str, tools: list[dict[str, Any]]) -> None:
        self._url = url
        self._field = field
        self.tools = tools
        self._socket: Any = None

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the row's messages, the last with the first observation added to it."""
        await self._connect()
        text, _, _ = read_result(await self._send("reset", {"seed": row["seed"]}))
        *messages, last = row["messages"] or [{"role": "system"}]
        if last["role"] == "system":  # without a row, the observation is the opening
            messages, last = row["messages"], {"role": "user", "content": ""}
        content = f"{last['content']}\n\n{text}".strip()
        return [*messages, {**last, "content": content}] if content else messages

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send an action; one that the server cannot read is answered with what is wrong."""
        if self.tools:
            return await self._call_tools(message)
        data = await self._send("step", read_action(message, self._field))
        if data.get("code") == "VALIDATION_ERROR":
            text = read_refusal(data)
            return {"messages": text, "error": text}
        text, done, reward = read_result(data)
        reply: dict[str, Any] = {"role": "user", "content": text}
        if message.get("tool_calls"):
            call = message["tool_calls"][0]
            names = {"name": call["function"]["name"], "tool_call_id": call.get("id")}
            reply = {**reply, **names, "role": "tool"}
        return {"messages": [reply], "done": done, "reward": reward}

    async def _call_tools(self, message: dict[str, Any]) -> dict[str, Any]:
        if error := message.get("error"):
            return {"messages": [{"role": "tool", "content": f"Error: {error}"}], "error": error}
        replies, errors, tools = [], list[str](), []
        reward, done = None, not message.get("tool_calls")
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
            started = time.monotonic()
            data = await self._send("step", action)
            tools.append((name, time.monotonic() - started))
            text, error = read_tool_result(data)
            errors += [error] if error else []
            names = {"name": name, "tool_call_id": call.get("id")}
            replies.append({"role": "tool", "content": error or text, **names})
            if data.get("reward") is not None:
                reward = (reward or 0.0) + data["reward"]
            if done := bool(data.get("done")):
                break
        error = "; ".join(errors)
        fields = {"done": done, "reward": reward, "error": error, "tools": tools}
        return {"messages": replies, **fields}

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the server's tools."""
        await self._connect()
        data = await self._send("step", {"type": "list_tools"})
        await self.close()
        empty = {"type": "object", "properties": {}}
        functions = [
            {
                "name": tool["name"], "description": tool.get("description") or tool["name"],
                "parameters": tool.get("input_schema") or tool.get("inputSchema") or empty,
            }
            for tool in data.get("observation", {}).get("tools", ())
        ]  # fmt: skip
        return [{"type": "function", "function": function} for function in functions]

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect

        self._socket = await connect(f"{self._url}/ws", max_size=MAX_MESSAGE_BYTES)

    async def close(self) -> None:
        """End the session on the server."""
        if self._socket is not None:
            await self._socket.close()

    async def _send(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        content: dict[str, Any] = answer.get("data", {})
        if answer.get("type") == "error" and content.get("code") != "VALIDATION_ERROR":
            raise RuntimeError(f"the server answered: {content.get('message')}")
        return content


def read_action(message: dict[str, Any], field: str) -> dict[str, Any]:
    """Return the action that a message of the policy is."""
    if message.get("tool_calls"):
        return dict(message["tool_calls"][0]["function"]["arguments"])
    try:
        action = json.loads(message["content"])
    except (ValueError, RecursionError):
        action = None
    return action if isinstance(action, dict) else {field: message["content"]}


def read_result(data: dict[str, Any]) -> tuple[str, bool, Any]:
    """Return the text of an observation, whether the episode is done, and the reward.

    The text is the only text of the observation, or else all of it as JSON; "" if it is empty.
    """
    fields = data.get("observation", {}).items()
    # Metadata is for people, and may have the solution.
    observation = {k: v for k, v in fields if k != "metadata" and v not in (None, "")}
    texts = [value for value in observation.values() if isinstance(value, str)]
    alone = len(texts) == 1 and not any(isinstance(v, (dict, list)) for v in observation.values())
    text = texts[0] if alone else json.dumps(observation, ensure_ascii=False) if observation else ""
    return text, bool(data.get("done")), data.get("reward")


def read_tool_result(data: dict[str, Any]) -> tuple[str, str]:
    """Return the result of a tool call as text, and its error, "" if there is none.

    A result is a value, or one of MCP with the value as `data` and texts as `content`.
    """
    observation = data.get("observation", {})
    if "code" in data:  # the server refused the action
        return "", read_refusal(data)
    if error := observation.get("error"):
        return "", f"Error: {error.get('message') if isinstance(error, dict) else error}"
    result = observation.get("result")
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    if not (isinstance(result, dict) and "content" in result):
        return text, ""
    if isinstance(value := result.get("data"), str):
        text = value
    elif value is not None:
        text = json.dumps(value, ensure_ascii=False)
    else:
        parts = result["content"] or ()
        text = "\n".join(part.get("text", f"[{part.get('type')}: not a text]") for part in parts)
    return text, f"Error: {text}" if result.get("is_error") else ""


def read_refusal(data: dict[str, Any]) -> str:
    """Return why the server refused an action, for the policy."""
    details = data.get("errors") or [{}]
    return f"Error: {data.get('message')}: {details[0].get('msg', '')}"


async def load(url: str, kwargs: dict[str, Any], worker: Any) -> Callable[[], Session]:
    """Return what opens sessions; raises the worker's Problems."""
    label = f"--environment openenv:{url}"
    web = url.rstrip("/")
    web = web if "://" in web else f"http://{web}"

    def read_schema() -> dict[str, Any]:
        with urllib.request.urlopen(f"{web}/schema", timeout=SCHEMA_TIMEOUT_S) as answer:
            action: dict[str, Any] = json.load(answer)["action"]
            return action

    try:
        import websockets  # noqa: F401

        schema = await asyncio.get_running_loop().run_in_executor(None, read_schema)
    except (OSError, ValueError, KeyError) as error:
        text = worker.describe_error(error)
        raise worker.Problems(
            f"{label}: {web}/schema does not answer: {text}. Start the server of the environment, "
            "and name its address as in openenv:http://localhost:8000."
        ) from None
    properties = schema.get("properties", {})
    required = [n for n in schema.get("required", ()) if properties[n].get("type") == "string"]
    unknown = [name for name in kwargs if name != "field"]
    field = kwargs.get("field", required[0] if len(required) == 1 else None)
    if unknown:
        raise worker.Problems(f"{label} has no environment.kwargs.{unknown[0]}; it has: field.")
    address = web.replace("http", "ws", 1)
    # The action of a call, or the base class of all actions.
    if {"tool_name", "arguments"} <= {*properties} or {*properties} <= {"metadata", "type"}:
        try:
            tools = await Session(address, "", []).list_tools()
        except Exception as error:
            text = worker.describe_error(error)
            raise worker.Problems(f"{label}: its tools cannot be listed: {text}.") from error
        if not tools:
            raise worker.Problems(
                f"{label}: the actions of this server are calls of tools, and it lists no tools."
            )
        return lambda: Session(address, "", tools)
    if field not in properties:
        raise worker.Problems(
            f"{label}: choose the field of an action that takes the policy's text with "
            f"environment.kwargs.field=NAME. The action has: {', '.join(properties) or 'none'}."
        )
    assert isinstance(field, str)
    return lambda: Session(address, field, [])
