"""Parameters that a model does not take are found out once, remembered and told."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import Failure, JudgeError, Reply
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.negotiation import Negotiation, Option
from tests.judge_server import JudgeServer
from tests.judge_server.asking import WIRES, ask_once, judge_at, make_question, on_a_loop
from tests.judge_server.faults import holds_key

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


@pytest.mark.parametrize(
    ("wire", "name", "dropped"),
    [(wire, name, as_told) for wire in WIRES for name, as_told in PARAMETERS[wire].items()],
)
def test_a_refused_parameter_is_dropped_for_good(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, wire: str, name: str, dropped: str
) -> None:
    server.fail("reject_param", param=name)
    judge = judge_at(server, wire, temperature=0.5)

    async def twice(judge: SdkProvider) -> list[Reply]:
        return [await judge.ask(make_question(), timeout=10) for _ in range(2)]

    with caplog.at_level(logging.INFO, logger="ppo_cli"):
        replies = on_a_loop(judge, twice)
    assert len(replies) == 2
    refused = [call for call in server.calls if holds_key(call.body, name)]
    accepted = [call for call in server.calls if not holds_key(call.body, name)]
    assert len(refused) == len([d for d in judge.dropped() if same_option(d, dropped)])
    assert len(accepted) == 2
    assert dropped in judge.dropped()
    assert "not supported" in judge.dropped()[dropped] or name in judge.dropped()[dropped]
    assert caplog.text.count("does not take") == len(refused)
    # Nothing else was given up.
    assert {key.split("=")[0] for key in judge.dropped()} == {dropped.split("=")[0]}


def same_option(told: str, dropped: str) -> bool:
    return told.split("=")[0] == dropped.split("=")[0]


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


@pytest.mark.parametrize(
    ("wire", "message", "dropped"),
    [
        ("openai", "logits: json_schema is not supported", {"response_format=json_schema"}),
        ("gemini", "Budget 0 is invalid: this model thinks.", {"thinking=budget 0"}),
        ("gemini", "Schema is too complex for this model", {"response_schema=json_schema"}),
        ("dashscope", "parameter.enable_thinking must be set to true", {"enable_thinking"}),
        (
            "dashscope",
            "'messages' must contain the word 'json' to use 'response_format'",
            {"response_format=json_schema"},
        ),
        ("claude", "output_config.format.schema: unsupported", {"output_config=json_schema"}),
        ("claude", "structured outputs are not available", {"output_config=json_schema"}),
        (
            "gemini", "JSON mode is not enabled for models/gemma-3-27b-it",
            {"response_schema=json_schema"},
        ),
        ("gemini", "Invalid responseMimeType for it", {"response_schema=json_schema"}),
        ("gemini", "response schema and mime type: no", {"response_schema=json_schema"}),
        (
            "gemini", "Developer instruction is not enabled for models/gemma-3-27b-it",
            {"system_instruction=apart"},
        ),
        ("gemini", "System instruction is not enabled", {"system_instruction=apart"}),
        ("openai", "System role not supported", {"system_message=apart"}),
        ("openai", "response_format is not supported", {"response_format=json_schema"}),
        ("openai", "Structured outputs are off here", {"response_format=json_schema"}),
        ("openai", "guided_json: no backend", {"response_format=json_schema"}),
        ("openai", "Failed to compile the grammar", {"response_format=json_schema"}),
        ("openai", "Unsupported temperature; seed is taken", {"temperature"}),
        ("dashscope", "Json mode response is not supported", {"response_format=json_schema"}),
        ("dashscope", "guided decoding failed", {"response_format=json_schema"}),
    ],
)  # fmt: skip
def test_parameters_are_known_by_the_message(
    server: JudgeServer, wire: str, message: str, dropped: set[str]
) -> None:
    server.fail(400, times=1, message=message)
    judge = judge_at(server, wire)
    assert isinstance(ask_once(judge), Reply)
    assert set(judge.dropped()) == dropped
    assert server.count == 2


@pytest.mark.parametrize("wire", WIRES)
def test_an_unclear_400_costs_one_option_after_another_until_a_call_goes_through(
    server: JudgeServer, wire: str
) -> None:
    server.fail(400, times=2, message="Something here is not for me.")
    judge = judge_at(server, wire)
    forms = [(o, form) for o in judge.options() for form in o.forms]
    assert isinstance(ask_once(judge), Reply)
    assert server.count == 3
    (first, one), (cure, other) = forms[:2]
    # What had been dropped before the cure was dropped by guess: it is not given up.
    expected = [first.called(one)] if first is cure else []
    assert list(judge.dropped()) == [*expected, cure.called(other)]


def strike(server: JudgeServer, *names: str, message: str = "Something is not for me.") -> None:
    """Refuse, without naming anything, each call that has one of these parameters."""
    for name in names:
        server.fail("reject_param", param=name, raw=json.dumps({"error": {"message": message}}))


async def three(judge: SdkProvider) -> list[Reply]:
    return [await judge.ask(make_question(), timeout=10) for _ in range(3)]


def test_what_was_dropped_by_guess_comes_back(
    server: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    strike(server, "temperature")
    judge = judge_at(server, "gemini")
    with caplog.at_level(logging.INFO, logger="ppo_cli"):
        assert len(on_a_loop(judge, three)) == 3
    assert list(judge.dropped()) == ["temperature"]
    # One comes back with each call: thinking, safety settings, and later the others.
    last = server.calls[-1].body
    assert "thinkingConfig" in last["generationConfig"]
    assert {s["threshold"] for s in last["safetySettings"]} == {"OFF"}
    assert "temperature" not in last["generationConfig"]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.text.count("does not take temperature") == 1


def test_a_second_fault_costs_only_what_is_at_fault(
    server: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    strike(server, "thinkingConfig", "seed")
    judge = judge_at(server, "gemini")

    async def many(judge: SdkProvider) -> list[Reply]:
        return [await judge.ask(make_question(), timeout=10) for _ in range(6)]

    with caplog.at_level(logging.INFO, logger="ppo_cli"):
        assert len(on_a_loop(judge, many)) == 6
    thinking = [f"thinking={way}" for way in ("budget 0", "level MINIMAL", "level LOW")]
    assert sorted(judge.dropped()) == sorted(["seed", *thinking])
    assert {s["threshold"] for s in server.calls[-1].body["safetySettings"]} == {"OFF"}
    told = [record.getMessage().split(",")[0] for record in caplog.records]
    assert len(told) == len(set(told)) == 4
    before = server.count
    assert len(on_a_loop(judge, three)) == 3
    assert server.count == before + 3  # nothing is tried for ever


def test_guesses_that_lead_nowhere_are_taken_back(server: JudgeServer) -> None:
    server.fail(400, message="No.")
    judge = judge_at(server, "gemini")
    assert isinstance(ask_once(judge), JudgeError)
    server.heal()
    assert isinstance(ask_once(judge), Reply)
    assert judge.dropped() == {}
    assert "safetySettings" in server.calls[-1].body
    assert server.calls[-1].body == server.calls[0].body


def test_a_text_that_is_refused_during_a_trial_costs_nothing(server: JudgeServer) -> None:
    strike(server, "response_format")
    judge = judge_at(server, "openai")

    async def work(judge: SdkProvider) -> JudgeError:
        await judge.ask(make_question(), timeout=10)
        server.fail(400, times=2, message="Not this text.", after=0)
        with pytest.raises(JudgeError) as caught:
            await judge.ask(make_question(), timeout=10)
        await judge.ask(make_question(), timeout=10)
        return caught.value

    error = on_a_loop(judge, work)
    assert (error.kind, error.cause) == (Failure.REFUSED, "bad_request")
    assert sorted(judge.dropped()) == [
        "response_format=json_object", "response_format=json_schema"
    ]  # fmt: skip
    assert server.calls[-1].body["seed"] == 0


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
    honest = judge._parameters  # type: ignore[attr-defined]
    monkeypatch.setattr(judge, "_parameters", lambda *a: rename_seed(honest(*a)))
    assert isinstance(ask_once(judge), Reply)
    assert list(judge.dropped()) == ["seed"]
    assert server.count == 1


def rename_seed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Hand the seed over under a name that create() does not have."""
    return {("sampling_seed" if k == "seed" else k): v for k, v in parameters.items()}


