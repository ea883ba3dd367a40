"""Translates foreign names to our settings: verl's, old and new, and the older YAML style.

`translate` is a reader of layers (see plugins.py): afterwards they have our own names alone. Every
known name is either translated, tied to one of our settings, accepted with a remark, or refused
with the reason. verl.toml has the names, and the values that verl takes where a command line in
its spelling leaves a setting out.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.layers import DEFAULT, Entry, Layers, Reset, merge_layers, read_entry
from ppo_cli.config.schema.keys import find_key, sections, table
from ppo_cli.config.schema.values import is_unset
from ppo_cli.errors import list_some
from ppo_cli.extras.migrate.verl.translations import (
    PRECISIONS,
    TRANSLATIONS,
    DerivedValue,
    Expectation,
    Lookup,
    TranslationState,
    normalize,
)
from ppo_cli.machine.machine import Machine

# verl puts model, actor, rollout and ref into this group.
WRAPPER = "actor_rollout_ref."
# verl's spellings of a switch.
ON: Final = ("true", "1")
OFF: Final = ("false", "null", "none", "0")


@dataclass(frozen=True)
class ForeignNames:
    """The tables of verl.toml, which explains them."""

    renamed: dict[str, tuple[str, ...]]
    remarks: dict[str, str]
    tied: dict[str, str]
    same: dict[str, tuple[tuple[str, ...], str]]
    remarked: dict[str, str]
    behind: dict[str, str]
    refused: dict[str, str]
    generations: dict[str, dict[str, list[str]]]
    defaults: dict[str, dict[str, Any]]


@cache
def foreign_names() -> ForeignNames:
    """Return verl.toml: PART is expanded to three models, `on` and `off` to all their spellings."""
    read = tomllib.loads(Path(__file__).with_name("verl.toml").read_text(encoding="utf-8"))
    spellings = {"on": ON, "off": OFF}

    # Expand PART, so that each row has a full name.
    def spelt(rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        for name, text in rows.items():
            parts = ("actor", "critic", "ref") if name.startswith("PART.") else ("PART",)
            yield from ((name.replace("PART", part, 1), text) for part in parts)

    # In the order of the fields.
    return ForeignNames(
        {name: tuple(targets) for name, targets in read["renamed"].items()},
        read["remarks"],
        read["tied"],
        {
            name: (tuple(w for word in heading.split() for w in spellings.get(word, (word,))), text)
            for heading, rows in read["same"].items()
            for name, text in spelt(rows)
        },
        dict(spelt(read["remarked"])),
        {
            name: switch.replace("PART", name.partition(".")[0])
            for name, switch in spelt(read["behind"])
        },
        dict(spelt(read["refused"])),
        read["generations"],
        read["defaults"],
    )


def read_verl_defaults() -> dict[str, Any]:
    """Return verl_defaults.json: what the files of each version of verl set and drop."""
    read: dict[str, Any] = json.loads(
        Path(__file__).with_name("verl_defaults.json").read_text(encoding="utf-8")
    )
    return read


@cache
def verl_file_values() -> dict[str, set[str]]:
    """Return the values in verl's own files, of any version, by name without the wrapper."""
    read = read_verl_defaults()
    file_values: dict[str, set[str]] = defaultdict(set)
    # Values that verl's engines add, then those of its YAML files.
    for name, values in read["engines"].items():
        file_values[name.removeprefix(WRAPPER)] |= {normalize(value) for value in values}
    for row in read["versions"].values():
        for name, value in row["set"].items():
            file_values[name.removeprefix(WRAPPER)].add(normalize(value))
    # A renamed setting keeps verl's values under our name.
    for name in list(file_values):
        for target in _find_renamed(name):
            file_values[target] |= file_values[name]
    return dict(file_values)


VERSION = "verl"  # the key behind --verl, and of the preset


@dataclass(frozen=True)
class Generation:
    """Versions of verl with equal defaults, named after the first; `sure` when a key proves it."""

    first: str
    sure: bool


