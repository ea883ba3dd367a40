"""Limits that a process puts on itself before it runs anything foreign. Runs inside the sandbox."""

from __future__ import annotations

import resource

from ppo_cli.rewards.code.seccomp import put_on

MOST_FILES = 64
MEBIBYTE = 1 << 20


def confine(memory_mb: int, cpu_seconds: int, file_mb: int, filtered: int) -> None:
    """Cap memory, processor time, size of files and number of open files, for good.

    `filtered` asks for the system call filter too, where the sandbox brings none. A process gets
    the signal of its processor time first and is killed a second later, so that who ignores the
    signal gains nothing.
    """
    _cap(resource.RLIMIT_AS, memory_mb * MEBIBYTE)
    _cap(resource.RLIMIT_FSIZE, file_mb * MEBIBYTE)
    _cap(resource.RLIMIT_NOFILE, MOST_FILES)
    _cap(resource.RLIMIT_CORE, 0)
    _cap(resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1)
    if filtered:
        put_on()


def _cap(what: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit; one that is lower already stays."""
    _, most = resource.getrlimit(what)
    top = soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        soft, top = min(soft, most), min(top, most)
    resource.setrlimit(what, (soft, top))
