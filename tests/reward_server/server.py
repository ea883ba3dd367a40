"""The server itself, in a thread of the test: `/classify` and `/get_reward`."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from ppo_cli.rewards.models.base import BUILT_IN
from tests.loopback import HTML, Loopback, Occasion, cut

# How a served model scores one sample: its text, or its token ids as text.
Scorer = Callable[[str], "float | list[float]"]
BROKEN = {
    "html", "truncated", "empty", "cut", "hang", "short", "long", "null", "nan", "string",
    "bool", "huge", "object", "twice", "no_index", "other_json",
}  # fmt: skip


def score_of_text(text: str) -> float:
    """A score that depends on every character, and is above 0 for what reads well."""
    noise = zlib.crc32(text.encode("utf-8", "surrogatepass")) / 2**32
    bad = any(word in text for word in ("I do not know", *(bad for _, _, bad in BUILT_IN)))
    return (-20.0 if bad else 5.0) + noise


@dataclass(frozen=True)
class Call:
    """One request as it came in."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    time: float


@dataclass
class Fault(Occasion):
    """One kind of failure (a status or one of BROKEN), and when it strikes.

    With `holding` it strikes only requests whose body holds that text, with `rows` those of more
    samples.
    """

    holding: str | None = None
    rows: int | None = None
    message: str = "a fault of this test"
    retry_after: float | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, int) and self.kind not in BROKEN:
            raise ValueError(f"unknown fault {self.kind!r}")

    def strikes(self, body: dict[str, Any], count: int, dice: random.Random) -> bool:
        """Say whether this call meets the fault; counts it when it does."""
        if self.holding is not None and self.holding not in json.dumps(body):
            return False
        if self.rows is not None and count <= self.rows:
            return False
        return self.comes(dice)


@dataclass
class RewardServer(Loopback):
    """A reward model's server; `url("/classify")` and so on are what --reward_model takes.

    `switch` is the name by which the activation is put off (None: it never is).
    """

    score: Scorer = score_of_text
    models: tuple[str, ...] = ("tiny-rm",)
    switch: str | None = "use_activation"
    activation: str = "sigmoid"
    key: str | None = None
    latency: float = 0.0
    seed: int = 0
    calls: list[Call] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    port: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        super().__init__("reward server", port=self.port)
        self._dice = random.Random(self.seed)

    def url(self, path: str = "") -> str:
        """The address of an endpoint."""
        return f"http://127.0.0.1:{self.port}{path}"

    def fail(self, kind: str | int, **when: Any) -> Fault:
        """Add a fault."""
        self.faults.append(fault := Fault(kind, **when))
        return fault

    def heal(self) -> None:
        """Drop every fault."""
        self.faults.clear()

    def sent(self, path: str) -> list[dict[str, Any]]:
        """The bodies of the requests to an endpoint so far."""
        return [call.body for call in self.calls if call.path == path]

    # --- answering --------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            sent = request.headers.get("Authorization", "nothing")
            return self._error(401, f"Unauthorized: {sent}")
        if request.method == "GET" and request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in self.models]})
        body = json.loads(await request.read() or b"{}")
        self.calls.append(Call(request.path, body, dict(request.headers), time.monotonic()))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request, body)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        read = {"/classify": classified, "/get_reward": queried}
        if request.path not in read:
            return self._error(404, "Not Found")
        texts = read[request.path](body)
        struck = (f for f in list(self.faults) if f.strikes(body, len(texts), self._dice))
        fault = next(struck, None)
        if self.latency:
            await asyncio.sleep(self.latency)
        if fault is not None and (broken := await self._break(request, fault)) is not None:
            return broken
        if request.path == "/classify" and body.get("model", self.models[0]) not in self.models:
            return self._error(404, f"The model `{body['model']}` does not exist.")
        reply = self._written(request.path, body, [self.score(text) for text in texts])
        return self._mangled(reply, fault.kind) if fault else web.json_response(reply)

    def _written(self, path: str, body: dict[str, Any], scores: list[Any]) -> Any:
        if path == "/get_reward":
            return {"rewards": scores, "scores": scores, "extra_logs": {}}
        raw = self.switch is not None and body.get(self.switch) is False
        rows = [score if isinstance(score, list) else [score] for score in scores]
        data = [
            {"index": index, "probs": row if raw else self._activated(row), "num_classes": len(row)}
            for index, row in enumerate(rows)
        ]
        return {"object": "list", "model": body.get("model"), "data": data}

    def _activated(self, row: list[float]) -> list[float]:
        if self.activation == "none":
            return row
        if self.activation == "softmax":
            top = max(row)
            weights = [math.exp(value - top) for value in row]
            return [weight / sum(weights) for weight in weights]
        return [1 / (1 + math.exp(-value)) for value in row]

    # --- faults -----------------------------------------------------------------------------

    def _error(self, status: int, message: str, retry_after: object = None) -> web.Response:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        body = {"error": {"message": message, "type": "BadRequestError", "code": status}}
        return web.json_response(body, status=status, headers=headers)

    async def _break(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        kind = fault.kind
        if isinstance(kind, int):
            return self._error(kind, fault.message, fault.retry_after)
        if kind == "html":
            return web.Response(text=HTML, content_type="text/html")
        if kind in {"truncated", "empty"}:
            text = '{"data": [{"index": 0, "pro' if kind == "truncated" else ""
            return web.Response(text=text, content_type="application/json")
        if kind == "hang":
            return await self._hang(30)
        if kind == "cut":
            return await cut(request, b'{"data": [')
        return None

    def _mangled(self, reply: Any, kind: str | int) -> web.Response:
        """Spoil the first score of a reply, or its list."""
        if kind in {"object", "other_json"}:
            return web.json_response({"detail": "fine"} if kind == "object" else 5.0)
        rows = reply.get("data", reply.get("rewards"))
        bad = {"null": None, "nan": math.nan, "string": "7", "bool": True, "huge": 10**400}
        if kind in bad:
            spoil(rows, bad[str(kind)])
        elif kind == "short":
            rows.pop()
        elif kind in {"long", "twice"}:
            rows.append(rows[0])
            if kind == "twice" and len(rows) > 2:
                rows.pop(1)
        elif kind == "no_index" and isinstance(rows[0], dict):
            del rows[0]["index"]
        return web.Response(text=json.dumps(reply), content_type="application/json")


def spoil(rows: list[Any], value: Any) -> None:
    """Put something that is no number where sample 0 has its score."""
    if not isinstance(rows[0], dict):
        rows[0] = value
        return
    first = next(row for row in rows if row["index"] == 0)
    first["probs"] = [value]


def classified(body: dict[str, Any]) -> list[str]:
    """Texts of a `/classify` request: ids (as they are written), text or one conversation."""
    if "messages" in body:
        return ["".join(f"[{m['role']}]{m['content']}" for m in body["messages"])]
    return [" ".join(map(str, i)) if isinstance(i, list) else i for i in body["input"]]


def queried(body: dict[str, Any]) -> list[str]:
    """Texts of a `/get_reward` request."""
    assert len(body["query"]) == len(body["prompts"]) == len(body["labels"])
    return list(body["query"])
