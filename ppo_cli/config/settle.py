"""Decides each unset setting that has a rule, once, right after the layers are merged.

The rules are in the declarations (`schema/unset.py`). A `Fitted` one stays unset here: the memory
plan decides it when it knows the shapes of the models. What layers fill in for each other, such as
a judge's usual model, `planning/resolve.py` has done before, with an origin in place of a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppo_cli.config.schema.keys import table, value_of, with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.unset import Fitted
from ppo_cli.machine.machine import Machine


@dataclass(frozen=True)
class Settled:
    """A configuration in which rules have decided what was unset, and why: key -> reason."""

    config: Config
    why: dict[str, str]


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


def settle(config: Config, machine: Machine | None = None) -> Settled:
    """Return the configuration with all rules applied on a machine: this one, if none is given."""
    settling = Settling(config, machine or Machine.here())
    for key in table():
        settling[key]
    return Settled(with_settings(config, settling.decided), settling.why)


def settle_defaults() -> Config:
    """Return the defaults as they hold here: for a run folder whose config.yaml cannot be read."""
    return settle(Config()).config
