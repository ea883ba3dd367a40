"""Reads replies with status 200: an answer, or what came in its place.

Gateways, proxies and wrong addresses answer 200 with pages, empty bodies or event streams. If a
server streams a chat completion although it was not asked to, the chunks are joined.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ppo_cli.rewards.judge.calls import JudgeError, Reply, Usage
from ppo_cli.rewards.judge.providers.lengths import is_about_length
from ppo_cli.rewards.remote.failures import Failure, is_html, read_message, to_one_line

if TYPE_CHECKING:
    import aiohttp
    import httpx

    Handler = Callable[[aiohttp.ClientRequest], Awaitable[aiohttp.ClientResponse]]

_EXCERPT = 120  # characters of a reply that a message shows
MAX_TOKENS = 10_000_000  # of one call: a usage with more is not a count of tokens
# Keys of which an answer has at least one, for all providers.
_ANSWERS = {"candidates", "choices", "output", "answers", "code"}
# Reasons to end an answer that is not complete: OpenRouter; vLLM and SGLang; Z.ai; DeepSeek.
FAILED_FINISHES = {"error", "abort", "network_error", "insufficient_system_resource"}
STREAMS = "the server streams although it was not asked to"


def bad_body(description: str) -> JudgeError:
    """Return the error for a reply with status 200 that does not come from a judge."""
    return JudgeError(Failure.RETRYABLE, "bad_body", f"The reply is not an answer: {description}")


def read_chat(text: str) -> Any:
    """Return the JSON of a chat completion, or the completion that a stream of chunks makes."""
    return _join_chunks(text) if is_stream(text) else read_body(text)


def read_body(text: str) -> Any:
    """Return the JSON of a body; JudgeError `bad_body`, which describes it, if it is not JSON."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        raise bad_body(describe(text)) from None


def check_body(text: str) -> None:
    """Raise the bad body that an SDK would fail on, or would read as an empty answer."""
    # An error next to an answer is a warning of a gateway, so the answer counts.
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
    """An error object that came with status 200; it counts as the status that it names."""

    def __init__(self, body: Any, status: int) -> None:
        super().__init__(describe(body))
        self.body, self.status_code = body, status


def raise_body(body: Any) -> NoReturn:
    """Raise the error in a decoded body that has no answer.

    ErrorInBody if it has an HTTP status or says that the text is too long, else `bad_body`.
    """
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, Mapping):
        code, message = error.get("code"), read_message(error)
        # OpenRouter and others send the status of the provider behind them in the body.
        if isinstance(code, int) and 400 <= code < 600:
            raise ErrorInBody(body, code)
        if is_about_length(400, message) or code == "context_length_exceeded":
            raise ErrorInBody(body, 400)
    raise bad_body(describe(body))


def describe(body: Any) -> str:
    """Say what came in place of an answer: a decoded body, or a text that is not JSON."""
    if isinstance(body, str):
        return _describe_text(body)
    if isinstance(body, Mapping):
        keys = ("error", "errors", "message")
        message = read_message({key: body[key] for key in keys if key in body})
        if message:
            return f"it holds an error: {message}"
        # Gateways have other keys for their errors, so the object itself is shown.
        shown = json.dumps(body, ensure_ascii=False, default=str)[:_EXCERPT]
        return f"a JSON object without an answer: {shown}"
    kinds = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    kind = kinds.get(type(body), "a number" if isinstance(body, int | float) else "")
    return f"JSON, but {kind} and not an object" if kind else "a JSON object without an answer"


def _describe_text(text: str) -> str:
    """Return what a body without an object is: empty, a stream, HTML, broken JSON, text."""
    if not text.strip():
        return "an empty body"
    if is_stream(text):
        return f"an event stream: {STREAMS}"
    message = to_one_line(read_message(text))[:_EXCERPT]
    if is_html(text):
        return f"a page of HTML: {message}"
    if text.lstrip().startswith("{"):
        kind = f"lines of JSON: {STREAMS}" if _has_json_line(text) else "JSON that breaks off"
        return f"{kind}: {message}"
    return f"plain text: {message}" if message.isprintable() else "binary data"


