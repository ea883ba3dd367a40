"""Resource limits that a process sets on itself before it runs foreign code, and a syscall filter.

The filter denies new processes, sockets and access to other processes. Without child processes,
a limit on one process is a limit on the whole response. bubblewrap installs the filter itself;
in other sandboxes each process installs it on itself. It is classic BPF, see seccomp(2).
This module runs inside the sandbox.
"""

from __future__ import annotations

import errno
import os
import resource
from struct import pack

MAX_OPEN_FILES = 64
MEBIBYTE = 1 << 20


# Seconds of processor time for one test, and for all of them.
_CPU_LIMITS = [0, 0]


def apply_limits(
    memory_mb: int, cpu_seconds: int, all_cpu_seconds: int, file_mb: int, filtered: int
) -> None:
    """Limit memory, processor time, file size and open files of this process, irrevocably.

    `filtered` also installs the system call filter, for a sandbox that has none. After
    `cpu_seconds` a process gets SIGXCPU, unless `renew_cpu_limit` begins another test, and SIGKILL
    after `all_cpu_seconds`.
    """
    _lower_limit(resource.RLIMIT_AS, memory_mb * MEBIBYTE)
    _lower_limit(resource.RLIMIT_FSIZE, file_mb * MEBIBYTE)
    _lower_limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _lower_limit(resource.RLIMIT_CORE, 0)
    _CPU_LIMITS[:] = cpu_seconds, all_cpu_seconds + 1
    _lower_limit(resource.RLIMIT_CPU, *_CPU_LIMITS)
    if filtered:
        install_filter()


def renew_cpu_limit() -> None:
    """Allow this process the processor time of another test."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    until = int(usage.ru_utime + usage.ru_stime) + 1 + _CPU_LIMITS[0]
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(until, hard), hard))


def _lower_limit(what: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit; a limit that is already lower stays."""
    _, hard_limit = resource.getrlimit(what)
    top = soft if hard is None else hard
    if hard_limit != resource.RLIM_INFINITY:
        soft, top = min(soft, hard_limit), min(top, hard_limit)
    resource.setrlimit(what, (soft, top))


# BPF instructions, return values and offsets into struct seccomp_data (linux/seccomp.h).
_LOAD, _AND, _JUMP, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_ALL_BITS = 0xFFFFFFFF
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER_MODE = 22, 38, 2

# Index into the pairs below, and the audit architecture. System call numbers are from the
# kernel's tables: x86_64 first, then the generic table that aarch64 uses.
_TABLES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_DENIED = {
    # New processes, and access to others.
    "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "get_robust_list": (274, 100),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    # Leaving the session, which is how all processes of a response are killed.
    "setsid": (112, 157), "setpgid": (109, 154),
    # A larger share of the machine.
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # The network.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # A descriptor sent through a socket would be missing in the count of unlinked files.
    "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Watching files of others, and memory that no limit counts.
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semtimedop": (220, 192), "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    # Namespaces, mounts, and files by handle instead of by path.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # The machine and its kernel.
    "sync": (162, 81), "syncfs": (306, 267), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "bpf": (321, 280), "seccomp": (317, 277),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "personality": (135, 92),
}  # fmt: skip
# Calls with a fallback: given this error, the C library and Python use another call.
_ABSENT = {
    # Its flags are in memory, where a filter cannot read them; the same holds for openat2.
    "clone3": (435, 435, errno.ENOSYS),
    "openat2": (437, 437, errno.ENOSYS),
    "io_setup": (206, 0, errno.ENOSYS),
    # Allocates disk space faster than files can be counted.
    "fallocate": (285, 47, errno.EOPNOTSUPP),
}
_CLONE = (56, 220)
_KILL, _TGKILL, _PRLIMIT = (62, 129), (234, 131), (302, 261)
_SOCKETPAIR, _PRCTL, _FCNTL, _IOCTL = (53, 199), (157, 167), (72, 25), (16, 29)
_OPEN, _OPENAT = (2, None), (257, 56)
_THREAD = 0x00010000 | 0x00000400  # CLONE_THREAD | CLONE_FILES
_UNIX, _STREAM, _KIND_BITS = 1, 1, 0xF
_TMPFILE = 0x00400000
# PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER: ways to escape being
# killed or watched.
_PRCTL_DENIED = (1, 4, _PR_SET_SECCOMP, 36)
# F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY: signals for any process, and leases.
_FCNTL_DENIED = (8, 10, 15, 1024, 1026)
# TIOCSTI, FIOSETOWN, SIOCSPGRP.
_IOCTL_DENIED = (0x5412, 0x8901, 0x8902)


