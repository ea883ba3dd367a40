"""Fixtures of the commands about rewards; each test runs in an empty folder."""

import pytest

from tests.cli.conftest import desk as desk
from tests.scoring.commands import bench as bench
from tests.scoring.commands import few_resamples as few_resamples
from tests.scoring.commands import server as server


@pytest.fixture
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are handed in, and looked at, after short pauses."""
    monkeypatch.setattr("ppo_cli.extras.lab.batches.judge.QUIET_S", 0.2)
    monkeypatch.setattr("ppo_cli.extras.lab.batches.judge.FIRST_POLL_S", 0.02)
