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
        self, command: Sequence[str], *, environ: Mapping[str, str], log: BinaryIO, folder: Path
    ) -> None:
        super().__init__(
            supervised(command, folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, env=environ,
        )  # fmt: skip

    def end(self) -> None:
        """End the command and everything that it has started."""
        self.terminate()
        try:
            self.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
