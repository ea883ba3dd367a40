"""Responses that attack, in text files: what they are, and the words that they share."""

from __future__ import annotations

from pathlib import Path
from string import Template

HERE = Path(__file__).parent
WORDS = {
    # What a value says that claims to be equal to everything.
    "LIES": """\
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __len__(self): return 9
    def __bool__(self): return True
    def __contains__(self, item): return True
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__""",
    # Writes to whatever channel may be open.
    "WRITE_ALL": """\
import os
def write_all(data):
    for fd in range(3, 64):
        try: os.write(fd, data)
        except OSError: pass""",
    # Calls the kernel by number; those of x86_64, which mean other things elsewhere.
    "SYSCALL": """\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
call = libc.syscall""",
    # Part of the tests; put together when it runs, so that an attack does not find itself.
    "MARK": "mark = ''.join(['candi', 'date', '(3)'])",
    "NUL": "\0",
    "MANY_OPEN": "(" * 5000,
    "MANY_CLOSED": ")" * 5000,
}


def read_attacks(name: str) -> dict[str, tuple[str, str]]:
    """Return the attacks of a file: name -> (code, what stands behind the name)."""
    _, *blocks = (HERE / f"{name}.txt").read_text(encoding="utf-8").split("=== ")
    found = {}
    for block in blocks:
        heading, _, code = block.partition("\n")
        name, _, note = heading.partition(" | ")
        found[name.strip()] = (Template(code).safe_substitute(WORDS), note)
    return found
