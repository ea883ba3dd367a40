"""Which GPUs a worker sees: some of those that its node shows."""

from __future__ import annotations

import pytest

from ppo_cli.cluster.worker_process import visible_gpus
from ppo_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("gpus", "inherited", "seen"),
    [
        ((2, 3), None, "2,3"),
        ((2, 3), "", "2,3"),
        ((0, 2), "4, 5,6", "4,6"),
        ((1,), "GPU-aa,GPU-bb", "GPU-bb"),
        ((), "4,5", ""),
        ((), None, ""),
    ],
)
def test_numbers_count_among_those_that_the_node_shows(
    gpus: tuple[int, ...], inherited: str | None, seen: str
) -> None:
    assert visible_gpus(gpus, inherited) == seen


def test_a_gpu_that_is_not_shown_is_told() -> None:
    with pytest.raises(ConfigError, match=r"shows GPUs 4,5 .* no GPU number 2"):
        visible_gpus((1, 2), "4,5")
