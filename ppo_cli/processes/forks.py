"""Forks of a process that has loaded a user's code: each may hang, crash or flood by itself.

A fork has its own session, limits and prints, and none of the parent's connections. Programs load
this file by its path with any Python of 3.9 or newer: it imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

MAX_PRINTS = 1 << 28  # bytes that a fork may print; LOGGED of them are passed on
LOGGED = 1 << 20
LOOK_S = 0.5  # between two looks at a fork that does not answer
EXIT_S = 0.5  # from the end of a channel to that of the fork
CHUNK_BYTES = 1 << 16
TAIL_BYTES = 500
TOGETHER = 8  # forks of one moment: what their parent writes between two forks is copied for each


# A call may send them to the process that it is a fork of, or that started its server.
SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in (
    "HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "VTALRM", "PROF",
))  # fmt: skip
_handlers: dict[int, Any] = {}  # what forks do at signals that their parent passes over


class ForkEnded(Exception):
    """The fork has ended; the message says how."""


def open_files() -> set[tuple[int, int, int]]:
    """Return the open files of this process: descriptor, device and inode.

    A descriptor that is closed may soon be that of another file.
    """
    files = set()
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed again
            status = os.fstat(int(name))
            files.add((int(name), status.st_dev, status.st_ino))
    return files


def pass_over_signals() -> None:
    """Do nothing at signals that would end this process, unless the user's code has a handler.

    Its channel says when it is to end. Forks, and programs that it starts, end by them as before.
    """
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            _handlers[number] = signal.signal(number, lambda *_: None)


def make_forks(
    answer: Callable[[bytes], Coroutine[Any, Any, bytes]], *, awaits: bool,
    files: set[tuple[int, int, int]], memory: int, max_answer: int, channel: Any, reaper: Any,
) -> list[Fork]:  # fmt: skip
    """Return TOGETHER forks, fewer if the system has no more; raises OSError if it has none.

    `answer` runs in a fork, on an event loop if it `awaits`: one takes a megabyte. `files` of the
    user's code stay open in it. `memory` are the bytes that it may use beyond those of its parent,
    `max_answer` those of an answer. `channel` and `reaper` are modules of this package.
    """
    forks: list[Fork] = []
    failure, limit = None, resource.RLIM_INFINITY
    sys.stdout.flush()
    try:
        with open(os.devnull):  # keeps a place for what is read below
            for _ in range(TOGETHER):
                forks.append(Fork(max_answer, channel, reaper))
    except OSError as error:  # no more files may be open
        failure = error
    try:
        now_open = open_files()
        above = max(number for number, *_ in now_open) + 1
        kept = {number for number, *_ in files & now_open}
        with contextlib.suppress(OSError), open("/proc/self/statm") as file:
            # What it uses now is shared with the parent.
            limit = int(file.read().split()[5]) * resource.getpagesize() + memory
        for fork in forks:
            fork.pid = os.fork()
            if not fork.pid:
                fork.run(answer, awaits, kept, limit, above)
    except OSError as error:  # no process or no memory is left
        failure = error
    for fork in forks:
        fork.attach()
    made = [fork for fork in forks if fork.pid]
    if failure and not made:
        raise failure
    return made


class Fork:
    """A fork that answers requests, one after another; `pid` is its process, 0 without one."""

    def __init__(self, max_answer: int, channel: Any, reaper: Any) -> None:
        self._channel, self._reaper, self._max_answer = channel, reaper, max_answer
        self._ended, self._exit, self._printed, self._tail = "", "", 0, b""
        self.served = False  # another episode
        self._prints, self._child_prints = os.pipe()
        try:
            self._socket, self._child_end = socket.socketpair()
        except OSError:
            os.close(self._prints)
            os.close(self._child_prints)
            raise
        self.pid = 0

    def attach(self) -> None:
        """Close the child's ends in its parent, and read what it prints."""
        self._child_end.close()
        os.close(self._child_prints)
        if not self.pid:
            os.close(self._prints)
            self._socket.close()
            return
        self._socket.setblocking(False)
        os.set_blocking(self._prints, False)
        asyncio.get_running_loop().add_reader(self._prints, self._pass_on)

    def run(
        self, answer: Callable[[bytes], Coroutine[Any, Any, bytes]], awaits: bool,
        kept: set[int], limit: int, above: int,
    ) -> None:  # fmt: skip
        """Answer requests in the fork: never returns. Of files up to `above`, `kept` stay open."""
        try:
            os.dup2(self._child_prints, 1)
            os.dup2(self._child_prints, 2)
            os.setsid()
            for number, handler in _handlers.items():
                signal.signal(number, handler)
            with contextlib.suppress(ImportError):  # a Python may lack ctypes
                self._reaper.adopt_orphans()  # what leaves the session ends with it too
            stay = sorted(kept | {0, 1, 2, self._child_end.fileno()})
            for number, following in zip(stay, [*stay[1:], above]):  # noqa: B905
                os.closerange(number + 1, following)
            with contextlib.suppress(OSError, ValueError):  # it has a lower limit
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            requests = self._channel.Channel(self._child_end)
            if awaits:
                asyncio.new_event_loop().run_until_complete(requests.serve(answer))
            for number, data in requests:
                try:
                    answer(data).send(None)
                except StopIteration as end:
                    requests.send(number, end.value)
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    async def request(self, data: bytes, timeout: float) -> bytes:
        """Return the answer; raises ForkEnded, and TimeoutError after the fork was killed."""
        if self._ended:
            raise ForkEnded(self._ended)
        header, loop = self._channel.HEADER, asyncio.get_running_loop()

        async def ask() -> bytes:
            await loop.sock_sendall(
                self._socket, header.pack(self._channel.MARK, len(data), 0) + data
            )
            mark, size, _ = header.unpack(await self._receive(header.size))
            if mark != self._channel.MARK or size > self._max_answer:
                limit = self._max_answer >> 20
                self.kill(f"it wrote what is not an answer of at most {limit} MiB")
                raise ForkEnded(self._ended)
            return await self._receive(size)

        asking, ends = asyncio.ensure_future(ask()), loop.time() + timeout
        try:
            while not asking.done() and loop.time() < ends and not self._find_exit():
                # A process that it has forked may hold its channel after its end.
                await asyncio.wait([asking], timeout=min(LOOK_S, ends - loop.time()))
            if asking.done():
                return asking.result()
        except (OSError, EOFError):
            await self._describe_end()
        finally:
            asking.cancel()
        if not self._find_exit():
            self.kill(f"timeout: did not answer for {timeout:g} s")
            raise TimeoutError
        await self._describe_end()
        raise ForkEnded(self._ended)

    async def _receive(self, size: int) -> bytes:
        loop, pieces = asyncio.get_running_loop(), bytearray()
        while len(pieces) < size:
            chunk = await loop.sock_recv(self._socket, min(size - len(pieces), 1 << 20))
            if not chunk:
                raise EOFError
            pieces += chunk
        return bytes(pieces)

    def begin_again(self) -> None:
        """Count and keep what it prints from the start, for another episode."""
        self._printed, self._tail, self.served = 0, b"", True

    def has_children(self) -> bool:
        """Whether processes that it has started, or their children, live or wait to be reaped."""
        return bool(self._reaper.list_children(self.pid))

    def lives(self) -> bool:
        """Whether its process has not ended."""
        return not self._find_exit()

    async def close(self, data: bytes, timeout: float) -> None:
        """Send a last request, then end the fork and everything that it has started."""
        with contextlib.suppress(ForkEnded, TimeoutError):
            await self.request(data, timeout)
        self.kill("it has ended")

    def kill(self, reason: str) -> None:
        """End the fork and everything that it has started; its requests fail with the reason."""
        if self._ended:
            return
        self._ended = reason
        # Some may have left its session, or, after its own end, its group.
        if self._exit or self.has_children():
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGSTOP)  # the others neither fork nor compute now
            self._reaper.kill_below(self.pid)
        for end in (os.killpg, os.kill):  # it may not lead its session yet
            with contextlib.suppress(OSError):
                end(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(self.pid, 0)
        self._pass_on()
        asyncio.get_running_loop().remove_reader(self._prints)
        os.close(self._prints)
        with contextlib.suppress(OSError):  # a request that waits ends with it
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _describe_end(self) -> None:
        """Say how a fork whose channel has ended did so, and end what it has left."""
        for _ in range(50):
            if how := self._find_exit():
                break
            await asyncio.sleep(EXIT_S / 50)
        if not self._ended:
            self._pass_on()
            line = self._tail.decode(errors="replace").strip().rpartition("\n")[2]
            how = how or "closed its channel"
            self.kill(f"its process {how}" + (f": {line}" if line else ""))

    def _find_exit(self) -> str:
        """Return how the process has ended, "" while it lives."""
        if self._ended or self._exit:
            return self._ended or self._exit
        if hasattr(os, "waitid"):  # its id stays taken until `kill`
            dead = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return ""
            code = dead.si_status if dead.si_code == os.CLD_EXITED else -dead.si_status
        else:  # macOS before Python 3.13
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                return ""
            code = os.waitstatus_to_exitcode(status)
        by_itself = code >= 0
        how = f"with exit code {code}" if by_itself else f"by signal {signal.Signals(-code).name}"
        self._exit = f"ended {how}"
        return self._exit

    def _pass_on(self) -> None:
        """Print what the fork has printed, up to LOGGED bytes."""
        with contextlib.suppress(BlockingIOError):
            for chunk in iter(lambda: os.read(self._prints, CHUNK_BYTES), b""):
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
                os.write(1, chunk[: max(0, LOGGED - self._printed)])
                self._printed += len(chunk)
                if self._printed > MAX_PRINTS and not self._ended:
                    self.kill(f"printed more than {MAX_PRINTS >> 20} MiB")
                    return
                if not self._ended:
                    return  # others want to be read too
            asyncio.get_running_loop().remove_reader(self._prints)
