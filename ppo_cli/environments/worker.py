"""The program of an environment process, which answers requests in JSON.

`pool.py` starts it by path with `environment.python`, which may lack this package and may be as old
as 3.9: it imports the standard library alone. Requests have an operation and its arguments. One
object plays one episode, in a fork of this process that answers the episode's requests as this
process would; with `environment.isolation=process` all episodes share the process. Methods run in
threads, async ones on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import gc
import importlib
import importlib.util
import inspect
import json
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

with contextlib.suppress(ImportError):
    import ctypes  # noqa: F401  (each fork needs it, and would load it)

MAX_ANSWER_BYTES = 8 << 20
CONCURRENT_CALLS = 256  # threads: a slow call must not keep another one waiting
CLOSE_TIMEOUT_S = 1.0
MACOS_FILES = 10240  # OPEN_MAX: macOS says that there is no limit, and refuses to set none
FORK_GRACE_S = 1.0  # tools limit each call themselves; their fork is killed after this
TURN_S = 0.5  # of calls that share few processes
# Built-in environments, KIND:NAME, each in a file KIND.py beside this one; and what to do where its
# package is missing.
ADAPTERS = {
    "verifiers": "Run scripts/setup_verifiers; add environment.python=.venv-verifiers/bin/python.",
    **{
        kind: f"Install it with: {sys.executable} -m pip install {package} (or name another Python "
        "with environment.python=PATH)."
        for kind, package in (
            ("gym", "gymnasium"), ("textarena", "textarena"), ("openenv", "websockets")
        )
    },
}  # fmt: skip
PLUGIN = "plugin:"  # before the entry point of a package, MODULE:NAME
ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")
STEP_KEYS = (
    "messages", "done", "reward", "error", "tools", "metrics", "timeouts", "crashes", "restarts",
)  # fmt: skip
STEP_ADVICE = "step returns (messages, done, reward), or a dict with these keys"
# How a class plays an environment of Gymnasium, whose actions are numbers, in `self.env`.
GYM_RESET = 'def reset(self, row): return str(self.env.reset(seed=row["seed"])[0])'
GYM_STEP = (
    'def step(self, message): obs, reward, *ends, _ = self.env.step(int(message["content"])); '
    "return str(obs), any(ends), reward"
)


def load_file(path: Path) -> Any:
    """Import a file of this package, under a name that no package of the user has."""
    spec = importlib.util.spec_from_file_location(f"ppo_cli_environment_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PROCESSES = Path(__file__).parents[1] / "processes"
user_code = load_file(PROCESSES / "user_code.py")
channels = load_file(PROCESSES / "channel.py")
reaper = load_file(PROCESSES / "reaper.py")
forks = load_file(PROCESSES / "forks.py")
describe_error: Callable[..., str] = user_code.describe_error


class Problems(Exception):
    """Why an environment cannot be used: one line per mistake, for the user."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class BadReply(Exception):
    """What a method returned cannot be read; the message says what it may return."""


class TimedOut(Exception):
    """A call took too long; its thread, which cannot be stopped, may go on."""

    def __init__(self, timeout: float) -> None:
        super().__init__(f"timeout: took longer than {timeout:g} s")


async def run_call(
    function: Callable[..., Any], *arguments: Any, timeout: float | None = None
) -> Any:
    """Return what a function returns: an async one on the event loop, another one in a thread.

    Raises TimedOut after `timeout` seconds, and whatever the function raises.
    """

    # An error goes through the return value: SystemExit in a task would end the event loop.
    def in_thread() -> tuple[Any, BaseException | None]:
        try:
            return function(*arguments), None
        except BaseException as error:
            return None, error

    async def run() -> tuple[Any, BaseException | None]:
        try:
            value, error = await thread if thread else (await function(*arguments), None)
            # A decorator may hide an async method.
            return await value if inspect.isawaitable(value) else value, error
        except BaseException as error:
            return None, error

    is_async = inspect.iscoroutinefunction(function)
    loop = asyncio.get_running_loop()
    thread = None if is_async else loop.run_in_executor(None, in_thread)
    work = asyncio.ensure_future(run())
    await asyncio.wait([work], timeout=timeout)
    if not work.done():
        work.cancel()
        raise TimedOut(timeout or 0)
    value, error = work.result()
    if error is not None:
        raise error
    return value


