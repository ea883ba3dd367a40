"""How the learner's weights reach the samplers, and when samplers sleep.

Through shared memory: the first rank lays them down once, each node fetches them once, all its
samplers read them there. Or from process to process (`exchange.py`), once both have met.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppo_cli.engine.cluster.cluster import Cluster
from ppo_cli.engine.cluster.failures import Member
from ppo_cli.engine.cluster.plans import ExchangePlan

# The first rank waits for the samplers, and can say whose fault it is, so it gives up first.
AFTER_RANK_S = 5.0


class Publisher:
    """Keeps the samplers' weights equal to the learner's; `sleepers` sleep while it trains."""

    def __init__(
        self,
        cluster: Cluster,
        learners: Sequence[Member],
        samplers: Sequence[Member],
        *,
        sleepers: Sequence[Member],
    ) -> None:
        self._cluster = cluster
        self._learners = learners
        self._samplers = samplers
        self._sleepers = sleepers
        self._awake = True
        self._connected = False

    def connect(self, plan: ExchangePlan) -> None:
        """Have learner and samplers meet; from now on weights go from process to process."""
        self._all_learners("connect", plan)
        self._connected = True

    def wake(self) -> None:
        """Make sure that samplers can sample: what slept gets its weights anew."""
        if not self._awake:
            self.send()

    def sleep(self) -> None:
        """Leave the devices to the learner, where they are shared."""
        if self._sleepers and self._awake:
            self._all(self._sleepers, "sleep")
            self._awake = False

    def send(self) -> None:
        """Bring the present weights to all samplers."""
        if self._connected:
            self._rouse()
            self._all_learners("send_weights")
            return
        calls = [self._cluster.ask(learner, "weights") for learner in self._learners]
        self._cluster.waits.collect(calls)
        self._rouse()
        # The reference travels: samplers read what the first rank laid down.
        self._all(self._samplers, "load_weights", calls[0].ref)

    def _rouse(self) -> None:
        if not self._awake:
            # On shared devices samplers cannot have what the learner's allocator only keeps.
            self._all_learners("spare_memory")
            self._all(self._sleepers, "wake_up")
            self._awake = True

    def _all_learners(self, name: str, *args: object) -> None:
        waits = self._cluster.waits
        calls = [self._cluster.ask(one, name, "call", *args) for one in self._learners]
        waits.collect(calls, waits.timeout_s + AFTER_RANK_S)

    def _all(self, samplers: Sequence[Member], name: str, *args: object) -> None:
        waits = self._cluster.waits
        waits.collect([self._cluster.ask(s, name, "call", *args) for s in samplers])
