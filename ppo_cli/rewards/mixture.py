"""A mixture of rewards: each rollout goes to every part, and comes back with one score.

All that happens to a round runs in order on one thread: results arrive there, conditions open
there, and when the last result of a settled round is in, the round is mixed as a whole (scale,
clip, weigh, sum), in a fixed order, so that the same rollouts give the same bits whenever their
parts came. Metrics of a round: each part's scale, share of the variance, correlations.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ppo_cli.config.mixture import Condition, MixPart
from ppo_cli.moments import Affine, Moments, by_moments, clipped, correlation
from ppo_cli.records import Part, PlacedReward, Prompt, Rollout, Score
from ppo_cli.rewards.base import LabelledRollouts, Reward, RoundKind, Tell, tell_nobody

GROUP_EPS = 1e-6  # as in GRPO, where a group's spread divides too
CLOSED = Score(None, "its gate is closed")  # the mark of a part that was not asked


def by_group(raws: Sequence[float], groups: Sequence[Hashable]) -> dict[Hashable, Affine]:
    """Mean 0 and spread 1 within each group, divisor n - 1; a group of one comes to 0.

    Parts are normalised before they are summed, so that none vanishes in another's spread
    (GDPO, Liu et al. 2026, arXiv 2601.05242).
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for raw, group in zip(raws, groups, strict=True):
        members[group].append(raw)
    scalings = {}
    for group, values in members.items():
        m = Moments.of(values)
        slope = 1 / (math.sqrt(m.squares / (m.count - 1)) + GROUP_EPS) if m.varies else 0.0
        scalings[group] = Affine(m.mean, slope)
    return scalings


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True)
class Memory:
    """What scalings remember, by part: the run so far, and the first validation.

    Validations are scaled by the first one's moments, so that they compare with each other.
    `groups` holds the scalings of the last step's groups, for their greedy baselines.
    """

    running: Mapping[str, Moments] = field(default_factory=dict)
    anchor: Mapping[str, Moments] = field(default_factory=dict)
    groups: Mapping[str, Mapping[Hashable, Affine]] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """One part over a round: None where it failed or was not asked.

    `slopes` are what a share of the raw score is multiplied by: the scaling's slope where the
    score lies.
    """

    part: MixPart
    raw: tuple[float | None, ...]
    scaled: tuple[float | None, ...]
    slopes: tuple[float, ...]
    gated: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Mixed:
    """A round's scores in its order, each part's column, and what to remember."""

    scores: tuple[Score, ...]
    columns: Mapping[str, Column]
    memory: Memory


def mix(
    parts: Sequence[MixPart],
    rollouts: Sequence[Rollout],
    scores_by_rollout: Sequence[Mapping[str, Score]],
    kind: RoundKind,
    memory: Memory,
) -> Mixed:
    """Mix a round; `given` has each rollout's scores by part, CLOSED where a gate was shut."""
    columns: dict[str, Column] = {}
    for part in parts:
        scores = [scores_of[part.name] for scores_of in scores_by_rollout]
        columns[part.name], memory = _column(part, rollouts, scores, kind, memory)
    mixed = [_total(parts, columns, i, scores_of) for i, scores_of in enumerate(scores_by_rollout)]
    return Mixed(tuple(mixed), columns, memory)


def _column(
    part: MixPart,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    kind: RoundKind,
    memory: Memory,
) -> tuple[Column, Memory]:
    raw = [s.value for s in scores]
    groups = [r.prompt.uid for r in rollouts]
    # An imputed value is scaled like others, but teaches nothing.
    samples = [(v, g) for v, g, s in zip(raw, groups, scores, strict=True)
             if v is not None and s.judged]  # fmt: skip
    scale_of, memory = _scales(part, samples, kind, memory)
    scaled: list[float | None] = []
    slopes: list[float] = []
    for value, group in zip(raw, groups, strict=True):
        scale = scale_of.get(group, scale_of.get(None, Affine(slope=0.0)))
        x, slope = None if value is None else scale.of(value), scale.slope
        if x is not None and part.scaling == "sigmoid":
            x = sigmoid(x)
            slope *= x * (1 - x)
        scaled.append(None if x is None else clipped(x, part.bound))
        slopes.append(slope)
    # A closed gate counts as whatever adds least to the total, 0 or one of the round.
    least = (min if part.weight >= 0 else max)([0.0, *(x for x in scaled if x is not None)])
    shut = [score is CLOSED for score in scores]
    scaled = [least if closed else x for closed, x in zip(shut, scaled, strict=True)]
    failed = sum(v is None for v in raw) - sum(shut)
    return Column(part, tuple(raw), tuple(scaled), tuple(slopes), sum(shut), failed), memory