async def run_alone(function: Callable[..., Any], *arguments: Any, timeout: float = 0) -> Any:
    """Return what a function returns, in a fork without an event loop, which is killed if late."""
    value = function(*arguments)
    # A decorator may hide an async one.
    return asyncio.run(_wait(value)) if inspect.isawaitable(value) else value


class Turns:
    """Lets a few calls run at once; one that takes longer than TURN_S leaves its turn to others."""

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)

    @contextlib.asynccontextmanager
    async def take(
        self, patience_s: float, prepare: Callable[[], Awaitable[Any]] | None = None
    ) -> AsyncIterator[Any]:
        """Wait for a turn, at most `patience_s`, and keep it in the context.

        Yields what `prepare` returns; TURN_S begins after it.
        """
        with contextlib.ExitStack() as turn:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._free.acquire(), patience_s)
                turn.callback(self._free.release)
            prepared = await prepare() if prepare else None
            timer = asyncio.get_running_loop().call_later(TURN_S, turn.close)
            turn.callback(timer.cancel)
            yield prepared


RESTARTS: list[str] = []  # of MCP servers, since the last reply
# The files that the user's code opened when it was loaded, as `forks.open_files` lists them.
USER_FILES: set[tuple[int, int, int]] = set()
# Tasks in an async context, which the event loop does not keep, and what makes them leave it.
_HOLDERS: dict[asyncio.Future[None], Callable[[], None]] = {}


async def enter(context: Any) -> tuple[Any, Callable[[], None]]:
    """Enter an async context; returns its value, and what leaves it, or raises."""
    leaving = asyncio.Event()
    entered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    # A task of its own: some contexts must end in the task that entered them.
    async def hold() -> None:
        try:
            async with context as value:
                entered.set_result((value, leaving.set))
                await leaving.wait()
        except BaseException as error:
            if entered.done():
                raise
            entered.set_exception(error)

    holder = asyncio.ensure_future(hold())
    _HOLDERS[holder] = leaving.set
    holder.add_done_callback(_HOLDERS.pop)
    try:
        value, leave = await entered
    except asyncio.CancelledError:  # who waited for it gives up
        holder.cancel()
        raise
    return value, leave


def import_file(file: str, label: str) -> Any:
    """Import a user's file; Problems if it does not load."""
    before = forks.open_files()
    try:
        return user_code.import_file(file)
    except BaseException as error:
        advice = ""
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.split(".")[0]
            advice = (
                f" Install {package!r} into {sys.executable}, or name another Python with "
                "environment.python=PATH."
            )
        elif isinstance(error, ImportError) and "relative import" in str(error):
            advice = " Leave the dot out: files next to it are imported by their names."
        elif isinstance(error, SystemExit):
            advice = ' Put what runs as a program below `if __name__ == "__main__":`.'
        raise Problems(
            f"{label}: the file does not load: {describe_error(error, file)}.{advice}"
        ) from error
    finally:
        USER_FILES.update(forks.open_files() - before)


def import_module(name: str, label: str) -> Any:
    """Import a module of a package; Problems if it does not load."""
    try:
        return importlib.import_module(name)
    except BaseException as error:
        raise Problems(f"{label}: {name} does not load: {describe_error(error)}.") from error


