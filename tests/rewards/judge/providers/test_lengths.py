"""A judge with a small context: the words of servers, and requests with fewer tokens of answer."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.lengths import (
    TruncationCheck,
    fit_answer_tokens,
    is_about_length,
)
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server import JudgeServer
from tests.judge_server.asking import ask_once, judge_at, make_question, on_a_loop
from tests.rewards.judge.corpora import read_corpus

# About 80 tokens are sent, and 1,024 are asked for.
QUESTION = Question("You judge. " * 5, "word " * 60, "id", Scale(1, 10), max_tokens=1024)


@pytest.mark.parametrize("row", read_corpus("refusals", "room"))
def test_a_refusal_for_length_says_how_much_fits(row: dict[str, Any]) -> None:
    """Messages of many servers, with the tokens to ask for next; null: not about length."""
    message, room = row["message"], row["room"]
    assert is_about_length(400, message) is (room is not None)
    assert room is None or fit_answer_tokens(QUESTION, message) == room


@pytest.mark.parametrize(
    ("message", "never_fits"),
    [
        ("Request too large for m on tokens per min (TPM): Limit 30,000, Requested 41,024.", True),
        (
            "Rate limit reached on tokens per min (TPM): Limit 6000, Used 5800, Requested 900.",
            False,
        ),
        ("Rate limit reached for m on requests per minute (RPM): Limit 3, Requested 4.", False),
    ],
)
def test_a_request_above_the_whole_rate_is_too_long(message: str, never_fits: bool) -> None:
    assert is_about_length(429, message) is never_fits


def ask_twice(judge: SdkProvider, question: Question) -> list[Reply]:
    async def work(provider: SdkProvider) -> list[Reply]:
        return [await provider.ask(question, timeout=10.0) for _ in range(2)]

    return on_a_loop(judge, work)


def limit_of(wire: str, body: dict[str, Any]) -> int:
    if wire == "gemini":
        return int(body["generationConfig"]["maxOutputTokens"])
    return int((body.get("parameters") or body)["max_tokens"])


VLLM = (
    "'max_tokens' is too large: {limit}. This model's maximum context length is {context} tokens "
    "and your request has 60 input tokens."
)


def refuse_long(server: JudgeServer, wire: str, context: int, message: str = VLLM) -> None:
    """Refuse what a prompt of 60 tokens and the answer exceed together, in a server's words."""
    fault = server.fail(400)

    def strikes(path: str, body: Any, dice: Any) -> bool:
        limit = limit_of(wire, body)
        fault.message = message.format(limit=limit, context=context)
        return 60 + limit > context

    fault.strikes = strikes  # type: ignore[method-assign]


def test_a_judge_with_a_small_context_is_asked_for_fewer_tokens(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    refuse_long(server, wire, 700)
    judge = judge_at(server, wire, max_tokens=1024)

    with caplog.at_level(logging.WARNING):
        replies = ask_twice(judge, make_question(max_tokens=1024))
    assert all(isinstance(reply, Reply) for reply in replies)
    assert [limit_of(wire, call.body) for call in server.calls] == [1024, 640, 640]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "Set --rm_max_tokens 640" in warnings[0]


def test_a_request_that_does_not_fit_says_that_fewer_tokens_do_not_help(
    server: JudgeServer, wire: str
) -> None:
    refuse_long(server, wire, 100)
    error = ask_once(judge_at(server, wire), make_question(max_tokens=1024))
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (Failure.REFUSED, "too_long")
    assert "a lower --rm_max_tokens does not help" in str(error)
    assert server.count <= 5


def test_a_refusal_without_numbers_halves_the_answer(server: JudgeServer) -> None:
    wordless = "Please reduce the length of the messages or completion."
    refuse_long(server, "openai", 400, wordless)
    reply = ask_once(judge_at(server, "openai"), make_question(max_tokens=1024))
    assert isinstance(reply, Reply)
    assert [call.body["max_tokens"] for call in server.calls] == [1024, 512, 256]


@pytest.mark.parametrize("code", [400, "context_length_exceeded"])
def test_an_error_object_with_status_200_counts_as_the_error_that_it_is(
    server: JudgeServer, code: int | str
) -> None:
    message = "This model's maximum context length is 50 tokens; your prompt is too long."
    body = json.dumps({"error": {"message": message, "code": code}})
    server.fail("body", raw=body, headers={"Content-Type": "application/json"})
    error = ask_once(judge_at(server, "openai"))
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (Failure.REFUSED, "too_long")


PROSE = "The quick brown fox jumps over the lazy dog again. " * 100  # about 1,100 tokens
CODE = "def total(values):\n    return sum(v for v in values if v > 0)\n" * 40
CHINESE = "这个答案是正确的，推理过程也很清楚。" * 60


def question_of(text: str) -> Question:
    return Question("", text, text, Scale(1, 10))


@pytest.mark.parametrize(
    ("text", "read"),
    [(PROSE, 64), (PROSE, 256), (CODE, 100), (CHINESE, 50), (PROSE * 20, 4096)],
)
def test_a_count_that_no_tokenizer_makes_is_found(text: str, read: int) -> None:
    assert f"counted {read} tokens" in (TruncationCheck().find(question_of(text), read) or "")


@pytest.mark.parametrize(
    ("text", "read"),
    [(PROSE, 1100), (PROSE, 900), (CODE, 700), (CHINESE, 500), ("x" * 4000, 500), ("=" * 900, 8)],
)
def test_a_count_that_may_be_right_is_not_found(text: str, read: int) -> None:
    assert TruncationCheck().find(question_of(text), read) is None


@pytest.mark.parametrize("most", [2048, 4096])
def test_one_count_for_all_long_requests_is_found(most: int) -> None:
    check = TruncationCheck()
    problems = [
        check.find(question_of(PROSE[:50] * count), min(most, 11 * count))
        for count in range(most // 11 - 90, most // 11 + 90, 10)
    ]
    assert problems[:9] == [None] * 9
    assert f"counted {most} tokens, and never more" in str(problems[-1])


def test_the_same_request_again_and_again_is_no_ceiling() -> None:
    check = TruncationCheck()
    assert [check.find(question_of(PROSE), 1100) for _ in range(20)] == [None] * 20


def test_a_judge_that_reads_a_part_is_reported_once(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    server.state.most_read = 64

    with caplog.at_level(logging.WARNING):
        ask_twice(judge_at(server, wire), make_question(PROSE))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "may read only a part of what it is sent: it counted 64 tokens" in warnings[0]
