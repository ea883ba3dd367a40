"""OpenEnv: the environment of `openenv init`, on its own server, with its package's Python."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppo_cli.environments.pool import check_environment
from ppo_cli.errors import UserError
from tests.environments.conftest import ROW, find_python
from tests.environments.test_pool import Start, say
from tests.environments.test_tools import make_message
from tests.settings import complete_environment
from tests.waiting import free_port, wait_until

RUN = "import uvicorn; from server.app import app; uvicorn.run(app, port={}, log_level='error')"


@contextmanager
def serve(python: Path, folder: Path, code: str) -> Iterator[str]:
    """Run a server with this Python and return its address."""
    port = free_port()
    with subprocess.Popen([python, "-c", code.format(port)], cwd=folder) as process:
        try:
            config = complete_environment(path=f"openenv:http://127.0.0.1:{port}")

            def is_ready() -> bool:
                assert process.poll() is None
                try:
                    check_environment(config)
                except UserError as error:
                    return "does not answer" not in str(error)
                return True

            wait_until(is_ready, 60)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the template environment, which echoes messages."""
    python = find_python("openenv")
    folder = tmp_path_factory.mktemp("echo")
    (template,) = python.parent.parent.glob("lib/*/site-packages/openenv/cli/templates/*_env")
    names = {"__ENV_NAME__": "echo", "__ENV_CLASS_NAME__": "Echo", "__ENV_TITLE_NAME__": "Echo"}
    for file in template.rglob("*.py"):
        text, path = file.read_text(), str(file.relative_to(template))
        for name, value in names.items():
            text, path = text.replace(name, value), path.replace(name, value)
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text.replace("max_concurrent_envs=1", "max_concurrent_envs=8"))
    with serve(python, folder, RUN) as address:
        yield address


def test_an_episode_with_a_real_environment(start: Start, server: str) -> None:
    pool = start(path=f"openenv:{server}")
    openings = [pool.reset(name, ROW).result(60) for name in "ab"]
    text = "Guess.\n\nEcho environment ready!"
    assert openings[0].messages == ({"role": "user", "content": text},)
    reply = say(pool, "a", "hello")
    assert reply.messages == ({"role": "user", "content": "hello"},)
    assert reply.rewards == {"environment": pytest.approx(0.5)} and not reply.done
    # The content as an action, and one that the server refuses.
    assert say(pool, "b", '{"message": "abc"}').messages[0]["content"] == "abc"
    reply = say(pool, "b", '{"mesage": "abc"}')
    assert reply.error.startswith("Error: Invalid message") and not reply.done


# Tools of FastMCP behind the protocol; the third call ends an episode.
SHOP = """
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp, self.calls = FastMCP("shop"), 0
        mcp.tool(self.price)
        super().__init__(mcp)

    def price(self, fruit: str, count: int = 1) -> int:
        'Return the price.'
        return {{"pear": 3}}[fruit] * count

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=None)

    async def step_async(self, action, **kwargs):
        observation = await super().step_async(action, **kwargs)
        self.calls += isinstance(action, CallToolAction)
        observation.reward, observation.done = self.calls / 4, self.calls == 3
        return observation

    def _step_impl(self, action, **kwargs): ...

    @property
    def state(self): return State()

import uvicorn
app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=8)
uvicorn.run(app, port={}, log_level="critical")
"""


@pytest.mark.slow
def test_the_tools_of_a_server_are_called(start: Start, tmp_path: Path) -> None:
    with serve(find_python("openenv"), tmp_path, SHOP) as address:
        pool = start(path=f"openenv:{address}")
        (tool,) = pool.tools
        assert tool["function"]["name"] == "price"
        assert tool["function"]["parameters"]["required"] == ["fruit"]
        openings = [pool.reset(name, ROW).result(60) for name in "ab"]
        assert openings[0].messages == ({"role": "user", "content": "Guess."},)
        calls = ("price", {"fruit": "pear", "count": 2}), ("price", {"fruit": 7})
        reply = pool.step("a", make_message(*calls)).result(60)
        assert [message["tool_call_id"] for message in reply.messages] == ["id0", "id1"]
        assert reply.messages[0]["content"] == "6" and "valid string" in reply.error
        assert reply.rewards == {"environment": 0.75} and not reply.done
        # Its last call ends an episode, or a message without one.
        last = ("price", {"fruit": "pear"}), ("price", {"fruit": "pear"})
        reply = pool.step("a", make_message(*last)).result(60)
        assert reply.done and len(reply.messages) == 1
        assert say(pool, "b", "It costs 6.").done


def test_mistakes_are_refused(server: str) -> None:
    with pytest.raises(UserError, match=r"The action has: .*message"):
        check_environment(complete_environment(path=f"openenv:{server}", kwargs={"field": "text"}))
    with pytest.raises(UserError, match=r"environment.kwargs.fild; it has: field"):
        check_environment(complete_environment(path=f"openenv:{server}", kwargs={"fild": "text"}))


def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="/schema does not answer: URLError"):
        check_environment(complete_environment(path=f"openenv:127.0.0.1:{free_port()}"))
