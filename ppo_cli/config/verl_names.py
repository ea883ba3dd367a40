"""verl's names, old and new, become ours; what cannot be honoured is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppo_cli.config.schema import Config
from ppo_cli.config.yaml_file import Entry

Lookup = Callable[[str], Any]
WRAPPER = "actor_rollout_ref."


@dataclass(frozen=True)
class Late:
    """A raw value that depends on other settings; computed once these are known."""

    compute: Callable[[Lookup], Any]


@dataclass
class Told:
    """A layer in our own names, with what has to be said about it."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    demands: list[Callable[[Config], str | None]] = field(default_factory=list)


class Translator:
    """Turns one layer after the other into our names."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ

    def translate(self, layer: Sequence[Entry]) -> Told:
        """Return the layer in our own names."""
        told = Told()
        for entry in layer:
            told.entries.append(Entry(entry.name.removeprefix(WRAPPER), entry.raw, entry.origin))
        return told
