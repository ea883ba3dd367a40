"""Real packages of tools and environments: each is played by hand, then trained for two steps.

    .venv/bin/python scripts/check_environments.py [--venvs DIR] [--only WORD]

Makes a virtual environment for each package in DIR (.venv-environments; one that is there is used),
sends messages whose replies and rewards are known, trains the bundled model, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppo_cli.cluster.addresses import free_port
from ppo_cli.config.schema.environment import Environment
from ppo_cli.environments.base import EnvironmentFailure
from ppo_cli.environments.pool import EnvironmentPool
from ppo_cli.run_folder.lines import read_metrics

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = [{"role": "user", "content": "Play."}]
ROW = {
    "prompt": "Play.", "messages": MESSAGES, "ground_truth": "", "data_source": "",
    "extra_info": {"task": 0}, "seed": 3,
}  # fmt: skip
LIMITS = (
    "--model", "embedded-tools", "--batch_size", "4", "--rollout_n", "2", "--max_steps", "2",
    "--save_freq", "-1", "--max_prompt_length", "2048", "--max_response_length", "512",
)  # fmt: skip
EPISODES = (
    "--max_turns", "3", "--max_turn_tokens", "48", "environment.num_workers=1",
    "environment.max_starts=4", "--tool_timeout", "120",
)  # fmt: skip
# A taskset of verifiers; the kinds differ in the environment, and in who has the tools.
TASKSET = '''
import verifiers.v1 as vf

class Slots(vf.State):
    calls: int = 0

class Data(vf.TaskData):
    answer: str

class Server(vf.Toolset[vf.{config}, Slots]):
    @vf.tool
    async def double(self, number: int) -> str:
        """Double a number."""
        self.state.calls += 1
        return str(2 * number)

class Numbers(vf.Task[Data, Slots{task_config}]):
    @vf.reward
    async def right(self, trace) -> float:
        # A message that only calls a tool has no text.
        return float(self.data.answer in (trace.messages[-1].content or ""))

    @vf.reward(weight=0.5)
    async def called(self, trace) -> float:
        return float(trace.state.calls)
{of_task}
class NumbersTaskset(vf.Taskset[Numbers, vf.TasksetConfig]):
    def load(self):
        return [Numbers(Data(prompt=f"Twice {{n}}?", answer=str(2 * n))) for n in range(1, 9)]
{of_set}
{more}
__all__ = ["NumbersTaskset"{names}]
if __name__ == "__main__":
    Server.run()
'''
TOOLSETS = """
    @classmethod
    def toolsets(cls, config):
        return [Server(vf.{}())]
