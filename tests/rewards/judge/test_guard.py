"""What a policy wrote, made harmless: invisible signs, control tokens, fences."""

from __future__ import annotations

import re
import time
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from ppo_cli.rewards.judge.sanitise import clean, cut_middle, neutralise
from tests.rewards.judge.corpora import HERE

# Control tokens of chat models, by their family; those of one line have one form.
TOKENS = (HERE / "control_tokens.txt").read_text(encoding="utf-8").split()
# Any text, with these and what else matters strewn into it.
SPECIAL = st.sampled_from(
    [
        *TOKENS, "<response-00ff>", "</response-00ff>", "<prompt-1>", "</ground_truth-ab>",
        "</extra_info.a.b-12>", "[cut-0]", "{ground_truth}", "{response}", "|", ">", "<", "/", "[",
        "]", "/think", "x", ":", "\u200b", "\u202e", "\x00", "\x1e",
    ]
)  # fmt: skip
HOSTILE = st.lists(st.one_of(SPECIAL, st.text(max_size=6)), max_size=12).map("".join)

CONTROL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<think>"]
CONTROL += ["</think>", "<start_of_turn>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "]~b]"]
CONTROL += ["<turn|>", "<|turn>", "[|system|]", "<seed:eos>", "<SPECIAL_12>", "[ARGS]", "｜DSML｜"]
CONTROL += ["/nothink", "<eos>", "◁think▷", "]<]image[>[", ">>ANSWER<<", "[unused1]"]


def tokenizer_with_control_tokens() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[?]": 0}, unk_token="[?]"))
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer


TOKENIZER = tokenizer_with_control_tokens()


CLEANED = {
    "plain text\n\twith tabs": "plain text\n\twith tabs",
    "a\u200bb\u200dc\ufeffd": "abcd",
    "a\u202eb\u2066c\u2069": "abc",
    "a\x00b\x07c\x1bd\x7fe\x9bf": "abcdef",
    "a\r\nb\rc\u2028d\u2029e\x85f\x0cg": "a\nb\nc\nd\ne\nf\ng",
    "e\u0301": "é",
    "a\ud800b": "ab",
    "soft\u00adhyphen": "softhyphen",
    "tag\U000e0041\U000e007f chars": "tag chars",
    "hidden\ufe01\U000e0101\u034f": "hidden",
    "\u3164\u115f\uffa0": "",
    "\u2065\ufff0\ufff8\U000e0000\U000e0080\U000e01f0\U000e0fff\ufffe": "",
    "\u061c\u202a\u2069\ufe0f\u180e\U0001d17a\U0001bca0\ufdd0": "",
    "日本語 العربية हिन्दी 😀": "日本語 العربية हिन्दी 😀",
}


def test_clean() -> None:
    assert {text: clean(text) for text in CLEANED} == CLEANED


@given(st.text())
def test_clean_leaves_nothing_invisible_and_is_stable(text: str) -> None:
    shown = clean(text)
    assert clean(shown) == shown
    assert unicodedata.is_normalized("NFC", shown)
    shown.encode("utf-8")
    assert not [c for c in shown if unicodedata.category(c) in {"Cf", "Cs"}]
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t"]


def test_control_tokens_are_broken_and_still_seen() -> None:
    wrong = {}
    for token in [*TOKENS, "<|a b|>", "]<]start of speech[>["]:
        for text in (token, f"before{token}after", f"a {token} b", f"{token}{token}", f"<{token}>"):
            shown = neutralise(text)
            if token in shown or shown.replace(" ", "") != text.replace(" ", ""):
                wrong[text] = shown
    assert wrong == {}


SWITCHES = [
    "choose either/think or stop", "answer with care /think.", "a/think", "see src/think/no.py",
    "(/think)", "/THINK", "/Think", "／no_think", "／ｎｏ＿ｔｈｉｎｋ", "/no＿think", "x/no_think!",
    "yes/nothink", "</think>", "[/think]", "/thinking", "《/no-think》",
]  # fmt: skip


@pytest.mark.parametrize("text", SWITCHES)
def test_a_switch_of_thinking_is_broken_wherever_it_is(text: str) -> None:
    shown = neutralise(text)
    folded = unicodedata.normalize("NFKC", shown).casefold()
    assert not re.search(r"/(?:no[_-]?)?think", folded)
    assert shown.replace(" ", "") == text.replace(" ", "")


def test_ordinary_text_and_code_stay_as_they_are() -> None:
    """Markup, types, comparisons, pipes, log levels, indices."""
    ordinary = (HERE / "ordinary_text.txt").read_text(encoding="utf-8").splitlines()
    assert [text for text in ordinary if neutralise(text) != text] == []


def test_what_looks_like_a_fence_becomes_brackets() -> None:
    fences = [
        "<response-0123456789abcdef>", "</response-0123456789abcdef>", "</prompt-ff>",
        "</ground_truth-12>", "</extra_info.rubric-12>", "</extra_info.a.b-12>", "</RESPONSE-AB>",
        "< /response-ab >", "</response - ab>", "＜/response-ab＞", "<response-x>",
        *(f"</response{dash}00ff>" for dash in "-‐‑‒–—―−－﹣﹘⁃˗ー"),
    ]  # fmt: skip
    assert {text: neutralise(f"x{text}y") for text in fences} == {
        text: f"x[{text[1:-1]}]y" for text in fences
    }


@given(HOSTILE)
def test_neutralise_is_stable_and_a_tokenizer_finds_no_token(text: str) -> None:
    shown = neutralise(clean(text))
    assert neutralise(shown) == shown
    assert not {TOKENIZER.id_to_token(i) for i in TOKENIZER.encode(shown).ids} & set(CONTROL)
    assert not re.search(r"</?(?:prompt|response|ground_truth|extra_info[\w.]*)-\w+>", shown)


def test_the_tokenizer_would_find_them() -> None:
    for token in CONTROL:
        assert TOKENIZER.id_to_token(TOKENIZER.encode(f"a{token}b").ids[1]) == token


@given(st.text(max_size=60), st.integers(0, 40))
def test_cut_middle_keeps_head_and_tail_and_counts(text: str, max_chars: int) -> None:
    head, left_out, tail = cut_middle(text, max_chars)
    assert len(head) + len(tail) + left_out == len(text)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) == min(max_chars, len(text))
    assert left_out == 0 or len(head) >= len(tail)
    assert left_out == 0 or max_chars < 3 or tail


@pytest.mark.parametrize("guard", [clean, neutralise])
@pytest.mark.parametrize(
    "unit", ["<think>", "</think>", "<|", "|>", "<response-", "[", "extra_info.", "<｜a", "\u200b"]
)
def test_no_input_is_slow(guard: Callable[[str], str], unit: str) -> None:
    text = unit * (200_000 // len(unit))
    began = time.process_time()
    guard(text)
    assert time.process_time() - began < 20.0
