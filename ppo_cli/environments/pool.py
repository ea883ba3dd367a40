"""The environment processes: starts them, deals episodes to them, and replaces those that fail.

Each is a child that runs `worker.py`, and forks itself for each episode: what a fork does harms its
episode alone. The child too may die, hang, or write what is not an answer: its episodes fail then.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppo_cli.config.models.bundled import tools_file
from ppo_cli.config.schema.environment import Environment
from ppo_cli.environments.base import EnvironmentFailure, Opening, Reply, Schema
from ppo_cli.environments.servers import read_servers
from ppo_cli.environments.worker import ADAPTERS, CONCURRENT_CALLS, MAX_ANSWER_BYTES, PLUGIN
from ppo_cli.errors import ConfigError, UserError, did_you_mean, shorten
from ppo_cli.paths import user_path
from ppo_cli.plugins import entry_points, find_plugin
from ppo_cli.processes.child import Child, ChildEnded
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.records import Message
from ppo_cli.secrets.redact import Redactor, redact, without_keys

WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT_S = 120.0  # a user's file may import torch
CHECK_TIMEOUT_S = 10.0
# A process limits its calls itself. It is killed when it does not answer for this much longer; one
# whose calls run in forks is late only where they leave it no processor.
ANSWER_GRACE_S = {"process": 5.0, "episode": 30.0}
MAX_DEATHS = 3  # of a process, one after another, before any answer
MAX_REASON_CHARS = 500
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Calls of tools that took too long or ended a process, and servers that were started again.
EVENTS = ("timeouts", "crashes", "restarts")
# A call to a server may wait, and is asked again.
MCP_ATTEMPTS, MCP_START_S = 3, 90.0
# What an environment that opens its episodes receives in place of a data row.
NO_ROW: Mapping[str, Any] = {
    "prompt": "", "messages": [], "ground_truth": None, "data_source": "",
    "extra_info": {"task": 0}, "seed": 0,
}  # fmt: skip


def check_environment(config: Environment, *, opens: bool = False) -> tuple[Schema, ...]:
    """Start one environment process and return its tools; UserError with all mistakes.

    It has to open an episode without a row if it `opens` them. Takes at most 10 s: what is still
    being imported then is not a mistake, and is not checked.
    """
    if not config.is_set:
        return ()
    spec = _build_spec(config)

    async def describe() -> tuple[Schema, ...]:
        process = _Process(config, spec, None)

        async def start() -> tuple[Schema, ...]:
            tools = await process.start()
            if opens:
                await process.try_opening()
            return tools

        try:
            return await asyncio.wait_for(start(), CHECK_TIMEOUT_S)
        except TimeoutError:
            return ()
        except EnvironmentFailure as failure:
            raise UserError(_describe_broken(config, str(failure), None)) from None
        finally:
            process.kill("the check has ended")
            await process.close()

    loop = LoopThread("environment check")
    try:
        return loop.call(describe())
    finally:
        loop.close()


def _describe_broken(config: Environment, reason: str, logs: Path | None) -> str:
    source = config.path or config.tools or ", ".join(config.mcp) or config.mcp_config
    output = f" Its output is in {logs}." if logs else ""
    return f"The environment {source} does not run: {reason.rstrip('.')}.{output}"


def _build_spec(config: Environment) -> dict[str, Any]:
    """Return what a process is told of the environment; ConfigError if a file is missing."""
    problems: list[str] = []
    missing = [name for name in config.pass_env if name not in os.environ]
    servers, mistakes = read_servers(config)
    problems += mistakes
    path, tools = config.path, config.tools
    if path is not None and (plugin := find_plugin("environments", path)):
        path = f"{PLUGIN}{plugin.value}"
    elif path is not None and path.partition(":")[0] not in ADAPTERS:
        path, problem = _find_file("--environment", path, "FILE.py:NAME")
        problems += problem
    if tools is not None:
        tools, problem = _find_file("--tools", tools_file(tools), "FILE.py or FILE.py:NAME,NAME")
        problems += problem
    problems += [f"--pass_env {n}: there is no variable {n}." for n in missing]
    python = _find_python(config)
    if not (os.path.isfile(python) and os.access(python, os.X_OK)):
        problems.append(
            f"environment.python={config.python}: there is no program {python}. Name the Python "
            "that has the environment's packages, as in environment.python=.venv-env/bin/python."
        )
    if problems:
        raise ConfigError(problems)
    return {
        "path": path, "tools": tools, "mcp": servers, "kwargs": config.kwargs,
        "max_reply_chars": config.max_reply_chars, "pass_env": list(config.pass_env),
        "own_servers": config.mcp_scope == "episode",
        "memory": int(config.memory_gb * 2**30) if config.isolation == "episode" else 0,
    }  # fmt: skip


def _find_python(config: Environment) -> str:
    # Not resolved: the link of a virtual environment leads out of it. A section that no plan has
    # completed names none.
    return os.path.abspath(os.path.expanduser(config.python or sys.executable))


def _find_file(flag: str, spec: str, form: str) -> tuple[str, list[str]]:
    """Return a spec with the absolute path of its file, and what is wrong with it."""
    file, colon, names = spec.rpartition(":")
    if not file or os.sep in names or names.endswith(".py"):
        file, colon, names = spec, "", ""
    path = user_path(file)
    if flag == "--environment" and not names.isidentifier():
        hint = did_you_mean(
            spec, [*entry_points("environments"), *(f"{kind}:" for kind in ADAPTERS)]
        )
        return spec, [f"{flag} {spec}: write {form}, with the name of the class.{hint}"]
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = did_you_mean(path.name, siblings)
        return spec, [f"{flag} {spec}: there is no file {path}.{hint} Write {flag} {form}."]
    return f"{path.resolve()}{colon}{names}", []


class _CallFailure(EnvironmentFailure):
    """The failure of one call, which took too long or ended the process of its episode."""

    def __init__(self, reason: str, *, late: bool = False, crashed: bool = False) -> None:
        super().__init__(reason)
        self.late, self.crashed = late, crashed


class _Process:
    """One environment process: its calls, its episodes, and how it ended."""

    def __init__(
        self, config: Environment, spec: Mapping[str, Any], log: Path | None,
        on_unusable: Callable[[], None] = lambda: None, pause: float = 0.0,
    ) -> None:  # fmt: skip
        self._config = config
        self._spec = spec
        self._log = log
        self._on_unusable = on_unusable
        self._pause = pause  # seconds before it starts
        self._slots = asyncio.Semaphore(CONCURRENT_CALLS)
        self._child: Child | None = None
        self._started: asyncio.Task[tuple[Schema, ...]] | None = None
        self.episodes: set[str] = set()
        self.answered = False  # a reset or a step

    @property
    def ended(self) -> str:
        """Why it has ended."""
        return self._child.ended if self._child is not None else ""

    def start(self) -> asyncio.Task[tuple[Schema, ...]]:
        """Start the process once; the task returns its tools.

        It raises ConfigError if the environment cannot be used, EnvironmentFailure if it dies.
        """
        if self._started is None:
            self._started = asyncio.create_task(self._start())
            # A replacement that nobody waits for may fail: then it is replaced again.
            self._started.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._started

    async def _start(self) -> tuple[Schema, ...]:
        await asyncio.sleep(self._pause)
        self._child = child = await Child.start(
            [_find_python(self._config), str(WORKER)], kind="environment", log=self._log,
            max_answer_bytes=MAX_ANSWER_BYTES, on_end=self._on_unusable,
            inherited=without_keys(os.environ, self._config.pass_env),
            # Episodes run side by side, and each thread's stack counts as memory of its fork.
            environ={name: os.environ.get(name, "1") for name in THREADS},
        )  # fmt: skip
        fields = {"operation": "describe", **self._spec, "timeout": self._config.timeout}
        answer = await self._call(fields, START_TIMEOUT_S)
        try:
            lines = [answer["error"]] if "error" in answer else answer.get("problems", ())
            problems = [redact(str(line)) for line in lines]
            tools = () if problems else tuple(map(_clean, answer["result"]["tools"]))
        except (KeyError, TypeError, ValueError):
            raise EnvironmentFailure(str(child.refuse_answer())) from None
        if problems:
            child.kill(problems[0])
            # A server says itself why it ends.
            line = child.last_line() if self._spec["mcp"] else ""
            problems += [f"It printed: {line}"] if line else []
            names = re.findall(r"KeyError: '(\w+)'", "\n".join(problems))
            advice = (f"It gets that variable with --pass_env {n}." for n in names)
            raise ConfigError([*problems, *(advice if {*names} & {*os.environ} else ())])
        return tools

    async def try_opening(self) -> None:
        """Raise ConfigError unless the environment opens an episode without a row."""
        try:
            await self.reset("trial", NO_ROW)
        except EnvironmentFailure as failure:
            raise ConfigError(
                [
                    f"The environment {self._config.path} does not open an episode without a row: "
                    f"{str(failure).rstrip('.')}. Name rows with --train_files and --val_files in "
                    "place of --episodes and --val_episodes, or return the first messages in reset."
                ]
            ) from None
        finally:
            await self.end_episode("trial")

    async def reset(self, episode: str, row: Mapping[str, Any]) -> Opening:
        """Begin an episode; raises EnvironmentFailure."""
        try:
            result = await self._call_episode("reset", episode, row=row)
        except _CallFailure as failure:
            if not failure.late:
                raise
            at_once = f"environment.max_starts={self._config.max_starts}"
            advice = f"raise --tool_timeout, or lower {at_once}, which begin at once"
            raise _CallFailure(f"{failure} to begin: {advice}", late=True) from None
        try:
            return Opening(_read_messages(result["messages"]))
        except (KeyError, TypeError, ValueError):
            raise self._refuse_answer() from None

    async def step(self, episode: str, message: Message | None) -> tuple[Reply, dict[str, int]]:
        """Return the reply to a message, or to the end of the episode, and what its calls did."""
        started = time.monotonic()
        fields = {"message": message} if message is not None else {}
        operation = "step" if message is not None else "finish"
        result = await self._call_episode(operation, episode, **fields)
        try:
            tools = tuple((str(name), float(seconds)) for name, seconds in result["tools"])
            rewards, metrics = (
                {name: float(value) for name, value in result[kind].items()}
                for kind in ("rewards", "metrics")
            )
            if not all(map(math.isfinite, (*rewards.values(), *metrics.values()))):
                raise ValueError
            messages, error = _read_messages(result["messages"]), str(result["error"])
            seconds = time.monotonic() - started
            done = result["done"] is True
            reply = Reply(messages, done, rewards, error, tools, seconds, metrics)
            return reply, {event: int(result[event]) for event in EVENTS}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._refuse_answer() from None

    async def end_episode(self, episode: str) -> None:
        """Close an episode's environment, if the process still has it."""
        self.episodes.discard(episode)
        if self._started and self._started.done() and not self.ended:
            with suppress(EnvironmentFailure):
                await self._call_episode("close", episode)

    async def _call_episode(self, operation: str, episode: str, **fields: Any) -> dict[str, Any]:
        """Return the result of an operation; raises EnvironmentFailure."""
        timeout = self._config.timeout
        fields = {"operation": operation, "episode": episode, **fields, "timeout": timeout}
        async with self._slots:
            limit = timeout + ANSWER_GRACE_S[self._config.isolation]
            limit += (MCP_ATTEMPTS * timeout + MCP_START_S) if self._spec["mcp"] else 0
            answer = await self._call(fields, limit)
        self.answered = self.answered or operation != "close"
        result = answer.get("result")
        if "error" in answer:
            late, crashed = bool(answer.get("late")), bool(answer.get("crashed"))
            raise _CallFailure(_one_line(answer["error"]), late=late, crashed=crashed)
        if operation != "close" and not isinstance(result, dict):
            raise self._refuse_answer()
        return _clean(result) if isinstance(result, dict) else {}

    async def _call(self, fields: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and return its answer; raises EnvironmentFailure."""
        assert self._child is not None
        try:
            data = json.dumps(fields, default=_make_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"the row or the message cannot be written as JSON: {error}"
            raise _CallFailure(_one_line(reason)) from None
        try:
            answer = json.loads(await self._child.request(data, timeout))
        except TimeoutError:
            raise _CallFailure(self._child.ended, late=True) from None
        except ChildEnded as end:
            raise EnvironmentFailure(_one_line(str(end))) from None
        except (ValueError, RecursionError):
            raise self._refuse_answer() from None
        if not isinstance(answer, dict):
            raise self._refuse_answer()
        return answer

    def _refuse_answer(self) -> EnvironmentFailure:
        """End a process that does not keep to the protocol; returns the failure of its call."""
        assert self._child is not None
        if self._config.isolation == "episode":  # that of the episode alone
            return _CallFailure("its process wrote what is not an answer", crashed=True)
        return EnvironmentFailure(str(self._child.refuse_answer()))

    def kill(self, reason: str) -> None:
        """End the process and its children; its calls fail with the reason."""
        if self._child is not None:
            self._child.kill(reason)

    async def close(self) -> None:
        """Let the process close its environments, then end it, and wait for that."""
        if self._child is not None:
            await self._child.close("the run has ended")
        elif self._started is not None:
            self._started.cancel()


class EnvironmentPool:
    """Environment processes with their episodes; futures have answers or EnvironmentFailures."""

    tools: tuple[Schema, ...] = ()

    def __init__(self, config: Environment, logs: Path | None = None) -> None:
        self._config = config
        self._logs = logs
        self._spec = _build_spec(config)
        self._processes: list[_Process] = []
        self._deaths = [0] * config.num_workers  # of each, one after another without an answer
        self._episodes: dict[str, _Process] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False
        self._error: UserError | None = None
        self._metrics: Counter[str] = Counter()
        self._starts = asyncio.Semaphore(config.max_starts)
        self._loop = LoopThread("environments")

    def start(self, *, opens: bool = False) -> None:
        """Start the processes and read the tools; UserError says what is wrong.

        The environment has to open an episode without a row if it `opens` them.
        """
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        try:
            self.tools = self._loop.call(self._start(opens))
        except EnvironmentFailure as failure:
            raise UserError(_describe_broken(self._config, str(failure), self._logs)) from None

    async def _start(self, opens: bool) -> tuple[Schema, ...]:
        self._processes = [self._make_process(i) for i in range(self._config.num_workers)]
        tools = await self._processes[0].start()
        if opens:
            await self._processes[0].try_opening()
        for process in self._processes:
            process.start()
        return tools

    def _make_process(self, index: int, pause: float = 0.0) -> _Process:
        log = self._logs / f"environment_{index}.log" if self._logs else None
        process = _Process(
            self._config, self._spec, log, lambda: self._replace(index, process), pause
        )
        return process

    def _replace(self, index: int, process: _Process) -> None:
        """Start another process for one that has ended.

        After MAX_DEATHS in a row without an answer, the run is to stop.
        """
        self._run_later(process.close())
        self._deaths[index] = 0 if process.answered else self._deaths[index] + 1
        if self._deaths[index] == MAX_DEATHS:
            self._error = UserError(_describe_broken(self._config, process.ended, self._logs))
            return
        self._metrics["environment/restarts"] += 1
        # A server that its start needs may come back.
        pause = 0.0 if process.start().done() else self._config.timeout
        self._processes[index] = self._make_process(index, pause)
        self._processes[index].start()

    def reset(self, episode: str, row: Mapping[str, Any]) -> Future[Opening]:
        """Begin an episode in the process that has the fewest.

        `row` has prompt, messages, ground_truth, data_source, extra_info, and a seed.
        """
        return self._loop.submit(self._reset(episode, row))

    async def _reset(self, episode: str, row: Mapping[str, Any]) -> Opening:
        if self._error is not None:
            raise self._error
        process = min(self._processes, key=lambda process: len(process.episodes))
        process.episodes.add(episode)
        self._episodes[episode] = process
        try:
            await asyncio.shield(process.start())
            async with self._starts:
                return await process.reset(episode, row)
        except (ConfigError, EnvironmentFailure) as error:
            # A ConfigError: the user has changed the file since the start of the run.
            raise self._end_failed(episode, error) from None

    def step(self, episode: str, message: Message) -> Future[Reply]:
        """Give the policy's message to an episode; it ends when the reply says that it is done.

        The message's `error`, if it has one, says why its tool calls cannot be read.
        """
        return self._loop.submit(self._step(episode, message))

    def finish(self, episode: str) -> Future[Reply]:
        """End an episode at a limit of the run; the reply has the rewards that are still due."""
        return self._loop.submit(self._step(episode, None))

    async def _step(self, episode: str, message: Message | None) -> Reply:
        if self._error is not None:
            raise self._error
        process = self._episodes.get(episode)
        if process is None:
            raise EnvironmentFailure("the episode has ended")
        try:
            reply, events = await process.step(episode, message)
        except EnvironmentFailure as error:
            raise self._end_failed(episode, error) from None
        self._metrics.update({f"environment/{event}": n for event, n in events.items()})
        if reply.done:
            self._end_episode(episode)
        return reply

    def _end_failed(self, episode: str, error: Exception) -> EnvironmentFailure:
        """End an episode because of an error, and return its failure."""
        if isinstance(error, _CallFailure):
            self._metrics["environment/timeouts"] += error.late
            self._metrics["environment/crashes"] += error.crashed
        self._end_episode(episode)
        return EnvironmentFailure(_one_line(str(error)))

    def release(self, episodes: Sequence[str]) -> None:
        """End episodes that are not needed any longer."""
        if not self._closed:
            self._loop.submit(self._release(episodes))

    async def _release(self, episodes: Sequence[str]) -> None:
        for episode in episodes:
            self._end_episode(episode)

    def _end_episode(self, episode: str) -> None:
        process = self._episodes.pop(episode, None)
        if process is not None:
            self._run_later(process.end_episode(episode))

    def _run_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    def pop_metrics(self) -> dict[str, float]:
        """Return the numbers of restarts, and of calls that took too long or crashed."""
        metrics, self._metrics = self._metrics, Counter()
        return {name: float(metrics[name]) for name in (f"environment/{e}" for e in EVENTS)}

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.call(self._close())
        self._loop.close()

    async def _close(self) -> None:
        endings = list(self._endings)
        await asyncio.gather(*(process.close() for process in self._processes), *endings)


def _read_messages(messages: Any) -> tuple[Message, ...]:
    """Return a process's messages; raises TypeError, ValueError or KeyError for anything else."""
    read = tuple(dict(message) for message in messages)
    if not all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in read):
        raise TypeError
    return read


def _clean(value: Any) -> Any:
    """Return a JSON value without keys and lone surrogates, which no tokenizer takes."""
    return _replace_texts(value, Redactor())


def _replace_texts(value: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return replace(value.encode("utf-8", "replace").decode())
    if isinstance(value, dict):
        items = value.items()
        return {_replace_texts(k, replace): _replace_texts(v, replace) for k, v in items}
    return [_replace_texts(v, replace) for v in value] if isinstance(value, list) else value


def _make_plain(value: Any) -> Any:
    """Return what JSON lacks in its forms: an array as a list, a mapping, else a text."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _one_line(text: object) -> str:
    return shorten(" ".join(redact(str(text)).split()), MAX_REASON_CHARS)
