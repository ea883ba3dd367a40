"""The errors that people see.

PpoError
├── UserError            the user's mistake: one message, no traceback, exit code 2
│   ├── ConfigError      a key, flag, variable, preset or value
│   ├── DataError        a prompt file, a row, a column
│   ├── RewardError      a reward function, a rule, a judge setting
│   ├── ModelError       a model path, a tokenizer, a checkpoint that does not load
│   └── MissingPart      a feature whose package or part is not installed
├── WorkerLost           a worker or a node that died or hangs: the run may start again
└── Interrupted          stopped early and resumable, exit code 3

A message says what was found, where (file, row, flag, key) and what to do about it.
"""

from __future__ import annotations

import difflib
import errno
import os
import pickle
import re
import resource
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_RESUMABLE = 3
EXIT_STOPPED = 130  # what a shell expects of a program that Ctrl-C ended
# A disk that takes no more: only writing a file ends like this, whoever does it.
FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
# A file that cannot be written for one of these reasons is a matter of the machine, not a bug.
DISK_ERRNOS = FULL_DISK_ERRNOS | {errno.EACCES, errno.EPERM}


class PpoError(Exception):
    """Anything this program raises on purpose; `exit_code` is what the process ends with."""

    exit_code = EXIT_BUG


class UserError(PpoError):
    """The user's mistake, in one message that names what is wrong and what to do."""

    exit_code = EXIT_USER


class ConfigError(UserError, ValueError):
    """One or more wrong settings; `problems` holds one line for each."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        lines = [problems] if isinstance(problems, str) else list(problems)
        self.problems = tuple(lines)
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class DataError(UserError, ValueError):
    """A data file that is missing, empty, unreadable or has bad rows."""


class RewardError(UserError, ValueError):
    """A reward that cannot be built or cannot be trusted."""


class ModelError(UserError, ValueError):
    """A model, tokenizer or checkpoint that does not load as it should."""


class MissingPart(UserError, ImportError):
    """A feature was asked for whose package or part is not there."""


@dataclass(frozen=True)
class UsedUp:
    """A judge's budget, in dollars or tokens: what its calls took, and what the next may take."""

    flag: str
    spent: float
    calls: int
    next: float


class Interrupted(PpoError):
    """The run stopped early, saved itself and can be resumed.

    `used_up` is the budget that ended it, and must be higher for the run to go on.
    """

    exit_code = EXIT_RESUMABLE

    def __init__(self, message: str, *, used_up: UsedUp | None = None) -> None:
        super().__init__(message)
        self.used_up = used_up


class WorkerLost(PpoError):
    """A process that the run needs died or does not answer; names it and its node.

    Nothing is wrong with the run itself: it goes on from its last checkpoint with new workers.
    """

    exit_code = EXIT_RESUMABLE


ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a path object has one slash less


def refuse_address(path: object) -> None:
    """Raise ValueError for s3://… and its like where a folder or a file of this machine is due."""
    if ADDRESS.match(str(path)):
        raise ValueError(
            f"{path} is an address, and files are written to a disk of this machine: name a "
            "folder on it, and copy that afterwards"
        )


def refuse_out(path: object) -> None:
    """Raise UserError for an address as the place of what a command writes."""
    try:
        refuse_address(path)
    except ValueError as error:
        raise UserError(f"--out {error}.") from None


def failing(checks: Iterable[Callable[[], object]]) -> Iterator[str]:
    """Make each check, and yield what those that fail say."""
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)


def exit_code_of(error: BaseException | None) -> int:
    """Return what the process ends with that this error ends; 0 where there is none."""
    if error is None:
        return EXIT_DONE
    if isinstance(error, PpoError):
        return error.exit_code
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        return EXIT_USER
    if is_out_of_memory(error):
        return EXIT_USER
    if isinstance(error, KeyboardInterrupt):
        return EXIT_STOPPED
    if isinstance(error, SystemExit):
        return _code_of_exit(error.code)
    return EXIT_BUG


def _code_of_exit(code: str | int | None) -> int:
    """As Python does it: nothing is 0, a number itself, and words are a failure."""
    if code is None:
        return EXIT_DONE
    return code & 0xFF if isinstance(code, int) else EXIT_BUG


def ppo(words: str = "") -> str:
    """Return a command as it works where this process was started: `ppo show`, or its path.

    `./train.sh` says in PPO_COMMAND (quoted for a shell) where `ppo` lies.
    """
    return f"{os.environ.get('PPO_COMMAND') or _called_as()} {words}".rstrip()


# A word as a shell takes it: what is in quotes may hold spaces.
_WORD = r"""(?:'[^']*'|"[^"]*"|[^ '"])+"""


def with_flag(command: str, flag: str, value: str) -> str:
    """Return a command line with this flag at this value, in place of the one it had."""
    spelt = re.escape(flag).replace("_", "[-_]")
    return f"{re.sub(rf' {spelt}[ =]{_WORD}', '', command)} {flag} {value}"


def command_line() -> str:
    """Return this process's command line as it can be typed again."""
    return shlex.join([*shlex.split(ppo()), *sys.argv[1:]])


def with_path(path: str, other: str) -> str:
    """Return this process's command line with another path in place of `path`.

    Empty where the line does not have it, alone or behind a `=`.
    """
    words = []
    for word in sys.argv[1:]:
        name, equals, value = word.rpartition("=")
        alike = value and Path(value) == Path(path)
        words.append(other if word == path else f"{name}{equals}{other}" if alike else word)
    return shlex.join([*shlex.split(ppo()), *words]) if words != sys.argv[1:] else ""


def _called_as() -> str:
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "ppo_cli":
        return f"{on_path(Path(sys.executable))} -m ppo_cli"
    return on_path(called) if called.name == "ppo" else "ppo"


def on_path(program: Path) -> str:
    """The bare name where the shell finds this very file by it."""
    found = shutil.which(program.name)
    there = found is not None and os.path.abspath(found) == os.path.abspath(program)
    return program.name if there else shlex.quote(str(program))


def travels(error: BaseException) -> bool:
    """Whether an error arrives in another process as it is: pickled and back."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


# What libraries say when they cannot map more memory, and in other cases too: they count only
# where the address space of the process is limited.
_UNMAPPED = (
    "could not create a primitive", "could not execute a primitive", "can't start new thread",
    "failed to map segment", "bad_alloc", "Cannot allocate memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a smaller batch could work."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    said = f"{type(error).__name__} {error}"  # torch has an error of its own for it
    if address_space() is not None and (
        any(sign in said for sign in _UNMAPPED)
        # numpy says that it is imported from its source folder, torch that a name is missing
        or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
        or (isinstance(error, ImportError) and (error.name or "").startswith("torch."))
    ):
        return True
    signs = (
        "OutOfMemory", "not enough memory", "can't allocate memory", "out of memory",
        "Failed to CUDA",  # NCCL, of its buffers: calloc, malloc, host alloc
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(s in said for s in (*signs, "ALLOC_FAILED"))


def address_space() -> int | None:
    """The bytes of memory that `ulimit -v` lets this process map; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def describe_address_space() -> str:
    """Return what to do about the limit of the address space, or an empty text without one."""
    limit = address_space()
    if limit is None:
        return ""
    return (
        f"The address space of a process is limited to {limit / 2**30:.2f} GiB here: run "
        "`ulimit -v unlimited` before the command, or ask for a job with more memory."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text without its end, or its type when it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(" .:")


def shorten(text: str, most: int) -> str:
    """Return at most so many characters of a text."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""
