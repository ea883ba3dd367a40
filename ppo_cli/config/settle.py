"""Decides each unset setting that has a rule, once, right after the layers are merged.

The rules are in the declarations (`schema/unset.py`). A `Fitted` one stays unset here: the memory
plan decides it when it knows the shapes of the models. What layers fill in for each other, such as
a judge's usual model, `planning/resolve.py` has done before, with an origin in place of a reason.

Each part of a mixture, and each further judge of a cascade or a panel, is decided from what holds
for it. What differs from the value that it would inherit is written into its own settings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ppo_cli.config.mixture import (
    OF_REWARD,
    PARTS,
    SECTIONS,
    Judge,
    Scorer,
    expand_part,
    further_judges,
    judges_of,
    models_of,
    other_judge,
    read_judge,
)
from ppo_cli.config.schema.keys import table, value_of, with_settings
from ppo_cli.config.schema.reward import ApiReward, ModelReward
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.unset import Fitted
from ppo_cli.errors import ConfigError
from ppo_cli.machine.machine import Machine


@dataclass(frozen=True)
class Settled:
    """What was set, what holds on a machine by the rules, and why: key -> reason."""

    requested: Config
    config: Config
    why: dict[str, str]
    machine: Machine


class Settling:
    """The settings while they are decided; an unset one is decided when it is first read."""

    def __init__(self, config: Config, machine: Machine) -> None:
        self.machine = machine
        self.decided: dict[str, Any] = {}
        self.why: dict[str, str] = {}
        self._config = config

    def __getitem__(self, key: str) -> Any:
        """Return the value that holds."""
        if key in self.decided:
            return self.decided[key]
        value, rule = value_of(self._config, key), table()[key].rule
        if value is None and rule is not None and not isinstance(rule, Fitted):
            value, self.why[key] = rule.decide(self)
            self.decided[key] = value
        return value

    def is_set(self, key: str) -> bool:
        """Whether it has a value without its rule."""
        return value_of(self._config, key) is not None

    def of_judge(self, name: str) -> Settling | None:
        """Return them with a further judge as the run's judge; None if that one is wrong."""
        # Criteria are shuffled for all judges of a panel.
        order = {"rubric_order": self["reward.api.rubric_order"]}
        try:
            judge = other_judge(self._config.reward.api.model_copy(update=order), name)
        except ConfigError:
            return None
        return self.of_section("reward.api", judge)

    def of_section(self, key: str, section: ApiReward | ModelReward) -> Settling:
        """Return them with other settings of the judge or of the reward model."""
        return Settling(with_settings(self._config, {key: section}), self.machine)

    def decide(self) -> Config:
        """Return the configuration with all decisions."""
        for key in table():
            self[key]
        return with_settings(self._config, self.decided)

    def list_differences(self, key: str, inherited: Any) -> dict[str, Any]:
        """Return what holds in a section and not in `inherited`, by key below the section."""
        differences = {}
        for name, declared in table().items():
            leaf = name.removeprefix(f"{key}.")
            if leaf != name and declared.rule is not None:
                value = self[name]
                if value != value_of(inherited, leaf):
                    differences[leaf] = value
        return differences


def settle(config: Config, machine: Machine | None = None) -> Settled:
    """Return the configuration with all rules applied on a machine: this one, if none is given."""
    settling = Settling(config, machine or Machine.here())
    decided, why = settling.decide(), settling.why
    # First the judge of a part, from which its further judges inherit.
    for judge in judges_of(config.reward):
        decided = _settle_part(settling, judge, decided, why)
        decided = _settle_further_judges(settling, judge, decided, why)
    for model in models_of(config.reward):
        decided = _settle_part(settling, model, decided, why)
    return Settled(config, decided, why, settling.machine)


def settle_defaults() -> Config:
    """Return the defaults as they hold here: for a run folder whose config.yaml cannot be read."""
    return settle(Config()).config


def _settle_part(
    run: Settling, source: Judge | Scorer, decided: Config, why: dict[str, str]
) -> Config:
    """Write into a part of a mixture what is decided for it and not what it would inherit.

    `source` has the settings of the part before any rule decides.
    """
    if source.part is None:
        return decided
    sources: Collection[Judge | Scorer] = judges_of(decided.reward)
    kind = "judge" if isinstance(source.settings, ApiReward) else "model"
    if kind == "model":
        sources = models_of(decided.reward)
    key = SECTIONS[kind]
    settling = run.of_section(key, source.settings)
    (inherited,) = (other.settings for other in sources if other.part == source.part)
    values = settling.list_differences(key, inherited)
    why |= {f"{source.own_key}.{leaf}": settling.why[f"{key}.{leaf}"] for leaf in values}
    return _set_in_part(decided, source.part, kind, values)


def _settle_further_judges(
    run: Settling, judge: Judge, decided: Config, why: dict[str, str]
) -> Config:
    """Write into the further judges of a cascade or panel what they would not inherit."""
    settling, at = run, judge.own_key
    if judge.part is not None:
        settling = run.of_section("reward.api", judge.settings)
    (api,) = (other.settings for other in judges_of(decided.reward) if other.part == judge.part)
    judges = dict(api.judges)
    for name in further_judges(api):
        if (other := settling.of_judge(name)) is None:  # refused where judges are checked
            continue
        differences = other.list_differences("reward.api", other_judge(api, name))
        values = {k: v for k, v in differences.items() if k.partition(".")[0] not in OF_REWARD}
        if values:
            judges[name] = read_judge(judges, name) | values
        why |= {f"{at}.judges.{name}.{leaf}": other.why[f"reward.api.{leaf}"] for leaf in values}
    changes = {"judges": judges} if judges != api.judges else {}
    if judge.part is None:
        return with_settings(decided, {f"{at}.{leaf}": value for leaf, value in changes.items()})
    return _set_in_part(decided, judge.part, "judge", changes)


def _set_in_part(config: Config, part: str, kind: str, values: Mapping[str, Any]) -> Config:
    """Return the configuration with settings in the judge or reward model of a part."""
    if not values:
        return config
    parts = dict(config.reward.composite.parts)
    group = expand_part(parts.get(part))
    parts[part] = group | {kind: group.get(kind, {}) | values}
    return with_settings(config, {PARTS: parts})
