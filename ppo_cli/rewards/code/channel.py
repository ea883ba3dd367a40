"""The channel between tester and candidate, and its two ends.

Messages are framed plain data. An object of the response that is no plain data stays in the
candidate and travels as a number; the tests hold a `Remote` in its place, which no comparison ever
asks whether it equals something.

The candidate's process runs the response's code. It answers calls, and knows nothing of the tests;
nothing there is trusted: the code that it runs may take over all of it. Both ends run inside
sandboxes, so this imports nothing that would make a process start slower
(docs/design/006-code-rewards.md).
"""

from __future__ import annotations

import builtins
import os
import sys
from struct import Struct

from ppo_cli.rewards.code.limits import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

MOST_BYTES = 8 << 20
DEEPEST = 100

# Every value is a tag and a size; behind them stand so many bytes, or so many values.
_HEAD = Struct("<BI")
_FLOAT = Struct("<d")
_COMPLEX = Struct("<dd")
_OBJECT, _DICT = b"h"[0], b"d"[0]
# Type, how its bytes are made, and what they make. The first that fits decides, and a subclass is
# written as its base: methods are those of the base, whatever the subclass has in their place.
_SCALARS: dict[int, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    b"f"[0]: (float, _FLOAT.pack, lambda data: _FLOAT.unpack(data)[0]),
    b"s"[0]: (
        str,
        lambda value: str.encode(value, "utf-8", "surrogatepass"),
        lambda data: data.decode("utf-8", "surrogatepass"),
    ),
    b"B"[0]: (bool, lambda value: b"1" if value else b"", bool),
    b"i"[0]: (
        int,
        lambda value: int.to_bytes(value, int.bit_length(value) // 8 + 1, "little", signed=True),
        lambda data: int.from_bytes(data, "little", signed=True),
    ),
    b"N"[0]: (type(None), lambda value: b"", lambda data: None),
    b"E"[0]: (type(...), lambda value: b"", lambda data: ...),
    b"b"[0]: (bytes, bytes, bytes),
    b"a"[0]: (bytearray, bytes, bytearray),
    b"c"[0]: (
        complex,
        lambda value: _COMPLEX.pack(value.real, value.imag),
        lambda data: complex(*_COMPLEX.unpack(data)),
    ),
}
_SEQUENCES: dict[int, Any] = {b"l"[0]: list, b"t"[0]: tuple, b"S"[0]: set, b"Z"[0]: frozenset}
# Well-known types: module, name, items; whatever only has their name is an object like others.
_NAMED: dict[int, tuple[str, str, Callable[[Any], list[Any]]]] = {
    b"r"[0]: ("builtins", "range", lambda value: [value.start, value.stop, value.step]),
    b"q"[0]: ("fractions", "Fraction", lambda value: [value.numerator, value.denominator]),
    b"D"[0]: ("decimal", "Decimal", lambda value: [str(value)]),
    b"k"[0]: ("collections", "deque", lambda value: [list(value)]),
}


class Unfit(Exception):
    """A value that cannot be handed over: too large, too deep."""


class Malformed(Exception):
    """Bytes that are no value."""


def encode(value: Any, number_of: Callable[[Any], int], most: int = MOST_BYTES) -> bytes:
    """Return a value as bytes; `number_of` gives the number of an object that is no plain data."""
    out = bytearray()

    def write(value: Any, depth: int) -> None:
        if depth > DEEPEST:
            raise Unfit(f"the value is nested more than {DEEPEST} deep")
        for tag, (kind, to_bytes, _) in _SCALARS.items():
            if isinstance(value, kind):
                data = to_bytes(value)
                head(tag, len(data))
                out.extend(data)
                return
        tag, items = _taken_apart(value)
        head(tag, number_of(value) if items is None else len(items))
        for item in items or ():
            write(item, depth + 1)

    def head(tag: int, size: int) -> None:
        if len(out) + (size if tag != _OBJECT else 0) > most:
            raise Unfit(f"the value takes more than {most >> 20} MB")
        out.extend(_HEAD.pack(tag, size))

    write(value, 0)
    return bytes(out)


def _taken_apart(value: Any) -> tuple[int, list[Any] | None]:
    """Return the tag of a value and what it holds; None for an object that is no plain data."""
    for tag, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return tag, list(kind.__iter__(value))
    if isinstance(value, dict):
        return _DICT, [item for pair in dict.items(value) for item in pair]
    for tag, (module, name, items_of) in _NAMED.items():
        if type(value).__name__ == name and type(value).__module__ == module:
            return tag, items_of(value)
    return _OBJECT, None


def decode(data: bytes, object_of: Callable[[int], Any]) -> Any:
    """Return the value behind bytes; `object_of` gives what a number stands for."""
    place = 0

    def take(size: int) -> bytes:
        nonlocal place
        if size > len(data) - place:
            raise Malformed("the value ends too early")
        place += size
        return data[place - size : place]

    def read(depth: int) -> Any:
        if depth > DEEPEST:
            raise Malformed("nested too deep")
        tag, size = _HEAD.unpack(take(_HEAD.size))
        if tag == _OBJECT:
            return object_of(size)
        if tag in _SCALARS:
            return _SCALARS[tag][2](take(size))
        if size > len(data) - place:
            raise Malformed("more items than bytes")
        items = [read(depth + 1) for _ in range(size)]
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](items)
        if tag == _DICT:
            return dict(zip(items[::2], items[1::2], strict=True))
        module, name, _ = _NAMED[tag]  # an error for a tag that does not exist
        return getattr(__import__(module), name)(*items)

    try:
        value = read(0)
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None
    if place != len(data):
        raise Malformed("bytes after the value")
    return value


