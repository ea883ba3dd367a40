"""verifiers: tasksets played inside its own virtual environment (scripts/setup_verifiers)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ppo_cli.environments import pool as pool_module
from ppo_cli.environments.base import EnvironmentFailure
from ppo_cli.environments.pool import check_environment
from ppo_cli.errors import UserError
from tests.environments.conftest import ROW, find_python
from tests.environments.test_pool import Start, say
from tests.settings import complete_environment

# A taskset with two rewards, a tool server, and a user who asks once more.
NUMBERS = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Server(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def double(self, number: int) -> str:
        """Double a number."""
        return str(2 * number)

class Numbers(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.messages[-1].content)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.messages[-1].content) < 20)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.messages[-1].content))

class NumbersEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class NumbersEnv(vf.Env[NumbersEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Are you sure?")

class NumbersTaskset(vf.Taskset[Numbers, vf.TasksetConfig]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [Server(vf.SharedToolsetConfig())]

    def load(self):
        number = 0
        while True:
            number += 1
            prompt = f"What is twice {number}?"
            system = "Count." if number % 2 else None
            yield Numbers(Data(prompt=prompt, system_prompt=system, answer=str(2 * number)))

__all__ = ["NumbersTaskset", "NumbersEnv"]
if __name__ == "__main__":
    Server.run()
'''


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "numbers_task.py").write_text(NUMBERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return str(find_python("verifiers"))


def test_a_taskset_is_played(start: Start, python: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    program = Path(pool_module.__file__).with_name("verifiers.py")
    subprocess.run([python, program, "numbers_task", out, "3"], check=True, timeout=120)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["ground_truth"] for row in rows] == ["2", "4", "6"]
    assert [len(row["prompt"]) for row in rows] == [2, 1, 2]
    rows[1]["prompt"].insert(0, {"role": "system", "content": "That of the row."})

    pool = start(path="verifiers:numbers_task", python=python)
    assert [tool["function"]["name"] for tool in pool.tools] == ["server_double"]
    openings = [
        pool.reset(str(i), {**ROW, "messages": row["prompt"], "extra_info": row["extra_info"]})
        for i, row in enumerate(rows)
    ]
    for opening, row in zip(openings, rows, strict=True):
        assert list(opening.result(60).messages) == row["prompt"]
    function = {"name": "server_double", "arguments": {"number": 3}}
    calls = [{"id": "call1", "type": "function", "function": function}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    reply = pool.step("2", message).result(60)
    assert [(m["role"], m["content"]) for m in reply.messages] == [("tool", "6")]
    assert not reply.error
    for name, text in {"server_triple": "unknown tool", "server_double": "number"}.items():
        wrong = {"id": "call2", "type": "function", "function": {"name": name, "arguments": {}}}
        reply = pool.step("2", {**message, "tool_calls": [wrong]}).result(60)
        assert text in reply.error and reply.messages
    assert say(pool, "2", "It is 6.").messages == ({"role": "user", "content": "Are you sure?"},)
    reply = say(pool, "2", "Yes, it is 6, and I am sure.")
    assert reply.done and reply.rewards == {"right": 1.0, "short": 0.0}
    assert reply.metrics["length"] == 28.0
    # A limit of the run ends one before the second question.
    say(pool, "1", "It is 4.")
    reply = pool.finish("1").result(60)
    assert reply.done and reply.rewards == {"right": 1.0, "short": 0.5}
    assert reply.metrics["length"] == 8.0
    say(pool, "0", "7")
    assert say(pool, "0", "7").rewards == {"right": 0.0, "short": 0.5}


def test_mistakes_are_told(start: Start, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CHECK_TIMEOUT_S", 60.0)  # the package loads slowly
    with pytest.raises(UserError, match="verifiers:no_such_task does not load: ModuleNotFound"):
        check_environment(complete_environment(path="verifiers:no_such_task", python=python))
    pool = start(path="verifiers:numbers_task", python=python)
    with pytest.raises(EnvironmentFailure, match=r"the row has no extra_info\.task"):
        pool.reset("a", ROW).result(60)


def test_a_python_without_verifiers_is_refused() -> None:
    with pytest.raises(UserError, match=r"lacks the package verifiers\. Run scripts/setup"):
        check_environment(complete_environment(path="verifiers:numbers_task"))
