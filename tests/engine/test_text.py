"""Text of responses: behind their prompts, for tokenizers of each kind, and without their ends."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import Sampling, build_sampler
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.samplers.text import decode_text, find_stop
from ppo_cli.records import PlacedReward, Prompt, Rollout
from ppo_cli.step.shaping import place_steps
from ppo_cli.thoughts import count_tokens
from tests.engine.small_samplers import build_model, make_sampler
from tests.engine.tokenizer_kinds import KINDS
from tests.settings import complete

# What borders are made of: blanks, newlines, characters of two to four bytes, marks and words.
TEXTS = st.lists(
    st.sampled_from(
        [" ", "    ", "\n", "\t", "é", "日本", "😀", "👩‍🚀", "<|user|>", "<|assistant|>", "return",
         "x", " , ", ".", "n't", "42"]
    ) | st.text(max_size=3),
    max_size=12,
).map("".join)  # fmt: skip


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def read(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, response=TEXTS, place=st.integers(0, 99), complete=st.booleans())
def test_text_of_prompt_and_response_is_that_of_both_together(
    kind: str, prompt: str, response: str, place: int, complete: bool
) -> None:
    tokenizer = KINDS[kind]()
    prompt_ids, ids = encode(tokenizer, f"<|user|>{prompt}"), encode(tokenizer, response)
    if complete:  # the border is anywhere, in a character too
        both = [*prompt_ids, *ids]
        place = 1 + place % len(both)
        prompt_ids, ids = both[:place], both[place:]
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    while ids and ids[-1] in ends:
        ids.pop()
    before, text = read(tokenizer, prompt_ids), decode_text(tokenizer, ids, prompt_ids)
    together = read(tokenizer, [*prompt_ids, *ids])
    if together.startswith(before):
        assert before + text == together
    else:  # the response ends a character that the prompt began
        assert together.endswith(text)
        rest = together.removesuffix(text)
        shorter = [prompt_ids[: len(prompt_ids) - cut] for cut in range(4)]
        assert any(read(tokenizer, ids).startswith(rest) for ids in shorter)


@pytest.mark.parametrize("kind", ["llama2", "gemma", "byte level", "slow pieces", "slow bytes"])
def test_a_character_belongs_to_the_response_that_ends_it(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = encode(tokenizer, "x😀😀😀😀!")
    prompt_ids, ids = ids[:-3], ids[-3:]
    assert decode_text(tokenizer, ids, prompt_ids) == "😀!"
    assert decode_text(tokenizer, ids[:0], prompt_ids) == ""


def test_a_special_token_may_change_the_text_before_it() -> None:
    tokenizer = KINDS["slow pieces"]()
    prompt_ids, ids = encode(tokenizer, "6 * 7?"), encode(tokenizer, "x<s>y")
    assert read(tokenizer, [*prompt_ids, *ids]) == " 6 * 7? x<s>y"
    assert decode_text(tokenizer, ids, prompt_ids) == " x<s>y"


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, response=TEXTS, data=st.data())
def test_a_stop_text_ends_where_the_response_first_has_it(
    kind: str, prompt: str, response: str, data: st.DataObject
) -> None:
    tokenizer = KINDS[kind]()
    prompt_ids, ids = encode(tokenizer, f"<|user|>{prompt}"), encode(tokenizer, response)
    detokenize = partial(decode_text, tokenizer)
    texts = [detokenize(ids[:size], prompt_ids) for size in range(len(ids) + 1)]
    text = texts[-1].replace("\ufffd", "")
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 6))] or "none"
    first = next((size for size, text in enumerate(texts) if stop in text), None)
    assert find_stop(ids, (stop,), detokenize, 0, prompt_ids) == first


@pytest.mark.parametrize("kind", ["llama2", "byte level", "t5", "word piece", "slow pieces"])
def test_tokens_of_an_answer_are_counted_in_their_place(kind: str) -> None:
    """Alone, a later piece of a word would be longer by its marks, half a character by a sign."""
    tokenizer = KINDS[kind]()
    prompt_ids, detokenize = encode(tokenizer, "<|user|>"), partial(decode_text, tokenizer)
    for answer in ("thereturn", "naïve日"):
        ids = encode(tokenizer, f"<think>so</think>{answer}")
        texts = [detokenize(ids[:size], prompt_ids) for size in range(len(ids) + 1)]
        thoughts = [size for size, text in enumerate(texts) if text.strip().endswith("</think>")]
        assert count_tokens("", texts[-1], ids, detokenize, cut=False) == thoughts[-1]


def test_a_sampler_reads_responses_behind_their_prompts() -> None:
    tokenizer = KINDS["llama2"]()
    detokenize = partial(decode_text, tokenizer)
    sampler = make_sampler(
        build_model("llama", vocab_size=len(tokenizer)), eos_token_ids=frozenset({2}),
        pad_token_id=2, detokenize=detokenize,
    )  # fmt: skip
    prompt = Prompt("0", "", (), "", tuple(encode(tokenizer, "def f(x):\n")))
    ids = tuple(encode(tokenizer, "    return x"))
    begun = Rollout(prompt, 0, ids, np.zeros(len(ids), np.float32), "", "unfinished")
    sampling = Sampling(0.0, max_tokens=len(ids) + 1)
    (rollout,) = sampler.generate((), sampling, 0, [begun])
    assert rollout.text.startswith("     return x") and rollout.finish_reason == "length"
    (stopped,) = sampler.generate((), replace(sampling, stop=(rollout.text,)), 0, [begun])
    assert stopped.finish_reason == "stop"
    [(token, _)] = place_steps(rollout, [PlacedReward(6, 1.0)], detokenize)
    texts = [detokenize(ids[:size], prompt.token_ids) for size in (token, token + 1)]
    assert [text.startswith("     r") for text in texts] == [False, True]


@pytest.fixture
def special_tokenizer() -> Any:
    """The bundled tokenizer with special tokens in the middle of what a policy writes."""
    tokenizer = load_tokenizer(model_folder("embedded"))
    tokens = ["1", "<think>", "<tool_call>", "<|eot|>"]
    tokenizer.add_tokens([AddedToken(word, special=True) for word in tokens], special_tokens=True)
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


def test_a_text_is_what_the_policy_wrote(special_tokenizer: Any) -> None:
    for text in ("145", "<think>1</think>", "<tool_call>f(1)", "<|im_start|>1", "1<|eot|>2 "):
        ids = special_tokenizer(text)["input_ids"]
        for end in ("", "<|im_end|>", "<|endoftext|>", "<|im_end|><|endoftext|><|endoftext|>"):
            full_ids = [*ids, *special_tokenizer(end)["input_ids"]]
            assert decode_text(special_tokenizer, full_ids, (1,)) == text


def test_ends_of_the_run_and_of_the_template_are_no_text(special_tokenizer: Any) -> None:
    ids = special_tokenizer("1<|eot|>")["input_ids"]
    assert decode_text(special_tokenizer, ids, (1,)) == "1<|eot|>"
    assert decode_text(special_tokenizer, ids, (1,), end_ids=frozenset({ids[-1]})) == "1"
    assert decode_text(special_tokenizer, ids[-1:], (1,), end_ids=frozenset({ids[-1]})) == ""
    closing = load_tokenizer(model_folder("embedded"))
    closing.add_tokens([AddedToken("<|eot|>", special=True)], special_tokens=True)
    closing.chat_template = "{% for m in messages %}{{ m.content }} <|eot|>\n{% endfor %}"
    assert decode_text(closing, closing("1<|eot|>")["input_ids"], (1,)) == "1"
    closing = load_tokenizer(model_folder("embedded"))
    closing.chat_template = "{{ raise_exception('no') }}"
    assert decode_text(closing, closing("1<|im_end|>")["input_ids"], (1,)) == "1"


def test_a_response_of_a_base_model_ends_where_its_template_ends_a_reply(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder("embedded"), tmp_path / "base"))
    ends = {"eos_token_id": 279, "eos_token": "<|endoftext|>"}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text())
        changed = {key: value for key, value in ends.items() if key in fields}
        (folder / name).write_text(json.dumps(fields | changed))
    config = complete({"model": {"path": str(folder)}, "rollout": {"name": "hf"}})
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.eos_token == "<|endoftext|>"
    rendered = "<|im_start|>user\n12 + 30 =<|im_end|>\n<|im_start|>assistant\n"
    prompt = Prompt("sum", "12 + 30 =", (), rendered, tuple(encode(tokenizer, rendered)))
    rollouts = list(build_sampler(config, tokenizer).generate([prompt], Sampling(n=8), 0))
    assert {r.finish_reason for r in rollouts} == {"stop"}
    assert {tokenizer.decode(r.token_ids[-1:]) for r in rollouts} == {"<|im_end|>"}
