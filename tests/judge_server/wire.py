"""How each provider writes requests, replies, refusals and errors on the wire."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
_FENCE = r"<{0}-([0-9a-f]+)>\n(.*?)\n?</{0}-\1>"
REFUSAL = "I will not judge this text."
FILTERED = "Output blocked by content filtering policy"


def fenced(kind: str, user: str) -> str | None:
    """Return the data of one kind (`response`, `ground_truth`) in a request, or None."""
    matches = re.findall(_FENCE.format(kind), user, re.DOTALL)
    return matches[-1][1] if matches else None


def default_score(system: str, user: str) -> int:
    """10 when the ground truth is in the response as a whole number or word, else 1."""
    response, truth = fenced("response", user) or "", (fenced("ground_truth", user) or "").strip()
    match = truth and re.search(rf"(?<![\w.]){re.escape(truth)}(?!\w|\.\d)", response)
    return 10 if match else 1


def verdict_keys(user: str) -> dict[str, str]:
    """What a request calls the verdict on each criterion: met, present or level_0_to_N."""
    form = r'"(c\d+)": \{"reason": "\.\.\.", "(\w+)":'
    return dict(re.findall(form, user))


def flat(content: Any) -> str:
    """Text of a message's content, whether it is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(str((part or {}).get("text", "")) for part in parts)


def chat_texts(messages: list[Body]) -> tuple[str, str]:
    """System and user text of a list of chat messages."""
    system = "\n".join(flat(m["content"]) for m in messages if m["role"] in {"system", "developer"})
    user = "\n".join(flat(m["content"]) for m in messages if m["role"] == "user")
    return system, user


@dataclass(frozen=True)
class Answer:
    """What the judge says, before it is put in a provider's form; `end` is how it stopped."""

    text: str
    end: str = "stop"  # stop | length | refusal | content_filter
    tokens_in: int = 1
    tokens_out: int = 1


# What a judge that thinks sends next to its answer; servers differ in the name of the field.
THOUGHT = dict.fromkeys(("reasoning", "reasoning_content"), 'I would say {"score": 3}. Score: 3')


@dataclass(frozen=True)
class Wire:
    """One provider's chat protocol."""

    read: Callable[[Body], tuple[str, str]]
    write: Callable[[Body, Answer], tuple[int, Body]]
    error: Callable[[int, str, str | None, str | None], Body]


def openai_error(status: int, message: str, param: str | None, code: str | None) -> Body:
    kind = {401: "authentication_error", 429: "requests"}.get(status, "invalid_request_error")
    if param and not code:
        code = "unsupported_parameter"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_write(body: Body, answer: Answer) -> tuple[int, Body]:
    refused = answer.end == "refusal"
    message = {"role": "assistant", "content": None if refused else answer.text, **THOUGHT}
    if refused:
        message["refusal"] = REFUSAL
    choice = {
        "index": 0,
        "finish_reason": "stop" if refused else answer.end,
        "message": message,
    }
    usage = {
        "prompt_tokens": answer.tokens_in,
        "completion_tokens": answer.tokens_out,
        "total_tokens": answer.tokens_in + answer.tokens_out,
        "prompt_tokens_details": {"cached_tokens": answer.tokens_in // 2},
    }
    return 200, {
        "id": "chatcmpl-1", "object": "chat.completion", "created": int(time.time()),
        "model": body.get("model"), "choices": [choice], "usage": usage,
    }  # fmt: skip


_CLAUDE_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 402: "billing_error",
    403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 529: "overloaded_error",
}  # fmt: skip


def claude_read(body: Body) -> tuple[str, str]:
    return flat(body.get("system") or ""), chat_texts(body["messages"])[1]


def claude_error(status: int, message: str, param: str | None, code: str | None) -> Body:
    kind = _CLAUDE_ERRORS.get(status, "api_error")
    text = f"{param}: {message}" if param else message
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": "req_1"}


