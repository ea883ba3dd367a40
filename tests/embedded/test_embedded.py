"""The embedded model loads as itself, its text survives, and its prompts are what they say."""

from __future__ import annotations

import functools
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ppo_cli

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(ppo_cli.__file__).parent / "embedded"
MODEL = HOME / "model"
ROWS = {name: HOME / f"{name}.jsonl" for name in ("train", "val")}


@functools.cache
def load_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@functools.cache
def load_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS[name].read_text(encoding="utf-8").splitlines()]


def load_task() -> ModuleType:
    """Import scripts/embedded/task.py, which is not installed."""
    spec = importlib.util.spec_from_file_location(
        "embedded_task", ROOT / "scripts" / "embedded" / "task.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def numbers(row: dict[str, Any]) -> tuple[int, int]:
    tokens = row["prompt"].replace("?", " ").replace(".", " ").split()
    a, b = (int(word) for word in tokens if word.isdigit())
    return a, b


@pytest.mark.parametrize(
    "text",
    [
        "What is 37 + 45?",
        "two\n\nlines\r\n\ttabbed\n",
        "  leading and trailing  ",
        "1234567890 3.14 -7 1,000",
        "naïve Ünïcode 日本語 Ω 🙂🏽 \u200b",
        "\x00\x01\x7f\u0085",
        "it's <b>x</b> {json: [1]} `code` $#@!",
        "".join(chr(c) for c in range(32, 127)),
    ],
)
def test_text_survives_encoding(text: str) -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(text)
    assert ids
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(ByteLevel.alphabet()) <= set(load_tokenizer().get_vocab())


def test_accents_are_composed_as_in_every_qwen2_tokenizer() -> None:
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("caf" + "e\u0301")) == "caf\u00e9"


def test_a_digit_is_one_token() -> None:
    assert [load_tokenizer().decode([i]) for i in load_tokenizer().encode("90210")] == list("90210")


def test_special_tokens_are_distinct_and_agree() -> None:
    tokenizer, model = load_tokenizer(), load_model()
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_chat_template_ends_where_the_answer_begins() -> None:
    tokenizer = load_tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert ids == tokenizer.encode(rendered)
    assert ids.count(tokenizer.eos_token_id) == 2


def test_the_model_is_qwen2_tied_and_in_float32() -> None:
    import torch

    model = load_model()
    assert model.config.model_type == "qwen2"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.max_position_embeddings >= 4096


def test_what_ships_is_small() -> None:
    assert sum(f.stat().st_size for f in MODEL.iterdir()) < 8_000_000
    assert sum(path.stat().st_size for path in ROWS.values()) < 400_000


def test_the_model_has_something_to_gain() -> None:
    import torch

    tokenizer, model = load_tokenizer(), load_model()
    by_length: dict[int, list[tuple[list[int], str]]] = {}
    for row in read_rows("val"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        by_length.setdefault(len(ids), []).append((ids, row["ground_truth"]))
    right = total = 0
    for rows in by_length.values():
        prompts = torch.tensor([ids for ids, _ in rows])
        replies = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, do_sample=False
        )[:, prompts.shape[1] :]
        for reply, (_, answer) in zip(replies, rows, strict=True):
            right += tokenizer.decode(reply, skip_special_tokens=True) == answer
            total += 1
    assert 0.40 <= right / total <= 0.65


def test_rows_say_what_they_should() -> None:
    for name in ROWS:
        for index, row in enumerate(read_rows(name)):
            assert set(row) == {"prompt", "ground_truth", "data_source", "extra_info"}
            assert row["ground_truth"] == str(sum(numbers(row)))
            assert row["data_source"] == "ppo-cli/arithmetic"
            assert row["extra_info"] == {"split": name, "index": index}


def test_one_training_prompt_in_nine_is_worded_as_no_other_text() -> None:
    task = load_task()
    worded = [row["prompt"].startswith("Please, what is ") for row in read_rows("train")]
    assert [i for i, unfamiliar in enumerate(worded) if unfamiliar] == list(range(0, 2400, 9))
    assert not any("Please" in text for text in task.PHRASES)
    assert not any("Please" in row["prompt"] for row in read_rows("val"))
    assert load_tokenizer().tokenize("Please") == list("Please")


def test_validation_is_held_out_whatever_the_order_of_the_numbers() -> None:
    held_out = {frozenset(numbers(row)) for row in read_rows("val")}
    trained = {frozenset(numbers(row)) for row in read_rows("train")}
    assert len(held_out) == 256
    assert not held_out & trained


def test_the_script_makes_these_rows_and_warms_up_on_no_validation_pair() -> None:
    task = load_task()
    train, validation = task.build_rows(task.SEED)
    assert train == read_rows("train")
    assert validation == read_rows("val")
    familiar, _ = task.build_rows(task.SEED, unfamiliar=False)
    assert [a == b for a, b in zip(familiar, train, strict=True)].count(False) == 267
    warm_up = {frozenset(pair) for pair in task.split_pairs(task.SEED).warm_up}
    assert not warm_up & {frozenset(numbers(row)) for row in validation}


def test_pupils_forget_the_carry_more_often_than_not() -> None:
    task = load_task()
    rng = random.Random(0)
    replies = [task.ask_pupil(task.Sum(37, 45, task.PHRASES[0]), rng) for _ in range(2000)]
    assert replies.count("72") > 1000 > 600 > replies.count("82") > 300
    plain = [task.ask_pupil(task.Sum(31, 45, task.PHRASES[0]), rng) for _ in range(2000)]
    assert 800 < plain.count("76") < 1000