def _scales(
    part: MixPart, samples: Sequence[tuple[float, str]], kind: RoundKind, memory: Memory
) -> tuple[dict[Hashable, Affine], Memory]:
    """The scaling of each group; under None, that of all others."""
    name, values = part.name, [value for value, _ in samples]
    if part.scaling in ("none", "affine", "sigmoid"):
        return {None: Affine(part.mean or 0.0, 1 / (part.std or 1.0))}, memory
    if kind == "validation":
        anchor = memory.anchor.get(name) or Moments.of(values)
        if anchor.count:
            memory = replace(memory, anchor={**memory.anchor, name: anchor})
        # A rule that nothing has fulfilled yet must count as soon as something does.
        return {None: by_moments(anchor, otherwise=1.0)}, memory
    if part.scaling == "group":
        if kind == "baseline":
            return dict(memory.groups.get(name, {})), memory
        scalings = by_group(values, [group for _, group in samples])
        return scalings, replace(memory, groups={**memory.groups, name: scalings})
    running = memory.running.get(name, Moments())
    if kind == "train":
        running = running.merge(Moments.of(values))
        memory = replace(memory, running={**memory.running, name: running})
    return {None: by_moments(running)}, memory


def _total(
    parts: Sequence[MixPart],
    columns: Mapping[str, Column],
    row: int,
    part_scores: Mapping[str, Score],
) -> Score:
    """The score of one rollout."""
    lost = [p for p in parts if columns[p.name].scaled[row] is None]
    of_all = Score(
        None,
        reason="; ".join(f"{n}: {s.reason}" for n, s in part_scores.items() if s.reason),
        parts=_shown(parts, columns, row, part_scores),
        imputed="; ".join(f"{n}: {s.imputed}" for n, s in part_scores.items() if s.imputed),
        mixture={p.name: part_scores[p.name] for p in parts if part_scores[p.name] is not CLOSED},
    )
    scored = [p for p in parts if p not in lost]
    scored_weight = math.fsum(abs(p.weight) for p in scored)
    fatal = next((p for p in lost if p.on_failure == "fail" or not scored_weight), None)
    if fatal is not None:
        return replace(of_all, failure=f"{fatal.name}: {part_scores[fatal.name].failure}")
    # Those that are left share the weight of the lost ones.
    share = math.fsum(abs(p.weight) for p in parts) / scored_weight if lost else 1.0
    total = math.fsum(share * p.weight * (columns[p.name].scaled[row] or 0.0) for p in scored)
    steps = tuple(
        PlacedReward(s.end, share * p.weight * columns[p.name].slopes[row] * s.value, s.unit)
        for p in scored
        for s in part_scores[p.name].steps
    )
    return replace(of_all, value=total, steps=steps)


def _shown(
    parts: Sequence[MixPart],
    columns: Mapping[str, Column],
    row: int,
    part_scores: Mapping[str, Score],
) -> dict[str, Part]:
    """Every part, and below it what its source only reports."""
    shown: dict[str, Part] = {}
    for p in parts:
        column = columns[p.name]
        shown[p.name] = Part(column.raw[row], column.scaled[row])
        for name, inner in part_scores[p.name].parts.items():
            if inner.scaled is None:
                inner_name = name.removeprefix(f"{p.name}.")
                shown[f"{p.name}.{inner_name}"] = inner
    return shown


