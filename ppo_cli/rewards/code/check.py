"""Checks code responses against their tests, in pairs of sandboxed processes: tester, candidate."""

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

from ppo_cli.config.schema.reward import Code
from ppo_cli.processes.user_code import describe_error
from ppo_cli.records import Score
from ppo_cli.rewards.base import (
    MAX_TEXT_CHARS,
    Call,
    CannotScore,
    Tell,
    tell_nobody,
)
from ppo_cli.rewards.code.channel import (
    MAX_TRUSTED_BYTES,
    ChannelClosed,
    Link,
    Malformed,
    decode,
    encode,
    refuse_number,
    refuse_object,
)
from ppo_cli.rewards.code.extract import RowTests, find_code, list_attempts, read_tests
from ppo_cli.rewards.code.processes import (
    KILL_TIMEOUT_S,
    MAX_FILE_MB,
    describe_broken_limit,
    remove_folder,
)
from ppo_cli.rewards.code.sandboxes import (
    ForkedProcess,
    Process,
    Role,
    Sandbox,
    choose_sandbox,
    command,
    find_packages,
)

START_TIMEOUT_S = 60.0  # generous: a loaded machine starts interpreters slowly
POLL_INTERVAL_S = 0.1  # between two looks at files and processes, which cost /proc reads
EXIT_TIMEOUT_S = 1.0
MAX_STDERR_BYTES = 2000
MAX_REPORT_BYTES = 1 << 20
_PIECE = 1 << 16


class SandboxPair:
    """A tester process, a candidate process and three channels; closing `stack` ends them all.

    `control` is a socket to the tester, `output` a pipe of what the candidate prints, `stderr` a
    pipe of the tester's errors. The candidate has no access to `control` or `stderr`.
    """

    def __init__(
        self, stack: contextlib.ExitStack, sandbox: Sandbox, settings: Code, cpu_seconds: int
    ) -> None:
        self._stack = stack
        self._sandbox = sandbox
        self._settings = settings
        self._cpu_limits = [cpu_seconds, max(cpu_seconds, int(settings.response_timeout))]
        self._folder = ""
        # `child_ends` closes our copies once both processes have theirs, so that the end of a
        # process is the end of its channels.
        with contextlib.ExitStack() as child_ends:
            tester_end, candidate_end = (
                child_ends.enter_context(end) for end in socket.socketpair()
            )
            self.control, tester_control = socket.socketpair()
            stack.enter_context(self.control)
            child_ends.enter_context(tester_control)
            self.output, output_writer = self._open_pipe(child_ends)
            self.stderr, stderr_writer = self._open_pipe(child_ends)
            stack.callback(self._wait_for_closed_channels)
            memory_mb = self._settings.memory_mb
            streams = (candidate_end.fileno(), output_writer, output_writer)
            self.candidate = self._launch("candidate", memory_mb, streams)
            # The tester holds the answers and the expected values, so it may use twice the memory.
            streams = (tester_end.fileno(), tester_control.fileno(), stderr_writer)
            self.tester = self._launch("tester", 2 * memory_mb, streams)

    def _open_pipe(self, child_ends: contextlib.ExitStack) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._stack.callback(os.close, reading)
        child_ends.callback(os.close, writing)
        os.set_blocking(reading, False)
        return reading, writing

    def _launch(self, role: Role, memory_mb: int, streams: tuple[int, int, int]) -> Process:
        """Start a role in the sandbox with its limits.

        `stack` ends the process and deletes its folder.
        """
        folder = "/"
        if self._sandbox.uses_folder:
            folder = tempfile.mkdtemp(prefix="ppo-code-", dir=self._sandbox.folder)
            self._stack.callback(remove_folder, folder)
            # Only the candidate's folder is checked; it is launched first.
            self._folder = self._folder or folder
        limits = [memory_mb, *self._cpu_limits, MAX_FILE_MB]
        filtered = int(self._sandbox.needs_own_filter)
        program = command(role, [*limits, filtered, find_packages()])
        process = self._sandbox.start(program, streams=streams, folder=folder)
        self._stack.callback(process.end, alone=self._sandbox.name == "bwrap")
        return process

    def _wait_for_closed_channels(self) -> None:
        """Wait until `output` and `stderr` are closed: then no process of the sandbox is alive."""
        until = time.monotonic() + KILL_TIMEOUT_S
        channels = {self.output, self.stderr}
        while channels and time.monotonic() < until:
            for fd in select.select(list(channels), [], [], 0.1)[0]:
                with contextlib.suppress(BlockingIOError):
                    if not os.read(fd, _PIECE):
                        channels.discard(fd)

    def launcher_died(self) -> bool:
        """Whether the launcher of the sandbox died, which kills both processes."""
        forked = (p for p in (self.candidate, self.tester) if isinstance(p, ForkedProcess))
        return any(process.launcher_died() for process in forked)

    def describe_broken_limit(self) -> str:
        """Name a broken limit that the processes cannot enforce themselves, or return ''."""
        pid, max_processes = self.candidate.pid, self._settings.processes
        return describe_broken_limit(self._sandbox.name, pid, self._folder, max_processes)


