"""Tool calls as families write them: read from templates, several in a turn, and malformed ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ppo_cli.environments.chat import Chat
from ppo_cli.errors import ModelError
from tests.environments.families import (
    MISTRAL_WORDS,
    SCHEMA,
    load_family,
    make_tokenizer,
    mistral_template,
    trl_template,
)

NAMED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "near": {"type": "array", "description": "Others.", "items": {"type": "string"}},
            },
        },
    },
}  # fmt: skip
ADD = ("add", {"a": 1, "b": 2})
ODD = ("find", {"city": 'Köln "x", {y}', "near": ["a", "b"]})


def make_chat(name: str) -> tuple[Chat, Any]:
    if name.startswith("mistral "):
        template = mistral_template(name.split()[1])
        tokenizer = make_tokenizer(template, MISTRAL_WORDS, "</s>")
    elif name in ("glm4moe", "qwen3_5_think", "qwen2_5", "lfm2_2_5", "lfm2_v2"):
        words = ("<|user|>", "<|observation|>", "<|assistant|>", "<|im_start|>", "<|im_end|>")
        end = "<|user|>" if name == "glm4moe" else "<|im_end|>"
        tokenizer = make_tokenizer(trl_template(name), words, end)
    else:
        tokenizer = load_family(name)[1]
    words = {"<|call|>", "<|return|>", "<|eot_id|>", "<turn|>", "<|tool_response>"}
    ends = words | {tokenizer.eos_token, "<|observation|>"}
    ids = [tokenizer.get_vocab()[word] for word in ends & set(tokenizer.get_vocab())]
    return Chat(tokenizer, {}, (SCHEMA, NAMED), frozenset(ids)), tokenizer


def read(name: str, text: str) -> Mapping[str, Any]:
    chat, tokenizer = make_chat(name)
    return chat.parse(tokenizer(text, add_special_tokens=False)["input_ids"])


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(f["name"], f["arguments"]) for f in functions]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
HERMES_ODD = (
    '<tool_call>\n{"name": "find", "arguments": {"city": "Köln \\"x\\", {y}", "near": ["a", '
    '"b"]}}\n</tool_call>'
)
HARMONY = "<|channel|>commentary{} <|constrain|>json<|message|>{}<|call|>"
GLM = (
    '\n<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Köln "x", {y}</arg_value>\n'
    '<arg_key>near</arg_key>\n<arg_value>["a", "b"]</arg_value>\n</tool_call>'
)
QWEN35 = (
    '<tool_call>\n<function=find>\n<parameter=city>\nKöln "x", {y}\n</parameter>\n'
    '<parameter=near>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>'
)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen3", f"I add.\n{HERMES}\n{HERMES_ODD}<|im_end|>", "I add.", [ADD, ODD]),
        ("qwen3", f"{HERMES} So.", "So.", [ADD]),
        ("qwen2_5", HERMES, "", [ADD]),
        # A call in a thought is none, and neither is a thought that is not closed.
        ("qwen3", f"<think>\n{HERMES}\n</think>\n\nNo.", "No.", []),
        ("qwen3", f"<think>\n{HERMES}", "", []),
        ("qwen3", f"<think>\n{HERMES}\n</think>\n\n{HERMES_ODD}", "", [ODD]),
        ("llama3_1", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        ("llama3_1", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        (
            "llama3_1",
            '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>',
            "",
            [ADD],
        ),
        ("llama3_1", 'As {"name": "add"}', 'As {"name": "add"}', []),
        ("llama3_1", '{"sum": 3}', '{"sum": 3}', []),
        (
            "mistral v3",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefgh1"}, '
            '{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefgh2"}]</s>',
            "",
            [ADD, ADD],
        ),
        ("mistral v11", '[TOOL_CALLS]add[CALL_ID]abcdefgh1[ARGS]{"a": 1, "b": 2}', "", [ADD]),
        ("mistral v13", 'So.[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>', "So.", [ADD]),
        ("gpt-oss", HARMONY.format(" to=functions.add", '{"a": 1, "b": 2}'), "", [ADD]),
        (
            "gpt-oss",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
            "",
            [ADD],
        ),
        ("gpt-oss", HARMONY.format("", "First I add."), "First I add.", []),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>to=functions.add {}<|end|><|start|>assistant<|channel|>"
            "final<|message|>3<|return|>",
            "3",
            [],
        ),
        (
            "gemma4",
            'So.<|tool_call>call:add{a:1,b:2}<tool_call|><|tool_call>call:find{city:<|"|>Köln "x", '
            '{y}<|"|>,near:[<|"|>a<|"|>,<|"|>b<|"|>]}<tool_call|><|tool_response>',
            "So.",
            [ADD, ODD],
        ),
        ("glm4moe", f"\n<think>Hm</think>\nSo.{GLM}<|observation|>", "So.", [ODD]),
        ("glm4moe", "<tool_call>ping\n</tool_call>", "", [("ping", {})]),
        ("qwen3_5_think", f"Hm\n</think>\n\n{QWEN35}\n{QWEN35}<|im_end|>", "", [ODD, ODD]),
        (
            "qwen3_5_think",
            "</think><tool_call>\n<function=ping>\n</function>\n</tool_call>",
            "",
            [("ping", {})],
        ),
        (
            "lfm2_2_5",
            "I add.<|tool_call_start|>[add(a=1, b=2), find(city=\"Köln \\\"x\\\", {y}\", "
            "near=['a', 'b']), ping()]<|tool_call_end|>So.",
            "I add.So.",
            [ADD, ODD, ("ping", {})],
        ),
        (
            "lfm2_2_5",
            "<|tool_call_start|>[find(city='it's (a, b=1)\n', near=[])]<|tool_call_end|>",
            "",
            [("find", {"city": "it's (a, b=1)\n", "near": []})],
        ),
        (
            "lfm2_v2",
            "<|tool_call_start|>[find(city='it\\'s\\n', open=None, far=true)]<|tool_call_end|>",
            "",
            [("find", {"city": "it's\n", "open": None, "far": True})],
        ),
        # White space that the template does not write belongs to a text; other values may have it.
        (
            "qwen3_5_think",
            "</think><tool_call>\n<function=find>\n<parameter=city>\n\n a\n\n</parameter>\n"
            "<parameter=near>[ ]</parameter>\n</function>\n</tool_call>",
            "",
            [("find", {"city": "\n a\n", "near": []})],
        ),
    ],
)  # fmt: skip
def test_calls_of_a_family(name: str, text: str, content: str, calls: list[Any]) -> None:
    message = read(name, text)
    assert "error" not in message
    assert calls_of(message) == calls
    assert message["content"] == content


def test_a_call_keeps_the_id_that_the_model_wrote() -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "abcdefgh1"}]'
    assert read("mistral v3", text)["tool_calls"][0]["id"] == "abcdefgh1"
    text = "[TOOL_CALLS]add[CALL_ID]abcdefgh2[ARGS]{}"
    assert read("mistral v11", text)["tool_calls"][0]["id"] == "abcdefgh2"
    # Mistral's template refuses any other.
    text = '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "</s>"}]'
    assert read("mistral v3", text)["tool_calls"][0]["id"].isalnum()
    # Without one, it follows from the tokens.
    first, second = (read("qwen3", HERMES)["tool_calls"][0]["id"] for _ in range(2))
    assert first == second


def test_without_tools_a_call_is_text() -> None:
    tokenizer = load_family("qwen3")[1]
    chat = Chat(tokenizer, {}, (), frozenset({tokenizer.eos_token_id}))
    ids = tokenizer(f"<think>\nHm\n</think>\n\n{HERMES}\0", add_special_tokens=False)["input_ids"]
    assert chat.parse(ids) == {
        "role": "assistant", "content": f"{HERMES}\0", "reasoning_content": "Hm",
    }  # fmt: skip


WRITE_PYTHON = "Write <|tool_call_start|>[…(…='…')]<|tool_call_end|>."
WRITE = 'Write <tool_call>{"name": "…", "arguments": {…}}</tool_call>.'


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        (
            "qwen3",
            '<tool_call>\n{"name": "add" "arguments": {}}\n</tool_call>',
            f"The tool call is not valid JSON (Expecting ',' delimiter at character 16). {WRITE}",
        ),
        (
            "qwen3",
            '<tool_call>{"arguments": {}}</tool_call>',
            f"The tool call has no name. {WRITE}",
        ),
        (
            "qwen3",
            '<tool_call>{"name": "add", "arguments": "1 2"}</tool_call>',
            f"The arguments of the tool call are not a JSON object. {WRITE}",
        ),
        (
            "qwen3",
            "<tool_call>3</tool_call>",
            f"The tool call has no name. {WRITE}",
        ),
        (
            "qwen3",
            "<tool_call>" + '{"name":' * 100_000,
            f"The tool call is not valid JSON (nested too deeply, or NaN). {WRITE}",
        ),
        (
            "qwen3",
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            f"The tool call is not valid JSON (nested too deeply, or NaN). {WRITE}",
        ),
        (
            "qwen3",
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            f"The tool call is not valid JSON (half of a surrogate pair). {WRITE}",
        ),
        (
            "llama3_1",
            '{"name": "add", "parameters": {"a": 1',
            "The tool call is not valid JSON (Expecting ',' delimiter at character 38). "
            'Write {"name": "…", "parameters": {…}}.',
        ),
        (
            "mistral v13",
            '[TOOL_CALLS]add{"a": 1}',
            "The tool call has no arguments. Write [TOOL_CALLS]…[ARGS]{…}.",
        ),
        (
            "gpt-oss",
            HARMONY.format(" to=functions.add", "a=1"),
            "The tool call is not valid JSON (Expecting value at character 1). Write <|channel|>"
            "commentary to=functions.… <|constrain|>json<|message|>{…}<|call|>.",
        ),
        (
            "gemma4",
            "<|tool_call>call:add(a=1)<tool_call|>",
            "The tool call has no arguments. Write <|tool_call>call:…{…}<tool_call|>.",
        ),
        (
            "glm4moe",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>",
            "An argument of the tool call is not closed. Write <tool_call>…\n<arg_key>…</arg_key>\n"
            "<arg_value>…</arg_value>\n</tool_call>",
        ),
        (
            "lfm2_2_5",
            "<|tool_call_start|>[add(a=1]<|tool_call_end|>",
            f"The tool call is not closed. {WRITE_PYTHON}",
        ),
        (
            "lfm2_2_5",
            "<|tool_call_start|>[add(1, 2)]<|tool_call_end|>",
            f"An argument of the tool call has no name. {WRITE_PYTHON}",
        ),
        (
            "lfm2_2_5",
            "<|tool_call_start|>[add(a=b)]<|tool_call_end|>",
            f"The value 'b)]<|tool_call_end|>' cannot be read. {WRITE_PYTHON}",
        ),
        (
            "lfm2_2_5",
            "<|tool_call_start|>[add(a=1)",
            f"The tool call cannot be read at ''. {WRITE_PYTHON}",
        ),
        (
            "glm4moe",
            "<tool_call>add",
            "The tool call is not closed. Write <tool_call>…\n<arg_key>…</arg_key>\n<arg_value>…"
            "</arg_value>\n</tool_call>",
        ),
    ],
)  # fmt: skip
def test_a_malformed_call_tells_the_model_what_was_expected(
    name: str, text: str, error: str
) -> None:
    message = read(name, f"<think>Hm</think>{text}" if name == "qwen3" else text)
    assert message["error"] == error
    assert "tool_calls" not in message
    assert message["content"] == (text if name != "gpt-oss" else "")


# Calls of MiniMax M2: tags, with a mark around all calls of a turn.
WRAPPED = """{{ tools | tojson if tools }}{% for m in messages %}]~b]{{ m.role }}
{{ m.content }}{% if m.tool_calls %}
<minimax:tool_call>
{% for call in m.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments | items %}<parameter name="{{ key }}">{{
value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% endfor %}{% if add_generation_prompt %}]~b]assistant
{% endif %}"""


def test_marks_around_all_tagged_calls_are_no_content() -> None:
    tokenizer = make_tokenizer(WRAPPED, ("]~b]", "[e~["), "[e~[")
    chat = Chat(tokenizer, {}, (SCHEMA,), frozenset({tokenizer.eos_token_id}))
    one = '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
    turn = f"Let me.\n<minimax:tool_call>\n{one}{one}</minimax:tool_call>[e~["
    message = chat.parse(tokenizer(turn, add_special_tokens=False)["input_ids"])
    assert message["content"] == "Let me." and calls_of(message) == [("add", {"a": 1})] * 2


# A template from which nothing can be read: keys come after their values.
REVERSED = WRAPPED.replace('<parameter name="{{ key }}">{{', "{{").replace(
    "</parameter>", " for {{ key }};"
)


def test_a_response_template_is_read_by_transformers() -> None:
    tokenizer = make_tokenizer(REVERSED, ("]~b]", "[e~["), "[e~[")
    with pytest.raises(ModelError, match="does not show how the model writes tool calls"):
        Chat(tokenizer, {}, (SCHEMA,), frozenset({tokenizer.eos_token_id}))
    utils = pytest.importorskip("trl.chat_template_utils")
    template = trl_template("lfm2_2_5")
    other = make_tokenizer(template, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    tokenizer.response_template = utils.add_response_schema(other).response_template
    chat = Chat(tokenizer, {}, (SCHEMA,), frozenset({tokenizer.eos_token_id}))
    text = "So.<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"
    message = chat.parse(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert calls_of(message) == [ADD] and message["content"] == "So."


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_arguments_of_rows_may_be_json_texts(name: str) -> None:
    chat, _ = make_chat(name)
    texts = [open_with(chat, arguments) for arguments in ({"a": 1}, '{"a": 1}')]
    assert texts[0] == texts[1] and '{"a": 1}' in texts[0]
    with pytest.raises(ValueError, match="the arguments of a tool call are not JSON"):
        open_with(chat, "{a")


def open_with(chat: Chat, arguments: Any) -> str:
    """Return the text of an opening that ends with a call and its result, as OpenAI writes them."""
    function = {"name": "add", "arguments": arguments}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    return chat.open([{"role": "user", "content": "q"}, call, {"role": "tool", "content": "1"}])[0]
