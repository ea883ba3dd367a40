"""Python functions and MCP servers as the tools of an episode, inside the environment process.

A schema comes from a function's type hints and docstring; each call is checked against it. What is
wrong with a call is a message that the policy reads. The worker loads this file by path with
`environment.python`: standard library only, Python 3.9 or newer.
"""

from __future__ import annotations

import asyncio
import collections
import collections.abc
import contextlib
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
from dataclasses import astuple, dataclass, replace
from typing import Any, cast

SEQUENCE = collections.abc.Sequence
KINDS: dict[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", dict: "object",
    **dict.fromkeys((list, tuple, set, frozenset, SEQUENCE), "array"),
}  # fmt: skip
NAMES = {
    "string": "a text", "integer": "an integer", "number": "a number", "boolean": "true or false",
    "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip
HINTS = (
    "str, int, float, bool, list, dict, Literal, an Enum, a dataclass, a model of pydantic, or a "
    "Union of these"
)
UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))


class ToolError(Exception):
    """What is wrong with a call, for the policy."""


@dataclass(frozen=True)
class Tool:
    """A tool; `run` takes its arguments. `hints` are the types of a Python function.

    Without hints, `run` checks the arguments itself. `source` is the flag that offers it, `server`
    the MCP server.
    """

    schema: dict[str, Any]
    run: Callable[..., Any]
    hints: dict[str, Any] | None
    source: str
    server: Any = None

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        return str(self.schema["function"]["name"])


