"""Episodes in the arithmetic of a step: discounts between turns, a split history, losses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ppo_cli.algo.advantages import gae
from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch, build_batch, merge_annotations
from ppo_cli.engine.base import MiniBatch
from ppo_cli.engine.learner import Learner
from ppo_cli.records import PlacedReward, Prompt, Rollout, Score, Scored, Turn
from ppo_cli.report.metrics import score_metrics
from ppo_cli.rewards.environment import add_rewards
from ppo_cli.step.shaping import place_steps
from ppo_cli.step.turns import split_scores, split_turns
from tests.environments.scripted import config, tokenizer

LENGTHS = ((3, 2), (1, 0), (4, 3), (2, 0))  # tokens of a turn, and of the reply to it


def test_the_discount_between_turns_by_hand() -> None:
    """Two turns of one token with a reply of one: V 1, 2; rewards 0, 4; gamma 0.5, lambda 0.5."""
    rewards, values = torch.tensor([[0.0, 9.0, 4.0]]), torch.tensor([[1.0, 9.0, 2.0]])
    mask = torch.tensor([[True, False, True]])
    # gamma_turn 0.5: delta 4 - 2 = 2, then 0 + 0.25 * 2 - 1 = -0.5, plus 0.25 * 0.5 * 2.
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5, False, None, 0.5)
    assert advantages.tolist() == [[-0.25, 0.0, 2.0]]
    assert returns.tolist() == [[0.75, 0.0, 4.0]]
    # Without it: 0 + 0.5 * 2 - 1 = 0, plus 0.5 * 0.5 * 2.
    assert gae(rewards, values, mask, 0.5, 0.5, False)[0].tolist() == [[0.5, 0.0, 2.0]]


def test_the_discount_between_turns_against_a_loop() -> None:
    for seed in range(200):
        draws = np.random.default_rng(seed)
        gamma, lam, gamma_turn = draws.uniform(0.5, 1, 3)
        rows = [
            [(int(draws.integers(1, 5)), int(draws.integers(1, 4)))
             for _ in range(draws.integers(1, 5))]
            for _ in range(draws.integers(1, 6))
        ]  # fmt: skip
        width = max(sum(a + b for a, b in row) for row in rows) + int(draws.integers(0, 3))
        shape = (len(rows), width)
        rewards, values = draws.normal(size=shape), draws.normal(size=shape)
        mask, expected = np.zeros(shape, bool), np.zeros(shape)
        for b, row in enumerate(rows):
            places, number, start = list[int](), list[int](), 0
            for turn, (length, reply) in enumerate(row):
                places += range(start, start + length)
                number += [turn] * length
                start += length + reply
            mask[b, places] = True
            # A_t is the sum over later tokens u of the discounts from t to u times delta_u.
            count = len(places)
            discount = [
                gamma * (gamma_turn if number[i] != number[i + 1] else 1) for i in range(count - 1)
            ]
            delta = [
                rewards[b, places[i]] - values[b, places[i]]
                + (discount[i] * values[b, places[i + 1]] if i + 1 < count else 0)
                for i in range(count)
            ]  # fmt: skip
            for i in range(count):
                weights = np.cumprod([1.0, *(d * lam for d in discount[i:])])
                expected[b, places[i]] = float(np.dot(weights, delta[i:]))
        actual, returns = gae(
            torch.from_numpy(rewards), torch.from_numpy(values), torch.from_numpy(mask),
            gamma, lam, False, None, gamma_turn,
        )  # fmt: skip
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-9)
        returned = np.where(mask, expected + values, 0)
        np.testing.assert_allclose(returns.numpy(), returned, rtol=1e-9, atol=1e-9)


def episode(seed: int, *, split: bool) -> Rollout:
    """An episode of four turns of random tokens, as it is played with either kind of history."""
    draws = np.random.default_rng(seed)
    prompt = tuple(draws.integers(1, 250, 5).tolist())
    ids: list[int] = []
    turns: list[Turn] = []
    context = prompt
    for length, reply in LENGTHS:
        new, replied = (tuple(draws.integers(1, 250, n).tolist()) for n in (length, reply + 1))
        text, end = f"turn {len(turns)}", len(ids) + length
        turn = Turn(len(ids), end, text, {}, context=context if split else ())
        turns.append(turn)
        last = len(turns) == len(LENGTHS)
        ids += new if split or last else new + replied
        context += new + replied
    mask = np.zeros(len(ids), np.float32)
    for turn in turns:
        mask[turn.start : turn.end] = draws.uniform(-3, -1, turn.end - turn.start)
    row = Prompt(f"row:{seed}", "", (), "", prompt)
    return Rollout(row, 0, tuple(ids), mask, "", "stop", turns=tuple(turns))


def test_rewards_to_go_of_a_split_history_by_hand() -> None:
    rollout = episode(1, split=True)
    rollout = replace(rollout, entropies=np.arange(len(rollout.token_ids), dtype=np.float32))
    ends = [turn.end for turn in rollout.turns]
    # At the last token of three turns, and at the first one of the turn behind the first.
    ends_and_rewards = ((ends[0], 1.0), (ends[0] + 1, 0.5), (ends[2], 4.0), (ends[3], 0.5))
    steps = tuple(PlacedReward(end, reward, "token") for end, reward in ends_and_rewards)
    # 1.5 of the score 7.5 are placed nowhere, so they belong to the last turn.
    score = Score(7.5, steps=steps)
    placed = place_steps(rollout, steps, lambda ids, context: "")
    split = split_turns(rollout)
    rows = split_scores(Scored(rollout, score), split, placed, 0.5)
    # 2; 4 + 0.5 * 2 = 5; 0.5 + 0.5 * 5 = 3; 1 + 0.5 * 3 = 2.5.
    assert [(s.score.value, s.score.steps) for s, _ in rows] == [
        (value, ()) for value in (2.5, 3.0, 5.0, 2.0)
    ]
    assert [inner for _, inner in rows] == [[(2, 1.0)], [(0, 0.5)], [(3, 4.0)], [(1, 0.5)]]
    for single, turn in zip(split, rollout.turns, strict=True):
        assert (single.prompt.token_ids, single.text, single.turns) == (turn.context, turn.text, ())
        for name in ("token_ids", "sampler_logprobs", "entropies"):
            inside = getattr(rollout, name)[turn.start : turn.end]
            assert list(getattr(single, name)) == list(inside), name
    (only,) = split_turns(replace(rollout, turns=rollout.turns[:1], entropies=None))
    assert not only.turns and only.entropies is None and split_turns(only) == [only]
    failed = split_scores(Scored(rollout, Score.failed("timeout")), split, [], 0.5)
    assert len(failed) == 4 and all(s.score.value is None for s, _ in failed)
    whole = episode(1, split=False)
    ((row, inner),) = split_scores(Scored(whole, score), split_turns(whole), placed, 0.5)
    assert (row.rollout, row.score, inner) == (whole, score, placed)


def test_figures_of_episodes_by_hand() -> None:
    first, *others = (episode(seed, split=False) for seed in range(3))
    start, *middle, end = first.turns
    start = replace(start, error="no tool x", seconds=2.0, cut=True, metrics={"x": 1.0})
    turns = start, *middle, replace(end, metrics={"x": 3.0})
    rollouts = [
        replace(first, turns=turns, ended="turns"),
        replace(others[0], failure="raised ValueError: x"),
        replace(others[1], ended="tokens"),
        replace(others[1], token_ids=(), turns=(), failure="timeout"),  # it never began
    ]
    # A limit has ended one before a reward.
    unrewarded = add_rewards(rollouts[2])
    assert unrewarded.value is None and "limit of tokens" in unrewarded.failure
    scores = [Score(1.0), Score.failed("x"), unrewarded, Score.failed("timeout")]
    figures = score_metrics([*map(Scored, rollouts, scores)])
    expected = {
        "turns_mean": 3.0, "failed_share": 0.5, "tool_error_share": 1 / 12, "seconds_mean": 0.5,
        "cut_turns_share": 0.25, "cut_turn_tokens_share": 0.25, "cut_episode_tokens_share": 0.25,
        "cut_without_reward_share": 0.25, "metric.x": 3.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert figures[f"environment/{name}"] == pytest.approx(value), name
    # Only the policy's tokens count: ten in each of three episodes.
    assert figures["response_length_mean"] == 7.5 and figures["response_length/max"] == 10
    # A place in the text is one in the last turn.
    last = replace(first, text="ab")
    spell = {ids: "ab"[: len(ids)] for n in (1, 2) for ids in [first.token_ids[-2:][:n]]}
    placed = place_steps(last, [PlacedReward(2, 1.0)], lambda ids, context: spell[tuple(ids)])
    assert placed == [(len(first.token_ids) - 1, 1.0)]


def train_batch(annotated: AnnotatedBatch, advantages: list[float]) -> TrainBatch:
    """Give the tokens that count these advantages, row by row, and returns of twice as much."""
    mask_BT = annotated.response_mask_BT
    advantages_BT = torch.zeros(mask_BT.shape)
    advantages_BT[mask_BT] = torch.tensor(advantages)
    names = AnnotatedBatch.__dataclass_fields__
    return TrainBatch(
        **{name: getattr(annotated, name) for name in names},
        scores_B=torch.zeros(len(annotated)),
        valid_B=torch.ones(len(annotated), dtype=torch.bool),
        token_rewards_BT=torch.zeros(mask_BT.shape),
        advantages_BT=advantages_BT,
        returns_BT=2 * advantages_BT,
        is_weight_BT=torch.ones(mask_BT.shape),
    )


@pytest.mark.parametrize("packing", [False, True])
def test_only_the_tokens_of_the_policy_are_trained(packing: bool) -> None:
    """One row with holes trains as a row for each turn, written by hand, does."""
    wholes = [episode(seed, split=False) for seed in range(3)]
    by_hand = []
    for rollout in wholes:
        for turn in rollout.turns:
            before = (*rollout.prompt.token_ids, *rollout.token_ids[: turn.start])
            ids = rollout.token_ids[turn.start : turn.end]
            logprobs = rollout.sampler_logprobs[turn.start : turn.end]
            prompt = replace(rollout.prompt, token_ids=before)
            by_hand.append(Rollout(prompt, 0, ids, logprobs, "", "stop"))
    count = sum(rollout.policy_tokens for rollout in wholes)
    advantages = np.random.default_rng(0).normal(size=count).tolist()
    settings = config(
        model={"path": "embedded", "packing": packing},
        actor={"use_kl_loss": True, "entropy_coeff": 0.01, "optim": {"lr": 1e-3}},
    )
    results = []
    for rollouts in (wholes, by_hand):
        learner = Learner(settings, tokenizer(), total_steps=1)
        batch: Batch = build_batch(rollouts, pad_token_id=0)
        annotated = merge_annotations(batch, [learner.annotate(batch)])
        minibatch = MiniBatch(train_batch(annotated, advantages), actor=True, critic=True)
        sums = learner.step(minibatch)
        results.append((annotated, sums, batch.response_mask_BT))
    (a, sums_a, mask_a), (b, sums_b, mask_b) = results
    assert int(mask_a.sum()) == int(mask_b.sum()) == count
    assert a.values_BT is not None and b.values_BT is not None
    torch.testing.assert_close(a.old_logprobs_BT[mask_a], b.old_logprobs_BT[mask_b])
    torch.testing.assert_close(a.values_BT[mask_a], b.values_BT[mask_b])
    for name in ("policy_loss", "value_loss", "grad_norm", "critic_grad_norm", "entropy"):
        if name in sums_a:
            assert sums_a[name] == pytest.approx(sums_b[name], rel=1e-4, abs=1e-6), name
    assert {"policy_loss", "grad_norm", "critic_grad_norm"} <= sums_a.keys()
