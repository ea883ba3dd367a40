"""Chat templates for tokenizers without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import ModelError
from ppo_cli.extras.fitting.training import set_template

CHAT = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye?"},
]
JINJA = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


def render(tokenizer: Any, **options: Any) -> str:
    return str(tokenizer.apply_chat_template(CHAT, tokenize=False, **options))


def test_without_a_template_there_is_one_sentence(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ModelError, match=r"base has no chat template.*--template: transcript"):
        set_template(make_tokenizer(None), "base", None)


def test_the_tokenizers_own_template_and_the_named_ones(
    make_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = make_tokenizer(JINJA)
    set_template(tokenizer, "base", None)
    assert render(tokenizer) == "[Hi?][Hello.][Bye?]"
    set_template(tokenizer, "base", "chatml")
    assert render(tokenizer).startswith("<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant")
    set_template(tokenizer, "base", "transcript")
    text = "\n\nHuman: Hi?\n\nAssistant: Hello.\n\nHuman: Bye?"
    assert render(tokenizer) == text + "<|im_end|>"
    assert render(tokenizer, add_generation_prompt=True) == text + "\n\nAssistant: "


def test_a_file_and_a_text_are_taken(make_tokenizer: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(JINJA)
    for expected in (str(file), JINJA):
        tokenizer = make_tokenizer(None)
        set_template(tokenizer, "base", expected)
        assert render(tokenizer) == "[Hi?][Hello.][Bye?]"


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ("transcripts", "none of the names transcript, chatml. Did you mean 'transcript'?"),
        ("{prompt} {{ response }}", "does not name `messages`"),
    ],
)
def test_what_is_no_template_is_told(
    make_tokenizer: Callable[..., Any], expected: str, message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        set_template(make_tokenizer(None), "base", expected)
    assert message in str(caught.value)
