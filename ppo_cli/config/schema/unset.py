"""How an unset setting is decided: the rules that a declaration names in place of a default.

A rule reads other settings by their dotted names, and the machine. `config/settle.py` applies all
rules once, right after the layers are merged. Help and `ppo explain` are written from `words`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ppo_cli.machine.machine import Machine


class Choice(NamedTuple):
    """The value of an unset setting, and why it is that."""

    value: Any
    why: str


class Settings(Protocol):
    """The settings that a rule reads; an unset one is decided when it is first read."""

    machine: Machine

    def __getitem__(self, key: str) -> Any:
        """Return the value that holds."""
        ...

    def is_set(self, key: str) -> bool:
        """Whether it has a value without its rule."""
        ...

    def of_judge(self, name: str) -> Settings | None:
        """Return them with a further judge as the run's judge; None if that one is wrong."""
        ...


@dataclass(frozen=True)
class Follows:
    """An unset setting has the value of another one."""

    key: str

    @property
    def words(self) -> str:
        """The rule, for help."""
        return f"as {self.key}"

    def decide(self, settings: Settings) -> Choice:
        """Return the value of the other setting."""
        return Choice(settings[self.key], self.words)


@dataclass(frozen=True)
class Chosen:
    """An unset setting is chosen, from other settings and from the machine."""

    decide: Callable[[Settings], Choice]
    words: str  # the rule, for help


@dataclass(frozen=True)
class Fitted:
    """An unset setting is chosen by the memory plan, which decides several together."""

    words: str  # the rule, for help


Rule = Follows | Chosen | Fitted
