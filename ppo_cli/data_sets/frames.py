"""Finds the text that a chat template puts around the contents of messages.

Many templates only write contents out. Their text for certain roles is then the same around all
contents, and is rendered once. That a template does not look at a content is seen in two ways: its
parts are of few kinds, and the content that it is given for a trial raises an error when it is
compared, searched, cut or measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ppo_cli.records import Message

# Contents of the trial: what a filter would cut off, escape or change is in them.
MARK = " \n<{}>\"é&'\\%Ab\n "
# Parts of a template besides those that `keeps_contents` looks into.
_PARTS = (
    "Template", "Output", "TemplateData", "Name", "NSRef", "Const", "List", "Tuple", "Slice",
    "Getattr", "Getitem", "Keyword", "Operand", "Add", "Sub", "Neg", "Not", "And", "Or", "CondExpr",
    "If", "For", "Assign", "Break", "Continue",
)  # fmt: skip
_FILTERS = ("tojson", "trim", "length", "default")
_TESTS = ("defined", "undefined", "none", "string", "mapping", "iterable", "true", "false")
_FUNCTIONS = ("raise_exception", "namespace")
_HOOKS = (
    "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "len", "iter", "contains", "getitem", "mul",
    "rmul", "mod", "rmod", "repr", "format",
)  # fmt: skip


class _ExaminedError(Exception):
    """Raised where a template looks at a content."""


def _refuse(*_: Any) -> Any:
    raise _ExaminedError


class _Content(str):
    """A text that can be written and joined, and nothing else."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return _Content if name == "__class__" else _refuse()

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return _Content(str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return _Content(str.__add__(other, self))


for _hook in _HOOKS:
    setattr(_Content, f"__{_hook}__", _refuse)


def find_frame(render: Callable[[Sequence[Message]], str], roles: Sequence[str]) -> str | None:
    """Return the text around contents of messages with these roles, with `%s` for each content.

    None if the template looks at a content, refuses the roles, or does not write each content once
    and in order. `render` applies a template that `keeps_contents`.
    """
    marks = [MARK.format(number) for number in range(len(roles))]
    contents = map(_Content, marks)
    try:
        text = render([{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)])
    except Exception:  # rendered again with the contents of a row, for the message
        return None
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    if parts[1::2] != marks:
        return None
    return "%s".join(part.replace("%", "%%") for part in parts[::2])


def keeps_contents(template: Any) -> bool:
    """Whether all parts of a parsed template either keep the class of a content or examine it.

    Parts that join texts in another way, search for a content in a text, or depend on time or
    chance are not among them.
    """
    from jinja2 import nodes

    def has_constants(node: Any) -> bool:
        arguments = [*node.args, *(keyword.value for keyword in node.kwargs)]
        arguments += filter(None, [node.dyn_args, node.dyn_kwargs])
        return all(isinstance(argument, nodes.Const) for argument in arguments)

    def is_known(node: Any) -> bool:
        match node:
            case nodes.Filter():
                return node.name in _FILTERS and has_constants(node)
            case nodes.Test():
                return node.name in _TESTS
            case nodes.Call(node=nodes.Name(name=name)):
                return name in _FUNCTIONS
            case nodes.Call():
                return has_constants(node)
            case nodes.Compare():
                searches = any(operand.op in ("in", "notin") for operand in node.ops)
                return not searches or isinstance(node.expr, nodes.Const)
            case nodes.Mod():
                return isinstance(node.right, nodes.Const)
        return type(node).__name__ in _PARTS

    def examines_json(node: Any) -> bool:
        written = isinstance(node, nodes.Output | nodes.Add)
        inner = () if written else node.iter_child_nodes()
        return any(isinstance(child, nodes.Filter) and child.name == "tojson" for child in inner)

    parts = [template, *template.find_all(nodes.Node)]
    return all(map(is_known, parts)) and not any(map(examines_json, parts))
