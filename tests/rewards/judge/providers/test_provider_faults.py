"""The table of outcomes: what each kind of failure becomes, at each provider, in one call.

The real SDKs against the loopback server. A call that fails is made once: no SDK retries.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import traceback
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Reply, Usage
from ppo_cli.rewards.judge.providers.replies import refusal
from ppo_cli.rewards.remote.failures import Failure, parse_retry_after
from tests.judge_server import JudgeServer
from tests.judge_server.asking import (
    KEYS,
    SECRET,
    WIRES,
    Ask,
    ask_once,
    judge_at,
    make_question,
)  # fmt: skip

FATAL, RETRYABLE, REFUSED, UNPARSED = (
    Failure.FATAL, Failure.RETRYABLE, Failure.REFUSED, Failure.UNPARSED,
)  # fmt: skip
# What a judge that has answered before does next -> kind and cause.
OUTCOMES: dict[Any, tuple[Failure, str]] = {
    400: (REFUSED, "bad_request"),
    401: (FATAL, "http_401"),
    402: (FATAL, "http_402"),
    403: (FATAL, "http_403"),
    404: (FATAL, "http_404"),
    408: (RETRYABLE, "http_408"),
    409: (RETRYABLE, "http_409"),
    413: (REFUSED, "too_long"),
    425: (RETRYABLE, "http_425"),
    429: (RETRYABLE, "http_429"),
    500: (RETRYABLE, "http_500"),
    502: (RETRYABLE, "http_502"),
    503: (RETRYABLE, "http_503"),
    504: (RETRYABLE, "http_504"),
    529: (RETRYABLE, "http_529"),
    "hang": (RETRYABLE, "timeout"),
    "cut": (RETRYABLE, "connection"),
    "html": (RETRYABLE, "bad_body"),
    "empty": (RETRYABLE, "bad_body"),
    "not_json": (RETRYABLE, "bad_body"),
    "no_content": (UNPARSED, "empty"),
    "refusal": (REFUSED, "refusal"),
    "content_filter": (REFUSED, "content_filter"),
}
# Gemini has one word for both.
SPECIAL = {("gemini", "refusal"): (REFUSED, "content_filter")}


def outcome_of(reply: Reply | JudgeError) -> tuple[Failure | None, str]:
    return (reply.kind, reply.cause) if isinstance(reply, JudgeError) else (None, reply.text)


@pytest.mark.parametrize("wire", WIRES)
def test_the_table_of_outcomes(server: JudgeServer, ask: Ask, wire: str) -> None:
    unlike = []
    for fault, outcome in OUTCOMES.items():
        server.reset()
        server.fail(fault)
        error = ask(wire, timeout=0.3 if fault == "hang" else 10.0)
        calls = server.count
        server.heal()
        status = getattr(error, "status", None)
        as_told = outcome_of(error) == SPECIAL.get((wire, fault), outcome)
        right_status = not isinstance(fault, int) or status == fault
        if not (as_told and right_status and calls == 1 and isinstance(ask(wire), Reply)):
            unlike.append((fault, outcome_of(error), status, calls))
    assert not unlike


@pytest.mark.parametrize("wire", WIRES)
def test_a_server_that_is_down(server: JudgeServer, ask: Ask, wire: str) -> None:
    server.pause()
    try:
        error = ask(wire)
    finally:
        server.resume()
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (RETRYABLE, "connection")
    assert isinstance(ask(wire), Reply)


@pytest.mark.parametrize("wire", WIRES)
def test_a_cut_answer_says_so_and_odd_ones_are_for_the_parser(
    server: JudgeServer, ask: Ask, wire: str
) -> None:
    server.fail("truncated", times=1)
    cut = ask(wire)
    assert isinstance(cut, Reply)
    assert cut.truncated
    assert cut.usage is not None and cut.usage.output > 0
    server.fail("prose", times=1)
    prose = ask(wire)
    assert isinstance(prose, Reply)
    assert "eight" in prose.text
    server.fail("out_of_range", times=1)
    far = ask(wire)
    assert isinstance(far, Reply)
    assert "97" in far.text


@pytest.mark.parametrize("wire", WIRES)
def test_tokens_of_a_failed_answer_are_counted(server: JudgeServer, ask: Ask, wire: str) -> None:
    for fault in ("no_content", "refusal"):
        server.fail(fault, times=1)
        error = ask(wire)
        assert isinstance(error, JudgeError)
        assert error.usage.input > 0


@pytest.mark.parametrize("wire", WIRES)
def test_the_wait_that_was_asked_for(server: JudgeServer, ask: Ask, wire: str) -> None:
    server.fail(429, times=1, retry_after=7)
    assert ask(wire).retry_after == 7.0  # type: ignore[union-attr]
    server.fail(503, times=1, retry_after=email.utils.formatdate(2_000_000_000, usegmt=True))
    assert ask(wire).retry_after > 1000  # type: ignore[union-attr, operator]
    server.fail(429, times=1, retry_after=9, headers={"Retry-After-Ms": "250"})
    assert ask(wire).retry_after == 0.25  # type: ignore[union-attr]
    server.fail(500, times=1, retry_after="soon")
    assert ask(wire).retry_after is None  # type: ignore[union-attr]
    server.fail(401, times=1, retry_after=7)
    assert ask(wire).retry_after is None  # type: ignore[union-attr]


def test_gemini_tells_the_wait_in_its_body(server: JudgeServer, ask: Ask) -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7.5s"}
    error = {"code": 429, "message": "m", "status": "RESOURCE_EXHAUSTED", "details": [{}, info]}
    raw = json.dumps({"error": error})
    server.fail(429, times=1, raw=raw)
    assert ask("gemini").retry_after == 7.5  # type: ignore[union-attr]
    server.fail(429, times=1, raw=raw, retry_after=2)
    assert ask("gemini").retry_after == 2.0  # type: ignore[union-attr]


def test_a_hint_names_the_flags_of_the_monitor(server: JudgeServer) -> None:
    server.fail(404)
    message = str(ask_once(judge_at(server, "openai", flags="--rm_monitor")))
    assert (
        "--rm_monitor_model (now 'judge-model')" in message and "--rm_monitor_base_url" in message
    )


def test_seconds_are_never_nonsense() -> None:
    for value in ("-3", "nan", "inf", "", "tomorrow"):
        assert parse_retry_after({"retry-after": value}) is None
    past = email.utils.formatdate(1_000_000_000, usegmt=True)
    assert parse_retry_after({"retry-after": past}) == 0.0


CODES = [
    ("openai", 429, "insufficient_quota", "You exceeded your quota", FATAL, "http_429"),
    ("openai", 400, "context_length_exceeded", "Too many tokens", REFUSED, "too_long"),
    ("openai", 400, "content_filter", "The response was filtered", REFUSED, "content_filter"),
    ("openai", 400, None, "Remove this content and try again", REFUSED, "bad_request"),
    *(
        (wire, 400, None, message, RETRYABLE, "http_400")  # a passing overload without a code
        for wire in ("openai", "gemini")
        for message in ("The model is overloaded", "Server busy, retry later", "queue is full",
                        "Too many requests", "Rate limit reached", "We are at capacity",
                        "temporarily unavailable")
    ),
    ("claude", 400, None, "Your credit balance is too low", FATAL, "http_400"),
    ("claude", 400, None, "Blocked by content filtering policy", REFUSED, "content_filter"),
    ("claude", 400, None, "prompt is too long: 9 tokens", REFUSED, "too_long"),
    ("gemini", 400, "API_KEY_INVALID", "API key not valid", FATAL, "http_400"),
    ("dashscope", 400, "Arrearage", "Access denied", FATAL, "http_400"),
    ("dashscope", 400, "ModelNotFound", "Model can not be found", FATAL, "http_400"),
    ("dashscope", 400, "AccessDenied.Unpurchased", "Not bought", FATAL, "http_400"),
    ("dashscope-compatible", 400, "Arrearage", "Access denied", FATAL, "http_400"),
    *(
        (wire, 400, "data_inspection_failed", "Improper", REFUSED, "content_filter")
        for wire in ("dashscope", "dashscope-compatible")
    ),
    *(
        (wire, "business", code, "", kind, cause)
        for wire in ("dashscope", "dashscope-compatible")  # with status 200
        for code, kind, cause in (
            ("InternalError", RETRYABLE, "business_error"),
            ("Throttling.RateQuota", RETRYABLE, "http_429"),
            ("DataInspectionFailed", REFUSED, "content_filter"),
            ("InvalidApiKey", FATAL, "http_200"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "fault", "code", "message", "kind", "cause"), CODES)
def test_error_codes_of_providers(
    server: JudgeServer, ask: Ask, wire: str, fault: Any, code: str | None, message: str,
    kind: Failure, cause: str,
) -> None:  # fmt: skip
    server.fail(fault, code=code, message=message)
    error = ask(wire)
    assert outcome_of(error) == (kind, cause) and message in str(error)
    # A request that does not fit is tried with fewer tokens.
    assert server.count <= (5 if cause == "too_long" else 1)


@pytest.mark.parametrize("wire", WIRES)
def test_hints_tell_what_to_look_at(server: JudgeServer, ask: Ask, wire: str) -> None:
    server.fail(404, message="No such model.", times=1)
    message = str(ask(wire))
    assert "retired or misspelt: check --rm_model (now 'judge-model')" in message
    assert "No such model." in message
    server.fail(401, times=1)
    variable = next(name for name in KEYS if name.startswith(provider_word(wire)))
    assert f"Check the key in {variable}" in str(ask(wire))
    server.fail(402, times=1)
    assert "balance" in str(ask(wire))


def provider_word(wire: str) -> str:
    return {"claude": "ANTHROPIC"}.get(wire, wire.split("-")[0].upper())


@pytest.mark.parametrize("wire", WIRES)
def test_no_secret_in_what_is_said(server: JudgeServer, ask: Ask, wire: str) -> None:
    for status in (400, 401, 500):
        server.fail(status, times=1, message=f"The key {SECRET} (Bearer {SECRET}) is wrong.")
        error = ask(wire)
        assert isinstance(error, JudgeError)
        shown = "".join(traceback.format_exception(error)) + repr(vars(error))
        assert SECRET not in shown
        assert "***" in str(error)
        assert error.__cause__ is None
        assert error.__context__ is None


@pytest.mark.parametrize("wire", WIRES)
def test_cancelling_goes_through(server: JudgeServer, wire: str) -> None:
    server.fail("hang")

    async def cancel() -> None:
        judge = judge_at(server, wire)
        task = asyncio.create_task(judge.ask(make_question(), timeout=30))
        while server.count == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await judge.close()

    asyncio.run(asyncio.wait_for(cancel(), 20))


def test_an_sdk_that_does_not_start_is_fatal(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judge_at(server, "claude")

    def connect(key: str) -> None:
        raise ImportError(f"half installed, with {key}")

    monkeypatch.setattr(judge, "connect", connect)
    error = ask_once(judge)
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (FATAL, "sdk")
    assert "half installed" in str(error)
    assert SECRET not in str(error)


def test_the_sdks_say_nothing_by_themselves(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    server.fail("cut")
    for wire in WIRES:
        assert isinstance(ask_once(judge_at(server, wire)), JudgeError)
    assert not caplog.records


def test_a_key_in_a_refusal_is_taken_out(server: JudgeServer) -> None:
    judge = judge_at(server, "openai")

    async def refuse(*args: Any) -> Reply:
        raise refusal("refusal", f"Your key is {SECRET}.", Usage(3, 2))

    judge.request_verdict = refuse  # type: ignore[method-assign]
    error = ask_once(judge)
    assert isinstance(error, JudgeError)
    assert SECRET not in f"{error} {error.reply}"
    assert error.usage == Usage(3, 2)


def test_what_nobody_foresaw_is_retryable_and_named(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = judge_at(server, "openai")

    async def break_down(*args: Any) -> Reply:
        raise KeyError(f"odd {SECRET}")

    monkeypatch.setattr(judge, "request_verdict", break_down)
    error = ask_once(judge)
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (RETRYABLE, "unknown")
    assert "KeyError" in str(error)
    assert "KeyError" in caplog.text
    assert SECRET not in f"{error} {caplog.text}"
