"""Programs that are not asked through a channel, such as servers."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ppo_cli.processes.reaper import STOP_S, supervised


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