def _has_json_line(text: str) -> bool:
    try:
        return isinstance(json.loads(text.lstrip().partition("\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


def is_stream(text: str) -> bool:
    """Whether a body is made of server-sent events."""
    return text.lstrip("\ufeff \r\n").startswith(("data:", "event:", ": ", "id:", "retry:"))


def _join_chunks(text: str) -> dict[str, Any]:
    """Return the completion that a stream of OpenAI's chunks makes, if it is complete."""
    content, finish_reason, usage, error, done = "", None, None, None, False
    # Only `data` lines carry chunks; comments and event names are skipped.
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
            message = read_message(chunk)[:_EXCERPT] or "no chat chunks"
            raise bad_body(f"an event stream ({message}): {STREAMS}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"][:1]:
            content += (choice.get("delta") or {}).get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
            error = chunk.get("error") or choice.get("error") or error
    # A stream without its end may have lost text.
    if not done and finish_reason is None:
        raise bad_body(f"an event stream that was cut: {STREAMS}")
    answer = {"role": "assistant", "content": content}
    return {
        "choices": [{"finish_reason": finish_reason or "stop", "message": answer, "error": error}],
        "usage": usage,
    }


# --- what a decoded reply holds ------------------------------------------------------------------


def refusal(cause: str, message: str, usage: Usage | None) -> JudgeError:
    """Return the error for a text that the judge, or a filter, would not judge."""
    return JudgeError(Failure.REFUSED, cause, message, usage=usage, reply=message)


def build_reply(text: str | None, usage: Usage | None, *, truncated: bool) -> Reply:
    """Return the reply; raises UNPARSED if it is empty and was not cut."""
    if not (text or "").strip() and not truncated:
        raise JudgeError(Failure.UNPARSED, "empty", "The judge's answer is empty.", usage=usage)
    return Reply(text or "", usage, truncated)


def get_path(value: Any, path: str) -> Any:
    """Follow attributes, keys and indices, separated by dots; None as soon as one is missing."""
    for name in path.split("."):
        if name.isdigit():
            index, exists = int(name), isinstance(value, list | tuple)
            value = value[index] if exists and len(value) > index else None
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = getattr(value, name, None)
    return value


def to_word(value: Any) -> str:
    """Return a word of an SDK, which may be a member of an enumeration."""
    return str(getattr(value, "value", value) or "")


class TokenFields(NamedTuple):
    """Dotted names of a provider's token counts; the counts of one kind are added.

    If the first name of `input` or `output` is missing, that number is not reported. A `total`
    above their sum includes thoughts that were billed but not counted as output.
    """

    input: tuple[str, ...]
    output: tuple[str, ...]
    cached: str
    total: str = ""


def read_usage(usage: Any, fields: TokenFields) -> Usage | None:
    """Return the tokens of a call, 0 for a number that is not reported; None if none is.

    Also None if one of the numbers cannot be a count of tokens: then no other is trusted.
    """
    # All numbers by their dotted names, missing ones left out.
    names = {*fields.input, *fields.output, fields.cached, fields.total} - {""}
    reported = {name: get_path(usage, name) for name in names}
    counts = {name: count for name, count in reported.items() if count is not None}
    if not all(map(_is_count, counts.values())):
        return None
    read, written = (
        sum(int(counts.get(name, 0)) for name in side) if side[0] in counts else 0
        for side in (fields.input, fields.output)
    )
    # Thoughts are billed as output, but some providers count them only in the total.
    if read and fields.total in counts:
        written = max(written, int(counts[fields.total]) - read)
    if not (read or written):
        return None
    return Usage(read, written, min(read, int(counts.get(fields.cached, 0))))


def _is_count(count: Any) -> bool:
    number = isinstance(count, int | float) and not isinstance(count, bool)
    return number and 0 <= count <= MAX_TOKENS


class ReplyFields(NamedTuple):
    """Dotted names of what is read in a provider's reply, and its words for why an answer ended.

    `content` is a text or a list of parts. A reply without `answer` is not a judge's.
    """

    answer: str
    content: str
    finish: str
    cut: tuple[str, ...]
    usage: str
    tokens: TokenFields
    filtered: tuple[str, ...] = ()
    refusal: str = ""  # what the judge says when it refuses; it may refuse without
    error: str = ""  # of an answer that broke off


# A chat completion of OpenAI's protocol; its prompt tokens include the cached ones.
CHAT = ReplyFields(
    answer="choices.0.message", content="choices.0.message.content",
    finish="choices.0.finish_reason", refusal="choices.0.message.refusal", cut=("length",),
    filtered=("content_filter", "sensitive"), usage="usage", error="choices.0.error",
    tokens=TokenFields(
        ("prompt_tokens",), ("completion_tokens",), "prompt_tokens_details.cached_tokens",
        "total_tokens",
    ),
)  # fmt: skip


def read_reply(reply: Any, fields: ReplyFields) -> Reply:
    """Return the answer in a decoded reply, without thought parts; a cut one is marked `truncated`.

    Raises JudgeError for a refusal or a filter, and as `raise_body` does if there is no answer.
    """
    usage = read_usage(get_path(reply, fields.usage), fields.tokens)
    refuse_blocked(reply, usage)
    finish = to_word(get_path(reply, fields.finish))
    # The provider behind a gateway failed while it wrote: what came so far is not a verdict.
    has_answer = get_path(reply, fields.answer) is not None
    error = get_path(reply, fields.error) or (has_answer and get_path(reply, "error"))
    if error or finish in FAILED_FINISHES:
        message = f"The answer broke off: {read_message(error) or finish}"
        raise JudgeError(Failure.RETRYABLE, "broke_off", message, usage=usage)
    if not has_answer:
        raise_body(reply)
    content = get_path(reply, fields.content)
    if isinstance(content, list):  # thoughts are parts, too, and are not the answer
        answers = (p for p in content if get_path(p, "type") in (None, "text"))
        texts = [get_path(part, "text") for part in answers if not get_path(part, "thought")]
        content = "".join(text for text in texts if isinstance(text, str))
    # A refusal has a separate field; some gateways use the finish reason alone.
    refused = get_path(reply, fields.refusal)
    if refused or finish == "refusal":
        raise refusal("refusal", f"The judge refused: {refused or content or 'no reason'}", usage)
    if finish in fields.filtered:
        message = f"The provider's filter withheld the answer: {finish}"
        raise refusal("content_filter", message, usage)
    if not isinstance(content, str | None):
        raise bad_body(f"the content of its message is not a text: {str(content)[:100]}")
    return build_reply(content, usage, truncated=finish in fields.cut)


def refuse_blocked(reply: Any, usage: Usage | None) -> None:
    """Raise the refusal of a prompt that Gemini's filter blocked, which has status 200."""
    if blocked := get_path(reply, "prompt_feedback.block_reason"):
        raise refusal("content_filter", f"The prompt was blocked: {to_word(blocked)}", usage)
