"""The command that starts one of our programs in a fresh interpreter, without any file of ours.

Its modules travel as compiled code in one argument (of 128 KB at most), so that nothing needs to
be readable in the sandbox, and nothing that runs there can change what the next one runs.
"""

from __future__ import annotations

import marshal
import os
import sys
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

Role = Literal["candidate", "tester", "probe", "sandlock_launcher"]

_ROOM = Path(__file__).parent
_PACKAGE = "ppo_cli.rewards.code"
_SHARED = ("limits", "channel")
_MODULES: dict[Role, tuple[str, ...]] = {
    "candidate": (*_SHARED, "candidate"),
    "tester": (*_SHARED, "tester"),
    "probe": ("limits", "probe"),
    "sandlock_launcher": ("ending", "sandlock_launcher"),
}
_START = (
    "import sys, marshal, zlib\n"
    "for name, code in marshal.loads(zlib.decompress(bytes.fromhex(sys.argv.pop(1)))):\n"
    "    module = type(sys)(name)\n"
    "    sys.modules[name] = module\n"
    "    exec(code, module.__dict__)\n"
    "module.main(sys.argv[1:])\n"
)
# No site packages, no user's own, no current folder on the path, no .pyc files.
_FLAGS = ("-s", "-S", "-P", "-B")

# Fixed, so that the same response gives the same score; one arena, so that threads stay small.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
}


def interpreter() -> Path:
    """Return the Python that runs this, free of links and of virtual environments."""
    return Path(os.path.realpath(sys.executable))


def command(role: Role, arguments: Sequence[object] = ()) -> list[str]:
    """Return the command line of one of our programs that needs no package."""
    return [str(interpreter()), *_FLAGS, *program(role, arguments)]


def program(role: Role, arguments: Sequence[object] = ()) -> list[str]:
    """Return what an interpreter must be given to run one of our programs."""
    return ["-c", _START, _packed(role), *map(str, arguments)]


@cache
def _packed(role: Role) -> str:
    modules = [(f"{_PACKAGE}.{name}", _compiled(name)) for name in _MODULES[role]]
    packages = ["ppo_cli", "ppo_cli.rewards", _PACKAGE]
    empty = compile("", "<package>", "exec")
    whole = marshal.dumps([*((name, empty) for name in packages), *modules])
    return zlib.compress(whole, 9).hex()


def _compiled(name: str) -> object:
    text = (_ROOM / f"{name}.py").read_text(encoding="utf-8")
    return compile(text, f"<{name}>", "exec", dont_inherit=True, optimize=2)