def no_objects(value: Any) -> int:
    """Refuse whatever is not plain data, where nothing else may travel."""
    raise Unfit(f"an object of type {type(value).__name__} cannot be handed over")


def no_numbers(number: int) -> Any:
    """Refuse the number of an object, where nothing but plain data may come."""
    raise Malformed("an object where plain data is due")


MOST_TRUSTED = 256 << 20
_LENGTH = Struct("<Q")
_PIECE = 1 << 16


class Gone(BaseException):
    """The other end has closed, or says what no message can be.

    No `Exception`: tests that catch everything must not take it for a test that passed.
    """


class Link:
    """One end of a socket."""

    def __init__(self, fd: int, most: int) -> None:
        self._fd = fd
        self._most = most

    def send(self, data: bytes) -> None:
        """Send one message; Gone when nobody is there."""
        view = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise Gone(f"the other end is gone ({error.strerror})") from None

    def receive(self) -> bytes:
        """Wait for one message; Gone when the other end closes or sends too much."""
        size = int(_LENGTH.unpack(self._read(_LENGTH.size))[0])
        if size > self._most:
            raise Gone(f"an answer of more than {self._most >> 20} MB")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = os.read(self._fd, min(size - len(data), _PIECE))
            except OSError as error:
                raise Gone(f"the other end is gone ({error.strerror})") from None
            if not piece:
                raise Gone("the other end is gone")
            data += piece
        return bytes(data)


def take_over(fd: int, replacement: int | None = None) -> int:
    """Move one of the standard streams out of the way; its number then means something else.

    `replacement` is what takes its place; None stands for nothing at all (/dev/null).
    """
    kept = os.dup(fd)
    spare = os.open("/dev/null", os.O_RDWR) if replacement is None else replacement
    os.dup2(spare, fd)
    if replacement is None:
        os.close(spare)
    return kept


MOST_SENT = 64 * MOST_BYTES
# Raised inside a generator or a loop these would end it as if all were well.
_NEVER = ("StopIteration", "StopAsyncIteration")


class RemoteError(Exception):
    """The response raised something that is not among Python's own exceptions."""


class RowFault(BaseException):
    """The row's tests cannot be run at all; no fault of the response."""


class Peer:
    """The candidate's process as the tester sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.asked = 0
        self.raised: Exception | None = None

    def ask(self, *request: Any) -> Any:
        """Send a request, wait for the answer, raise what the response's code raised."""
        self.asked += 1
        self._link.send(encode(request, _number, MOST_SENT))
        try:
            answer = decode(self._link.receive(), lambda number: Remote(self, number))
        except (Malformed, MemoryError) as error:
            raise Gone(f"an answer that cannot be read ({error})") from None
        match answer:
            case ("ok", value):
                return value
            case ("raised", list(names), str(text)) if all(type(name) is str for name in names):
                self.raised = _error(names, text)
                raise self.raised
        raise Gone("an answer that cannot be read")


def _number(value: Any) -> int:
    if type(value) is Remote:
        return int(object.__getattribute__(value, "_number"))
    kind = type(value).__name__
    raise RowFault(f"the tests hand over an object of type {kind}, which cannot travel")


def _error(names: list[str], text: str) -> Exception:
    """Build the nearest of Python's own exceptions."""
    for name in names:
        kind: Any = getattr(builtins, name, None)
        known = isinstance(kind, type) and issubclass(kind, Exception)
        if known and name not in _NEVER:
            if kind is Exception and names[0] != "Exception":
                break
            try:
                error = kind(text)
            except TypeError:
                break
            assert isinstance(error, Exception)
            return error
    return RemoteError(f"{names[0] if names else 'error'}: {text}")


