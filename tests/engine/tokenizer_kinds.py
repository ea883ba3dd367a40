"""Small tokenizers of each kind, trained here: how they treat spaces, bytes and words differs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.models.byt5 import ByT5Tokenizer
from transformers.models.gpt_sw3 import GPTSw3Tokenizer

MARKS = ["<|user|>", "<|assistant|>", "<think>", "</think>"]
SPECIAL = ["<unk>", "<s>", "</s>", *MARKS]
BYTES = [f"<0x{number:02X}>" for number in range(256)]
CORPUS = [
    "def add(a, b):\n    return a + b\n\n\nif x != 1 , y:\n        print('no , it is n't so !')",
    "The answer is 42. What is 6 times 7? It's 42, isn't it?",
    "naïve café, 日本語の文章です。",
    "Question: how many?\nAnswer:   ",
] * 4
SPACE = "\u2581"
ALWAYS: dict[str, Any] = {"replacement": SPACE, "prepend_scheme": "always"}


def _train(
    model: Any, trainer: Any, parts: dict[str, Any], corpus: list[str] = CORPUS, **options: Any
) -> Tokenizer:
    """A tokenizer of these parts, trained with these options."""
    raw = Tokenizer(model)
    for name, part in parts.items():
        setattr(raw, name, part)
    options = {"special_tokens": SPECIAL, "show_progress": False} | options
    raw.train_from_iterator(corpus, trainer(**options))
    return raw


def _fast(raw: Tokenizer, **settings: Any) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="</s>", **settings,
    )  # fmt: skip
    special = [AddedToken(word, special=True, normalized=False) for word in SPECIAL]
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


def _pieces(*steps: Any, prefix: bool) -> Any:
    """SentencePiece's BPE: words begin with its space, what has no token is written in bytes."""
    spaces = [normalizers.Prepend(SPACE)] if prefix else []
    raw = _train(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True), trainers.BpeTrainer,
        {
            "normalizer": normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)]),
            "decoder": decoders.Sequence([*steps]),
        },
        [line.replace("    ", SPACE * 4 + " ") for line in CORPUS],
        vocab_size=420, special_tokens=SPECIAL + BYTES, max_token_length=8,
    )  # fmt: skip
    # Bytes are ordinary tokens, as in the files of these models.
    saved = json.loads(raw.to_str())
    saved["added_tokens"] = [t for t in saved["added_tokens"] if t["content"] not in BYTES]
    return _fast(Tokenizer.from_str(json.dumps(saved)))


FALLBACK = (decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse())
BEHIND_SPACES = (decoders.Metaspace(**ALWAYS), decoders.ByteFallback(), decoders.Fuse())


def t5(**settings: Any) -> Any:
    parts = {
        "pre_tokenizer": pre_tokenizers.Metaspace(**ALWAYS, split=True),
        "decoder": decoders.Metaspace(**ALWAYS, split=True),
    }
    trainer = trainers.UnigramTrainer
    return _fast(
        _train(models.Unigram(), trainer, parts, vocab_size=120, unk_token="<unk>"), **settings
    )


def byte_level() -> Any:
    parts = {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    }
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer
    return _fast(_train(models.BPE(), trainer, parts, vocab_size=300, initial_alphabet=alphabet))


def word_piece(**settings: Any) -> Any:
    parts = {
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "decoder": decoders.WordPiece(prefix="##"),
    }
    model = models.WordPiece(unk_token="<unk>")
    return _fast(_train(model, trainers.WordPieceTrainer, parts, vocab_size=200), **settings)


def suffixes() -> Any:
    """The first GPT's: words end with a mark."""
    parts = {
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "decoder": decoders.BPEDecoder(suffix="</w>"),
    }
    end = {"end_of_word_suffix": "</w>"}
    model = models.BPE(unk_token="<unk>", **end)
    return _fast(_train(model, trainers.BpeTrainer, parts, vocab_size=200, **end))


def word_tokenizer() -> Any:
    """Words alone: without a decoder the spaces between tokens are all there are."""
    model, parts = (
        models.WordLevel(unk_token="<unk>"),
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
    )
    return _fast(_train(model, trainers.WordLevelTrainer, parts))


def slow_pieces() -> Any:
    """One in Python, which reads the text between special tokens with SentencePiece."""
    with TemporaryDirectory() as folder:
        Path(folder, "corpus.txt").write_text("\n".join(CORPUS))
        sentencepiece.SentencePieceTrainer.train(
            input=f"{folder}/corpus.txt", model_prefix=f"{folder}/spiece", vocab_size=370,
            model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False,
            normalization_rule_name="identity", minloglevel=2,
            user_defined_symbols=MARKS,
        )  # fmt: skip
        return GPTSw3Tokenizer(f"{folder}/spiece.model")


def slow_bytes() -> Any:
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=True) for word in MARKS])
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {
    "llama2": cache(lambda: _pieces(*FALLBACK, decoders.Strip(content=" ", left=1), prefix=True)),
    "gemma": cache(lambda: _pieces(*FALLBACK, prefix=False)),
    "metaspace with bytes": cache(lambda: _pieces(*BEHIND_SPACES, prefix=True)),
    "t5": cache(t5),
    "t5 with clean-up": cache(lambda: t5(clean_up_tokenization_spaces=True)),
    "byte level": cache(byte_level),
    "word piece": cache(word_piece),
    "word piece with clean-up": cache(lambda: word_piece(clean_up_tokenization_spaces=True)),
    "suffixes": cache(suffixes),
    "words": cache(word_tokenizer),
    "slow pieces": cache(slow_pieces),
    "slow bytes": cache(slow_bytes),
}