"""
USER = """
class NumbersEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class NumbersEnv(vf.Env[NumbersEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Are you sure?")
"""
KINDS = {
    "single": {}, "user": {"more": USER, "names": ', "NumbersEnv"'},
    "tools": {"of_task": TOOLSETS.format("ToolsetConfig"), "config": "ToolsetConfig"},
    "state": {"of_set": TOOLSETS.format("SharedToolsetConfig")},
}  # fmt: skip
BLANK = {
    "config": "SharedToolsetConfig", "task_config": "", "of_task": "", "of_set": "", "more": "",
    "names": "",
}  # fmt: skip
# Tools of FastMCP behind OpenEnv's protocol; the second call ends an episode.
SHOP = """
import sys, uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp, self.calls = FastMCP("shop"), 0
        mcp.tool(self.multiply)
        super().__init__(mcp)

    def multiply(self, a: int, b: int) -> int:
        'Multiply two numbers.'
        return a * b

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=None)

    async def step_async(self, action, **kwargs):
        observation = await super().step_async(action, **kwargs)
        self.calls += isinstance(action, CallToolAction)
        observation.reward, observation.done = 0.25, self.calls == 2
        return observation

    def _step_impl(self, action, **kwargs): ...

    @property
    def state(self): return State()

app = create_app(Shop, CallToolAction, CallToolObservation, env_name="shop", max_concurrent_envs=16)
uvicorn.run(app, port=int(sys.argv[1]), log_level="critical")
"""
Play = tuple[Any, str]  # what the policy writes, and a pattern of reply, error and rewards


@dataclass(frozen=True)
class Case:
    """A package: what is installed, the settings of its environment, and messages with replies."""

    name: str
    packages: tuple[str, ...]
    settings: dict[str, Any]
    plays: tuple[Play, ...]
    train: tuple[str, ...] = ("--train_files", "embedded-tools")
    server: str = ""  # a program, with its port as an argument
    files: dict[str, str] = field(default_factory=dict)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a message with one tool call."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def tool_case(name: str, packages: str, line: str, *plays: Play) -> Case:
    """Return a server of MCP, whose program is that of the virtual environment."""
    return Case(name, tuple(packages.split()), {"mcp": (line,)}, plays)


OPENED = ("--episodes", "8")
CASES = (
    tool_case(
        "mcp time", "mcp-server-time==2026.10.19", "{python} -m mcp_server_time",
        (call("get_current_time", timezone="UTC"), r'"timezone":\s*"UTC"'),
        (call("get_current_time", timezone="Mars"), "Invalid timezone.* error"),
    ),
    tool_case(
        "mcp git", "mcp-server-git==2026.10.19", "{python} -m mcp_server_git --repository {folder}",
        (call("git_status", repo_path="{folder}"), "On branch"),
        (call("git_log", repo_path="/"), " error"),
    ),
    tool_case(
        "mcp sqlite", "mcp<2 mcp-server-sqlite==2025.4.25",  # it does not know mcp 2
        "{venv}/bin/mcp-server-sqlite --db-path {folder}/numbers.db",
        (call("create_table", query="CREATE TABLE t (n INTEGER)"), "created"),
        (call("write_query", query="INSERT INTO t VALUES (7)"), "affected_rows.*1"),
        (call("read_query", query="SELECT n FROM t"), "'n': 7"),
        (call("read_query", query="SELECT x FROM t"), "no such column"),
    ),
    tool_case(
        "mcp calculator", "mcp-server-calculator==0.2.1", "{python} -m mcp_server_calculator",
        (call("calculate", expression="38 * 47"), "^1786"),
        (call("calculate", expression="1 / 0"), "division by zero"),
    ),
    *(
        Case(
            f"verifiers {kind}", ("verifiers==0.4.0",),
            {"path": f"verifiers:{kind}_task", "python": "{python}", "isolation": "process"},
            {
                "single": (("It is 2.", "done .*called.: 0.0, .right.: 1.0"),),
                "user": (
                    ("It is 2.", "Are you sure"), ("3", "done .*called.: 0.0, .right.: 0.0"),
                ),
                **dict.fromkeys(
                    ("tools", "state"),
                    (
                        (call("server_double", number=1), "^2"),
                        (call("server_half", number=1), "unknown tool.* error"),
                        ("It is 2.", "done .*called.: 0.5, .right.: 1.0"),
                    ),
                ),
            }[kind],
            OPENED, files={f"{kind}_task.py": TASKSET.format(**BLANK | fields)},
        )
        for kind, fields in KINDS.items()
    ),
    Case(
        "openenv template", ("openenv-core==0.3.0",),
        {"path": "openenv:{address}", "python": "{python}"},
        (("hello", "hello.*environment.: 0.5"), ('{"mesage": "x"}', "Invalid message.* error")),
        OPENED, server="template",
    ),
    Case(
        "openenv tools", ("openenv-core==0.3.0", "fastmcp==4.2.3"),
        {"path": "openenv:{address}", "python": "{python}"},
        (
            (call("multiply", a=3, b=4), "^12 .*environment.: 0.25"),
            (call("multiply", a="q"), "done .* error"),
        ),
        server=SHOP,
    ),
    Case(
        "textarena", ("textarena==0.7.4",),
        {"path": "textarena:GuessTheNumber-v0", "python": "{python}"},
        (("[1]", "higher"), ("no number", "")), OPENED,
    ),
    *(
        Case(
            f"reasoning_gym {name}", ("reasoning-gym==0.1.25",), {}, (),
            ("--train_files", f"reasoning_gym:{name}"),
        )
        for name in ("chain_sum", "leg_counting", "knights_knaves")
    ),
)  # fmt: skip


def make_venv(case: Case, folder: Path) -> Path:
    """Return the virtual environment with the packages of a case; makes it once."""
    venv = folder / re.split(r"[=\[]", case.packages[-1])[0]
    installed, packages = venv / "installed.txt", "\n".join(case.packages)
    if not installed.exists() or installed.read_text() != packages:
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        install = [venv / "bin" / "pip", "install", "--quiet", *case.packages]
        subprocess.run(install, check=True)
        installed.write_text(packages)
    return venv


@contextmanager
def serve(case: Case, python: Path, folder: Path) -> Iterator[str]:
    """Run the server of a case, if it has one; yields its address."""
    if not case.server:
        yield ""
        return
    port = free_port("127.0.0.1")
    program = [str(python), "-c", case.server, str(port)]
    if case.server == "template":
        init = "from openenv.cli.__main__ import main; main()"
        subprocess.run(
            [python, "-c", init, "init", "echo_env"], cwd=folder, check=True, capture_output=True
        )
        for file in (folder / "echo_env").rglob("app.py"):
            text = file.read_text()
            file.write_text(text.replace("max_concurrent_envs=1", "max_concurrent_envs=16"))
        app = ["echo_env.server.app:app", "--port", str(port), "--log-level", "critical"]
        program = [str(python), "-m", "uvicorn", *app]
    process = subprocess.Popen(program, cwd=folder)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/schema", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise RuntimeError(f"the server of {case.name} does not answer on port {port}")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def play(case: Case, settings: dict[str, Any], folder: Path) -> tuple[int, list[str]]:
    """Send the messages of a case; returns how many went as known, and what differs."""
    limits = {"isolation": "episode", "max_starts": 4, "max_turn_tokens": 48, "num_workers": 1}
    defaults = {"python": sys.executable, "timeout": 120.0}
    pool = EnvironmentPool(Environment(**{**defaults, **limits, **settings}))
    pool.start()
    right, faults = 0, []
    try:
        pool.reset("a", ROW).result(200)
        for message, pattern in case.plays:
            if isinstance(message, str):
                message = {"role": "assistant", "content": message}
            message = json.loads(json.dumps(message).replace("{folder}", str(folder)))
            try:
                reply = pool.step("a", message).result(200)
            except EnvironmentFailure as error:
                faults.append(f"failed: {error}")
                break
            text = " ".join(m["content"] for m in reply.messages)
            facts = f"{text} {'done' if reply.done else ''} {dict(reply.rewards)}"
            facts += " error" if reply.error else ""
            if re.search(pattern, facts, re.DOTALL):
                right += 1
            else:
                faults.append(f"{pattern!r} is not in {facts[:300]!r}")
    finally:
        pool.close()
    return right, faults


def train(case: Case, settings: dict[str, Any], venv: Path, folder: Path) -> list[str]:
    """Train two steps; returns the cells of the table, or the end of what the run printed."""
    flags = {"path": "--environment", "mcp": "--mcp"}
    args = [*LIMITS, *(EPISODES if settings else ())]
    for name, value in settings.items():
        for item in value if isinstance(value, tuple) else (value,):
            args += [flags[name], item] if name in flags else [f"environment.{name}={item}"]
    environ = dict(os.environ)
    source = list(case.train)
    if source[1].startswith("reasoning_gym:"):
        sites = next((venv / "lib").glob("python*/site-packages"))
        # After this program's own packages.
        hook = f"import sys; sys.path.append({str(sites)!r})"
        (folder / "sitecustomize.py").write_text(hook + "\n")
        environ["PYTHONPATH"] = f"{folder}:{ROOT}"
        prepare = ["data", "prepare", source[1], "--rows", "16", "--out", str(folder / "rows")]
        subprocess.run(
            [sys.executable, "-m", "ppo_cli", *prepare], env=environ, check=True, timeout=300
        )
        source[1] = str(folder / "rows" / "train.parquet")
    out = folder / "run"
    line = [sys.executable, "-m", "ppo_cli", "train", *args, *source, "--output_dir", str(out)]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=900)
    if done.returncode:
        return [f"exit {done.returncode}", done.stderr.strip()[-300:]]
    rows = [
        json.loads(text)
        for file in sorted((out / "rollouts").glob("step_*.jsonl"))
        for text in file.read_text().splitlines()
    ]
    scores = [row["score"] for row in rows if row["score"] is not None]
    errors = [line.get("environment/tool_error_share") for line in read_metrics(out)]
    masked = len(rows) - len(scores)
    reasons = sorted({row["failure"][:60] for row in rows if row["failure"]})
    return [
        f"{len(rows)} responses", f"{'fault: ' * bool(masked)}{masked} masked",
        f"reward {min(scores):.2f} to {max(scores):.2f}" if scores else "no reward",
        "errors " + ", ".join(f"{share:.0%}" for share in errors if share is not None),
        *reasons,
    ]  # fmt: skip


def check(case: Case, venvs: Path) -> list[str]:
    """Play and train a case; returns the cells of its line."""
    venv = make_venv(case, venvs)
    python = venv / "bin" / "python"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["git", "init", "--quiet", folder], check=True)
        for file, text in case.files.items():
            (folder / file).write_text(text)
        os.environ["PYTHONPATH"] = f"{ROOT}:{folder}"
        with serve(case, python, folder) as address:
            words = {"python": python, "venv": venv, "folder": folder, "address": address}

            def fill(value: Any) -> Any:
                if isinstance(value, tuple):
                    return tuple(map(fill, value))
                return value.format(**words) if isinstance(value, str) else value

            settings = {key: fill(value) for key, value in case.settings.items()}
            right, faults = play(case, settings, folder) if case.plays else (0, [])
            played = f"{right} of {len(case.plays)} played"
            cells = train(case, settings, venv, folder)
            return [played, *cells, *(f"fault: {fault}" for fault in faults)]


def main() -> None:
    """Check the chosen cases; exit 1 if one differs from what is known, or does not train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venvs", type=Path, default=ROOT / ".venv-environments")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    wrong = False
    for case in CASES:
        if arguments.only not in case.name:
            continue
        try:
            cells = check(case, arguments.venvs.resolve())
        except Exception as error:  # the next one may be right
            cells = ["exit", f"{type(error).__name__}: {error}"[:300]]
        wrong |= any(cell.startswith(("exit", "fault")) for cell in cells)
        print(f"{case.name:28}", " | ".join(cells), flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
