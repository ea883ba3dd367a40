"""A prompt is on one side only, and the same seed splits the same way."""

from __future__ import annotations

import pytest

from ppo_cli.data_sets.files import Place
from ppo_cli.errors import DataError
from ppo_cli.extras.fitting.preferences import MAX_HELD_OUT, Pair, exclude_held_out, split_by_prompt


def make(prompt: str, number: int = 1) -> Pair:
    messages = ({"role": "user", "content": prompt},)
    return Pair(Place("a", number), messages, f"good {number}", "bad")


def prompts(pairs: tuple[Pair, ...]) -> set[str]:
    return {pair.prompt_id for pair in pairs}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_all_pairs_of_a_prompt_go_together(share: float) -> None:
    pairs = [make(f"prompt {i % 40}", i) for i in range(200)]
    split = split_by_prompt(pairs, share, seed=1)
    assert not prompts(split.train) & prompts(split.held_out)
    assert split.train and split.held_out
    assert len(split.train) + len(split.held_out) == 200
    assert abs(len(split.held_out) - share * 200) <= 5


def test_the_split_goes_by_seed_and_not_by_the_order_of_rows() -> None:
    pairs = [make(f"prompt {i}", i) for i in range(50)]
    first = prompts(split_by_prompt(pairs, 0.2, seed=1).held_out)
    assert first == prompts(split_by_prompt(pairs[::-1], 0.2, seed=1).held_out)
    assert first != prompts(split_by_prompt(pairs, 0.2, seed=2).held_out)
    many = [make(f"prompt {i}", i) for i in range(3 * MAX_HELD_OUT)]
    assert len(split_by_prompt(many, 0.9, seed=1).held_out) == MAX_HELD_OUT


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(DataError, match=r"1 prompt in 3 pairs.*--val_data"):
        split_by_prompt([make("a", i) for i in range(3)], 0.1, seed=1)
    for share in (0.0, 1.0):
        with pytest.raises(DataError, match="--val_share"):
            split_by_prompt([make("a"), make("b")], share, seed=1)


def test_prompts_of_the_held_out_file_leave_the_training() -> None:
    split = exclude_held_out([make("a"), make("b")], [make("b", 7), make("c")])
    assert prompts(split.train) == {make("a").prompt_id}
    assert len(split.held_out) == 2
    with pytest.raises(DataError, match="no pairs remain"):
        exclude_held_out([make("b")], [make("b")])