def claude_write(body: Body, answer: Answer) -> tuple[int, Body]:
    if answer.end == "content_filter":
        return 400, claude_error(400, FILTERED, None, None)
    refused = answer.end == "refusal"
    stop = {"length": "max_tokens", "refusal": "refusal"}.get(answer.end, "end_turn")
    reply = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": body.get("model"),
        "content": [
            {"type": "thinking", "thinking": THOUGHT["reasoning"], "signature": "s"},
            *([] if refused or not answer.text else [{"type": "text", "text": answer.text}]),
        ],
        "stop_reason": stop, "stop_sequence": None,
        "usage": {
            "input_tokens": answer.tokens_in - answer.tokens_in // 2,
            "cache_read_input_tokens": answer.tokens_in // 2,
            "cache_creation_input_tokens": 0, "output_tokens": answer.tokens_out,
        },
    }  # fmt: skip
    if refused:
        reply["stop_details"] = {"type": "refusal", "category": "frontier_llm"}
    return 200, reply


_GEMINI_ERRORS = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip


def gemini_read(body: Body) -> tuple[str, str]:
    system = flat((body.get("systemInstruction") or {}).get("parts") or [])
    return system, "".join(flat(content["parts"]) for content in body["contents"])


def gemini_error(status: int, message: str, param: str | None, code: str | None) -> Body:
    text = f'Invalid JSON payload received. Unknown name "{param}"' if param else message
    error = {"code": status, "message": text, "status": _GEMINI_ERRORS.get(status, "UNKNOWN")}
    if code:
        error["details"] = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code}]
    return {"error": error}


def gemini_write(body: Body, answer: Answer) -> tuple[int, Body]:
    usage = {
        "promptTokenCount": answer.tokens_in, "candidatesTokenCount": answer.tokens_out,
        "cachedContentTokenCount": answer.tokens_in // 2,
        "totalTokenCount": answer.tokens_in + answer.tokens_out,
    }  # fmt: skip
    if answer.end == "content_filter":
        return 200, {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": usage}
    finish = {"length": "MAX_TOKENS", "refusal": "SAFETY"}.get(answer.end, "STOP")
    candidate: Body = {"index": 0, "finishReason": finish}
    if answer.end != "refusal":
        thought = {"text": THOUGHT["reasoning"], "thought": True}
        candidate["content"] = {"role": "model", "parts": [thought, {"text": answer.text}]}
    return 200, {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m"}


_DASHSCOPE_CODES = {
    400: "InvalidParameter", 401: "InvalidApiKey", 403: "AccessDenied", 404: "ModelNotFound",
    429: "Throttling.RateQuota", 500: "InternalError", 503: "ServiceUnavailable",
}  # fmt: skip


def dashscope_error(status: int, message: str, param: str | None, code: str | None) -> Body:
    text = f"<400> InternalError.Algo.InvalidParameter: {param}: {message}" if param else message
    return {
        "code": code or _DASHSCOPE_CODES.get(status, "UnknownError"),
        "message": text,
        "request_id": "r-1",
    }


def dashscope_write(body: Body, answer: Answer) -> tuple[int, Body]:
    if answer.end == "content_filter":
        blocked = "Input data may contain inappropriate content."
        return 400, dashscope_error(400, blocked, None, "DataInspectionFailed")
    text = REFUSAL if answer.end == "refusal" else answer.text
    message = {"role": "assistant", "content": text, **THOUGHT}
    return 200, {
        "request_id": "r-1",
        "output": {"choices": [{"finish_reason": answer.end, "message": message}]},
        "usage": {
            "input_tokens": answer.tokens_in, "output_tokens": answer.tokens_out,
            "total_tokens": answer.tokens_in + answer.tokens_out,
            "prompt_tokens_details": {"cached_tokens": answer.tokens_in // 2},
        },
    }  # fmt: skip


WIRES = {
    "openai": Wire(lambda body: chat_texts(body["messages"]), openai_write, openai_error),
    "claude": Wire(claude_read, claude_write, claude_error),
    "gemini": Wire(gemini_read, gemini_write, gemini_error),
    "dashscope": Wire(
        lambda body: chat_texts(body["input"]["messages"]), dashscope_write, dashscope_error
    ),
}


def wire_of(path: str, body: Body) -> tuple[str, bool] | None:
    """Name of the protocol that a path belongs to, and whether it asks for a decision."""
    if path.endswith("/chat/completions"):
        return "openai", False
    if path.endswith(("/v1/messages", ":rawPredict", "/invoke")):
        return "claude", False
    if path.endswith(":generateContent"):
        return "gemini", False
    if path.endswith("/generation"):
        return "dashscope", False
    if path.endswith("/decisions"):
        return ("openai" if isinstance(body.get("questions"), list) else "gemini"), True
    return ("dashscope", True) if path.endswith("/systemone") else None
