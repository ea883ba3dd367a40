"""Attacks on files under sandlock, in a process that the kernel refuses namespaces and mounts.

Started by test_attacks.py; prints what went wrong.
"""

from __future__ import annotations

import ctypes
import os
import re
from concurrent.futures import Future
from contextlib import closing
from struct import pack

from attacks import read_attacks

from ppo_cli.config.schema.reward import Code
from ppo_cli.records import Score
from ppo_cli.rewards.base import Call
from ppo_cli.rewards.code.check import CodePool
from ppo_cli.rewards.code.sandboxes import Sandlock, find_fault

TESTS = ["assert solve(3) == 9"]
RIGHT = Call("code", "def solve(n): return n * n", TESTS, {})


# System calls by their numbers on x86_64 and on aarch64: unshare, mount, setns.
NUMBERS = ((272, 165, 308), (97, 40, 268))
# Instructions and return values of classic BPF (linux/seccomp.h).
LOAD, JUMP_EQUAL, RETURN, ALLOW, NOT_PERMITTED = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050001


def refuse_namespaces() -> None:
    """Put a filter on this process, and on what it starts, as a container has one."""
    steps = [(LOAD, 0, 0, 0)]
    for number in NUMBERS[os.uname().machine != "x86_64"]:
        steps += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, NOT_PERMITTED)]
    program = b"".join(pack("=HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    prctl = ctypes.CDLL(None).prctl
    assert prctl(38, 1, 0, 0, 0) == prctl(22, 2, header, 0, 0) == 0


def main() -> None:
    """Attack, with an honest answer beside each attack."""
    refuse_namespaces()
    fault = find_fault(Sandlock())
    if fault:
        print(f"sandlock: {fault}")
        return
    settings = Code(sandbox="sandlock", timeout=4.0, cpu_seconds=6, memory_mb=256)
    with closing(CodePool(settings, size=2)) as pool:

        def submit(call: Call) -> Future[Score]:
            return pool.submit(call, lambda score: score)

        attacks = read_attacks("files")
        futures = [
            (name, reason, submit(Call("code", code, TESTS, {})), submit(RIGHT))
            for name, (code, reason) in attacks.items()
        ]
        for name, reason, attack, honest in futures:
            score = attack.result()
            failed = (score.value, score.failure) != (0.0, "")
            if failed or not re.search(reason, score.reason):
                print(f"{name}: {score}")
            if honest.result().value != 1.0:
                print(f"beside {name}: {honest.result()}")


if __name__ == "__main__":
    main()
