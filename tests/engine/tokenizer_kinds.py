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


def _fast(raw: Tokenizer, **settings: Any) -> Any:
    special_tokens = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special_tokens, **settings)
    special = [AddedToken(word, special=True, normalized=False) for word in SPECIAL]
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


def _pieces(decoder: Any, *, prefix: bool) -> Any:
    """SentencePiece's BPE: words begin with its space, what has no token is written in bytes."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    raw.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    raw.train_from_iterator(
        [line.replace("    ", SPACE * 4 + " ") for line in CORPUS],
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL + BYTES, show_progress=False,
            max_token_length=8,
        ),
    )  # fmt: skip
    raw.decoder = decoders.Sequence(decoder)
    # Bytes are ordinary tokens, as in the files of these models.
    return _fast(_without_added_bytes(raw))


def _without_added_bytes(raw: Tokenizer) -> Tokenizer:
    saved = json.loads(raw.to_str())
    saved["added_tokens"] = [t for t in saved["added_tokens"] if t["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(saved))


def llama2() -> Any:
    fallback = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return _pieces([*fallback, decoders.Strip(content=" ", left=1)], prefix=True)


def gemma() -> Any:
    fallback = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return _pieces(fallback, prefix=False)


def metaspace_bytes() -> Any:
    spaces = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    return _pieces([spaces, decoders.ByteFallback(), decoders.Fuse()], prefix=True)


def t5(**settings: Any) -> Any:
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="always", split=True
    )
    raw.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(CORPUS, trainer)
    return _fast(raw, **settings)


def byte_level() -> Any:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=SPECIAL, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return _fast(raw)


def word_piece(**settings: Any) -> Any:
    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(prefix="##")
    raw.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL,
                                          show_progress=False),
    )  # fmt: skip
    return _fast(raw, **settings)


def suffixes() -> Any:
    """The first GPT's: words end with a mark."""
    raw = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.BPEDecoder(suffix="</w>")
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL,
                                    end_of_word_suffix="</w>", show_progress=False),
    )  # fmt: skip
    return _fast(raw)


def word_tokenizer() -> Any:
    """Words alone: without a decoder the spaces between tokens are all there are."""
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    return _fast(raw)


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
    "llama2": cache(llama2),
    "gemma": cache(gemma),
    "metaspace with bytes": cache(metaspace_bytes),
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
