"""Checks code responses against tests: a pool of sandboxed pairs of tester and candidate."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ppo_cli.config.reward_schema import Code
from ppo_cli.errors import RewardError, address_space, describe_address_space
from ppo_cli.records import Score
from ppo_cli.rewards.base import LONGEST_TEXT, Call, CannotScore, Tell, describe_error, tell_nobody
from ppo_cli.rewards.code.channel import (
    MOST_TRUSTED,
    Gone,
    Link,
    Malformed,
    decode,
    encode,
    no_numbers,
    no_objects,
)
from ppo_cli.rewards.code.extract import RowTests, find_code, list_attempts, read_tests
from ppo_cli.rewards.code.processes import (
    LARGEST_FILE_MB,
    SECONDS_TO_DIE,
    Process,
    end_process,
    find_excess,
    remove_folder,
)
from ppo_cli.rewards.code.sandboxes import Role, Sandbox, choose_sandbox, command

SECONDS_TO_START = 60.0
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_LEAVE = 1.0
LONGEST_WORDS = 2000
LONGEST_REPORT = 1 << 20
_PIECE = 1 << 16


class Launched:
    """Two processes and three channels of ours; `stack` ends them all when it closes.

    `control` is a socket to the tester, `output` what the candidate prints, `words` what either
    interpreter says in distress. The candidate has no way to `control` or `words`.
    """

    def __init__(self, stack: contextlib.ExitStack, sandbox: Sandbox, settings: Code) -> None:
        self._stack = stack
        self._sandbox = sandbox
        self._settings = settings
        self._folder = ""
        with contextlib.ExitStack() as theirs:
            asked, answering = (theirs.enter_context(one) for one in socket.socketpair())
            self.control, reporting = socket.socketpair()
            stack.enter_context(self.control)
            theirs.enter_context(reporting)
            self.output, printing = self._pipe(theirs)
            self.words, telling = self._pipe(theirs)
            stack.callback(self._await_silence)
            memory_mb = self._settings.memory_mb
            streams = (answering.fileno(), printing, printing)
            self.candidate = self._launch("candidate", memory_mb, streams)
            # The tester holds the answers and what they are compared with.
            streams = (asked.fileno(), reporting.fileno(), telling)
            self.tester = self._launch("tester", 2 * memory_mb, streams)

    def _pipe(self, theirs: contextlib.ExitStack) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._stack.callback(os.close, reading)
        theirs.callback(os.close, writing)
        os.set_blocking(reading, False)
        return reading, writing

    def _launch(self, role: Role, memory_mb: int, streams: tuple[int, int, int]) -> Process:
        folder = "/"
        if self._sandbox.uses_folder:
            folder = tempfile.mkdtemp(prefix="ppo-code-")
            self._stack.callback(remove_folder, folder)
            # The candidate's; it is the first to be launched.
            self._folder = self._folder or folder
        limits = [memory_mb, self._settings.cpu_seconds, LARGEST_FILE_MB]
        program = command(role, [*limits, int(self._sandbox.leaves_filter)])
        process = self._sandbox.start(program, streams=streams, folder=folder)
        self._stack.callback(end_process, process, alone=self._sandbox.name == "bwrap")
        return process

    def _await_silence(self) -> None:
        """Wait until nobody holds a channel of theirs any more: then all of them are dead."""
        until = time.monotonic() + SECONDS_TO_DIE
        channels = {self.output, self.words}
        while channels and time.monotonic() < until:
            for fd in select.select(list(channels), [], [], 0.1)[0]:
                with contextlib.suppress(BlockingIOError):
                    if not os.read(fd, _PIECE):
                        channels.discard(fd)

    def is_lost(self) -> bool:
        """Say whether the launcher died, and both processes with it."""
        return self.candidate.is_lost() or self.tester.is_lost()

    def find_excess(self) -> str:
        """Say which limit is broken that no process can be made to hold by itself."""
        pid, most = self.candidate.pid, self._settings.processes
        return find_excess(self._sandbox.name, pid, self._folder, most)


class Lost(Exception):
    """What watches over the sandboxes died while the tests ran, and the tests with it."""


@dataclass(frozen=True)
class Verdict:
    """What the tests have shown; `reason` is empty when all passed.

    `finished` tells tests that failed from tests that never came to their end, or to a start.
    """

    passed: int = 0
    total: int = 0
    reason: str = ""
    finished: bool = False


class Check:
    """One response under test. Soon after `stopped` is set, `run` raises CannotScore."""

    def __init__(
        self, sandbox: Sandbox, settings: Code, stopped: threading.Event | None = None
    ) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self._stopped = stopped or threading.Event()
        self._nonce = secrets.token_hex(16)
        self._ready = False
        self._written = 0
        self._words = bytearray()
        self._reports = bytearray()

    def run(self, tests: RowTests, attempts: Sequence[str]) -> Verdict:
        """Run the tests of a row against the code; CannotScore when that was not possible.

        Who watches over the sandboxes watches over several. When it dies, nobody knows who is to
        blame, so each is run once more with a watcher of its own.
        """
        job = {**asdict(tests), "attempts": list(attempts), "nonce": self._nonce}
        try:
            return self._run_in(self.sandbox, job)
        except Lost:
            with contextlib.closing(self.sandbox.apart()) as own:
                try:
                    return self._run_in(own, job)
                except Lost:
                    return Verdict(reason="broke its sandbox: what watches over it died, twice")

    def _run_in(self, sandbox: Sandbox, job: dict[str, Any]) -> Verdict:
        self._written, self._ready = 0, False
        self._words.clear()
        self._reports.clear()
        try:
            with contextlib.ExitStack() as stack:
                launched = Launched(stack, sandbox, self.settings)
                # The tester reads its job first, and the candidate waits meanwhile. A tester
                # that has died is reported by `_watch`.
                with contextlib.suppress(Gone):
                    link = Link(launched.control.fileno(), MOST_TRUSTED)
                    link.send(encode(job, no_objects, MOST_TRUSTED))
                launched.control.setblocking(False)
                try:
                    verdict = self._watch(launched)
                except CannotScore:
                    if launched.is_lost() and not self._stopped.is_set():
                        raise Lost from None
                    raise
                if not verdict.finished and launched.is_lost():
                    raise Lost
                return verdict
        except OSError as error:
            if self._ready:
                return Verdict(reason=f"broke its sandbox: {error}"[:LONGEST_WORDS])
            raise CannotScore(f"the sandbox does not start: {error}") from None

    def _watch(self, launched: Launched) -> Verdict:
        """Read what comes until the tester's last word, or until a limit is broken."""
        deadline = time.monotonic() + SECONDS_TO_START
        look = 0.0
        while True:
            if self._stopped.is_set():
                raise CannotScore("the run ended before this response was scored")
            if time.monotonic() >= deadline:
                if not self._ready:
                    raise CannotScore(f"the sandbox took more than {SECONDS_TO_START:g} s to start")
                return Verdict(reason=f"timed out after {self.settings.timeout:g} s")
            open_ones = self._read(launched, min(deadline, time.monotonic() + 0.1))
            for what, facts in self._take_reports():
                if what != "ready":
                    return self._conclude(launched, what, facts)
                self._ready, deadline = True, time.monotonic() + self.settings.timeout
            if not open_ones:
                if not self._ready:
                    raise self._not_started(launched.tester)
                return Verdict(reason="the tests ended before they were done")
            if self._written > self.settings.output_kb << 10:
                return Verdict(reason=f"wrote more than {self.settings.output_kb} KB of output")
            if self._ready and time.monotonic() >= look:
                look = time.monotonic() + SECONDS_BETWEEN_LOOKS
                excess = launched.find_excess()
                if excess:
                    return Verdict(reason=excess)

    def _read(self, launched: Launched, until: float) -> bool:
        """Read what has come, waiting for it until then; False when the tester has gone."""
        control = launched.control.fileno()
        sources = [control, launched.output, launched.words]
        patience = max(0.0, until - time.monotonic())
        ready, _, _ = select.select(sources, [], [], patience)
        still_open = True
        for source in ready:
            try:
                data = os.read(source, _PIECE)
            except OSError:
                data = b""
            if source == control:
                still_open = bool(data)
                self._reports += data
            elif source == launched.output:
                self._written += len(data)
                self._words += data[:LONGEST_WORDS]
            else:
                self._words += data
            del self._words[:-LONGEST_WORDS]
        return still_open

    def _take_reports(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the tester's whole messages that carry the nonce."""
        found = []
        while len(self._reports) >= 8:
            size = int.from_bytes(self._reports[:8], "little")
            if size > LONGEST_REPORT or len(self._reports) < 8 + size:
                break
            data = bytes(self._reports[8 : 8 + size])
            del self._reports[: 8 + size]
            with contextlib.suppress(Malformed, ValueError, TypeError):
                nonce, what, facts = decode(data, no_numbers)
                if secrets.compare_digest(nonce, self._nonce):
                    found.append((what, facts))
        return found

    def _not_started(self, process: Process) -> CannotScore:
        words = " ".join(self._words.decode("utf-8", "replace").split())
        code = _wait(process)
        return CannotScore(f"the sandbox did not start (exit code {code}): {words[-500:]}")

    def _conclude(self, launched: Launched, what: str, facts: dict[str, Any]) -> Verdict:
        """Turn the tester's last word into a verdict."""
        if what == "no candidate":
            self._read(launched, 0.0)
            raise self._not_started(launched.candidate)
        if what == "row":
            raise CannotScore(str(facts["text"]))
        passed, total, first = facts["passed"], facts["total"], facts["first"]
        if what == "gone":
            return Verdict(passed, total, self._say_gone(launched, facts["text"]))
        if what == "broken":
            where = "" if facts["loaded"] else "the code does not load: "
            return Verdict(passed, total, where + self._with_limit(facts["text"]))
        if passed == total and total > 0:
            return Verdict(passed, total, finished=True)
        reason = f"{total - passed} of {total} tests failed; first: {self._with_limit(first)}"
        return Verdict(passed, total, reason, finished=total > 0)

    def _with_limit(self, text: str) -> str:
        if not text.startswith("MemoryError"):
            return text
        return text.replace("MemoryError", f"MemoryError (over {self.settings.memory_mb} MB)", 1)

    def _say_gone(self, launched: Launched, text: str) -> str:
        """Say how the candidate's process ended."""
        if text.startswith("an answer"):
            return f"broke off: it sent {text}"
        code = _wait(launched.candidate)
        number = code - 128 if code is not None and code > 128 else -(code or 0)
        if code is None:
            return "closed its channel before the tests were done"
        if number == signal.SIGXCPU:
            return f"killed: computed for more than {self.settings.cpu_seconds} s"
        if number == signal.SIGKILL:
            limits = f"{self.settings.cpu_seconds} s or {self.settings.memory_mb} MB"
            return f"killed: most likely over {limits}"
        if number > 0:
            return f"crashed before the tests were done ({signal.strsignal(number) or number})"
        return f"exited before the tests were done (exit code {code})"


def _wait(process: Process) -> int | None:
    try:
        return process.wait(SECONDS_TO_LEAVE)
    except subprocess.TimeoutExpired:
        return None


class CodePool:
    """Runs checks on `size` threads; every future resolves to a Score."""

    def __init__(self, settings: Code, *, size: int) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="code")
        self._starting = threading.Lock()
        self._stopped = threading.Event()
        self._sandbox: Sandbox | None = None

    def start(self, tell: Tell = tell_nobody) -> None:
        """Choose the sandbox; RewardError when none works."""
        memory, limit = self._settings.memory_mb, address_space()
        if limit is not None and limit >> 20 < memory:
            raise RewardError(
                f"Code may take {memory} MB (reward.code.memory_mb). {describe_address_space()} "
                f"Or set reward.code.memory_mb={limit >> 20}."
            )
        with self._starting:
            if self._sandbox is None:
                self._sandbox = choose_sandbox(self._settings, tell)

    def submit(self, call: Call, finish: Callable[[Score], Score]) -> Future[Score]:
        """Queue one response; `finish` turns what came back into the score."""
        if self._stopped.is_set():
            raise RuntimeError("this reward is closed")
        self.start()
        assert self._sandbox is not None
        check = Check(self._sandbox, self._settings, self._stopped)
        return self._threads.submit(lambda: finish(judge(call, check)))

    def close(self) -> None:
        """Stop what runs; responses that are not judged yet fail."""
        self._stopped.set()
        self._threads.shutdown()
        if self._sandbox is not None:
            self._sandbox.close()


def judge(call: Call, check: Check) -> Score:
    """Test one response; what it does wrong is a 0 with a reason, what we do wrong a failure.

    1 when all tests passed; with `score=share` the part that did. Not finished: 0.
    """
    try:
        tests = read_tests(call.ground_truth, call.extra_info)
        code = find_code(call.solution_str, tests.entry_point)
        info = {
            "extracted": code[:LONGEST_TEXT],
            "code_chars": len(code),
            "sandbox": check.sandbox.name,
        }
        verdict = check.run(tests, list_attempts(code, tests.before, tests.entry_point))
    except CannotScore as problem:
        return Score.failed(str(problem))
    except Exception as error:
        return Score.failed(f"raised {describe_error(error)}")
    share = verdict.passed / verdict.total if verdict.finished else 0.0
    value = share if check.settings.score == "share" else float(share == 1.0)
    counts = {"sandbox": check.sandbox.name, "passed": verdict.passed, "total": verdict.total}
    return Score(value, reason=verdict.reason, info={**info, **counts})
