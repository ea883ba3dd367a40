"""A mixture of rewards: each rollout goes to every part, and comes back with one score.

All that happens to a round runs in order on one thread: results arrive there, conditions open
there, and when the last result of a settled round is in, the round is mixed as a whole. Metrics
of a round: each part's scale, share of the variance, correlations.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ppo_cli.config.mixture import Condition, MixPart
from ppo_cli.moments import Moments, correlation
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.rewards.mixing import CLOSED, Column, Memory, mix


def describe_round(columns: Mapping[str, Column], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics under `reward/<part>/…`; the share of a part is of the weighted spreads' sum.

    `weight` is the share that the part's weight asks for, so that the two can be compared.
    """
    lengths = [float(len(r.token_ids)) for r in rollouts]
    spreads = {n: abs(c.part.weight) * Moments.of(_known(c.scaled)).std for n, c in columns.items()}
    weights = math.fsum(abs(c.part.weight) for c in columns.values())
    whole = math.fsum(spreads.values())
    metrics: dict[str, float] = {}
    for name, column in columns.items():
        key = f"reward/{name}"
        raw, scaled = Moments.of(_known(column.raw)), Moments.of(_known(column.scaled))
        if raw.count:
            metrics[f"{key}/std"] = raw.std
        if scaled.count:
            metrics |= {f"{key}/scaled_mean": scaled.mean, f"{key}/scaled_std": scaled.std}
        metrics[f"{key}/failed"] = float(column.failed)
        metrics[f"{key}/failed_share"] = column.failed / len(rollouts)
        metrics[f"{key}/weight"] = abs(column.part.weight) / weights if weights else 0.0
        if whole > 0:
            metrics[f"{key}/share"] = spreads[name] / whole
        if column.part.only_if:
            metrics[f"{key}/gated_share"] = column.gated / len(rollouts)
        metrics |= _together(f"{key}/length_correlation", column.raw, lengths)
    for one, other in combinations(columns, 2):
        metrics |= _together(
            f"reward/correlation/{one}/{other}", columns[one].raw, columns[other].raw
        )
    return metrics


def _known(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _together(key: str, xs: Sequence[float | None], ys: Sequence[float | None]) -> dict[str, float]:
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    found = correlation([x for x, _ in pairs], [y for _, y in pairs])
    return {} if found is None else {key: found}


@dataclass(frozen=True)
class BuiltPart:
    """The settings of a part, and the reward that scores it."""

    settings: MixPart
    reward: Reward


@dataclass(eq=False)
class _Entry:
    """One rollout on its way through the parts."""

    rollout: Rollout
    future: Future[Score] = field(default_factory=Future)
    scores: dict[str, Score] = field(default_factory=dict)


@dataclass(eq=False)
class _Round:
    """Rollouts that are mixed together; `kind` is None until the round is settled."""

    entries: list[_Entry] = field(default_factory=list)
    kind: RoundKind | None = None
    waiting: list[tuple[_Entry, str]] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)


