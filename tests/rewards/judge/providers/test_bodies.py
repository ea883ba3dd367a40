"""Replies with status 200 that are not answers, over the real SDKs: each is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Reply, Usage
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server import JudgeServer
from tests.judge_server.asking import WIRES, ask_once, judge_at
from tests.marks import quick_only
from tests.rewards.judge.corpora import read_corpus

VERDICT = '{"reason": "The sum is right.", "score": 8}'


def chunks(*texts: str, ended: str | None = None, done: bool = True) -> str:
    """An OpenAI stream with a chunk for each text."""
    lines = []
    for number, text in enumerate(texts, 1):
        reason = ended if number == len(texts) else None
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
        lines.append(json.dumps({"object": "chat.completion.chunk", "choices": [choice]}))
    lines += ["[DONE]"] * done
    return "".join(f"data: {line}\n\n" for line in lines)


@pytest.mark.parametrize("wire", quick_only(WIRES, "openai"), indirect=True)
def test_a_body_without_an_answer_is_named(server: JudgeServer, wire: str) -> None:
    unlike = []
    for row in read_corpus("bodies", "content_type"):
        server.reset()
        body = row["body"]
        server.fail("body", raw=body, headers={"Content-Type": row["content_type"]})
        error = ask_once(judge_at(server, wire))
        right = isinstance(error, JudgeError) and error.kind is Failure.RETRYABLE
        if not (right and error.cause == "bad_body" and row["message"] in str(error)):
            unlike.append((body, str(error)))
    assert not unlike


def completion(content: object) -> str:
    message = {"role": "assistant", "content": content}
    return json.dumps({"choices": [{"finish_reason": "stop", "message": message}]})


USAGE = {"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 7}}
CUT = chunks(VERDICT[:9], ended="length", done=False) + f"data: {json.dumps(USAGE)}\n\n"


@pytest.mark.parametrize("content_type", ["text/event-stream", "text/plain", "application/json"])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chunks(VERDICT[:9], VERDICT[9:]), Reply(VERDICT)),
        (chunks("", VERDICT, "", ended="stop", done=False), Reply(VERDICT)),
        (": on\n\n" + chunks(VERDICT, ended="stop").replace("\n", "\r\n"), Reply(VERDICT)),
        (CUT, Reply(VERDICT[:9], Usage(90, 7), truncated=True)),
        (completion(VERDICT), Reply(VERDICT)),
        ("\ufeff" + completion(VERDICT), Reply(VERDICT)),
    ],
)
def test_a_completion_or_a_stream_of_its_chunks_is_read_with_any_content_type(
    server: JudgeServer, content_type: str, body: str, expected: Reply
) -> None:
    server.fail("body", raw=body, headers={"Content-Type": content_type})
    assert ask_once(judge_at(server, "openai")) == expected


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (chunks(VERDICT, done=False), "an event stream that was cut"),
        (completion(8), "8"),
        (completion({"reason": "so", "score": 8}), str({"reason": "so", "score": 8})),
        ('{"code": 401, "tip": "expired"}', '"tip": "expired"'),  # only a gateway knows this
    ],
)
def test_a_body_without_a_whole_text_is_shown(
    server: JudgeServer, body: str, fragment: str
) -> None:
    server.fail("body", raw=body, headers={"Content-Type": "application/json"})
    error = ask_once(judge_at(server, "openai"))
    assert isinstance(error, JudgeError) and error.cause == "bad_body"
    assert fragment in str(error)


def test_a_body_with_a_wrong_encoding_is_not_a_lost_connection(
    server: JudgeServer, wire: str
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    server.fail("body", raw=completion(VERDICT), headers=headers)
    error = ask_once(judge_at(server, wire))
    assert isinstance(error, JudgeError) and error.cause == "bad_body"
    assert "content-encoding" in str(error)


@pytest.mark.parametrize(
    "ending",
    [
        {"finish_reason": "error", "error": {"code": 502, "message": "the upstream is gone"}},
        {"finish_reason": "stop", "error": {"message": "the upstream is gone"}},
        {"finish_reason": "abort"},
    ],
)
def test_an_answer_that_broke_off_is_not_a_verdict(
    server: JudgeServer, ending: dict[str, Any]
) -> None:
    choice = {"message": {"role": "assistant", "content": VERDICT}, **ending}
    server.fail("body", raw=json.dumps({"choices": [choice], "usage": USAGE["usage"]}))
    error = ask_once(judge_at(server, "openai"))
    assert isinstance(error, JudgeError) and error.kind is Failure.RETRYABLE
    assert error.cause == "broke_off" and error.usage == Usage(90, 7)
    chunk = {"choices": [{"delta": {"content": VERDICT}, **ending}]}
    whole = {"choices": [{"message": choice["message"]}], "error": {"message": "it is gone"}}
    for raw in (f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", json.dumps(whole)):
        server.fail("body", raw=raw)
        error = ask_once(judge_at(server, "openai"))
        assert isinstance(error, JudgeError) and error.cause == "broke_off"


@pytest.mark.parametrize("code", ["json_validate_failed", "400"])
def test_an_answer_that_the_provider_could_not_read_is_asked_for_again(
    server: JudgeServer, code: str
) -> None:
    message = "Failed to generate JSON. See 'failed_generation'."
    server.fail(400, code=code, message=message)
    judge = judge_at(server, "openai")
    error = ask_once(judge)
    assert isinstance(error, JudgeError) and error.kind is Failure.UNPARSED
    assert not judge.dropped()
