"""Parameters that a model refuses are dropped once, remembered and told."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.options import Forms, Option
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server import JudgeServer
from tests.judge_server.asking import ask_once, judge_at, make_question, on_a_loop
from tests.judge_server.faults import holds_key
from tests.rewards.judge.corpora import read_corpus

# Each optional parameter by its name on the wire, and by its name in `dropped()`.
PARAMETERS = {
    "openai": {
        "seed": "seed", "temperature": "temperature", "max_tokens": "max_tokens=max_tokens",
        "response_format": "response_format=json_object",
    },
    "claude": {
        "thinking": "thinking=disabled", "output_config": "output_config=json_schema",
        "temperature": "temperature",
    },
    "gemini": {
        "seed": "seed", "temperature": "temperature", "maxOutputTokens": "max_output_tokens",
        "safetySettings": "safety_settings=BLOCK_NONE", "thinkingConfig": "thinking=level LOW",
        "responseJsonSchema": "response_schema=json_schema",
    },
    "dashscope": {
        "seed": "seed", "temperature": "temperature", "max_tokens": "max_tokens",
        "enable_thinking": "enable_thinking", "response_format": "response_format=json_object",
    },
}  # fmt: skip
PARAMETERS["dashscope-compatible"] = PARAMETERS["dashscope"]


def test_a_refused_parameter_is_dropped_for_good(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    for name, dropped in PARAMETERS[wire].items():
        server.reset()
        caplog.clear()
        server.fail("reject_param", param=name)
        judge = judge_at(server, wire, temperature=0.5)
        with caplog.at_level(logging.INFO, logger="ppo_cli"):
            assert len(on_a_loop(judge, ask_twice)) == 2
        refused = [call for call in server.calls if holds_key(call.body, name)]
        labels = judge.dropped()
        # Each form of this parameter, and no other one, costs one call and one line.
        assert server.count == 2 + len(refused), name
        assert len(labels) == len(refused) == caplog.text.count("does not take"), name
        assert {label.partition("=")[0] for label in labels} == {dropped.partition("=")[0]}
        assert name in labels.get(dropped, "") or "not supported" in labels.get(dropped, "")


async def ask_twice(judge: SdkProvider) -> list[Reply]:
    return [await judge.ask(make_question(), timeout=10) for _ in range(2)]


def test_twenty_calls_at_once_repeat_once_each(server: JudgeServer) -> None:
    server.state.latency = 0.05  # all twenty are on the way before the first is refused
    server.fail("reject_param", param="temperature")
    judge = judge_at(server, "openai")

    async def many(judge: SdkProvider) -> list[Reply]:
        return await asyncio.gather(*(judge.ask(make_question(), timeout=10) for _ in range(20)))

    assert len(on_a_loop(judge, many)) == 20
    with_it = [call for call in server.calls if "temperature" in call.body]
    assert 1 <= len(with_it) <= 20
    assert server.count == len(with_it) + 20
    assert list(judge.dropped()) == ["temperature"]
    server.reset()


def test_the_limit_is_sent_under_the_name_that_the_model_takes(server: JudgeServer) -> None:
    server.fail("reject_param", param="max_tokens", message="Use 'max_completion_tokens' instead.")
    judge = judge_at(server, "openai")
    assert isinstance(ask_once(judge, make_question(max_tokens=50)), Reply)
    assert server.calls[-1].body["max_completion_tokens"] == 50
    assert list(judge.dropped()) == ["max_tokens=max_tokens"]


@pytest.mark.parametrize("row", read_corpus("refusals", "dropped"))
def test_a_parameter_is_known_by_the_message(server: JudgeServer, row: dict[str, Any]) -> None:
    server.fail(400, times=1, message=row["message"])
    judge = judge_at(server, row["wire"])
    assert isinstance(ask_once(judge), Reply)
    assert (set(judge.dropped()), server.count) == ({row["dropped"]}, 2)


def test_an_unclear_400_costs_one_option_after_another_until_a_call_goes_through(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    server.fail(400, times=2, message="Something here is not for me.")
    judge = judge_at(server, wire)
    with caplog.at_level(logging.INFO, logger="ppo_cli"):
        assert isinstance(ask_once(judge), Reply)
    assert server.count == 3
    forms = [option.label(form) for option in judge.options() for form in option.forms]
    assert list(judge.dropped()) == forms[:2]
    assert caplog.text.count("does not take") == 2


def test_guesses_that_lead_nowhere_cost_nothing(server: JudgeServer, wire: str) -> None:
    server.fail(400, message="This gateway wants something else.")
    judge = judge_at(server, wire)
    error = ask_once(judge)
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (Failure.FATAL, "http_400")
    assert "This gateway wants something else." in str(error)
    assert server.count == 1 + sum(len(option.forms) for option in judge.options())
    server.heal()
    assert isinstance(ask_once(judge), Reply)
    assert judge.dropped() == {}
    assert server.calls[-1].body == server.calls[0].body


@pytest.mark.parametrize(
    ("wire", "message"),
    [("gemini", "Developer instruction is not enabled"), ("openai", "System role not supported")],
)
def test_a_model_without_system_texts_reads_them_in_the_prompt(wire: str, message: str) -> None:
    seen: list[tuple[str, str]] = []

    def score(system: str, user: str) -> int:
        seen.append((system, user))
        return 5

    question = make_question()
    with JudgeServer(score) as server:
        server.fail(400, times=1, message=message)
        assert isinstance(ask_once(judge_at(server, wire), question), Reply)
    assert seen == [("", f"{question.system}\n\n{question.user}")]


def test_once_a_form_has_worked_a_400_is_about_the_text(server: JudgeServer) -> None:
    judge = judge_at(server, "openai")

    async def work(judge: SdkProvider) -> JudgeError:
        await judge.ask(make_question(), timeout=10)
        server.fail(400, message="I dislike the temperature of this text.")
        with pytest.raises(JudgeError) as caught:
            await judge.ask(make_question(), timeout=10)
        return caught.value

    error = on_a_loop(judge, work)
    assert (error.kind, error.cause) == (Failure.REFUSED, "bad_request")
    assert judge.dropped() == {}
    assert server.count == 2


def test_an_sdk_that_does_not_know_an_argument(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judge_at(server, "openai")
    arguments = judge.arguments

    def rename_seed(question: Question, forms: Forms) -> dict[str, Any]:
        """Pass the seed under a name that create() does not have."""
        renamed = {"seed": "sampling_seed"}
        return {renamed.get(k, k): v for k, v in arguments(question, forms).items()}

    monkeypatch.setattr(judge, "arguments", rename_seed)
    assert isinstance(ask_once(judge), Reply)
    assert list(judge.dropped()) == ["seed"]
    assert server.count == 1


def test_a_weird_first_reply_costs_no_option(server: JudgeServer) -> None:
    for fault in ("html", "empty", "not_json", "cut", 500, 429):
        server.fail(fault, times=1)
        judge = judge_at(server, "openai")
        assert isinstance(ask_once(judge), JudgeError)
        assert judge.dropped() == {}


def test_names_are_found_as_whole_words() -> None:
    def named(option: Option, text: str) -> bool:
        return option.find_in(text) is not None

    option = Option("max_output_tokens")
    assert named(option, "Unknown name 'maxOutputTokens'")
    assert named(option, "generation_config.max_output_tokens: bad")
    assert not named(option, "max_output_tokensx")
    assert not named(Option("seed"), "seeded")
    assert not named(Option("schema", ("json",)), "Invalid JSON payload received")
    assert named(Option("schema", ("json_object",)), "type 'json_object' is unknown")


@pytest.mark.parametrize(
    ("status", "message", "label"),
    [
        (500, "Jinja Exception: System role not supported", "system_message=apart"),
        (500, "Conversation roles must alternate user/assistant/user", "system_message=apart"),
        (500, "Failed to parse grammar", "response_format=json_schema"),
        (501, "json_schema is not implemented", "response_format=json_schema"),
    ],
)
def test_an_option_refused_with_status_500_is_dropped_too(
    server: JudgeServer, status: int, message: str, label: str
) -> None:
    server.fail(status, message=message, times=1)
    judge = judge_at(server, "openai")
    assert isinstance(ask_once(judge), Reply)
    assert list(judge.dropped()) == [label]
    # Where no option helps, the error is final and says what was tried.
    server.reset()
    server.fail(status, message=message)
    error = ask_once(judge_at(server, "openai"))
    assert isinstance(error, JudgeError) and error.kind is Failure.FATAL
    assert message in str(error) and label in str(error)
    server.reset()
