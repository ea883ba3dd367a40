"""Small real tokenizers of every kind, chat templates, and networks to load with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from ppo_cli.rewards.models.base import LoadedModel, Scores
from tests.rewards.tables import read_blocks

CORPUS = read_blocks("models/templates")["corpus"].splitlines() * 3

LLAMA3, CHATML, LLAMA2 = (
    json.loads(read_blocks("models/templates")[name]) for name in ("llama3", "chatml", "llama2")
)


def trained(
    model: Any, before: Any, decoder: Any, trainer: Any, normaliser: Any = None, texts: Any = CORPUS
) -> Tokenizer:
    built = Tokenizer(model)
    built.pre_tokenizer, built.decoder = before, decoder
    if normaliser is not None:
        built.normalizer = normaliser
    built.train_from_iterator(texts, trainer)
    return built


def byte_level(specials: list[str], template: str | None, **names: Any) -> Any:
    """A byte-level BPE, as Llama 3 and Qwen have."""
    before, alphabet = pre_tokenizers.ByteLevel(False), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    built = trained(models.BPE(), before, decoders.ByteLevel(), trainer)
    built.add_special_tokens(specials)
    return wrapped(built, template, **names)


def llama3() -> Any:
    specials = ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"]
    built = byte_level(
        specials, LLAMA3, bos_token="<|begin|>", eos_token="<|eot_id|>", pad_token="<|pad|>"
    )
    bos = ("<|begin|>", built.convert_tokens_to_ids("<|begin|>"))
    built.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[bos]
    )
    return built


def chatml() -> Any:
    """Turn marks that are added but not declared special, and reasoning marks."""
    built = byte_level(["<|end|>"], CHATML, eos_token="<|end|>", pad_token="<|end|>")
    texts = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    built.add_tokens([AddedToken(word, special=False, normalized=False) for word in texts])
    return built


def eating() -> Any:
    """Control words that include the white space behind them, as Phi 3 has."""
    template = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    built = byte_level(["<s>"], template, bos_token="<s>", eos_token="<s>", pad_token="<s>")
    texts = ("<|user|>", "<|assistant|>", "<|end|>")
    tokens = [AddedToken(word, rstrip=True, special=True, normalized=False) for word in texts]
    built.add_special_tokens({"additional_special_tokens": tokens})
    return built


def metaspace(scheme: str) -> Any:
    """A sentence-piece BPE with bytes, as Llama 2 has; "always" is its older way with spaces."""
    specials = ["<unk>", "<s>", "</s>"]
    built = trained(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False),
        texts=[word for line in CORPUS for word in line.split()],
    )
    # Bytes are pieces of the model, not control words.
    state = json.loads(built.to_str())
    vocab = state["model"]["vocab"]
    for i in range(256):
        vocab.setdefault(f"<0x{i:02X}>", len(vocab))
    built = Tokenizer.from_str(json.dumps(state))
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<unk>"}
    return wrapped(built, LLAMA2, **{f"{name}_token": word for name, word in names.items()})


PAIR_TOKENS: Any = {"special_tokens": ["[PAD]", "[CLS]", "[SEP]", "[UNK]"], "show_progress": False}


def unigram() -> Any:
    """A normalising unigram model that reads pairs, as DeBERTa v3 has."""
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="[UNK]", **PAIR_TOKENS)
    before, decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    built = trained(models.Unigram(), before, decoder, trainer, normalizers.NFKC())
    return wrapped(built, None, pair=True)


def word_piece() -> Any:
    """A lower-casing word-piece model that reads pairs, as BERT has."""
    trainer = trainers.WordPieceTrainer(vocab_size=300, **PAIR_TOKENS)
    before, normaliser = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    model = models.WordPiece(unk_token="[UNK]")
    return wrapped(
        trained(model, before, decoders.WordPiece(), trainer, normaliser), None, pair=True
    )


def wrapped(built: Tokenizer, template: str | None, *, pair: bool = False, **names: Any) -> Any:
    if pair:
        marks = [(word, built.token_to_id(word)) for word in ("[CLS]", "[SEP]")]
        built.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
        )
        names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk")}
    inputs = ["input_ids", *["token_type_ids"] * pair, "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=built, model_input_names=inputs, chat_template=template, **names
    )


MAKERS: dict[str, Callable[[], Any]] = {
    "llama3": llama3, "chatml": chatml, "eating": eating, "unigram": unigram,
    "llama2": lambda: metaspace("first"), "llama2_legacy": lambda: metaspace("always"),
    "word_piece": word_piece,
}  # fmt: skip


@cache
def tokenizer(kind: str) -> Any:
    """The tokenizer of a kind, built once."""
    return MAKERS[kind]()


class Transformer(nn.Module):
    """A small encoder with a head, so that padding and batches could move its scores."""

    def __init__(self, vocabulary: int, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, 32)
        self.body = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 1)


class Pooled:
    """A network that reads the last attended token."""

    def __init__(self, module: Transformer) -> None:
        self.module = module.eval()
        self.shapes: list[tuple[int, int]] = []

    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        self.shapes.append(tuple(ids_BL.shape))
        hidden = self.module.body(self.module.embed(ids_BL), src_key_padding_mask=~mask_BL)
        last = mask_BL.sum(1) - 1
        pooled = hidden[torch.arange(len(last)), last]
        return Scores(self.module.head(pooled)[:, 0].float(), {"length": mask_BL.sum(1).float()})


def loaded(
    kind: str = "llama3", adapter: str = "seqcls", network: Any = None, max_length: int = 512
) -> LoadedModel:
    """Put a tokenizer and a network together."""
    reader = tokenizer(kind)
    net = network or Pooled(Transformer(len(reader)))
    return LoadedModel(adapter, "made for a test", net, reader, max_length, reader.pad_token_id)
