"""Environment processes that work, and those that die, hang, flood, and write nonsense."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.environments.base import EnvironmentFailure, Reply
from ppo_cli.environments.pool import ANSWER_GRACE_S, EnvironmentPool, check_environment
from ppo_cli.errors import ConfigError, UserError
from ppo_cli.processes.child import MAX_LOG_BYTES
from ppo_cli.processes.reaper import descendants
from tests.environments.conftest import GAME, ROW
from tests.settings import complete_environment
from tests.waiting import wait_until

Start = Callable[..., EnvironmentPool]


def say(pool: EnvironmentPool, episode: str, text: str) -> Reply:
    return pool.step(episode, {"role": "assistant", "content": text}).result(60)


def failure(pool: EnvironmentPool, episode: str, text: str) -> str:
    with pytest.raises(EnvironmentFailure) as error:
        say(pool, episode, text)
    return str(error.value)


def open_episodes(pool: EnvironmentPool, *episodes: str, **fields: Any) -> None:
    for opening in [pool.reset(episode, {**ROW, **fields}) for episode in episodes]:
        opening.result(60)


def worker_pids(parent: int | None = None) -> list[int]:
    pids = []
    for pid in descendants(parent or os.getpid()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if len(command) > 1 and command[1].endswith(b"environments/worker.py"):
            pids.append(pid)
    return pids


def test_an_episode_is_played(start: Start, game: Path, tmp_path: Path) -> None:
    pool = start(path=f"{game}:Game", kwargs={"start": 1})
    opening = pool.reset("a", ROW).result(60)
    assert opening.messages == ({"role": "user", "content": "Guess."},)
    reply = say(pool, "a", "5")
    assert reply.messages == ({"role": "user", "content": "turn 2"},)
    assert (reply.done, reply.rewards, reply.error) == (False, {"guess": 0.5}, "")
    assert say(pool, "a", "print('hi')").done
    assert failure(pool, "a", "6") == "the episode has ended"
    # Prints, also those to the real stdout, go to the log.
    log = tmp_path / "logs" / "environment_0.log"
    wait_until(lambda: "closed after 3" in log.read_text())
    assert "a print 7" in log.read_text() and '{"id": 0' in log.read_text()


@pytest.mark.parametrize("prefix", ["", "async "])
def test_what_step_returns(start: Start, tmp_path: Path, prefix: str) -> None:
    file = tmp_path / "echo.py"
    file.write_text(
        "class Echo:\n"
        f"    {prefix}def reset(self, row): return None\n"
        f"    {prefix}def step(self, message): return eval(message['content'])\n"
        f"    {prefix}def finish(self): return float('nan')\n"
    )
    pool = start(path=f"{file}:Echo", max_reply_chars=100)
    open_episodes(pool, *"abcdefghi", extra_info={"array": Path("x")})
    user = {"role": "user", "content": "x"}
    assert say(pool, "a", "dict(role='user', content='x'), False, None").messages == (user,)
    assert say(pool, "a", "'x', False, None") == Reply((user,), seconds=pytest.approx(0, abs=9))
    assert say(pool, "a", "dict(messages=[dict(role='tool', content='\\ud800', tool_call_id='1')])"
               ).messages == ({"role": "tool", "content": "?", "tool_call_id": "1"},)  # fmt: skip
    reply = say(pool, "a", "'a' * 90 + 'b' * 90, True, True")
    assert reply.rewards == {"environment": 1.0} and len(reply.messages[0]["content"]) <= 100
    assert re.fullmatch(r"a+\n… 80 characters left out …\nb+", reply.messages[0]["content"])
    # Anything else fails the episode, with what is wrong.
    assert "step returned None; step returns (messages, done, reward)" in failure(pool, "b", "None")
    assert "float 1.0 as done" in failure(pool, "c", "'x', 1.0, False")
    assert "nan as the reward 'a'" in failure(pool, "d", "'x', True, {'a': float('nan')}")
    assert "no message, but the episode is not done" in failure(pool, "e", "None, False, 1")
    assert "a role of system" in failure(pool, "f", "[{'role': 'judge'}], False, 1")
    assert "write a text" in failure(pool, "h", "[{'role': 'user', 'content': []}], False, 1")
    assert "the keys mesages" in failure(pool, "g", "{'mesages': []}")
    with pytest.raises(EnvironmentFailure, match="finish returned nan as the reward"):
        pool.finish("i").result(60)


def test_code_that_changes_its_process_gives_no_reward_of_nan(start: Start, tmp_path: Path) -> None:
    """The process checks rewards itself, but an environment may replace what it checks with."""
    file = tmp_path / "sly.py"
    file.write_text(
        "import builtins\nbuiltins.abs = lambda number: 0.0\n"
        "class Sly:\n    def reset(self, row): return None\n"
        "    def step(self, message):\n"
        "        return {'done': True, message['content']: {'a': 1.0, 'b': float('nan')}}\n"
    )
    pool = start(path=f"{file}:Sly")
    open_episodes(pool, "a", "b")
    for name, key in (("a", "reward"), ("b", "metrics")):
        assert "nan" not in failure(pool, name, key)


# As Gymnasium's environments are.
COUNTER = """
class Counter:
    action_space = 2
    def reset(self, *, seed=None): return seed, {}
    def step(self, action): return action, 0.5, action == 1, False, {}

