"""What each kind of failure becomes, at each provider, in one call.

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
from tests.judge_server.asking import KEYS, SECRET, WIRES, Ask, ask_once, judge_at, make_question
from tests.rewards.judge.corpora import read_corpus


def fail_once(server: JudgeServer, ask: Ask, wire: str, fault: Any, **details: Any) -> JudgeError:
    """Return the error of a call that meets a fault."""
    server.fail(fault, times=1, **details)
    error = ask(wire)
    assert isinstance(error, JudgeError)
    return error


def test_a_fault_becomes_what_the_corpus_says(server: JudgeServer, ask: Ask, wire: str) -> None:
    """Of a judge that has answered before; the next call finds it well again."""
    wrong = []
    for row in read_corpus("faults"):
        if wire not in row.get("wires", WIRES):
            continue
        server.reset()
        server.fail(row["fault"], code=row.get("code"), message=row.get("message"))
        error = ask(wire, timeout=0.3 if row["fault"] == "hang" else 10.0)
        calls = server.count
        server.heal()
        expected = (
            isinstance(error, JudgeError)
            and (error.kind.value, error.cause) == (row["kind"], row["cause"])
            and error.status == (row["fault"] if isinstance(row["fault"], int) else error.status)
            and row.get("message", "") in str(error) and row.get("says", "") in str(error)
            and (error.usage.input > 0 or "billed" not in row)
            # A request that does not fit is tried with fewer tokens.
            and calls <= (5 if row["cause"] == "too_long" else 1)
        )  # fmt: skip
        if not expected or not isinstance(ask(wire), Reply):
            wrong.append((row, error, calls))
    assert wrong == []


def test_a_server_that_is_down(server: JudgeServer, ask: Ask, wire: str) -> None:
    server.pause()
    try:
        error = ask(wire)
    finally:
        server.resume()
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (Failure.RETRYABLE, "connection")
    assert isinstance(ask(wire), Reply)


def test_a_cut_answer_is_marked_and_odd_ones_are_for_the_parser(
    server: JudgeServer, ask: Ask, wire: str
) -> None:
    for fault, fragment in (("truncated", "{"), ("prose", "eight"), ("out_of_range", "97")):
        server.fail(fault, times=1)
        reply = ask(wire)
        assert isinstance(reply, Reply) and fragment in reply.text
        assert reply.truncated is (fault == "truncated")
        assert reply.usage is not None and reply.usage.output > 0


def test_the_requested_wait(server: JudgeServer, ask: Ask, wire: str) -> None:
    date = email.utils.formatdate(2_000_000_000, usegmt=True)
    waits = [
        fail_once(server, ask, wire, status, **hints).retry_after
        for status, hints in (
            (429, {"retry_after": 7}), (500, {"retry_after": "soon"}), (401, {"retry_after": 7}),
            (429, {"retry_after": 9, "headers": {"Retry-After-Ms": "250"}}),
            (503, {"retry_after": date}),
        )
    ]  # fmt: skip
    assert waits[:4] == [7.0, None, None, 0.25]
    assert waits[4] is not None and waits[4] > 1000


def test_gemini_gives_the_wait_in_its_body(server: JudgeServer, ask: Ask) -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7.5s"}
    error = {"code": 429, "message": "m", "status": "RESOURCE_EXHAUSTED", "details": [{}, info]}
    raw = json.dumps({"error": error})
    assert fail_once(server, ask, "gemini", 429, raw=raw).retry_after == 7.5
    assert fail_once(server, ask, "gemini", 429, raw=raw, retry_after=2).retry_after == 2.0


def test_a_wait_that_is_not_a_number_of_seconds_is_ignored() -> None:
    for value in ("-3", "nan", "inf", "", "tomorrow"):
        assert parse_retry_after({"retry-after": value}) is None
    past = email.utils.formatdate(1_000_000_000, usegmt=True)
    assert parse_retry_after({"retry-after": past}) == 0.0


def test_a_hint_names_the_flags_of_the_monitor(server: JudgeServer) -> None:
    server.fail(404)
    message = str(ask_once(judge_at(server, "openai", flags="--rm_monitor_")))
    assert "--rm_monitor_model (now 'judge-model'), and --rm_monitor_base_url" in message


def test_a_rejected_key_is_named_by_its_variable(server: JudgeServer, ask: Ask, wire: str) -> None:
    provider = {"claude": "ANTHROPIC"}.get(wire, wire.split("-")[0].upper())
    variable = next(name for name in KEYS if name.startswith(provider))
    assert f"Check the key in {variable}" in str(fail_once(server, ask, wire, 401))


def test_no_secret_in_a_message(server: JudgeServer, ask: Ask, wire: str) -> None:
    for status in (400, 401, 500):
        message = f"The key {SECRET} (Bearer {SECRET}) is wrong."
        error = fail_once(server, ask, wire, status, message=message)
        shown = "".join(traceback.format_exception(error)) + repr(vars(error))
        assert SECRET not in shown and "***" in str(error)
        assert error.__cause__ is None and error.__context__ is None


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


def test_the_sdks_log_nothing(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    server.fail("cut")
    for wire in WIRES:
        assert isinstance(ask_once(judge_at(server, wire)), JudgeError)
    assert not caplog.records


@pytest.mark.parametrize(
    ("method", "exception", "outcome"),
    [
        ("connect", ImportError(f"half installed, with {SECRET}"), (Failure.FATAL, "sdk")),
        ("send", KeyError(f"odd {SECRET}"), (Failure.RETRYABLE, "unknown")),
        (
            "send", refusal("refusal", f"Your key is {SECRET}.", Usage(3, 2)),
            (Failure.REFUSED, "refusal"),
        ),
    ],
)  # fmt: skip
def test_an_exception_of_an_sdk_is_classified_without_secrets(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    method: str, exception: Exception, outcome: tuple[Failure, str],
) -> None:  # fmt: skip
    judge = judge_at(server, "openai")

    def fail(*args: Any) -> None:
        raise exception

    monkeypatch.setattr(judge, method, fail)
    error = ask_once(judge)
    assert isinstance(error, JudgeError) and (error.kind, error.cause) == outcome
    assert SECRET not in f"{error} {error.reply} {caplog.text}"
    assert error.usage == getattr(exception, "usage", Usage())
    # What nobody foresaw is logged with its type.
    is_unknown = outcome[1] == "unknown"
    assert ("KeyError" in caplog.text) is ("KeyError" in str(error)) is is_unknown
    assert ("half installed" in str(error)) is (method == "connect")
