"""The channel between tester and candidate: framed messages of plain data.

An object of the response that is no plain data stays in the candidate and travels as a number;
the tests hold a `Remote` in its place, which no comparison ever asks whether it equals something.
Runs inside the sandbox, so it imports nothing that would make a process start slower
(docs/design/006-code-rewards.md).
"""

from __future__ import annotations

import builtins
import os
from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MOST_BYTES = 8 << 20
DEEPEST = 100

_SIZE = Struct("<I")
_FLOAT = Struct("<d")
_COMPLEX = Struct("<dd")
_CONSTANTS = {b"N"[0]: None, b"T"[0]: True, b"F"[0]: False, b"E"[0]: ...}
_SEQUENCES: tuple[tuple[Any, bytes], ...] = (
    (list, b"l"),
    (tuple, b"t"),
    (set, b"S"),
    (frozenset, b"Z"),
)
# Well-known types: module, tag and items; whatever only has their name is an object like others.
_NAMED: dict[str, tuple[str, bytes, Callable[[Any], list[Any]]]] = {
    "range": ("builtins", b"r", lambda value: [value.start, value.stop, value.step]),
    "Fraction": ("fractions", b"q", lambda value: [value.numerator, value.denominator]),
    "Decimal": ("decimal", b"D", lambda value: [str(value)]),
    "deque": ("collections", b"k", list),
}
_BUILDERS: dict[int, Callable[[list[Any]], Any]] = {tag[0]: kind for kind, tag in _SEQUENCES}


class Unfit(Exception):
    """A value that cannot be handed over: too large, too deep."""


class Malformed(Exception):
    """Bytes that are no value."""


def encode(value: Any, number_of: Callable[[Any], int], most: int = MOST_BYTES) -> bytes:
    """Return a value as bytes; `number_of` gives the number of an object that is no plain data."""
    out = bytearray()
    _Writer(out, number_of, most).write(value, 0)
    return bytes(out)


class _Writer:
    def __init__(self, out: bytearray, number_of: Callable[[Any], int], most: int) -> None:
        self.out = out
        self.number_of = number_of
        self.most = most

    def write(self, value: Any, depth: int) -> None:
        """Write one value; a subclass of a builtin type is written as that type."""
        if depth > DEEPEST:
            raise Unfit(f"the value is nested more than {DEEPEST} deep")
        if value is None or value is True or value is False or value is ...:
            self.out += {None: b"N", True: b"T", False: b"F", ...: b"E"}[value]
        elif isinstance(value, int):
            size = int.bit_length(value) // 8 + 1
            self.sized(b"i", int.to_bytes(value, size, "little", signed=True))
        elif isinstance(value, float):
            self.out += b"f" + _FLOAT.pack(value)
        elif isinstance(value, str):
            self.sized(b"s", str.encode(value, "utf-8", "surrogatepass"))
        elif isinstance(value, (bytes, bytearray)):
            self.sized(b"b" if isinstance(value, bytes) else b"a", bytes(value))
        elif isinstance(value, complex):
            self.out += b"c" + _COMPLEX.pack(value.real, value.imag)
        else:
            self.write_other(value, depth)
        if len(self.out) > self.most:
            raise Unfit(f"the value takes more than {self.most >> 20} MB")

    def write_other(self, value: Any, depth: int) -> None:
        for kind, tag in _SEQUENCES:
            if isinstance(value, kind):
                self.many(tag, list(kind.__iter__(value)), depth)
                return
        if isinstance(value, dict):
            pairs = list(dict.items(value))
            self.many(b"d", [item for pair in pairs for item in pair], depth)
            return
        named = _NAMED.get(type(value).__name__)
        if named is not None and type(value).__module__ == named[0]:
            self.many(named[1], named[2](value), depth)
        else:
            self.out += b"h" + _SIZE.pack(self.number_of(value))

    def many(self, tag: bytes, items: list[Any], depth: int) -> None:
        if len(self.out) + len(items) > self.most:
            raise Unfit(f"the value takes more than {self.most >> 20} MB")
        self.out += tag + _SIZE.pack(len(items))
        for item in items:
            self.write(item, depth + 1)

    def sized(self, tag: bytes, data: bytes) -> None:
        if len(data) > self.most:
            raise Unfit(f"the value takes more than {self.most >> 20} MB")
        self.out += tag + _SIZE.pack(len(data)) + data


def decode(data: bytes, object_of: Callable[[int], Any]) -> Any:
    """Return the value behind bytes; `object_of` gives what a number stands for."""
    reader = _Reader(data, object_of)
    try:
        value = reader.read(0)
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None
    if reader.place != len(data):
        raise Malformed("bytes after the value")
    return value


class _Reader:
    def __init__(self, data: bytes, object_of: Callable[[int], Any]) -> None:
        self.data = data
        self.place = 0
        self.object_of = object_of

    def read(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise Malformed("nested too deep")
        tag = self.take(1)[0]
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in b"fc":
            if tag == b"f"[0]:
                return float(_FLOAT.unpack(self.take(8))[0])
            return complex(*_COMPLEX.unpack(self.take(16)))
        size = int(_SIZE.unpack(self.take(4))[0])
        if tag == b"h"[0]:
            return self.object_of(size)
        if tag in b"isba":
            return self.read_scalar(tag, self.take(size))
        if size > (len(self.data) - self.place):
            raise Malformed("more items than bytes")
        if tag == b"d"[0]:
            if size % 2:
                raise Malformed("a key without its value")
            return {self.read(depth + 1): self.read(depth + 1) for _ in range(size // 2)}
        return self.build(tag, [self.read(depth + 1) for _ in range(size)])

    def read_scalar(self, tag: int, data: bytes) -> Any:
        if tag == b"i"[0]:
            return int.from_bytes(data, "little", signed=True)
        if tag == b"s"[0]:
            return data.decode("utf-8", "surrogatepass")
        return data if tag == b"b"[0] else bytearray(data)

    def build(self, tag: int, items: list[Any]) -> Any:
        if tag in _BUILDERS:
            return _BUILDERS[tag](items)
        for name, (module, own, _) in _NAMED.items():
            if tag == own[0]:
                kind = getattr(__import__(module), name)
                return kind(items) if name == "deque" else kind(*items)
        raise Malformed(f"unknown tag {tag}")

    def take(self, size: int) -> bytes:
        end = self.place + size
        if end > len(self.data):
            raise Malformed("the value ends too early")
        piece = self.data[self.place : end]
        self.place = end
        return piece


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
        answer = self._decode(self._link.receive())
        if answer[0] == "raised":
            self.raised = _error(answer[1], answer[2])
            raise self.raised
        return answer[1]

    def _decode(self, data: bytes) -> tuple[Any, ...]:
        try:
            answer = decode(data, lambda number: Remote(self, number))
        except (Malformed, MemoryError) as error:
            raise Gone(f"an answer that cannot be read ({error})") from None
        good = type(answer) is tuple and (
            (len(answer) == 2 and answer[0] == "ok")
            or (len(answer) == 3 and answer[0] == "raised" and _is_error(*answer[1:]))
        )
        if not good:
            raise Gone("an answer that cannot be read")
        return tuple(answer)


def _is_error(names: Any, text: Any) -> bool:
    return type(names) is list and type(text) is str and all(type(n) is str for n in names)


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

    def __ne__(self, other: object) -> bool:
        raise TypeError("the response returned an object of its own, which equals nothing")

    def __bool__(self) -> bool:
        raise TypeError("the response returned an object of its own, neither true nor false")