def detect_generation(layers: Sequence[Sequence[Entry]], problems: list[str]) -> Generation | None:
    """Return the generation of verl that the settings are written for; None for our own settings.

    They are verl's when `verl` names a version or a key has the wrapper. Without a version, it is
    the newest one that knows all keys.
    """
    # verl's names are known by the wrapper, or the user names a version.
    entries = [entry for layer in layers for entry in layer]
    named = [entry for entry in entries if entry.name == VERSION and not is_unset(entry.raw)]
    if not named and not any(entry.name.startswith(WRAPPER) for entry in entries):
        return None
    fitting = list(foreign_names().defaults)
    # A named version: the newest generation that is not newer.
    if named:
        version_match = re.fullmatch(r"v?(\d+)\.(\d+)(\.\w+)*|main", str(named[-1].raw).strip())
        if version_match is None:
            problems.append(
                f"{named[-1].origin}: '{named[-1].raw}' is no version of verl; use "
                f"{', '.join(fitting[:-1])} or {fitting[-1]}."
            )
            return None
        version = (int(version_match[1]), int(version_match[2])) if version_match[1] else (99, 0)
        older = [first for first in fitting if tuple(map(int, first.split("."))) <= version]
        return Generation((older or fitting)[-1 if older else 0], sure=True)
    keys = {entry.name.removeprefix(WRAPPER) for entry in entries}
    # Keys that are new in a generation rule out older ones, keys that are gone newer ones.
    generations = foreign_names().generations
    for first, row in generations.items():
        if first in fitting and keys & {*row.get("new", ())}:
            fitting = fitting[fitting.index(first) :]
    for first, row in generations.items():
        if first in fitting and keys & {*row.get("gone", ())}:
            fitting = fitting[: fitting.index(first) + 1]
    return Generation(fitting[-1], sure="0.2" not in fitting or len(fitting) == 1)


def default_layer(generation: Generation) -> list[Entry]:
    """Return verl's defaults as a layer, for the settings whose default differs here."""
    # Each generation lists what it changes, so add them up to this one.
    values: dict[str, Any] = {}
    for first, changed in foreign_names().defaults.items():
        values |= changed
        if first == generation.first:
            break
    # The oldest has no setting for the KL in the reward: it is there unless it is in the loss.
    in_reward = DerivedValue(lambda value: not value("actor.use_kl_loss"))
    weights = {"algorithm.rollout_correction.rollout_is": None}
    values = {"algorithm.use_kl_in_reward": in_reward} | weights | values
    origin = f"{DEFAULT} of verl {generation.first}"
    return [Entry(name, raw, origin) for name, raw in values.items()]


def describe_defaults(generation: Generation) -> str:
    """Return the note about which defaults apply to a command line with verl's names."""
    note = (
        f"These are verl's settings: those that are left out are as in verl {generation.first}, "
        "but devices, loggers and the sizes of micro-batches are chosen here."
    )
    if generation.sure:
        return note
    return (
        f"{note} Older ones differ, and no key shows which it is: with --verl 0.2 (0.2 and 0.3) "
        "the KL is in the reward unless actor.use_kl_loss is on, actor.entropy_coeff is 0.001, "
        "and there is no dual clip."
    )


def translate(layers: Layers, machine: Machine) -> None:
    """Replace the foreign names in the layers by our settings with plain values.

    If the settings are verl's, its defaults become the lowest layer. Layers with only our own names
    stay as they are.
    """
    if not any(_is_foreign(entry) for layer in layers.layers for entry in layer):
        return
    generation = detect_generation(layers.layers, layers.problems)
    translator = Translator(machine, layers.problems, layers.notes, generation is not None)
    if generation is not None:
        layers.foreign = True
        layers.layers.insert(0, default_layer(generation))
        layers.notes.append(describe_defaults(generation))
    # Switches of verl matter only for names that are not ours.
    entries = [entry for layer in layers.layers for entry in layer]
    if any(find_key(entry.name) is None for entry in entries):
        translator.switched_on |= {name for entry in entries for name in _list_switches(entry)}
    # Layers with our own names stay as they are; then compute what depends on other settings.
    translated = [
        translator.translate(layer) if any(map(_is_foreign, layer)) else layer
        for layer in layers.layers
    ]
    derived = any(isinstance(entry.raw, DerivedValue) for layer in translated for entry in layer)
    if derived or translator.expectations:
        translated = _compute_derived(translated, layers, translator.expectations)
    layers.layers = translated
    if generation is not None:
        layers.notes += _compare_with_verl(merge_layers(translated))


