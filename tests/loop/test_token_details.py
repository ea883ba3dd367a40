"""Single tokens of a few responses, and what the critic predicts: what a run writes of them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.algo.batch import TrainBatch, build_batch
from ppo_cli.algo.critic_fit import explained_variance, measure_critic
from ppo_cli.engine.samplers.text import decode_text
from ppo_cli.loop import run
from ppo_cli.records import PlacedReward, Prompt, Rollout, Score, Scored, Turn
from ppo_cli.report.critic import describe_critic, pool_steps
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.run_folder.lines import append_line, read_lines, rollout_file
from ppo_cli.step.shaping import ShapedStep, place_steps, shape_step
from ppo_cli.step.token_details import choose_rows, list_token_details, split_text
from tests.engine.test_text import TEXTS, encode
from tests.engine.tokenizer_kinds import KINDS
from tests.loop.scripted import Script, annotate_batch, number
from tests.settings import complete


def spell(ids: Sequence[int], context: Sequence[int]) -> str:
    return "".join(chr(97 + token) for token in ids)


def sample(lengths: Sequence[int], n: int = 2) -> list[Rollout]:
    """Responses of these lengths, `n` to a prompt, whose tokens are letters."""
    return [
        Rollout(
            Prompt(f"p{b // n}", "", (), "", tuple(range(3 + b % 2))), b % n,
            tuple(range(size)), np.full(size, -1.0, np.float32), spell(range(size), ()), "stop",
        )
        for b, size in enumerate(lengths)
    ]  # fmt: skip


def shape(
    rollouts: Sequence[Rollout], scores: Sequence[float | Score | None],
    old: torch.Tensor | None = None, **algorithm: Any,
) -> ShapedStep:  # fmt: skip
    """A step with values, entropies and log-probs that differ from token to token."""
    plain = annotate_batch(build_batch(rollouts, 0), ref=-1.5)
    draw, size = torch.Generator().manual_seed(0), plain.response_mask_BT.shape
    annotated = replace(
        plain, values_BT=torch.randn(size, generator=draw),
        entropy_BT=torch.rand(size, generator=draw),
        old_logprobs_BT=-torch.rand(size, generator=draw) if old is None else old,
        ref_logprobs_BT=-torch.rand(size, generator=draw),
    )  # fmt: skip
    config = complete({"algorithm": {"lam": 0.9, "gamma": 0.99, **algorithm}})
    results = [
        s if isinstance(s, Score) else Score.failed("timeout") if s is None else Score(s)
        for s in scores
    ]
    scored = [Scored(r, s) for r, s in zip(rollouts, results, strict=True)]
    placed = [place_steps(s.rollout, s.score.steps, spell) for s in scored]
    return shape_step(config, annotated, scored, 0.1, None, placed)


def decoded(field: Any, size: int) -> np.ndarray:
    """The numbers of a field, as docs/run_folder.md says to read them."""
    if isinstance(field, float):
        return np.full(size, field)
    return np.frombuffer(base64.b64decode(field), "<f2").astype(float)


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, response=TEXTS, place=st.integers(0, 99), cut=st.booleans())
def test_pieces_join_to_the_response_and_each_is_what_its_token_adds(
    kind: str, prompt: str, response: str, place: int, cut: bool
) -> None:
    tokenizer = KINDS[kind]()
    prompt_ids, ids = encode(tokenizer, f"<|user|>{prompt}"), encode(tokenizer, response)
    if cut:  # within a character too
        ids = ids[: place % (len(ids) + 1)]
    ids.append(tokenizer.eos_token_id)
    decode = partial(decode_text, tokenizer)
    text = decode(ids, prompt_ids)
    pieces = split_text(text, ids, prompt_ids, decode)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert pieces[-1] == ""
    # Slowly: the most that the text up to a token shares with the whole text. It may share less
    # again when the first byte of a character follows. Bytes that are no character decode to marks,
    # each of which may belong to any of their tokens.
    most = 0
    for end in range(1, len(ids)):
        before = decode(ids[:end], prompt_ids)
        most = max(most, next((i for i in range(len(before), 0, -1) if text[:i] == before[:i]), 0))
        size = len("".join(pieces[:end]))
        assert size == most or set(text[min(most, size) : max(most, size)]) == {"\ufffd"}


# The slow decoder puts blanks beside a special token, which depend on the tokens around it.
@pytest.mark.parametrize("kind", sorted({*KINDS} - {"slow pieces"}))
def test_the_end_of_a_turn_has_its_text_and_what_follows_its_own(kind: str) -> None:
    tokenizer = KINDS[kind]()
    turns = encode(tokenizer, "One é."), encode(tokenizer, "\nTwo words"), encode(tokenizer, "\n3")
    end = tokenizer.eos_token_id
    ids = [*turns[0], end, *turns[1], end, *turns[2], end]
    decode = partial(decode_text, tokenizer)
    text = decode(ids, [])
    pieces = split_text(text, ids, [], decode)
    assert "".join(pieces) == text and len(pieces) == len(ids) and pieces[-1] == ""
    first, second = len(turns[0]), len(turns[0]) + 1 + len(turns[1])
    assert pieces[first] and pieces[second]
    assert "".join(pieces[:first]).strip() == decode(turns[0], []).strip()
    assert "".join(pieces[first + 1 : second]).strip() == decode(turns[1], ids[: first + 1]).strip()


def test_numbers_are_those_that_trained() -> None:
    """Under padding, whitening, rewards within a response, and a response without a score."""
    rollouts = sample([5, 9, 3, 1])
    steps = (PlacedReward(2, 0.5, "token"), PlacedReward(6, -0.25, "token"))
    scores: list[float | Score | None] = [0.2, Score(0.7, steps=steps), None, 0.9]
    batch = shape(rollouts, scores).batch
    details = list_token_details(batch, rollouts, spell, 8)
    assert list(details) == [3, 0, 1]  # the best, the worst; prompt p0 again; p1 #0 has no score
    trained = batch.advantages_BT[batch.loss_mask_BT]
    assert abs(float(trained.mean())) < 1e-6 and abs(float(trained.std()) - 1) < 1e-3
    for row, detail in details.items():
        size = len(rollouts[row].token_ids)
        assert detail["lengths"] == " ".join("1" * size)
        k3_BT = torch.exp(batch.ref_logprobs_BT - batch.old_logprobs_BT)  # type: ignore[operator]
        k3_BT = k3_BT - (batch.ref_logprobs_BT - batch.old_logprobs_BT) - 1  # type: ignore[operator]
        for name, expected_BT in (
            ("reward", batch.token_rewards_BT), ("advantage", batch.advantages_BT),
            ("value", batch.values_BT),
            ("return", batch.returns_BT), ("entropy", batch.entropy_BT), ("kl", k3_BT),
        ):  # fmt: skip
            assert expected_BT is not None
            expected = expected_BT[row, :size].numpy()
            np.testing.assert_allclose(decoded(detail[name], size), expected, rtol=1e-3, atol=1e-6)
        assert "masked" not in detail
    assert isinstance(details[3]["value"], float)  # one token, one number


def test_without_a_critic_there_is_no_value_and_no_return() -> None:
    rollouts = sample([5, 9, 3, 4])
    step = shape(rollouts, [0.0, 1.0, 0.0, 1.0])
    batch = replace(step.batch, values_BT=None, ref_logprobs_BT=None)
    assert set(list_token_details(batch, rollouts, spell, 1)[1]) == {
        "lengths", "reward", "advantage", "entropy"
    }  # fmt: skip


def test_rejected_tokens_are_marked() -> None:
    rollouts = sample([4, 4])
    old = torch.full((2, 4), -1.0)
    old[1, 2] = -9.0  # far from the sampler's
    limits = {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}}
    batch = shape(rollouts, [0.0, 1.0], old, **limits).batch
    details = list_token_details(batch, rollouts, spell, 2)
    assert details[1]["masked"] == [2] and "masked" not in details[0]


def test_an_episode_has_all_its_tokens_and_says_which_are_the_environments() -> None:
    one, two = sample([8, 8])
    turns = tuple(Turn(start, end, "", {"role": "assistant"}) for start, end in ((0, 3), (5, 8)))
    episode = replace(one, turns=turns, text=spell(range(5, 8), ()))
    batch = shape([episode, two], [0.0, 1.0]).batch
    details = list_token_details(batch, [episode, two], spell, 2)
    assert details[0]["text"] == "abcdefgh" and details[0]["lengths"] == "1 1 1 1 1 1 1 1"
    assert details[0]["environment"] == [[3, 5]] and details[0]["masked"] == [3, 4]
    assert not {"text", "environment", "masked"} & set(details[1])


def choose(scores: Sequence[float | None], n: int, count: int) -> list[int]:
    rollouts = sample([2] * len(scores), n)
    batch: TrainBatch = shape(rollouts, scores).batch
    return choose_rows(batch, count)


def test_high_and_low_rewards_of_many_prompts_are_chosen() -> None:
    scores = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7, None, 0.5]
    assert choose(scores, 1, 4) == [1, 0, 3, 2]
    assert choose(scores, 2, 4) == [1, 2, 5, 7]  # one of each prompt; of p3 only one has a score
    assert choose(scores, 2, 6) == [1, 2, 5, 7, 3, 0]
    assert choose([1.0] * 4, 2, 2) == [0, 3]
    assert choose([None] * 4, 2, 8) == []


def test_what_a_run_keeps_stays_within_a_fifth_of_the_file(tmp_path: Path) -> None:
    def write(lengths: Sequence[int], reason: str) -> tuple[int, float]:
        """How many responses have details, and by how much the file is larger with them."""
        rollouts = sample(lengths)
        batch = shape(rollouts, [b / 10 for b in range(len(lengths))]).batch
        scored = [Scored(r, Score(b / 10, reason=reason)) for b, r in enumerate(rollouts)]
        sizes = []
        for count in (0, 8):
            details = list_token_details(batch, rollouts, spell, count)
            Tracker(tmp_path, Screen(), (), 1, complete({})).rollouts(1, scored, tokens=details)
            sizes.append(rollout_file(tmp_path, 1).stat().st_size)
        lines = read_lines(rollout_file(tmp_path, 1))
        return sum("token_details" in line for line in lines), sizes[1] / sizes[0]

    count, growth = write([9] * 99, "")
    assert count == 8 and 1 < growth < 1.2
    count, growth = write([900] * 40, "because " * 400)  # long ones of a small batch: fewer
    assert 0 < count < 8 and 1.1 < growth < 1.2
    count, growth = write([900, *[9] * 59], "")  # one that does not fit leaves room for others
    assert count == 7 and 1 < growth < 1.2


def test_a_run_writes_them_unless_it_is_told_not_to(tmp_path: Path) -> None:
    settings = {"data": {"train_batch_size": 40, "max_response_length": 9}, "rollout": {"n": 2}}
    for name, trainer in (("on", {}), ("off", {"token_details": 0})):
        (tmp_path / name).mkdir()
        script = Script(
            tmp_path / name, settings | {"trainer": {"save_freq": -1, **trainer}}, prompts=40,
            score=lambda rollout, step: number(rollout.prompt) / 40,
        )  # fmt: skip
        stage = script.build()
        run(stage.job, stage.state)
    for step in (1, 2, 3):
        on, off = (read_lines(rollout_file(tmp_path / name, step)) for name in ("on", "off"))
        kept = [line for line in on if line.pop("token_details", None)]
        assert on == off
        assert sorted(line["score"] * 40 for line in kept) == [0, 1, 2, 3, 36, 37, 38, 39]
    critic = [read_lines(tmp_path / name / "critic.jsonl") for name in ("on", "off")]
    assert critic[0] == critic[1]
    assert [line["step"] for line in critic[0]] == [1, 2, 3]
    assert [row[:2] for row in critic[0][0]["positions"]] == [[80, 80], [80, 80], [80, 160]]


def test_explained_variance_by_position_is_that_of_the_tokens_there() -> None:
    draw = np.random.default_rng(0)
    returns, values = draw.normal(size=(2, 40, 21))
    values[:, 10:] = returns[:, 10:] - 0.1 * values[:, 10:]
    mask = np.arange(21) < draw.integers(1, 22, size=(40, 1))
    values[~mask] = np.nan  # what is masked counts nowhere
    pooled = pool_steps([{"step": 7, **measure_critic(values, returns, mask)}])
    assert pooled["name"] == "step 7"
    names = {"1": (0, 1), "2": (1, 2), "3-4": (2, 4), "5-8": (4, 8), "9-16": (8, 16),
             "17-32": (16, 21)}  # fmt: skip
    assert [row[0] for row in pooled["positions"]] == list(names)
    for name, tokens, value in pooled["positions"]:
        start, end = names[name]
        at = mask[:, start:end]
        assert tokens == at.sum()
        expected = explained_variance(returns[:, start:end][at], values[:, start:end][at])
        assert value == pytest.approx(expected, abs=1e-4)
    by_value = sorted(zip(values[mask], returns[mask], strict=True))
    first, last = by_value[: len(by_value) // 10 + 1], by_value[-(len(by_value) // 10) :]
    for tenth, (tokens, value, mean) in (
        (first, pooled["tenths"][0]),
        (last, pooled["tenths"][-1]),
    ):
        assert tokens == len(tenth)
        assert value == pytest.approx(np.mean([v for v, _ in tenth]), rel=1e-4)
        assert mean == pytest.approx(np.mean([r for _, r in tenth]), rel=1e-4)


def test_steps_are_pooled_by_their_sums() -> None:
    """The step with more tokens and more variance counts more: not a mean of two ratios."""
    one = {"positions": [[20, 20, 10.0, 5.0], [3, 3, 1.0, 0.5]], "tenths": [[1, 0.0, 1.0]]}
    two = {"positions": [[90, 90, 90.0, 9.0], [4, 4, 1.0, 0.5], [9, 9, 0.0, 1.0]],
           "tenths": [[3, 1.0, 0.0]]}  # fmt: skip
    pooled = pool_steps([{"step": 3, **one}, {"step": 4, **two}])
    # Token 2 has 7 responses, tokens 3-4 have equal returns: undefined, so left out, not 0.
    assert pooled["positions"] == [("1", 110, pytest.approx(1 - 14 / 100))]
    assert pooled["tenths"] == [(4, 0.75, 0.25)]
    assert pooled["name"] == "steps 3 to 4"


def test_a_resumed_run_has_each_step_of_the_critic_once(tmp_path: Path) -> None:
    for step in range(1, 6):
        line = {"positions": [[9, 9, 1.0, step / 10]], "tenths": [[9, 0.1, 0.2]]}
        append_line(tmp_path / "critic.jsonl", {"step": step, **line})
    Tracker(tmp_path, Screen(), (), 9, complete({})).resume_at(3)
    assert [line["step"] for line in read_lines(tmp_path / "critic.jsonl")] == [1, 2, 3]
    first, last = describe_critic(tmp_path)
    assert (first["name"], last["name"]) == ("step 1", "step 3")
    assert last["positions"] == [("1", 9, pytest.approx(0.7))]
    assert describe_critic(tmp_path / "none") == []