class Passed:
    def __init__(self): self.env = Counter()
    def reset(self, row): return self.env.reset() if row["seed"] else None
    def step(self, message): return self.env.step(0)[:int(message["content"])]
"""


def test_an_environment_of_gymnasium_is_refused_with_a_class_that_plays_it(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "counter.py"
    file.write_text(COUNTER)
    with pytest.raises(UserError) as error:
        check_environment(complete_environment(path=f"{file}:Counter"))
    head, *code = str(error.value).splitlines()
    assert "is an environment of Gymnasium. Name a class" in head
    pool = start(path=f"{file}:Passed")
    with pytest.raises(EnvironmentFailure, match="reset returned two values, as Gymnasium's does"):
        open_episodes(pool, "a")
    open_episodes(pool, "b", "c", seed=0)
    assert failure(pool, "b", "5").startswith("step returned 5 values, as Gymnasium's does; write:")
    assert failure(pool, "c", "4").endswith(code[-1].strip())
    file.write_text(COUNTER + "\n" + "\n".join(line[4:] for line in code))
    pool = start(path=f"{file}:Episode")
    open_episodes(pool, "d")
    reply = say(pool, "d", "1")
    assert reply.messages == ({"role": "user", "content": "1"},)
    assert reply.done and reply.rewards == {"environment": 0.5}


def test_an_exception_fails_its_episode_alone(start: Start, game: Path) -> None:
    pool = start(path=f"{game}:Game")
    open_episodes(pool, "a", "b", "c")
    say(pool, "a", "1")
    assert (
        failure(pool, "a", "do raise ValueError('no')")
        == "raised ValueError: no (game.py, line 29)"
    )
    assert failure(pool, "b", "do sys.exit(3)") == "raised SystemExit: 3 (game.py, line 29)"
    assert say(pool, "c", "1").messages
    assert not any(pool.pop_metrics().values())


# How an episode ends, and a part of its reason; the others go on.
WAYS = {
    "do os._exit(5)": "its process ended with exit code 5",
    "do print('bye', flush=True); os.killpg(0, 9)": "ended by signal SIGKILL: bye",
    "do __import__('ctypes').string_at(0)": "ended by signal SIGSEGV",
    "do os.fork() or time.sleep(4321); os._exit(1)": "ended with exit code 1",
    "do subprocess.Popen(['sleep', '4321'], start_new_session=True); time.sleep(4321)": "timeout",
    # A daemon, whose parent has ended.
    "do subprocess.call('setsid sleep 4321 &', shell=True); time.sleep(4321)": "timeout",
    "do subprocess.Popen(['sleep', '4321'], preexec_fn=os.setpgrp); os._exit(6)": "exit code 6",
    "do 9**9**9": "timeout: took longer than 3 s",
    "do re.match('(a+)+$', 'a' * 50 + 'b')": "timeout: took longer than 3 s",
    "do os.kill(os.getpid(), signal.SIGSTOP)": "timeout: took longer than 3 s",
    "do bytearray(2 << 30)": r"MemoryError .* \(see environment.memory_gb\)",
    "do [print('z' * 1000000) for _ in range(10**6)]": "printed more than|timeout",
    "do [os.fork() for _ in range(4)]; time.sleep(4321)": "timeout: took longer than 3 s",
    "do os.closerange(0, 99); time.sleep(4321)": "closed its channel",
    # The descriptor of the answers, found by trying.
    "do write_answer(b'x' * 100000, 5)": "wrote what is not an answer of at most 8 MiB",
    "do write_answer(b'[1]', number=0)": "wrote what is not an answer",
    "do write_answer(b'[' * 100000, number=0)": "wrote what is not an answer",
    """do write_answer(b'{"result": {"messages": 7}}', number=0)""": "wrote what is not an answer",
}  # fmt: skip


@pytest.mark.slow
def test_a_call_that_goes_wrong_costs_its_episode_alone(start: Start, game: Path) -> None:
    game.write_text(f"import signal\n{GAME}".replace("import signal\n\n", "import signal; "))
    pool = start(path=f"{game}:Game", timeout=3.0)
    others = [f"other {number}" for number in range(6)]
    open_episodes(pool, *WAYS, *others)
    replies = {code: pool.step(code, {"role": "assistant", "content": code}) for code in WAYS}
    assert all(say(pool, name, "1").messages for name in others)
    for code, parts in WAYS.items():
        with pytest.raises(EnvironmentFailure) as error:
            replies[code].result(60)
        assert re.search(parts, str(error.value)), (code, error.value)
    assert all(say(pool, name, "2").messages for name in others)
    pool.release(list(WAYS) + others)
    wait_until(lambda: not any(b"4321" in read_command(pid) for pid in descendants(os.getpid())))
    events = pool.pop_metrics()
    assert events["environment/restarts"] == 0
    assert events["environment/timeouts"] + events["environment/crashes"] >= len(WAYS) - 2


def read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def test_an_episode_has_the_state_of_its_own_process(start: Start, game: Path) -> None:
    files = "[open(__file__) for _ in range(9)]"
    made = GAME.replace("self.turn = start", f"self.turn, self.files = start, {files}")
    game.write_text(
        "import random, socket, threading\nTURNS, OPENED = [], open(__file__)\n"
        # Their numbers are soon those of files that are not the user's.
        f"CLOSED = {files}\n"
        "threading.Timer(0.4, lambda: [file.close() for file in CLOSED]).start()\n"
        f"socket.setdefaulttimeout(0.1)\n{made}"
    )
    pool = start(path=f"{game}:Game")
    time.sleep(0.6)
    open_episodes(pool, "a", "b")
    time.sleep(0.3)  # longer than the timeout of the user's own sockets
    # A file of the module stays open, and of the pipes and sockets that of the answers alone.
    code = (
        "do import numpy; TURNS.append(1); os.fstat(OPENED.fileno()); "
        "ends = sum(':[' in os.path.realpath(f'/dev/fd/{n}') for n in range(3, 99)); "
        "reply = f'{len(TURNS)} {ends} {random.random()} {numpy.random.random()}'"
    )
    first, second = (say(pool, name, code).messages for name in "ab")
    # Of equal seeds; nothing is shared with the other.
    assert first == second and first[0]["content"].startswith("1 1 ")


def test_a_spare_that_died_costs_no_episode(start: Start, game: Path) -> None:
    pool = start(path=f"{game}:Game")
    open_episodes(pool, "a")
    own, worker = (
        say(pool, "a", "do reply = f'{os.getpid()} {os.getppid()}'").messages[0]["content"].split()
    )
    spares = set(descendants(int(worker))) - {int(own)}
    for pid in spares:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(") Z " in Path(f"/proc/{pid}/stat").read_text() for pid in spares))
    open_episodes(pool, "b", "c")
    assert spares and not spares & set(descendants(int(worker)))
    assert say(pool, "a", "1").messages and not any(pool.pop_metrics().values())


def test_a_signal_to_the_process_of_all_episodes_harms_none(start: Start, game: Path) -> None:
    game.write_text(f"import signal\n{GAME}".replace("import signal\n\n", "import signal; "))
    pool = start(path=f"{game}:Game")
    open_episodes(pool, "a", "b", "c")
    names = "SIGHUP SIGINT SIGQUIT SIGTERM SIGUSR1 SIGALRM"
    code = f"do [os.kill(os.getppid(), getattr(signal, name)) for name in {names.split()}]"
    assert say(pool, "a", code).messages and say(pool, "b", "1").messages
    assert "ended by signal SIGTERM" in failure(pool, "a", "do os.kill(os.getpid(), 15)")
    assert "raised KeyboardInterrupt" in failure(pool, "c", "do signal.raise_signal(2)")
    assert say(pool, "b", "2").messages
    assert pool.pop_metrics()["environment/restarts"] == 0


def test_few_open_files_are_enough_for_few_episodes(start: Start, game: Path) -> None:
    game.write_text(
        f"{GAME}\nimport resource\nsys.modules['ctypes'] = None  # as in a Python that lacks it\n"
        "most = max(map(int, os.listdir('/dev/fd'))) + 10\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
    )
    pool = start(path=f"{game}:Game")
    open_episodes(pool, "a", "b", "c")
    for name in "de":  # what fails leaves nothing open
        with pytest.raises(EnvironmentFailure, match=r"does not start: .* Too many open files"):
            open_episodes(pool, name)
    worker = worker_pids()[0]
    forks = len(descendants(worker))
    pool.release(["a", "b"])
    wait_until(lambda: len(descendants(worker)) == forks - 2)
    open_episodes(pool, "f")
    assert say(pool, "c", "1").messages and say(pool, "f", "1").messages


DEATHS = {
    "do os.kill(os.getpid(), 9)": "the environment process ended by signal SIGKILL",
    "do print('bye', flush=True); os._exit(5)": "ended with exit code 5: bye",
    # The descriptor of the answers: no message, an answer to nobody, and JSON of something else.
    "do write_answer(b'[1]')": "wrote what is not an answer of at most 8 MiB",
    "do write_answer(b'{}', number=4321)": "wrote what is not an answer of at most 8 MiB",
    """do write_answer(b'{"result": {"messages": 7}}', number=4)""": "wrote what is not an answer",
}  # fmt: skip


@pytest.mark.parametrize("code", DEATHS)
def test_a_process_that_dies_is_replaced(start: Start, game: Path, code: str) -> None:
    # Other tests in this process may have left processes that end later.
    others = set(descendants(os.getpid()))
    pool = start(path=f"{game}:Game", isolation="process")
    open_episodes(pool, "a", "b")
    say(pool, "b", "1")
    before = set(descendants(os.getpid())) - others
    assert DEATHS[code] in failure(pool, "a", code)
    assert DEATHS[code] in failure(pool, "b", "2")
    open_episodes(pool, "c")
    assert say(pool, "c", "1").messages
    wait_until(lambda: not before & set(descendants(os.getpid())))
    assert pool.pop_metrics()["environment/restarts"] == 1


@pytest.mark.slow
def test_a_call_that_hangs_in_a_shared_process_costs_its_episode(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "slow.py"
    file.write_text(
        "import asyncio, time\nclass Slow:\n    async def reset(self, row): return 'go'\n"
        "    async def step(self, message): return await asyncio.sleep(float(message['content']))\n"
        "class Blocking(Slow):\n    def step(self, message): return time.sleep(4321)\n"
    )
    for name in ("Slow", "Blocking"):
        pool = start(path=f"{file}:{name}", timeout=2.0, isolation="process")
        open_episodes(pool, "a", "b")
        before = worker_pids()
        assert failure(pool, "a", "4321") == "timeout: took longer than 2 s"
        open_episodes(pool, "c")
        assert worker_pids() == before
        assert pool.pop_metrics()["environment/timeouts"] == 1


def test_a_process_that_does_not_answer_is_killed(
    start: Start, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ANSWER_GRACE_S, "process", 0.5)
    pool = start(path=f"{game}:Game", isolation="process", timeout=1.0)
    open_episodes(pool, "a", "b")
    # This search holds the interpreter's lock: no other thread of the process runs.
    reason = failure(pool, "a", "do re.match('(a+)+$', 'a' * 50 + 'b')")
    assert reason == "timeout: the environment process did not answer for 1.5 s"
    assert failure(pool, "b", "1") == reason
    open_episodes(pool, "c")
    assert pool.pop_metrics() == {
        "environment/restarts": 1, "environment/timeouts": 1, "environment/crashes": 0,
    }  # fmt: skip


def peak_growth_mb(work: Callable[[], object]) -> float:
    """How far the memory of this process rises above its present use."""

    def read(name: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", status)[1])  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    work()
    return (read("VmHWM") - before) / 1024


FLOODS = {
    # A line without an end, where the answers are.
    "answers": ("do write_answer(b'x' * 1000000, 50)", "is not an answer of at most 8 MiB"),
    # A reply that is too long; only its episode fails.
    "reply": ("do reply = 'y' * 50_000_000", ""),
    "error": ("do raise ValueError('e' * 50_000_000)", "raised ValueError: eee"),
    "stdout": ("do print('z' * 50_000_000)", ""),
    "stderr": (
        "do [sys.stderr.write('line of a flood ' * 32 + '\\n') for _ in range(100_000)]",
        "",
    ),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_takes_little_memory_and_disk(
    start: Start, game: Path, tmp_path: Path, kind: str
) -> None:
    pool = start(path=f"{game}:Game", timeout=60.0)
    open_episodes(pool, "a", "b")
    code, reason = FLOODS[kind]
    grown = peak_growth_mb(lambda: failure(pool, "a", code) if reason else say(pool, "a", code))
    assert grown < 30
    if kind != "answers":
        assert say(pool, "b", "1").messages
    sizes = [file.stat().st_size for file in (tmp_path / "logs").iterdir()]
    assert max(sizes) < 2 * MAX_LOG_BYTES


def test_calls_run_side_by_side(start: Start, game: Path) -> None:
    game.write_text(f"{GAME}\nall_run = threading.Barrier(64)\n")
    pool = start(path=f"{game}:Game", isolation="process")
    message = {"role": "assistant", "content": "do all_run.wait()"}
    episodes = [str(number) for number in range(64)]
    open_episodes(pool, *episodes)
    for reply in [pool.step(episode, message) for episode in episodes]:
        assert reply.result(60).messages


def test_episodes_are_dealt_evenly(start: Start, game: Path) -> None:
    pool = start(path=f"{game}:Game", num_workers=2)
    open_episodes(pool, *"abcd")
    code = "do raise ValueError(os.getppid())"
    pids = [failure(pool, episode, code) for episode in "abcd"]
    assert sorted(map(pids.count, set(pids))) == [2, 2]


DRIVER = """
import json, os, sys, time
from pathlib import Path
from ppo_cli.config.schema.environment import Environment
from ppo_cli.environments.pool import EnvironmentPool
settings = Environment(path=sys.argv[1], python=sys.executable, max_turn_tokens=9, num_workers=2,
                       isolation="episode", max_starts=9)
