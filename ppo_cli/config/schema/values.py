"""Turns raw values into typed ones: strict, but friendly.

Every layer hands over text, so a number, a switch or a list is read in one way, wherever it was
written. A Python list holds items that are already separate (YAML). A tuple is what a repeated flag
collected; each text in it may hold several items.
"""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from ppo_cli.config.models.known_models import VALUE_HEAD_ADVICE
from ppo_cli.config.schema.keys import Key, offered_choices
from ppo_cli.errors import did_you_mean

# Far more than settings need, and read within a second: a YAML bomb has millions.
MAX_YAML_NODES = 100_000
YES = frozenset({"true", "yes", "on", "1"})
NO = frozenset({"false", "no", "off", "0"})
UNSET = frozenset({"null", "none", "~"})
# Choices of earlier versions -> what to use instead.
REMOVED_CHOICES = {"value_head": VALUE_HEAD_ADVICE}


class Quoted(str):
    """A text that was written in quotes: text settings keep it unchanged."""

    __slots__ = ()


def unquote(raw: str) -> str:
    """Return the text of a variable or an override, without quotes that surround all of it."""
    text = raw.strip()
    mark = text[:1]
    # The closing quote must be the last character: 'a' or 'b' is not one quoted text.
    if len(text) >= 2 and mark in ("'", '"') and text.find(mark, 1) == len(text) - 1:
        return Quoted(text[1:-1])
    return text


def is_unset(raw: Any) -> bool:
    """Return whether a raw value is null in any spelling."""
    return raw is None or (isinstance(raw, str) and raw.lower() in UNSET)


def read_value(key: Key, raw: Any) -> Any:
    """Return a raw value in the type of its setting; ValueError says what is wrong.

    Quotes do not turn a list, number, switch or null into text unless the setting is text.
    """
    texts = key.kind is str or key.is_list
    if key.rule is not None and raw == "auto":
        return None
    if (key.optional or key.is_list) and is_unset(raw) and not (texts and isinstance(raw, Quoted)):
        return None if key.optional else ()
    if raw is None:
        raise ValueError("cannot be null")
    if key.names:
        return key.names.read(_read_scalar(raw, "one word"))
    return _read_kind(key.kind, list_files(raw) if key.files else raw)


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> yaml.Node | None:
    """Parse a YAML document; raises YAMLError, also for aliases that do not come to an end.

    An anchor may be repeated, but neither inside itself nor so often that the document would have
    more than MAX_YAML_NODES values.
    """
    try:
        root: yaml.Node | None = yaml.compose(text, Loader=loader)
        if root is not None:
            _count_nodes(root, {})
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    return root


def load_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """Return the value of a YAML document with `parse_yaml`'s limits; raises YAMLError.

    A repeated key in one group is refused; PyYAML would keep the last.
    """
    root = parse_yaml(text, loader)
    if root is None:
        return None
    # Checked before construction, while line numbers are known.
    for key in repeated_keys(root):
        raise _yaml_error(key, f"the key '{key.value}' is repeated in one group")
    maker = loader("")
    try:
        return maker.construct_document(root)
    except (ValueError, RecursionError) as error:  # a date such as 2001-99-99
        raise yaml.YAMLError(str(error)) from None
    finally:
        maker.dispose()


