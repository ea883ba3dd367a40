"""Small real tokenizers of every kind, chat templates, and a way to name them as loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
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

from ppo_cli.engine.cpu.products import set_matmul_library
from ppo_cli.rewards.models.base import LoadedModel, Scores


@pytest.fixture(autouse=True)
def _products_as_in_a_process_of_its_own() -> None:
    """An engine that other tests had in this process may have left them to oneDNN."""
    set_matmul_library("blas")


CORPUS = [
    "What is the capital of France? The capital of France is Paris. How can I boil an egg?",
    "Is 17 a prime number? Yes: nothing but 1 and 17 divides it. user assistant system Human",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9 + - = . , : ; ! ? ' (",
    'A B C D E F G H I J K L M N O P Q R S T U V W X Y Z < > | / [ ] { } _ " ) * # @ ~ & % $ ^ \\',
] * 3

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n"
    "{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "[INST] {{ m['content'].strip() }} [/INST]{% else %} {{ m['content'].strip() }}</s>{% endif %}"
    "{% endfor %}"
)


def byte_level(specials: list[str], template: str | None, **names: Any) -> Any:
    """A byte-level BPE, as Llama 3 and Qwen have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens(specials)
    return wrapped(made, template, **names)


def llama3() -> Any:
    specials = ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"]
    made = byte_level(
        specials, LLAMA3, bos_token="<|begin|>", eos_token="<|eot_id|>", pad_token="<|pad|>"
    )
    bos = ("<|begin|>", made.convert_tokens_to_ids("<|begin|>"))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[bos]
    )
    return made


def chatml() -> Any:
    """Turn marks that are added but not declared special, and reasoning marks."""
    made = byte_level(["<|end|>"], CHATML, eos_token="<|end|>", pad_token="<|end|>")
    plain = [
        AddedToken(word, special=False, normalized=False)
        for word in ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    ]
    made.add_tokens(plain)
    return made


def eating() -> Any:
    """Control words that swallow the white space behind them, as Phi 3 has."""
    made = byte_level(["<s>"], None, bos_token="<s>", eos_token="<s>", pad_token="<s>")
    words = ("<|user|>", "<|assistant|>", "<|end|>")
    made.add_special_tokens(
        {
            "additional_special_tokens": [
                AddedToken(word, rstrip=True, special=True, normalized=False) for word in words
            ]
        }
    )
    made.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    )
    return made


def metaspace(scheme: str) -> Any:
    """A sentence-piece BPE with bytes, as Llama 2 has; "always" is its older way with spaces."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(
        [word for line in CORPUS for word in line.split()],
        trainers.BpeTrainer(vocab_size=600, special_tokens=specials[:3], show_progress=False),
    )
    # Bytes are pieces of the model, not control words.
    told = json.loads(made.to_str())
    vocab = told["model"]["vocab"]
    for word in specials[3:]:
        vocab.setdefault(word, len(vocab))
    made = Tokenizer.from_str(json.dumps(told))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return wrapped(
        made, LLAMA2, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


def unigram() -> Any:
    """A normalising unigram model that reads pairs, as DeBERTa v3 has."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    specials = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    made.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=specials, unk_token="[UNK]", show_progress=False
        ),
    )
    return wrapped(made, None, pair=True)


def word_piece() -> Any:
    """A lower-casing word-piece model that reads pairs, as BERT has."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[PAD]", "[CLS]", "[SEP]", "[UNK]"], show_progress=False
        ),
    )
    return wrapped(made, None, pair=True)


def wrapped(made: Tokenizer, template: str | None, *, pair: bool = False, **names: Any) -> Any:
    if pair:
        marks = [(word, made.token_to_id(word)) for word in ("[CLS]", "[SEP]")]
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
        )
        names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"]
        if pair
        else ["input_ids", "attention_mask"],
        **names,
    )
    tokenizer.chat_template = template
    return tokenizer


MAKERS: dict[str, Callable[[], Any]] = {
    "llama3": llama3,
    "chatml": chatml,
    "eating": eating,
    "llama2": lambda: metaspace("first"),
    "llama2_legacy": lambda: metaspace("always"),
    "unigram": unigram,
    "word_piece": word_piece,
}


@pytest.fixture(scope="session")
def tokenizer() -> Callable[[str], Any]:
    """Build each tokenizer once."""
    built: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in built:
            built[kind] = MAKERS[kind]()
        return built[kind]

    return get


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


@pytest.fixture
def loaded(tokenizer: Callable[[str], Any]) -> Callable[..., LoadedModel]:
    """Put a tokenizer and a network together."""

    def make(
        kind: str = "llama3", adapter: str = "seqcls", network: Any = None, max_length: int = 512
    ) -> LoadedModel:
        words = tokenizer(kind)
        net = network or Pooled(Transformer(len(words)))
        pad = words.pad_token_id
        return LoadedModel(adapter, "made for a test", net, words, max_length, pad)

    return make
