"""What a run remembers, and when it gives up."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

from ppo_cli.moments import Moments
from ppo_cli.run_folder.checkpoints import read_state
from ppo_cli.step.sampling import stream_seed
from ppo_cli.step.state import RunState


def validated(*values: float) -> RunState:
    state = RunState(kl_coef=0.1)
    for step, value in enumerate(values):
        state.step = step
        state.note_validation({"val/reward_mean": value})
    return state


def test_the_best_step_may_be_validated_again() -> None:
    """A resumed run does so; its value replaces the one before and does not count as stale."""
    state = validated(0.2, 0.5)
    for value in (0.5, 0.4):
        state.note_validation({"val/reward_mean": value})
        assert (state.best, state.best_step, state.stale) == (value, 1, 0) and state.is_best
    state.step = 2
    state.note_validation({"val/reward_mean": 0.4})
    assert state.stale == 1


def test_a_validation_with_too_few_scores_is_no_best() -> None:
    state = validated(0.2)
    state.step = 1
    state.note_validation({"val/reward_mean": 1.0, "val/score/failed_share": 0.51})
    state.note_validation({})
    assert (state.best, state.best_step, state.stale) == (0.2, 0, 0)
    state.note_validation({"val/reward_mean": 1.0, "val/score/failed_share": 0.5})
    assert (state.best, state.best_step) == (1.0, 1)


def test_streams_differ_by_use_and_step_and_are_the_same_each_time() -> None:
    seeds = {stream_seed(42, use, step) for use in range(6) for step in range(100)}
    assert len(seeds) == 600
    assert stream_seed(42, 0, 1) == stream_seed(42, 0, 1)


def test_everything_that_a_run_remembers_comes_back(tmp_path: Path) -> None:
    state = RunState(
        kl_coef=0.3, step=4, best=0.5, best_step=2, stale=1, zero_steps=6, broken_steps=7,
        unscored_steps=8, unfinished={"reward_mean": 0.25},
        moments=Moments.from_values([1.0, 2.0, 4.0]), pretraining=[{"explained_variance": 0.5}],
    )  # fmt: skip
    fresh = RunState(kl_coef=0.0)
    assert all(getattr(state, f.name) != getattr(fresh, f.name) for f in fields(state))
    order, reward = Mock(), Mock()
    order.state_dict.return_value, reward.state_dict.return_value = {"epoch": 3}, {"mean": 1.5}
    state.write(tmp_path, order=order, reward=reward, fingerprint={"data": "d1"})
    assert RunState.read(tmp_path, order=order, reward=reward) == state
    order.load_state_dict.assert_called_once_with({"epoch": 3})
    reward.load_state_dict.assert_called_once_with({"mean": 1.5})
    assert read_state(tmp_path)["fingerprint"] == {"data": "d1"}
