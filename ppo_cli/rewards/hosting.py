"""Where a reward's heavy work is done: in this process, or in one of its own.

A reward that needs a device says what is to be made, by a factory that pickles, and talks to it
by method names. It does not know who makes it, or where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ppo_cli.errors import WorkerLost

Factory = Callable[[], Any]


class Host(Protocol):
    """An object that was made by a factory, wherever it lives; one call at a time."""

    @property
    def alive(self) -> bool:
        """Whether it can still be called: not lost, not closed, nor the cluster under it."""
        ...

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; arguments and result pickle.

        A PpoError that the method raises comes out as itself. Raises WorkerLost when the
        object's process died, does not answer in time or was closed, at any moment of the call.
        """
        ...

    def close(self) -> None:
        """Close the object and end its process, also one that is lost. Safe to call twice."""
        ...


# Takes a factory and the name of the reward that it is for.
HostMaker = Callable[[Factory, str], Host]


class InProcess:
    """The object lives here, and its errors are its own."""

    def __init__(self, factory: Factory) -> None:
        self._made = factory()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Until it is closed."""
        return not self._closed

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object."""
        if self._closed:
            raise WorkerLost("This reward was closed.")
        return getattr(self._made, method)(*args)

    def close(self) -> None:
        """Close the object."""
        if not self._closed:
            self._closed = True
            self._made.close()


def in_process(factory: Factory, name: str) -> Host:
    """Host a reward here, where nothing else was arranged."""
    return InProcess(factory)
