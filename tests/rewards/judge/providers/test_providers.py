"""The four judges through their real SDKs: what goes on the wire and what comes back."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale, Usage
from ppo_cli.rewards.judge.providers import build_provider
from ppo_cli.rewards.judge.providers.base import SdkProvider
from ppo_cli.rewards.judge.providers.claude import Judge as Claude
from ppo_cli.rewards.judge.providers.dashscope import Judge as DashScope
from ppo_cli.rewards.judge.providers.forms import level_labels, read_decision
from ppo_cli.rewards.judge.providers.gemini import Judge as Gemini
from ppo_cli.rewards.judge.providers.openai import Judge as OpenAI
from ppo_cli.rewards.judge.providers.replies import CHAT, get_path, read_reply, read_usage
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server import JudgeServer
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
from tests.rewards.judge.corpora import read_corpus

DECIDING = [wire for wire in WIRES if wire != "claude"]
# Where the parts of a request are, and how thinking is switched off there.
OPENAI = {
    "schema": "response_format.json_schema.schema", "format": "response_format", "seed": "seed",
    "temperature": "temperature", "limit": "max_tokens",
}  # fmt: skip
PLACES: dict[str, dict[str, str]] = {
    "openai": OPENAI,
    "claude": {
        "schema": "output_config.format.schema", "format": "output_config", "seed": "seed",
        "temperature": "temperature", "limit": "max_tokens", "thinking": "thinking.type",
    },
    "gemini": {
        "schema": "generationConfig.responseJsonSchema",
        "format": "generationConfig.responseMimeType", "seed": "generationConfig.seed",
        "temperature": "generationConfig.temperature", "limit": "generationConfig.maxOutputTokens",
        "thinking": "generationConfig.thinkingConfig.thinking_budget",
    },
    "dashscope": {name: f"parameters.{place}" for name, place in OPENAI.items()}
    | {"thinking": "parameters.enable_thinking"},
    "dashscope-compatible": OPENAI | {"thinking": "enable_thinking"},
}  # fmt: skip
NO_THINKING = {"openai": None, "claude": "disabled", "gemini": 0}


def test_a_request_carries_texts_limit_schema_and_key(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    received: list[tuple[str, str]] = []
    monkeypatch.setattr(server, "score", lambda *texts: received.append(texts) or 5)
    server.keys = {SECRET}
    question = make_question('A "quoted" {brace} \\ 答案 🙂', max_tokens=77)
    assert isinstance(ask_once(judge_at(server, wire), question), Reply)
    (call,), places = server.calls, PLACES[wire]
    assert received == [(question.system, question.user)]
    assert call.key_digest == digest(SECRET) and SECRET not in str(call)
    assert get_path(call.body, places["limit"]) == 77
    schema = dict(get_path(call.body, places["schema"]))
    names = ["reason", "score_1_to_10"]
    assert schema.pop("propertyOrdering", names) == schema["required"] == names
    assert list(schema["properties"]) == names and schema["additionalProperties"] is False
    assert schema["properties"]["score_1_to_10"] == {
        "type": "integer", "enum": list(range(1, 11)),
        "description": "1 is the worst, 10 the best",
    }  # fmt: skip
    assert get_path(call.body, f"{places['format']}.json_schema.strict") in (True, None)
    thinking = get_path(call.body, places.get("thinking", "thinking"))
    assert thinking == NO_THINKING.get(wire, False)


def test_a_verdict_comes_back_with_its_tokens(server: JudgeServer, wire: str) -> None:
    for response, score in (("The answer is 42.", 10), ("The answer is 7.", 1)):
        reply = ask_once(judge_at(server, wire), make_question(response))
        assert isinstance(reply, Reply) and json.loads(reply.text)["score"] == score
        assert reply.usage is not None and reply.usage.output > 0
        assert 0 < reply.usage.cached_input < reply.usage.input
        assert not reply.truncated and reply.probabilities is None


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


def test_a_text_verdict_is_requested_without_schema(server: JudgeServer, wire: str) -> None:
    assert isinstance(ask_once(judge_at(server, wire), make_question(output="text")), Reply)
    body = server.calls[0].body
    assert [get_path(body, PLACES[wire][name]) for name in ("format", "schema")] == [None, None]


def test_sampling_parameters(server: JudgeServer, wire: str) -> None:
    ask_once(judge_at(server, wire))
    ask_once(judge_at(server, wire, votes=3), make_question(vote=2))
    ask_once(judge_at(server, wire, temperature=0.3))
    sent = [
        [get_path(call.body, PLACES[wire][name]) for call in server.calls]
        for name in ("temperature", "seed")
    ]
    # Current models of Anthropic take neither.
    expected = [[None, None, 0.3], [None] * 3] if wire == "claude" else [[0.0, 0.7, 0.3], [0, 2, 0]]
    assert sent == expected


def test_openai_itself_gets_the_new_name_of_the_limit() -> None:
    names = ("max_completion_tokens", "max_tokens")
    addresses = {
        None: names, "https://x.openai.azure.com/v1": names, "http://localhost:8000": names[::-1],
    }  # fmt: skip
    for url, forms in addresses.items():
        provider = build_provider(judge_api("openai", "m", url), environ=KEYS)
        assert [o.forms for o in provider.options() if o.name == "max_tokens"] == [forms]


@pytest.mark.parametrize(
    ("model", "url", "extra"),
    [
        ("Qwen-Plus", "https://dashscope.aliyuncs.com/v1", {"enable_thinking": False}),
        ("Qwen-Plus", "http://h:80", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("qwen-like", None, {}),
        ("m", "http://h:80", {}),
    ],
)
def test_qwen_is_told_not_to_think_in_the_words_of_its_host(
    model: str, url: str | None, extra: dict[str, Any]
) -> None:
    provider = build_provider(judge_api("openai", model, url), environ=KEYS)
    arguments = provider.arguments(make_question(output="text"), provider.forms())
    assert arguments.get("extra_body", {}) == extra


def test_gemini_thinks_as_little_as_the_model_can_without_filters(server: JudgeServer) -> None:
    server.fail(400, times=1, message="Budget 0 is invalid: this model thinks.")
    server.fail(400, times=1, message="safety_settings: OFF is not a threshold here.")
    ask_once(judge_at(server, "gemini"))
    first, last = server.calls[0].body, server.calls[-1].body
    assert last["generationConfig"]["thinkingConfig"] == {"thinking_level": "MINIMAL"}
    for body, threshold in ((first, "OFF"), (last, "BLOCK_NONE")):
        assert {(s["category"], s["threshold"]) for s in body["safetySettings"]} == {
            (f"HARM_CATEGORY_{harm}", threshold)
            for harm in ("HARASSMENT", "HATE_SPEECH", "SEXUALLY_EXPLICIT", "DANGEROUS_CONTENT")
        }


def test_many_calls_share_one_client(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    judge, clients = judge_at(server, wire), []
    connect = judge.connect
    monkeypatch.setattr(judge, "connect", lambda key: clients.append(1) or connect(key))

    async def ask_many(judge: SdkProvider) -> list[Reply]:
        calls = [judge.ask(make_question(), timeout=10) for _ in range(20)]
        return [*await asyncio.gather(*calls), await judge.ask(make_question(), timeout=10)]

    assert len(on_a_loop(judge, ask_many)) == server.count == 21
    assert len(clients) == 1


def test_closing_is_silent(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    provider = judge_at(server, wire)
    asyncio.run(provider.close())
    with caplog.at_level(logging.WARNING):
        ask_once(provider)  # closes it twice
        ask_once(provider)  # and a closed one opens again, on another loop
    assert not caplog.records


def test_unreported_tokens_are_not_zero(server: JudgeServer, wire: str) -> None:
    for fault in ("no_usage", "null_usage"):
        server.heal()
        server.fail(fault)
        for mode in ("text", "decision") if wire in DECIDING else ("text",):
            reply = ask_once(judge_at(server, wire, mode=mode))
            assert isinstance(reply, Reply) and reply.usage is None, (fault, mode)


TOKENS = {
    "openai": CHAT.tokens,
    "openai decision": OpenAI.decision_tokens,
    "claude": Claude.reply_fields.tokens,
    "gemini": Gemini.reply_fields.tokens,
    "gemini decision": Gemini.decision_tokens,
    "dashscope": DashScope.reply_fields.tokens,
}


@pytest.mark.parametrize("row", read_corpus("usage"))
def test_usage_is_read_by_the_names_of_the_provider(row: dict[str, Any]) -> None:
    """Half a count is a count, parts are added, and with one doubtful number none counts."""
    expected = None if row["expected"] is None else Usage(*row["expected"])
    assert read_usage(row["usage"], TOKENS[row["tokens"]]) == expected


THOUGHT = {
    "type": "thinking",
    "text": "Score: 3",
    "thinking": [{"type": "text", "text": "Score: 3"}],
}
ANSWER = {"type": "text", "text": "Score: 8"}


def test_thoughts_are_billed_and_never_read() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 150}
    chat = {"choices": [{"message": {"content": [THOUGHT, ANSWER]}}], "usage": usage}
    assert read_reply(chat, CHAT) == Reply("Score: 8", Usage(100, 50))
    chat["choices"] = [{"message": {"content": None, "reasoning_content": "Score: 3"}}]
    with pytest.raises(JudgeError) as caught:
        read_reply(chat, CHAT)
    assert (caught.value.cause, caught.value.usage) == ("empty", Usage(100, 50))
    message = {
        "content": [THOUGHT, {"type": "redacted_thinking", "data": "x"}, ANSWER],
        "usage": {"input_tokens": 100, "output_tokens": 50},
    }
    assert read_reply(message, Claude.reply_fields) == Reply("Score: 8", Usage(100, 50))


# --- decision endpoints -------------------------------------------------------------------------

PATHS = {"openai": "/v1/decisions", "gemini": "/v1beta/decisions"}


@pytest.mark.parametrize("wire", DECIDING)
def test_a_decision_gives_a_probability_for_each_level(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    received: list[tuple[str, str]] = []
    monkeypatch.setattr(server, "score", lambda *texts: received.append(texts) or 10)
    question = make_question()
    reply = ask_once(judge_at(server, wire, mode="decision"), question)
    assert isinstance(reply, Reply) and reply.probabilities is not None
    assert received == [(question.system, question.user)]
    (shares,) = reply.probabilities
    assert shares == pytest.approx(dict.fromkeys(range(1, 10), 0.2 / 9) | {10: 0.8})
    assert reply.text == "" and reply.usage is not None and reply.usage.input > 0
    assert [call.path for call in server.calls] == [
        PATHS.get(wire, "/compatible-mode/v1/systemone")
    ]


FIVE = Question("", "", "", Scale(0, 4))
FAIR = {str(index): 0.2 for index in range(5)}
ROWS = [{"label": label, "probability": 0.2} for label in level_labels(FIVE.scale)]


@pytest.mark.parametrize(
    "answers", [{"verdict": {"probabilities": FAIR}}, [{"probabilities": ROWS}]]
)
def test_a_decision_is_read_from_an_object_or_a_list(answers: Any) -> None:
    reply = read_decision({"answers": answers}, FIVE, CHAT.tokens)
    assert reply.probabilities == (dict.fromkeys(range(5), 0.2),)


@pytest.mark.parametrize(
    "shares",
    [
        {name: share for name, share in FAIR.items() if name != "3"},  # one is missing
        FAIR | {"5": 0.0},  # one is too much
        {f"{name} out of 4": share for name, share in FAIR.items()},
        FAIR | {"2": None},
        FAIR | {"2": "0.2"},
        [*ROWS, ROWS[0]],  # one comes twice
        [ROWS[0], *ROWS[:4]],
    ],
)
def test_a_decision_names_exactly_the_requested_levels(shares: Any) -> None:
    is_list = isinstance(shares, list)
    answer = {"probabilities": shares}
    reply = {"answers": [answer] if is_list else {"verdict": answer}}
    with pytest.raises(JudgeError) as caught:
        read_decision(reply, FIVE, CHAT.tokens)
    assert (caught.value.kind, caught.value.cause) == (Failure.UNPARSED, "unparsed")


DECISION_FAILURES: dict[Any, tuple[Failure, str]] = {
    404: (Failure.FATAL, "http_404"), 401: (Failure.FATAL, "http_401"),
    429: (Failure.RETRYABLE, "http_429"), 503: (Failure.RETRYABLE, "http_503"),
    "cut": (Failure.RETRYABLE, "connection"), "html": (Failure.RETRYABLE, "bad_body"),
}  # fmt: skip


@pytest.mark.parametrize("wire", DECIDING)
def test_decisions_fail_in_the_same_words(server: JudgeServer, wire: str) -> None:
    for fault, outcome in DECISION_FAILURES.items():
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
    assert (error.kind, error.cause) == (Failure.REFUSED, cause) and error.usage.input > 0


def test_importing_the_providers_imports_no_sdk() -> None:
    code = (
        "import sys, ppo_cli.rewards.judge.providers as p\n"
        "from ppo_cli.config.schema.reward import ApiReward\n"
        "p.build_provider(ApiReward(type='gemini', model='m'), environ={'GEMINI_API_KEY': 'k'})\n"
        "heavy = {'openai', 'anthropic', 'google.genai', 'dashscope', 'aiohttp', 'httpx'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