def _compare_with_verl(entries: Mapping[str, Entry]) -> Iterator[str]:
    """Remark on what verl does differently, or not at all, with the same settings."""

    def text(name: str) -> str:
        return normalize(entries[name].raw if name in entries else table()[name].default)

    if text("trainer.save_freq") == "-1":
        yield "trainer.save_freq -1: verl would save nothing; here the end of the run is saved."
    estimator = text("algorithm.adv_estimator")
    is_grouped = estimator in ESTIMATORS and ESTIMATORS[estimator].grouped
    if is_grouped and text("algorithm.use_kl_in_reward") == "true":
        yield (
            f"algorithm.use_kl_in_reward: verl's {estimator} compares scores from which the KL was "
            "subtracted; here the scores alone are compared, and the KL is subtracted from the "
            "advantages, unscaled."
        )
    # clip_ratio_low and clip_ratio_high of verl's defaults win over a set clip_ratio.
    clip = entries.get("actor.clip_ratio")
    sides = [entries.get(f"actor.clip_ratio_{side}") for side in ("low", "high")]
    is_chosen = clip is not None and not clip.origin.startswith("preset ")
    if is_chosen and all(side and side.origin.startswith(DEFAULT) for side in sides):
        yield (
            f"actor.clip_ratio {text('actor.clip_ratio')} changes nothing, as in verl: "
            "actor.clip_ratio_low and actor.clip_ratio_high are 0.2 there; set these."
        )


def _is_foreign(entry: Entry) -> bool:
    """Return whether an entry is anything but one of our settings with a plain value."""
    if find_key(entry.name) is None or (isinstance(entry.raw, str) and "${" in entry.raw):
        return True
    # A value of a name that is verl's too; in a preset with our names it is ours.
    return entry.name in TRANSLATIONS and not entry.origin.startswith("preset ")


def _compute_derived(
    layers: list[list[Entry]], report: Layers, expectations: Sequence[Expectation]
) -> list[list[Entry]]:
    """Return the layers with plain values in place of derived ones; check what entries expect."""
    # Only the winning entries count for other settings.
    merged = [entry for entry in merge_layers(layers).values() if find_key(entry.name) is not None]
    values: dict[str, Any] = {}

    def value(name: str) -> Any:
        return values.get(name, table()[name].default)

    # Values that cannot be read count as the default here; the resolver reports them.
    for entry in merged:
        if not isinstance(entry.raw, DerivedValue):
            with suppress(ValueError):
                values[entry.name] = read_entry(entry)
    # Numbers of devices first: sizes for each rank are derived from them.
    derived = [entry for entry in merged if isinstance(entry.raw, DerivedValue)]
    derived.sort(key=lambda entry: not entry.name.startswith("trainer."))
    computed: dict[int, Entry] = {}
    for entry in derived:
        raw: Any = Reset()
        try:
            result = entry.raw.compute(value)
            # None unsets a setting that may be unset, and otherwise returns it to its default.
            if result is not None or table()[entry.name].optional:
                raw = result
                values[entry.name] = read_entry(Entry(entry.name, raw, entry.origin))
        except ValueError as error:
            if isinstance(raw, Reset):  # what was computed, and cannot be read, is reported later
                report.problems.append(f"{entry.origin}: {error}")
                report.broken.add(entry.name)
        computed[id(entry)] = Entry(entry.name, raw, entry.origin)
    report.problems += [
        f"{expectation.origin}: {expectation.otherwise}"
        for expectation in expectations
        if not expectation.holds(value)
    ]
    # A derived value that a higher layer replaced was not computed, and is left out.
    plain = [[computed.get(id(entry), entry) for entry in layer] for layer in layers]
    return [
        [entry for entry in layer if not isinstance(entry.raw, DerivedValue)] for layer in plain
    ]


def _list_switches(entry: Entry) -> tuple[str, ...]:
    """Return what an entry switches on: `rollout.mtp.enable`, `model_engine=veomni`."""
    # A switch counts under each of its names, alone and with its value.
    word, entry_name = normalize(entry.raw), entry.name.removeprefix(WRAPPER)
    names = () if word in (*OFF, "disabled", "sync") else _find_renamed(entry_name) or (entry_name,)
    return tuple(on for name in names for on in (name, f"{name}={word}"))


