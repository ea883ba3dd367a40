"""Episodes: their turns, tokens and log-probs, their limits, and what fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from ppo_cli.algo.batch import build_batch
from ppo_cli.engine.base import Sampling
from ppo_cli.records import Message, Rollout
from ppo_cli.rewards.environment import add_rewards
from tests.environments.scripted import (
    END,
    Counting,
    Scripted,
    by_key,
    config,
    make_chat,
    make_engine,
    prompts,
    tokenizer,
)

SAMPLING = Sampling(n=2, max_tokens=120, seed=5)


def play(environments: Scripted, sampling: Sampling = SAMPLING, **groups: Any) -> list[Rollout]:
    engine = make_engine(environments, config(**groups))
    rollouts = list(engine.generate(prompts(), sampling))
    assert not environments.episodes and len(environments.released) == len(rollouts) == 8
    return rollouts


def test_tokens_turns_and_log_probs_of_an_episode() -> None:
    engine = make_engine(Scripted(), config(environment={"path": "x.py:X", "max_turn_tokens": 12}))
    rollouts = list(engine.generate(prompts(), SAMPLING))
    batch = engine.annotate(build_batch(rollouts, pad_token_id=0))
    for row, rollout in enumerate(rollouts):
        # The tokens are those of the whole conversation, and only the policy's count.
        text = rollout.prompt.rendered
        for turn in rollout.turns:
            text += turn.text + END
            if turn is not rollout.turns[-1]:
                text += "\n" + make_chat().open(turn.replies)[0]
        played = tokenizer().decode([*rollout.prompt.token_ids, *rollout.token_ids])
        assert text == played + END * rollout.turns[-1].cut
        mask = torch.zeros(batch.response_mask_BT.shape[1], dtype=torch.bool)
        for turn in rollout.turns:
            mask[turn.start : turn.end] = True
        assert torch.equal(batch.response_mask_BT[row], mask)
        assert int(mask.sum()) == rollout.policy_tokens == len(rollout.policy_ids)
        assert rollout.turns[-1].end == len(rollout.token_ids)
        # One forward pass over the episode gives the log-probs with which it was sampled.
        sampled = batch.sampler_logprobs_BT[row]
        assert torch.equal(sampled != 0, mask)
        gap = (batch.old_logprobs_BT[row] - sampled)[mask].abs().max()
        assert gap < 1e-4
    assert {len(r.turns) for r in rollouts} == {2, 3, 4}
    assert all(r.finish_reason == "length" for r in rollouts if r.turns[-1].cut)


def test_timing_and_batches_do_not_change_an_episode() -> None:
    usual = by_key(play(Scripted()))
    slow = by_key(play(Scripted(pause_s=0.05), rollout={"name": "hf", "max_num_seqs": 3}))
    assert {k: r.token_ids for k, r in slow.items()} == {k: r.token_ids for k, r in usual.items()}


@pytest.mark.parametrize(("per", "games"), [("prompt", 4), ("sample", 8)])
def test_the_samples_of_a_prompt_play_one_game_unless_each_has_its_own(
    per: str, games: int
) -> None:
    """The same whenever it is played, and another in another step."""
    environments = [Scripted(), Scripted(), Scripted()]
    for environment, seed in zip(environments, (5, 5, 6), strict=True):
        play(environment, replace(SAMPLING, seed=seed), environment={"path": "x", "seed_per": per})
    first, second, third = (
        {(row["prompt"], row["seed"]) for row in environment.rows.values()}
        for environment in environments
    )
    assert first == second and first.isdisjoint(third) and len(first) == games
    assert max(seed for _, seed in first) < 2**31


@pytest.mark.parametrize("limit", ["turns", "turn tokens", "episode tokens"])
def test_limits(limit: str) -> None:
    settings = {"path": "x.py:X", "max_turns": 3 if limit == "turns" else 8}
    if limit == "turn tokens":
        settings["max_turn_tokens"] = 2

    class Endless(Counting):
        def step(self, message: Message) -> Any:
            messages, _, rewards = super().step(message)
            return messages, self.turn == 6, rewards

        def finish(self) -> dict[str, float]:
            if self.seed % 3 == 0:
                raise ValueError("no score")
            return {"turns": 0.5, "due": 1.0}

    sampling = Sampling(n=2, max_tokens=60 if limit == "episode tokens" else 120, seed=5)
    rollouts = play(Scripted(Endless), sampling, environment=settings)
    if limit == "turns":
        assert {len(r.turns) for r in rollouts} == {3}
        # The last turn was played, and the environment asked for what was due.
        due = [r.turns[-1].rewards for r in rollouts if r.ended == "turns"]
        assert due and all(parts["turns"] == 1.5 and parts["due"] == 1.0 for parts in due)
        failed = {r.failure for r in rollouts if not r.ended}
        assert failed == {"raised ValueError: no score"}
    elif limit == "turn tokens":
        turns = [turn for r in rollouts for turn in r.turns]
        assert {r.finish_reason for r in rollouts if r.turns[-1].cut} == {"length"}
        assert all(turn.end - turn.start <= 2 for turn in turns)
        end = tokenizer().convert_tokens_to_ids(END)
        for r in rollouts:  # what the environment adds closes a turn that was cut
            for turn in r.turns[:-1]:
                assert (r.token_ids[turn.end] == end) == turn.cut
    else:
        assert any(r.ended == "tokens" for r in rollouts)
        assert all(len(r.token_ids) <= 60 for r in rollouts)


class Fragile(Counting):
    """Fails in one of three ways, depending on the prompt."""

    def reset(self, row: Mapping[str, Any]) -> list[Message] | None:
        self.truth = row["ground_truth"]
        if self.truth == 3:
            raise RuntimeError("no board")
        if self.truth == 6:
            return [{"role": "user", "content": "long " * 80}]
        super().reset(row)
        return [{"role": "user", "content": None if self.truth == 9 else "Begin."}]

    def step(self, message: Message) -> Any:
        if self.turn == 1:
            raise ValueError("no second turn")
        return super().step(message)


def test_a_failed_episode_is_masked_with_its_reason() -> None:
    environments = Scripted(Fragile)
    rollouts = by_key(play(environments))
    reasons = [rollouts[f"row:{i}", 0].failure for i in range(4)]
    assert reasons[0] == "raised ValueError: no second turn"
    assert reasons[1] == "raised RuntimeError: no board"
    assert reasons[2].startswith("its opening has ") and "--max_prompt_length 64" in reasons[2]
    assert reasons[3].startswith("the chat template refuses it: ")
    began = rollouts["row:0", 0]
    assert len(began.turns) == 2 and began.prompt.text == "Begin."
    assert began.turns[-1].end == len(began.token_ids)
    # Those that never began are rows without a token that counts.
    batch = build_batch(list(rollouts.values()), pad_token_id=0)
    lengths = [r.policy_tokens for r in rollouts.values()]
    assert batch.response_mask_BT.sum(1).tolist() == lengths
    assert sum(length == 0 for length in lengths) == 6


def test_an_engine_that_is_left_early_releases_all_episodes() -> None:
    environments = Scripted()
    engine = make_engine(environments, config())
    rollouts = engine.generate(prompts(), SAMPLING)
    next(rollouts)
    assert len(environments.episodes) == 7
    rollouts.close()  # type: ignore[attr-defined]
    assert not environments.episodes
    # The sampler is free again.
    assert len(list(engine.generate(prompts(), SAMPLING))) == 8


def test_the_reward_of_an_environment() -> None:
    rollout = play(Scripted())[0]
    score = add_rewards(rollout)
    lengths = sum(len(turn.message["content"]) / 10 for turn in rollout.turns)
    assert score.value == pytest.approx(len(rollout.turns) + lengths)
    assert {n: p.raw for n, p in score.parts.items()} == {
        "turns": len(rollout.turns), "length": pytest.approx(lengths),
    }  # fmt: skip
    assert [step.end for step in score.steps] == [turn.end for turn in rollout.turns]
    assert sum(step.value for step in score.steps) == pytest.approx(score.value)


class Demanding(Counting):
    """Replies with a stop string, whose last character the policy writes as well."""

    def step(self, message: Message) -> Any:
        return (
            [{"role": "user", "content": "How much is 14 plus 66? How much is 1"}],
            super().step(message)[1],
            {},
        )


def test_a_stop_string_in_a_reply_does_not_end_the_turn_after_it() -> None:
    stopped = by_key(
        play(
            Scripted(Demanding), replace(SAMPLING, stop=("How much is 14 plus 66? How much is 1",))
        )
    )
    plain = by_key(play(Scripted(Demanding)))
    assert {k: r.token_ids for k, r in stopped.items()} == {
        k: r.token_ids for k, r in plain.items()
    }
    texts = [turn.text for r in plain.values() for turn in r.turns[1:]]
    assert any("1" in text[:-1] for text in texts)
