"""Tools: schemas from functions, calls checked against them, and MCP servers."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppo_cli.environments import pool as pools
from ppo_cli.environments import worker
from ppo_cli.environments.base import EnvironmentFailure, Reply
from ppo_cli.environments.mcp import LOOK_S, SPARES, Connection, Server, ServerEnded, open_server
from ppo_cli.environments.pool import EnvironmentPool, check_environment
from ppo_cli.environments.servers import read_servers
from ppo_cli.errors import UserError
from ppo_cli.processes.reaper import descendants
from ppo_cli.secrets.redact import redact
from tests.environments.conftest import ROW
from tests.environments.test_pool import Start, open_episodes
from tests.settings import complete_environment
from tests.waiting import wait_until

TOOLS = '''
import asyncio, enum, os, time
from typing import Any, Literal, Optional

class Unit(enum.Enum):
    KM = "km"
    MILES = "miles"

def route(
    start: str, stops: list[int], *, speed: float = 1.5, unit: Unit = Unit.KM,
    mode: Literal["car", "foot"] = "car", via: Optional[str] = None, tags: dict[str, bool] = {},
) -> dict:
    """Find a route
    between places.

    Args:
        start: Where it begins,
            a town.
        stops (list): The numbers of the stops.

    Returns:
        A dict.
    """
    return {"start": start, "unit": unit.name, "speed": speed, "stops": stops}

async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return f"waited {seconds}"

def block(seconds: float):
    """Block a thread."""
    time.sleep(seconds)

def spin(seconds: float):
    """Hold the lock of the interpreter."""
    return 9**9**9

def leave():
    """End the process."""
    print("bye", flush=True)
    os._exit(4)

def fail(kind: int):
    """Fail in one of several ways."""
    if kind == 0:
        raise KeyError("of the user")
    if kind == 1:
        raise SystemExit
    if kind == 2:
        return {1, 2}
    return "long " * 2000

def _helper(x): ...
'''
# Neither ends before the other one runs.
MEETING = """
import threading
both = threading.Barrier(2, timeout=15)

async def meet():
    'Wait for the other.'
    await asyncio.to_thread(both.wait)
    return "met"

def answer():
    'Wait in a thread.'
    both.wait()
"""
MEMORY = """
import threading
both, seen = threading.Barrier(2, timeout=15), []

def remember():
    'Count its calls.'
    seen.append(1)
    return len(seen)

def meet():
    'Wait for the other call.'
    return both.wait() * 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    return path


def call(pool: EnvironmentPool, *calls: tuple[str, dict[str, Any]], episode: str = "a") -> Reply:
    return pool.step(episode, make_message(*calls)).result(60)


