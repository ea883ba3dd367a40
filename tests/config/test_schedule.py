"""Learning rates of a run that gets more steps."""

from __future__ import annotations

import pytest

from ppo_cli.config.schedule import describe_lr_jumps, lr_factor
from ppo_cli.config.schema.run import Config

COSINE = {"lr": 1e-3, "lr_scheduler_type": "cosine"}


def lr_jumps(config: Config, line: dict[str, float], total: int) -> list[str]:
    return [*describe_lr_jumps(config.actor.optim, config.critic.optim, line, total)]


def jumps(optim: dict[str, object], planned: int, done: int, total: int) -> list[str]:
    """The sentences of a run over `planned` steps that goes on after `done` with `total`."""
    config = Config.model_validate({"actor": {"optim": optim}, "critic": {"optim": optim}})
    rate = config.actor.optim.lr * lr_factor(done - 1, planned, config.actor.optim)
    return lr_jumps(config, {"step": done, "actor/lr": rate, "critic/lr": rate}, total)


def test_a_cosine_over_more_steps_is_announced_for_each_model() -> None:
    assert jumps(COSINE, 4, 4, 8) == [
        f"the {name}'s learning rate rises from 0.00015 at step 4 to 0.0005 at step 5, as its "
        "schedule is cosine with at most 0.001, over 8 steps"
        for name in ("actor", "critic")
    ]


def test_a_line_falls_to_its_minimum_after_the_last_step() -> None:
    linear = {"lr_scheduler_type": "linear", "lr_warmup_steps": 1, "min_lr_ratio": 0.2}
    optim = Config.model_validate({"actor": {"optim": linear}}).actor.optim
    rates = [lr_factor(step, 5, optim) for step in range(6)]
    assert rates == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])


def test_a_longer_warm_up_is_announced_too() -> None:
    (actor, _) = jumps({"lr": 1e-3, "lr_warmup_steps_ratio": 0.5}, 4, 4, 20)
    assert "falls from 0.001 at step 4 to 0.00045 at step 5" in actor


@pytest.mark.parametrize(
    ("optim", "planned", "done", "total"),
    [
        (COSINE, 8, 4, 8),  # stopped halfway, and resumed with the same number of steps
        ({"lr": 1e-3}, 4, 4, 8),
        ({"lr": 1e-3, "lr_warmup_steps": 2}, 4, 4, 8),
        (COSINE, 4, 4, 4),  # complete
        (COSINE, 8, 4, 4),  # complete with fewer steps than planned
        (COSINE, 1000, 10, 1001),  # by less than is written
    ],
)
def test_a_schedule_that_stays_is_not_mentioned(
    optim: dict[str, object], planned: int, done: int, total: int
) -> None:
    assert jumps(optim, planned, done, total) == []


def test_a_model_that_did_not_train_in_the_last_step_has_no_rate() -> None:
    config = Config.model_validate({"actor": {"optim": COSINE}})
    assert lr_jumps(config, {"step": 4}, 8) == []