pool = EnvironmentPool(settings, Path(sys.argv[2]))
pool.start()
row = json.loads(sys.argv[3])
for name in "abcd":
    pool.reset(name, row).result()
def step(name, code):
    return pool.step(name, {"role": "assistant", "content": code})
step("a", "do subprocess.Popen(['sleep', '4321'], start_new_session=True)").result()
step("b", "do os.fork() or time.sleep(4321)").result()
step("c", "do time.sleep(4321)")
step("d", "do re.match('(a+)+$', 'a' * 50 + 'b')")
print("ready", flush=True)
time.sleep(4321)
"""


@pytest.mark.slow
def test_nothing_survives_a_killed_run(game: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, f"{game}:Game", str(tmp_path), json.dumps(ROW)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == b"ready\n"
            family = descendants(run.pid)
        finally:
            os.kill(run.pid, signal.SIGKILL)
    # Two reapers, two workers, four episodes, a process in a session of its own and a fork.
    assert len(family) >= 10
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


MISTAKES = {
    "import nowhere_to_be_found\nclass Game: pass": "No module named 'nowhere_to_be_found' "
    r"\(game.py, line 1\). Install 'nowhere_to_be_found' into /",
    "class Gme: pass": "has no 'Game'. Did you mean 'Gme'\\? It has: Gme",
    "x = 1\nclass Game:\n    def reset(self): pass": r"Game \(line 2\): reset is called as "
    r"reset\(row\), but: too many positional arguments. Write def reset\(self, row\).\n.*has no "
    r"method step\(self, message\)",
    "class Game:\n    def __init__(self, size): pass": r"missing a required argument: 'size'. Its "
    "arguments come from environment.kwargs",
    "class Game:\n    def __init__(self):\n        1 / 0": r"ZeroDivisionError: division by zero "
    r"\(game.py, line 3\)",
    "def f(:": r"SyntaxError: invalid syntax \(game.py, line 1\)",
    "import sys; sys.exit(4)": r"SystemExit: 4 \(game.py, line 1\)\. Put what runs as a program",
    "from .rules import x": r"\(game.py, line 1\)\. Leave the dot out",
    "class Game:\n    def reset(self, row): pass\n    def step(self, message): yield":
    "step yields; write return",
    "import os; print('bye', flush=True); os._exit(4)": "does not run: the environment process "
    "ended with exit code 4: bye",
    "Game = 7": "is of type int; name a class",
    "class Game:\n    tools = [{1, 2}]\n    def reset(self, row): pass\n    step = reset":
    "its tools have set",
}  # fmt: skip


@pytest.mark.parametrize("source", MISTAKES)
def test_a_mistake_is_refused_at_the_start(tmp_path: Path, source: str) -> None:
    file = tmp_path / "game.py"
    file.write_text(source)
    with pytest.raises(UserError, match=MISTAKES[source]):
        check_environment(complete_environment(path=f"{file}:Game"))


@pytest.mark.parametrize(
    ("opening", "reason"),
    [
        ("f\"Game {row['seed']}\"", ""),
        ("None", "reset returned no messages"),
        ('[{"role": "system", "content": "Play."}]', "reset returned system messages only"),
        ('row["extra_info"]["board"]', "KeyError: 'board' .game.py, line 2.. Name rows with"),
    ],
)
def test_an_environment_that_needs_a_row_is_refused_without_rows(
    tmp_path: Path, opening: str, reason: str
) -> None:
    file = tmp_path / "game.py"
    file.write_text(f"class Game:\n    def reset(self, row): return {opening}\n    step = reset\n")
    refused = pytest.raises(ConfigError, match=reason) if reason else nullcontext()
    with refused:
        check_environment(complete_environment(path=f"{file}:Game"), opens=True)


def test_missing_files_are_refused_together(tmp_path: Path, game: Path) -> None:
    config = complete_environment(
        path=f"{tmp_path}/gme.py:Game", tools=f"{tmp_path}/tools.py", python="/nowhere/python"
    )
    with pytest.raises(ConfigError) as error:
        check_environment(config)
    assert len(error.value.problems) == 3
    assert "Did you mean 'game.py'?" in str(error.value)
    with pytest.raises(ConfigError, match="with the name of the class"):
        check_environment(complete_environment(path=str(game)))


@pytest.mark.slow
def test_a_slow_import_is_no_mistake(
    start: Start, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    game.write_text("import time; time.sleep(2)\n" + game.read_text())
    monkeypatch.setattr("ppo_cli.environments.pool.CHECK_TIMEOUT_S", 0.2)
    check_environment(complete_environment(path=f"{game}:Game"))
    pool = start(path=f"{game}:Game", timeout=1.9)
    open_episodes(pool, "a")


LAST_PRINT = '{"id": 0, "result": 1}'


def test_a_crash_loop_stops_the_run(start: Start, game: Path) -> None:
    pool = start(path=f"{game}:Game", isolation="process")
    reasons = []
    with pytest.raises(UserError, match="does not run: the environment process ended with exit"):
        for number in range(10):
            try:
                open_episodes(pool, str(number), prompt="die at once")
            except EnvironmentFailure as error:
                reasons.append(str(error))
    assert reasons == [f"the environment process ended with exit code 9: {LAST_PRINT}"] * 3


@pytest.mark.slow
def test_a_process_that_does_not_start_gets_another_chance_later(start: Start, game: Path) -> None:
    pool = start(path=f"{game}:Game", isolation="process", timeout=5.0)
    open_episodes(pool, "a")
    source = game.read_text()
    game.write_text("raise OSError('a server that it needs is away')")
    failure(pool, "a", "do os._exit(1)")
    with pytest.raises(EnvironmentFailure, match="OSError: a server"):
        open_episodes(pool, "b")
    failed = time.monotonic()
    game.write_text(source)
    open_episodes(pool, "c")
    assert time.monotonic() - failed > 1.5


CANARIES = {
    name: f"{name.lower()[:6]}7Rk2LmX9vTb4NcW"
    for name in (
        "OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MYSQL_PWD",
        "PGPASSWORD", "GITHUB_PAT", "KAGGLE_KEY", "SENTRY_DSN", "AZURE_CREDENTIALS", "MY_AUTH",
        "SLACK_WEBHOOK_URL", "WANDB_API_KEY", "SSH_KEY_DATA", "JUDGE_JWT",
    )
}  # fmt: skip
CANARIES |= {"DATABASE": "postgres://me:q7Rk2LmX9v@db", "ODD_NAME": "sk-proj-Zr8Tq2LmNv5XbCw9KdHs"}


def test_no_key_reaches_an_environment_and_a_named_one_is_never_shown(
    start: Start, game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SEARCH_KEY", "Zr8Tq2LmNv5XbCw9KdHs")
    monkeypatch.setenv("AN_ORDINARY", "value")
    pool = start(path=f"{game}:Game", pass_env=("SEARCH_KEY",))
    open_episodes(pool, "a")
    shown = say(pool, "a", "do reply = str({*os.environ})").messages[0]["content"]
    assert "AN_ORDINARY" in shown and "SEARCH_KEY" in shown
    assert not [name for name in CANARIES if f"'{name}'" in shown]
    # Whatever else it finds, such as in the variables of the run's own process, is not read.
    key = "open(f'/proc/{os.getpid()}/environ').read()"
    assert "SEARCH_KEY=***" in say(pool, "a", f"do reply = {key}").messages[0]["content"]
    code = f"do print('the key', {key}, flush=True); raise ValueError(os.environ['SEARCH_KEY'])"
    reason = failure(pool, "a", code)
    log = tmp_path / "logs" / "environment_0.log"
    wait_until(lambda: "the key" in log.read_text())
    assert "Zr8Tq2LmNv5XbCw9KdHs" not in log.read_text() + reason


def test_a_variable_that_is_not_passed_on_is_named(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text("import os\nKEY = os.environ['SEARCH_KEY']\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEARCH_KEY", "x")
        with pytest.raises(UserError, match="--pass_env SEARCH_KEY"):
            check_environment(complete_environment(path=f"{file}:Game"))
    with pytest.raises(UserError, match="there is no variable SEARCH_KEY"):
        check_environment(complete_environment(path=f"{file}:Game", pass_env=("SEARCH_KEY",)))


@pytest.mark.slow
def test_few_episodes_begin_at_once(start: Start, game: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    write = f"open({str(lines)!r}, 'a', 1).write"
    pause = f'{write}("+\\n"); time.sleep(float(row["prompt"])); {write}("-\\n"); print("a"'
    game.write_text(GAME.replace('print("a print"', pause))
    pool = start(path=f"{game}:Game", timeout=5.0, max_starts=2)
    openings = [pool.reset(name, {**ROW, "prompt": "0.1"}) for name in "abcdefgh"]
    assert all(opening.result(60).messages for opening in openings)
    steps = lines.read_text().split()
    assert len(steps) == 16
    assert all(steps[:i].count("+") - steps[:i].count("-") <= 2 for i in range(17))
    with pytest.raises(EnvironmentFailure, match=r"to begin: raise --tool_timeout, or .*starts=2"):
        open_episodes(pool, "i", prompt="4321")


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_other_pythons(start: Start, game: Path, version: str) -> None:
    pythons = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    if not pythons:
        pytest.skip(f"needs a Python {version}")
    pool = start(path=f"{game}:Game", python=str(pythons[0]))
    open_episodes(pool, "a")
    assert say(pool, "a", "1").messages
