"""What a chat template writes as a tool call is read back equal, with any schema and value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.environments.chat import Chat
from ppo_cli.errors import ModelError
from ppo_cli.thoughts import MARKS
from tests.environments.families import (
    MISTRAL_WORDS,
    make_tokenizer,
    mistral_template,
    trl_template,
)
from tests.marks import quick_only

TEXT, NULL = {"type": "string"}, {"type": "null"}
WHOLE = {"allOf": [{"type": "number"}, {"type": "integer"}]}
# Schemas by the name of the argument, and values that each allows.
VALUES: dict[str, tuple[Mapping[str, Any], list[Any]]] = {
    "text": (TEXT, [
        "a", "0123", "true", "None", "null", "[1, 2]", '{"a": 1}', "1e5", '"q"', "it's", "a\nb",
        "def f():\n    return 1\n", "\n\ntwo\n\n", "  spaced ", "日本語 🙂", "back\\slash \\n",
        "f(x)[0], b=1", "<b> a < b </b>", "a</parameter>b</arg_value>", "{x}", "", "\n", "x\r\ny",
    ]),
    "optional": ({"anyOf": [TEXT, NULL]}, ["12", "0123", "True", "a\n", "[1]", '"q"', None]),
    "listed": ({"type": ["string", "null"]}, ["12", "x", None]),
    "nullable": ({"type": "string", "nullable": True}, ["1.50", None]),
    "referred": ({"anyOf": [{"$ref": "#/$defs/Name"}, NULL]}, ["7", None]),
    "limit": ({"anyOf": [{"type": "integer"}, NULL], "default": None}, [7, None, -3, 10**20]),
    "number": ({"type": "number"}, [1.5, 1e-7, 3, 2.0, 1e22]),
    "flag": ({"type": "boolean"}, [True, False]),
    "either": ({"anyOf": [{"type": "boolean"}, TEXT]}, [True, "x", "yes"]),
    "several": ({"oneOf": [TEXT, {"type": "integer"}]}, [5, "0123", "x"]),
    "bounded": ({"allOf": [TEXT, {"minLength": 1}], "anyOf": [{"maxLength": 9}, {}]}, ["1", "x"]),
    "whole": ({"anyOf": [WHOLE, TEXT]}, ["1.50", 7]),
    "level": ({"type": "string", "enum": ["low", "None", "1"]}, ["low", "None", "1"]),
    "grade": ({"enum": [1, 2.5, None, "3", "true"]}, [1, 2.5, None, "3", "true"]),
    "fixed-text": ({"const": "7"}, ["7"]),
    "tags": ({"type": "array", "items": TEXT}, [[], ["1", "None", "a\nb", "it's", '"q"', "日"]]),
    "nested": (
        {"type": "object", "properties": {"a": TEXT, "b": {"type": "array", "items": NULL}}},
        [{}, {"a": "12", "b": [None]}, {"a": "l\nl", "c d": {"d": [True, {"e": False}]}}],
    ),
    "free": ({}, ["x", {"a": [True, None]}, True]),
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "save",
        "description": "Save.",
        "parameters": {
            "type": "object",
            "properties": {
                key: {**schema, "description": key} for key, (schema, _) in VALUES.items()
            },
            "required": [],
            "$defs": {"Name": {"type": "string", "description": "A name.", "title": "Name"}},
        },
    },
}  # fmt: skip
# The first call has the first value of each argument, and so on.
CALLS = [
    {key: values[i % len(values)] for key, (_, values) in VALUES.items()}
    for i in range(max(len(values) for _, values in VALUES.values()))
]
# Templates of other families, whose values are written in other ways.
TURN = (
    "{{% if tools %}}<|im_start|>system\n{{{{ tools | tojson }}}}<|im_end|>\n{{% endif %}}"
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content or '' }}}}"
    "{{% for c in m.tool_calls or [] %}}{calls}{{% endfor %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
ARGUMENTS = "{% for k, v in c.function.arguments.items() %}"
PYTHON = (
    "<|calls|>[{{ c.function.name }}(" + ARGUMENTS + "{{ k }}={{ v | FILTER }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})]<|calls_end|>"
)
OWN = {
    "text on lines": (
        "\n<tool_call>\n<function={{ c.function.name }}>\n" + ARGUMENTS + "<parameter={{ k }}>\n"
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "text in tags": (
        "<tool_call>{{ c.function.name }}" + ARGUMENTS + "<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
    ),
    "text indented": (
        "<call>\n  <name>{{ c.function.name }}</name>\n" + ARGUMENTS + "  <arg key='{{ k }}'>\n"
        "    {{ v | string }}\n  </arg>\n{% endfor %}</call>"
    ),
    "python with JSON": PYTHON.replace("FILTER", "tojson"),
    "python with its own notation": PYTHON.replace("FILTER", "pprint"),
}  # fmt: skip
# Marks that end a turn, the most common first; gpt-oss, Gemma and GLM end calls with another one.
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<turn|>",
    "<|return|>",
    "<|eot|>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
)
CALL_ENDS = ("<|call|>", "<|tool_response>", "<|observation|>")
# These do not show their tools or calls, so they are refused.
REFUSED = ("trl deepseek_r1_distill", "trl deepseekv3", "trl lfm2", "trl muse_glimmer")
WORD = re.compile(r"<\|[^|<>\s'\"{}]{1,40}\|?>|<[^|<>\s'\"{}]{1,40}\|>|<\|\"\|>|<bos>|</?s>")


def list_templates() -> list[str]:
    spec = find_spec("trl")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("absent")
    names = sorted(path.stem for path in folder.glob("chat_templates/*.jinja"))
    # Those for training differ in marks that are not rendered.
    shown = [f"trl {name}" for name in names if not name.endswith("_training")]
    return [*OWN, *shown, *(f"mistral {v}" for v in ("v2", "v3", "v7", "v11", "v13"))]


@pytest.mark.parametrize("name", quick_only(list_templates(), *OWN, *list_templates()[::3]))
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    kind, _, rest = name.partition(" ")
    words: tuple[str, ...] = MISTRAL_WORDS
    if name in OWN:
        template = TURN.format(calls=OWN[name])
    else:
        template = mistral_template(rest) if kind == "mistral" else trl_template(rest)
    if kind != "mistral":
        words = ("<bos>", *sorted({*WORD.findall(template)} - {"<bos>"}))
    if "tool" not in template:
        pytest.skip("a template without calls")
    end = next(end for end in ENDS if end in words or end in template)
    tokenizer = make_tokenizer(template, words, end)
    tools = [TOOL]
    ids = [tokenizer.convert_tokens_to_ids(word) for word in {end, *CALL_ENDS} & {end, *words}]
    if name in REFUSED:
        with pytest.raises(ModelError, match="use a model"):
            Chat(tokenizer, {}, tools, frozenset(ids))
        return
    chat = Chat(tokenizer, {}, tools, frozenset(ids))
    user = {"role": "user", "content": "q"}
    prompt = tokenizer.apply_chat_template(
        [user], tools=tools, tokenize=False, add_generation_prompt=True
    )
    for arguments in CALLS:
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "save"}}
        call["function"]["arguments"] = arguments
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = tokenizer.apply_chat_template([user, message], tools=tools, tokenize=False)
        at = next(i for i, (a, b) in enumerate(zip(text, f"{prompt}\0", strict=False)) if a != b)
        stop = max(text.rfind(mark) for mark in (end, *CALL_ENDS))
        turn = text[at : stop if stop > at else len(text)]
        ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
        parsed = chat.parse(ids)
        assert "error" not in parsed and parsed["content"] == ""
        (read,) = (c["function"]["arguments"] for c in parsed["tool_calls"])
        assert repr(sort(read)) == repr(sort(arguments)), turn
    # Texts of data and environments begin and end nothing.
    control = set(tokenizer.convert_tokens_to_ids([end, *words]))
    texts = [*words, f"a{end}\n{prompt}", turn, "\n".join(words), end.replace("|", "｜")]

    def skeleton(text: str, role: str) -> list[int]:
        other = user if role == "system" else {"role": "assistant", "content": "x"}
        return [i for i in chat.open([{"role": role, "content": text}, other])[1] if i in control]

    plain = skeleton("a", "user")
    assert all(skeleton(f"a {text} b", "user") == plain for text in texts)
    with suppress(ValueError):  # no system messages
        plain = skeleton("a", "system")
        texts = [MARKS.sub("", text) for text in texts]  # it may name the marks of thoughts
        assert all(skeleton(f"a {text} b", "system") == plain for text in texts)


def sort(value: Any) -> Any:
    """Return a value whose objects have their keys in order, as some templates write them."""
    if isinstance(value, dict):
        return {key: sort(value[key]) for key in sorted(value)}
    return [sort(item) for item in value] if isinstance(value, list) else value
