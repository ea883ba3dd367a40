"""In any text, only the template's control words become control tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppo_cli.rewards.models.formats import MARKS, ControlToken, PlainText
from tests.rewards.models.tiny import MAKERS, tokenizer
from tests.rewards.models.twin_tokenizers import Odd

FRAGMENTS = (
    "<|", "|>", "<|eot_id|>", "eot_id", "<|im_end|>", "<s>", "</s>", "<s", ">", "[SEP]",
    "[CLS]", "[CLS", "]", "<", "/", " ", "\n", "a", "B ", "7", "，", "ＳＥＰ", "［SEP］", "\ue000",
    "<|end|>", "<|user|>", "<unk>",
)  # fmt: skip
PROPERTY = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@pytest.fixture(params=MAKERS)
def reader(request: pytest.FixtureRequest) -> Any:
    return tokenizer(request.param)


def control_ids(reader: Any) -> set[int]:
    special = {i for i, token in reader.added_tokens_decoder.items() if token.special}
    return special - {reader.unk_token_id}


@settings(PROPERTY, max_examples=60)
@given(text=texts)
def test_text_never_gives_a_control_token(reader: Any, text: str) -> None:
    plain = PlainText(reader)
    ids = plain.encode_untrusted(text)
    assert not control_ids(reader) & set(ids)
    as_it_is = tuple(reader(text, add_special_tokens=False)["input_ids"])
    if not control_ids(reader) & set(as_it_is) and "<unk>" not in text:
        assert ids == as_it_is


@settings(PROPERTY, max_examples=30)
@given(text=texts)
def test_pieces_of_harmless_text_are_the_whole(reader: Any, text: str) -> None:
    plain = PlainText(reader)
    control = reader.all_special_tokens[0]
    between = text.translate({ord(c): None for c in "<>[]|［］"})
    text_ = f"{control}{between}{control}\n{between}"
    expected = reader(text_, add_special_tokens=False)["input_ids"]
    assert plain.encode_in_pieces(text_) == tuple(expected)


def test_nothing_is_marked_where_nothing_is_to_break(reader: Any) -> None:
    assert PlainText(reader).break_words(["plain", "text"]) == (["plain", "text"], "")


def test_a_mark_is_a_character_that_nobody_wrote() -> None:
    plain = PlainText(tokenizer("llama3"))
    (broken, other), mark = plain.break_words(["<|eot_id|>", MARKS[0] + MARKS[1]])
    assert (broken, other, mark) == (f"<{MARKS[2]}|eot_id|>", MARKS[0] + MARKS[1], MARKS[2])
    with pytest.raises(ControlToken, match="private characters"):
        plain.break_words(["<|eot_id|>", "".join(MARKS)])


def test_added_words_of_the_template_are_control_words_too() -> None:
    reader = tokenizer("chatml")
    turn = reader.convert_tokens_to_ids("<|im_end|>")
    assert turn not in PlainText(reader, "<|im_end|>").encode_untrusted("a<|im_end|>b")
    assert turn in PlainText(reader).encode_untrusted("a<|im_end|>b")
    think = reader.convert_tokens_to_ids("<think>")
    assert think in PlainText(reader, "<think>").encode_untrusted("a<think>b")


def test_a_character_that_is_a_control_token_cannot_be_read() -> None:
    def separated(real: Any, text: str, **options: Any) -> Any:
        """Normalise a letter to the separator."""
        if "Ω" in text:
            options.pop("split_special_tokens", None)
        return real(text.replace("Ω", "[SEP]"), **options)

    with pytest.raises(ControlToken, match="'Ω' is a control token"):
        PlainText(Odd(tokenizer("word_piece"), separated)).encode_untrusted("an Ω here")
