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

A message says what is wrong, where (file, row, flag, key) and what to do.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_RESUMABLE = 3
EXIT_STOPPED = 130  # 128 + SIGINT, as shells expect after Ctrl-C
# The disk is full or read-only: only writing a file fails like this.
FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
# A file that cannot be written for one of these reasons is the machine's fault, not a bug.
DISK_ERRNOS = FULL_DISK_ERRNOS | {errno.EACCES, errno.EPERM}


class PpoError(Exception):
    """Base of the errors that this program raises on purpose; `exit_code` is the process's."""

    exit_code = EXIT_BUG


class UserError(PpoError):
    """The user's mistake; the message says what is wrong and what to do."""

    exit_code = EXIT_USER


class ConfigError(UserError, ValueError):
    """One or more wrong settings; `problems` has a line for each."""

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
    """A feature whose package or part is not installed."""


@dataclass(frozen=True)
class ExhaustedBudget:
    """A judge's exhausted budget: dollars or tokens spent, and what the next call may cost."""

    flag: str
    spent: float
    calls: int
    next: float


class Interrupted(PpoError):
    """The run stopped early, saved itself and can be resumed.

    `used_up` is the budget that ended it; the run continues with a higher one.
    """

    exit_code = EXIT_RESUMABLE

    def __init__(self, message: str, *, used_up: ExhaustedBudget | None = None) -> None:
        super().__init__(message)
        self.used_up = used_up


class WentBack(PpoError):
    """The run has exploited its reward, and goes on from an earlier checkpoint, restrained."""


class WorkerLost(PpoError):
    """A process of the run died or does not answer; the message names it and its node.

    The run itself is intact: it continues from its last checkpoint with new workers.
    """

    exit_code = EXIT_RESUMABLE


# s3: without slashes is meant as an address, and would be a folder with that name.
URL_PATTERN = re.compile(
    r"([a-z][a-z0-9+.-]+::)*([a-z][a-z0-9+.-]+:/|(s3a?|gs|gcs|az|hdfs):)", re.I
)


def is_address(path: object) -> bool:
    """Whether a path is s3://… and the like; a `Path` of it has lost the second slash."""
    return URL_PATTERN.match(str(path)) is not None


def refuse_out_address(path: object) -> None:
    """Raise UserError if a command's --out is an address instead of a local path."""
    if is_address(path):
        raise UserError(
            f"--out {path} is an address, and files are written to a disk of this machine: name a "
            "folder on it, and copy that afterwards."
        )


def collect_problems(checks: Iterable[Callable[[], object]]) -> Iterator[str]:
    """Run each check and yield the messages of the UserErrors that are raised."""
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)


def exit_code_of(error: BaseException | None) -> int:
    """Return the exit code of a process that ends with this error; 0 without an error."""
    if error is None:
        return EXIT_DONE
    if isinstance(error, PpoError):
        return error.exit_code
    # The machine's fault, which the user can repair.
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        return EXIT_USER
    if is_out_of_memory(error):
        return EXIT_USER
    if describe_device_fault(error):
        return EXIT_RESUMABLE
    if isinstance(error, KeyboardInterrupt):
        return EXIT_STOPPED
    if isinstance(error, SystemExit):
        return _system_exit_code(error.code)
    return EXIT_BUG


def _system_exit_code(code: str | int | None) -> int:
    """Return the code of SystemExit as Python does: None is 0, a text is a failure."""
    if code is None:
        return EXIT_DONE
    return code & 0xFF if isinstance(code, int) else EXIT_BUG


def ppo(arguments: str = "") -> str:
    """Return a `ppo` command as it can be typed here: `ppo show`, or with the program's path.

    `./train.sh` puts the path of `ppo`, quoted for a shell, into PPO_COMMAND.
    """
    return f"{os.environ.get('PPO_COMMAND') or _program_as_started()} {arguments}".rstrip()


# A word in a shell; quoted parts may contain spaces.
_WORD = r"""(?:'[^']*'|"[^"]*"|[^ '"])+"""


SAME_CALL = "the same call of "  # begins what stands in place of a command line in Python


def replace_flag(command: str, flag: str, value: str) -> str:
    """Return a command line with this value of a flag, instead of the value it had.

    A call in Python, in place of the command, gets the argument of that name.
    """
    if command.startswith(SAME_CALL):
        return f"{command} with {flag.removeprefix('--')}={value!r}"
    # Flags are accepted with underscores and with dashes.
    spelt = re.escape(flag).replace("_", "[-_]")
    return f"{re.sub(rf' {spelt}[ =]{_WORD}', '', command)} {flag} {value}"


def command_line() -> str:
    """Return this process's command line, quoted for a shell."""
    return shlex.join([*shlex.split(ppo()), *sys.argv[1:]])


