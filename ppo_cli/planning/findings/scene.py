"""What the rules look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppo_cli.config.schema.run import Config
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.resolved import Resolved


@dataclass(frozen=True)
class Scene:
    """The settings of a run, as set and as they hold, its machine and its variables."""

    resolved: Resolved
    environ: Mapping[str, str]

    @property
    def config(self) -> Config:
        """What holds."""
        return self.resolved.config

    @property
    def requested(self) -> Config:
        """What was set."""
        return self.resolved.requested

    @property
    def bypass(self) -> bool:
        """Whether old log-probs are those of the sampler."""
        return self.config.algorithm.rollout_correction.bypass_mode

    @property
    def machine(self) -> Machine:
        """The machine of the run."""
        return self.resolved.machine