def find_name(module: Any, name: str, label: str) -> Any:
    """Return the attribute `name` of a module; Problems, with the nearest names, without it."""
    if hasattr(module, name):
        return getattr(module, name)
    callables = (n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
    names = [n for n in callables if getattr(module, n).__module__ == module.__name__]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = f" It has: {', '.join(names[:10])}." if names else ""
    raise Problems(f"{label}: {module.__file__} has no {name!r}.{hint}{listed}")


def load_sibling(name: str) -> Any:
    """Import a module next to this file."""
    return load_file(Path(__file__).with_name(f"{name}.py"))


async def load_class(path: str, kwargs: dict[str, Any]) -> tuple[Callable[[], Any], str, str]:
    """Return what makes an environment of FILE.py:NAME or PLUGIN, its label, and the file.

    Raises Problems.
    """
    file, _, name = path.rpartition(":")
    label = f"--environment {os.path.basename(file)}:{name}"
    load = import_module if file.startswith(PLUGIN) else import_file
    module = await run_call(load, file.removeprefix(PLUGIN), label)
    factory = find_name(module, name, label)
    if not callable(factory):
        raise Problems(f"{label} is of type {type(factory).__name__}; name a class.")
    if inspect.isclass(factory):
        with contextlib.suppress(OSError, TypeError):  # a pickled class has no source
            label = f"{label} (line {inspect.getsourcelines(factory)[1]})"
    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        raise Problems(
            f"{label} cannot be constructed: {error}. Its arguments come from "
            f"environment.kwargs.NAME=VALUE; set are: {', '.join(kwargs) or 'none'}."
        ) from None
    return (lambda: factory(**kwargs)), label, file


def check_methods(environment: Any, label: str) -> None:
    """Raise Problems unless an object has reset(row) and step(message), and finish() if any."""
    problems = []
    for method, argument in (("reset", "row"), ("step", "message"), ("finish", "")):
        function = getattr(environment, method, None)
        if not callable(function):
            if argument:
                problems.append(f"{label} has no method {method}(self, {argument}).")
            continue
        try:
            inspect.signature(function).bind(*[None] * bool(argument))
        except TypeError as error:
            form = f"{method}(self, {argument})".replace(", )", ")")
            problems.append(
                f"{label}: {method} is called as {method}({argument}), but: {error}. Write def "
                f"{form}."
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            problems.append(f"{label}: {method} yields; write return in place of yield.")
    if problems and hasattr(environment, "action_space"):
        name = label.rpartition(":")[2].split()[0]
        problems = [
            f"{label} is an environment of Gymnasium. Name a class that plays it with messages:",
            f"    class Episode:\n        def __init__(self): self.env = {name}()",
            f"        {GYM_RESET}\n        {GYM_STEP}",
        ]
    if problems:
        raise Problems(*problems)


def read_messages(value: Any, method: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the messages that a method returned; raises BadReply for anything else.

    A text is a user message, None no message, a single message a list of it. Contents above
    `limit` characters are shortened.
    """
    if value is None:
        return []
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if isinstance(value, dict) and "role" in value:
        value = [value]
    info = value[1] if isinstance(value, tuple) and len(value) == 2 else None
    if isinstance(info, dict) and "role" not in info:
        raise BadReply(f"reset returned two values, as Gymnasium's does; write: {GYM_RESET}")
    if not isinstance(value, (list, tuple)):
        raise BadReply(f"{method} returned {_kind(value)} as messages; return a list or a text")
    messages = []
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadReply(
                f'{method} returned {_kind(message)} as a message; write {{"role": "user", '
                f'"content": "…"}} with a role of {", ".join(ROLES)}'
            )
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise BadReply(
                f"{method} returned a message whose content is {_kind(content)}; write a text"
            )
        fields = {key: message[key] for key in MESSAGE_KEYS if message.get(key) is not None}
        messages.append(
            {**fields, "content": content if limit is None else shorten(content, limit)}
        )
    return messages


def open_game(row: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """Return the opening of a game: the row's system messages, and the game's text."""
    system = [message for message in row["messages"] if message["role"] in ROLES[:2]]
    return [*system, {"role": "user", "content": text}]


def read_step(value: Any, limit: int, method: str = "step") -> dict[str, Any]:
    """Return what `step` or `finish` gave as messages, done and rewards, or raise BadReply."""
    if isinstance(value, dict):
        unknown = [str(key) for key in value if key not in STEP_KEYS]
        if unknown:
            raise BadReply(f"step returned the keys {', '.join(unknown)}; {STEP_ADVICE}")
        fields = dict(value)
    elif isinstance(value, (tuple, list)) and len(value) == 3:
        fields = dict(zip(STEP_KEYS, value))  # noqa: B905  (strict is newer than Python 3.9)
    elif isinstance(value, (tuple, list)) and len(value) in (4, 5):
        raise BadReply(f"step returned {len(value)} values, as Gymnasium's does; write: {GYM_STEP}")
    else:
        raise BadReply(f"step returned {_kind(value)}; {STEP_ADVICE}")
    # Of numpy too; a number here is a reward in the wrong place.
    done = fields.get("done", False)
    if type(done).__name__ not in ("bool", "bool_"):
        raise BadReply(f"step returned {_kind(done)} as done, not True or False; {STEP_ADVICE}")
    reward = fields.get("reward")
    parts = reward if isinstance(reward, dict) else {"environment": reward}
    messages = read_messages(fields.get("messages"), "step", limit)
    if not (messages or done):
        raise BadReply("step returned no message, but the episode is not done")
    return {
        "messages": messages, "done": bool(done),
        "rewards": _read_numbers(parts, "reward", method),
        "metrics": _read_numbers(fields.get("metrics") or {}, "metric", method),
        "error": str(fields.get("error") or ""), "tools": fields.get("tools", []),
        **{event: fields.get(event, 0) for event in ("timeouts", "crashes", "restarts")},
    }  # fmt: skip


def _read_numbers(numbers: dict[Any, Any], kind: str, method: str) -> dict[str, float]:
    """Return rewards or metrics by name, without those that are None; raises BadReply."""
    read = {}
    for name, number in numbers.items():
        if number is None:
            continue
        try:
            read[str(name)] = float(number)
        except (TypeError, ValueError):
            text = f"{method} returned {_kind(number)} as the {kind} {name!r}, not a number"
            raise BadReply(text) from None
        if not abs(read[str(name)]) < float("inf"):
            raise BadReply(f"{method} returned {number} as the {kind} {name!r}")
    return read


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def shorten(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters; the middle of a longer one is left out."""
    if len(text) <= limit:
        return text
    mark = f"\n… {len(text) - limit:,} characters left out …\n"
    head = (limit - len(mark)) // 2
    return text[:limit] if head < 1 else text[:head] + mark + text[-head:]


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value)[:60]
    return f"{type(value).__name__} {text}" if not isinstance(value, dict) else f"the dict {text}"


class Worker:
    """The environment and its episodes; answers the requests of the pool."""

    def __init__(self) -> None:
        self._episodes: dict[str, Any] = {}
        self._make: Callable[[], Any] = lambda: None
        self._file = ""
        self._max_reply_chars = 0
        self._memory = 0  # bytes of a fork; 0: the episodes share this process
        self._relays, self._is_fork = False, False  # it relays requests to forks, or is one
        self._awaits = False  # the environment has async methods
        self._forks: dict[str, Any] = {}
        self._spares: list[Any] = []  # forks of no episode yet

    async def serve(self, channel: Any) -> None:
        """Answer requests until the channel ends, then close the environments."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(CONCURRENT_CALLS))
        await channel.serve(self._answer)
        closing: list[Awaitable[Any]] = [
            self._close(environment) for environment in self._episodes.values()
        ]
        closing += [self._relay("close", name, CLOSE_TIMEOUT_S, b"") for name in self._forks]
        await asyncio.wait_for(asyncio.gather(*closing), CLOSE_TIMEOUT_S)
        for leave in _HOLDERS.values():
            leave()
        if _HOLDERS:  # servers may save their state
            await asyncio.wait(_HOLDERS, timeout=CLOSE_TIMEOUT_S)

    def fork(self, answer: Callable[[bytes], Any], *, awaits: bool, new: bool = False) -> Any:
        """Return a fork of this process; `answer` and `awaits` are alike for all episodes.

        A `new` one has served no other episode.
        """
        while self._spares:
            spare = self._spares.pop()
            if spare.lives() and not (new and spare.served):
                return spare
            spare.kill("it is of no use")
        self._spares = forks.make_forks(
            answer, awaits=awaits, files=USER_FILES, memory=self._memory,
            max_answer=MAX_ANSWER_BYTES, channel=channels, reaper=reaper,
        )  # fmt: skip
        return self._spares.pop()

    def give_back(self, fork: Any) -> None:
        """Keep a fork, whose calls have left nothing in it, for another episode."""
        if fork.has_children() or len(self._spares) == forks.TOGETHER:
            fork.kill("the call has ended")
        else:
            fork.begin_again()
            self._spares.append(fork)

    async def _relay(self, operation: str, episode: str, timeout: float, data: bytes) -> bytes:
        """Let the fork of an episode answer a request; its reset makes the fork."""
        answer: dict[str, Any] = {"result": None}
        try:
            if operation == "reset":
                self._forks[episode] = self.fork(self._answer_in_fork, awaits=self._awaits)
            if operation != "close":
                return bytes(await self._forks[episode].request(data, timeout))
            if fork := self._forks.pop(episode, None):
                last = {"operation": operation, "episode": episode, "timeout": timeout}
                await fork.close(json.dumps(last).encode(), timeout)
        except forks.ForkEnded as end:
            answer = {"error": str(end), "crashed": True}
        except TimeoutError:
            answer = {"error": f"timeout: took longer than {timeout:g} s", "late": True}
        except OSError as error:
            answer = {"error": f"its process does not start: {error}", "crashed": True}
        return json.dumps(answer).encode()

    async def _answer_in_fork(self, data: bytes) -> bytes:
        self._relays, self._is_fork = False, True
        return await self._answer(data)

    async def _call(
        self, function: Callable[..., Any], *arguments: Any, timeout: float | None
    ) -> Any:
        """Call a method of the user's; a fork needs no thread for it, since it can be killed."""
        if not self._is_fork:
            return await run_call(function, *arguments, timeout=timeout)
        if self._awaits:
            value = function(*arguments)
            return await value if inspect.isawaitable(value) else value
        return await run_alone(function, *arguments)

    async def _answer(self, data: bytes) -> bytes:
        """Run one request; returns its answer: `result`, `problems`, or `error`."""
        operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "describe": self._describe, "reset": self._reset, "step": self._step,
            "finish": self._finish, "close": self._close_episode,
        }  # fmt: skip
        request = json.loads(data)
        name = request.pop("operation")
        if self._relays and name != "describe":
            return await self._relay(name, request["episode"], request["timeout"], data)
        operation = operations[name]
        answer: dict[str, Any]
        try:
            answer = {"result": await operation(**request)}
        except Problems as error:
            answer = {"problems": list(error.lines)}
        except TimedOut:
            text = f"timeout: took longer than {request['timeout']:g} s"
            answer = {"error": text, "late": True}
        except BadReply as error:
            answer = {"error": str(error)}
        except BaseException as error:
            advice = " (see environment.memory_gb)" if isinstance(error, MemoryError) else ""
            answer = {"error": f"raised {describe_error(error, self._file)}{advice}"}
        try:
            written = json.dumps(answer).encode()
        except (TypeError, ValueError, RecursionError) as error:
            text = f"returned what cannot be written as JSON: {describe_error(error)}"
        else:
            if len(written) <= MAX_ANSWER_BYTES:
                return written
            text = f"returned {len(written) >> 20} MiB, more than {MAX_ANSWER_BYTES >> 20}"
        return json.dumps({"error": text}).encode()

    async def _describe(
        self, path: str | None, tools: str | None, mcp: list[dict[str, Any]],
        kwargs: dict[str, Any], max_reply_chars: int, timeout: float, pass_env: list[str],
        memory: int, own_servers: bool,
    ) -> dict[str, Any]:  # fmt: skip
        """Load the environment, construct one object of it, and return its tools."""
        self._max_reply_chars, self._memory = max_reply_chars, memory
        label = f"--environment {path}" if path else "--tools" if tools else "--mcp"
        kind, before = (path or "").partition(":")[0], forks.open_files()
        if path is None:
            calling = sys.modules[__name__]
            load, makes_forks = load_sibling("tools").load, self if memory else None
            self._make = await load(
                tools, mcp, timeout, calling, pass_env, makes_forks, max_reply_chars, own_servers
            )
            before = forks.open_files()  # connections to servers are not the user's
        elif kind in ADAPTERS:
            try:
                adapter, calling = load_sibling(kind), sys.modules[__name__]
                self._make = await adapter.load(path[len(kind) + 1 :], kwargs, calling)
            except ImportError as error:
                raise Problems(
                    f"{label}: {sys.executable} lacks the package {error.name}. {ADAPTERS[kind]}"
                ) from error
        else:
            self._make, label, self._file = await load_class(path, kwargs)
        try:
            environment = await run_call(self._make)
            check_methods(environment, label)
            methods = (
                getattr(environment, name, None) for name in ("reset", "step", "finish", "close")
            )
            self._awaits = any(map(inspect.iscoroutinefunction, methods))
            schemas = getattr(environment, "tools", None)
            schemas = await run_call(schemas) if callable(schemas) else schemas
            await self._close(environment)
            for schema in schemas or ():
                function = schema.get("function", schema) if isinstance(schema, dict) else {}
                if not isinstance(function, dict) or "name" not in function:
                    raise Problems(
                        f"{label}: its tools have {_kind(schema)}; write a list of schemas, as in "
                        '{"type": "function", "function": {"name": "add", "parameters": {…}}}.'
                    )
        except Problems:
            raise
        except BaseException as error:
            text = describe_error(error, self._file)
            raise Problems(f"{label}: constructing it raised {text}.") from error
        # Only what the user's code keeps: forks get the numbers of files that end with the object.
        del environment, methods
        gc.collect()
        open_now = forks.open_files()
        USER_FILES.update(open_now - before)
        USER_FILES.intersection_update(open_now)
        # Tools fork for the calls of functions alone: connections to servers cannot be forked.
        self._relays = bool(memory and path)
        # A fork that is the first to import it has another seed, and it costs 20 ms and 4 MB.
        if self._relays:
            with contextlib.suppress(Exception):  # a broken one fails where it is used
                await run_call(importlib.import_module, "numpy.random")
        if memory:
            forks.pass_over_signals()
        gc.freeze()  # what a fork does not collect stays shared
        return {"tools": list(schemas or [])}

    async def _reset(self, episode: str, row: dict[str, Any], timeout: float) -> dict[str, Any]:
        ends = time.monotonic() + timeout
        if self._is_fork:  # they begin with the same state of generators
            random.seed(row["seed"])
            if numpy := sys.modules.get("numpy"):
                numpy.random.seed(row["seed"])
        environment = self._episodes[episode] = await self._call(self._make, timeout=timeout)
        remaining = max(0.0, ends - time.monotonic())
        value = await self._call(environment.reset, row, timeout=remaining)
        opening = read_messages(value, "reset")
        messages = opening or row["messages"]
        if all(message["role"] in ROLES[:2] for message in messages):
            raise BadReply(
                "reset returned system messages only; return those of the row or the user as well"
                if opening
                else "reset returned no messages, and the episode has no row to begin with"
            )
        return {"messages": messages}

    async def _step(self, episode: str, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        environment = self._episodes[episode]
        # Tools limit each of their calls themselves.
        limit = None if getattr(environment, "limits_calls", False) else timeout
        value = await self._call(environment.step, message, timeout=limit)
        return read_step(value, self._max_reply_chars)

    async def _finish(self, episode: str, timeout: float) -> dict[str, Any]:
        """Ask for the reward that is still due when a limit of the run ends an episode."""
        finish = getattr(self._episodes[episode], "finish", None)
        reward: Any = None
        metrics: dict[str, Any] = {}
        if callable(finish):
            reward = await self._call(finish, timeout=timeout)
            if isinstance(reward, dict) and isinstance(reward.get("metrics"), dict):
                reward, metrics = reward.get("reward"), reward["metrics"]
            # A reward that is not given is masked, unless the environment says that none is due.
            reward = 0.0 if reward is None else reward
        fields = {"done": True, "reward": reward, "metrics": metrics}
        return read_step(fields, self._max_reply_chars, "finish")

    async def _close_episode(self, episode: str, timeout: float) -> None:
        environment = self._episodes.pop(episode, None)
        if environment is not None:
            await self._close(environment, timeout)

    async def _close(self, environment: Any, timeout: float | None = None) -> None:
        close = getattr(environment, "close", None)
        if callable(close):
            await self._call(close, timeout=timeout)


def main() -> None:
    """Serve requests; the stdin of the user's code is empty."""
    channel = channels.Channel()
    # Two files for each fork.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if sys.platform == "linux" else max(soft, min(hard, MACOS_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # The folder of this file has a module `mcp`, which would hide the package.
    here = os.path.realpath(os.path.dirname(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]
    # `asyncio.run` would wait for threads of the user's code that do not end.
    code = 1
    try:
        asyncio.new_event_loop().run_until_complete(Worker().serve(channel))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    if sys.version_info < (3, 9):  # noqa: UP036
        sys.exit("Python 3.9 or newer is needed.")
    main()
