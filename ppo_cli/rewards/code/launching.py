"""A candidate and a tester, started side by side with the channels between them and to us."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
import time
from types import TracebackType

from ppo_cli.config.reward_schema import Code
from ppo_cli.rewards.code.boot import Role, command
from ppo_cli.rewards.code.ending import (
    LARGEST_FILE_MB,
    MOST_ENTRIES,
    MOST_FILES_MB,
    SECONDS_TO_DIE,
    Process,
    count_files,
    count_threads,
    end_process,
    find_family,
    remove_folder,
)
from ppo_cli.rewards.code.sandboxes import Sandbox

_PIECE = 1 << 16
# What bubblewrap's first process and the interpreter take, which the limit does not mean.
OWN_THREADS = {"bwrap": 2, "sandlock": 1, "none": 1}


class Launched:
    """Two processes and three channels of ours; leaving the `with` block ends them all.

    `control` is a socket to the tester, `output` what the candidate prints, `words` what either
    interpreter says in distress. The candidate has no way to `control` or `words`.
    """

    def __init__(self, sandbox: Sandbox, settings: Code) -> None:
        self._sandbox = sandbox
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self._folder = ""

    def __enter__(self) -> Launched:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        with contextlib.ExitStack() as theirs:
            asked, answering = (theirs.enter_context(one) for one in socket.socketpair())
            self.control, reporting = socket.socketpair()
            self._stack.enter_context(self.control)
            theirs.enter_context(reporting)
            self.output, printing = self._pipe(theirs)
            self.words, telling = self._pipe(theirs)
            self._stack.callback(self._await_silence)
            memory_mb = self._settings.memory_mb
            streams = (answering.fileno(), printing, printing)
            self.candidate = self._launch("candidate", memory_mb, streams)
            # The tester holds the answers and what they are compared with.
            streams = (asked.fileno(), reporting.fileno(), telling)
            self.tester = self._launch("tester", 2 * memory_mb, streams)

    def _pipe(self, theirs: contextlib.ExitStack) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._stack.callback(os.close, reading)
        theirs.callback(os.close, writing)
        os.set_blocking(reading, False)
        return reading, writing

    def _launch(self, role: Role, memory_mb: int, streams: tuple[int, int, int]) -> Process:
        folder = "/"
        if self._sandbox.uses_folder:
            folder = tempfile.mkdtemp(prefix="ppo-code-")
            self._stack.callback(remove_folder, folder)
            # The candidate's; it is the first to be launched.
            self._folder = self._folder or folder
        limits = [memory_mb, self._settings.cpu_seconds, LARGEST_FILE_MB]
        program = command(role, [*limits, int(self._sandbox.leaves_filter)])
        process = self._sandbox.start(program, streams=streams, folder=folder)
        self._stack.callback(end_process, process, alone=self._sandbox.name == "bwrap")
        return process

    def _await_silence(self) -> None:
        """Wait until nobody holds a channel of theirs any more: then all of them are dead."""
        until = time.monotonic() + SECONDS_TO_DIE
        channels = {self.output, self.words}
        while channels and time.monotonic() < until:
            for fd in select.select(list(channels), [], [], 0.1)[0]:
                with contextlib.suppress(BlockingIOError):
                    if not os.read(fd, _PIECE):
                        channels.discard(fd)

    def is_lost(self) -> bool:
        """Say whether the launcher died, and both processes with it."""
        return self.candidate.is_lost() or self.tester.is_lost()

    def find_excess(self) -> str:
        """Say which limit is broken that no process can be made to hold by itself."""
        pid, most = self.candidate.pid, self._settings.processes
        return find_excess(self._sandbox, pid, self._folder, most)


def find_excess(sandbox: Sandbox, pid: int, folder: str, most_threads: int) -> str:
    """Say which limit a sandboxed process breaks; `folder` is the one that it may write to."""
    launcher, *others = find_family(pid)
    own = 1 if sandbox.name == "none" else 0
    threads = count_threads([launcher] * own + others) - OWN_THREADS[sandbox.name]
    if threads > most_threads:
        return f"killed: more than {most_threads} processes and threads"
    try:
        taken, found = count_files(folder, [launcher, *others]) if folder else (0, 0)
    except OSError as error:
        return f"broke its sandbox: its files cannot be measured ({error.strerror})"
    if not folder and others:
        # bubblewrap limits the size of what lies in memory, and not the number.
        with contextlib.suppress(OSError):
            memory = os.statvfs(f"/proc/{others[-1]}/root/tmp")
            # While it starts, this is the folder outside.
            if memory.f_blocks * memory.f_frsize == MOST_FILES_MB << 20:
                found = memory.f_files - memory.f_ffree
    if taken > MOST_FILES_MB << 20:
        return f"killed: wrote more than {MOST_FILES_MB} MB of files"
    return f"killed: made more than {MOST_ENTRIES} files" if found > MOST_ENTRIES else ""