class ToolEnvironment:
    """Runs the calls of each message side by side; a message without calls ends the episode."""

    limits_calls = True

    def __init__(
        self, tools: dict[str, Tool], timeout: float, worker: Any, forks: Any, limit: int,
        own_servers: bool, turns: Any,
    ) -> None:  # fmt: skip
        self.tools = [tool.schema for tool in tools.values()]
        self._tools = tools
        self._timeout = timeout
        self._worker = worker
        self._forks, self._fork = forks, cast("Any", None)
        self._turns = turns  # those of episodes that share forks
        self._awaits = any(inspect.iscoroutinefunction(tool.run) for tool in tools.values())
        self._loop: asyncio.AbstractEventLoop | None = None  # of the fork
        self._limit = limit
        self._own_servers, self._servers = own_servers, list[Any]()

    async def reset(self, row: dict[str, Any]) -> None:
        """Begin with the messages of the row, and with servers for this episode if they are own."""
        if not self._own_servers:
            return
        own = {tool.server: tool.server.copy() for tool in self._tools.values() if tool.server}
        self._servers = list(own.values())
        # All starts end here: `close` ends only servers whose start is over.
        starts = (server.start() for server in self._servers)
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, self._worker.Problems):
                raise self._worker.BadReply(str(result))
            if isinstance(result, BaseException):
                raise result
        self._tools = {
            name: replace(
                tool, run=functools.partial(own[tool.server].call, *cast("Any", tool.run).args)
            )
            if tool.server
            else tool
            for name, tool in self._tools.items()
        }

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer the calls of a message, in their order; `error` says that none can be read."""
        if error := message.get("error"):
            reply = {"role": "tool", "content": f"Error: {error}"}
            return {"messages": [reply], "done": False, "error": error}
        calls = message.get("tool_calls") or []
        run = self._run_in_fork if self._forks else self._run_here
        functions = [call for call in calls if self._is_function(call)]
        others = [call for call in calls if not self._is_function(call)]
        done = await asyncio.gather(run(functions), self._run_here(others))
        done_of = {True: iter(done[0]), False: iter(done[1])}
        runs = [next(done_of[self._is_function(call)]) for call in calls]
        replies = [
            {"role": "tool", "content": run.text, "name": run.name, "tool_call_id": call.get("id")}
            for call, run in zip(calls, runs)  # noqa: B905  (strict is newer than Python 3.9)
        ]
        return {
            "messages": replies, "done": not calls,
            "error": "; ".join(run.text for run in runs if run.failed),
            # A name that is no tool's has run nothing.
            "tools": [(run.name, run.seconds) for run in runs if run.name in self._tools],
            "timeouts": sum(run.late for run in runs), "crashes": sum(run.crashed for run in runs),
            "restarts": self._pop_restarts(),
        }  # fmt: skip

    def _pop_restarts(self) -> int:
        number = len(self._worker.RESTARTS)
        del self._worker.RESTARTS[:]
        return number

    async def close(self) -> None:
        """End the processes of the episode, on the event loop, which reads what they print."""
        for server in self._servers:
            server.close()
        self._end_fork()

    def _end_fork(self) -> None:
        if self._fork is not None:
            self._fork.kill("the episode has ended")
            self._fork = None

    def _is_function(self, call: dict[str, Any]) -> bool:
        tool = self._tools.get(call["function"]["name"])
        return tool is not None and tool.hints is not None

    async def _run_here(self, calls: list[dict[str, Any]]) -> list[Run]:
        return await asyncio.gather(*map(self._run, calls))

    async def _run_in_fork(self, calls: list[dict[str, Any]]) -> list[Run]:
        """Run calls of functions in the episode's fork; one that ends there ends them all.

        Tools without state leave a fork whose calls went well to other episodes.
        """
        if not calls:
            return []
        # A call alone is limited by the end of its fork.
        grace = self._worker.FORK_GRACE_S if self._awaits or len(calls) > 1 else 0
        started, late = time.monotonic(), False
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._turns:  # after a wait a call gets one more fork
                    await stack.enter_async_context(self._turns.take(self._worker.TURN_S))
                    started = time.monotonic()
                if self._fork is None:
                    self._fork = self._forks.fork(self._answer_in_fork, awaits=self._awaits)
                answer = await self._ask_fork(json.dumps(calls).encode(), self._timeout + grace)
            runs = [Run(*fields) for fields in json.loads(answer)]
            if self._turns and not any(run.failed for run in runs):
                self._forks.give_back(self._fork)
                self._fork = None
            if self._turns:
                self._end_fork()
            return runs
        except TimeoutError:
            text, late = f"timeout: took longer than {self._timeout:g} s", True
        except self._worker.forks.ForkEnded as end:
            text = str(end)
        except (TypeError, ValueError):
            text = "its process wrote what is not an answer"
        self._end_fork()
        seconds = time.monotonic() - started
        names = [call["function"]["name"] for call in calls]
        return [Run(name, f"Error: {text}", seconds, True, late, not late) for name in names]

    async def _ask_fork(self, data: bytes, limit: float) -> bytes:
        """Return the answer of the fork; raises ForkEnded and TimeoutError.

        One that served another call may end by what that call left: the calls run again in a new
        one.
        """
        try:
            return bytes(await self._fork.request(data, limit))
        except self._worker.forks.ForkEnded:
            if not self._fork.served:
                raise
        self._fork = self._forks.fork(self._answer_in_fork, awaits=self._awaits, new=True)
        return bytes(await self._fork.request(data, limit))

    async def _answer_in_fork(self, data: bytes) -> bytes:
        """Run calls: side by side on an event loop, one alone without, since that takes long."""
        calls = json.loads(data)
        if self._awaits:
            runs = await self._run_here(calls)
        elif len(calls) > 1:
            # `asyncio.run` would wait for threads that are late.
            self._loop = self._loop or asyncio.new_event_loop()
            runs = self._loop.run_until_complete(self._run_here(calls))
        else:
            runs = [await self._run(calls[0], self._worker.run_alone)]
        return json.dumps([astuple(run) for run in runs]).encode()

    async def _run(self, call: dict[str, Any], run_call: Any = None) -> Run:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        started = time.monotonic()
        failed, late, crashed = True, False, False
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
            # Servers limit their calls themselves.
            limit = None if tool.hints is None else self._timeout
            value = await (run_call or self._worker.run_call)(run, timeout=limit)
            text, failed = write_value(value), False
        except ToolError as error:
            text = f"Error: {error}"
        except self._worker.TimedOut as error:
            text, late = f"Error: {error}", True
        except BaseException as error:
            text = f"Error: {self._worker.describe_error(error)}"
            crashed = type(error).__name__ == "ServerEnded"
        text = self._worker.shorten(text, self._limit)
        return Run(name, text, time.monotonic() - started, failed, late, crashed)


@dataclass(frozen=True)
class Run:
    """A call that was run, and its text; `crashed`: it ended its process, or one beside it did."""

    name: str
    text: str
    seconds: float
    failed: bool
    late: bool
    crashed: bool = False


async def load(
    spec: str | None, servers: list[dict[str, Any]], timeout: float, worker: Any,
    passed: list[str], forks: Any, limit: int, own_servers: bool,
) -> Callable[[], ToolEnvironment]:  # fmt: skip
    """Return what makes tool environments of FILE.py[:NAME,NAME] and of MCP servers.

    `worker` is the module that runs the process; `forks` makes the processes of an episode's
    functions, if they have some. Results have at most `limit` characters. Each episode may have
    servers for itself (`own_servers`). Where names clash, those of servers begin with the name of
    the server. Raises the worker's Problems, with all mistakes.
    """
    tools, stateless = await _load_functions(spec, worker) if spec else ([], False)
    if servers:
        loader = worker.load_sibling("mcp")
        tools += await loader.load(servers, timeout, Tool, ToolError, worker, passed)
    count = collections.Counter(tool.name for tool in tools)
    tools = [_add_prefix(tool) if tool.server and count[tool.name] > 1 else tool for tool in tools]
    if own_servers:  # these have only listed their tools
        for server in {tool.server for tool in tools if tool.server}:
            server.close()
    by_name: dict[str, Tool] = {}
    problems = []
    for tool in tools:
        first = by_name.setdefault(tool.name, tool)
        if first is not tool:
            problems.append(
                f"Two tools have the name {tool.name!r}, of {first.source} and of {tool.source}: "
                "choose functions with --tools FILE.py:NAME,NAME, give servers other names in "
                "--mcp_config FILE, or leave one of the two out."
            )
    if problems:
        raise worker.Problems(*problems)
    if not tools:
        labels = ", ".join(server["label"] for server in servers)
        raise worker.Problems(f"No tools are offered by {labels}.")
    turns = worker.Turns(worker.forks.TOGETHER) if stateless else None
    return lambda: ToolEnvironment(by_name, timeout, worker, forks, limit, own_servers, turns)


def _add_prefix(tool: Tool) -> Tool:
    function = tool.schema["function"]
    name = f"{re.sub('[^a-zA-Z0-9_-]', '_', tool.server.name)}_{tool.name}"
    return replace(tool, schema={**tool.schema, "function": {**function, "name": name}})


async def _load_functions(spec: str, worker: Any) -> tuple[list[Tool], bool]:
    """Return the tools of a file, and whether it says that their calls leave nothing behind.

    Raises the worker's Problems with all mistakes.
    """
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
        tool, mistakes = read_function(function, label)
        line = function.__code__.co_firstlineno
        problems += [f"{label}: {function.__name__} (line {line}) {text}." for text in mistakes]
        tools.append(tool)
    stateless = getattr(module, "STATELESS", False)
    if not isinstance(stateless, bool):
        problems.append(f"{label}: STATELESS is {stateless!r}; write True or False.")
    if problems:
        raise worker.Problems(*problems)
    return tools, stateless


def read_function(function: Callable[..., Any], source: str) -> tuple[Tool, list[str]]:
    """Return a function as a tool, and what its signature and docstring lack."""
    description, texts = read_docstring(inspect.getdoc(function) or "")
    problems = []
    if not description:
        problems.append(
            "has no docstring; write what it does, which the policy reads, or begin its name with "
            "_ if it is not a tool"
        )
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        return Tool({}, function, {}, source), [f"has a type hint that does not work: {error}"]
    parameters, mistakes = describe_fields(function, hints, texts)
    schema = {
        "type": "function",
        "function": {
            "name": function.__name__, "description": description, "parameters": parameters,
        },
    }  # fmt: skip
    return Tool(schema, function, hints, source), problems + mistakes


def describe_fields(
    factory: Any, hints: dict[str, Any], texts: dict[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the schema of the arguments of a function or a record's class, and what they lack.

    `texts` describe them by name.
    """
    properties, required, problems = {}, [], []
    if hasattr(factory, "__required_keys__"):  # a TypedDict
        empty, named = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(n, named, default=empty if n in factory.__required_keys__ else None)
            for n in hints
        ]
    else:
        parameters = list(inspect.signature(factory).parameters.values())
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            problems.append(f"takes {parameter}; a tool has named arguments only")
            continue
        if name not in hints:
            problems.append(f"has no type hint for {name!r}; write {name}: TYPE, which is {HINTS}")
            continue
        schema = describe_type(hints[name])
        if schema is None:
            problems.append(f"has the type {hints[name]} for {name!r}; write {HINTS}")
            continue
        if name in texts:
            schema["description"] = texts[name]
        if default is parameter.empty:
            required.append(name)
        default = default.value if isinstance(default, enum.Enum) else default
        if isinstance(default, (str, int, float, bool, list, dict)):
            schema["default"] = default
        properties[name] = schema
    return {"type": "object", "properties": properties, "required": required}, problems


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