class LauncherDied(Exception):
    """The launcher of the sandboxes died while the tests ran, and the tests with it."""


@dataclass(frozen=True)
class Verdict:
    """Result of the tests; `reason` is empty when all passed.

    `finished` is False when the tests did not run to their end. `line` is the line of the code that
    raised the first failure, "" if none did.
    """

    passed: int = 0
    total: int = 0
    reason: str = ""
    finished: bool = False
    line: str = ""


class Check:
    """Tests one response. When `stopped` is set, `run` raises CannotScore soon after."""

    def __init__(
        self, sandbox: Sandbox, settings: Code, stopped: threading.Event | None = None
    ) -> None:
        self.sandbox = sandbox
        self.settings = settings
        self._stopped = stopped or threading.Event()
        self._nonce = secrets.token_hex(16)
        self._timeout, self._cpu_seconds = settings.timeout, settings.cpu_seconds
        self._ready = False
        self._written = 0
        self._stderr = bytearray()
        self._reports = bytearray()

    def run(self, tests: RowTests, attempts: Sequence[str]) -> Verdict:
        """Run the tests of a row against the code; CannotScore when that was not possible.

        One launcher serves several sandboxes. When it dies, the response at fault is not known,
        so each of them runs again with a separate launcher.
        """
        # Only reports with this job's nonce count: the response cannot know it.
        job = {**asdict(tests), "attempts": list(attempts), "nonce": self._nonce}
        try:
            return self._run_in(self.sandbox, job)
        except LauncherDied:
            with contextlib.closing(self.sandbox.separate()) as separate_sandbox:
                try:
                    return self._run_in(separate_sandbox, job)
                except LauncherDied:
                    return Verdict(reason="broke its sandbox: the sandbox's launcher died twice")

    def _run_in(self, sandbox: Sandbox, job: dict[str, Any]) -> Verdict:
        """Return the verdict on one job in this sandbox.

        Raises LauncherDied when the process that forks the candidate has died, and CannotScore when
        the sandbox does not start.
        """
        self._written, self._ready = 0, False
        # The row may allow its tests more time.
        self._timeout = max(self.settings.timeout, job["seconds"])
        self._cpu_seconds = max(self.settings.cpu_seconds, int(job["seconds"]) + 1)
        self._stderr.clear()
        self._reports.clear()
        try:
            with contextlib.ExitStack() as stack:
                launched = SandboxPair(stack, sandbox, self.settings, self._cpu_seconds)
                # The tester reads its job before it asks the candidate anything. `_watch`
                # reports a tester that has died by now.
                with contextlib.suppress(ChannelClosed):
                    link = Link(launched.control.fileno(), MAX_TRUSTED_BYTES)
                    link.send(encode(job, refuse_object, MAX_TRUSTED_BYTES))
                # From here on, `select` decides when to read.
                launched.control.setblocking(False)
                try:
                    verdict = self._watch(launched)
                except CannotScore:
                    if launched.launcher_died() and not self._stopped.is_set():
                        raise LauncherDied from None
                    raise
                if not verdict.finished and launched.launcher_died():
                    raise LauncherDied
                return verdict
        except OSError as error:
            if self._ready:
                return Verdict(reason=f"broke its sandbox: {error}"[:MAX_STDERR_BYTES])
            raise CannotScore(f"the sandbox does not start: {error}") from None

    def _watch(self, launched: SandboxPair) -> Verdict:
        """Read output and reports until the tester's final report, or until a limit is broken."""
        deadline = end = time.monotonic() + START_TIMEOUT_S
        look = 0.0
        while True:
            # Reasons to stop, then new reports, then limits that are checked from outside.
            if self._stopped.is_set():
                raise CannotScore("the run ended before this response was scored")
            if time.monotonic() >= deadline:
                if not self._ready:
                    raise CannotScore(f"the sandbox took more than {START_TIMEOUT_S:g} s to start")
                all_tests = " of all tests" * (deadline == end)
                limit = self.settings.response_timeout if all_tests else self._timeout
                return Verdict(reason=f"timed out after {limit:g} s{all_tests}")
            # Read for at most 0.1 s, then look at the reports and at every limit.
            tester_open = self._read_sources(launched, min(deadline, time.monotonic() + 0.1))
            for what, facts in self._pop_reports():
                if what not in ("ready", "test"):
                    return self._read_verdict(launched, what, facts)
                # Each test of inputs and outputs has its time; asserts have it together.
                if what == "ready":
                    self._ready, end = True, time.monotonic() + self.settings.response_timeout
                deadline = min(end, time.monotonic() + self._timeout)
            if not tester_open:
                if not self._ready:
                    raise self._start_error(launched.tester)
                return Verdict(reason="the tests ended before they were done")
            if self._written > self.settings.output_kb << 10:
                return Verdict(reason=f"wrote more than {self.settings.output_kb} KB of output")
            if self._ready and time.monotonic() >= look:
                look = time.monotonic() + POLL_INTERVAL_S
                excess = launched.describe_broken_limit()
                if excess:
                    return Verdict(reason=excess)

    def _read_sources(self, launched: SandboxPair, until: float) -> bool:
        """Read one piece of each source that has data; False when the tester has exited.

        The sources are the reports and errors of the tester, and what the candidate prints. It
        waits until `until` at most.
        """
        control = launched.control.fileno()
        sources = [control, launched.output, launched.stderr]
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
                self._stderr += data[:MAX_STDERR_BYTES]
            else:
                self._stderr += data
            del self._stderr[:-MAX_STDERR_BYTES]
        return still_open

    def _pop_reports(self) -> list[tuple[str, dict[str, Any]]]:
        """Return and remove the complete messages of the tester that carry the nonce."""
        reports = []
        while len(self._reports) >= 8:
            # Each message has its length in front.
            size = int.from_bytes(self._reports[:8], "little")
            if size > MAX_REPORT_BYTES or len(self._reports) < 8 + size:
                break
            data = bytes(self._reports[8 : 8 + size])
            del self._reports[: 8 + size]
            with contextlib.suppress(Malformed, ValueError, TypeError):
                nonce, what, facts = decode(data, refuse_number)
                if secrets.compare_digest(nonce, self._nonce):
                    reports.append((what, facts))
        return reports

    def _start_error(self, process: Process) -> CannotScore:
        text = " ".join(self._stderr.decode("utf-8", "replace").split())
        code = _wait(process)
        return CannotScore(f"the sandbox did not start (exit code {code}): {text[-500:]}")

    def _read_verdict(self, launched: SandboxPair, what: str, facts: dict[str, Any]) -> Verdict:
        """Turn the tester's final report into a verdict."""
        if what == "no candidate":
            self._read_sources(launched, 0.0)
            raise self._start_error(launched.candidate)
        if what == "row":
            raise CannotScore(str(facts["text"]))
        # The tests have run, to their end or not.
        passed, total, first = facts["passed"], facts["total"], facts["first"]
        line = facts["line"]
        if what == "gone":
            return Verdict(passed, total, self._describe_exit(launched, facts["text"]))
        if what == "broken":
            where = "" if facts["loaded"] else "the code does not load: "
            return Verdict(passed, total, where + self._add_memory_limit(facts["text"]), line=line)
        if passed == total and total > 0:
            return Verdict(passed, total, finished=True)
        reason = f"{total - passed} of {total} tests failed; first: {self._add_memory_limit(first)}"
        return Verdict(passed, total, reason, finished=total > 0, line=line)

    def _add_memory_limit(self, text: str) -> str:
        if not text.startswith("MemoryError"):
            return text
        return text.replace("MemoryError", f"MemoryError (over {self.settings.memory_mb} MB)", 1)

    def _describe_exit(self, launched: SandboxPair, text: str) -> str:
        """Return how the candidate process ended, as the reason of a verdict."""
        if text.startswith("an answer"):
            return f"broke off: it sent {text}"
        # A shell, and the launcher, report a signal as 128 and its number.
        code = _wait(launched.candidate)
        number = code - 128 if code is not None and code > 128 else -(code or 0)
        if code is None:
            return "closed its channel before the tests were done"
        if number == signal.SIGXCPU:
            return f"killed: computed for more than {self._cpu_seconds} s"
        if number == signal.SIGKILL:
            limits = f"{self._cpu_seconds} s or {self.settings.memory_mb} MB"
            return f"killed: most likely over {limits}"
        if number > 0:
            return f"crashed before the tests were done ({signal.strsignal(number) or number})"
        return f"exited before the tests were done (exit code {code})"


