"""Sandboxes to test in, a way to run one response in them, and a look at what is left behind."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.reward import Code
from ppo_cli.records import Score
from ppo_cli.rewards.base import Call
from ppo_cli.rewards.code import sandboxes
from ppo_cli.rewards.code.check import Check, judge
from ppo_cli.rewards.code.sandboxes import Bubblewrap, Sandbox, Sandlock, Unsandboxed, find_fault
from tests.rewards.code.attacks import find_marked

KINDS: dict[str, type[Sandbox]] = {kind.name: kind for kind in (Bubblewrap, Sandlock, Unsandboxed)}
LIMITS = {"timeout": 8.0, "cpu_seconds": 6, "memory_mb": 256}


@pytest.fixture
def make_sandbox(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Sandbox]]:
    """Make a sandbox by its name; the test is skipped where it does not start."""

    sandboxes_: list[Sandbox] = []

    def make(name: str) -> Sandbox:
        sandbox = KINDS[name]()
        sandboxes_.append(sandbox)
        fault = "" if name == "none" else find_fault(sandbox)
        status = f"{name}: not tested, {fault}" if fault else f"{name}: tested"
        # What the end of the session shows.
        request.node.user_properties.append(("sandbox", status))
        if "its trial failed" in fault:
            pytest.fail(f"{name}: {fault}")
        if fault:
            pytest.skip(f"{name}: {fault}")
        return sandbox

    yield make
    for sandbox in sandboxes_:
        sandbox.close()


@pytest.fixture
def any_sandbox(make_sandbox: Callable[[str], Sandbox]) -> Sandbox:
    """The best that there is; one without walls where there is none, for tests of the judging."""
    working = [name for name in ("bwrap", "sandlock") if not find_fault(KINDS[name]())]
    return make_sandbox((working or ["none"])[0])


@pytest.fixture
def no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """See that no process and no temporary file is left by what the test has run."""
    token = uuid.uuid4().hex
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setitem(sandboxes.ENVIRONMENT, "PPO_TEST_TOKEN", token)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert find_marked(token) == []
    assert list(folder.iterdir()) == []


@pytest.fixture
def run_code(any_sandbox: Sandbox) -> Callable[..., Score]:
    """Judge one response by the tests of a row."""

    def run(response: str, truth: Any, sandbox: Sandbox | None = None, **settings: Any) -> Score:
        chosen = sandbox or any_sandbox
        code = Code(**{**LIMITS, **settings})
        call = Call("code", response, truth, {})
        return judge(call, Check(chosen, code))

    return run