class Translator(TranslationState):
    """Translates one layer after the other into our names."""

    def translate(self, layer: Sequence[Entry]) -> list[Entry]:
        """Return the layer under our own names; adds problems and notes to the lists."""
        # Per layer: what it has set, and the parts of a reward function.
        self._settings = {}
        self.function = {}
        for entry in layer:
            self.entry_name = entry.name
            name = entry.name.removeprefix(WRAPPER)
            self._translate_entry(Entry(name, entry.raw, entry.origin))
        self._join_function()
        # Dynamic batches make a set size meaningless, which deserves a remark.
        for part in self.sized.keys() & {part for part, on in self.dynamic.items() if on}:
            remark = f"{part}.use_dynamic_bsz is on, so {part}.ppo_max_token_len_per_gpu counts"
            self.note(self.sized.pop(part), remark)
        self.flush()
        return [entry for _, entry in self._settings.values()]

    def refuse(self, entry: Entry, key: str, reason: str) -> None:
        """Report a key that is refused; keys with the same reason share a sentence."""
        self._refused.setdefault((entry.origin, reason), []).append(key)

    def flush(self) -> None:
        """Add the collected refusals and remarks of one layer to the lists."""
        for (origin, reason), keys in self._refused.items():
            self.problems.append(f"{origin}: {list_some(keys, 4)} {reason}.")
        for (origin, reason), keys in self._remarks.items():
            self.notes.append(f"{origin}: {list_some(keys, 4)}: {reason}.")
        self._refused, self._remarks = {}, {}

    def _translate_entry(self, entry: Entry) -> None:
        """Translate one entry, whose name has no wrapper any more."""
        name = entry.name
        if name == VERSION:
            return
        # A value that refers to other settings.
        if isinstance(entry.raw, str) and "${" in entry.raw:
            names = (name,) if find_key(name) is not None else _find_renamed(name)
            follows = _parse_reference(entry.raw)
            for target in names if follows else ():
                self.put(entry, target, follows)
            if not names or not follows:
                problem = f"{name}: '{entry.raw}' is not filled in; write the value itself."
                self.problem(entry, problem)
        elif isinstance(entry.raw, Reset):
            # `~key`: only what is a setting of ours, by any of its names, can be taken back.
            for target in _find_renamed(name) or (name,):
                self.put(entry, target, entry.raw)
        elif name in TRANSLATIONS:
            TRANSLATIONS[name](self, entry)
        elif find_key(name) is not None:
            self.put(entry, name, entry.raw)
        else:
            self._translate_foreign(entry, name, foreign_names())

    def _translate_foreign(self, entry: Entry, name: str, names: ForeignNames) -> None:
        """Look a foreign name up in the tables, from the most to the least specific."""
        # A value that verl's own files have asks for nothing.
        own_value = normalize(entry.raw) in verl_file_values().get(name, ())
        if renamed := _find_renamed(name):
            for target in renamed:
                key = find_key(target)
                # A target that is not ours is a foreign name itself, and is looked up in turn.
                if key is None and not own_value:
                    self._translate_entry(Entry(target, entry.raw, entry.origin))
                elif key is not None and (key.optional or not is_unset(entry.raw)):
                    self.put(entry, target, entry.raw)
            if name in names.remarks:
                self.note(entry, names.remarks[name])
        elif name in names.tied:
            self._require_same(entry, names.tied[name])
        elif own_value:
            if not self.verl:  # in a line of verl, what it takes anyway asks for nothing
                self.tell(entry, "only verl has it, and takes that value anyway")
        elif name in names.same:
            self._require_value(entry, *names.same[name])
        elif ".megatron" in name:
            self.refuse(entry, name, f"cannot be set here: {names.refused['megatron.*']}")
        elif remark := _nearest_row(names.remarked, name):
            self.tell(entry, remark)
        elif (
            switch := _nearest_row(names.behind, name)
        ) not in self.switched_on and name not in names.refused:
            self.tell(entry, f"without {switch} it changes nothing, as in verl")
        elif remark := _nearest_row(names.refused, name):
            self.refuse(entry, name, f"cannot be set here: {remark}")
        elif name in verl_file_values():
            self.refuse(entry, name, "cannot be set here: only verl has it; leave it out")
        elif "@" in name:
            self.refuse(entry, name, "cannot be set here: groups of Hydra's files are not read")
        elif self.verl and name not in sections():
            if near := _find_near_key(name):
                self.problem(entry, f"there is no setting '{name}'. Did you mean '{near}'?")
                return
            remark = "it is no setting of this program, nor in verl's own files; leave it out"
            self.refuse(entry, name, f"cannot be set here: {remark}")
        else:
            self.put(entry, name, entry.raw)

    def _require_value(self, entry: Entry, allowed: Sequence[str], reason: str) -> None:
        """Refuse a value other than those that change nothing here."""
        if normalize(entry.raw) not in allowed:
            shown = "null" if entry.raw is None else entry.raw
            self.refuse(entry, f"{entry.name}={shown}", f"cannot be honoured: {reason}")

    def _require_same(self, entry: Entry, target: str) -> None:
        """Require that a foreign name has the same value as the setting it is tied to."""
        # Unset values and verl's -1 follow the other setting anyway.
        if is_unset(entry.raw) or str(entry.raw) == "-1":
            return
        # Seeds: all draws follow from one, so other seeds cannot be honoured.
        if target == "trainer.seed":  # one seed draws everything, and not verl's numbers
            if entry.name == "data.seed":
                self.put(entry, target, DerivedValue(lambda value: entry.raw, yields=True))
            self.tell(entry, "trainer.seed draws everything, and data.seed sets it")
            return
        expected = PRECISIONS.get(str(entry.raw), str(entry.raw)).strip().lower()
        self.demand(
            entry,
            lambda value: str(value(target)).lower() == expected,
            f"{entry.name} is {target} here and cannot differ from it; set {target}={entry.raw} "
            "instead.",
        )

    def _join_function(self) -> None:
        """Join verl's path and name of a reward function."""
        # The file may be named in one entry and the function in another.
        file, name = self.function.get("path"), self.function.get("name")
        if file is not None:
            tail = "" if name is None else f":{name.raw}"
            self.entry_name = "custom_reward_function.path"
            self.put(file, "reward.function", f"{file.raw}{tail}")
        elif name is not None and str(name.raw) != "compute_score":
            self.problem(
                name, "a function is named without its file; use --reward_function FILE:NAME."
            )


