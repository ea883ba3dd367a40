"""Decoding of responses, for samplers, stop strings, thoughts and rewards placed on tokens.

Decoders treat the first token of a sequence differently (Llama 2 drops its space, WordPiece adds
none), and the bytes of one character can be split between prompt and response. Therefore tokens
are decoded together with the tokens before them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from ppo_cli.config.schema.run import Config
from ppo_cli.thoughts import Detokenize, count_shared, decode_piece

MOST_BYTES = 4  # of a character in UTF-8, so also its most tokens
CONTEXT = 2 * MOST_BYTES  # tokens of context: the character that it ends with, and the one before
# Byte-fallback decoders decode a run of such tokens as a unit: all of it is valid, or nothing.
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def decode_text(
    tokenizer: Any,
    token_ids: Sequence[int],
    context: Sequence[int],
    *,
    end_ids: frozenset[int] = frozenset(),
) -> str:
    """Decode the tokens that follow `context`, with special tokens but without end tokens.

    Trailing end and padding tokens are dropped: `end_ids` of the model, the tokenizer's, and the
    one that closes a reply in the chat template. The text starts where it differs from the decoded
    context, so a character that the context only contains in part belongs to the text.
    """
    # Drop the end tokens, and keep a short context that does not start within a run of bytes.
    ends = end_ids | {tokenizer.eos_token_id, tokenizer.pad_token_id} | find_reply_ends(tokenizer)
    size = len(token_ids)
    while size and token_ids[size - 1] in ends:
        size -= 1
    start = max(0, len(context) - CONTEXT)
    while start and BYTE_TOKEN.fullmatch(str(tokenizer.convert_ids_to_tokens(context[start]))):
        start -= 1
    context = context[start:]
    # Decode with and without the response, and return the difference.
    before = _decode(tokenizer, context)
    text = _decode(tokenizer, [*context, *token_ids[:size]])
    if text.startswith(before):
        return text[len(before) :]
    same = count_shared(text, before)
    # Slow tokenizers add a space before a text that ends in a special token.
    if text[same:].startswith(" " + before[same:]):
        return text[len(before) + 1 :]
    # The context ends within a character, which can invalidate the whole run of bytes before it.
    shorter = (context[: len(context) - cut] for cut in range(MOST_BYTES))
    return text[max(count_shared(text, _decode(tokenizer, ids)) for ids in shorter) :]


def find_stop(
    ids: Sequence[int],
    stop: Sequence[str],
    detokenize: Detokenize,
    checked: int,
    prompt_ids: Sequence[int],
) -> int | None:
    """Return the number of tokens up to the one that completes a stop string; None if none does.

    The first `checked` tokens are known not to complete one. Only the last tokens that a stop
    string can span are decoded: each has at least one byte, except end tokens.
    """
    window = max((len(stop_string.encode()) for stop_string in stop), default=0) + 8
    for end in range(checked + 1, len(ids) + 1) if stop else ():
        piece = decode_piece(detokenize, ids[end - 1])
        # Quick check of the last character. Part of a character or an empty token may complete any
        # stop string, and a decoder may put a space before each token.
        is_complete = piece and "\ufffd" not in piece
        if is_complete and not any(stop_string[-1] in piece + " " for stop_string in stop):
            continue
        start = max(0, end - window)
        text = detokenize(ids[start:end], ids[:start] or prompt_ids)
        if any(stop_string in text for stop_string in stop):
            return end
    return None


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    # Clean-up would remove spaces before punctuation, also in code.
    return str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


_REPLY = "reply"


def run_end_ids(listed: frozenset[int], config: Config, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response of a run; `listed` are those of the model's files.

    The files of a base model may name another token than the one that ends a reply in its chat
    template.
    """
    # Decoded responses end before such a token, so the text of one is not found in them.
    added = tokenizer.get_added_vocab()
    ids = listed.union(added[text] for text in config.rollout.stop if text in added)
    return ids | find_reply_ends(tokenizer) if config.data.apply_chat_template else ids


@lru_cache(maxsize=8)
def find_reply_ends(tokenizer: Any) -> frozenset[int]:
    """Return the special token that ends a reply in the chat template; empty if there is none."""
    system, user, assistant = (
        {"role": role, "content": content}
        for role, content in (("system", "Be brief."), ("user", "question"), ("assistant", _REPLY))
    )
    added = getattr(tokenizer, "added_tokens_decoder", {})
    # Some templates demand a system prompt, or that the user has the last turn.
    for turns in ([user, assistant], [system, user, assistant], [user, assistant, user]):
        with suppress(Exception):  # no template, or one that rejects this conversation
            rendered = tokenizer.apply_chat_template(turns, tokenize=False)
            _, reply, rest = rendered.rpartition(_REPLY)
            first = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"][:1]
            return frozenset(i for i in first if reply and i in added and added[i].special)
    return frozenset()
