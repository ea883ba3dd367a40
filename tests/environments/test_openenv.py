"""OpenEnv: the environment of `openenv init`, on its own server, with its package's Python."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from ppo_cli.environments.pool import check_environment
from ppo_cli.errors import UserError
from tests.environments.conftest import ROW, find_python
from tests.environments.test_pool import Start, say
from tests.settings import complete_environment
from tests.waiting import free_port, wait_until

RUN = "import uvicorn; from server.app import app; uvicorn.run(app, port={}, log_level='error')"


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
    port = free_port()
    with subprocess.Popen([python, "-c", RUN.format(port)], cwd=folder) as process:
        try:
            config = complete_environment(path=f"openenv:http://127.0.0.1:{port}")

            def is_ready() -> bool:
                assert process.poll() is None
                try:
                    check_environment(config)
                except UserError:
                    return False
                return True

            wait_until(is_ready, 60)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


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


def test_mistakes_are_refused(server: str) -> None:
    with pytest.raises(UserError, match=r"The action has: .*message"):
        check_environment(complete_environment(path=f"openenv:{server}", kwargs={"field": "text"}))
    with pytest.raises(UserError, match=r"environment.kwargs.fild; it has: field"):
        check_environment(complete_environment(path=f"openenv:{server}", kwargs={"fild": "text"}))


def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="/schema does not answer: URLError"):
        check_environment(complete_environment(path=f"openenv:127.0.0.1:{free_port()}"))
