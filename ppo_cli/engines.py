"""The engine of a run: which kind the config asks for, made when it is first needed.

A run that loses a worker gets a new one from the same place (`renew`); a reward model that
lives in the cluster is hosted by whichever engine is there at the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

from ppo_cli.config.effective import engine_name
from ppo_cli.config.placement import Placement, placement_of
from ppo_cli.config.schema import Config
from ppo_cli.engine.ahead import AheadEngine
from ppo_cli.engine.base import Engine, Sampling
from ppo_cli.engine.local import LocalEngine
from ppo_cli.loop import train_sampling
from ppo_cli.prompts import PromptOrder
from ppo_cli.records import Prompt
from ppo_cli.rewards.hosting import Host


@dataclass
class Engines:
    """Makes the engine of a run, and makes it anew when it was lost."""

    config: Config
    tokenizer: Any
    prompts: Sequence[Prompt]
    order: PromptOrder
    total_steps: int
    logs: Path
    tell: Callable[[str], None]
    stop_requested: Callable[[], str | None]
    # The Ray cluster that several nodes have formed; None starts one where it is needed.
    address: str | None = None
    _engine: Engine | None = field(default=None, init=False)
    _base: Any = field(default=None, init=False)  # the engine without what runs ahead
    # Rewards ask for their hosts in threads of their own, perhaps while an engine is made anew.
    _lock: RLock = field(default_factory=RLock, init=False)

    def get(self) -> Engine:
        """The engine; made at the first call."""
        with self._lock:
            if self._engine is None:
                self.tell(f"Loading {self.config.model.path}")
                self._base = self._make()
                self._engine = self._ahead(self._base)
            return self._engine

    def renew(self) -> Engine:
        """Another engine in the place of one that was lost."""
        with self._lock:
            self.close()
            return self.get()

    def close(self) -> None:
        """Close the engine, if there is one."""
        engine, self._engine, self._base = self._engine, None, None
        if engine is not None:
            engine.close()

    def hosts_rewards(self) -> bool:
        """Whether reward models live in workers of their own."""
        return engine_name(self.config) == "ray"

    def host(self, factory: Callable[[], Any], name: str) -> Host:
        """Let the cluster make an object and keep it."""
        with self._lock:
            self.get()
            devices = self._placement().reward
            hosted: Host = self._base.host(factory, role=f"reward {name}", devices=devices)
            return hosted

    def _placement(self) -> Placement:
        return placement_of(self.config)

    def _make(self) -> Engine:
        if engine_name(self.config) == "local":
            return LocalEngine(
                self.config, self.tokenizer, total_steps=self.total_steps, tell=self.tell,
                profiles=self.logs.absolute().parent / "profile",
            )  # fmt: skip
        from ppo_cli.engine.cluster.apart import ApartEngine

        return ApartEngine(
            self.config,
            self.tokenizer,
            total_steps=self.total_steps,
            placement=self._placement(),
            logs=self.logs,
            address=self.address,
            tell=self.tell,
            stop_requested=self.stop_requested,
        )

    def _ahead(self, engine: Engine) -> Engine:
        steps = self.config.trainer.async_steps
        return AheadEngine(engine, self._upcoming, steps) if steps else engine

    def _upcoming(self, ahead: int) -> tuple[Sequence[Prompt], Sampling] | None:
        """Prompts and sampling of a training step that is still to come."""
        step = self.order.taken + ahead
        if step > self.total_steps:
            return None
        chosen = [self.prompts[i] for i in self.order.peek(ahead)]
        return chosen, train_sampling(self.config, step)
