"""Fixtures of the commands that test rewards: those of `ppo reward`."""

from tests.scoring.commands import bench as bench
from tests.scoring.commands import few_resamples as few_resamples
from tests.scoring.commands import server as server
