"""A Ray for each file of tests, to which this process may connect; prompts of the bundled model."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cluster.ray_process import LOCAL_ONLY, RayOptions, RayProcess
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.records import Prompt

MARK = "PPO_TEST_MARK"


class MarkedRay:
    """Processes with a mark in their environment: also those that a reaper should have ended."""

    def __init__(self, mark: str, process: RayProcess | None = None) -> None:
        self.mark = mark
        if process is not None:
            self.process = process

    def running(self) -> dict[int, str]:
        """Names of its running processes by id."""
        names = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    names[int(entry.name)] = (entry / "comm").read_text().strip()
        return names

    def part(self, name: str) -> int:
        (pid,) = (pid for pid, running in self.running().items() if running == name)
        return pid

    def await_end(self, seconds: float) -> dict[int, str]:
        until = time.monotonic() + seconds
        while (running := self.running()) and time.monotonic() < until:
            time.sleep(0.1)
        return running


@contextlib.contextmanager
def local_ray(
    log: Path, gpus: int = 0, variables: Mapping[str, str] = LOCAL_ONLY
) -> Iterator[MarkedRay]:
    """Start a Ray that only this machine can reach; end it afterwards."""
    mark = uuid.uuid4().hex
    environ = {**os.environ, **variables, MARK: mark}
    process = RayProcess(RayOptions(os.cpu_count() or 1, gpus), log=log, environ=environ)
    try:
        yield MarkedRay(mark, process)
    finally:
        process.close()


@pytest.fixture(scope="module")
def start_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Starts a Ray and returns its address."""
    from ray._private import ray_constants  # not before its settings are made

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # As `LOCAL_ONLY` does in processes that have not imported Ray yet.
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        log = tmp_path_factory.mktemp("ray") / "ray.log"
        yield lambda gpus=0: stack.enter_context(local_ray(log, gpus)).process.await_address(120)


@pytest.fixture(scope="module")
def address(start_ray: Callable[..., str]) -> str:
    return start_ray()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from ppo_cli.engine.models import load_tokenizer

    return load_tokenizer(model_folder("embedded"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[Prompt]:
    texts = [f"{i} + {7 * i} =" for i in range(12)]
    return [
        Prompt(f"p{i}", text, (), text, tuple(tokenizer(text).input_ids))
        for i, text in enumerate(texts)
    ]
