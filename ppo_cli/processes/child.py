"""A child process that answers requests through a channel; the parent's end."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ppo_cli.processes.channel import GIVEN_UP, HEADER, MARK, PART
from ppo_cli.processes.reaper import STOP_S, supervised
from ppo_cli.secrets.redact import redact
from ppo_cli.signals import shorten_wait

# From the end of a child's channel to that of the child.
EXIT_TIMEOUT_S = 2.0
# Requests that are late within this time are late together.
SAME_MOMENT_S = 0.05
MAX_ANSWER_BYTES = 1 << 30
MAX_LOG_BYTES = 1 << 20
LOG_PERIOD_S = 10.0
TAIL_BYTES = 2000
CHUNK_BYTES = 1 << 16
MAX_LAST_LINE = 200  # characters of what a child printed last
TakePart = Callable[[bytes], None]


class ChildEnded(Exception):
    """The child has ended, and the message says how.

    `crashed`: it ended by itself. `alone`: the request was its only one, so it is the cause.
    """

    def __init__(self, reason: str, *, crashed: bool = False, alone: bool = False) -> None:
        super().__init__(reason)
        self.crashed = crashed
        self.alone = alone


class Child:
    """A child that has started; `ended` says why it has ended."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter, kind: str, log: Path | None, max_answer_bytes: int,
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._process = process
        self._writer = writer
        self._kind = kind
        self._log = log
        self._max_answer_bytes = max_answer_bytes
        self._on_end = on_end
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[asyncio.Future[bytes], TakePart | None]] = {}
        self._tail = b""
        self._log_started = 0.0
        self.ended = ""
        self.exit_code: int | None = None  # negative: the number of a signal
        assert process.stdout is not None
        self._prints = asyncio.create_task(self._read_prints(process.stdout))
        self._reads = asyncio.create_task(self._read_answers(reader))

    @classmethod
    async def start(
        cls, command: Sequence[str], *, kind: str, environ: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] = os.environ, log: Path | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES, on_end: Callable[[], None] = lambda: None,
    ) -> Child:  # fmt: skip
        """Start a command, whose program uses a `Channel`.

        `kind` names it in messages. Its variables are `inherited` and `environ`. What it prints is
        written to `log`. `on_end` is called once when it ends.
        """
        our_end, child_end = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=our_end)
        try:
            process = await asyncio.create_subprocess_exec(
                *supervised(command), stdin=child_end.fileno(),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                # A fixed order of sets in all processes: the same input gives the same result.
                env={**inherited, "PYTHONHASHSEED": "0", **(environ or {})},
                # A Ctrl-C at the terminal reaches the run only, which then finishes its step.
                start_new_session=True,
            )  # fmt: skip
        except BaseException:  # a start that is cancelled leaves no process
            writer.close()
            raise
        finally:
            child_end.close()
        return cls(process, reader, writer, kind, log, max_answer_bytes, on_end)

    async def request(
        self, data: bytes, timeout: float, take_part: TakePart | None = None
    ) -> bytes:
        """Return the answer to a request; `take_part` gets the parts that the child sends before.

        Raises ChildEnded, and TimeoutError after `timeout` seconds, when the child was killed. A
        request that is cancelled is given up, which the child's channel notes.
        """
        if self.ended:
            raise ChildEnded(self.ended)
        loop = asyncio.get_running_loop()
        number, deadline = next(self._numbers), loop.time() + timeout
        answer: asyncio.Future[bytes] = loop.create_future()
        self._answers[number] = answer, take_part
        try:
            async with asyncio.timeout_at(deadline):
                with suppress(OSError):  # it has just ended, which its reader notices
                    self._writer.write(HEADER.pack(MARK, len(data), number))
                    # A view: the event loop would copy the rest of a large request twice.
                    self._writer.write(memoryview(data))
                    await self._writer.drain()
                return await answer
        except asyncio.CancelledError:
            with suppress(OSError):
                self._writer.write(HEADER.pack(GIVEN_UP, 0, number))
            raise
        except TimeoutError:
            # Its code holds the interpreter's lock, or blocks its event loop.
            self.kill(f"timeout: the {self._kind} process did not answer for {timeout:g} s")
            raise
        except ChildEnded as end:
            if not end.crashed and loop.time() > deadline - SAME_MOMENT_S:
                raise TimeoutError from None
            raise

    def last_line(self) -> str:
        """Return what the child printed last."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return redact(lines[-1])[:MAX_LAST_LINE] if lines else ""

    def refuse_answer(self) -> ChildEnded:
        """Kill a child that sends nonsense; returns the failure of its request."""
        limit = self._max_answer_bytes >> 20
        self.kill(f"the {self._kind} process wrote what is not an answer of at most {limit} MiB")
        return ChildEnded(self.ended)

    def kill(self, reason: str) -> None:
        """End the child and everything that it has started; its requests fail with the reason."""
        self._fail_requests(reason)
        self._writer.close()  # it may pass over signals
        with suppress(ProcessLookupError):
            self._process.terminate()

    async def close(self, reason: str, patience_s: float = EXIT_TIMEOUT_S) -> None:
        """Let the child end by itself, then end it, and wait for that; open requests fail."""
        self._on_end = lambda: None
        self._fail_requests(reason)
        self._writer.close()
        # Its event loop may be blocked, and its children may ignore signals.
        for seconds, end in (
            (shorten_wait(patience_s), self._process.terminate), (STOP_S, self._process.kill)
        ):  # fmt: skip
            try:
                await asyncio.wait_for(self._process.wait(), seconds)
                break
            except TimeoutError:
                with suppress(ProcessLookupError):
                    end()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(self._reads, self._prints), EXIT_TIMEOUT_S)

    def _fail_requests(self, reason: str, *, crashed: bool = False) -> None:
        if self.ended:
            return
        self.ended = reason
        answers = [answer for answer, _ in self._answers.values() if not answer.done()]
        for answer in answers:
            answer.set_exception(ChildEnded(reason, crashed=crashed, alone=len(answers) == 1))
        self._on_end()

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        """Give each answer to its request, until the child ends or sends something else."""
        try:
            while True:
                mark, size, number = HEADER.unpack(await reader.readexactly(HEADER.size))
                answer, take_part = self._answers.get(number, (None, None))
                fits = mark == MARK or (mark == PART and take_part is not None)
                if answer is None or size > self._max_answer_bytes or not fits:
                    self.refuse_answer()
                    return
                data = await reader.readexactly(size)
                if mark == PART and take_part is not None:
                    take_part(data)
                    continue
                del self._answers[number]
                if not answer.done():  # nobody waits for it any more
                    answer.set_result(data)
        except (asyncio.IncompleteReadError, OSError):
            self._fail_requests(await self._describe_exit(), crashed=True)
            with suppress(ProcessLookupError):
                self._process.terminate()
        finally:
            self._writer.close()

    async def _describe_exit(self) -> str:
        """Wait for the end of a child whose channel has ended; returns how it ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                code = await self._process.wait()
                await asyncio.shield(self._prints)
                self.exit_code = code
                # The reaper returns the negative number of a signal as an unsigned byte.
                with suppress(ValueError):
                    self.exit_code = -signal.Signals(256 - code)
        if self.exit_code is None:
            how = "closed its channel"
        elif self.exit_code < 0:
            how = f"ended by signal {signal.Signals(-self.exit_code).name}"
        else:
            how = f"ended with exit code {self.exit_code}"
        last = f": {line}" if (line := self.last_line()) else ""
        return f"the {self._kind} process {how}{last}"

    async def _read_prints(self, reader: asyncio.StreamReader) -> None:
        """Write what the child prints into its log.

        A full log begins again; prints that fill it within LOG_PERIOD_S are left out.
        """
        while chunk := await reader.read(CHUNK_BYTES):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if self._log is None:
                continue
            full = self._log.exists() and self._log.stat().st_size > MAX_LOG_BYTES
            if full and time.monotonic() < self._log_started + LOG_PERIOD_S:
                continue
            if full or not self._log_started:
                self._log_started = time.monotonic()
            with self._log.open("w" if full else "a", encoding="utf-8") as file:
                file.write(redact(chunk.decode(errors="replace")))
