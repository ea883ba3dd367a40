"""What the layers have come to while they are read: late values, problems and demands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def _same_number(one: Any, other: Any) -> bool:
    """Whether two values are one number, as 0 and 0.0."""
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False


def _smaller(one: Late, other: Late) -> Late:
    """Of two limits on one thing the tighter one holds; an unset one is no limit."""

    def tighter(value: Lookup) -> Any:
        known = [late.compute(value) for late in (one, other)]
        return min((limit for limit in known if limit is not None), default=None)

    return Late(tighter)


class Reading:
    """What the layers that were read so far have come to; remembers what spans several."""

    def __init__(
        self,
        environ: Mapping[str, str],
        problems: list[str],
        notes: list[str],
        verl: bool = False,
    ) -> None:
        self.environ, self.verl = environ, verl
        self.problems, self.notes = problems, notes
        self.demands: list[Demand] = []
        self.resume_path: str | None = None
        self.resume_by_path = False
        self.overlong_on = False
        self.function_file: Entry | None = None
        self.function_name: Entry | None = None
        self.dynamic: dict[str, bool] = {}  # by model, whether token budgets cut micro-batches
        self.sized: dict[str, Entry] = {}  # by model, what sets the size of a micro-batch
        self._refused: dict[tuple[str, str], list[str]] = {}
        self._told: dict[tuple[str, str], list[str]] = {}
        self._on: set[str] = {""}  # switches of verl's that a layer turned on
        self.given = ""
        self._by: dict[str, tuple[str, Entry]] = {}

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
            elif str(old.raw) != str(raw) and not _same_number(old.raw, raw):
                self.problem(
                    entry, f"{self.given} and {given} both set {name}, differently; keep one."
                )
        self._by[name] = (self.given, new)

    def problem(self, entry: Entry, text: str) -> None:
        """Report what is wrong with an entry."""
        self.problems.append(f"{entry.origin}: {text}")

    def refuse(self, entry: Entry, key: str, said: str) -> None:
        """Report a key that cannot be had; keys of one reason are told in one sentence."""
        self._refused.setdefault((entry.origin, said), []).append(key)

    def tell(self, entry: Entry, said: str) -> None:
        """Remark on a key that was taken; keys with one remark are told in one sentence."""
        self._told.setdefault((entry.origin, said), []).append(entry.name)

    def flush(self) -> None:
        """Write down what was said of keys of one layer."""
        for (origin, said), keys in self._refused.items():
            self.problems.append(f"{origin}: {_some(keys)} {said}.")
        for (origin, said), keys in self._told.items():
            self.notes.append(f"{origin}: {_some(keys)}: {said}.")
        self._refused, self._told = {}, {}

    def note(self, entry: Entry, text: str) -> None:
        """Remark on an entry that was taken."""
        self.notes.append(f"{entry.origin}: {entry.name}: {text}.")

    def demand(self, entry: Entry, holds: Callable[[Lookup], bool], otherwise: str) -> None:
        """Ask for something that can be seen only when all settings are known."""
        self.demands.append(Demand(entry.origin, holds, otherwise))


def _some(keys: list[str]) -> str:
    """List keys, and count those after the third where there are many."""
    return ", ".join(keys) if len(keys) < 5 else f"{', '.join(keys[:3])} and {len(keys) - 3} more"
