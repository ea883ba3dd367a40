"""Processes in which torch and transformers are loaded already: forked from one that loaded them.

Loading takes most of the time of a short run. All of them have the hash seed of that process, so a
test that wants bits not to depend on the seed compares with a separate process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PPO = "import sys; from ppo_cli.cli.app import main; sys.exit(main(sys.argv[1:]))"
SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Each run has a parent that waits for it and reports how it ended; the signals of a terminal are
# the run's alone.
SERVER = """
import json, os, signal, socket, sys
import gc
import numpy.ma, ppo_cli.cli.evaluate, ppo_cli.cli.screen, ppo_cli.cli.train, ppo_cli.engine.learner
import ppo_cli.extras.lab.plugin, ppo_cli.extras.migrate.flags, ppo_cli.extras.migrate.weights
import ppo_cli.loop, ppo_cli.rewards.code.check, ppo_cli.rewards.judge.prompt, ppo_cli.run.assemble
import ppo_cli.run.evaluate, ppo_cli.run.export
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.qwen2 import modeling_qwen2  # that of the embedded model

gc.collect()
gc.freeze()  # what is loaded stays: the runs need not look through it

# What the shell makes its background jobs ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
requests = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    text, fds, _, _ = socket.recv_fds(requests, 1, 4)
    if not text:
        sys.exit()
    if not os.fork():
        break
    for fd in fds:
        os.close(fd)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
requests.close()
wish, report, *streams = fds
pid = os.fork()
if pid:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    os.write(report, b"%d\\n" % pid)
    os.write(report, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)
for number, fd in enumerate(streams, start=1):
    os.dup2(fd, number)
with open(wish) as file:
    asked = json.load(file)
for fd in (report, *streams):
    os.close(fd)
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(asked["env"])
sys.argv = asked["argv"]
exec(asked["program"], {"__name__": "__main__"})
"""


@cache
def server() -> socket.socket:
    """Start the process to fork from, once a test process; its end of the line is returned."""
    parent_end, child_end = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", SERVER, str(child_end.fileno())],
        pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    child_end.close()

    def end() -> None:
        parent_end.close()
        process.wait(60)

    atexit.register(end)
    return parent_end


def unnamed_file() -> int:
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def read_all(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")


class Forked:
    """`python -c PROGRAM ARGS`, without the wait for torch; used as a `subprocess.Popen` is."""

    def __init__(
        self,
        program: str,
        args: Sequence[str],
        env: Mapping[str, str],
        *,
        folder: Path | None = None,
        merged: bool = True,
    ) -> None:
        self.returncode: int | None = None
        self._out = unnamed_file()
        self._err = self._out if merged else unnamed_file()
        self._report, writing = os.pipe()
        argv = [str(ROOT / "ppo_cli" / "__main__.py"), *args]
        request = {
            "program": program,
            "argv": argv,
            "env": dict(env),
            "folder": str(folder or Path.cwd()),
        }
        wish = unnamed_file()
        os.pwrite(wish, json.dumps(request).encode(), 0)
        socket.send_fds(server(), [b"x"], [wish, writing, self._out, self._err])
        os.close(writing)
        os.close(wish)
        self.pid = self._number()

    def _number(self) -> int:
        """Read the next line of the report: the process id, then the exit code."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            assert byte, "the process to fork from has ended"
            line += byte
        return int(line)

    def poll(self) -> int | None:
        return self.wait(0) if self._has_ended(0) else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._number()
            os.close(self._report)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        return self.returncode is None and bool(select.select([self._report], [], [], timeout)[0])

    def output(self) -> str:
        """All it has written so far; the errors too, if they are merged."""
        return read_all(self._out)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what it wrote to its two streams."""
        self.wait(timeout)
        return read_all(self._out), read_all(self._err)

    def send_signal(self, name: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, name)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    args: Sequence[str], env: Mapping[str, str], timeout: float, program: str = PPO
) -> subprocess.CompletedProcess[str]:
    """`ppo ARGS` or another program, as `subprocess.run` would run it."""
    process = Forked(program, args, env, merged=False)
    try:
        out, err = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(args), process.wait(), out, err)


def run_ranks(script: Path, size: int, *args: str) -> None:
    """Run `python SCRIPT RANK SIZE ARGS` of all ranks at once; each must end well."""
    ranks = [
        Forked(SCRIPT, [str(script), str(rank), str(size), *args], os.environ)
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=800)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(outputs)