def make_message(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    tool_calls = [
        {"id": f"id{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def test_schemas_are_read(start: Start, file: Path) -> None:
    pool = start(tools=str(file))
    assert [t["function"]["name"] for t in pool.tools] == [
        "route", "wait", "block", "spin", "leave", "fail",
    ]  # fmt: skip
    assert pool.tools[0] == {
        "type": "function",
        "function": {
            "name": "route",
            "description": "Find a route between places.",
            "parameters": {
                "type": "object",
                "properties": {
                    "start": {"type": "string", "description": "Where it begins, a town."},
                    "stops": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": "The numbers of the stops.",
                    },
                    "speed": {"type": "number", "default": 1.5},
                    "unit": {"type": "string", "enum": ["km", "miles"], "default": "km"},
                    "mode": {"type": "string", "enum": ["car", "foot"], "default": "car"},
                    "via": {"type": "string", "nullable": True},
                    "tags": {
                        "type": "object",
                        "additionalProperties": {"type": "boolean"},
                        "default": {},
                    },
                },
                "required": ["start", "stops"],
            },
        },
    }
    assert [t["function"]["name"] for t in start(tools=f"{file}:wait,fail").tools] == [
        "wait",
        "fail",
    ]


def test_calls_are_answered_in_order(start: Start, file: Path) -> None:
    file.write_text(TOOLS + MEETING)
    pool = start(tools=str(file))
    open_episodes(pool, "a")
    arguments = {"start": "Ulm", "stops": [1, 2.0], "unit": "miles", "speed": 2, "via": None}
    reply = call(pool, ("meet", {}), ("answer", {}), ("route", arguments))
    contents = [message["content"] for message in reply.messages]
    assert contents[:2] == ["met", "null"]
    assert contents[2] == '{"start": "Ulm", "unit": "MILES", "speed": 2.0, "stops": [1, 2]}'
    assert reply.messages[1] == {
        "role": "tool", "content": "null", "name": "answer", "tool_call_id": "id1",
    }  # fmt: skip
    assert not reply.done and not reply.error
    assert [name for name, _ in reply.tools] == ["meet", "answer", "route"]
    ((_, seconds),) = call(pool, ("wait", {"seconds": 0.3})).tools
    assert 0.3 <= seconds < 20.0
    final = pool.step("a", {"role": "assistant", "content": "the answer"}).result(60)
    assert final.done and not final.messages


def test_a_wrong_call_is_answered(start: Start, file: Path) -> None:
    pool = start(tools=str(file))
    open_episodes(pool, "a")
    wrong = {"stops": [1, "2"], "speed": True, "unit": "m", "tags": {"x": 1}, "sart": "Ulm"}
    reply = call(
        pool, ("route", wrong), ("rout", {}), ("wait", {"seconds": "0.1"}),
        *(("fail", {"kind": kind}) for kind in range(4)),
    )  # fmt: skip
    contents = [message["content"] for message in reply.messages]
    assert contents[0] == (
        "Error: route: 'start' is missing; 'stops[1]' must be an integer, not \"2\"; 'speed' must "
        'be a number, not true; \'unit\' must be one of "km", "miles", not "m"; \'tags.x\' must be '
        "true or false, not 1; there is no argument 'sart'. It takes start: a text, stops: a list, "
        'speed: a number, unit: one of "km", "miles", mode: one of "car", "foot", via: a text, '
        "tags: an object."
    )
    assert contents[1] == (
        "Error: there is no tool 'rout'. Did you mean 'route'? The tools are: route, wait, block, "
        "spin, leave, fail."
    )
    assert "'seconds' must be a number, not \"0.1\"" in contents[2]
    assert "rout" not in dict(reply.tools)
    assert len(call(pool, ("rout" * 9999, {})).error) <= 4096
    # Type and message alone: no traceback, no path.
    assert contents[3:5] == ["Error: KeyError: 'of the user'", "Error: SystemExit"]
    assert contents[5] == "[1, 2]"
    assert "5,904 characters left out" in contents[6] and len(contents[6]) <= 4096
    assert reply.error.startswith("Error: route") and not reply.done
    # A call that could not be read at all.
    message = {"role": "assistant", "content": "{", "error": "The tool call is not valid JSON."}
    reply = pool.step("a", message).result(60)
    content = "Error: The tool call is not valid JSON."
    assert reply.messages == ({"role": "tool", "content": content},)
    assert reply.error and not reply.done


RECORDS = """
import dataclasses, functools
from typing import Annotated, Sequence, TypedDict, Union
import numpy as np
from pydantic import BaseModel, Field

class Point(TypedDict):
    x: float

class Order(BaseModel):
    item: str
    count: int = 1

@dataclasses.dataclass
class Place:
    point: Point
    name: str | None = None

def buy(
    orders: list[Order], at: Place, size: Annotated[Union[int, str], "A number or a word."],
    pair: tuple[int, int] = (1, 2), names: Sequence[str] = (),
):
    'Buy.'
    return [orders, at, size, pair, names]

def _hide(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@_hide
async def results():
    'Return what JSON lacks.'
    letters = (letter for letter in "x")
    return {"a": np.float32(0.5), "b": np.arange(2), "c": b"x", "d": object(), "e": letters}
"""


def test_records_unions_and_arrays(start: Start, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(RECORDS)
    pool = start(tools=str(tmp_path / "shop.py"))
    fields = pool.tools[0]["function"]["parameters"]["properties"]
    assert fields["orders"]["items"]["required"] == ["item"]
    assert fields["at"]["properties"]["point"]["required"] == ["x"]
    assert fields["size"] == {"type": ["integer", "string"], "description": "A number or a word."}
    open_episodes(pool, "a")
    right = {"orders": [{"item": "pear"}], "at": {"point": {"x": 1}}, "size": "big", "pair": [3, 4]}
    wrong = {"orders": [{"count": "1"}], "at": {"point": {}}, "size": True}
    reply = call(pool, ("buy", right), ("buy", wrong), ("results", {}))
    contents = [message["content"] for message in reply.messages]
    order, place = '{"item": "pear", "count": 1}', '{"point": {"x": 1.0}, "name": null}'
    assert contents[0] == f'[[{order}], {place}, "big", [3, 4], []]'
    assert contents[1].startswith(
        "Error: buy: 'orders[0].item' is missing; 'orders[0].count' must be an integer, not \"1\"; "
        "'at.point.x' is missing; 'size' must be an integer or a text, not true. It takes orders:"
    )
    assert contents[2] == '{"a": 0.5, "b": [0, 1], "c": "x", "d": "<object object>", "e": ["x"]}'


@pytest.mark.slow
def test_a_tool_that_takes_too_long_is_answered(start: Start, file: Path) -> None:
    pool = start(tools=str(file), timeout=2.0)
    open_episodes(pool, "a", "b")
    reply = call(pool, ("wait", {"seconds": 4321}), ("wait", {"seconds": 0}))
    assert reply.messages[0]["content"] == "Error: timeout: took longer than 2 s"
    assert reply.messages[1]["content"] == "waited 0.0"
    # The episode goes on, also after a call that holds the interpreter's lock.
    reply = call(pool, ("spin", {"seconds": 0}))
    assert reply.messages[0]["content"] == "Error: timeout: took longer than 2 s"
    assert call(pool, ("wait", {"seconds": 0})).messages[0]["content"] == "waited 0.0"
    # Who ends the process ends it for the calls of the same message.
    reply = call(pool, ("leave", {}), ("wait", {"seconds": 4321}), ("nothing", {}))
    errors = [message["content"] for message in reply.messages]
    assert errors[:2] == ["Error: its process ended with exit code 4: bye"] * 2
    assert errors[2].startswith("Error: there is no tool 'nothing'")
    assert call(pool, ("wait", {"seconds": 0}), episode="b").messages[0]["content"] == "waited 0.0"
    assert pool.pop_metrics() == {
        "environment/restarts": 0, "environment/timeouts": 2, "environment/crashes": 2,
    }  # fmt: skip


@pytest.mark.slow
def test_without_async_functions_a_call_alone_ends_with_its_process(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "tools.py").write_text(TOOLS.replace("async def wait", "async def _wait") + MEMORY)
    pool = start(tools=f"{tmp_path}/tools.py", timeout=2.0)
    open_episodes(pool, "a")
    # Several calls of a message run side by side, and one of them may be late.
    calls = ("block", {"seconds": 4321}), ("remember", {}), ("meet", {}), ("meet", {})
    contents = [message["content"] for message in call(pool, *calls).messages]
    assert contents == ["Error: timeout: took longer than 2 s", "1", "0", "0"]
    assert call(pool, ("remember", {})).messages[0]["content"] == "2"
    reply = call(pool, ("spin", {"seconds": 0}))
    assert reply.messages[0]["content"] == "Error: timeout: took longer than 2 s"
    assert call(pool, ("remember", {})).messages[0]["content"] == "1"
    assert pool.pop_metrics()["environment/timeouts"] == 2


PROCESS = """
import os, subprocess, threading, time

def act(seconds: float, ends: bool = False, leaves: bool = False, spoils: bool = False):
    'Return the process, late, or end it, or have it end soon; or leave a daemon.'
    time.sleep(seconds)
    if spoils:
        threading.Timer(0.3, os._exit, (1,)).start()
    if leaves:
        return subprocess.getoutput("setsid sleep 4321 > /dev/null 2>&1 & echo $!")
    return os._exit(3) if ends else os.getpid()
"""


@pytest.mark.parametrize("stateless", [True, False])
def test_calls_that_leave_nothing_behind_share_forks(
    start: Start, tmp_path: Path, stateless: bool
) -> None:
    (tmp_path / "tools.py").write_text(f"STATELESS = {stateless}\n{PROCESS}")
    pool = start(tools=f"{tmp_path}/tools.py")
    slow = [f"slow {number}" for number in range(9)]
    open_episodes(pool, "a", "b", "c", *slow)
    reply = call(pool, ("act", {"seconds": 0, "leaves": True}), episode="c")
    pool.release(["c"])
    daemon = int(reply.messages[0]["content"])
    wait_until(lambda: daemon not in descendants(os.getpid()))
    first, second = (
        call(pool, ("act", {"seconds": 0}), episode=episode).messages[0]["content"]
        for episode in "ab"
    )
    assert (first == second) == stateless
    error = call(pool, ("act", {"seconds": 0, "ends": True})).messages[0]["content"]
    assert error == "Error: its process ended with exit code 3"
    # What a call leaves behind after all costs no other one.
    spoilt = call(pool, ("act", {"seconds": 0, "spoils": True})).messages[0]["content"]
    later = call(pool, ("act", {"seconds": 0.6}), episode="b").messages[0]["content"]
    assert later.isdigit() and later != spoilt
    # More slow calls than shared forks keep no other waiting.
    waiting = [pool.step(name, make_message(("act", {"seconds": 4321}))) for name in slow]
    assert call(pool, ("act", {"seconds": 0}), episode="b").messages[0]["content"].isdigit()
    assert not any(reply.done() for reply in waiting)


def test_functions_that_are_no_tools_are_refused_together(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        "def first(x, *rest):\n    pass\n\ndef second(when: complex, who: 'Nobody'): 'Do.'\n"
        "def third(when: complex) -> str:\n    'Do.'\n"
    )
    with pytest.raises(UserError) as error:
        check_environment(complete_environment(tools=str(path)))
    lines = str(error.value).splitlines()
    assert lines == [
        "--tools tools.py: first (line 1) has no docstring; write what it does, which the policy "
        "reads, or begin its name with _ if it is not a tool.",
        "--tools tools.py: first (line 1) has no type hint for 'x'; write x: TYPE, which is str, "
        "int, float, bool, list, dict, Literal, an Enum, a dataclass, a model of pydantic, or a "
        "Union of these.",
        "--tools tools.py: first (line 1) takes *rest; a tool has named arguments only.",
        "--tools tools.py: second (line 4) has a type hint that does not work: name 'Nobody' is "
        "not defined.",
        "--tools tools.py: third (line 5) has the type <class 'complex'> for 'when'; write str, "
        "int, float, bool, list, dict, Literal, an Enum, a dataclass, a model of pydantic, or a "
        "Union of these.",
    ]
    path.write_text(f"STATELESS = 1\n{PROCESS}")
    with pytest.raises(UserError, match=r"STATELESS is 1; write True or False\."):
        check_environment(complete_environment(tools=str(path)))
    path.write_text("def third(): 'Do.'")
    with pytest.raises(UserError, match=r"has no 'thrd'\. Did you mean 'third'"):
        check_environment(complete_environment(tools=f"{path}:thrd"))


SERVER = """
import asyncio, os
from mcp import MCPError
from mcp.server import MCPServer

server = MCPServer("numbers")

@server.tool()
def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.\"\"\"
    return a + b

@server.tool()
def fail() -> str:
    \"\"\"Fail.\"\"\"
    raise ValueError("of the server")

@server.tool()
def end() -> str:
    \"\"\"End.\"\"\"
    os._exit(3)

@server.tool()
def forget() -> str:
    \"\"\"Answer as a server at an address does after it was started again.\"\"\"
    raise MCPError(code=-32600, message="Session not found")

@server.tool()
def stop() -> str:
    \"\"\"Stop the process.\"\"\"
    os.kill(os.getpid(), 19)
    return "gone on"

@server.tool()
async def nap(seconds: float) -> str:
    \"\"\"Rest.\"\"\"
    await asyncio.sleep(seconds)
    return "rested"

@server.tool()
def key() -> str:
    \"\"\"Read a variable.\"\"\"
    return os.environ["ENVIRONMENT_TEST_KEY"]

server.run("stdio")
"""


@pytest.mark.slow
def test_an_installation_may_be_below_a_link(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp.server")
    (tmp_path / "link").symlink_to(pools.WORKER.parents[1])
    monkeypatch.setattr(pools, "WORKER", tmp_path / "link" / "environments" / "worker.py")
    (tmp_path / "server.py").write_text(SERVER)
    pool = start(mcp=(shlex.join([sys.executable, str(tmp_path / "server.py")]),))
    assert "add" in [schema["function"]["name"] for schema in pool.tools]


@pytest.mark.slow
def test_an_mcp_server_has_tools(
    start: Start, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp.server")
    monkeypatch.setenv("ENVIRONMENT_TEST_KEY", "value")
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    pool = start(
        tools=f"{file}:wait",
        mcp=(shlex.join([sys.executable, str(server)]),),
        pass_env=("ENVIRONMENT_TEST_KEY",),
    )
    names = [schema["function"]["name"] for schema in pool.tools]
    assert names == ["wait", "add", "fail", "end", "forget", "stop", "nap", "key"]
    assert pool.tools[1]["function"]["description"] == "Add two numbers."
    assert pool.tools[1]["function"]["parameters"]["required"] == ["a", "b"]
    open_episodes(pool, "a", "b")
    reply = call(
        pool, ("add", {"a": 2, "b": 3}), ("fail", {}), ("add", {"a": "x", "b": 3}), ("key", {}),
    )  # fmt: skip
    contents = [message["content"] for message in reply.messages]
    assert contents[0] == "5" and contents[3] == "value"
    assert contents[1] == "Error: Error executing tool fail"
    assert contents[2].startswith("Error: ") and "valid integer" in contents[2]
    # An error is no end, whatever it says.
    assert call(pool, ("forget", {})).messages[0]["content"] == "Error: Session not found"
    assert not any(pool.pop_metrics().values())
    # Calls that end the server, or stop it, cost their own episodes.
    names = [str(number) for number in range(6)]
    open_episodes(pool, *names)
    for tool in ("end", "stop"):
        calls = {name: (tool, {}) if name in "24" else ("add", {"a": 1, "b": 1}) for name in names}
        waiting = [pool.step(name, make_message(one)) for name, one in calls.items()]
        answers = [reply.result(200).messages[0]["content"] for reply in waiting]
        error = "ended its MCP server" if tool == "end" else "timeout"
        assert [answer if answer == "2" else error in answer for answer in answers] == [
            "2", "2", True, "2", True, "2",
        ]  # fmt: skip
        events = pool.pop_metrics()
        assert events["environment/crashes" if tool == "end" else "environment/timeouts"] == 2
        assert events["environment/restarts"] == 1
    # Who began before an answered call is not guilty of the end of the server.
    resting = pool.step("0", make_message(("nap", {"seconds": 2})))
    assert call(pool, ("add", {"a": 1, "b": 1})).messages[0]["content"] == "2"
    assert "ended" in call(pool, ("end", {}), episode="1").messages[0]["content"]
    assert resting.result(60).messages[0]["content"] == "rested"


class Serial:
    """A client of an MCP server that answers one call after the other, in `seconds`."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def call_tool(self, name: str, arguments: dict[str, float]) -> Any:
        async with self._lock:
            await asyncio.sleep(arguments["seconds"])
        block = SimpleNamespace(type="text", text=name)
        return SimpleNamespace(content=[block], is_error=False)

    async def list_tools(self, **_: Any) -> None:
        await self.call_tool("", {"seconds": 0})


def test_calls_that_wait_for_others_at_an_mcp_server_are_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def connect(_: Server) -> Connection:
        return Connection(Serial(), lambda: None)

    async def ask_all() -> list[str]:
        spec = {"name": "serial", "label": "--mcp serial"}
        server = Server(SimpleNamespace(MCPError=OSError), spec, 1.0, worker, [], ValueError)
        await server.start()
        return await asyncio.gather(*(server.call("done", seconds=0.25) for _ in range(6)))

    monkeypatch.setattr(Server, "_connect", connect)
    assert asyncio.run(ask_all()) == ["done"] * 6


class Mortal:
    """A client of an MCP server that `end` ends, and `farewell` after its answer.

    After `harm` it answers no call, but lists its tools; of those beside `steal` it never sees one.
    `runs` has the calls of all servers.
    """

    def __init__(self, runs: list[str]) -> None:
        self._runs, self._lives, self._harmed, self._steals = runs, True, False, False

    async def call_tool(self, name: str, _: dict[str, Any]) -> Any:
        self._runs.append(name)
        is_lost, self._steals = self._steals, name == "steal"
        await asyncio.sleep(600 if self._harmed or is_lost else 0.02)
        self._harmed = name == "harm"
        self._lives &= name != "end"
        answer = await self.list_tools()
        self._lives &= name != "farewell"
        return answer

    async def list_tools(self, **_: Any) -> Any:
        if not self._lives:
            raise OSError
        return SimpleNamespace(content=[], structured_content=None, is_error=False)


def test_a_call_that_ends_its_mcp_server_is_run_again_only_if_others_may_have_ended_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, starting, peak = list[str](), 0, 0

    async def connect(_: Server) -> Connection:
        nonlocal starting, peak
        starting += 1
        peak = max(peak, starting)
        await asyncio.sleep(0.3)
        starting -= 1
        return Connection(Mortal(runs), lambda: None)

    async def ask_all() -> None:
        spec = {"name": "mortal", "label": "--mcp mortal"}
        server = Server(SimpleNamespace(MCPError=OSError), spec, 5.0, worker, [], ValueError)
        await server.start()
        calls = (server.call(name) for name in ("end", *["done"] * 7))
        end, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(end, ServerEnded) and others == [""] * 7 and runs.count("end") == 2
        # Who comes right after an answered call is not guilty.
        assert [await server.call(name) for name in ("farewell", "done")] == ["", ""]
        await asyncio.sleep(LOOK_S)
        with pytest.raises(ServerEnded):
            await server.call("end")
        assert runs.count("end") == 3

    async def ask_harmed() -> None:
        spec = {"name": "mortal", "label": "--mcp mortal"}
        server = Server(SimpleNamespace(MCPError=OSError), spec, 1.0, worker, [], ValueError)
        await server.start()
        for first, name in (("end", "harm"), ("end", "done"), ("steal", "done")):
            calls = (server.call(each) for each in (first, *[name] * 3))
            _, *others = await asyncio.gather(*calls, return_exceptions=True)
            assert others == [""] * 3

    monkeypatch.setattr(worker, "TURN_S", 0.1)
    monkeypatch.setattr(Server, "_connect", connect)
    asyncio.run(ask_all())
    assert peak == SPARES
    asyncio.run(ask_harmed())


ODD_SERVER = r"""
import json, os, socket, sys, time
WAYS = ("flood", "long", "records", "half", "plain", "deaf", "stop", "stray")
port = sys.argv[1:] and socket.create_server(("127.0.0.1", int(sys.argv[1])))
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    way = request.get("params", {}).get("name")
    if way == "stop":
        os.kill(os.getpid(), 19)
    if way == "flood":
        print("\n[1]\n" + '{"jsonrpc": "2.0", "method": "notifications/x"}\n' * 100_000, flush=True)
    result = {
        "initialize": {
            "protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
            "serverInfo": {"name": "odd", "version": "1"},
        },
        "tools/list": {"tools": [{"name": way, "inputSchema": {"type": "object"}} for way in WAYS]},
    }.get(request["method"])
    text = "x" * (9 << 20) if way in ("long", "records") else "done"
    record = {"id": request["id"] + 1}
    result = result or {"_meta": record, "content": [{"type": "text", "text": text, **record}]}
    answer = {"jsonrpc": "2.0", "id": request["id"], "result": result}
    if way == "records":
        answer = dict(reversed(answer.items()))
    if way == "stray":  # the answer to the next request, before it is read
        text = {"content": [{"type": "text", "text": "of another call"}]}
        print(json.dumps({**answer, "id": request["id"] + 1, "result": text}), flush=True)
    if way == "half":
        print(json.dumps(answer)[:40] + "and a print", end="", flush=True)
        continue
    print(json.dumps(answer), flush=True)
    if way == "deaf":
        os.close(0)
        time.sleep(600)
"""


@pytest.mark.slow
def test_an_mcp_server_that_floods_or_reads_no_more_harms_no_other_call(
    start: Start, tmp_path: Path
) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(ODD_SERVER)
    command = shlex.join([sys.executable, f"{tmp_path}/server.py"])
    pool = start(mcp=(command,), num_workers=1, timeout=5.0)
    ways = ("flood", "long", "records", "stray", "plain", "deaf", "plain", "plain")
    open_episodes(pool, *map(str, range(len(ways))))
    waiting = [pool.step(str(i), make_message((way, {}))) for i, way in enumerate(ways)]
    answers = [reply.result(200).messages[0]["content"] for reply in waiting]
    assert {answers.pop(1), answers.pop(1)} == {"Error: the answer has more than 8 MiB"}
    assert answers == ["done"] * 6
    # Half a message and a print in front of an answer do not hide it.
    waiting = [
        pool.step(str(i), make_message((way, {})))
        for i, way in enumerate(("half", "plain", "plain"))
    ]
    answers = [reply.result(60).messages[0]["content"] for reply in waiting]
    assert answers == ["Error: timeout: took longer than 5 s", "done", "done"]


@pytest.mark.slow
def test_an_mcp_server_with_a_port_of_its_own_is_replaced(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(ODD_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = shlex.join([sys.executable, f"{tmp_path}/server.py", str(port)])
    pool = start(mcp=(command,), num_workers=1, timeout=2.0)
    open_episodes(pool, "a", "b")
    stopped = pool.step("a", make_message(("stop", {})))
    assert "timeout" in stopped.result(60).messages[0]["content"]
    assert call(pool, ("plain", {}), episode="b").messages[0]["content"] == "done"
    assert pool.pop_metrics()["environment/restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    ["cat; sleep 0.8; touch saved", "trap 'touch saved; exit' TERM; while sleep 0.1; do :; done"],
)
def test_an_mcp_server_saves_its_state_at_its_end(tmp_path: Path, program: str) -> None:
    pytest.importorskip("mcp")
    spec = {"command": "sh", "args": ["-c", program], "cwd": str(tmp_path), "label": "sh"}

    async def end() -> None:
        async with open_server(spec, {}, worker.reaper):
            pass

    asyncio.run(end())
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_an_mcp_server_that_does_not_start_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("mcp.server")
    (tmp_path / "server.py").write_text("import sys; sys.exit('no key')")
    with pytest.raises(UserError, match=r"Connection closed\. Name the .*\nIt printed: no k"):
        command = shlex.join([sys.executable, f"{tmp_path}/server.py"])
        check_environment(complete_environment(mcp=(command,)))
    # A folder of the path may be one that this user may not look into.
    with pytest.raises(UserError, match=r"'no-such-program x' does not start: (FileNot|Permiss)"):
        check_environment(complete_environment(mcp=("no-such-program x",)))
    with pytest.raises(UserError, match=r"'http://127\.0\.0\.1:1/mcp' does not answer: Con"):
        check_environment(complete_environment(mcp=("http://127.0.0.1:1/mcp",)))


@pytest.fixture
def mcp_file(tmp_path: Path) -> Path:
    """Servers `one` and `two`, which count, in the form that hosts read."""
    pytest.importorskip("mcp.server")
    (tmp_path / "server.py").write_text(COUNTER)
    program = {"command": sys.executable, "args": [f"{tmp_path}/server.py"]}
    env = {"ENVIRONMENT_TEST_KEY": "${ENVIRONMENT_TEST_NAME}", "OTHER": "${NOT_SET:-usual}"}
    servers = {"one": {**program, "env": env, "cwd": "/"}, "two": {**program, "type": "stdio"}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return tmp_path / "mcp.json"


COUNTER = """
import os, time
from mcp.server import MCPServer

server, counts = MCPServer("counter"), []

@server.tool()
def count() -> list:
    'Count the calls.'
    counts.append(1)
    names = "ENVIRONMENT_TEST_KEY", "OTHER", "AN_ORDINARY"
    return [len(counts), os.getcwd(), *map(os.environ.get, names)]

@server.tool()
def nothing():
    'Do nothing.'

server.run("stdio")
time.sleep(0.2)
open(__file__ + ".saved", "w").close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["process", "episode"])
def test_servers_of_a_file(
    start: Start, mcp_file: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    monkeypatch.setenv("ENVIRONMENT_TEST_NAME", "value")
    monkeypatch.setenv("AN_ORDINARY", "of the program")
    functions = mcp_file.with_name("own.py")
    functions.write_text("def count():\n    'A function.'\n    return 0\n")
    mcp = ("one:count", "two")
    pool = start(tools=f"{functions}", mcp_config=str(mcp_file), mcp=mcp, mcp_scope=scope)
    names = [tool["function"]["name"] for tool in pool.tools]
    assert names == ["count", "one_count", "two_count", "nothing"]
    open_episodes(pool, "a", "b")
    for episode, times in {"a": 1, "b": 2 if scope == "process" else 1}.items():
        reply = call(pool, ("count", {}), ("one_count", {}), episode=episode)
        first, second = (message["content"] for message in reply.messages)
        assert first == "0" and second.split("\n")[:2] == [str(times), "/"]
        assert "value" in second and "usual" in second and "of the program" not in second
    pool.close()
    assert mcp_file.with_name("server.py.saved").exists()


@pytest.mark.parametrize(
    ("server", "text", "shown"),
    [
        ({"args": ["--pat", "word-of-a-flag"]}, "word-of-a-flag", "***"),
        ({"args": ["--password", "words of a flag"]}, "words of a flag", "***"),
        ({"env": {"A_KEY": "word-of-x", "AUTH_TYPE": "password"}}, "word-of-x password",
         "*** password"),
        ({"env": {"DB_PASSWORD": "words of a variable"}}, "words of a variable", "***"),
        ({"env": {"URL": "db://me:word-of-an-address@h"}}, "word-of-an-address", "***"),
        ({"url": "http://h/?token=word-of-a-query"}, "word-of-a-query", "***"),
        ({"headers": {"X-Api-Key": "word-of-a-header "}}, "word-of-a-header.", "***."),
        ({"headers": {"Authorization": "Bearer words of a header", "Accept": "application/json"}},
         "words of a header, application/json", "***, application/json"),
        ({"headers": {"Cookie": "sid=id-of-a-session; theme=dark-mode"}},
         "id-of-a-session dark-mode", "*** dark-mode"),
    ],
)  # fmt: skip
def test_keys_of_a_file_of_servers_are_hidden(
    tmp_path: Path, server: dict[str, Any], text: str, shown: str
) -> None:
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"a": server}}))
    read_servers(complete_environment(mcp_config=f"{tmp_path}/mcp.json"))
    assert redact(text, {}) == shown


@pytest.mark.slow
def test_a_failed_start_leaves_no_server(start: Start, tmp_path: Path) -> None:
    pytest.importorskip("mcp.server")
    # The second server starts once; the first is still starting when the second one fails.
    first = "import os, time\ntime.sleep(1)\nopen(f'{os.getpid()}.pid', 'w').close()\n" + COUNTER
    second = "import os\nopen('once', 'x').close()\n" + COUNTER
    servers = {}
    for name, code in {"first": first, "second": second}.items():
        (tmp_path / f"{name}.py").write_text(code)
        program = {"command": sys.executable, "args": [f"{tmp_path}/{name}.py"]}
        servers[name] = {**program, "cwd": str(tmp_path)}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    pool = start(mcp_config=f"{tmp_path}/mcp.json", mcp_scope="episode")
    with pytest.raises(EnvironmentFailure, match="second"):
        pool.reset("a", ROW).result(60)
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert len(pids) == 2


BAD_FILES = {
    "{": "is not a list of servers",
    '{"mcpServers": {}}': "is not a list of servers|has no server",
    '{"mcpServers": {"a": {"args": []}}}': "'a' needs either command or url",
    '{"mcpServers": {"a": {"type": "sse", "url": "http://x"}}}': "has the type 'sse'",
    '{"mcpServers": {"a": {"command": "x", "args": "y"}}}': "args is text, not a list of texts",
    '{"mcpServers": {"a": {"url": "http://x", "headers": {"A": "${NOT_SET}"}}}}': "variable NOT_S",
    '{"mcpServers": {"a": {"command": "x", "env": {"K": "${input:K}"}}}}': "K} is no variable",
    '{"mcpServers": {"a": {"command": "x", "args": ["${NOT_SET}"]}}}': "variable NOT_SET",
    '{"mcpServers": {"a": {"command": "x", "args": [["y"]]}}}': "args is a list, not",
    '{"mcpServers": {"a": {"command": "x", "env": ["K=y"]}}}': "env is a list, not an object",
    '{"mcpServers": {"a": {"command": "x", "disabled": "true"}}}': "is text, not true or false",
    '{"mcpServers": {"a": {"command": "x", "enabled": false}}}': "has no server",
    '{"mcpServers": {"a": {"command": "x", "disabledTools": ["y"]}}}': "--mcp a:TOOL,TOOL",
    '{"mcpServers": {"a": {"command": "npx -y x"}}}': "'npx -y x' is more than a program",
    '{"mcpServers": {"a": {"command": "x", "cwd": "/nowhere"}}}': "'/nowhere' is no folder",
    '{"mcpServers": {"a": {"command": "x"},}}': "no comma after the last",
    '{"mcpServers": {\n  // of the team\n  "a": {"command": "x"}}}': "no comments",
    "[" * 100_000: "nested too deep",
    '{"servers": {"near": {"command": "x"}}}': "no server 'nera'. Did you mean 'near'",
}


@pytest.mark.parametrize("content", BAD_FILES)
def test_mistakes_in_a_file_of_servers(tmp_path: Path, content: str) -> None:
    (tmp_path / "mcp.json").write_text(content)
    with pytest.raises(UserError, match=BAD_FILES[content]):
        check_environment(complete_environment(mcp_config=f"{tmp_path}/mcp.json", mcp=("nera:x",)))


def test_a_python_without_the_package_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = bare / "bin" / "python"
    with pytest.raises(UserError, match=f"Install it with: {python} -m pip install 'mcp>=2,<3'"):
        check_environment(complete_environment(mcp=("server",), python=str(python)))


def test_rows_without_messages_still_open(start: Start, file: Path) -> None:
    pool = start(tools=str(file))
    opening = pool.reset("a", ROW).result(60)
    assert opening.messages == ({"role": "user", "content": "Guess."},)