def _count_nodes(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return the number of values below a node, with its aliases expanded."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    size = sizes.get(id(node), -1)
    if size > 0:
        return size
    # 0 marks a node that is being counted: an alias to it would never end.
    if size == 0:
        raise _yaml_error(node, "this value contains itself by an alias (*)")
    sizes[id(node)] = 0
    pairs = isinstance(node, yaml.MappingNode)
    inner = [item for pair in node.value for item in pair] if pairs else node.value
    size = 1 + sum(_count_nodes(item, sizes) for item in inner)
    if size > MAX_YAML_NODES:
        raise _yaml_error(node, f"with its aliases (*) it holds more than {MAX_YAML_NODES} values")
    sizes[id(node)] = size
    return size


def repeated_keys(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Yield each key below a node that is repeated in its group."""
    if isinstance(node, yaml.ScalarNode):
        return
    seen: set[str] = set()
    for item in node.value:
        if isinstance(node, yaml.MappingNode):
            key, item = item
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                yield key
            seen.add(str(key.value))
        yield from repeated_keys(item)


def _yaml_error(node: yaml.Node, why: str) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, why, node.start_mark)


def read_free(raw: Any) -> Any:
    """Return a free-form value in the type that YAML gives it; quoted text stays text."""
    if isinstance(raw, Quoted):
        return str(raw)
    if isinstance(raw, list):
        return [read_free(item) for item in raw]
    if not isinstance(raw, str):
        return raw
    try:
        return load_yaml(raw)
    except yaml.YAMLError:
        raise ValueError(f"'{raw}' is not a value; put text that has signs into quotes") from None


def _read_kind(kind: Any, raw: Any) -> Any:
    """Return a raw value converted to the declared type `kind`; ValueError if it does not fit.

    `kind` is a Literal, a tuple, a dict or a scalar; a union means one text or several. None is not
    part of it: `read_value` handles unset values.
    """
    # By the declared type: a choice, a list, text or several texts, a group, or a scalar.
    origin = get_origin(kind)
    if origin is Literal:
        return _read_choice(tuple(get_args(kind)), raw)
    if origin is tuple:
        return _read_list(get_args(kind), raw)
    if origin in (Union, types.UnionType):
        several = isinstance(raw, list | tuple) or _is_bracketed(raw)
        several = several or ("," in str(raw) and not isinstance(raw, Quoted))
        return _read_list((str, ...), raw) if several else _read_text(raw)
    if origin is dict:
        return _read_mapping(raw)
    return _SCALARS[kind](raw)


def _read_scalar(raw: Any, expected: str) -> str:
    if isinstance(raw, list | tuple | dict):
        raise ValueError(f"is a {'group' if isinstance(raw, dict) else 'list'}, not {expected}")
    return str(raw).strip()


def _read_text(raw: Any) -> str:
    return _check_utf8(_read_scalar(raw, "one text"))


def _check_utf8(text: str) -> str:
    """Return a text unchanged; ValueError if it cannot be written as UTF-8."""
    # NUL and lone surrogates would break files and HTTP bodies later.
    if not text.isprintable() and re.search("[\0\ud800-\udfff]", text):
        shown = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
        raise ValueError(f"'{shown}' is not text in UTF-8")
    return text


def _read_number(raw: Any) -> float:
    """Return a finite float; ValueError for anything else."""
    text = _read_scalar(raw, "a number")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a number") from None
    # float() accepts `1_000` and True, which are slips in a settings file.
    if isinstance(raw, bool) or "_" in text:
        raise ValueError(f"'{text}' is not a number")
    if not math.isfinite(value):
        raise ValueError(f"'{text}' is not a finite number")
    return value


def _read_integer(raw: Any) -> int:
    """Return an integer, also of `1e3` or `2.0`; ValueError for anything else."""
    text = _read_scalar(raw, "a whole number")
    # Integers are read without a float, which would round large ones.
    try:
        return int("" if isinstance(raw, bool) or "_" in text else text)
    except ValueError:
        pass
    value = _read_number(raw)
    if value != int(value):
        raise ValueError(f"'{text}' is not a whole number")
    return int(value)


def read_switch(raw: Any) -> bool:
    """Return the bool of `true`, `off` and similar words; ValueError for anything else."""
    text = _read_scalar(raw, "true or false")
    if text.lower() in YES:
        return True
    if text.lower() in NO:
        return False
    raise ValueError(f"'{text}' is neither true nor false")


def _read_choice(choices: tuple[Any, ...], raw: Any) -> Any:
    text = _read_scalar(raw, "one word")
    if text in choices:
        return text
    offered = offered_choices(choices)
    advice = f" {REMOVED_CHOICES[text]}" if text in REMOVED_CHOICES else did_you_mean(text, offered)
    raise ValueError(f"'{text}' is not one of {', '.join(offered)}.{advice}")


def _read_list(items: tuple[Any, ...], raw: Any) -> tuple[Any, ...]:
    """Return a tuple of values with the declared types `items`.

    `(kind, ...)` allows any length. Raises ValueError for another length or type.
    """
    parts = parse_list(raw, text=items[0] is str)
    if items[1:] == (...,):
        if items[0] is str:  # in quotes, spaces around an item belong to it
            return tuple(
                _check_utf8(str(p)) if isinstance(p, Quoted) else _read_text(p) for p in parts
            )
        return tuple(_read_kind(items[0], part) for part in parts)
    if len(parts) != len(items):
        raise ValueError(f"takes {len(items)} values, not {len(parts)}")
    return tuple(_read_kind(kind, part) for kind, part in zip(items, parts, strict=True))


def parse_list(raw: Any, *, text: bool = False) -> list[Any]:
    """Return the items of a list in any spelling; ValueError when it is not a list.

    With `text`, a comma inside quotes belongs to the item.
    """
    # A tuple is read item by item, a list is taken as it is, and text is split at commas.
    if isinstance(raw, tuple):
        return [part for item in raw for part in parse_list(item, text=text)]
    if isinstance(raw, list):
        return raw
    if not isinstance(raw, str):
        return [raw]
    if _is_bracketed(raw):
        return _parse_flow_list(raw)
    if text and isinstance(raw, Quoted):
        return [raw]
    return [part.strip() for part in raw.split(",") if part.strip()]


def list_files(raw: Any) -> list[Any]:
    """Return the names in a list of files; commas in names of existing files do not split them.

    Of several ways to join unquoted parts, the longest existing name wins.
    """
    if isinstance(raw, tuple):
        return [name for item in raw for name in list_files(item)]
    # Parts that are separate already, joined again where a comma belongs to a name.
    if not isinstance(raw, str) or (isinstance(raw, Quoted) and not _is_bracketed(raw)):
        parts = parse_list(raw, text=True)
        texts = [str(part) for part in parts]  # what is not a text is refused later
        return _join_existing(
            parts, lambda first, end: [sep.join(texts[first:end]) for sep in (",", ", ")]
        )
    if not _is_bracketed(raw):
        pieces = raw.split(",")
        return _join_existing(pieces, lambda first, end: [",".join(pieces[first:end])])
    parse_list(raw)  # refuses what is not a list
    # A bracketed list: marks of the YAML nodes give the text between two items.
    text = f"[{raw[1:-1]}]"
    node = parse_yaml(text, yaml.BaseLoader)
    nodes = node.value if isinstance(node, yaml.SequenceNode) else []
    spans = [(item.start_mark.index, item.end_mark.index) for item in nodes]
    names = [
        Quoted(item.value) if isinstance(item, yaml.ScalarNode) and item.style else text[start:end]
        for item, (start, end) in zip(nodes, spans, strict=True)
    ]
    joined = _join_existing(names, lambda first, end: [text[spans[first][0] : spans[end - 1][1]]])
    return [Quoted(name) for name in joined]


def _join_existing(parts: list[Any], join: Callable[[int, int], list[str]]) -> list[Any]:
    """Return the parts, with neighbours joined that together name an existing file or folder."""
    names: list[Any] = []
    first = 0
    while first < len(parts):
        name, after = parts[first], first + 1
        # The longest run of parts that is an existing name.
        for end in range(len(parts), first + 1, -1):
            # A quoted part is complete: it never joins its neighbours.
            if any(isinstance(part, Quoted) for part in parts[first:end]):
                continue
            texts = [text.strip() for text in join(first, end)]
            existing = [text for text in texts if _exists(text)]
            if existing:
                name, after = existing[0], end
                break
        names.append(name)
        first = after
    return [name for name in names if isinstance(name, Quoted) or str(name).strip()]


def _exists(name: str) -> bool:
    """Return whether a name is a file, a folder, or FOLDER:SPLIT."""
    folder = name.rpartition(":")[0]
    return os.path.exists(os.path.expanduser(name)) or os.path.isdir(os.path.expanduser(folder))


def _is_bracketed(raw: Any) -> bool:
    return isinstance(raw, str) and raw[:1] in ("[", "(") and raw[-1:] in ("]", ")")


def _parse_flow_list(raw: str) -> list[Any]:
    try:
        parsed = load_yaml(f"[{raw[1:-1]}]", yaml.BaseLoader)
    except yaml.YAMLError:
        raise ValueError(f"'{raw}' is not a list such as [a, b]") from None
    return [Quoted(item) for item in parsed]


def _read_mapping(raw: Any) -> dict[str, Any]:
    """Return a mapping, also of YAML text; ValueError for anything else."""
    # Text is read as YAML, so that a variable or an override can hold a group.
    value = raw
    if isinstance(raw, str):
        try:
            value = load_yaml(raw)
        except yaml.YAMLError:
            value = None
    if not isinstance(value, dict):
        raise ValueError(f"'{raw}' is not a group such as {{name: value}}")
    return {str(k): v for k, v in value.items()}


# How each scalar type is read.
_SCALARS: dict[Any, Callable[[Any], Any]] = {
    str: _read_text,
    float: _read_number,
    int: _read_integer,
    bool: read_switch,
}
