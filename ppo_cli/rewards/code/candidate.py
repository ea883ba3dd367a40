"""The process that runs the response's code. It answers calls, and knows nothing of the tests.

Runs inside the sandbox. Nothing here is trusted: the code that it runs may take over all of it.
"""

from __future__ import annotations

import os
import sys

from ppo_cli.rewards.code.channel import MOST_TRUSTED, Link, decode, encode, take_over
from ppo_cli.rewards.code.limits import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

MOST_OBJECTS = 200_000
LONGEST_TEXT = 300
# What the tests do with an object that is not a call, by the name of the request.
PLAIN: dict[str, Any] = {
    "get": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
    "size": len,
}


class Candidate:
    """The response's module, and the objects of it that the tests hold by number."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.source: Any = None

    def number_of(self, value: Any) -> int:
        """Remember an object that is no plain data."""
        if len(self.objects) >= MOST_OBJECTS:
            raise MemoryError("too many objects are handed over")
        self.objects.append(value)
        return len(self.objects) - 1

    def object_of(self, number: int) -> Any:
        """Return the object behind a number."""
        return self.objects[number]

    def answer(self, request: bytes) -> bytes:
        """Do what is asked and return the reply; whatever the code raises becomes one too."""
        try:
            what, *rest = decode(request, self.object_of)
            act = PLAIN.get(what) or getattr(self, f"do_{what}")
            return encode(("ok", act(*rest)), self.number_of)
        except BaseException as error:
            return encode(("raised", *describe(error)), self.number_of)

    def do_load(
        self, attempts: list[str], before: str, names: list[str], entry: str, seeded: bool
    ) -> dict[str, Any]:
        """Run the code and return those of the names that it defines."""
        code = compile_first(attempts)
        if seeded:
            __import__("random").seed(0)
        module = new_module("solution")
        # Run what the question has given (imports, functions to build on), where it is Python.
        try:
            exec(compile(before, "<prompt>", "exec", dont_inherit=True), module.__dict__)
        except Exception:
            module.__dict__.clear()
            module.__dict__["__name__"] = module.__name__
        # The question's own beginning of the function is no answer.
        module.__dict__.pop(entry, None)
        exec(code, module.__dict__)
        return {name: module.__dict__[name] for name in names if name in module.__dict__}

    def do_prepare(self, attempts: list[str]) -> None:
        """Compile a program that reads its input and prints."""
        self.source = compile_first(attempts)

    def do_run(self, text: str, seeded: bool) -> bytes:
        """Run the program afresh on an input; return what it printed."""
        if seeded:
            __import__("random").seed(0)
        return run_program(self.source, text)

    def do_call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Any]]:
        """Call a function or class; one that returns nothing may have changed its arguments."""
        before = [picture(arg) for arg in args]
        value = target(*args, **kwargs)
        if value is not None:
            return value, {}
        after = [picture(arg) for arg in args]
        return None, {i: args[i] for i in range(len(args)) if before[i] != after[i]}

    def do_iterate(self, target: Any) -> Any:
        """Start to go through an object."""
        return _Steps(iter(target))

    def do_next(self, steps: Any) -> tuple[Any, ...]:
        """Return the next item in a tuple, or an empty one at the end."""
        return tuple(steps.take())


class _Steps:
    """An iterator that is never taken for plain data."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def take(self) -> list[Any]:
        for item in self.iterator:
            return [item]
        return []


def picture(value: Any) -> bytes | None:
    """Return what a container holds, to see later whether that has changed."""
    if type(value) not in (list, dict, set):
        return None
    try:
        return encode(value, lambda other: 0)
    except Exception:
        return None


def compile_first(attempts: list[str]) -> Any:
    """Compile the first text that is Python; the error is that of the last."""
    for text in attempts[:-1]:
        try:
            return compile(text, "<response>", "exec", dont_inherit=True)
        except Exception:
            continue
    return compile(attempts[-1], "<response>", "exec", dont_inherit=True)


def new_module(name: str) -> ModuleType:
    """Make the module that the code runs in; dataclasses and pickle look it up by name."""
    module = type(sys)(name)
    sys.modules[name] = module
    return module


def run_program(code: Any, text: str) -> bytes:
    """Run a program with the input on its standard input; files, so that no way to read fails."""
    with open("input", "wb+") as given, open("output", "wb+") as printed:
        given.write(text.encode("utf-8", "surrogatepass"))
        given.seek(0)
        kept = [take_over(0, given.fileno()), take_over(1, printed.fileno())]
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        try:
            exec(code, new_module("__main__").__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finally:
            # Wait for threads as the end of a program does.
            threading = sys.modules.get("threading")
            if threading is not None:
                for thread in threading.enumerate():
                    if thread is not threading.current_thread() and not thread.daemon:
                        thread.join()
            sys.stdout.flush()
            for fd, stream in enumerate(kept):
                os.dup2(stream, fd)
                os.close(stream)
        printed.seek(0)
        return printed.read()


def describe(error: BaseException) -> tuple[list[str], str]:
    """Return the names of an error's types, nearest first, and its text."""
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        text = str(error)[:LONGEST_TEXT]
    except BaseException:
        text = ""
    return names, text


def main(arguments: list[str]) -> None:
    """Serve until the tester hangs up."""
    link = Link(take_over(0), MOST_TRUSTED)
    confine(*map(int, arguments))
    sys.argv = [""]
    link.send(b"ready")
    candidate = Candidate()
    while True:
        link.send(candidate.answer(link.receive()))
