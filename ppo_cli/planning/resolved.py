"""The outcome of `resolve`: what was set, what holds here, where each value came from, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.settle import Settled, settle


@dataclass(frozen=True)
class Resolved(Settled):
    """A checked configuration, where each value came from, and remarks to print.

    `config` is what holds on `machine`, but for the settings that the memory plan decides.
    `function` is the Python function that was called with them, "" for a command line.
    """

    origins: dict[str, str]
    notes: tuple[str, ...] = ()
    foreign: bool = False
    function: str = ""

    def amend(self, values: Mapping[str, Any], origin: str | None = None) -> Resolved:
        """Return the settings with these values, and with what follows from them."""
        requested = with_settings(self.requested, values)
        settled = settle(requested, self.machine)
        origins = {} if origin is None else dict.fromkeys(values, origin)
        return replace(
            self, requested=requested, config=settled.config, why=settled.why,
            origins=self.origins | origins,
        )  # fmt: skip