def _taken_back(args: tuple[Any, ...], answer: Any) -> Any:
    """Return the value of a call; one of None may have worked on its arguments in place.

    Any other call leaves them as they were: a response must not change what its answer is
    compared with.
    """
    if type(answer) is not tuple or len(answer) != 2 or type(answer[1]) is not dict:
        raise Gone("an answer that cannot be read")
    value, changed = answer
    for index, new in changed.items() if value is None else ():
        if type(index) is int and 0 <= index < len(args) and type(args[index]) is type(new):
            _refill(args[index], new)
    return value


def _refill(old: Any, new: Any) -> None:
    if type(old) is list:
        old[:] = new
    elif type(old) in (dict, set):
        old.clear()
        old.update(new)


class Remote:
    """An object of the response: it can be called and handed back, and equals nothing."""

    __slots__ = ("_number", "_peer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have the candidate call it."""
        return _taken_back(args, self._peer.ask("call", self, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self, key)

    def __len__(self) -> int:
        size = self._peer.ask("size", self)
        if type(size) is not int:
            raise TypeError("the length is not an int")
        return size

    def __iter__(self) -> Iterator[Any]:
        steps = self._peer.ask("iterate", self)
        while True:
            step = self._peer.ask("next", steps)
            if type(step) is not tuple or not step:
                return
            yield step[0]

    def __eq__(self, other: object) -> bool:
        raise TypeError("the response returned an object of its own, which equals nothing")

    __ne__ = __eq__

    def __bool__(self) -> bool:
        raise TypeError("the response returned an object of its own, neither true nor false")


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
        self.given: dict[str, Any] = {}

    def number_of(self, value: Any) -> int:
        """Remember an object that is no plain data."""
        if len(self.objects) >= MOST_OBJECTS:
            raise MemoryError("too many objects are handed over")
        self.objects.append(value)
        return len(self.objects) - 1

    def answer(self, request: bytes) -> bytes:
        """Do what is asked and return the reply; whatever the code raises becomes one too."""
        try:
            what, *rest = decode(request, self.objects.__getitem__)
            act = PLAIN.get(what) or getattr(self, f"do_{what}")
            return encode(("ok", act(*rest)), self.number_of)
        except BaseException as error:
            return encode(("raised", *describe(error)), self.number_of)

    def do_load(
        self, attempts: list[str], given: dict[str, Any], names: list[str], entry: str
    ) -> dict[str, Any]:
        """Run the code and return those of the names that it defines."""
        code = compile_first(attempts)
        module = new_module("solution", given)
        # The question's own beginning of the function is no answer.
        module.__dict__.pop(entry, None)
        exec(code, module.__dict__)
        return {name: module.__dict__[name] for name in names if name in module.__dict__}

    def do_prepare(self, attempts: list[str], given: dict[str, Any]) -> None:
        """Compile a program that reads its input and prints."""
        self.source, self.given = compile_first(attempts), given

    def do_run(self, text: str) -> bytes:
        """Run the program afresh on an input; return what it printed."""
        return run_program(self.source, text, self.given)

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
        for item in steps.iterator:
            return (item,)
        return ()


class _Steps:
    """An iterator that is never taken for plain data."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator


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


# What LiveCodeBench's and APPS' scorers put in front of every response.
_USUAL_MODULES = (
    "typing", "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math",
    "random", "statistics", "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
_USUAL_IMPORTS = "\n".join(
    [
        *(f"from {module} import *" for module in _USUAL_MODULES),
        f"import {', '.join(_USUAL_MODULES)}, time, fractions",
    ]
)
_USUAL_DEPTH = 50_000


def new_module(name: str, given: dict[str, Any]) -> ModuleType:
    """Make the module that the code runs in; dataclasses and pickle look it up by name.

    Names that are imported for the code come after its own, as those of Python do: a function of
    the same name that it lacks is not taken for its own, and its lines keep their numbers.
    """
    module = type(sys)(name)
    sys.modules[name] = module
    usual: dict[str, Any] = {}
    if given["usual"]:
        exec(_USUAL_IMPORTS, usual)
        sys.setrecursionlimit(_USUAL_DEPTH)
    if given["seeded"]:
        __import__("random").seed(0)
    imported: dict[str, Any] = {}
    for text in given["imports"]:
        run_given(text, imported)
    module.__dict__["__builtins__"] = {**usual, **vars(builtins), **imported}
    for text in given["texts"]:
        run_given(text, module.__dict__)
    return module


def run_given(text: str, space: dict[str, Any]) -> None:
    """Run what a row brings for the code, as far as it is Python."""
    try:
        exec(compile(text, "<prompt>", "exec", dont_inherit=True), space)
    except Exception:
        return


def run_program(code: Any, text: str, given: dict[str, Any]) -> bytes:
    """Run a program with the input on its standard input; files, so that no way to read fails."""
    with open("input", "wb+") as file, open("output", "wb+") as printed:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        kept = [take_over(0, file.fileno()), take_over(1, printed.fileno())]
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        try:
            exec(code, new_module("__main__", given).__dict__)
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
