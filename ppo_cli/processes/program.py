"""Programs that are not asked through a channel: servers, and many short ones."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ppo_cli.processes.reaper import STOP_S, descendants, kill_below, supervised


class Program(subprocess.Popen[bytes]):
    """A command under a reaper. A run that is killed removes `folder` as well."""

    def __init__(
        self, command: Sequence[str], *, environ: Mapping[str, str], folder: Path,
        stdin: int = subprocess.DEVNULL, log: BinaryIO | int = subprocess.DEVNULL,
        cwd: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            supervised(command, folder), stdin=stdin, stdout=log, stderr=log, env=environ, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip

    def end(self) -> None:
        """End the command and everything that it has started."""
        self.terminate()
        try:
            self.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()


class ShortProgram(subprocess.Popen[bytes]):
    """A command without a reaper, which would take longer to start than the command runs.

    It leads a session. What ends it with a run that is killed is up to the command.
    """

    def __init__(
        self, command: Sequence[str], *, environ: Mapping[str, str], cwd: str,
        streams: tuple[int, int, int], pass_fds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(
            command, stdin=streams[0], stdout=streams[1], stderr=streams[2], env=environ, cwd=cwd,
            pass_fds=pass_fds, start_new_session=True,
        )  # fmt: skip

    def end(self, *, alone: bool) -> None:
        """Kill it and everything that it has started, and wait for that.

        `alone`: nothing else can outlive it (it has a process namespace, or may not start
        processes), so its descendants are not searched.
        """
        # Descendants that left the session are found by parentage, before they are orphans.
        kin = [] if alone or self.poll() is not None else descendants(self.pid)
        if self.poll() is None:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        for pid in kin:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.wait(STOP_S)
        if not alone:
            kill_below(self.pid)
