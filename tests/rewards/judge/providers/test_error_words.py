"""What providers, gateways and proxies say in the bodies of their errors, in any form."""

from __future__ import annotations

import json
from typing import Any

from ppo_cli.rewards.judge.calls import JudgeError, Reply
from ppo_cli.rewards.remote.failures import Failure, read_message
from tests.judge_server import JudgeServer
from tests.judge_server.asking import SECRET, Ask, ask_once, judge_at
from tests.rewards.judge.corpora import read_corpus

FATAL, RETRYABLE, REFUSED = Failure.FATAL, Failure.RETRYABLE, Failure.REFUSED


def test_words_are_found_in_any_body(server: JudgeServer, ask: Ask, wire: str) -> None:
    sentence = "It is odd here, dear"
    unlike = []
    for row in read_corpus("bodies", "error_body"):
        raw, message = row["error_body"], row["message"]
        server.reset()
        server.fail(400, raw=raw.replace("WORDS", sentence))
        error = ask(wire)
        assert isinstance(error, JudgeError)
        expected = (
            f"{wire.split('-')[0]} (judge-model) answered 400: {message.replace('WORDS', sentence)}"
        )
        if (str(error), error.kind, error.cause) != (expected, REFUSED, "bad_request"):
            unlike.append((raw, str(error), error.kind))
    assert not unlike


def test_a_parameter_is_known_by_the_words_of_any_body(server: JudgeServer, wire: str) -> None:
    name = "thinking" if wire == "claude" else "seed"
    server.fail(422, times=1, raw=json.dumps({"detail": [{"loc": ["body", name], "msg": "no"}]}))
    judge = judge_at(server, wire)
    assert isinstance(ask_once(judge), Reply)
    assert [label.split("=")[0] for label in judge.dropped()] == [name]


def test_a_page_is_cut_short(server: JudgeServer, ask: Ask, wire: str) -> None:
    for raw in (f"<html><body>{'far ' * 500}{SECRET}</body></html>", "far " * 500, SECRET * 20):
        server.fail(500, times=1, raw=raw)
        message = str(ask(wire))
        assert len(message) < 300
        assert SECRET[:12] not in message
    server.fail(404, message="x" * 5000)
    message = str(ask(wire))
    assert len(message) < 1200 and "--rm_model" in message


def test_a_message_is_one_line_with_one_hint(server: JudgeServer) -> None:
    for status in (400, 401, 402, 403, 404):
        server.fail(status, times=100, message="One.\n\n  Two")
        message = str(ask_once(judge_at(server, "dashscope")))
        server.heal()
        assert "\n" not in message
        assert f"answered {status}: One. Two. " in message
        assert message.count("heck ") == 1


def test_a_body_without_words() -> None:
    for body in (None, 3, b"x", "", {}, [], {"error": {"code": 4}}, {"message": None}):
        assert read_message(body) == ""
    deep: Any = "words"
    for _ in range(1000):
        deep = {"error": deep}
    assert read_message(deep) == ""
    assert read_message("[" * 100_000).startswith("[[")
    assert read_message('{"error": ') == '{"error":'
