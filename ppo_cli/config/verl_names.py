"""Other names for settings become ours: verl's, old and new, and the older YAML style.

Every name that is understood is honoured, tied to the setting that stands for it, taken with
a remark, or refused with the reason. Nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.config import older_style
from ppo_cli.config.keys import find
from ppo_cli.config.layers import Reset
from ppo_cli.config.translation import Told, Translation
from ppo_cli.config.values import is_unset
from ppo_cli.config.verl_special import PRECISIONS, TURNED
from ppo_cli.config.verl_table import MEGATRON, REFUSED, RENAMED, SAME, TIED, TOLD
from ppo_cli.config.yaml_file import Entry

WRAPPER = "actor_rollout_ref."
_RENAMED = RENAMED | older_style.RENAMED
_SAME = SAME | older_style.SAME


class Translator(Translation):
    """Turns one layer after the other into our names."""

    def translate(self, layer: Sequence[Entry]) -> Told:
        """Return the layer in our own names."""
        self.open_layer()
        for entry in layer:
            self.given = entry.name
            name = entry.name.removeprefix(WRAPPER)
            self._one(Entry(name, entry.raw, entry.origin))
        self._function()
        return self.close_layer()

    def _one(self, entry: Entry) -> None:
        name = entry.name
        if isinstance(entry.raw, str) and "${" in entry.raw:
            self.problem(entry, f"{name}: '{entry.raw}' is not filled in; write the value itself.")
        elif isinstance(entry.raw, Reset):
            self._reset(entry)
        elif name in TURNED:
            TURNED[name](self, entry)
        elif find(name) is not None:
            self.put(entry, name, entry.raw)
        elif renamed := _renamed(name):
            for own in renamed:
                self._to_own(entry, own)
            if name in older_style.REMARKS:
                self.note(entry, older_style.REMARKS[name])
        elif name in TIED:
            self._tie(entry, TIED[name])
        elif name in _SAME:
            self._same(entry, *_SAME[name])
        elif ".megatron" in name:
            self.problem(entry, f"{name} cannot be set here: {MEGATRON}.")
        elif said := _below(TOLD, name):
            self.note(entry, said)
        elif said := _below(REFUSED, name):
            self.problem(entry, f"{name} cannot be set here: {said}.")
        else:
            self.put(entry, name, entry.raw)

    def _to_own(self, entry: Entry, own: str) -> None:
        if find(own) is None:
            self._one(Entry(own, entry.raw, entry.origin))
        else:
            self.put(entry, own, entry.raw)

    def _reset(self, entry: Entry) -> None:
        """`~key`: only what is a setting of ours, by any of its names, can be taken back."""
        for own in _renamed(entry.name) or (entry.name,):
            self.put(entry, own, entry.raw)

    def _same(self, entry: Entry, allowed: Sequence[str], said: str) -> None:
        if _plain(entry.raw) not in allowed:
            shown = "null" if entry.raw is None else entry.raw
            self.problem(entry, f"{entry.name}={shown} cannot be honoured: {said}.")

    def _tie(self, entry: Entry, own: str) -> None:
        if is_unset(entry.raw) or str(entry.raw) == "-1":
            return
        wanted = PRECISIONS.get(str(entry.raw), str(entry.raw)).strip().lower()
        self.demand(
            entry,
            lambda value: str(value(own)).lower() == wanted,
            f"{entry.name} is {own} here and cannot differ from it; set {own}={entry.raw} instead.",
        )

    def _function(self) -> None:
        """Join verl's path and name of a reward function."""
        file, name = self.function_file, self.function_name
        if file is not None:
            tail = "" if name is None or is_unset(name.raw) else f":{name.raw}"
            self.given = "custom_reward_function.path"
            self.put(file, "reward.function", f"{file.raw}{tail}")
        elif name is not None and str(name.raw) != "compute_score":
            self.problem(
                name, "a function is named without its file; use --reward_function FILE:NAME."
            )


def _renamed(name: str) -> tuple[str, ...]:
    if name in _RENAMED:
        return _RENAMED[name]
    for old, new in _RENAMED.items():
        if old.endswith(".*") and name.startswith(old[:-1]):
            return tuple(own[:-1] + name[len(old) - 1 :] for own in new)
    return ()


def _below(said: Mapping[str, str], name: str) -> str:
    """Find what is said of a name, or of the nearest group that holds it."""
    if name in said:
        return said[name]
    parts = name.split(".")
    groups = (".".join(parts[:cut]) + ".*" for cut in range(len(parts), 0, -1))
    return next((said[group] for group in groups if group in said), "")


def _plain(raw: Any) -> str:
    return "null" if raw is None or raw in ("", [], {}) else str(raw).strip().lower()
