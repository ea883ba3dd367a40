"""Python functions and MCP servers as the tools of an episode, inside the environment process.

A schema comes from a function's type hints and docstring; each call is checked against it. What is
wrong with a call is a message that the policy reads. The worker loads this file by path with
`environment.python`: standard library only, Python 3.9 or newer.
"""

from __future__ import annotations

import asyncio
import difflib
import enum
import functools
import inspect
import json
import os
import re
import time
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KINDS = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
PYTHON_TYPES: dict[Any, tuple[type, ...]] = {"string": (str,), "number": (int, float)}
NAMES = {
    "string": "a text", "integer": "an integer", "number": "a number", "boolean": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip
HINTS = "str, int, float, bool, list, dict, Literal, an Enum, or Optional of one of these"
UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))


class ToolError(Exception):
    """What is wrong with a call, for the policy."""


@dataclass(frozen=True)
class Tool:
    """A tool; `run` takes its arguments. `hints` are the types of a Python function.

    Without hints, `run` checks the arguments itself.
    """

    schema: dict[str, Any]
    run: Callable[..., Any]
    hints: dict[str, Any] | None

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        return str(self.schema["function"]["name"])


class ToolEnvironment:
    """Runs the calls of each message side by side; a message without calls ends the episode."""

    limits_calls = True

    def __init__(self, tools: dict[str, Tool], timeout: float, worker: Any) -> None:
        self.tools = [tool.schema for tool in tools.values()]
        self._tools = tools
        self._timeout = timeout
        self._worker = worker

    def reset(self, row: dict[str, Any]) -> None:
        """Begin with the messages of the row."""

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer the calls of a message, in their order; `error` says that none can be read."""
        if error := message.get("error"):
            reply = {"role": "tool", "content": f"Error: {error}"}
            return {"messages": [reply], "done": False, "error": error}
        calls = message.get("tool_calls") or []
        runs = await asyncio.gather(*(self._run(call) for call in calls))
        replies = [
            {"role": "tool", "content": run.text, "name": run.name, "tool_call_id": call.get("id")}
            for call, run in zip(calls, runs)  # noqa: B905  (strict is newer than Python 3.9)
        ]
        return {
            "messages": replies, "done": not calls,
            "error": "; ".join(run.text for run in runs if run.failed),
            # A name that is no tool's has run nothing.
            "tools": [(run.name, run.seconds) for run in runs if run.name in self._tools],
            "timeouts": sum(run.late for run in runs), "stuck": any(run.stuck for run in runs),
        }  # fmt: skip

    async def _run(self, call: dict[str, Any]) -> Run:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        started = time.monotonic()
        failed, late, stuck = True, False, False
        try:
            tool = self._tools.get(name)
            if tool is None:
                near = difflib.get_close_matches(name, self._tools, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ToolError(
                    f"there is no tool {name!r}.{hint} The tools are: {', '.join(self._tools)}."
                )
            if tool.hints is not None:
                arguments = read_arguments(tool, arguments, tool.hints)
            run = functools.partial(tool.run, **arguments)
            value = await self._worker.run_call(run, timeout=self._timeout)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            failed = False
        except ToolError as error:
            text = f"Error: {error}"
        except self._worker.TimedOut as error:
            text, late, stuck = f"Error: {error}", True, error.stuck
        except BaseException as error:
            text = f"Error: {self._worker.describe_error(error)}"
        return Run(name, text, time.monotonic() - started, failed, late, stuck)


@dataclass(frozen=True)
class Run:
    """A call that was run, and its text; `stuck`: its thread still runs."""

    name: str
    text: str
    seconds: float
    failed: bool
    late: bool
    stuck: bool


async def load(
    spec: str | None, commands: list[str], timeout: float, worker: Any
) -> Callable[[], ToolEnvironment]:
    """Return what makes tool environments of FILE.py[:NAME,NAME] and of MCP servers.

    `worker` is the module that runs the process. Raises its Problems, with all mistakes.
    """
    tools, problems = await _load_functions(spec, worker) if spec else ([], [])
    if problems:
        raise worker.Problems(*problems)
    if commands:
        tools += await worker.load_sibling("mcp").load(commands, Tool, ToolError, worker)
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise worker.Problems(
                f"There are two tools {tool.name!r}: choose tools with --tools FILE.py:NAME,NAME, "
                "or leave one of the MCP servers out."
            )
        by_name[tool.name] = tool
    return lambda: ToolEnvironment(by_name, timeout, worker)


async def _load_functions(spec: str, worker: Any) -> tuple[list[Tool], list[str]]:
    """Return the tools of a file, and what is wrong with their functions."""
    file, _, names = spec.rpartition(":") if not spec.endswith(".py") else (spec, "", "")
    label = f"--tools {os.path.basename(file)}"
    module = await worker.run_call(worker.import_file, file, label)
    if names:
        functions = [worker.find_name(module, name, label) for name in names.split(",")]
    else:
        public = (v for n, v in vars(module).items() if not n.startswith("_"))
        functions = [v for v in public if inspect.isfunction(v) and v.__module__ == module.__name__]
    if not functions:
        raise worker.Problems(f"{label}: the file has no function. Write one for each tool.")
    tools, problems = [], []
    for function in functions:
        if not inspect.isfunction(function):
            problems.append(f"{label}: a {type(function).__name__} is not a tool; name functions.")
            continue
        tool, mistakes = read_function(function)
        line = function.__code__.co_firstlineno
        problems += [f"{label}: {function.__name__} (line {line}) {text}." for text in mistakes]
        tools.append(tool)
    return tools, problems


def read_function(function: Callable[..., Any]) -> tuple[Tool, list[str]]:
    """Return a function as a tool, and what its signature and docstring lack."""
    name = function.__name__
    problems = []
    description, texts = read_docstring(inspect.getdoc(function) or "")
    if not description:
        problems.append("has no docstring; write what it does, which the policy reads")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        return Tool({}, function, {}), [f"has a type hint that does not work: {error}"]
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            problems.append(f"takes {parameter}; a tool has named arguments only")
            continue
        if parameter.name not in hints:
            problems.append(
                f"has no type hint for {parameter.name!r}; write {parameter.name}: TYPE, which is "
                f"{HINTS}"
            )
            continue
        schema = describe_type(hints[parameter.name])
        if schema is None:
            problems.append(
                f"has the type {hints[parameter.name]} for {parameter.name!r}; write {HINTS}"
            )
            continue
        if parameter.name in texts:
            schema["description"] = texts[parameter.name]
        default = parameter.default
        if default is parameter.empty:
            required.append(parameter.name)
        default = default.value if isinstance(default, enum.Enum) else default
        if isinstance(default, (str, int, float, bool, list, dict)):
            schema["default"] = default
        properties[parameter.name] = schema
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }
    return Tool(schema, function, hints), problems


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and the text of each argument in a section `Args:` (Google style)."""
    head, *sections = re.split(r"(?m)^(?:Args|Arguments|Parameters):[ ]*\n", text, maxsplit=1)
    texts: dict[str, str] = {}
    name = ""
    for line in sections[0].splitlines() if sections else []:
        if line and not line[0].isspace():
            break  # the next section
        entry = re.match(r"\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if entry:
            name = entry[1]
            texts[name] = entry[2]
        elif name:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    head = re.split(r"(?m)^(?:Returns|Raises|Yields|Examples?):[ ]*$", head)[0]
    return " ".join(head.split()), texts


def describe_type(hint: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a type hint; None for a type that JSON lacks."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin in UNIONS:
        schemas = [describe_type(item) for item in arguments if item is not type(None)]
        if len(schemas) != 1 or schemas[0] is None:
            return None
        return {**schemas[0], "nullable": True} if len(arguments) > 1 else schemas[0]
    if origin is typing.Literal:
        return _describe_values(arguments)
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _describe_values([member.value for member in hint])
    kind = KINDS.get(origin or hint)
    if kind is None:
        return None
    # The second argument of a dict is the type of its values.
    if arguments and kind in ("array", "object"):
        inner = describe_type(arguments[-1])
        key = "items" if kind == "array" else "additionalProperties"
        return None if inner is None else {"type": kind, key: inner}
    return {"type": kind}


def _describe_values(values: Any) -> dict[str, Any] | None:
    kinds = {KINDS.get(type(value)) for value in values}
    if len(kinds) != 1 or None in kinds:
        return None
    return {"type": kinds.pop(), "enum": list(values)}


def read_arguments(tool: Tool, arguments: Any, hints: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as the tool takes them; ToolError for all that is wrong."""
    parameters = tool.schema["function"]["parameters"]
    properties = parameters["properties"]
    listed = ", ".join(f"{name}: {name_type(schema)}" for name, schema in properties.items())
    missing = [name for name in parameters["required"] if name not in arguments]
    problems = [f"{name!r} is missing" for name in missing]
    values = {}
    for name, value in arguments.items():
        if name not in properties:
            problems.append(f"there is no argument {name!r}")
        elif not fits(value, properties[name]):
            shown = json.dumps(value, ensure_ascii=False)[:60]
            problems.append(f"{name!r} must be {name_type(properties[name])}, not {shown}")
        else:
            values[name] = convert(value, hints[name])
    if problems:
        raise ToolError(f"{tool.name}: {'; '.join(problems)}. It takes {listed or 'no arguments'}.")
    return values


def name_type(schema: dict[str, Any]) -> str:
    """Return a schema in words."""
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(v, ensure_ascii=False) for v in schema["enum"])
    return NAMES.get(str(schema.get("type")), "any value")


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a JSON value has the type of a schema that `describe_type` made."""
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and not any(value == v and type(value) is type(v) for v in schema["enum"]):
        return False
    kind = schema.get("type")
    if kind == "array":
        inner = schema.get("items", {})
        return isinstance(value, list) and all(fits(item, inner) for item in value)
    if kind == "object":
        inner = schema.get("additionalProperties", {})
        return isinstance(value, dict) and all(fits(item, inner) for item in value.values())
    if isinstance(value, bool):
        return kind in ("boolean", None)
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return kind is None or isinstance(value, PYTHON_TYPES.get(kind, ()))


def convert(value: Any, hint: Any) -> Any:
    """Return a value that fits as its type hint has it: a member of an Enum, 3 for 3.0."""
    if typing.get_origin(hint) in UNIONS:
        hint = next(item for item in typing.get_args(hint) if item is not type(None))
    if value is None:
        return None
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return hint(value)
    return hint(value) if hint in (int, float) else value