def test_a_weird_first_reply_costs_no_option(server: JudgeServer) -> None:
    for fault in ("html", "empty", "not_json", "cut", 500, 429):
        server.fail(fault, times=1)
        judge = judge_at(server, "openai")
        assert isinstance(ask_once(judge), JudgeError)
        assert judge.dropped() == {}


# --- by itself ----------------------------------------------------------------------------------


def test_forms_are_tried_in_order_and_late_refusals_are_repeated() -> None:
    talks = Negotiation("m", [Option("a"), Option("b", ("x", "y"))])
    first = talks.form()
    assert first == {"a": "on", "b": "x"}
    assert talks.refuse(first, "no b", None)
    assert talks.form() == {"a": "on", "b": "y"}
    assert talks.refuse(first, "no b", None)  # sent before: repeat, and nothing moves
    assert talks.form() == {"a": "on", "b": "y"}
    assert talks.refuse(talks.form(), "no b", "b")
    assert talks.form() == {"a": "on"}
    talks.succeed(talks.form())
    assert talks.refuse(talks.form(), "a is odd", None) is None
    # Named outright, it goes all the same.
    assert talks.refuse(talks.form(), "unknown", "a") == talks.form() == {}
    assert talks.refuse(talks.form(), "whatever", None) is None
    assert list(talks.dropped()) == ["b=x", "b=y", "a"]


def test_a_call_that_was_on_the_way_takes_guesses_back() -> None:
    talks = Negotiation("m", [Option("a"), Option("b")])
    first = talks.begin()
    assert talks.refuse(first, "no", None) == {"b": "on"}
    talks.succeed(first)  # another call, sent at the same time
    assert talks.form() == first
    assert talks.dropped() == {}


def test_a_trial_that_is_cut_short_is_made_again() -> None:
    talks = Negotiation("m", [Option("a"), Option("b")])
    assert talks.refuse(talks.begin(), "no", None) == {"b": "on"}
    assert talks.refuse(talks.form(), "no", None) == {}
    talks.succeed({}, [{"a": "on", "b": "on"}, {"b": "on"}])
    assert talks.begin() == {"a": "on"}
    assert talks.refuse({"a": "on"}, "no", None) == {}
    assert talks.begin() == {"a": "on"}  # the call without it did not come through
    talks.succeed({})  # nor does a call that never had it tell anything
    assert talks.begin() == {"a": "on"}
    talks.succeed({}, [{"a": "on"}])
    assert talks.begin() == {}
    assert talks.dropped() == {"b": "no", "a": "no"}


def test_names_are_found_as_whole_words() -> None:
    option = Option("max_output_tokens")
    assert option.named_in("Unknown name 'maxOutputTokens'")
    assert option.named_in("generation_config.max_output_tokens: bad")
    assert not option.named_in("max_output_tokensx")
    assert not Option("seed").named_in("seeded")
    assert not Option("schema", ("json",)).named_in("Invalid JSON payload received")
    assert Option("schema", ("json_object",)).named_in("type 'json_object' is unknown")
