"""The server itself: in a thread of the test, or as a separate process (`__main__`)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.judge_server.batches import Batches
from tests.judge_server.decisions import (
    READERS,
    Answers,
    Asked,
    Decide,
    write_answers,
    write_refusal,
    write_usage,
)
from tests.judge_server.faults import ENDS, Bucket, Fault, Minute
from tests.judge_server.wire import WIRES, Answer, default_score, wire_of
from tests.loopback import HTML, Loopback, cut

Score = Callable[[str, str], "int | str"]
BASES = {
    "openai": "/v1",
    "claude": "",
    "gemini": "",
    "dashscope": "/api/v1",
    "dashscope-compatible": "/compatible-mode/v1",
}
# What a refusal says about the time to wait: most providers send whole seconds.
HINTS: dict[str, Callable[[float], dict[str, str]]] = {
    "seconds": lambda wait: {"Retry-After": str(math.ceil(wait))},
    "ms": lambda wait: {"retry-after-ms": str(math.ceil(1000 * wait))},
    "ratelimit": lambda wait: {
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": f"{math.ceil(1000 * wait)}ms",
    },
    "none": lambda wait: {},
}
_KEY_HEADERS = ("Authorization", "x-api-key", "x-goog-api-key", "api-key")

MODELS = ("m", "gpt-4o-mini", "gemini-2.5-flash-lite", "claude-haiku-4-5", "qwen-plus")
TOKEN = "ya29.loopback-token"


@dataclass(frozen=True)
class Call:
    """One request as it came in; of the key only a digest is kept, and in which header it came."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    key_header: str | None
    key_digest: str | None
    time: float
    query: str = ""


