"""Texts of prompts in frames are those that the chat template gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ppo_cli.data_sets.prompts import Renderer

LOOP = "{%- for message in messages %}"
END = "{%- endfor %}{% if add_generation_prompt %}[a]{% endif %}"
LAST = "{% set last = messages[-1].content %}"
# Templates that only write contents out.
FRAMED = [
    LOOP + "[{{ message.role }}]{{ message['content'] }}" + END,
    LOOP + "{{- '100%s <' + message.role + '>' + message.content + '</>\n' }}" + END,
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{{ loop.index0 % 2 }}{% set text = '|' + message.content %}{{ text }}"
    "{% endfor %}",
    "{% set ns = namespace(text='') %}" + LOOP
    + "{% set ns.text = ns.text + message.role + message.content %}{% endfor %}{{ ns.text }}",
    LOOP + "{% if message.content is string and 'tool_calls' not in message %}{{ message.content }}"
    "{% else %}{{ message.content | tojson }}{% endif %}" + END,
    LOOP + "{% if message.role == 'tool' %}{{ message.content.split('x')[-1] }}{% else %}"
    "{{ message.content | default('') }}{% endif %}" + END,
]  # fmt: skip
# Those that look at contents, or write them in another way, so that the frame is not certain.
EXAMINED = [
    LOOP + "{{ message.content | trim }}" + END,
    LOOP + "{{ ('<' + message.content) | trim }}" + END,
    LOOP + "{{ ('' ~ message.content) | trim }}" + END,
    LOOP + "{{ message.content.strip() }}" + END,
    LOOP + "{{ message['content'] | upper }}" + END,
    LOOP + "{{ message.content | tojson }}" + END,
    LOOP + "{{ message.content }}{{ message.content | tojson | length }}" + END,
    LOOP + "{{ message.content }}{{ message.content | length }}" + END,
    LOOP + "{% if 'x' in message.content %}x{% endif %}{{ message.content }}" + END,
    LOOP + "{% if message.content in 'xyz' %}x{% endif %}{{ message.content }}" + END,
    LOOP + "{% if 'xyz'.startswith(message.content) %}x{% endif %}{{ message.content }}" + END,
    LOOP + "{% if 'xyz' | trim(message.content) %}x{% endif %}{{ message.content }}" + END,
    LOOP + "{% if message.content == 'x' %}x{% endif %}{{ message.content }}" + END,
    LOOP + "{% if message.content > 'x' %}x{% endif %}{{ message.content }}" + END,
    LOOP + "{% if message.content %}{{ message.content }}{% endif %}" + END,
    LOOP + "{{ message.content[:1] }}{{ message.content }}" + END,
    LOOP + "{% for letter in message.content %}{{ letter }}.{% endfor %}" + END,
    LOOP + "{{ message }}" + END,
    LOOP + "{{ '%s' % message.content }}" + END,
    LOOP + "{{ '%s'.__mod__(message.content) }}{{ message.content }}" + END,
    LOOP + "{{ '%s' | format(message.content) }}" + END,
    LOOP + "{{ [message.content, ''] | join }}" + END,
    LOOP + "{{ message.content * 2 }}" + END,
    LOOP + "{{ message.content }}{{ message.content }}" + END,
    LOOP + "{{ message.content | replace('x', 'y') }}" + END,
    LOOP + "{% set text %}{{ message.content }}{% endset %}{{ text | trim }}" + END,
    LOOP + "{% macro write(text) %}{{ text }}{% endmacro %}{{ write(message.content) | trim }}"
    + END,
    LOOP + "{{ message.content }}{{ strftime_now('%f') }}" + END,
    LOOP + "{{ message.content }}{{ [1, 2, 3, 4] | random }}" + END,
    "{% for message in messages | reverse %}{{ message.content }}.{% endfor %}",
    LOOP + "{{ message.role }}" + END,
    LAST + LOOP + "{% if message.content == last %}{{ last }}{% endif %}" + END,
    LOOP + "{{ message.content }}{{ ",
]  # fmt: skip
SHAPES = [("user",), ("system", "user"), ("user", "assistant", "user")]
PIECES = "x", "xyz", " ", "\n", "%s", "%", "<|im_end|>", "</think>", '"', "\\", "é", "數", "{{ 1 }}"


def draw_prompts() -> list[Any]:
    draw = random.Random(3)

    def content() -> str:
        return "".join(draw.choices(PIECES, k=draw.randrange(8))) + "x"

    shapes = draw.choices(SHAPES, k=60)
    lists = [tuple({"role": r, "content": content()} for r in shape) for shape in shapes]
    return [*lists, *(content() for _ in range(60))]


@pytest.mark.parametrize("system_prompt", [None, "Use 5 %s."])
@pytest.mark.parametrize("template", FRAMED)
def test_frames_give_the_texts_of_the_template(
    template: str, system_prompt: str | None, make_tokenizer: Callable[..., Any]
) -> None:
    renderer = Renderer(make_tokenizer(template=template), system_prompt)
    prompts = draw_prompts()
    expected = [renderer.text_of(prompt, renderer.messages_of(prompt)) for prompt in prompts]
    assert renderer.fill_frames(prompts) == expected
    assert renderer.fill(prompts) == expected


@pytest.mark.parametrize("template", EXAMINED)
def test_templates_that_may_look_at_contents_have_no_frames(
    template: str, make_tokenizer: Callable[..., Any]
) -> None:
    renderer = Renderer(make_tokenizer(template=template))
    assert not any(renderer.fill_frames([prompt]) for prompt in draw_prompts() if len(prompt) > 1)


def test_messages_with_other_keys_and_refused_roles_have_none(
    make_tokenizer: Callable[..., Any],
) -> None:
    template = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    renderer = Renderer(make_tokenizer(template=template + FRAMED[0]))
    plain = {"role": "user", "content": "x"}
    assert renderer.fill_frames([(plain,)]) == ["[user]x[a]"]
    assert renderer.fill_frames([(plain, {**plain, "name": "Ada"})]) == []
    tool, refusal = renderer.fill([({**plain, "role": "tool"},), "x"]), "no tools"
    assert refusal in str(tool[0]) and tool[1] == "[user]x[a]"


def test_a_tokenizer_with_another_way_to_apply_templates_has_none(
    make_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = make_tokenizer(template=FRAMED[0])

    class Upper(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, *args: Any, **options: Any) -> Any:
            texts = super().apply_chat_template(*args, **options)
            return [t.upper() for t in texts] if isinstance(texts, list) else texts.upper()

    tokenizer.__class__ = Upper
    assert Renderer(tokenizer).fill(["x"]) == ["[USER]X[A]"]