def describe_round(columns: Mapping[str, Column], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics under `reward/<part>/…`; the share of a part is of the weighted spreads' sum.

    `weight` is the share that the part's weight asks for, so that the two can be compared.
    """
    lengths = [float(len(r.token_ids)) for r in rollouts]
    spreads = {n: abs(c.part.weight) * Moments.of(c.scaled).std for n, c in columns.items()}
    weights = math.fsum(abs(c.part.weight) for c in columns.values())
    total_spread = math.fsum(spreads.values())
    metrics: dict[str, float] = {}
    for name, column in columns.items():
        key = f"reward/{name}"
        raw, scaled = Moments.of(column.raw), Moments.of(column.scaled)
        if raw.count:
            metrics[f"{key}/std"] = raw.std
        if scaled.count:
            metrics |= {f"{key}/scaled_mean": scaled.mean, f"{key}/scaled_std": scaled.std}
        metrics[f"{key}/failed"] = float(column.failed)
        metrics[f"{key}/failed_share"] = column.failed / len(rollouts)
        metrics[f"{key}/weight"] = abs(column.part.weight) / weights if weights else 0.0
        if total_spread > 0:
            metrics[f"{key}/share"] = spreads[name] / total_spread
        if column.part.only_if:
            metrics[f"{key}/gated_share"] = column.gated / len(rollouts)
        if (coefficient := correlation(column.raw, lengths)) is not None:
            metrics[f"{key}/length_correlation"] = coefficient
    for first, second in combinations(columns, 2):
        if (coefficient := correlation(columns[first].raw, columns[second].raw)) is not None:
            metrics[f"reward/correlation/{first}/{second}"] = coefficient
    return metrics


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

    def __init__(self, parts: Sequence[tuple[MixPart, Reward]]) -> None:
        self._settings = tuple(settings for settings, _ in parts)
        self._rewards = {settings.name: reward for settings, reward in parts}
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
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Try every part out."""
        for reward in self._rewards.values():
            reward.start(prompts, patient=patient, tell=tell)

    def prompts_for_reference(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """What any part wants."""
        uids = {p.uid for r in self._rewards.values() for p in r.prompts_for_reference(prompts)}
        return [prompt for prompt in prompts if prompt.uid in uids]

    def set_references(self, rollouts: Sequence[Rollout]) -> None:
        """Pass them on."""
        for reward in self._rewards.values():
            reward.set_references(rollouts)

    def set_labelled(self, labelled: Mapping[str, LabelledRollouts]) -> None:
        """Pass them on."""
        for reward in self._rewards.values():
            reward.set_labelled(labelled)

    def check_format(self, tell: Tell) -> None:
        """Pass it on."""
        for reward in self._rewards.values():
            reward.check_format(tell)

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

    def end_round(self, kind: RoundKind = "train") -> None:
        """Close the round; the parts that have a gate are settled when all gates are decided."""
        done, self._open = self._open, _Round()
        for name, reward in self._rewards.items():
            if name not in self._gates:
                reward.end_round(kind)
        self._inbox.put(partial(self._settle, done, kind))

    def waiting_for(self) -> str | None:
        """Say what the first part waits for that stands still."""
        reasons = (reward.waiting_for() for reward in self._rewards.values())
        return next((text for text in reasons if text is not None), None)

    def pop_metrics(self) -> dict[str, float]:
        """Every part's metrics, and what the last round says of the mixture."""
        metrics, self._metrics = dict(self._metrics), {}
        metrics_by_part = {name: reward.pop_metrics() for name, reward in self._rewards.items()}
        for name, measured in metrics_by_part.items():
            # Of two judges the one of that name, else the first, reports as `judge/…`.
            for key, value in measured.items():
                stage, _, rest = key.partition("/")
                rivals = [
                    other
                    for other, other_metrics in metrics_by_part.items()
                    if key in other_metrics
                ]
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
        for name, part_state in state.get("parts", {}).items():
            if name in self._rewards:
                self._rewards[name].load_state_dict(part_state)
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

    def _watch(self, round_: _Round, entry: _Entry, name: str, future: Future[Score]) -> None:
        future.add_done_callback(
            lambda done: self._inbox.put(partial(self._arrive, round_, entry, name, done))
        )

    def _give_up_all(self, memory: Memory) -> None:
        """Cancel every open round and take this memory, in turn with all that happens."""
        done = threading.Event()

        def forget() -> None:
            for round_ in self._rounds:
                for entry in round_.entries:
                    entry.future.cancel()
                round_.entries.clear()
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
                for round_ in self._rounds:
                    _break(round_, bug)
                self._rounds.clear()

    def _enter(self, round_: _Round, entry: _Entry) -> None:
        if round_ not in self._rounds:
            self._rounds.append(round_)
        round_.entries.append(entry)

    def _settle(self, round_: _Round, kind: RoundKind) -> None:
        round_.kind = kind
        self._go_on()

    def _arrive(self, round_: _Round, entry: _Entry, name: str, done: Future[Score]) -> None:
        if entry.future.done():
            return
        error = CancelledError(f"{name} was closed") if done.cancelled() else done.exception()
        if error is not None:
            self._give_up(round_, error)
            return
        self._take(round_, entry, name, done.result())
        self._go_on()

    def _take(self, round_: _Round, entry: _Entry, name: str, score: Score) -> None:
        """Note a part's score, and decide the gates that depend on it."""
        entry.scores[name] = score
        for gated, gate in self._gates.items():
            if gate.part != name:
                continue
            if score is CLOSED or (score.value is not None and not gate.holds(score.value)):
                self._take(round_, entry, gated, CLOSED)
            elif score.value is None:
                why = f"its gate {name} failed: {score.failure}"
                self._take(round_, entry, gated, Score.failed(why))
            else:
                round_.waiting.append((entry, gated))

    def _go_on(self) -> None:
        """Ask gated parts and finish rounds, strictly one round after the other."""
        while self._rounds:
            head = self._rounds[0]
            waiting, head.waiting = head.waiting, []
            for entry, name in waiting:
                self._watch(head, entry, name, self._rewards[name].submit(entry.rollout))
            if head.kind is None:
                return
            for name, gate in self._gates.items():
                # A gated part is settled once every gate before it is decided.
                decided = all(gate.part in entry.scores for entry in head.entries)
                if decided and name not in head.settled:
                    head.settled.add(name)
                    self._rewards[name].end_round(head.kind)
            if any(len(e.scores) < len(self._settings) for e in head.entries):
                return
            self._finish(head.entries, head.kind)
            self._rounds.popleft()

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

    def _give_up(self, round_: _Round, error: BaseException) -> None:
        """A part stops the run: what is complete keeps its score, the rest says why."""
        memory = self._memory
        complete = [e for e in round_.entries if len(e.scores) == len(self._settings)]
        if complete:
            self._finish(complete, round_.kind or "train")
        self._memory = memory  # a round that was not finished has taught nothing
        _break(round_, error)
        round_.entries.clear()
        self._rounds.remove(round_)
        self._go_on()


def _break(round_: _Round, error: BaseException) -> None:
    for entry in round_.entries:
        if not entry.future.done():
            entry.future.set_exception(error)
