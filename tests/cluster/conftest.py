"""A Ray of its own for a file of tests, to which this process may join."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ppo_cli.cluster.ray_session import OwnRay


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from ray._private import ray_constants  # not before its settings are made

    with pytest.MonkeyPatch.context() as patch:
        # As `HERE_ONLY` says it to processes that have not imported Ray yet.
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        ray = OwnRay(gpus=0, logs=tmp_path_factory.mktemp("ray"))
        try:
            yield ray.await_address(120, lambda: None)
        finally:
            ray.close()
