"""Fixtures of the commands about rewards; each test runs in an empty folder."""

from tests.cli.conftest import desk as desk
from tests.scoring.commands import bench as bench
from tests.scoring.commands import few_resamples as few_resamples
from tests.scoring.commands import server as server