class CompositeReward(Reward):
    """Scores by the weighted sum of its parts; see MixPart for every setting."""

    name = "mixture"

    def __init__(self, parts: Sequence[BuiltPart]) -> None:
        self._parts = tuple(parts)
        self._settings = tuple(part.settings for part in parts)
        self._rewards = {part.settings.name: part.reward for part in parts}
        self._gates: dict[str, Condition] = {
            p.name: gate for p in self._settings if (gate := p.gate) is not None
        }
        self._memory = Memory()
        self._metrics: dict[str, float] = {}
        self._open = _Round()  # the caller's thread adds to it
        self._closed = False
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Below this line everything belongs to the thread.
        self._rounds: deque[_Round] = deque()
        self._thread = threading.Thread(target=self._work, name="mixture", daemon=True)
        self._thread.start()

    def start(
        self,
        prompts: Sequence[Prompt],
        *,
        patient: bool = False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Try every part out."""
        for reward in self._rewards.values():
            reward.start(prompts, patient=patient, tell=tell)

    def begin_step(self, step: int) -> None:
        """Pass it on."""
        for reward in self._rewards.values():
            reward.begin_step(step)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Hand one rollout to every part without a gate, at once; to others when theirs opens."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        entry, current = _Entry(rollout), self._open
        self._inbox.put(partial(self._enter, current, entry))
        for name, reward in self._rewards.items():
            if name not in self._gates:
                self._watch(current, entry, name, reward.submit(rollout))
        return entry.future

    def settle(self, kind: RoundKind = "train") -> None:
        """Close the round; the parts that have a gate are settled when all gates are decided."""
        done, self._open = self._open, _Round()
        for name, reward in self._rewards.items():
            if name not in self._gates:
                reward.settle(kind)
        self._inbox.put(partial(self._settle, done, kind))

    def waiting_for(self) -> str | None:
        """Say what the first part waits for that stands still."""
        said = (reward.waiting_for() for reward in self._rewards.values())
        return next((text for text in said if text is not None), None)

    def measure(self) -> dict[str, float]:
        """Every part's metrics, and what the last round says of the mixture."""
        metrics, self._metrics = dict(self._metrics), {}
        own = {name: reward.measure() for name, reward in self._rewards.items()}
        for name, measured in own.items():
            # Of two judges the one of that name, else the first, reports as `judge/…`.
            for key, value in measured.items():
                stage, _, rest = key.partition("/")
                rivals = [other for other, theirs in own.items() if key in theirs]
                first = stage if stage in rivals else rivals[0]
                metrics[key if name == first else f"{stage}_{name}/{rest}"] = value
        return metrics

    def attach(self, folder: Path) -> None:
        """Pass the run's folder on."""
        for reward in self._rewards.values():
            reward.attach(folder)

    def state_dict(self) -> dict[str, Any]:
        """The running scales, and what the parts remember."""
        memory = self._memory
        return {
            "parts": {name: reward.state_dict() for name, reward in self._rewards.items()},
            "running": {name: m.state_dict() for name, m in memory.running.items()},
            "anchor": {name: m.state_dict() for name, m in memory.anchor.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same scales; a part that is new begins afresh.

        Rounds that are under way are given up: what still comes of them must not be learnt.
        """
        for name, kept in state.get("parts", {}).items():
            if name in self._rewards:
                self._rewards[name].load_state_dict(kept)
        memory = Memory(
            running={n: Moments.from_state(m) for n, m in state.get("running", {}).items()},
            anchor={n: Moments.from_state(m) for n, m in state.get("anchor", {}).items()},
        )
        self._give_up_all(memory)

    def close(self) -> None:
        """Close every part, whatever one of them says."""
        if self._closed:
            return
        self._closed = True
        error: Exception | None = None
        for reward in self._rewards.values():
            try:
                reward.close()
            except Exception as problem:
                error = error or problem
        self._give_up_all(self._memory)
        self._inbox.put(None)
        self._thread.join(timeout=10.0)
        if error is not None:
            raise error

    def _watch(self, found: _Round, entry: _Entry, name: str, future: Future[Score]) -> None:
        future.add_done_callback(
            lambda done: self._inbox.put(partial(self._arrive, found, entry, name, done))
        )

    def _give_up_all(self, memory: Memory) -> None:
        """Cancel every open round and take this memory, in turn with all that happens."""
        done = threading.Event()

        def forget() -> None:
            for found in self._rounds:
                for entry in found.entries:
                    entry.future.cancel()
                found.entries.clear()
            self._rounds.clear()
            self._memory = memory
            done.set()

        self._inbox.put(forget)
        done.wait(timeout=60.0)

    def _work(self) -> None:
        while (message := self._inbox.get()) is not None:
            try:
                message()
            except Exception as bug:  # nobody may wait for ever
                for found in self._rounds:
                    _break(found, bug)
                self._rounds.clear()

    def _enter(self, found: _Round, entry: _Entry) -> None:
        if found not in self._rounds:
            self._rounds.append(found)
        found.entries.append(entry)

    def _settle(self, found: _Round, kind: RoundKind) -> None:
        found.kind = kind
        self._go_on()

    def _arrive(self, found: _Round, entry: _Entry, name: str, done: Future[Score]) -> None:
        if entry.future.done():
            return
        error = CancelledError(f"{name} was closed") if done.cancelled() else done.exception()
        if error is not None:
            self._give_up(found, error)
            return
        self._take(found, entry, name, done.result())
        self._go_on()

    def _take(self, found: _Round, entry: _Entry, name: str, score: Score) -> None:
        """Note a part's score, and decide the gates that depend on it."""
        entry.scores[name] = score
        for gated, gate in self._gates.items():
            if gate.part != name:
                continue
            if score is CLOSED or (score.value is not None and not gate.holds(score.value)):
                self._take(found, entry, gated, CLOSED)
            elif score.value is None:
                why = f"its gate {name} failed: {score.failure}"
                self._take(found, entry, gated, Score.failed(why))
            else:
                found.waiting.append((entry, gated))

    def _go_on(self) -> None:
        """Ask gated parts and finish rounds, strictly one round after the other."""
        while self._rounds:
            head = self._rounds[0]
            waiting, head.waiting = head.waiting, []
            for entry, name in waiting:
                self._watch(head, entry, name, self._rewards[name].submit(entry.rollout))
            if head.kind is None:
                return
            self._settle_gated(head, head.kind)
            if any(len(e.scores) < len(self._parts) for e in head.entries):
                return
            self._finish(head.entries, head.kind)
            self._rounds.popleft()

    def _settle_gated(self, head: _Round, kind: RoundKind) -> None:
        """Settle each gated part once every gate before it is decided."""
        for name, gate in self._gates.items():
            decided = all(gate.part in entry.scores for entry in head.entries)
            if decided and name not in head.settled:
                head.settled.add(name)
                self._rewards[name].settle(kind)

    def _finish(self, entries: Sequence[_Entry], kind: RoundKind) -> None:
        ordered = sorted(entries, key=lambda e: e.rollout.key)
        rollouts = [e.rollout for e in ordered]
        mixed = mix(self._settings, rollouts, [e.scores for e in ordered], kind, self._memory)
        self._memory = mixed.memory
        if kind != "baseline":
            self._metrics = describe_round(mixed.columns, rollouts)
        for entry, score in zip(ordered, mixed.scores, strict=True):
            if not entry.future.done():
                entry.future.set_result(score)

    def _give_up(self, found: _Round, error: BaseException) -> None:
        """A part stops the run: what is complete keeps its score, the rest says why."""
        memory = self._memory
        whole = [e for e in found.entries if len(e.scores) == len(self._parts)]
        if whole:
            self._finish(whole, found.kind or "train")
        self._memory = memory  # a round that was not finished has taught nothing
        _break(found, error)
        found.entries.clear()
        self._rounds.remove(found)
        self._go_on()


def _break(found: _Round, error: BaseException) -> None:
    for entry in found.entries:
        if not entry.future.done():
            entry.future.set_exception(error)
