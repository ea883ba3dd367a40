"""Two machines in one: two network namespaces joined by a cable, or two loopback addresses.

`open_pair()` gives a `Pair`; `pair.start(0, command)` starts a command on a node, with the
variables of a run of two nodes. What is started is ended, and what is made removed, at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HOSTS = ("host-a", "host-b")
MARK = "PPO_TEST_NODE"
# A separate host name, and names that are answered at once: there is no DNS to ask.
SETTLE = (
    'hostname "$0" && folder=$1 && shift && mount --bind "$folder/hosts" /etc/hosts && '
    'mount --bind "$folder/resolv.conf" /etc/resolv.conf && exec "$@"'
)


@dataclass
class Started:
    """A command on a node; its output is in a file, so that nothing blocks."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output()}") from None

    def wait_for(self, text: str, timeout: float, after: int = 0) -> str:
        """Wait until the output holds a text; returns the line that does."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            lines = [line for line in self.output()[after:].splitlines() if text in line]
            if lines:
                return lines[0]
            if self.process.poll() is not None and text not in self.output()[after:]:
                break
            time.sleep(0.05)
        raise AssertionError(f"'{text}' did not come in {timeout} s:\n{self.output()}")


@dataclass
class Pair:
    """Two nodes; `kind` is `namespaces` or `loopback`."""

    kind: str
    addresses: tuple[str, str]
    port: int
    names: tuple[str, str]
    folder: Path
    mark: str
    started: list[Started] = field(default_factory=list)

    def variables(self, rank: int) -> dict[str, str]:
        return {
            "NNODES": "2",
            "NODE_RANK": str(rank),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(self.port),
            "NODE_ADDR": self.addresses[rank],
            MARK: f"{self.mark}-{rank}",
            "TMPDIR": str(self.folder),
        }

    def start(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> Started:
        """Start a command on node 0 or 1; its pid is the command's own."""
        log = self.folder / f"node-{rank}-{len(self.started)}.log"
        env = {**os.environ, **self.variables(rank), **(environ or {})}
        with log.open("wb") as out:
            process = subprocess.Popen(
                self.inside(rank, command), stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip
        started = Started(process, log)
        self.started.append(started)
        return started

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a node; each step replaces the last."""
        if self.kind == "loopback":
            return list(command)
        enter = ["ip", "netns", "exec", self.names[rank], "unshare", "--uts"]
        return [*enter, "sh", "-c", SETTLE, HOSTS[rank], str(self.folder), *command]

    def remaining(self, rank: int) -> list[int]:
        """Return the processes that still run on a node: all that its commands started."""
        variable = f"{MARK}={self.mark}-{rank}".encode()
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
        return pids

    def wait_until_empty(self, rank: int, timeout: float) -> None:
        """Wait until nothing runs on a node any more; fails with the names of what does."""
        deadline = time.monotonic() + timeout
        while self.remaining(rank):
            if time.monotonic() > deadline:
                raise AssertionError(f"left on node {rank}: {self._describe(rank)}")
            time.sleep(0.1)

    def _describe(self, rank: int) -> list[str]:
        lines = []
        for pid in self.remaining(rank):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                lines.append(f"{pid} {line.decode(errors='replace')[:120]}")
        return lines

    def end(self) -> None:
        for rank in (0, 1):
            for pid in self.remaining(rank):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for started in self.started:
            started.process.wait(10)


def namespaces_work() -> bool:
    """Whether we may make network namespaces, cables and host names here."""
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    try:
        with _namespaces() as names:
            probe = ["ip", "netns", "exec", names[0], "unshare", "--uts", "hostname", "probe"]
            return subprocess.run(probe, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


@contextlib.contextmanager
def open_pair(kind: str | None = None) -> Iterator[Pair]:
    """Make two nodes, as namespaces where that is allowed, and clean up behind them."""
    chosen = kind or ("namespaces" if namespaces_work() else "loopback")
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="ppo-2n-", ignore_cleanup_errors=True)
            )
        )
        mark = uuid.uuid4().hex
        if chosen == "namespaces":
            names = stack.enter_context(_namespaces())
            addresses, port = ("10.77.0.1", "10.77.0.2"), 6379
        else:
            names, addresses = ("", ""), ("127.0.0.2", "127.0.0.3")
            with socket.create_server((addresses[0], 0)) as probe:
                port = probe.getsockname()[1]
        lines = [f"{a} {h}" for a, h in zip(addresses, HOSTS, strict=True)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        (folder / "resolv.conf").write_text("options timeout:1 attempts:1\n")
        pair = Pair(chosen, addresses, port, names, folder, mark)
        stack.callback(pair.end)
        yield pair


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them, and nothing else."""
    stem = f"ppo{uuid.uuid4().hex[:8]}"
    names = (f"{stem}a", f"{stem}b")
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            "-n", names[0], "link", "add", "wire", "type", "veth",
            "peer", "name", "wire", "netns", names[1],
        )  # fmt: skip
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, timeout=10, check=True)
