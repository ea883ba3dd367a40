"""Code rewards: right and wrong programs, and one that tries to get out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from ppo_cli.config.schema.reward import Code
from ppo_cli.errors import RewardError, first_line
from ppo_cli.records import Score
from ppo_cli.rewards.base import Call
from ppo_cli.rewards.code.check import CodePool
from ppo_cli.self_test.results import Results, Setup

SECRET = "PPO_CLI_SELF_TEST_SECRET"
# Returns what it could do; `outside` holds a file, a folder, a port and a process of ours.
SPY = """
import os, socket

def escape(outside):
    file, folder, port, process = outside
    tries = {
        "connects": lambda: socket.create_connection(("127.0.0.1", port), 2).close(),
        "reads a file": lambda: open(file).read(),
        "writes a file": lambda: open(os.path.join(folder, "written"), "w").close(),
        "signals a process": lambda: os.kill(process, 0),
        "reads the environment": lambda: os.environ["%s"],
    }
    done = []
    for name, attempt in tries.items():
        try:
            attempt()
            done.append(name)
        except Exception:
            pass
    return done
""".replace("%s", SECRET)
ESCAPES = 5


def check_sandbox(setup: Setup, results: Results) -> None:
    """Run programs in the sandbox that code rewards would use here."""
    pool = CodePool(Code(), size=1)
    try:
        pool.start()
    except RewardError as error:
        results.skip(f"code rewards cannot run here: {first_line(error)}")
        return
    # A secret in our environment, which the sandbox must not pass on.
    os.environ[SECRET] = "1"
    try:
        with results.part("answers"):
            _check_answers(pool, results)
        with results.part("escape"):
            _check_escape(pool, setup.folder, results)
    finally:
        pool.close()


def _check_answers(pool: CodePool, results: Results) -> None:
    """Require the score 1 for a right program, and 0 for a half right and an exiting one.

    The half right one passes one of two tests, the exiting one raises SystemExit.
    """
    # Tests that one program passes, one fails in part, and one tries to leave early.
    tests = ["assert double(2) == 4", "assert double(-1) == -2"]
    scores = {
        "right": _run(pool, "def double(x):\n    return 2 * x", tests),
        "half right": _run(pool, "def double(x):\n    return x * x", tests),
        "exiting": _run(pool, "def double(x):\n    raise SystemExit", tests),
    }
    expected = {"right": 1.0, "half right": 0.0, "exiting": 0.0}
    for name, score in scores.items():
        results.require(
            f"a program that is {name} has the score {score.value} ({score.reason})",
            score.value == expected[name],
        )
    results.figures["sandbox"] = str(scores["right"].info["sandbox"])


def _check_escape(pool: CodePool, folder: Path, results: Results) -> None:
    """Require that code in the sandbox cannot do what it can do outside of it.

    That is to connect to a port, read and write files, signal a process, and read the environment.
    """
    secret = folder / "secret"
    secret.write_text("nobody inside reads this")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        outside = [str(secret), str(folder), listener.getsockname()[1], os.getpid()]
        program = f"{SPY}\nimport json\nprint(json.dumps(escape({outside!r})))"
        # Outside the sandbox every escape must work, or the test inside would prove nothing.
        free = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        escapes: list[str] = json.loads(free.stdout)
        results.require(f"outside the program only {escapes}", len(escapes) == ESCAPES)
        for name in escapes:
            test = f"assert {name!r} not in escape({outside!r})"
            score = _run(pool, SPY, [test])
            results.require(f"code in the sandbox {name} ({score.reason})", score.value == 1.0)


def _run(pool: CodePool, code: str, tests: list[str]) -> Score:
    call = Call("self-test", f"```python\n{code}\n```", {"test_list": tests}, {})
    return pool.submit(call, lambda score: score).result()
