"""The settings as a flat table, made from the schema.

Key names, flags, ranges and help are read from the declarations; the command line, the checks, the
plan and the reference page use this table.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ppo_cli.config.schema.algorithm import Conflict, Identity, Section
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.reward import ApiReward, ModelReward
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.unset import Rule
from ppo_cli.errors import did_you_mean
from ppo_cli.plugins import Names

S = TypeVar("S", bound=Section)

# Words of verl that are read and then refused with what to use instead; never suggested.
NOT_OFFERED: Final = frozenset({"megatron", "sglang", "trtllm"})


def offered_choices(choices: Iterable[Any]) -> list[str]:
    """Return the choices that this program offers."""
    return [str(choice) for choice in choices if choice not in NOT_OFFERED]


@dataclass(frozen=True)
class Key:
    """One setting."""

    name: str
    kind: Any
    optional: bool
    default: Any
    help: str
    flag: str | None = None
    env: str | None = None
    limits: tuple[tuple[str, float], ...] = ()
    usual: tuple[float, float] | None = None
    identity: Identity = "run"
    files: bool = False
    consent: bool = False
    common: bool = False
    advice: str = ""
    absent: str = ""  # what no value means, if it may have none
    names: Names | None = None  # of a setting whose names packages may add to
    rule: Rule | None = None  # how an unset value is found
    unused: tuple[str, ...] = ()  # conditions under which it has no effect, its own first

    @property
    def is_list(self) -> bool:
        """Whether several values may be given."""
        # pydantic's type of a list is a tuple of any length; a pair has a fixed one.
        return get_origin(self.kind) is tuple and get_args(self.kind)[1:] == (...,)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words of a setting with a choice, without those of packages; empty for others."""
        if self.names:
            return tuple(self.names.table)
        item = get_args(self.kind)[0] if self.is_list else self.kind
        return tuple(str(a) for a in get_args(item)) if get_origin(item) is Literal else ()


def find_conflicts(section: Section, at: str = "", below: str = "") -> Iterator[Finding]:
    """Yield the declared conflicts of a section, then of those below it, by keys below it.

    `at` is the name of the outermost section, for the sentences, `below` the path from there to
    this section; both are "" or end with a dot.
    """
    for row in declared_conflicts(type(section)):
        if row.applies(section):
            keys = tuple(f"{below}{key}" for key in row.keys.split())
            yield Finding(keys, row.text(section, f"{at}{below}"))
    for name in type(section).model_fields:
        inner = getattr(section, name)
        # A judge and a reward model are checked where they score, with what a part sets.
        if isinstance(inner, Section) and not isinstance(inner, ApiReward | ModelReward):
            yield from find_conflicts(inner, at, f"{below}{name}.")


def declared_conflicts(kind: type[Section]) -> Iterator[Conflict]:
    """Yield the rows of a section and of its bases."""
    for cls in kind.__mro__:
        yield from cls.__dict__.get("conflicts", ())


@cache
def table() -> dict[str, Key]:
    """Return every setting by dotted name, in the order of the schema."""
    return keys_of(Config)


@cache
def keys_of(kind: type[Section]) -> dict[str, Key]:
    """Return the settings of one section by their dotted names below it."""
    return dict(_collect_keys(kind, ""))


