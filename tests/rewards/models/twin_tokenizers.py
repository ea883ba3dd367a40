"""Real tokenizers made in a moment: one token a byte, and the control tokens of a family."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.rewards.tables import read_blocks

LLAMA3_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|pad|>",
)  # fmt: skip
LLAMA3_TEMPLATE = json.loads(read_blocks("models/templates")["llama3_template"])
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TEMPLATE = json.loads(read_blocks("models/templates")["qwen_template"])
LLAMA2_TOKENS = ("<unk>", "<s>", "</s>")
DEBERTA_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
# Every tokenizer here has fewer tokens than this.
VOCABULARY = 272


def bytes_and(tokens: tuple[str, ...]) -> Tokenizer:
    """A byte-level tokenizer whose last ids are `tokens`, as control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return raw


def framed(raw: Tokenizer, single: str, pair: str | None = None) -> Tokenizer:
    """Let the tokenizer put its own tokens around a text, or around two."""
    marks = [word.split(":")[0] for word in f"{single} {pair or ''}".split()]
    special = sorted({word for word in marks if not word.startswith("$")})
    raw.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(word, raw.token_to_id(word)) for word in special]
    )
    return raw


def fast(raw: Tokenizer, pad: str | None = None, **names: Any) -> Any:
    tokens = {f"{name}_token": token for name, token in names.items() if len(name) < 5}
    others = {name: value for name, value in names.items() if len(name) > 4}
    padding = {} if pad is None else {"pad_token": pad}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **tokens, **others, **padding)


def llama3_tokenizer(*, pad: str | None = "<|pad|>") -> Any:
    """Llama 3's control tokens and chat; `pad` may be `<|eot_id|>`, or None for none at all."""
    raw = framed(bytes_and(LLAMA3_TOKENS), "<|begin_of_text|> $A")
    return fast(raw, pad, bos="<|begin_of_text|>", eos="<|eot_id|>", chat_template=LLAMA3_TEMPLATE)


def qwen_tokenizer(*, pad: str | None = "<|endoftext|>") -> Any:
    """Qwen's control tokens and chat; it has no token for the beginning."""
    return fast(bytes_and(QWEN_TOKENS), pad, eos="<|im_end|>", chat_template=QWEN_TEMPLATE)


def llama2_tokenizer() -> Any:
    """Llama 2's `<s>`, `</s>` and `<unk>`; it has no pad token, and `[INST]` is plain text."""
    return fast(framed(bytes_and(LLAMA2_TOKENS), "<s> $A"), bos="<s>", eos="</s>", unk="<unk>")


def deberta_tokenizer() -> Any:
    """DeBERTa's frame of a question and an answer, told apart by their types."""
    single, pair = "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    return fast(
        framed(bytes_and(DEBERTA_TOKENS), single, pair), "[PAD]", cls="[CLS]", sep="[SEP]",
        unk="[UNK]", mask="[MASK]", model_max_length=512,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


class Odd:
    """A tokenizer that calls a function of (the real one, text, options) to read a text."""

    def __init__(self, real: Any, read: Callable[..., Any]) -> None:
        self.real, self._read = real, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, text: str, **options: Any) -> Any:
        """Read a text, oddly."""
        return self._read(self.real, text, **options)
