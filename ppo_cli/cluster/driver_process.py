"""The driver process of a run: it has `ClusterEngine` and answers the requests of `driver.py`.

Started as `python -m ppo_cli.cluster.driver_process LOG`. Requests arrive over a channel and are
answered from threads, several at a time. The process ends when the channel ends.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ppo_cli.cluster.driver import BEAT
from ppo_cli.cluster.engine import ClusterEngine
from ppo_cli.cluster.members import WorkerFault, WorkerHandle
from ppo_cli.cluster.serialise import dumps
from ppo_cli.cluster.worker_process import ignore_signals, write_into
from ppo_cli.config.schema.run import Transfer
from ppo_cli.engine.base import Sampling
from ppo_cli.errors import PpoError, is_picklable
from ppo_cli.processes.channel import MARK, PART, Channel
from ppo_cli.records import Prompt, Rollout
from ppo_cli.secrets.redact import redact
from ppo_cli.signals import note_signal

# Ray must be joined and left in the main thread.
IN_MAIN_THREAD = ("build", "close")
# Methods of `ClusterEngine` with the same arguments and results.
PASSED_ON = ("annotate", "step", "publish", "load")  # the engine's own
TELLING = ("build", "generate")  # these may tell something before their end


@dataclass(frozen=True)
class Request:
    """The name of a method (`verb`), its pickled arguments, and the number of its answer."""

    number: int
    verb: str
    arguments: memoryview


class Service:
    """An engine behind a channel to the process of the run.

    A request names a method: of the engine if it is in PASSED_ON, else of this class. What a
    generator yields is sent item by item.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._first: SimpleQueue[Request] = SimpleQueue()
        self._stop: str | None = None
        self._engine: ClusterEngine | None = None
        self._hosted: dict[int, WorkerHandle] = {}
        self._numbers = count()
        self._told_under = 0  # the request of which something is told meanwhile

    def run(self) -> None:
        """Read requests in a thread, and run those of IN_MAIN_THREAD in this one."""
        threading.Thread(target=self._listen, daemon=True).start()
        # The main thread runs until the engine is closed.
        while True:
            request = self._first.get()
            self._answer_request(request)
            if request.verb == "close":
                return

    def build(self, options: dict[str, Any], number: int) -> Transfer:
        """Build the engine, which may send notes meanwhile; returns how weights travel."""
        self._told_under = number
        self._engine = ClusterEngine(
            **options,
            tell=lambda text: self._send(self._told_under, "tell", text),
            stop_requested=lambda: self._stop,
        )
        return self._engine.weight_transfer

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout], number: int
    ) -> Iterator[Any]:
        """Lists of rollouts without their prompts, which the other side has.

        One request at a time.
        """
        self._told_under = number
        yield from self._built.generate(prompts, sampling, begun)

    def stop(self, reason: str) -> None:
        """Stop the build of the engine."""
        self._stop = reason
        note_signal()  # this process gets none itself

    def save(self, directory: Path, last: bool) -> Iterator[None]:
        """Yields when the snapshot is taken, and ends when all is on disk."""
        saved = self._built.save(directory, last=last)
        yield None
        saved.result()

    def host(self, factory: Any, role: str, devices: Sequence[int]) -> int:
        """Host an object; returns the number that identifies it."""
        number = next(self._numbers)
        self._hosted[number] = self._built.cluster.host(factory, role=role, devices=devices)
        return number

    def call(self, hosted: int, name: str, *args: Any) -> Any:
        """Call a method of a hosted object."""
        return self._built.cluster.call([self._hosted[hosted]], name, *args)[0]

    def dismiss(self, hosted: int) -> None:
        """End the process of a hosted object."""
        self._built.cluster.dismiss(self._hosted[hosted])

    def close(self) -> None:
        """Leave the cluster."""
        if self._engine is not None:
            self._engine.close()

    @property
    def _built(self) -> ClusterEngine:
        assert self._engine is not None
        return self._engine

    def _listen(self) -> None:
        """Begin each request, and answer a BEAT with the id of this process.

        It never returns: the process exits with 0 when the channel ends, and with 1 on a bug.
        """
        try:
            with suppress(OSError):
                for number, data in self._channel:
                    if data == BEAT:
                        with self._sending:
                            self._channel.send(number, str(os.getpid()).encode())
                        continue
                    # The arguments may be large, so they are not copied.
                    end = data.index(b"\n")
                    self._begin(Request(number, data[:end].decode(), memoryview(data)[end + 1 :]))
            # The run has ended. Its supervisor ends Ray, so nothing is left to close here.
            os._exit(0)
        except BaseException:
            print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
            os._exit(1)

    def _begin(self, request: Request) -> None:
        if request.verb in IN_MAIN_THREAD:
            self._first.put(request)
        else:
            threading.Thread(target=self._answer_request, args=(request,), daemon=True).start()

    def _answer_request(self, request: Request) -> None:
        """Run the method that a request names, and send its items and then `done` with the result.

        Methods in PASSED_ON are the engine's, others are this object's. An exception is sent as
        `error`.
        """
        try:
            args = pickle.loads(request.arguments)
            # Notes of these verbs are sent as replies to their request.
            if request.verb in TELLING:
                args = (*args, request.number)
            owner = self._built if request.verb in PASSED_ON else self
            value = getattr(owner, request.verb)(*args)
            if isinstance(value, Iterator):
                self._stream(request.number, value)
                value = None
            self._send(request.number, "done", value)
        except BaseException as error:
            self._send(request.number, "error", portable_error(error))

    def _stream(self, number: int, items: Any) -> None:
        for item in items:
            self._send(number, "item", item)
            if number in self._channel.given_up:
                # The reader has enough; closing the generator stops the sampling.
                items.close()
                return

    def _send(self, number: int, kind: str, value: Any) -> None:
        try:
            data, mark = dumps((kind, value)), MARK if kind in ("done", "error") else PART
            with self._sending:
                self._channel.send(number, data, mark)
        except OSError:
            # The run has ended: nobody reads this any more.
            os._exit(0)


def portable_error(error: BaseException) -> BaseException:
    """Return an error that the run can raise: itself, or one with its traceback."""
    text = redact("".join(traceback.format_exception(error)))
    # An OSError of a connection is one of Ray, not of a file of the user.
    of_files = isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError))
    if of_files or isinstance(error, (PpoError, WorkerFault)):
        return error if is_picklable(error) else WorkerFault(text)
    return WorkerFault(f"The process that talks to Ray failed:\n{text.rstrip()}")


if __name__ == "__main__":
    # No interpreter shutdown: Ray's shutdown would wait for processes that have already exited.
    code = 1
    try:
        ignore_signals()
        write_into(Path(sys.argv[1]))
        Service(Channel()).run()
        code = 0
    except BaseException:
        print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
    sys.stderr.flush()
    os._exit(code)
