"""Replies with status 200: the JSON of an answer, or what came in place of one.

Gateways, proxies and wrong addresses answer 200 with pages, empty bodies or event streams. Chunks
of a chat completion that was streamed without being asked for are joined and read like any other.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.judge.providers.lengths import about_length
from ppo_cli.rewards.remote.failures import Failure, is_html, read_message, to_one_line

if TYPE_CHECKING:
    import aiohttp
    import httpx

    Handler = Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]

_EXCERPT = 120
_ANSWERS = {"candidates", "choices", "output", "answers", "code"}
STREAMS = "the server streams although it was not asked to"


def bad_body(what: str) -> JudgeError:
    """A reply with status 200 that is no reply: transport, not verdict."""
    return JudgeError(Failure.RETRYABLE, "bad_body", f"The reply is not an answer: {what}")


def read_chat(text: str) -> Any:
    """Return the JSON of a chat completion, or the completion that a stream of chunks makes."""
    return _join_chunks(text) if is_stream(text) else read_body(text)


def read_body(text: str) -> Any:
    """Return the JSON of a body; anything else is a bad body."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        raise bad_body(describe(text)) from None


def check_body(text: str) -> None:
    """Raise the bad body that an SDK would stumble over, or read as an empty answer."""
    body = read_body(text)
    if not isinstance(body, Mapping) or (body.get("error") and not body.keys() & _ANSWERS):
        raise_body(body)


async def check_response(response: httpx.Response) -> None:
    """`check_body` as an event hook of httpx."""
    if response.status_code == 200:
        await response.aread()
        check_body(response.text)


async def check_reply(request: aiohttp.ClientRequest, send: Handler) -> aiohttp.ClientResponse:
    """`check_body` as a middleware of aiohttp."""
    reply = await send(request)
    if reply.status == 200:
        check_body(await reply.text("utf-8", "replace"))
    return reply


class ErrorInBody(Exception):
    """An error object that came with status 200; read like the status that it stands for."""

    def __init__(self, body: Any, status: int) -> None:
        super().__init__(describe(body))
        self.body, self.status_code = body, status


def raise_body(body: Any) -> NoReturn:
    """Raise what a decoded body without an answer is: an error with a status, or a bad body."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, Mapping):
        code, words = error.get("code"), read_message(error)
        if isinstance(code, int) and 400 <= code < 600:
            raise ErrorInBody(body, code)
        if about_length(400, frozenset({str(code).lower()}), words):
            raise ErrorInBody(body, 400)
    raise bad_body(describe(body))


def describe(body: Any) -> str:
    """Name what came in place of an answer: a decoded body, or a text that is not JSON."""
    if isinstance(body, str):
        return _describe_text(body)
    if isinstance(body, Mapping):
        words = read_message(
            {key: body[key] for key in ("error", "errors", "message") if key in body}
        )
        if words:
            return f"it holds an error: {words}"
        # Gateways put their errors under keys of their own, so the object itself is shown.
        shown = json.dumps(body, ensure_ascii=False, default=str)[:_EXCERPT]
        return f"a JSON object without an answer: {shown}"
    kinds = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    kind = kinds.get(type(body), "a number" if isinstance(body, int | float) else "")
    return f"JSON, but {kind} and not an object" if kind else "a JSON object without an answer"


def _describe_text(text: str) -> str:
    if not text.strip():
        return "an empty body"
    if is_stream(text):
        return f"an event stream: {STREAMS}"
    words = to_one_line(read_message(text))[:_EXCERPT]
    if is_html(text):
        return f"a page of HTML: {words}"
    if text.lstrip().startswith("{"):
        kind = f"lines of JSON: {STREAMS}" if _has_json_line(text) else "JSON that breaks off"
        return f"{kind}: {words}"
    return f"plain text: {words}" if words.isprintable() else "binary data"


def _has_json_line(text: str) -> bool:
    try:
        return isinstance(json.loads(text.lstrip().partition("\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


def is_stream(text: str) -> bool:
    """Whether a body is made of server-sent events."""
    return text.lstrip("\ufeff \r\n").startswith(("data:", "event:", ": ", "id:", "retry:"))


def _join_chunks(text: str) -> dict[str, Any]:
    """The completion that a stream of OpenAI's chunks makes, if it came to its end."""
    content, ended, usage, done = "", None, None, False
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            done = True
            continue
        try:
            chunk = json.loads(value)
        except ValueError:
            raise bad_body(f"an event stream that breaks off or is not JSON: {STREAMS}") from None
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            words = read_message(chunk)[:_EXCERPT] or "no chat chunks"
            raise bad_body(f"an event stream ({words}): {STREAMS}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"][:1]:
            content += (choice.get("delta") or {}).get("content") or ""
            ended = choice.get("finish_reason") or ended
    if not done and ended is None:
        raise bad_body(f"an event stream that was cut: {STREAMS}")
    message = {"role": "assistant", "content": content}
    return {"choices": [{"finish_reason": ended or "stop", "message": message}], "usage": usage}
