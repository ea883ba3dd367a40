"""Replies with status 200 that are no answers, over the real SDKs: each is named for what it is."""

from __future__ import annotations

import json

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Reply, Usage
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server import JudgeServer
from tests.judge_server.asking import WIRES, ask_once, judge_at
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


@pytest.mark.parametrize("wire", WIRES)
def test_a_body_that_is_no_answer_is_named(server: JudgeServer, wire: str) -> None:
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


def test_an_object_that_only_a_gateway_knows_is_shown(server: JudgeServer) -> None:
    server.fail("body", raw='{"code": 401, "tip": "expired"}')
    assert '"tip": "expired"' in str(ask_once(judge_at(server, "openai")))


@pytest.mark.parametrize("content_type", ["text/event-stream", "text/plain", "application/json"])
@pytest.mark.parametrize(
    "body",
    [
        chunks(VERDICT[:9], VERDICT[9:]),
        chunks("", VERDICT, "", ended="stop", done=False),
        ": keep-alive\n\n" + chunks(VERDICT, ended="stop").replace("\n", "\r\n"),
    ],
)
def test_a_stream_of_chat_chunks_is_read(server: JudgeServer, content_type: str, body: str) -> None:
    server.fail("body", raw=body, headers={"Content-Type": content_type})
    assert ask_once(judge_at(server, "openai")) == Reply(VERDICT)


def test_a_stream_tells_usage_and_that_it_was_cut_at_the_token_limit(server: JudgeServer) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 7}}
    body = chunks(VERDICT[:9], ended="length", done=False) + f"data: {json.dumps(usage)}\n\n"
    server.fail("body", raw=body, headers={"Content-Type": "text/event-stream"})
    assert ask_once(judge_at(server, "openai")) == Reply(VERDICT[:9], Usage(90, 7), truncated=True)


def test_a_stream_that_ends_early_is_no_answer(server: JudgeServer) -> None:
    body = chunks(VERDICT, done=False)
    server.fail("body", raw=body, headers={"Content-Type": "text/event-stream"})
    error = ask_once(judge_at(server, "openai"))
    assert isinstance(error, JudgeError)
    assert "an event stream that was cut" in str(error)


def completion(content: object) -> str:
    message = {"role": "assistant", "content": content}
    return json.dumps({"choices": [{"finish_reason": "stop", "message": message}]})


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_completion_counts_whatever_its_content_type(server: JudgeServer, mark: str) -> None:
    body = mark + completion(VERDICT)
    server.fail("body", raw=body, headers={"Content-Type": "text/plain"})
    assert ask_once(judge_at(server, "openai")) == Reply(VERDICT)


@pytest.mark.parametrize("content", [8, {"reason": "so", "score": 8}])
def test_content_that_is_no_text_is_not_called_empty(server: JudgeServer, content: object) -> None:
    server.fail("body", raw=completion(content), headers={"Content-Type": "application/json"})
    error = ask_once(judge_at(server, "openai"))
    assert isinstance(error, JudgeError)
    assert error.cause == "bad_body"
    assert str(content) in str(error)


@pytest.mark.parametrize("wire", WIRES)
def test_a_body_that_its_encoding_does_not_fit_is_no_lost_connection(
    server: JudgeServer, wire: str
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    server.fail("body", raw=completion(VERDICT), headers=headers)
    error = ask_once(judge_at(server, wire))
    assert isinstance(error, JudgeError)
    assert error.cause == "bad_body"
    assert "content-encoding" in str(error)
