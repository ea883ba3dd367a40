"""A Ray for each file of tests, to which this process may connect; prompts of the bundled model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cluster.ray_process import LOCAL_ONLY, RayOptions, RayProcess
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.records import Prompt


@contextlib.contextmanager
def local_ray(
    log: Path, gpus: int = 0, variables: Mapping[str, str] = LOCAL_ONLY
) -> Iterator[RayProcess]:
    """Start a Ray that only this machine can reach; end it afterwards."""
    options = RayOptions(os.cpu_count() or 1, gpus)
    process = RayProcess(options, log=log, environ=os.environ | variables)
    try:
        yield process
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
        yield lambda gpus=0: stack.enter_context(local_ray(log, gpus)).await_address(300)


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
