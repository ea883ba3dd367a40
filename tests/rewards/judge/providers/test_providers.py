"""The four judges through their real SDKs: what goes on the wire and what comes back."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Reply, Scale, Usage
from ppo_cli.rewards.judge.providers import (
    build_provider,
    claude,
    dashscope,
    gemini,
    openai,
)
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.forms import (
    level_labels,
    read_decision,
    reply_from_probabilities,
)
from ppo_cli.rewards.judge.providers.replies import read_usage
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server import Call, JudgeServer
from tests.judge_server.asking import (
    KEYS,
    SECRET,
    WIRES,
    ask_once,
    judge_api,
    judge_at,
    make_question,
    on_a_loop,
)
from tests.judge_server.server import digest

DECIDING = [wire for wire in WIRES if wire != "claude"]


@pytest.mark.parametrize("wire", WIRES)
def test_a_verdict_comes_back_with_its_tokens(server: JudgeServer, wire: str) -> None:
    right = ask_once(judge_at(server, wire))
    wrong = ask_once(judge_at(server, wire), make_question("The answer is 7."))
    assert isinstance(right, Reply) and isinstance(wrong, Reply)
    assert json.loads(right.text)["score"] == 10
    assert json.loads(wrong.text)["score"] == 1
    assert right.usage is not None
    assert right.usage.output > 0
    assert 0 < right.usage.cached_input < right.usage.input
    assert not right.truncated
    assert right.probabilities is None
    assert server.count == 2


@pytest.mark.parametrize("wire", WIRES)
def test_the_key_goes_with_the_call(server: JudgeServer, wire: str) -> None:
    server.keys = {SECRET}
    assert isinstance(ask_once(judge_at(server, wire)), Reply)
    assert server.calls[0].key_digest == digest(SECRET)
    assert SECRET not in str(server.calls[0])


@pytest.mark.parametrize(
    ("wire", "first", "second"),
    [
        ("gemini", "GEMINI_API_KEY", "GOOGLE_API_KEY"),
        ("claude", "ANTHROPIC_API_KEY", "CLAUDE_API_KEY"),
    ],
)
def test_both_key_variables_are_sent(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wire: str, first: str, second: str
) -> None:
    both = {first: "key-of-the-first", second: "key-of-the-second"}
    for name, value in both.items():
        monkeypatch.setenv(name, value)  # what the SDK would take by itself must not matter
    ask_once(judge_at(server, wire, environ={second: both[second]}))
    ask_once(judge_at(server, wire, environ=both))
    digests = [call.key_digest for call in server.calls]
    assert digests == [digest("key-of-the-second"), digest("key-of-the-first")]


def parameters(call: Call) -> dict[str, Any]:
    """What a request asks for beside its texts, whatever the wire."""
    body = call.body
    return {**body.get("generationConfig", {}), **body.get("parameters", {}), **body}


def schema_of(call: Call) -> dict[str, Any]:
    sent = parameters(call)
    if "response_format" in sent:
        assert sent["response_format"]["json_schema"]["strict"] is True
        return dict(sent["response_format"]["json_schema"]["schema"])
    if "output_config" in sent:
        return dict(sent["output_config"]["format"]["schema"])
    assert sent["responseJsonSchema"]["propertyOrdering"] == ["reason", "score_1_to_10"]
    return dict(sent["responseJsonSchema"])


@pytest.mark.parametrize("wire", WIRES)
def test_the_form_of_the_verdict_is_on_the_wire(server: JudgeServer, wire: str) -> None:
    ask_once(judge_at(server, wire))
    schema = schema_of(server.calls[0])
    assert list(schema["properties"]) == ["reason", "score_1_to_10"]
    assert schema["properties"]["score_1_to_10"] == {
        "type": "integer", "enum": list(range(1, 11)),
        "description": "1 is the worst, 10 the best",
    }  # fmt: skip
    assert schema["required"] == ["reason", "score_1_to_10"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("wire", WIRES)
def test_asked_for_text_no_schema_is_sent(server: JudgeServer, wire: str) -> None:
    reply = ask_once(judge_at(server, wire), make_question(output="text"))
    assert isinstance(reply, Reply)
    names = {"response_format", "output_config", "responseJsonSchema", "responseMimeType"}
    assert names & set(parameters(server.calls[0])) == set()


@pytest.mark.parametrize("wire", WIRES)
def test_both_texts_arrive_as_they_are(wire: str) -> None:
    seen: list[tuple[str, str]] = []

    def score(system: str, user: str) -> int:
        seen.append((system, user))
        return 5

    question = make_question('A "quoted" {brace} \\ 答案 🙂')
    with JudgeServer(score) as server:
        reply = ask_once(judge_at(server, wire), question)
    assert isinstance(reply, Reply)
    assert seen == [(question.system, question.user)]


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire != "claude"])
def test_sampling_parameters(server: JudgeServer, wire: str) -> None:
    ask_once(judge_at(server, wire), make_question(max_tokens=77))
    ask_once(judge_at(server, wire, votes=3), make_question(vote=2))
    ask_once(judge_at(server, wire, temperature=0.3))
    sent = [parameters(call) for call in server.calls]
    assert [t["temperature"] for t in sent] == [0.0, 0.7, 0.3]
    assert [t["seed"] for t in sent] == [0, 2, 0]
    assert sent[0]["maxOutputTokens" if wire == "gemini" else "max_tokens"] == 77


def test_claude_is_asked_without_temperature_unless_told(server: JudgeServer) -> None:
    ask_once(judge_at(server, "claude", votes=3), make_question(max_tokens=77))
    ask_once(judge_at(server, "claude", temperature=0.0))
    first, second = (call.body for call in server.calls)
    assert first.keys() & {"temperature", "seed"} == set()
    assert first["max_tokens"] == 77
    assert second["temperature"] == 0.0


def test_thinking_is_off_and_filters_are_off(server: JudgeServer) -> None:
    for wire in WIRES:
        ask_once(judge_at(server, wire))
    ask_once(judge_at(server, "openai", model="Qwen/Qwen3-8B"))
    by_wire = dict(zip([*WIRES, "vllm"], server.calls, strict=True))
    gemini = by_wire["gemini"].body
    assert gemini["generationConfig"]["thinkingConfig"] == {"thinking_budget": 0}
    assert {s["threshold"] for s in gemini["safetySettings"]} == {"OFF"}
    assert by_wire["claude"].body["thinking"] == {"type": "disabled"}
    assert by_wire["dashscope"].body["parameters"]["enable_thinking"] is False
    assert by_wire["dashscope-compatible"].body["enable_thinking"] is False
    assert by_wire["vllm"].body["chat_template_kwargs"] == {"enable_thinking": False}


def test_openai_itself_gets_the_new_name_of_the_limit() -> None:
    provider = build_provider(judge_api("openai", "m"), environ=KEYS)
    other = build_provider(judge_api("openai", "m", "http://localhost:8000"), environ=KEYS)
    azure = build_provider(judge_api("openai", "m", "https://x.openai.azure.com/v1"), environ=KEYS)
    limits = [
        next(o for o in p.options() if o.name == "max_tokens").forms
        for p in (provider, other, azure)
    ]
    assert limits[0] == limits[2] == ("max_completion_tokens", "max_tokens")
    assert limits[1] == ("max_tokens", "max_completion_tokens")


def test_qwen_is_told_not_to_think_in_the_words_of_its_host() -> None:
    sent = {}
    for url in ("https://dashscope.aliyuncs.com/compatible-mode/v1", "http://localhost:8000"):
        judge = build_provider(judge_api("openai", "Qwen-Plus", url), environ=KEYS)
        assert isinstance(judge, openai.Judge)
        _, extra = judge._request(make_question(output="text"), judge.forms())
        sent[judge.base_url.split("/")[2]] = extra
    assert sent == {
        "dashscope.aliyuncs.com": {"enable_thinking": False},
        "localhost:8000": {"chat_template_kwargs": {"enable_thinking": False}},
    }
    provider = build_provider(judge_api("openai", "qwen-like"), environ=KEYS)
    assert "thinking" not in provider.forms()


def test_gemini_thinks_as_little_as_the_model_can(server: JudgeServer) -> None:
    server.fail(400, times=1, message="Budget 0 is invalid: this model thinks.")
    server.fail(400, times=1, message="safety_settings: OFF is not a threshold here.")
    ask_once(judge_at(server, "gemini"))
    body = server.calls[-1].body
    assert body["generationConfig"]["thinkingConfig"] == {"thinking_level": "MINIMAL"}
    assert {(s["category"], s["threshold"]) for s in body["safetySettings"]} == {
        (f"HARM_CATEGORY_{harm}", "BLOCK_NONE")
        for harm in ("HARASSMENT", "HATE_SPEECH", "SEXUALLY_EXPLICIT", "DANGEROUS_CONTENT")
    }


@pytest.mark.parametrize("wire", WIRES)
def test_many_calls_share_one_client(server: JudgeServer, wire: str) -> None:
    clients = []

    async def many(judge: SdkProvider) -> list[Reply]:
        calls = [judge.ask(make_question(), timeout=10) for _ in range(20)]
        replies = await asyncio.gather(*calls)
        clients.append(judge._client)
        await judge.ask(make_question(), timeout=10)
        clients.append(judge._client)
        return replies

    assert len(on_a_loop(judge_at(server, wire), many)) == 20
    assert clients[0] is clients[1] is not None
    assert server.count == 21


@pytest.mark.parametrize("wire", WIRES)
def test_closing_says_nothing(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    provider = judge_at(server, wire)
    asyncio.run(provider.close())
    with caplog.at_level(logging.WARNING):
        ask_once(provider)  # closes it twice
        ask_once(provider)  # and a closed one opens again, on another loop
    assert not caplog.records


@pytest.mark.parametrize("wire", WIRES)
def test_tokens_that_are_not_told_are_not_zero(server: JudgeServer, wire: str) -> None:
    for fault in ("no_usage", "null_usage"):
        server.heal()
        server.fail(fault)
        for mode in ("text", "decision") if wire in DECIDING else ("text",):
            reply = ask_once(judge_at(server, wire, mode=mode))
            assert isinstance(reply, Reply)
            assert reply.usage is None, (fault, mode)


def test_half_a_count_is_a_count() -> None:
    assert read_usage({"prompt_tokens": 5}, openai.TOKENS) == Usage(5, 0)
    assert read_usage({"prompt_tokens": 0, "completion_tokens": 0}, openai.TOKENS) is None
    usage = {"prompt_token_count": 5, "total_token_count": 12}
    assert read_usage(usage, gemini.TOKENS) == Usage(5, 7)
    assert read_usage({"prompt_tokens": None, "total_tokens": 7}, openai.TOKENS) is None
    assert read_usage({"output_tokens": 5}, claude.TOKENS) == Usage(0, 5)
    assert read_usage({}, claude.TOKENS) is None
    assert read_usage({"candidates_token_count": None}, gemini.TOKENS) is None
    assert read_usage({"cache_read_input_tokens": 9, "output_tokens": 5}, claude.TOKENS) == Usage(
        0, 5
    )


@pytest.mark.parametrize("count", [-5, "5", True, float("nan"), float("inf"), 10**12, [5]])
def test_a_usage_with_a_number_that_is_no_count_is_not_believed(count: object) -> None:
    assert read_usage({"input_tokens": count, "output_tokens": 7}, dashscope.TOKENS) is None
    assert read_usage({"prompt_tokens": 9, "completion_tokens": count}, openai.TOKENS) is None


def test_parts_of_a_count_are_added() -> None:
    usage = {"input_tokens": 1, "cache_creation_input_tokens": 10, "cache_read_input_tokens": 100}
    assert read_usage(usage, claude.TOKENS) == Usage(111, 0, 100)
    usage = {"candidates_token_count": 1, "thoughts_token_count": 10}
    assert read_usage(usage, gemini.TOKENS) == Usage(0, 11)
    usage = {"total_input_tokens": 9, "total_output_tokens": 3, "total_cached_tokens": 5}
    assert read_usage(usage, gemini.DECISION_TOKENS) == Usage(9, 3, 5)
    nested = {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 5}}
    assert read_usage(nested, openai.DECISION_TOKENS) == Usage(9, 3, 5)


# --- decision endpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("wire", DECIDING)
def test_a_decision_gives_a_probability_for_each_level(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    seen: list[tuple[str, str]] = []

    def score(system: str, user: str) -> int:
        seen.append((system, user))
        return 10

    monkeypatch.setattr(server, "score", score)
    question = make_question()
    reply = ask_once(judge_at(server, wire, mode="decision"), question)
    assert isinstance(reply, Reply)
    assert seen == [(question.system, question.user)]
    shares = reply.probabilities
    assert shares is not None
    assert list(shares) == list(range(1, 11))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[10] == pytest.approx(0.8)
    assert reply.text == ""
    assert reply.usage is not None and reply.usage.input > 0
    assert server.calls[0].path.endswith(("/decisions", "/systemone"))
    assert server.count == 1


FIVE = Scale(0, 4)
FAIR = {str(index): 0.2 for index in range(5)}


@pytest.mark.parametrize(
    "probabilities",
    [
        {name: share for name, share in FAIR.items() if name != "3"},  # one is missing
        FAIR | {"5": 0.0},  # one is too much
        {f"{name} out of 4": share for name, share in FAIR.items()},
        FAIR | {"2": None},
        FAIR | {"2": "0.2"},
    ],
)
def test_a_decision_names_exactly_the_levels_asked_for(probabilities: dict[str, Any]) -> None:
    reply = {"answers": {"verdict": {"probabilities": probabilities}}}
    with pytest.raises(JudgeError) as caught:
        read_decision(reply, FIVE, None)
    assert (caught.value.kind, caught.value.cause) == (Failure.UNPARSED, "unparsed")
    assert read_decision({"answers": {"verdict": {"probabilities": FAIR}}}, FIVE, None).text == ""


def test_a_label_that_comes_twice_is_no_decision() -> None:
    labels = level_labels(FIVE)
    rows = [(label, 0.2) for label in labels]
    assert reply_from_probabilities(rows, labels, FIVE, None).probabilities == dict.fromkeys(
        range(5), 0.2
    )
    with pytest.raises(JudgeError):
        reply_from_probabilities([*rows, rows[0]], labels, FIVE, None)
    with pytest.raises(JudgeError):
        reply_from_probabilities([rows[0], *rows[:4]], labels, FIVE, None)


def test_each_decision_endpoint_has_its_path(server: JudgeServer) -> None:
    for wire in DECIDING:
        ask_once(judge_at(server, wire, mode="decision"))
    assert [call.path for call in server.calls] == [
        "/v1/decisions",
        "/v1beta/decisions",
        "/compatible-mode/v1/systemone",
        "/compatible-mode/v1/systemone",
    ]


@pytest.mark.parametrize("wire", DECIDING)
def test_decisions_fail_in_the_same_words(server: JudgeServer, wire: str) -> None:
    outcomes: dict[Any, tuple[Failure, str]] = {
        404: (Failure.FATAL, "http_404"),
        401: (Failure.FATAL, "http_401"),
        429: (Failure.RETRYABLE, "http_429"),
        503: (Failure.RETRYABLE, "http_503"),
        "cut": (Failure.RETRYABLE, "connection"),
        "html": (Failure.RETRYABLE, "bad_body"),
    }
    for fault, outcome in outcomes.items():
        server.reset()
        server.fail(fault)
        error = ask_once(judge_at(server, wire, mode="decision"))
        assert isinstance(error, JudgeError)
        assert (error.kind, error.cause, server.count) == (*outcome, 1), fault


@pytest.mark.parametrize(("wire", "cause"), [("openai", "refusal"), ("gemini", "content_filter")])
def test_a_decision_can_be_refused(server: JudgeServer, wire: str, cause: str) -> None:
    server.fail("refusal")
    error = ask_once(judge_at(server, wire, mode="decision"))
    assert isinstance(error, JudgeError)
    assert (error.kind, error.cause) == (Failure.REFUSED, cause)
    assert error.usage.input > 0


# --- odds and ends ------------------------------------------------------------------------------


def test_importing_the_providers_imports_no_sdk() -> None:
    code = (
        "import sys, ppo_cli.rewards.judge.providers as p\n"
        "from ppo_cli.config.schema.reward import ApiReward\n"
        "p.build_provider(ApiReward(type='gemini', model='m'), environ={'GEMINI_API_KEY': 'k'})\n"
        "heavy = {'openai', 'anthropic', 'google.genai', 'dashscope', 'aiohttp', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_thoughts_are_billed_and_never_read() -> None:
    """Gateways count the tokens of a thought apart: by a total, or in a field of their own."""
    told = {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]},
                        {"type": "text", "text": "Score: 8"}]}  # fmt: skip
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 150}
    chunks = openai.read_completion({"choices": [{"message": told}], "usage": usage})
    assert (chunks.text, chunks.usage) == ("Score: 8", Usage(100, 50))
    only = {"choices": [{"message": {"content": None, "reasoning_content": "Score: 3"}}]}
    with pytest.raises(JudgeError) as caught:
        openai.read_completion(only | {"usage": usage})
    assert (caught.value.cause, caught.value.usage) == ("empty", Usage(100, 50))
    native = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 150}
    assert read_usage(native, dashscope.TOKENS) == Usage(100, 50)
    parts = {"prompt_token_count": 100, "candidates_token_count": 20, "thoughts_token_count": 30}
    assert read_usage(parts, gemini.TOKENS) == Usage(100, 50)
    blocks = [
        {"type": "thinking", "thinking": "Score: 3"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Score: 8"},
    ]
    spent = {"input_tokens": 100, "output_tokens": 50}
    message = claude.read_message({"content": blocks, "usage": spent, "stop_reason": "end_turn"})
    assert (message.text, message.usage) == ("Score: 8", Usage(100, 50))
