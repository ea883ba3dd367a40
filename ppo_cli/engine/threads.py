"""OpenMP threads: how many there are, and how they wait while other work wants their CPUs.

libgomp, which torch brings on Linux, lets a thread that waits for the others spin for 300,000
rounds, which is many milliseconds. Alone that is the quickest way. Beside other work it burns the
CPU time that the thread waited for needs to arrive. Fewer threads would help less, and would
change the order of sums: a resumed run would no longer be the same bit for bit.

So the count stays, and the waiting changes. libgomp spins for 100 rounds and then sleeps as long
as its threads in all teams outnumber the CPUs (GOMP_SPINCOUNT in its manual). An idle second team
is enough for that; it lives as long as the Python thread that made it. Results do not change.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

OWN_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # whoever sets these has decided
PERIOD_S = 0.5
CROWDED, FREE = 0.25, 0.12  # CPUs beyond those there are: where short waits begin, and end


def set_threads(wanted: int | None, environ: Mapping[str, str] = os.environ) -> None:
    """Take `wanted` threads; None: OMP_NUM_THREADS, else torch's choice within the CPU quota."""
    if wanted is None:
        chosen = "OMP_NUM_THREADS" in environ
        wanted = torch.get_num_threads() if chosen else _within_quota(torch.get_num_threads())
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)


def _within_quota(threads: int) -> int:
    quota = cpu_quota()
    return threads if quota is None else max(1, min(threads, math.ceil(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPUs that control groups grant this process (version 2, or 1); None where unlimited."""
    base = root / "sys/fs/cgroup"
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in groups:
        _, names, path = line.split(":", 2)
        if not names:
            home = base / path.lstrip("/")
            levels = [level for level in (home, *home.parents) if level.is_relative_to(base)]
            found += [_quota(*_words(level / "cpu.max")) for level in levels]
        elif "cpu" in names.split(","):
            for home in (base / "cpu" / path.lstrip("/"), base / "cpu"):
                words = (*_words(home / "cpu.cfs_quota_us"), *_words(home / "cpu.cfs_period_us"))
                found.append(_quota(*words))
    return min(found, default=None, key=lambda q: math.inf if q is None else q)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # no limit at this level, or a group that the container does not show
        return []


def _quota(most: str = "max", period: str = "100000") -> float | None:
    return None if most == "max" or int(most) <= 0 else int(most) / int(period)


class Waiting:
    """Watches the CPUs, and has threads wait asleep as long as other work wants them.

    Does nothing with one thread, without libgomp or /proc/stat, or where the user has set
    OMP_WAIT_POLICY or GOMP_SPINCOUNT.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.asleep = False  # whether waiting threads sleep now
        self._threads = torch.get_num_threads()
        self._cpus = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
        self._end = threading.Event()
        self._gomp = _libgomp()
        self._watch: threading.Thread | None = None
        free_to_choose = not any(name in environ for name in OWN_WAITING)
        if self._gomp is not None and self._cpus and self._threads > 1 and free_to_choose:
            self._watch = threading.Thread(target=self._look, name="ppo-cpu-watch", daemon=True)
            self._watch.start()

    @property
    def watches(self) -> bool:
        """Whether the CPUs are being watched."""
        return self._watch is not None and self._watch.is_alive()

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._end.set()
        if self._watch is not None:
            self._watch.join()

    def _look(self) -> None:
        team: threading.Event | None = None
        others = 0.0
        before = _times(self._cpus)
        while not self._end.wait(PERIOD_S):
            now = _times(self._cpus)
            seconds, busy, own = (b - a for a, b in zip(before, now, strict=True))
            before = now
            others = (others + max(0.0, busy - own) / seconds) / 2
            self.asleep = crowded(self._threads, others, len(self._cpus), self.asleep)
            if self.asleep and team is None:
                team = self._add_team()
            elif team is not None and not self.asleep:
                team.set()
                team = None
        if team is not None:
            team.set()

    def _add_team(self) -> threading.Event:
        """Make an idle team with a thread for each CPU; it ends when the event is set."""
        gomp, size, end = self._gomp, len(self._cpus), threading.Event()
        assert gomp is not None

        def hold() -> None:
            # Any function without effect will do; no thread of a team may need Python's lock.
            work = ctypes.cast(gomp.omp_get_thread_num, ctypes.c_void_p)
            gomp.GOMP_parallel(work, None, ctypes.c_uint(size), ctypes.c_uint(0))
            end.wait()

        threading.Thread(target=hold, name="ppo-idle-team", daemon=True).start()
        return end


def crowded(threads: int, others: float, cpus: int, before: bool) -> bool:
    """Whether `threads` and the CPUs that others use are more than there are, with hysteresis."""
    return threads + others > cpus + (FREE if before else CROWDED)


def _times(cpus: frozenset[int] | tuple[()]) -> tuple[float, float, float]:
    """Seconds now, CPU seconds in which these CPUs were busy, and those of this process."""
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cpus:
            user, nice, system, _, _, irq, softirq = map(int, counts[:7])
            ticks += user + nice + system + irq + softirq
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def _libgomp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded; None where torch computes with another library."""
    try:
        mapped = Path("/proc/self/maps").read_text().splitlines()
        Path("/proc/stat").read_bytes()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in mapped if "/libgomp" in line}
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None
