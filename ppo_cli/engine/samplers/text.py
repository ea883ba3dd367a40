"""Text of responses, as samplers, stop strings, thoughts and placed rewards read it.

A decoder treats the first token of a sequence in its own way: Llama 2 drops its space, WordPiece
puts none before it. And the bytes of a character may be in prompt and response. So tokens are
decoded together with those before them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ppo_cli.thoughts import Detokenize

MOST_BYTES = 4  # of a character, and of its tokens
CONTEXT = 2 * MOST_BYTES
# Byte-fallback decoders read a run of such tokens as one: valid as a whole, or not at all.
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def decode_text(
    tokenizer: Any,
    token_ids: Sequence[int],
    context: Sequence[int],
    *,
    end_ids: frozenset[int] = frozenset(),
) -> str:
    """The text that the policy wrote behind `context`, special tokens included, without its end.

    The end is every end and padding token behind it: `end_ids` of the model, the tokenizer's own,
    and the one with which the chat template closes a reply. The text begins where the tokens
    change that of the context: a character of which the context has a part belongs to it.
    """
    ends = end_ids | _closing_ids(tokenizer)
    size = len(token_ids)
    while size and token_ids[size - 1] in ends:
        size -= 1
    start = max(0, len(context) - CONTEXT)
    while start and BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(context[start]))):
        start -= 1
    context = context[start:]
    before = _decode(tokenizer, context)
    text = _decode(tokenizer, [*context, *token_ids[:size]])
    if text.startswith(before):
        return text[len(before) :]
    same = _count_shared(text, before)
    # Slow tokenizers put a space before the text that ends in a special token.
    if text[same:].startswith(" " + before[same:]):
        return text[len(before) + 1 :]
    # The context ends within a character, which may spoil the whole run of bytes that it ends.
    shorter = (context[: len(context) - cut] for cut in range(MOST_BYTES))
    return text[max(_count_shared(text, _decode(tokenizer, ids)) for ids in shorter) :]


def find_stop(
    ids: Sequence[int],
    stop: Sequence[str],
    detokenize: Detokenize,
    checked: int,
    prompt_ids: Sequence[int],
) -> int | None:
    """Count the tokens up to the one that completes a text of `stop`; None where none does.

    The first `checked` tokens complete none. Only as many tokens are read as such a text can have,
    as each holds a byte at least, and a few more, as end tokens hold none.
    """
    window = max((len(stop_string.encode()) for stop_string in stop), default=0) + 8
    for end in range(checked + 1, len(ids) + 1) if stop else ():
        piece = _piece(detokenize, ids[end - 1])
        # Part of a character, or a token without text of its own, may complete any of them, and
        # a decoder may put a space before each token.
        is_complete = piece and "\ufffd" not in piece
        if is_complete and not any(stop_string[-1] in piece + " " for stop_string in stop):
            continue
        start = max(0, end - window)
        text = detokenize(ids[start:end], ids[:start] or prompt_ids)
        if any(stop_string in text for stop_string in stop):
            return end
    return None


@lru_cache(maxsize=2**18)
def _piece(detokenize: Detokenize, token_id: int) -> str:
    """The text of a token behind another: no decoder drops the space of that."""
    return detokenize([token_id], [token_id])


def _count_shared(text: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    # Clean-up would take spaces before punctuation out of code.
    return str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


_REPLY = "reply"


@lru_cache(maxsize=8)
def _closing_ids(tokenizer: Any) -> frozenset[int]:
    """End and padding token of a tokenizer, and the special token that ends a templated reply."""
    ids = {tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _REPLY}]
    # Some models have no template, some templates refuse this conversation.
    with suppress(Exception):
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        _, reply, rest = rendered.rpartition(_REPLY)
        first = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"][:1]
        added = getattr(tokenizer, "added_tokens_decoder", {})
        ids |= {token for token in first if reply and token in added and added[token].special}
    return frozenset(ids)
