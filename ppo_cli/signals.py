"""SIGINT, SIGTERM and a closed terminal ask to stop; a second one stops at once.

The step under way ends first, unless it is not sampled and scored within LEAVE_S: it is undone.
"""

from __future__ import annotations

import _thread
import math
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from ppo_cli.errors import EXIT_STOPPED, Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# All waits on something foreign end within this time after the first signal, and at once after the
# second. The rest of ten seconds is for saving and for ending child processes.
LEAVE_S = 3.0
_received: list[float] = []  # when signals asked this run to stop
_work_ended = -math.inf  # when the work that a signal had to wait for ended


def note_signal() -> None:
    """Note that a signal asks this run to stop: waits become short."""
    _received.append(time.monotonic())


def note_end_of_work() -> None:
    """Note that the step which a signal waited for has ended: what ends now has LEAVE_S for it."""
    global _work_ended
    _work_ended = time.monotonic()


def forget_signals() -> None:
    """Let waits take their time again: what a signal has asked to stop has ended."""
    global _work_ended
    _received.clear()
    _work_ended = -math.inf


def time_left(since: float = -math.inf) -> float:
    """Return for how long a wait on something foreign may go on; infinite without a signal.

    After the first one LEAVE_S, from `since` on if that is later; after a second one no longer.
    """
    if not _received:
        return math.inf
    if len(_received) > 1:
        return 0.0
    return max(_received[0], since) + LEAVE_S - time.monotonic()


def shorten_wait(seconds: float, least: float = 0.5) -> float:
    """Return how long something that ends may still take: `seconds`, less after a signal."""
    return min(seconds, max(time_left(_work_ended), least))


AT_ONCE_S = 5.0  # from a second signal to the end of the process, whatever it waits for
_repeated = 0  # interrupts that `_raise_again` has raised, which are not signals of the user


def watch_interrupts() -> None:
    """Let each Ctrl-C count in this process; it is called once, where `ppo` begins.

    Python ignores an exception in a finaliser or a callback, so an interrupt there is raised again.
    After a second signal the process ends, also inside a call that does not return to Python.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    sys.unraisablehook = _raise_again
    # The system writes the number of each signal into a pipe, whatever this thread does.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget_pipe)
    threading.Thread(target=_end_after_second, args=(reading,), daemon=True).start()
    signal.signal(signal.SIGINT, _interrupt)


def leave(code: int) -> None:
    """End this process without freeing its objects one by one, which takes long."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError, ValueError):
            stream.flush()
    os._exit(code)


def leave_at_once() -> None:
    """End a command that Ctrl-C has unwound."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        print("Stopped.", file=sys.stderr)
        leave(EXIT_STOPPED)


def _forget_pipe() -> None:
    signal.set_wakeup_fd(-1)  # a child's signals are not ours


def _interrupt(number: int, frame: FrameType | None) -> None:
    note_signal()
    raise KeyboardInterrupt


def _raise_again(ignored: Any) -> None:
    """Raise an interrupt that Python has ignored once more; show any other exception."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return

    def repeat() -> None:
        global _repeated
        time.sleep(0.05)  # until the finaliser has ended
        _repeated += 1
        _received.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # Not `threading`, whose locks the finaliser may have interrupted.
    _thread.start_new_thread(repeat, ())


def _end_after_second(reading: int) -> None:
    count = 0
    while count - _repeated < 2:
        numbers = os.read(reading, 64)
        count += numbers.count(signal.SIGINT) + numbers.count(signal.SIGTERM)
    time.sleep(AT_ONCE_S)
    os._exit(EXIT_STOPPED)


class StopOnSignal:
    """Context in which signals are recorded; `reason` names the first one.

    The handler calls `tell` with its name. `elsewhere` reports a signal of another node of the run.
    While `at_once` is true, Ctrl-C raises KeyboardInterrupt: a session's caller is at work.
    """

    at_once = False

    def __init__(
        self, tell: Callable[[str], None], elsewhere: Callable[[], str | None] = lambda: None
    ) -> None:
        self._tell = tell
        self._elsewhere = elsewhere
        self._name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def reason(self) -> str | None:
        """Name of the signal that asked to stop, or None."""
        return self._name or self._elsewhere()

    def __enter__(self) -> StopOnSignal:
        forget_signals()
        # Python delivers signals to the main thread only, and only it may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # `nohup`: the run survives its terminal
                self._before[number] = signal.signal(number, self._record_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record and report the first one; a second raises KeyboardInterrupt.

        A second SIGHUP is ignored.
        """
        if number == signal.SIGHUP:
            _leave_terminal()
            if self._name is not None:
                return  # the shell and the system may both send it: not a second Ctrl-C
        elif self._name is not None:
            note_signal()
            raise KeyboardInterrupt
        elif self.at_once and number == signal.SIGINT:
            raise KeyboardInterrupt  # it asks the caller to stop, who may go on with the run
        note_signal()
        self._name = signal.Signals(number).name
        # An exception here would end the step that has to be saved: the reader of the output may be
        # gone (`| tee` ends on the same Ctrl-C), and this thread may be inside another print.
        with suppress(Interrupted, RuntimeError):
            self._tell(self._name)


def _leave_terminal() -> None:
    for number in (0, 1, 2):
        with suppress(OSError):
            # `isatty` is false for a closed terminal: look at the type of the file.
            if stat.S_ISCHR(os.fstat(number).st_mode):
                redirect_to_devnull(number)


def redirect_to_devnull(number: int) -> None:
    """Redirect a closed stream to /dev/null, because writing to it is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, number)
    os.close(nowhere)
