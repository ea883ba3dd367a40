"""A layer on its way into our own names, and what has to be said about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppo_cli.config.layers import Entry

Lookup = Callable[[str], Any]


@dataclass(frozen=True)
class Late:
    """A raw value that depends on other settings; computed once these are known.

    One that `yields` gives way to a plain value for the same setting.
    """

    compute: Callable[[Lookup], Any]
    yields: bool = False


@dataclass(frozen=True)
class Demand:
    """Something that must hold of the whole configuration, because a setting said so."""

    origin: str
    holds: Callable[[Lookup], bool]
    otherwise: str


@dataclass
class Told:
    """A layer in our own names, with what has to be said about it."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    demands: list[Demand] = field(default_factory=list)


class Translation:
    """Takes settings in our names from one layer, and remembers what spans several."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.resume_path: str | None = None
        self.resume_by_path = False
        self.overlong_on = False
        self.function_file: Entry | None = None
        self.function_name: Entry | None = None
        self.given = ""
        self._told = Told()
        self._by: dict[str, tuple[str, Entry]] = {}

    def open_layer(self) -> None:
        """Begin a layer."""
        self._told, self._by = Told(), {}
        self.function_file = self.function_name = None

    def close_layer(self) -> Told:
        """Return what the layer came to."""
        self._told.entries = [entry for _, entry in self._by.values()]
        return self._told

    def put(self, entry: Entry, name: str, raw: Any) -> None:
        """Set one of our settings; two names for it in one layer must agree."""
        new = Entry(name, raw, entry.origin)
        given, old = self._by.pop(name, (self.given, new))
        if given != self.given:
            if isinstance(raw, Late) and isinstance(old.raw, Late):
                new = Entry(name, _smaller(old.raw, raw), entry.origin)
            elif isinstance(old.raw, Late) and old.raw.yields:
                pass
            elif isinstance(raw, Late) and raw.yields:
                new = old
            elif str(old.raw) != str(raw):
                self.problem(
                    entry, f"{self.given} and {given} both set {name}, differently; keep one."
                )
        self._by[name] = (self.given, new)

    def put_late(self, entry: Entry, name: str, compute: Callable[[Lookup], Any]) -> None:
        """Set one of our settings to what other settings make of it."""
        self.put(entry, name, Late(compute))

    def problem(self, entry: Entry, text: str) -> None:
        """Report what is wrong with an entry."""
        self._told.problems.append(f"{entry.origin}: {text}")

    def note(self, entry: Entry, text: str) -> None:
        """Remark on an entry that was taken."""
        self._told.notes.append(f"{entry.origin}: {entry.name}: {text}.")

    def demand(self, entry: Entry, holds: Callable[[Lookup], bool], otherwise: str) -> None:
        """Ask for something that can be seen only when all settings are known."""
        self._told.demands.append(Demand(entry.origin, holds, otherwise))


def _smaller(one: Late, other: Late) -> Late:
    """Of two limits on one thing the tighter one holds; an unset one is no limit."""

    def tighter(value: Lookup) -> Any:
        known = [late.compute(value) for late in (one, other)]
        return min((limit for limit in known if limit is not None), default=None)

    return Late(tighter)
