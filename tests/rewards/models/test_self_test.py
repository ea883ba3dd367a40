"""The test before a run: what it asks, and which models it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppo_cli.errors import RewardError
from ppo_cli.records import Prompt
from ppo_cli.rewards.models.base import BUILT_IN, NO_ANSWER, Scores, choose_pairs
from ppo_cli.rewards.models.local import LocalModelReward
from tests.rewards.models.tiny import loaded, tokenizer
from tests.settings import complete_reward_model

Judge = Callable[[str, str], float]
HINT = r"--reward_model_self_test warn"


def prompt_of(uid: int, question: str, truth: Any) -> Prompt:
    messages = ({"role": "user", "content": question},)
    return Prompt(str(uid), question, messages, question, (1,), "", truth)


SUMS = [prompt_of(i, f"What is {i} + {i + 1}?", str(2 * i + 1)) for i in range(9)]


class Reader:
    """A network that reads its sample as text and judges the response, times its only weight."""

    def __init__(self, judge: Judge, weight: float = 1.0) -> None:
        self.module: nn.Module = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.module.weight, weight)  # type: ignore[arg-type]
        self._judge = judge

    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None) -> Scores:
        texts = [
            tokenizer("llama3").decode(ids[mask], skip_special_tokens=True)
            for ids, mask in zip(ids_BL, mask_BL, strict=True)
        ]
        halves = [text.removeprefix("user").split("assistant\n\n") for text in texts]
        values = torch.tensor([self._judge(question, answer) for question, answer in halves])
        return Scores(values * self.module.weight[0, 0])  # type: ignore[index]


def sums(question: str, answer: str) -> float:
    """Knows sums and nothing else."""
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    sums_in_answer = re.findall(r"\d+", answer)
    return -abs(sum(numbers) - int(sums_in_answer[0])) if sums_in_answer else -1000.0


def on_topic(question: str, answer: str) -> float:
    """Counts words that question and answer share."""
    topic = set(re.findall(r"\w{3,}|\d", question.lower())) - {"the", "and", "that"}
    return float(len(topic & set(re.findall(r"\w{3,}|\d", answer.lower()))))


def start(
    network: Any, prompts: Any = SUMS, *, max_length: int = 512, **settings: Any
) -> list[str]:
    """Start a reward around a network, and return the lines that it reports."""
    model = loaded("llama3", network=network, max_length=max_length)
    reward = LocalModelReward(
        complete_reward_model(path="made/model", **settings), load=lambda _: model
    )
    lines: list[str] = []
    with closing(reward):
        reward.start(prompts, tell=lines.append)
    return lines


def test_a_model_is_tried_on_the_answers_of_rows_or_on_plain_english() -> None:
    assert start(Reader(sums))[1] == ("Reward model tested: 9 of 9 good answers above bad ones.")
    rows = [prompt_of(1, "Write a poem.", None), prompt_of(2, "Sort.", "x" * 999)]
    every = len(BUILT_IN)
    assert start(Reader(on_topic), rows)[1].startswith(f"Reward model tested: {every} of {every}")


def test_a_model_that_puts_bad_answers_first_is_refused() -> None:
    with pytest.raises(RewardError, match=rf"put only 0 of .* got .*{HINT}") as error:
        start(Reader(sums, weight=-1.0))
    assert "Asked 'What is 0 + 1?', '1' got -0 and '3' got 2." in str(error.value)
    with pytest.raises(RewardError, match=rf"put only 0 of .* got .*{HINT}"):
        start(Reader(on_topic, weight=-1.0), [])
    with pytest.raises(RewardError, match="only 0 of 9"):
        start(Reader(sums, weight=0.0))
    assert len(start(Reader(sums, weight=-1.0), self_test="off")) == 1
    lines = start(Reader(sums, weight=-1.0), self_test="warn")
    assert len(lines) == 2 and "above bad ones" in lines[1] and "warn" in lines[1]


def test_one_odd_row_stops_no_run_and_half_right_is_not_enough() -> None:
    odd = prompt_of(99, "What is 0 + 0?", "90")
    assert "9 of 10" in start(Reader(sums), [odd, *SUMS])[1]
    wrong = [prompt_of(90 + i, f"What is 5{i} + 0?", str(i)) for i in range(2)]
    with pytest.raises(RewardError, match="only 2 of 4"):
        start(Reader(sums), [*wrong, *SUMS[:2]])


def test_what_gives_no_score_is_told_in_a_sentence() -> None:
    def broken(question: str, answer: str) -> float:
        raise KeyError("weights")

    with pytest.raises(RewardError, match="failed while scoring: KeyError"):
        start(Reader(broken))
    with pytest.raises(RewardError, match=rf"no sample fits into 12 tokens.*{HINT}"):
        start(Reader(sums), max_length=12)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scores_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(RewardError, match=rf"gave {value} as score.*{HINT}"):
        start(Reader(lambda q, a: value))


@pytest.mark.parametrize("amount", [0.01, float("nan")])
def test_a_model_that_reads_its_padding_is_refused(amount: float) -> None:
    network = Reader(sums)
    plain = network.score

    def padded(ids_BL: Tensor, mask_BL: Tensor, types: Tensor | None = None) -> Scores:
        wrong = (~mask_BL).any(1).float() * amount if not mask_BL.all() else 0.0
        return Scores(plain(ids_BL, mask_BL).score_B + wrong)

    network.score = padded  # type: ignore[method-assign]
    rows = [*SUMS, prompt_of(77, "And what would be 1000 + 1?", "1001")]
    with pytest.raises(RewardError, match=rf"padded batch.*{HINT}"):
        start(network, rows)


def test_bfloat16_may_differ_a_little() -> None:
    network = Reader(sums)
    plain = network.score
    network.module.bfloat16()
    network.score = lambda ids, mask, types=None: Scores(  # type: ignore[method-assign]
        plain(ids, mask).score_B.float() + 0.005 * len(ids)
    )
    rows = SUMS[:1] + SUMS[4:5]
    assert "2 of 2" in start(network, rows)[1]
    network.module.float()
    with pytest.raises(RewardError, match="padded batch"):
        start(network, rows)


@pytest.mark.parametrize(
    ("rows", "pairs"),
    [([("a?", "1"), ("b?", 2), ("c?", "1")],
      [("a?", "1", "2"), ("b?", "2", "1"), ("c?", "1", "2")]),
     ([("a?", "yes"), ("b?", "yes")], [("a?", "yes", NO_ANSWER), ("b?", "yes", NO_ANSWER)])],
)  # fmt: skip
def test_pairs_are_made_of_other_rows_answers(rows: Any, pairs: Any) -> None:
    prompts = [prompt_of(n, *row) for n, row in enumerate(rows)]
    chosen = [(pair.prompt.text, pair.good, pair.bad) for pair in choose_pairs(prompts)]
    assert chosen == pairs


def test_repeated_rows_and_data_are_left_out() -> None:
    rows = [prompt_of(i, "a?", "1") for i in range(50)]
    rows += [prompt_of(60, "tests?", '{"inputs": []}'), prompt_of(61, "flag?", True)]
    rows += [prompt_of(62, "list?", ["1"]), prompt_of(63, "blank?", "  ")]
    rows += [prompt_of(100 + i, f"{i}?", str(i)) for i in range(50)]
    pairs = choose_pairs(rows)
    assert len(pairs) == 16
    assert [pair.prompt.text for pair in pairs[:2]] == ["a?", "0?"]