def _wait(process: Process) -> int | None:
    try:
        return process.wait(EXIT_TIMEOUT_S)
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
        # The first submitter chooses the sandbox; others wait for it.
        with self._starting:
            if self._sandbox is None:
                self._sandbox = choose_sandbox(self._settings, tell)

    def submit(self, call: Call, finish: Callable[[Score], Score]) -> Future[Score]:
        """Queue one response; `finish` is applied to its score."""
        if self._stopped.is_set():
            raise RuntimeError("this reward is closed")
        self.start()
        assert self._sandbox is not None
        check = Check(self._sandbox, self._settings, self._stopped)
        return self._threads.submit(lambda: finish(judge(call, check)))

    def close(self) -> None:
        """Stop running checks; responses that are not judged yet fail."""
        self._stopped.set()
        self._threads.shutdown()
        if self._sandbox is not None:
            self._sandbox.close()


def judge(call: Call, check: Check) -> Score:
    """Test one response: an error of the response scores 0 with a reason, ours is a failed score.

    The score is 1 when all tests passed, or with `score=share` the share that passed; 0 when the
    tests did not finish.
    """
    try:
        tests = read_tests(call.ground_truth, call.extra_info)
        code = find_code(call.solution_str, tests.entry_point)
        info = {
            "extracted": code[:MAX_TEXT_CHARS],
            "code_chars": len(code),
            "sandbox": check.sandbox.name,
        }
        verdict = check.run(tests, list_attempts(code, tests.before, tests.entry_point))
    except CannotScore as problem:
        return Score.failed(str(problem))
    except Exception as error:
        return Score.failed(f"raised {describe_error(error)}")
    # Unfinished tests score 0, however many had passed.
    share = verdict.passed / verdict.total if verdict.finished else 0.0
    value = share if check.settings.score == "share" else float(share == 1.0)
    counts = {"sandbox": check.sandbox.name, "passed": verdict.passed, "total": verdict.total}
    if verdict.line:
        counts["line"] = verdict.line
    return Score(value, reason=verdict.reason, info={**info, **counts})
