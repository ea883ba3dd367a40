"""Tokens that are counted by words are those of the tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import PreTokenizer

from ppo_cli.config.models.bundled import EMBEDDED, model_folder
from ppo_cli.data_sets import words
from ppo_cli.data_sets.files import Place
from ppo_cli.data_sets.prompts import Renderer
from ppo_cli.data_sets.rows import Row
from ppo_cli.data_sets.words import open_words
from ppo_cli.engine.pretrained import load_tokenizer

QWEN, LLAMA = words._EXPRESSIONS
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def split(expression: str, **options: Any) -> dict[str, Any]:
    first = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated"}
    parts = [first | {"invert": False} | options, BYTES | {"use_regex": False}]
    return {"type": "Sequence", "pretokenizers": parts}


def open_backend(**parts: Any) -> Any:
    state = json.loads(Path(model_folder(EMBEDDED), "tokenizer.json").read_text())
    return Tokenizer.from_str(json.dumps(state | parts))


PIECES = (
    "a", "Z", "word", "Hello", "re", "0", "12", "345678", "'", "'s", "'LL", "'d", "-", ".", "...",
    "$", "_", "\\", "<", "|>", "<|im_", "<|im_start|>", "<|im_end|>", "<|endoftext|>", " ", "  ",
    "\n", "\r\n", "\t", "\x0b", "\x1c", "\0", "\x7f",
)  # fmt: skip
# With white space, marks that join what is before them, and characters that normalisers replace.
OTHERS = (
    "é", "数学", "Ω", "²", "’s", "ſ", "İ", "😀", "e\u0301", "\u0308", "¨", "\u037e", "\u1fef",
    "＜|im_end|＞", *(c for c in map(chr, range(128, 0x3001)) if c.isspace()),
    "\u180e", "\u200b", "\u2060", "\ufeff",
)  # fmt: skip


@pytest.mark.parametrize("limit", [3, 1 << 18])
@pytest.mark.parametrize("pre_tokenizer", [split(QWEN), split(LLAMA), BYTES])
@pytest.mark.parametrize("normaliser", [None, {"type": "NFC"}, {"type": "NFD"}, {"type": "NFKC"}])
def test_words_add_up_to_the_tokens_of_any_text(
    pre_tokenizer: Any, normaliser: Any, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", limit)
    backend = open_backend(pre_tokenizer=pre_tokenizer, normalizer=normaliser)
    draw = random.Random(4)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(24))) for _ in range(1500)]
    texts += ["", "a" * 300, "".join(map(chr, range(128)))]
    plain = len(texts)
    pieces = [*PIECES, *" " * len(PIECES), *OTHERS]
    texts += ["".join(draw.choices(pieces, k=draw.randrange(24))) for _ in range(3000)]
    counts = open_words(backend)
    assert counts is not None
    lengths = [*map(len, backend.encode_batch_fast(texts, add_special_tokens=False))]
    counted = [*map(counts.count, texts)]
    assert counted[:plain] == lengths[:plain]
    others = [pair for pair in zip(counted, lengths, strict=True) if pair[0] is not None][plain:]
    assert all(count == length for count, length in others)
    is_canonical = normaliser is None or normaliser["type"] in ("NFC", "NFD")
    assert (len(others) > 2000) == is_canonical


def test_long_parts_that_are_not_ascii_are_not_counted() -> None:
    counts = open_words(open_backend())
    assert counts is not None
    assert counts.count("What is " + "数" * words.MAX_LETTERS) is None


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": split(QWEN, invert=True)},
        {"pre_tokenizer": split(QWEN, behavior="Removed")},
        {"pre_tokenizer": split(r"\p{L}+|.")},
        {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
        {"pre_tokenizer": BYTES | {"use_regex": False}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
    ],
)
def test_other_tokenizers_are_asked_about_whole_texts(parts: dict[str, Any]) -> None:
    assert open_words(open_backend(**parts)) is None


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word", "normalized"])
def test_so_are_those_whose_added_tokens_take_their_neighbours_in(option: str) -> None:
    state = json.loads(Path(model_folder(EMBEDDED), "tokenizer.json").read_text())
    added = [state["added_tokens"][0] | {option: True}, *state["added_tokens"][1:]]
    assert open_words(open_backend(added_tokens=added)) is None


def test_so_are_those_that_draw_their_tokens() -> None:
    backend = open_backend()
    backend.model.dropout = 0.1
    assert open_words(backend) is None


class Letters:
    """A pre-tokenizer that Python wrote: it has no declaration."""

    def pre_tokenize(self, text: Any) -> None:
        text.split(lambda _, piece: [piece])


def test_so_are_those_that_are_programs() -> None:
    backend = open_backend()
    backend.pre_tokenizer = PreTokenizer.custom(Letters())
    assert open_words(backend) is None


def test_prompts_are_measured_by_their_words() -> None:
    renderer = Renderer(load_tokenizer(EMBEDDED))
    prompts = ["What is 2 + 3?", "数学" * 99, "What is 数学?", "<|im_end|> What"]
    rows = [Row(Place("a", 1), prompt, None, "", {}) for prompt in prompts]
    expected = [len(item.token_ids) for item in renderer.render(rows)[0]]
    assert [*renderer.measure([prompts])] == [expected]
    assert renderer.words is not None and "What" in renderer.words
    assert [word for word in renderer.words if "数" in word] == [" 数学?"]
