"""Each declared conflict appears for its example, and what it advises ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ppo_cli.config.mixture import MixPart
from ppo_cli.config.schema.algorithm import Conflict, Section
from ppo_cli.config.schema.keys import declared_conflicts, table
from ppo_cli.config.schema.run import Config
from tests.config.settling import load_table, problems, settle, unused
from tests.settings import with_gpus

ACCEPTED = load_table("accepted.yaml")
JUDGE = ("reward.api.enable=true", "reward.api.model=m")
PART = "reward.composite.parts.rule."
# What else an example needs, by the name of its section.
NEEDED = {
    "algorithm.": ("rollout.n=2",),
    "reward.api.": JUDGE,
    "reward.api.monitor.": JUDGE,
    "reward.api.cascade.": (*JUDGE, "reward.api.votes=3"),
    PART: (f"{PART}kind=rule",),
}


def rows(kind: type[Section], at: str) -> Iterator[tuple[str, Conflict]]:
    """Yield the conflicts of a section and of those below it, with the section's name."""
    yield from ((at, row) for row in declared_conflicts(kind))
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from rows(field.annotation, f"{at}{name}.")


ROWS = [*rows(Config, ""), *rows(MixPart, PART)]


@pytest.mark.parametrize(("at", "row"), ROWS, ids=[f"{at}{row.keys}" for at, row in ROWS])
def test_a_conflict_is_refused_and_its_advice_ends_it(at: str, row: Conflict) -> None:
    example = [*NEEDED.get(at, ()), *(f"{at}{override}" for override in row.example.split())]
    advice = [f"{at}{override}" for override in row.advice.split()]
    (problem,) = problems(*example)
    assert problem.startswith("override: ")
    assert problem not in problems(*example, *advice)
    # The sentence names the setting to change: by its key, its flag, or with its group.
    for key in (override.partition("=")[0] for override in advice):
        flag = table()[key].flag if key in table() else None
        names = {key.removeprefix(at), flag or key, key.rpartition(".")[0] or key}
        assert any(name in problem for name in names)


@pytest.mark.parametrize("overrides", ACCEPTED["fit"])
def test_settings_that_fit_together_are_accepted(overrides: str) -> None:
    resolved = settle(*overrides.split())
    names = [override.partition("=")[0] for override in overrides.split()]
    assert {resolved.origins[name] for name in names} == {"override"}


@pytest.mark.parametrize(
    ("gpus", "overrides"),
    [(gpus, row) for gpus, rows in ACCEPTED["effective"].items() for row in rows],
)
def test_a_setting_with_an_effect_is_neither_refused_nor_remarked_on(
    gpus: int, overrides: str
) -> None:
    assert unused(settle(*overrides.split(), machine=with_gpus(gpus))) == ([], [])


def test_a_value_that_cannot_be_read_is_in_no_conflict() -> None:
    (line,) = problems("data.train_batch_size=many", "actor.ppo_mini_batch_size=100")
    assert "'many' is not a number" in line
    (line,) = problems("actor.clip_ratio=-1", "actor.clip_ratio_low=0.3")
    assert "must be above 0" in line


def test_a_conflict_names_all_places_it_came_from() -> None:
    flags = {"data.train_batch_size": ("100", "flag --batch_size")}
    (line,) = problems(flags=flags, env={"PPO_MINI_BATCH_SIZE": "30"})
    assert line.startswith("env PPO_MINI_BATCH_SIZE, flag --batch_size: ")