def digest(key: str) -> str:
    """What `Call.key_digest` holds for a key."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass
class State:
    """What a test may look at or change at any moment."""

    latency: float = 0.0
    concurrency_limit: int | None = None
    keys: set[str] | None = None
    keep_calls: bool = True
    most_read: int = 10**9  # tokens of a request that it reads, and counts
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    count: int = 0
    answered: int = 0
    rejected: int = 0
    in_flight: int = 0
    most_in_flight: int = 0


class JudgeServer(Loopback):
    """A judge on 127.0.0.1; `url("openai")` and so on give what --rm_base_url takes.

    `score(system, user)` returns a whole number, sent as JSON with a reason, or a string, sent
    as it is. On decision endpoints `decide` gives the probability of each option of a question, by
    default most of it to the score; `spoil` may change the answers, and `tokens` are those billed.
    `count` counts requests, `answered` those that got a normal reply, `rejected` those
    turned away by the rate or concurrency limit.
    """

    def __init__(
        self, score: Score = default_score, *, latency: float = 0.0, rps: float | None = None,
        burst: float = 1.0, concurrency_limit: int | None = None, port: int = 0, seed: int = 0,
        keep_calls: bool = True, hint: str = "seconds", per_minute: int | None = None,
        decide: Decide | None = None,
    ) -> None:  # fmt: skip
        super().__init__("judge server", port=port, largest=64 * 2**20)
        self.score = score
        self.decide = decide or self._decide_by_score
        self.spoil: Callable[[Answers], Answers] | None = None
        self.tokens = 0
        self.state = State(latency, concurrency_limit, keep_calls=keep_calls)
        self._bucket = Bucket(rps, burst) if rps else None
        self._minute = Minute(per_minute) if per_minute else None
        self._hint = HINTS[hint]
        self._dice = random.Random(seed)
        self.batches = Batches(self._judge)

    # --- what a test uses -------------------------------------------------------------------

    def url(self, provider: str) -> str:
        """Return the base URL for one provider (a key of BASES)."""
        return f"http://127.0.0.1:{self.port}{BASES[provider]}"

    @property
    def calls(self) -> list[Call]:
        """Requests so far, oldest first."""
        return self.state.calls

    @property
    def count(self) -> int:
        """How many requests came in, those answered with an error too."""
        return self.state.count

    @property
    def rejected(self) -> int:
        """How many requests the rate limit or the concurrency limit turned away."""
        return self.state.rejected

    @property
    def keys(self) -> set[str] | None:
        """Keys that are let in; None lets everybody in."""
        return self.state.keys

    @keys.setter
    def keys(self, keys: set[str] | None) -> None:
        self.state.keys = keys

    def fail(self, kind: str | int, *, seconds: float | None = None, **when: Any) -> Fault:
        """Add a fault (see `Fault`); `seconds` from now on is another way to give `until`."""
        if seconds is not None:
            when["until"] = time.monotonic() + seconds
        when["paths"] = tuple(when.get("paths") or ())
        self.state.faults.append(fault := Fault(kind, **when))
        return fault

    def heal(self) -> None:
        """Drop every fault."""
        self.state.faults.clear()

    def reset(self) -> None:
        """Forget calls, counts, faults and keys."""
        old = self.state
        self.state = State(old.latency, old.concurrency_limit, keep_calls=old.keep_calls)
        if self._bucket:
            self._bucket = Bucket(self._bucket.rate, self._bucket.burst)
        if self._minute:
            self._minute = Minute(self._minute.calls)

    # --- answering --------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/_control":
            return await self._control(request)
        if request.method == "GET" and request.path.endswith("/models"):
            return self._models(find_key(request)[1])
        if self.batches.takes(request.path):
            return await self.batches.handle(request)
        if request.path == "/token":  # what Google's credentials are changed into
            granted = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
            return web.json_response(granted)
        state = self.state
        body = json.loads(await request.read() or b"{}")
        key_header, key = find_key(request)
        self._note(state, request, body, key_header, key)
        state.in_flight += 1
        state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            return await self._answer(request, body, key)
        finally:
            state.in_flight -= 1

    def _note(
        self, state: State, request: web.Request, body: dict[str, Any], header: str | None,
        key: str | None,
    ) -> None:  # fmt: skip
        state.count += 1
        if not state.keep_calls:
            return
        shown = {k: v for k, v in request.headers.items() if k.lower() not in _LOWER_KEYS}
        hashed = digest(key) if key else None
        state.calls.append(
            Call(request.path, body, shown, header, hashed, time.monotonic(), request.query_string)
        )

    async def _answer(
        self, request: web.Request, body: dict[str, Any], key: str | None
    ) -> web.StreamResponse:
        state, path = self.state, request.path
        match = wire_of(path, body)
        if match is None:
            return web.json_response({"error": {"message": f"no such path {path}"}}, status=404)
        name, decision = match
        limited = self._limit(name)
        if limited is not None:
            return limited
        if state.keys is not None and key not in state.keys:
            return _error(name, 401, "Incorrect API key provided")
        fault = next((f for f in list(state.faults) if f.strikes(path, body, self._dice)), None)
        if fault is not None and (broken := await self._break(request, name, fault)) is not None:
            return broken
        if name == "gemini" and "contents" not in body and not decision:
            return _error(name, 400, "contents is not specified")
        if state.latency:
            await asyncio.sleep(state.latency)
        state.answered += fault is None
        status, reply = self._judge(name, decision, body, fault)
        return web.json_response(reply, status=status)

    def _models(self, key: str | None) -> web.Response:
        """The list of models in the words of every provider at once."""
        if self.state.keys is not None and key not in self.state.keys:
            refused = {"error": {"message": "Incorrect API key provided", "code": 401}}
            return web.json_response(refused, status=401)
        names, does = MODELS, ["generateContent"]
        reply = {
            "object": "list",
            "data": [{"id": name, "object": "model", "type": "model"} for name in names],
            "models": [
                {"name": f"models/{name}", "supportedGenerationMethods": does} for name in names
            ] + [{"name": "models/of-vectors", "supportedGenerationMethods": ["embedContent"]}],
            "output": {"models": [{"model": name} for name in names], "total_count": len(names)},
        }  # fmt: skip
        return web.json_response(reply)

    def _judge(
        self, name: str, decision: bool, body: dict[str, Any], fault: Fault | None
    ) -> tuple[int, dict[str, Any]]:
        if decision:
            return self._decide(name, body, str(fault.kind if fault else ""))
        system, user = WIRES[name].read(body)
        score = self.score(system, user)
        text = json.dumps({"reason": "As told.", "score": score})
        text, kind = score if isinstance(score, str) else text, fault.kind if fault else ""
        text = {
            "no_content": "",
            "truncated": text[:14],
            "prose": "It reads well. I might give it an eight, or perhaps a nine.",
            "out_of_range": '{"reason": "Superb.", "score": 97}',
        }.get(str(kind), text)
        used = min((len(system) + len(user)) // 4 + 1, self.state.most_read)
        answer = Answer(text, ENDS.get(str(kind), "stop"), used, len(text) // 4 + 1)
        status, reply = WIRES[name].write(body, answer)
        return status, forget_usage(reply, kind)

    def _decide(self, name: str, body: dict[str, Any], kind: str) -> tuple[int, dict[str, Any]]:
        """The reply of a decision endpoint; 400 if its documents do not allow the request."""
        try:
            text, questions = READERS[name](body)
        except (ValueError, KeyError, TypeError) as error:
            return 400, WIRES[name].error(400, str(error), None, None)
        pairs = [(question, self.decide(text, question)) for question in questions]
        answers = write_answers(name, text, pairs)
        reply = {"answers": answers if self.spoil is None else self.spoil(answers)}
        if kind in ENDS:
            reply = write_refusal(name, len(questions))
        size = len(text) + sum(len(q.instructions) + sum(map(len, q.options)) for q in questions)
        tokens = size // 4 + 1
        self.tokens += tokens
        reply["usage"] = write_usage(name, tokens)
        if name != "gemini":
            reply["model"] = body["model"]
        return 200, forget_usage(reply, kind)

    def _decide_by_score(self, text: str, question: Asked) -> list[float]:
        """0.8 on the option that starts with the score, the rest shared by the others."""
        score, options = self.score(question.instructions, text), question.options
        hit = next((i for i, option in enumerate(options) if re.match(rf"{score}\b", option)), 0)
        return [0.8 if i == hit else 0.2 / (len(options) - 1) for i in range(len(options))]

    def _limit(self, name: str) -> web.Response | None:
        limit, wait = self.state.concurrency_limit, 0.0
        if limit is not None and self.state.in_flight > limit:
            wait = 0.1
        elif self._bucket is not None:
            wait = self._bucket.take()
        elif self._minute is not None:
            wait = self._minute.take()
        if not wait:
            return None
        self.state.rejected += 1
        return _error(name, 429, "Rate limit reached, slow down", self._hint(wait))

    async def _break(
        self, request: web.Request, name: str, fault: Fault
    ) -> web.StreamResponse | None:
        """Answer with a fault; None when it is one of the kinds that look like an answer."""
        kind, wire = fault.kind, WIRES[name]
        if kind == "reject_param":
            text = fault.message or f"'{fault.param}' is not supported with this model."
            told = json.dumps(wire.error(400, text, fault.param, None))
            return web.Response(text=fault.raw or told, status=400, content_type="application/json")
        if isinstance(kind, int):
            text = fault.message or f"This is a {kind} for tests."
            headers = dict(fault.headers)
            if fault.retry_after is not None:
                headers["Retry-After"] = str(fault.retry_after)
            reply = wire.error(kind, text, fault.param, fault.code)
            body = json.dumps(reply) if fault.raw is None else fault.raw
            content = "application/json" if body.startswith(("{", "[", '"')) else "text/html"
            return web.Response(text=body, status=kind, headers=headers, content_type=content)
        if kind == "business":
            code, text = fault.code or "InternalError", fault.message or "A business error."
            return web.json_response({"code": code, "message": text, "request_id": "r-1"})
        if kind == "hang":
            return await self._hang(300)
        if kind == "cut":
            return await cut(request, b'{"id": "c", "choices": [')
        if kind == "body":
            return web.Response(text=fault.raw or "", headers=fault.headers)
        plain = {"html": (HTML, "text/html"), "empty": ("", "application/json")}
        plain["not_json"] = ('{"choices": [', "application/json")
        text, content_type = plain.get(str(kind), (None, ""))
        return None if text is None else web.Response(text=text, content_type=content_type)

    # --- from another process ---------------------------------------------------------------

    async def _control(self, request: web.Request) -> web.Response:
        """How many calls came in, and what became of them."""
        names = ("count", "answered", "rejected", "in_flight", "most_in_flight")
        return web.json_response({name: getattr(self.state, name) for name in names})


def _error(
    wire: str, status: int, message: str, headers: dict[str, str] | None = None
) -> web.Response:
    reply = WIRES[wire].error(status, message, None, None)
    return web.json_response(reply, status=status, headers=headers)


def forget_usage(reply: dict[str, Any], kind: str | int) -> dict[str, Any]:
    """Take the counts of tokens out of a reply, or put null there, as some gateways do."""
    for name in reply.keys() & {"usage", "usageMetadata"}:
        if kind == "no_usage":
            del reply[name]
        elif kind == "null_usage":
            reply[name] = None
    return reply


_LOWER_KEYS = {name.lower() for name in _KEY_HEADERS}


def find_key(request: web.Request) -> tuple[str | None, str | None]:
    """Return the header that carries a key, and the key."""
    for name in _KEY_HEADERS:
        if name in request.headers:
            return name, request.headers[name].removeprefix("Bearer ")
    return None, None