@cache
def sections() -> frozenset[str]:
    """Return the dotted names of all groups of settings."""
    names = set()
    for key in table():
        parts = key.split(".")[:-1]
        names |= {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
    return frozenset(names)


def find_key(name: str) -> Key | None:
    """Return the setting of this name; `a.b.c` finds `a.b` when that has free-form keys."""
    settings = table()
    if name in settings:
        return settings[name]
    # From the longest group to the shortest: only a group with free-form keys takes any name.
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        owner = settings.get(".".join(parts[:cut]))
        if owner is not None:
            return owner if get_origin(owner.kind) is dict else None
    return None


def suggest_key(name: str) -> str:
    """Return ` Did you mean …?` for a key that is not known, or an empty string."""
    settings = table()
    leaf = name.rpartition(".")[2]
    for key in settings.values():
        # A flag's name, then the same last word in another group.
        if key.flag and leaf == key.flag.removeprefix("--"):
            return f" Did you mean '{key.name}' ({key.flag})?"
    # The same leaf in one other group is most likely meant.
    same_leaf = [k for k in settings if k.rsplit(".", 1)[-1] == leaf]
    if len(same_leaf) == 1:
        return f" Did you mean '{same_leaf[0]}'?"
    if same_leaf:
        return did_you_mean(name, same_leaf) or f" Known: {', '.join(same_leaf)}."
    leaves = get_close_matches(leaf, {k.rpartition(".")[2] for k in settings}, n=len(settings))
    return did_you_mean(name, [k for k in settings if k.rpartition(".")[2] in leaves])


def value_of(section: Section, key: str) -> Any:
    """Return the value of a setting by its dotted name."""
    node: Any = section
    while key:
        name, key = _split_first(node, key)
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    return node


def _split_first(node: Any, key: str) -> tuple[str, str]:
    """Return the first name of a dotted key and the rest; a name in free-form values has dots."""
    if isinstance(node, dict):
        for name in sorted(node, key=len, reverse=True):
            if f"{key}.".startswith(f"{name}."):
                return name, key[len(name) + 1 :]
    name, _, rest = key.partition(".")
    return name, rest


def with_settings(section: S, settings: Mapping[str, Any]) -> S:
    """Return a section, or all settings, with new values at these keys; they must be valid."""
    for key, value in settings.items():
        section = _replace_setting(section, key, value)
    return section


def _replace_setting(node: Any, key: str, value: Any) -> Any:
    """Return a section, or free-form values, with another value below it."""
    name, rest = _split_first(node, key)
    if isinstance(node, dict):
        return {**node, name: _replace_setting(node.get(name, {}), rest, value) if rest else value}
    inner = _replace_setting(getattr(node, name), rest, value) if rest else value
    return node.model_copy(update={name: inner})


def set_nested(tree: dict[str, Any], name: str, value: Any) -> str:
    """Put a value into a tree of groups; return the name of a plain value that blocks it, or ""."""
    *path, leaf = name.split(".")
    # An unset group on the way is created; a plain value on the way blocks the name.
    for depth, part in enumerate(path):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            return ".".join(path[: depth + 1])
        tree = tree[part]
    tree[leaf] = dict(value) if isinstance(value, dict) else value
    return ""


def nest_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted name as the nested dict that pydantic validates."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        set_nested(tree, name, value)
    return tree


def validation_messages(error: ValidationError, keys: Mapping[str, Key]) -> dict[str, str]:
    """Return a message for each value that pydantic refused, by dotted name."""
    messages = {}
    # The location of an error may be inside a free-form value.
    for detail in error.errors():
        dotted = [
            ".".join(map(str, detail["loc"][:cut])) for cut in range(len(detail["loc"]), 0, -1)
        ]
        for name in [name for name in dotted if name in keys][:1]:
            expected = describe_range(keys[name]) or detail["msg"]
            messages[name] = f"must be {expected}, but is {detail['input']}"
            if detail["type"] == "value_error":  # raised by a validator of the schema
                messages[name] = str(detail["ctx"]["error"])
            elif detail["type"] == "string_too_short":
                messages[name] = "must not be empty"
    return messages


def describe_range(key: Key) -> str:
    """Return the range of a setting in words: `above 0, at most 1`."""
    if key.choices:
        return "one of " + ", ".join(
            key.names.offered if key.names else offered_choices(key.choices)
        )
    comparisons = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    # pydantic keeps limits in metadata objects with one attribute each.
    limits = [
        f"{comparisons[name]} {f'{limit:g}' if isinstance(limit, float) else limit}"
        for name, limit in key.limits
        if name in comparisons
    ]
    limits += ["not empty" for name, _ in key.limits if name == "min_length"]
    return ", ".join(limits)


def range_remarks(config: Config, origins: Mapping[str, str]) -> Iterator[str]:
    """Remark on values far from what usually works; presets and defaults were tried."""
    kind = config.actor.policy_loss.loss_mode
    for name, key in table().items():
        value, origin = value_of(config, name), origins[name]
        if key.usual is None or value is None or origin.startswith(("default", "preset ")):
            continue
        if name.startswith("actor.clip_ratio") and kind != "vanilla":
            continue  # ratios of sequences, and weights, are clipped elsewhere
        low, high = key.usual
        if not low <= value <= high:
            yield f"{origin}: {name} {value:g} is far from what is usual: {low:g} to {high:g}."


def _collect_keys(
    section: type[Section], prefix: str, inherited: tuple[str, ...] = ()
) -> list[tuple[str, Key]]:
    """Return the keys of a section and of those below it, whose conditions they inherit."""
    keys: list[tuple[str, Key]] = []
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        kind = field.annotation
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        # A condition of a setting comes before those of its sections.
        condition = extra.get("unused")
        unused = () if condition == "" else (*((str(condition),) if condition else ()), *inherited)
        if isinstance(kind, type) and issubclass(kind, Section):
            keys += _collect_keys(kind, f"{dotted}.", unused)
        else:
            keys.append((dotted, _build_key(dotted, field, section.identity, unused)))
    return keys


def _build_key(name: str, field: FieldInfo, identity: Identity, unused: tuple[str, ...]) -> Key:
    """Return what a declared field says about its key: type, default, limits, flag, variable."""
    kind, optional = _without_none(field.annotation)
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    limits = [
        (word, getattr(limit, word))
        for limit in field.metadata
        for word in ("ge", "gt", "le", "lt", "min_length")
        if getattr(limit, word, None) is not None
    ]
    # The other facts have the names of the fields of a key.
    names = next((entry for entry in field.metadata if isinstance(entry, Names)), None)
    rule = next((entry for entry in field.metadata if isinstance(entry, Rule)), None)
    facts: dict[str, Any] = {"identity": identity, **extra, "unused": unused}
    facts |= {"names": names, "rule": rule}
    return Key(
        name=name, kind=kind, optional=optional or rule is not None, help=field.description or "",
        default=field.get_default(call_default_factory=True), limits=tuple(limits), **facts,
    )  # fmt: skip


def _without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without None, and whether None was part of it."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    # `X | None` is an optional X; what is left may still be a union.
    rest = tuple(a for a in get_args(kind) if a is not type(None))
    optional = len(rest) < len(get_args(kind))
    return (rest[0] if len(rest) == 1 else Union[rest]), optional  # noqa: UP007
