"""Ray on this machine, as a process of its own that cannot outlive the run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import ppo_cli
from ppo_cli import reaper
from ppo_cli.cluster.rendezvous import VARIABLE
from ppo_cli.errors import WorkerLost
from ppo_cli.redact import redact

UP = "Ray runtime started."
# Ray gives its own process 30 s to register, which a busy machine does not always keep.
TOO_SLOW = "The current node timed out during startup"
UP_S = 180.0
STOP_S = 2 * reaper.GRACE_S + 2
TICK_S = 0.05
HEALTH_S = 60.0
# A socket's path may have 107 characters, and Ray puts about 62 behind the folder.
LONGEST_FOLDER = 40
_TAIL = 1500


def ray_variables(token: str) -> dict[str, str]:
    """Return the variables with which every process of one cluster is started, ours too."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def keeps_silent(address: str, environ: Mapping[str, str], timeout: float) -> bool:
    """Whether what listens there says nothing to a Ray that asks; it would ask us for ever."""
    asking = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check"]
    try:
        subprocess.run(
            [*asking, "--address", address], env=dict(environ), stdin=subprocess.DEVNULL,
            capture_output=True, timeout=min(timeout, HEALTH_S), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    return False


class RayProcess:
    """`ray start --block` under a reaper; stop it at the end."""

    def __init__(self, options: list[str], environ: Mapping[str, str], label: str) -> None:
        self._label = label
        self._environ = environ
        self.folder = Path(tempfile.mkdtemp(prefix="ppo-ray-", dir=_short_folder()))
        self._log = self.folder / "start.log"
        common = ["--block", "--disable-usage-stats", "--log-color", "false"]
        # Ray opens its folder to all users, so it lies in one that only this user enters.
        self._options = [*options, *common, "--temp-dir", str(self.folder / "r")]
        self._process = self._start()

    def wait(self, timeout: float = UP_S) -> None:
        """Wait until Ray runs, and start it again where it found the machine too slow.

        Raises WorkerLost with Ray's own words when it does not run in time.
        """
        deadline = time.monotonic() + timeout
        while UP not in self._words():
            if not self.alive():
                if TOO_SLOW in self._words() and time.monotonic() < deadline:
                    self._process = self._start()
                    continue
                raise WorkerLost(f"{self.ended()}\n{self.tail()}")
            if time.monotonic() > deadline:
                tail = self.tail()
                raise WorkerLost(f"Ray does not start on {self._label} in {timeout:g} s.\n{tail}")
            time.sleep(TICK_S)

    def alive(self) -> bool:
        """Whether Ray still runs."""
        return self._process.poll() is None

    def ended(self) -> str:
        """Say that Ray ended here, and how."""
        return f"Ray stopped on {self._label} (exit {self._process.poll()})."

    def tail(self) -> str:
        """Return Ray's last words."""
        lines = [line for line in self._words()[-_TAIL:].splitlines() if line.strip()]
        return redact("\n".join(lines[-8:]), self._environ)

    def stop(self) -> None:
        """Stop Ray and all that it started, and remove its folder."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(reaper.GRACE_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: a folder called ray beside the run must not be taken for Ray.
        command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *self._options]
        watched = [str(os.getpid()), str(self.folder), *command]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, *watched],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_with_ours(self._environ),
            )

    def _words(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")
        return ""


def _with_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Let Ray's workers find the package that runs here; no other cluster, and no secret."""
    env = {name: text for name, text in environ.items() if name not in ("RAY_ADDRESS", VARIABLE)}
    root = str(Path(ppo_cli.__file__).resolve().parents[1])
    if "site-packages" not in root:
        paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, root]))
    return env


def _short_folder() -> str | None:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_FOLDER - len("/ppo-ray-12345678/r") else "/tmp"