def is_record(hint: Any) -> bool:
    """Whether a type is a dataclass, a model of pydantic or a TypedDict."""
    marks = ("__dataclass_fields__", "model_fields", "__required_keys__")
    return inspect.isclass(hint) and any(hasattr(hint, mark) for mark in marks)


def read_hints(record: Any) -> dict[str, Any]:
    """Return the types of a record's fields."""
    # Those of a TypedDict may be wrapped in NotRequired.
    extras = not hasattr(record, "__required_keys__")
    return typing.get_type_hints(record, include_extras=extras)


def describe_type(hint: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a type hint; None for a type that JSON lacks."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin is typing.Annotated:
        inner, notes = describe_type(arguments[0]), arguments[1:]
        texts = [n if isinstance(n, str) else getattr(n, "description", None) for n in notes]
        text = next(filter(None, texts), None)
        return {**inner, "description": text} if inner is not None and text else inner
    if origin in UNIONS:
        schemas = [describe_type(item) for item in arguments if item is not type(None)]
        if None in schemas:
            return None
        plain = all(list(inner or ()) == ["type"] for inner in schemas)
        several = {"type": [s["type"] for s in schemas if s]} if plain else {"anyOf": schemas}
        schema = schemas[0] if len(schemas) == 1 else several
        return {**(schema or {}), **({"nullable": True} if type(None) in arguments else {})}
    if origin is typing.Literal:
        return _describe_values(arguments)
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _describe_values([member.value for member in hint])
    if is_record(hint):
        schema, problems = describe_fields(hint, read_hints(hint), {})
        return None if problems else schema
    kind = KINDS.get(origin or hint)
    if kind is None:
        return None
    # The last argument of a dict is the type of its values; a tuple may have different types.
    items = {item for item in arguments if item is not ...} if kind == "array" else arguments[-1:]
    if items and kind in ("array", "object"):
        (schema,) = map(describe_type, items) if len(items) == 1 else (None,)
        key = "items" if kind == "array" else "additionalProperties"
        return None if schema is None else {"type": kind, key: schema}
    return {"type": kind}


def _describe_values(values: Any) -> dict[str, Any] | None:
    kinds = {KINDS.get(type(value)) for value in values}
    if len(kinds) != 1 or None in kinds:
        return None
    return {"type": kinds.pop(), "enum": list(values)}


def read_arguments(tool: Tool, arguments: Any, hints: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as the tool takes them; ToolError for all that is wrong."""
    parameters = tool.schema["function"]["parameters"]
    try:
        return read_fields(arguments, parameters, hints)
    except ToolError as error:
        properties = parameters["properties"].items()
        listed = ", ".join(f"{name}: {name_type(schema)}" for name, schema in properties)
        text = f"{tool.name}: {error}. It takes {listed or 'no arguments'}."
        raise ToolError(text) from None


def read_fields(
    values: dict[str, Any], schema: dict[str, Any], hints: dict[str, Any], path: str = ""
) -> dict[str, Any]:
    """Return an object's values as their types have them; ToolError for all that is wrong.

    `path` is where the object is in the arguments of a call.
    """
    missing = [name for name in schema["required"] if name not in values]
    problems = [f"{path + name!r} is missing" for name in missing]
    fields = {}
    for name, value in values.items():
        if name not in schema["properties"]:
            problems.append(f"there is no argument {path + name!r}")
            continue
        try:
            fields[name] = read_value(value, hints[name], path + name)
        except ToolError as error:
            problems.append(str(error))
    if problems:
        raise ToolError("; ".join(problems))
    return fields


def read_value(value: Any, hint: Any, path: str) -> Any:
    """Return a JSON value as its type has it: a member of an Enum, 3 for 3.0; else ToolError."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is Any:
        return value
    if origin is typing.Annotated:
        return read_value(value, arguments[0], path)
    if origin in UNIONS:
        for item in arguments:
            with contextlib.suppress(ToolError):
                return read_value(value, item, path)
    elif origin is typing.Literal:
        if any(value == v and type(value) is type(v) for v in arguments):
            return value
    elif inspect.isclass(hint) and issubclass(hint, enum.Enum):
        if any(value == v.value and type(value) is type(v.value) for v in hint):
            return hint(value)
    elif is_record(hint):
        if isinstance(value, dict):
            hints = read_hints(hint)
            schema, _ = describe_fields(hint, hints, {})
            return hint(**read_fields(value, schema, hints, f"{path}."))
    elif KINDS.get(origin) == "array":
        if isinstance(value, list):
            kind, item = (list if origin is SEQUENCE else origin), (*arguments, Any)[0]
            return kind(read_value(v, item, f"{path}[{i}]") for i, v in enumerate(value))
    elif origin is dict:
        if isinstance(value, dict):
            item = (Any, *arguments)[-1]
            return {key: read_value(v, item, f"{path}.{key}") for key, v in value.items()}
    elif type(value) is hint or (hint is type(None) and value is None):
        return value
    elif hint in (int, float) and type(value) in (int, float) and value == hint(value):
        return hint(value)
    shown = json.dumps(value, ensure_ascii=False)[:60]
    raise ToolError(f"{path!r} must be {name_type(describe_type(hint) or {})}, not {shown}")


def name_type(schema: dict[str, Any]) -> str:
    """Return a schema in words."""
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(v, ensure_ascii=False) for v in schema["enum"])
    kinds = schema.get("type", ())
    inner = schema.get("anyOf") or [{"type": kind} for kind in kinds if isinstance(kinds, list)]
    words = [name_type(s) for s in inner] or [NAMES.get(str(kinds), "any value")]
    return " or ".join(words)


def write_value(value: Any) -> str:
    """Return what a tool returned as the text that the policy reads: JSON if it is not a text."""
    if not isinstance(value, (str, int, float, list, tuple, dict, type(None))):
        value = _make_plain(value)
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_make_plain)
    except (TypeError, ValueError):  # keys that are not texts, or a list in itself
        return str(value)


def _make_plain(value: Any) -> Any:
    """Return an array, a record, a set or a generator in JSON's forms; anything else as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if hasattr(value, "__dataclass_fields__"):
        return dict(vars(value))
    if isinstance(value, (set, frozenset, types.GeneratorType)):
        return list(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    # An address would differ in a resumed run.
    return re.sub(" at 0x[0-9a-f]+", "", str(value))
