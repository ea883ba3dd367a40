"""Counts the tokens of texts from those of their words.

A byte-level BPE cuts a text into words by a regular expression, and turns each word into tokens by
itself. The words of a large set repeat: their numbers of tokens are kept, which takes about an
eighth of the time of the tokenizer. Only for ASCII do Python's expressions certainly find the same
words. Other texts are cut before spaces, where a word always begins, and the tokenizer counts the
parts that are not ASCII.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# A tokenizer's expression -> the same one for ASCII. First those of Qwen and of Llama 3.
_EXPRESSIONS = {
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}": (
        rf"(?i:{_CONTRACTIONS})|[^\r\na-zA-Z0-9]?[a-zA-Z]+|{digits}"
        rf"| ?[^\sa-zA-Z0-9]+[\r\n]*|{_REST}"
    )
    for number, digits in ((r"\p{N}", "[0-9]"), (r"\p{N}{1,3}", "[0-9]{1,3}"))
}
# That of GPT-2, which is not in the files of its tokenizers.
_GPT2 = rf"{_CONTRACTIONS}| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+"
# Each leaves ASCII as it is. The first neither make nor remove white space.
_CANONICAL = (None, "NFC", "NFD")
_NORMALISERS = (*_CANONICAL, "NFKC", "NFKD")
# A word of each expression begins at a space that is followed by anything but white space.
_CUT = re.compile(r"(?= \S)")
# Byte-level tokenizers write bytes that do not print as other characters.
_BYTES = {**{byte: 256 + byte for byte in range(33)}, 127: 289}
# Words whose counts are kept, and the longest of them.
MAX_WORDS, MAX_LETTERS = 1 << 18, 64


class WordCounts(dict[str, int]):
    """The numbers of tokens of words, of a tokenizer that `open_words` accepts."""

    def __init__(self, expression: str, added_tokens: list[str], backend: Any) -> None:
        self._find = re.compile(expression, re.ASCII).findall
        # The longest first, as tokenizers prefer it.
        literals = map(re.escape, sorted(added_tokens, key=len, reverse=True))
        self._split = re.compile(f"({'|'.join(literals) or '(?!)'})").split
        self._model, self._normaliser = backend.model, backend.normalizer
        self._pre_tokenizer = backend.pre_tokenizer
        self._cuts = _read_state(backend.normalizer).get("type") in _CANONICAL

    def __missing__(self, word: str) -> int:
        """Count the tokens of a new word, or of words that are not ASCII."""
        pieces = [word.translate(_BYTES)]
        if not word.isascii():
            text = self._normaliser.normalize_str(word) if self._normaliser else word
            pieces = [part for part, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        count = sum(len(self._model.tokenize(part)) for part in pieces)
        if len(self) >= MAX_WORDS:
            self.clear()
        if len(word) <= MAX_LETTERS:
            self[word] = count
        return count

    def count(self, text: str) -> int | None:
        """Return the number of tokens of a text; None if long parts of it are not ASCII."""
        pieces = self._split(text)
        count = len(pieces) // 2  # the added tokens, which are every other piece
        for piece in pieces[::2]:
            if piece.isascii():
                count += sum(map(self.__getitem__, self._find(piece)))
                continue
            if not self._cuts:
                return None
            for is_ascii, group in groupby(_CUT.split(piece), str.isascii):
                parts = list(group)
                if is_ascii:
                    parts = self._find("".join(parts))
                elif max(map(len, parts)) > MAX_LETTERS:
                    return None
                count += sum(map(self.__getitem__, parts))
        return count


def open_words(backend: Any) -> WordCounts | None:
    """Return the counts of words of a tokenizer's back end; None if it does not go by words."""
    expression = _find_expression(_read_state(backend.pre_tokenizer))
    added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    kind = _read_state(backend.normalizer).get("type")
    model = backend.model
    by_words = (
        expression
        and kind in _NORMALISERS
        and type(model).__name__ == "BPE"
        and not model.dropout  # which is random
        and not backend.encode_special_tokens
        and not any(t.normalized or t.single_word or t.lstrip or t.rstrip for t in added)
    )
    if not by_words:
        return None
    return WordCounts(expression, [token.content for token in added], backend)


def _read_state(part: Any) -> dict[str, Any]:
    """Return the declaration of a part of a tokenizer; one that Python wrote has none."""
    if part is None:
        return {}
    try:
        state: dict[str, Any] = json.loads(part.__getstate__())
    except Exception:  # tokenizers raises no narrower one
        return {"type": "Custom"}
    return state


def _find_expression(state: dict[str, Any]) -> str:
    """Return the expression that finds a pre-tokenizer's words in ASCII; "" if none is known."""
    *before, last = state.get("pretokenizers") or [state]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return ""
    if not before:
        return _GPT2 if last.get("use_regex") else ""
    (first, *others) = before
    isolates = first.get("behavior") == "Isolated" and not first.get("invert")
    if others or first.get("type") != "Split" or not isolates or last.get("use_regex"):
        return ""
    return _EXPRESSIONS.get(first["pattern"].get("Regex", ""), "")
