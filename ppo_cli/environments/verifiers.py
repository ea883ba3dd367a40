"""Tasksets of verifiers as environments: `verifiers:NAME`, inside a process with that package.

verifiers drives an episode itself and asks a model for each turn. Here the model is the policy: its
client hands each request to the pool as the reply to the turn before, and waits for the policy's
message. The agent is a chat loop in this process; the rewards of the taskset end the episode.
Written for verifiers 0.4.0. Rows name their task by `extra_info.task`; run as a program, this file
writes them: NAME OUT LIMIT KWARGS.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

# As a program: its folder has this file, which would hide the package.
_HERE = os.path.realpath(os.path.dirname(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != _HERE]

import httpx  # noqa: E402
import verifiers.v1 as vf  # noqa: E402
from verifiers.v1.clients.client import resolve_client  # noqa: E402
from verifiers.v1.configs.agent import agent_config_fields  # noqa: E402
from verifiers.v1.dialects.chat import message_to_wire  # noqa: E402
from verifiers.v1.harnesses.null import NullHarness  # noqa: E402
from verifiers.v1.harnesses.utils.mcp import connect_mcp  # noqa: E402
from verifiers.v1.harnesses.utils.mcp import (  # noqa: E402
    mcp_content_to_chat_content as read_content,
)
from verifiers.v1.interception import server as interception  # noqa: E402
from verifiers.v1.runtimes import ProgramResult  # noqa: E402
from verifiers.v1.utils.loaders import env_config_type, load_environment  # noqa: E402

__all__ = ["PolicyHarness"]  # verifiers finds a harness by this

POLICY_URL = "http://policy.invalid/v1"  # names the policy's client; nothing is sent to it
HARNESS = "ppo_cli_environment_verifiers"  # the name under which the worker imports this file


class PolicyHarness(NullHarness):
    """The chat loop of the `null` harness without a process: replies, tool calls, replies."""

    async def setup(self, runtime: Any) -> None:
        """Nothing: the loop runs in this process."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: Any, tool_interception_url: str | None = None,
    ) -> Any:  # fmt: skip
        """Ask the model and run its tool calls until it makes none."""
        episode = Taskset.asking[ctx.model]
        episode.trace = trace
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        messages += [message_to_wire(m) for m in prompt or () if not isinstance(prompt, str)]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        headers = {"Authorization": f"Bearer {secret}"}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            tools, names, clients = await connect_mcp(servers, stack)
            url, fields = f"{endpoint}/chat/completions", {"tools": tools} if tools else {}
            while True:
                body = {"model": ctx.model, "messages": messages, **fields}
                answer = await client.post(url, headers=headers, json=body)
                if answer.is_error:  # a limit of the taskset has ended the conversation
                    return ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    name, text = call["function"]["name"], call["function"]["arguments"]
                    content: Any = f"error: unknown tool {name!r}"
                    is_error = name not in names
                    if name in names:
                        server, tool = names[name]
                        ask = operator.methodcaller("call_tool", tool, json.loads(text))
                        result = await clients[server].run(ask)
                        content, is_error = read_content(result.content), result.is_error
                    episode.errors += [f"{name}: {content}"] if is_error else []
                    reply = {"role": "tool", "tool_call_id": call["id"], "name": name}
                    messages.append({**reply, "content": content})


class PolicyClient(vf.Client):
    """The model of verifiers: asks the episode that the request's model names."""

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: Any = None,
        turn: Any = None, headers: Any = None,
    ) -> Any:  # fmt: skip
        """Return the policy's message as a completion."""
        message = await Taskset.asking[body["model"]].ask(body)
        calls = []
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
            calls.append({**call, "function": {"name": name, "arguments": arguments}})
        reply = {"role": "assistant", "content": message["content"]}
        raw = {
            "id": "policy", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{
                "index": 0, "finish_reason": "tool_calls" if calls else "stop",
                "message": {**reply, "tool_calls": calls} if calls else reply,
            }],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }  # fmt: skip
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


interception.resolve_client = lambda config: (
    PolicyClient() if config.base_url == POLICY_URL else resolve_client(config)
)


