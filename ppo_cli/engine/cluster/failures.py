"""From what a worker reports, or no longer can, to the one error that the driver raises."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_cli.engine.cluster.logs import CRASH, KILLED, last_lines
from ppo_cli.engine.cluster.worker import Failure
from ppo_cli.errors import WorkerLost

EXIT = re.compile(r"exits with an exit code (.+?)\.?\s*$", re.MULTILINE)


class WorkerFault(Exception):
    """A bug in a worker; the text is its own traceback, under its role and node."""


@dataclass(frozen=True)
class Member:
    """A worker as the driver knows it: `title` is like "learner rank 1"."""

    title: str
    log: Path
    handle: Any
    node: str = ""
    node_id: str = ""
    pid: int = 0

    def __str__(self) -> str:
        return f"{self.title} on node {self.node}" if self.node else self.title


def reported(member: Member, failure: Failure) -> Exception:
    """The user's mistake as it was raised; anything else as a bug with the worker's traceback."""
    if failure.told is not None:
        error: Exception = pickle.loads(failure.told)
        return error
    return WorkerFault(f"{member} failed:\n{failure.traceback.rstrip()}")


def lost(member: Member, doing: str, words: str, *, node_lives: bool = True) -> WorkerLost:
    """A worker whose process is gone; `words` are Ray's, which name the cause now and then."""
    if not node_lives:
        return WorkerLost(
            f"Node {member.node} does not answer any more, and {member.title} on it is lost "
            f"(during `{doing}`)."
        )
    lines = last_lines(member.log, member.pid)
    if "running low on memory" in words:
        cause = "was ended by Ray, as its node was running out of memory"
    elif any(line.startswith(CRASH) for line in lines):
        cause = "crashed"
    elif found := EXIT.search(words):
        cause = f"ended by itself (exit code {found[1]})"
    else:
        cause = KILLED
    tail = "\n  ".join([f"The last lines of its log, {member.log}:", *lines])
    told = tail if lines else f"Its log: {member.log} (on that node)."
    return WorkerLost(f"{_capital(str(member))} {cause} during `{doing}`. {told}")


def late(members: list[Member], doing: str, seconds: float) -> WorkerLost:
    """Workers that live and do not answer."""
    names = ", ".join(str(member) for member in members)
    logs = ", ".join(str(member.log) for member in members)
    one = len(members) == 1
    return WorkerLost(
        f"{_capital(names)} {'has' if one else 'have'} not answered `{doing}` for {seconds:g} s; "
        f"{'its log' if one else 'their logs'}: {logs}. If the work is only slow, raise "
        "--worker_timeout."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
