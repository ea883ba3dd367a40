"""What the tests hold in place of the response's own objects. Runs inside the sandbox.

Answers are plain data, so no object of the response is ever asked whether it equals something.
"""

from __future__ import annotations

import builtins

from ppo_cli.rewards.code.channel import MOST_BYTES, Gone, Link, Malformed, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

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