class Taskset:
    """A taskset with its environment, and its tasks by index."""

    asking: dict[str, Episode] = {}  # noqa: RUF012  (by the name of their model)

    def __init__(self, name: str, kwargs: dict[str, Any]) -> None:
        taskset = {**kwargs.get("taskset", {}), "id": name}
        fields: dict[str, Any] = {**kwargs, "taskset": taskset}
        config_type = env_config_type(name, kwargs.get("id", ""))
        roles = agent_config_fields(config_type.model_validate(fields))
        playing = [role for role in roles if "model" not in kwargs.get(role, {})]
        if len(playing) != 1:
            raise ValueError(
                f"its roles are {', '.join(roles)}: the policy plays one of them. Set the models "
                "of all others with environment.kwargs.ROLE.model=NAME"
            )
        # The chat loop runs here; the default is a remote machine.
        role = {"runtime": {"type": "subprocess"}, **kwargs.get(playing[0], {})}
        fields[playing[0]] = {**role, "harness": {"id": HARNESS}}
        self.env = load_environment(config_type.model_validate(fields))
        self._iterator: Iterator[Any] = iter(self.env.taskset)
        self._tasks: list[Any] = []

    def find_task(self, row: dict[str, Any]) -> Any:
        """Return the task of a row; raises ValueError or IndexError."""
        index = row["extra_info"].get("task")
        if not isinstance(index, int):
            raise ValueError(
                "the row has no extra_info.task: write rows with scripts/setup_verifiers"
            )
        self._tasks += itertools.islice(self._iterator, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            last = len(self._tasks) - 1
            raise ValueError(f"the row is of task {index}, and the last one is {last}")
        return self._tasks[index]


class Episode:
    """An episode under way: a task of verifiers that waits for the policy now and then."""

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset
        self._model = f"policy-{id(self)}"
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._run: asyncio.Task[Any] | None = None
        self._num_messages = 0
        self.trace: Any = None  # of the conversation under way
        self.errors: list[str] = []  # of tool calls, since the last reply

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools that the first task offers."""
        body = await self._begin({"extra_info": {"task": 0}})
        schemas: list[dict[str, Any]] = body.get("tools", [])
        return schemas

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin the task of a row; returns what verifiers asks the model first.

        The row's system messages are before it, unless the task has one.
        """
        body = await self._begin(row)
        opening = [read_message(message) for message in body["messages"]]
        if opening and opening[0]["role"] == "system":
            return opening
        return [*(m for m in row["messages"] if m["role"] in ("system", "developer")), *opening]

    async def _begin(self, row: dict[str, Any]) -> dict[str, Any]:
        Taskset.asking[self._model] = self
        client = vf.EvalClientConfig(base_url=POLICY_URL, api_key_var="PATH")
        context = vf.ModelContext(model=self._model, client=client)
        task = self._taskset.find_task(row)
        self._run = asyncio.ensure_future(self._taskset.env.run_episode(task, context))
        body = await self._next_request()
        if body is None:
            raise RuntimeError(f"it ended without a turn: {read_errors(self._run.result())}")
        self._num_messages = len(body["messages"])
        return body

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer verifiers, and return its next messages, or the rewards at the end."""
        if message.get("error"):
            reply = {"role": "tool", "content": f"Error: {message['error']}"}
            return {"messages": [reply], "error": message["error"]}
        assert self._answer is not None and self._run is not None
        self._answer.set_result(message)
        body = await self._next_request()
        error = "; ".join(self.errors)
        self.errors.clear()
        if body is not None:
            # After those of before, and the policy's own.
            replies = body["messages"][self._num_messages + 1 :]
            self._num_messages = len(body["messages"])
            return {"messages": [read_message(reply) for reply in replies], "error": error}
        return {"messages": None, "done": True, "error": error, **read_result(self._run.result())}

    async def finish(self) -> dict[str, Any]:
        """End the conversation as the limit of turns in verifiers does; returns its result."""
        assert self._run is not None and self._answer is not None
        while not self._run.done():
            self.trace.stop("max_turns")
            self._answer.set_exception(RuntimeError("a limit has ended the episode"))
            await self._next_request()
        return read_result(self._run.result())

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the policy's message in answer to a request of verifiers."""
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(body)
        return await self._answer

    async def _next_request(self) -> dict[str, Any] | None:
        """Return the next request, None if the episode has ended."""
        assert self._run is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([request, self._run], return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        return None

    async def close(self) -> None:
        """Cancel what verifiers still does for this episode."""
        Taskset.asking.pop(self._model, None)
        if self._run is not None:
            self._run.cancel()


def read_result(episode: Any) -> dict[str, dict[str, float | None]]:
    """Return reward and metrics of an episode of verifiers by name; RuntimeError if it failed."""
    if not episode.ok:
        raise RuntimeError(read_errors(episode))
    rewards = {name: r.value for t in episode.traces for name, r in t.rewards.items() if r}
    metrics = {name: value for t in episode.traces for name, value in t.metrics.items()}
    return {"reward": rewards, "metrics": metrics}


def read_errors(episode: Any) -> str:
    """Return what went wrong in an episode of verifiers."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return "; ".join(f"{error.type}: {error.message}" for error in errors) or "no error"


def read_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a request as chat templates take it: texts instead of parts."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text", f"[{part.get('type')}]") for part in content)
    return {**message, "content": content or ""}


async def load(name: str, kwargs: dict[str, Any], worker: Any) -> Callable[[], Episode]:
    """Return what makes episodes of a taskset; raises the worker's Problems."""
    try:
        taskset = await worker.run_call(Taskset, name, kwargs)
        await worker.enter(taskset.env.serving())
    except Exception as error:
        text = worker.describe_error(error)
        raise worker.Problems(f"--environment verifiers:{name} does not load: {text}.") from error
    return lambda: Episode(taskset)


def write_rows(name: str, out: str, limit: str, kwargs: str = "{}") -> None:
    """Write a data file whose rows are the first tasks of a taskset."""
    sys.modules[HARNESS] = sys.modules[__name__]
    tasks = Taskset(name, json.loads(kwargs)).env.taskset
    with open(out, "w", encoding="utf-8") as file:
        for index, task in enumerate(itertools.islice(tasks, int(limit))):
            system = [{"role": "system", "content": task.data.system_prompt}]
            # Without a prompt, verifiers opens the episode, and the text of the row is not read.
            text = task.data.prompt_text or f"Task {index} of {name}."
            user = [{"role": "user", "content": text}]
            row = {
                "prompt": [*system, *user] if task.data.system_prompt else user,
                "ground_truth": str(getattr(task.data, "answer", "") or ""),
                "data_source": f"verifiers:{name}", "extra_info": {"task": index},
            }  # fmt: skip
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_rows(*sys.argv[1:])