def build_filter(pid: int | None = None) -> bytes | None:
    """Return the filter program for this machine, or None for an unsupported architecture.

    `pid` is the only process that signals may be sent to; without it, any visible process.
    """
    machine = os.uname().machine
    if machine not in _TABLES:
        return None
    column, architecture = _TABLES[machine]
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, architecture, 1, 0),
        _refuse(),
        _step(_LOAD, _NUMBER),
        # The x32 numbers of x86_64 would bypass every rule.
        _step(_JUMP_AT_LEAST, _X32, 0, 1),
        _refuse(),
    ]
    # Calls that are always denied, then calls that are denied for some arguments.
    for numbers in _DENIED.values():
        steps += _rule(numbers[column], [_refuse()])
    for first, second, error in _ABSENT.values():
        steps += _rule((first, second)[column], [_refuse(error)])
    allowed_pids = () if pid is None else (pid,)
    if allowed_pids:
        steps += _rule(_KILL[column], _only(0, allowed_pids))
        steps += _rule(_TGKILL[column], _only(0, allowed_pids))
    steps += _rule(_PRLIMIT[column], _only(0, (0, *allowed_pids)))
    steps += _rule(_CLONE[column], _only(0, (_THREAD,), mask=_THREAD))
    pair = [*_only(0, (_UNIX,)), *_only(1, (_STREAM,), mask=_KIND_BITS)]
    steps += _rule(_SOCKETPAIR[column], pair)
    steps += _rule(_PRCTL[column], _never(0, _PRCTL_DENIED))
    steps += _rule(_FCNTL[column], _never(1, _FCNTL_DENIED))
    steps += _rule(_IOCTL[column], _never(1, _IOCTL_DENIED))
    unnamed = {"mask": _TMPFILE, "error": errno.EOPNOTSUPP}
    steps += _rule(_OPEN[column], _never(1, (_TMPFILE,), **unnamed))
    steps += _rule(_OPENAT[column], _never(2, (_TMPFILE,), **unnamed))
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def install_filter() -> None:
    """Install the filter on this process; it can be tightened later, but not removed."""
    import ctypes

    program = build_filter(os.getpid())
    if program is None:
        raise OSError(errno.ENOSYS, "no system call filter is known for this machine")
    steps = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(pack("@HP", len(program) // 8, ctypes.addressof(steps)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if prctl(_PR_SET_SECCOMP, _FILTER_MODE, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def _rule(number: int | None, checks: list[bytes]) -> list[bytes]:
    """Return the instructions for one system call: allowed unless a check refuses it."""
    if number is None:
        return []
    body = [*checks, _step(_RETURN, _ALLOW)]
    return [_step(_JUMP_EQUAL, number, 0, len(body)), *body]


def _only(argument: int, values: tuple[int, ...], mask: int = _ALL_BITS) -> list[bytes]:
    """Refuse a call unless this argument has one of these values."""
    return [*_compare(argument, values, mask), _refuse()]


def _never(
    argument: int, values: tuple[int, ...], mask: int = _ALL_BITS, error: int = errno.EPERM
) -> list[bytes]:
    """Refuse a call when this argument has one of these values."""
    return [*_compare(argument, values, mask), _step(_JUMP, 1), _refuse(error)]


def _compare(argument: int, values: tuple[int, ...], mask: int) -> list[bytes]:
    """Skip the next instruction if the lower half of the argument has one of these values."""
    steps = [_step(_LOAD, _FIRST_ARGUMENT + 8 * argument), _step(_AND, mask)]
    for distance in range(len(values), 0, -1):
        steps.append(_step(_JUMP_EQUAL, values[-distance], distance, 0))
    return steps


def _refuse(error: int = errno.EPERM) -> bytes:
    return _step(_RETURN, _ERROR | error)


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return pack("=HBBI", code, then, otherwise, value)