def _find_near_key(name: str) -> str:
    """Return a setting of ours whose name is nearly that of another program's, or "".

    It is in the same group, and has the same number of words or the same last word.
    """
    group, _, leaf = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in table() if key.rpartition(".")[0] == group}
    words = [word for word in siblings if word.count("_") == leaf.count("_")]
    near = [siblings[word] for word in get_close_matches(leaf, words, n=1, cutoff=0.85)]
    near += [key for key in table() if key.startswith(f"{group}.") and key.endswith(f".{leaf}")]
    return "".join(near[:1])


def _parse_reference(text: str) -> DerivedValue | None:
    """Return `${x}` or `a/${x}` as a derived value; None when it refers to a foreign name."""
    # Reference -> the name of our setting.
    names = {
        reference: reference[2:-1].removeprefix(WRAPPER)
        for reference in re.findall(r"\$\{.*?\}", text)
    }
    if any(name not in table() for name in names.values()):
        return None

    def compute(value: Lookup) -> Any:
        if text in names:
            return value(names[text])
        filled = text
        for reference, name in names.items():
            filled = filled.replace(reference, str(value(name)))
        return filled

    return DerivedValue(compute)


def _find_renamed(name: str) -> tuple[str, ...]:
    """Return the names of our settings for a foreign name; () when it has no other name."""
    # An exact name first, then groups that end in `.*`.
    renamed = foreign_names().renamed
    if name in renamed:
        return renamed[name]
    for old, new in renamed.items():
        if old.endswith(".*") and name.startswith(old[:-1]):
            return tuple(target[:-1] + name[len(old) - 1 :] for target in new)
    return ()


def _nearest_row(rows: Mapping[str, str], name: str) -> str:
    """Return the text for a name, or for the nearest group that contains it."""
    if name in rows:
        return rows[name]
    # From the longest group to the shortest.
    parts = name.split(".")
    groups = (".".join(parts[:cut]) + ".*" for cut in range(len(parts), 0, -1))
    return next((rows[group] for group in groups if group in rows), "")
