"""Rewards within a response land on their tokens, and what they leave on the last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.records import PlacedReward, Prompt, Rollout
from ppo_cli.step.shaping import place_steps
from ppo_cli.thoughts import Detokenize


@pytest.fixture
def decode(tokenizer: Any) -> Detokenize:
    return partial(decode_text, tokenizer)


def answer(tokenizer: Any, text: str) -> Rollout:
    ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    prompt = Prompt("0", "", (), "", (1,))
    message = decode_text(tokenizer, ids, (1,))
    return Rollout(prompt, 0, ids, np.zeros(len(ids), np.float32), message, "stop")


def test_a_step_ends_on_the_token_of_its_last_character(tokenizer: Any, decode: Any) -> None:
    rollout = answer(tokenizer, "one. two.")
    steps = [PlacedReward(4, 0.5), PlacedReward(9, 1.0), PlacedReward(1, 2.0)]
    assert place_steps(rollout, steps, decode) == [(3, 0.5), (8, 1.0), (0, 2.0)]


def test_characters_of_several_tokens_are_counted_as_characters(
    tokenizer: Any, decode: Any
) -> None:
    rollout = answer(tokenizer, "añb")  # ñ is two bytes, so two tokens here
    assert rollout.text == "añb" and len(rollout.token_ids) == 5
    [(index, _)] = place_steps(rollout, [PlacedReward(3, 1.0)], decode)
    assert index == 3


def test_half_a_character_may_read_as_several_signs() -> None:
    """Byte fallback shows a sign for each byte until the character is whole."""
    pieces = [b"\xf0", b"\x9f", b"\x98", b"\x80", b"a"]

    def decode(ids: Sequence[int], context: Sequence[int]) -> str:
        raw = b"".join(pieces[i] for i in ids)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(raw)

    prompt = Prompt("0", "", (), "", (1,))
    rollout = Rollout(prompt, 0, (0, 1, 2, 3, 4), np.zeros(5, np.float32), "\U0001f600a", "stop")
    steps = [PlacedReward(1, 1.0), PlacedReward(2, 2.0)]
    assert place_steps(rollout, steps, decode) == [(3, 1.0), (4, 2.0)]


def test_token_places_are_counted_from_1(tokenizer: Any, decode: Any) -> None:
    rollout = answer(tokenizer, "abc")
    steps = [PlacedReward(i, float(i), "token") for i in (1, 4)]
    assert place_steps(rollout, steps, decode) == [(0, 1.0), (3, 4.0)]