def replace_path(path: str, other: str) -> str:
    """Return this process's command line with another path instead of `path`.

    Empty if the line does not contain `path`, alone or after a `=`.
    """
    arguments = []
    for word in sys.argv[1:]:
        name, equals, value = word.rpartition("=")
        alike = value and Path(value) == Path(path)
        arguments.append(other if word == path else f"{name}{equals}{other}" if alike else word)
    return shlex.join([*shlex.split(ppo()), *arguments]) if arguments != sys.argv[1:] else ""


def _program_as_started() -> str:
    # `python -m ppo_cli`, the installed script, or a caller of the library.
    called = Path(sys.argv[0])
    if called.name == "__main__.py" and called.parent.name == "ppo_cli":
        return f"{shell_name(Path(sys.executable))} -m ppo_cli"
    return shell_name(called) if called.name == "ppo" else "ppo"


def shell_name(program: Path) -> str:
    """Return a program's bare name if the shell finds this file by it, else its quoted path."""
    resolved = shutil.which(program.name)
    same_file = resolved is not None and os.path.abspath(resolved) == os.path.abspath(program)
    return program.name if same_file else shlex.quote(str(program))


def is_picklable(error: BaseException) -> bool:
    """Whether an error can be sent to another process: pickled and unpickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


# Messages of libraries that cannot map more memory. They have other causes too, so they count only
# if the address space of the process is limited.
_UNMAPPED = (
    "could not create a primitive", "could not execute a primitive", "can't start new thread",
    "failed to map segment", "bad_alloc", "Cannot allocate memory",
)  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a smaller batch could work."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    text = f"{type(error).__name__} {error}"  # torch has a separate class for it
    if address_space() is not None and (
        any(sign in text for sign in _UNMAPPED)
        # numpy then claims to be imported from its source folder, torch that a name is missing
        or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
        or (isinstance(error, ImportError) and (error.name or "").startswith("torch."))
    ):
        return True
    # Messages of CUDA, NCCL and the CPU's allocator.
    signs = (
        "OutOfMemory", "not enough memory", "can't allocate memory", "out of memory",
        "Failed to CUDA",  # NCCL, of its buffers: calloc, malloc, host alloc
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(s in text for s in (*signs, "ALLOC_FAILED"))


# Errors of a device or of its driver, and those among them of a build, a setting or our own code.
_DEVICE_FAULT = re.compile(r"^(CUDA|HIP)( driver)? error|(CUBLAS|CUDNN)_STATUS|uncorrectable ECC")
_NOT_THE_DEVICE = re.compile(
    "no kernel image|unsupported toolchain|invalid device ordinal|invalid argument|NOT_SUPPORTED"
    "|INVALID_VALUE|device-side assert"
)


def describe_device_fault(error: BaseException) -> str:
    """Return what to say of a GPU that failed, other than for want of memory; empty else."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    is_fault = _DEVICE_FAULT.search(text) and not _NOT_THE_DEVICE.search(text)
    if not is_fault or is_out_of_memory(error):
        return ""
    return (
        f"its GPU failed: {first_line(error)}. With CUDA_LAUNCH_BLOCKING=1 the traceback names the "
        "operation; a line with Xid in the kernel's log (dmesg) is a fault of the device or driver."
    )


def address_space() -> int | None:
    """Return the bytes that `ulimit -v` allows this process to map; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def describe_address_space() -> str:
    """Return advice about the limit of the address space; empty without a limit."""
    limit = address_space()
    if limit is None:
        return ""
    return (
        f"The address space of a process is limited to {limit / 2**30:.2f} GiB here: run "
        "`ulimit -v unlimited` before the command, or ask for a job with more memory."
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text without final punctuation, or its type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(" .:")


def shorten(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters, with … at the end."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def list_some(names: Sequence[str], limit: int) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest candidate, or an empty string."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def format_duration(seconds: float) -> str:
    """Return `42 s`, `3 min 5 s` or `2 h 10 min`."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# A quote inside a word is an apostrophe.
_QUOTATION = r"""(?<!\w)(?P<quote>['"`]).*?(?P=quote)(?!\w)"""


def first_sentence(text: str) -> str:
    """Return the first sentence of a text without its full stop; quotations are left whole."""
    match = re.match(rf"(?:{_QUOTATION}|.)*?(?=\.\s|\.$|$)", text)
    return match[0] if match else text


def shorten_unquoted(text: str, limit: int) -> str:
    """Cut a text to at most `limit` characters as `shorten`, before a quotation it would split."""
    if len(text) <= limit:
        return text
    spans = (match.span() for match in re.finditer(rf"{_QUOTATION}|(?<!\w)['\"`].*", text))
    start = next((start for start, end in spans if start < limit - 1 < end), limit - 1)
    return f"{text[:start].rstrip()}…"


def plural(number: float, noun: str, nouns: str = "") -> str:
    """Return a count with its noun: `1 pair`, `2,000 pairs`, or `2 replies` with `nouns`."""
    return f"{number:,.0f} {noun if number == 1 else nouns or f'{noun}s'}"
