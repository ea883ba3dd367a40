"""The batch interfaces of OpenAI, Anthropic and Gemini: jobs that take a while and end unevenly.

Written from the providers' public references. Results come in another order than the requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from tests.judge_server.faults import KINDS, Fault
from tests.judge_server.wire import WIRES

Body = dict[str, Any]
Judge = Callable[[str, bool, Body, Fault | None], tuple[int, Body]]
# How a row may end: no time left, given up, turned away, not in the results at all, under another
# id, twice (with two answers), in a line that is cut, or without an answer in it. A fault of the
# judge (a word of KINDS) ends it with what the judge says then.
SPOILT = ("expired", "cancelled", "errored", "missing", "foreign", "doubled", "cut", "garbled")
NO_ANSWER = ("expired", "cancelled", "errored")
GARBLED = (200, {"choices": 5, "content": 5})
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WHEN = "2026-11-22T10:00:00Z"


@dataclass
class Job:
    """One job: its rows by custom id, and in how many looks it will be over."""

    wire: str
    rows: dict[str, Body]
    looks: int
    failed: str = ""
    name: str = ""  # that the client gave it
    made: float = field(default_factory=time.time)


@dataclass
class Batches:
    """Jobs of a judge server; `looks` is how often a new one is found to be at work.

    `spoil` makes rows that hold some words end otherwise (SPOILT, KINDS), and `late` ends
    whole jobs as expired. With `refuse`, OpenAI's jobs fail with these words. A job is there
    `reply_s` before its id is sent; so many that are `lost` get a 500 in place of the id. `rows`
    are all requests that were ever handed in.
    """

    judge: Judge
    looks: int = 2
    spoil: dict[str, str] = field(default_factory=dict)
    late: bool = False
    refuse: str = ""
    reply_s: float = 0.0
    lost: int = 0
    jobs: dict[str, Job] = field(default_factory=dict)
    rows: list[Body] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def takes(self, path: str) -> bool:
        """Whether a path belongs to a batch interface."""
        return re.search(r"/(files|batches)(/|$)|:batchGenerateContent$", path) is not None

    async def handle(self, request: web.Request) -> web.Response:
        """Answer a request of any of the three."""
        path = request.path
        wire = "claude" if "/messages/" in path else "openai"
        if path.endswith(":batchGenerateContent") or not path.startswith(("/v1/files", "/v1/m")):
            wire = "gemini" if "openai" not in self._owner(path, request) else "openai"
        dice = random.Random(0)
        for fault in self.faults:
            if fault.strikes(path, {}, dice) and isinstance(fault.kind, int):
                return _error(wire, fault.kind)
        jobs = len(self.jobs)
        reply = await getattr(self, f"_{wire}")(request)
        if len(self.jobs) > jobs:
            await asyncio.sleep(self.reply_s)
            if self.lost:
                self.lost -= 1
                return _error(wire, 500)
        return reply if isinstance(reply, web.Response) else web.json_response(reply)

    def _owner(self, path: str, request: web.Request) -> str:
        job = self.jobs.get(path.rsplit("/", 1)[-1])
        if job is not None:
            return job.wire
        return "gemini" if "x-goog-api-key" in request.headers else "openai"

    def _add(self, wire: str, rows: dict[str, Body], failed: str = "", named: str = "") -> str:
        name = f"{wire}-job-{len(self.jobs)}"
        self.jobs[name] = Job(wire, rows, self.looks, failed, named)
        self.rows += rows.values()
        return name

    def _newest(self, wire: str) -> list[tuple[str, Job]]:
        return [item for item in reversed(self.jobs.items()) if item[1].wire == wire]

    def _look(self, name: str) -> tuple[Job, bool]:
        """The job, and whether it is over; each look brings the end nearer."""
        job = self.jobs.get(name)
        if job is None:
            raise web.HTTPNotFound(text='{"error": {"message": "no such batch"}}')
        job.looks = min(job.looks, self.looks) - 1
        return job, job.looks < 0

    def _fate(self, row: Body) -> str:
        text = json.dumps(row, ensure_ascii=False)
        return next((fate for fragment, fate in self.spoil.items() if fragment in text), "")

    def _done(self, job: Job) -> list[tuple[str, str, tuple[int, Body]]]:
        """Id, fate and answer of every row that the results hold, in another order."""
        lines = []
        for name, row in job.rows.items():
            fate = self._fate(row)
            if fate == "missing":
                continue
            fault = Fault(fate) if fate in KINDS else None
            answer = GARBLED if fate == "garbled" else self.judge(job.wire, False, row, fault)
            ends = fate if fate in (*NO_ANSWER, "cut") else ""
            lines.append((f"{name}x" if fate == "foreign" else name, ends, answer))
            if fate == "doubled":
                lines.append((name, "", self.judge(job.wire, False, row, Fault("refusal"))))
        random.Random(len(lines)).shuffle(lines)
        return lines

    # --- OpenAI: a file of requests, files of results -----------------------------------------

    async def _openai(self, request: web.Request) -> Body | web.Response:
        path = request.path.removeprefix("/v1")
        if path == "/files":
            form = await request.post()
            assert form["purpose"] == "batch"
            sent = form["file"]
            assert isinstance(sent, web.FileField)
            name = f"file-{len(self.files)}"
            self.files[name] = sent.file.read().decode()
            return {
                "id": name, "object": "file", "bytes": 1, "created_at": 1, "purpose": "batch",
                "filename": sent.filename, "status": "processed",
            }  # fmt: skip
        if path.startswith("/files/"):
            return web.Response(text=self.files[path.split("/")[2]])
        if request.method == "POST":
            body = await request.json()
            assert body["completion_window"] == "24h"
            lines = [json.loads(line) for line in self.files[body["input_file_id"]].splitlines()]
            rows = {line["custom_id"]: line["body"] for line in lines}
            good = len(rows) == len(lines) and all(
                line["method"] == "POST" and line["url"] == body["endpoint"] for line in lines
            )
            why = self.refuse if good else "a line is not a request"
            job = self._add("openai", rows, why, body["metadata"]["ppo_cli"])
            return self._openai_job(job, self.jobs[job], over=False)
        if path == "/batches":
            jobs = [self._openai_job(*item, over=False) for item in self._newest("openai")]
            return {"object": "list", "data": jobs, "has_more": False}
        job = path.rsplit("/", 1)[-1]
        return self._openai_job(job, *self._look(job))

    def _openai_job(self, name: str, job: Job, over: bool) -> Body:
        status = "failed" if job.failed else "in_progress"
        reply: Body = {
            "id": name, "object": "batch", "endpoint": "/v1/chat/completions",
            "created_at": int(job.made), "metadata": {"ppo_cli": job.name},
            "completion_window": "24h", "input_file_id": "file-0", "status": status,
            "request_counts": {"total": len(job.rows), "completed": 0, "failed": 0},
        }  # fmt: skip
        if job.failed:
            reply["errors"] = {"object": "list", "data": [{"code": "bad", "message": job.failed}]}
        if not over or job.failed:
            return reply
        good, bad = [], []
        for row, fate, (status_code, body) in self._done(job):
            line: Body = {"id": f"r-{row}", "custom_id": row, "response": None, "error": None}
            if fate in ("expired", "cancelled"):
                line["error"] = {"code": f"batch_{fate}", "message": "It was not done."}
            elif fate == "errored":
                error = WIRES["openai"].error(500, "The server had an error.", None, None)
                line["response"] = {"status_code": 500, "request_id": "r", "body": error}
            else:
                line["response"] = {"status_code": status_code, "request_id": "r", "body": body}
            (bad if fate in NO_ANSWER else good).append(_written(line, fate))
        for field_name, lines in (("output_file_id", good), ("error_file_id", bad)):
            if lines:
                reply[field_name] = f"{name}-{field_name}"
                self.files[reply[field_name]] = "\n".join(lines) + "\n"
        reply["status"] = "expired" if self.late else "completed"
        reply["request_counts"] |= {"completed": len(good), "failed": len(bad)}
        return reply

    # --- Anthropic: requests in one call, results as lines ------------------------------------

    async def _claude(self, request: web.Request) -> Body | web.Response:
        name = request.path.removeprefix("/v1/messages/batches").strip("/")
        if request.method == "POST":
            sent = (await request.json())["requests"]
            rows = {row["custom_id"]: row["params"] for row in sent}
            if len(rows) < len(sent) or not all(_NAME.fullmatch(row_id) for row_id in rows):
                return _error("claude", 400, "custom_id: not unique or wrong")
            name = self._add("claude", rows)
            return self._claude_job(request, name, self.jobs[name], over=False)
        if not name:
            jobs = [self._claude_job(request, *item, over=False) for item in self._newest("claude")]
            return {"data": jobs, "has_more": False, "first_id": None, "last_id": None}
        if not name.endswith("/results"):
            return self._claude_job(request, name, *self._look(name))
        job = self.jobs[name.removesuffix("/results")]
        lines = []
        for row, fate, (status, body) in self._done(job):
            result: Body = {"type": "succeeded", "message": body}
            if fate in ("expired", "cancelled"):
                result = {"type": fate.replace("ll", "l")}
            elif fate == "errored" or status != 200:
                error = WIRES["claude"].error(500, "Internal server error", None, None)
                result = {"type": "errored", "error": error if fate else body}
            lines.append(_written({"custom_id": row, "result": result}, fate))
        return web.Response(text="\n".join(lines) + "\n", content_type="application/x-jsonl")

    def _claude_job(self, request: web.Request, name: str, job: Job, over: bool) -> Body:
        counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        counts["succeeded" if over else "processing"] = len(job.rows)
        url = f"{request.scheme}://{request.host}/v1/messages/batches/{name}/results"
        return {
            "id": name, "type": "message_batch", "request_counts": counts,
            "created_at": datetime.fromtimestamp(job.made, UTC).isoformat(),
            "expires_at": _WHEN, "ended_at": _WHEN if over else None, "archived_at": None,
            "cancel_initiated_at": None, "results_url": url if over else None,
            "processing_status": "ended" if over else "in_progress",
        }  # fmt: skip

    # --- Gemini: requests and responses in the job itself -------------------------------------

    async def _gemini(self, request: web.Request) -> Body:
        if request.method == "POST":
            batch = (await request.json())["batch"]
            assert batch["displayName"]
            sent = batch["inputConfig"]["requests"]["requests"]
            rows = {row["metadata"]["key"]: row["request"] for row in sent}
            name = self._add("gemini", rows, named=batch["displayName"])
            return {"name": f"batches/{name}", "metadata": {"state": "BATCH_STATE_PENDING"}}
        name = request.path.rsplit("/", 1)[-1]
        if name == "batches":
            jobs = [
                {"name": f"batches/{name}", "metadata": {"displayName": job.name}}
                for name, job in self._newest("gemini")
            ]
            return {"operations": jobs}
        job, over = self._look(name)
        reply: Body = {"name": f"batches/{name}", "metadata": {"state": "BATCH_STATE_RUNNING"}}
        if not over:
            return reply
        lines = []
        for row, fate, (_, body) in self._done(job):
            line: Body = {"metadata": {"key": row}}
            if fate in NO_ANSWER:
                code = {"expired": 4, "cancelled": 1}.get(fate, 13)
                line["error"] = {"code": code, "message": "It was not done."}
            elif fate != "cut":  # a job that was cut would be no JSON
                line["response"] = body
            lines.append(line)
        reply["metadata"] |= {
            "state": "BATCH_STATE_EXPIRED" if self.late else "BATCH_STATE_SUCCEEDED",
            "createTime": _WHEN,
            "output": {"inlinedResponses": {"inlinedResponses": lines}},
        }
        return reply | {"done": True}


def _error(wire: str, status: int, text: str = "This is for tests.") -> web.Response:
    return web.json_response(WIRES[wire].error(status, text, None, None), status=status)


def _written(line: Body, fate: str) -> str:
    """A line of results, with letters as they are."""
    text = json.dumps(line, ensure_ascii=False)
    return text[: len(text) // 2] if fate == "cut" else text
