"""Responses under test, a few at once: threads that wait for sandboxed processes.

`submit` is that of the worker pool, so that the rule `code` stands beside the other rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

from ppo_cli.config.reward_schema import Code
from ppo_cli.records import Score
from ppo_cli.rewards.code.choosing import choose_sandbox
from ppo_cli.rewards.code.extract import find_code, list_attempts
from ppo_cli.rewards.code.row_tests import read_tests
from ppo_cli.rewards.code.running import Check, Unscored, Verdict
from ppo_cli.rewards.code.sandboxes import Sandbox
from ppo_cli.rewards.returned import LONGEST_TEXT, CannotScore, Returned, describe_error
from ppo_cli.rewards.worker import Call


class CodePool:
    """Runs checks on `size` threads; every future resolves to a Score."""

    def __init__(self, settings: Code, *, size: int) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="code")
        self._lock = threading.Lock()
        self._running: set[Check] = set()
        self._closed = False
        self._sandbox: Sandbox | None = None

    def start(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Choose the sandbox; RewardError when none works."""
        with self._lock:
            if self._sandbox is None:
                self._sandbox = choose_sandbox(self._settings, tell)

    def submit(self, call: Call, finish: Callable[[Returned], Score]) -> Future[Score]:
        """Queue one response; `finish` turns what came back into the score."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        self.start()
        return self._threads.submit(lambda: finish(self._judge(call)))

    def close(self) -> None:
        """Stop what runs; responses that are not judged yet fail."""
        with self._lock:
            self._closed = True
            for check in self._running:
                check.stop()
        self._threads.shutdown()
        if self._sandbox is not None:
            self._sandbox.close()

    def _judge(self, call: Call) -> Returned:
        assert self._sandbox is not None
        check = Check(self._sandbox, self._settings)
        with self._lock:
            if self._closed:
                check.stop()
            self._running.add(check)
        try:
            return judge(call, check, self._settings, self._sandbox.name)
        finally:
            with self._lock:
                self._running.discard(check)


def judge(call: Call, check: Check, settings: Code, sandbox: str) -> Returned:
    """Test one response; what it does wrong is a 0 with a reason, what we do wrong a failure."""
    try:
        tests = read_tests(call.ground_truth, call.extra_info)
        code = find_code(call.solution_str, tests.entry_point)
        info = {"extracted": code[:LONGEST_TEXT], "code_chars": len(code), "sandbox": sandbox}
        verdict = check.run(tests, list_attempts(code, tests.before, tests.entry_point))
    except (CannotScore, Unscored) as problem:
        return Returned(None, str(problem))
    except Exception as error:
        return Returned(None, f"raised {describe_error(error)}")
    counts: dict[str, Any] = {"passed": verdict.passed, "total": verdict.total}
    return Returned(
        score_verdict(verdict, settings), reason=verdict.reason, info={**info, **counts}
    )


def score_verdict(verdict: Verdict, settings: Code) -> float:
    """1 when all tests passed; with `share` the part that did. Not finished: 0."""
    if not verdict.finished or not verdict.total:
        return 0.0
    if settings.score == "share":
        return verdict.passed / verdict.total
    return float(verdict.passed == verdict.total)


def score_now(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Test one response here and now, with the default settings."""
    settings = Code()
    sandbox = choose_sandbox(settings)
    call = Call(data_source, solution_str, ground_truth, dict(extra_info or {}))
    with closing(sandbox):
        returned = judge(call, Check(sandbox, settings), settings, sandbox.name)
    if returned.score is None:
        raise CannotScore(returned.failure)
    return {"score": returned.score, "reason": returned.reason, **returned.info}
