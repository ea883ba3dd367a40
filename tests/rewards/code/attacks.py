"""Responses that attack, in text files, and a world that they may not reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from string import Template
from typing import Any

from tests.rewards.tables import read_blocks

VICTIM = read_blocks("code/programs")["victim"]
WORDS = {name: text.removesuffix("\n") for name, text in read_blocks("code/fragments").items()}
WORDS |= {"NUL": "\0", "MANY_OPEN": "(" * 5000, "MANY_CLOSED": ")" * 5000}


def read_attacks(name: str) -> dict[str, tuple[str, str]]:
    """Return the attacks of a file: name -> (code, the reason that is due)."""
    attacks = {}
    for heading, code in read_blocks(f"code/{name}").items():
        name, _, reason = heading.partition(" | ")
        attacks[name.strip()] = (Template(code).safe_substitute(WORDS), reason)
    return attacks


class World:
    """What an attack aims at: listeners, a process, and a folder with a secret."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "secret").write_text("secret")
        (folder / "secret").chmod(0o600)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = tcp.getsockname()[1]
        # An abstract name; that of the datagrams ends with a `d`.
        self.name = f"zz{os.getpid()}-{self.port}"
        self._listeners = [tcp]
        addresses: tuple[tuple[int, int, Any], ...] = (
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", self.port)),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/stream"),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self.name}"),
            (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{self.name}d"),
        )
        for family, kind, address in addresses:
            listener = stack.enter_context(socket.socket(family, kind))
            listener.bind(address)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            self._listeners.append(listener)
        self.victim = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", VICTIM], stdout=subprocess.PIPE, start_new_session=True,
                env={**os.environ, "ATTACK_SECRET": "ATTACK_SECRET"},
            )
        )  # fmt: skip
        stack.callback(self.victim.kill)
        assert self.victim.stdout is not None
        assert self.victim.stdout.readline() == b"ready\n"
        os.set_blocking(self.victim.stdout.fileno(), False)
        self._before = self._look()

    def list_changes(self) -> list[str]:
        """Return what an attack has reached."""
        assert self.victim.stdout is not None
        before, now = self._before, self._look()
        changes = [f"{k}: {before[k]}, now {now[k]}" for k in now if now[k] != before[k]]
        if signals := self.victim.stdout.read():
            changes.append(f"the victim got {signals!r}")
        return changes + [f"{listener} was called" for listener in self._listeners
                          if was_called(listener)]  # fmt: skip

    def _look(self) -> dict[str, Any]:
        process = Path(f"/proc/{self.victim.pid}")
        stat = process.joinpath("stat").read_text().rsplit(")", 1)[1].split()
        files = ("limits", "oom_score_adj", "comm", "coredump_filter")
        return {
            **{name: (process / name).read_text() for name in files},
            "group, nice, policy": (stat[2], stat[16], stat[38]),
            "processors": os.sched_getaffinity(self.victim.pid),
            "folder": sorted((path.name, path.stat()) for path in self.folder.iterdir()),
        }


def was_called(listener: socket.socket) -> bool:
    listener.setblocking(False)
    with suppress(BlockingIOError):
        if listener.type == socket.SOCK_DGRAM:
            listener.recv(1)
        else:
            listener.accept()[0].close()
        return True
    return False


def find_marked(token: str) -> list[str]:
    """Return the processes whose environment holds the token."""
    processes = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and token.encode() in (entry / "environ").read_bytes():
                processes.append((entry / "cmdline").read_bytes()[-80:].decode())
    return processes
