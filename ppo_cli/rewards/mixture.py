"""A mixture of rewards: sends each rollout to every part, and returns one weighted score.

One thread handles all events of a round in order: results of parts arrive there, and conditions
are decided there. When the last result of an ended round has arrived, the whole round is mixed
(scaled, clipped, weighted, summed) in a fixed order, so that the same rollouts give the same bits
in any order of arrival. Metrics of a round: each part's scale, share of the variance,
correlations.
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

from ppo_cli.config.mixture import Condition, MixPart, find_measured
from ppo_cli.moments import Affine, Moments, clip, correlation, standardise
from ppo_cli.records import Part, PlacedReward, Prompt, Rollout, Score
from ppo_cli.rewards.base import (
    LabelledRollouts,
    Reward,
    RoundKind,
    RunLength,
    Tell,
    tell_nobody,
)

GROUP_EPS = 1e-6  # added to a group's standard deviation, as in GRPO
# The score of a part that was not asked because its condition failed; compared by identity.
GATE_CLOSED = Score(None, "its gate is closed")


def scale_by_group(raws: Sequence[float], groups: Sequence[Hashable]) -> dict[Hashable, Affine]:
    """Return each group's scaling to mean 0 and standard deviation 1 (divisor n - 1).

    A group of one is scaled to 0. Parts are normalised before they are summed, so that none
    disappears in another's spread (GDPO, Liu et al. 2026, arXiv 2601.05242).
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for raw, group in zip(raws, groups, strict=True):
        members[group].append(raw)
    scalings = {}
    for group, values in members.items():
        m = Moments.from_values(values)
        slope = 1 / (math.sqrt(m.squares / (m.count - 1)) + GROUP_EPS) if m.varies else 0.0
        scalings[group] = Affine(m.mean, slope)
    return scalings


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True)
class ScalingState:
    """State of the scalings by part: moments of the run so far, and of the first validation.

    Validations are scaled by the first one's moments, so that they are comparable. `groups` has
    the scalings of the last step's groups, for their greedy baselines.
    """

    running: Mapping[str, Moments] = field(default_factory=dict)
    anchor: Mapping[str, Moments] = field(default_factory=dict)
    groups: Mapping[str, Mapping[Hashable, Affine]] = field(default_factory=dict)


@dataclass(frozen=True)
class Column:
    """The scores of one part over a round; None where it failed or was not asked.

    `slopes` are the derivatives of the scaling at each raw score: placed rewards, which are shares
    of the raw score, are multiplied by them.
    """

    part: MixPart
    raw: tuple[float | None, ...]
    scaled: tuple[float | None, ...]
    slopes: tuple[float, ...]
    gated: int = 0
    failed: int = 0


@dataclass(frozen=True)
class MixedRound:
    """The scores of a round in its order, each part's column, and the new state of the scalings."""

    scores: tuple[Score, ...]
    columns: Mapping[str, Column]
    state: ScalingState


def mix(
    parts: Sequence[MixPart],
    rollouts: Sequence[Rollout],
    scores_by_rollout: Sequence[Mapping[str, Score]],
    kind: RoundKind,
    state: ScalingState,
) -> MixedRound:
    """Return the mixed scores of a round, each part's column, and the new scaling state.

    `scores_by_rollout` has each rollout's score of every part.
    """
    columns: dict[str, Column] = {}
    for part in parts:
        scores = [scores_of[part.name] for scores_of in scores_by_rollout]
        columns[part.name], state = _scale_part(part, rollouts, scores, kind, state)
    mixed = [
        _mix_row(parts, columns, i, scores_of) for i, scores_of in enumerate(scores_by_rollout)
    ]
    return MixedRound(tuple(mixed), columns, state)


def _scale_part(
    part: MixPart,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    kind: RoundKind,
    state: ScalingState,
) -> tuple[Column, ScalingState]:
    """Return the raw and scaled scores of one part over a round, and the new scaling state.

    A closed gate counts as the value that adds least to the total. Failed scores stay None.
    """
    raw = [s.value for s in scores]
    groups = [r.prompt.uid for r in rollouts]
    # An imputed value is scaled like others, but does not change the moments.
    samples = [(v, g) for v, g, s in zip(raw, groups, scores, strict=True)
             if v is not None and s.judged]  # fmt: skip
    scale_of, state = _scalings(part, samples, kind, state)
    # Scale and clip each score; a group without a scaling gets 0.
    scaled: list[float | None] = []
    slopes: list[float] = []
    for value, group in zip(raw, groups, strict=True):
        scale = scale_of.get(group, scale_of.get(None, Affine(slope=0.0)))
        x, slope = None if value is None else scale.of(value), scale.slope
        if x is not None and part.scaling == "sigmoid":
            x = sigmoid(x)
            slope *= x * (1 - x)
        scaled.append(None if x is None else clip(x, part.bound))
        slopes.append(slope)
    # A closed gate counts as the value that adds least to the total: 0 or one of the round's.
    least = (min if part.weight >= 0 else max)([0.0, *(x for x in scaled if x is not None)])
    shut = [score is GATE_CLOSED for score in scores]
    scaled = [least if closed else x for closed, x in zip(shut, scaled, strict=True)]
    failed = sum(v is None for v in raw) - sum(shut)
    return Column(part, tuple(raw), tuple(scaled), tuple(slopes), sum(shut), failed), state


def _scalings(
    part: MixPart, samples: Sequence[tuple[float, str]], kind: RoundKind, state: ScalingState
) -> tuple[dict[Hashable, Affine], ScalingState]:
    """Return the scaling of each group, that of all other groups under None, and the new state."""
    name, values = part.name, [value for value, _ in samples]
    if part.scaling in ("none", "affine", "sigmoid"):
        return {None: Affine(part.mean or 0.0, 1 / (part.std or 1.0))}, state
    if kind == "validation":
        anchor = state.anchor.get(name) or Moments.from_values(values)
        if anchor.count:
            state = replace(state, anchor={**state.anchor, name: anchor})
        # A part without spread in the first validation keeps its raw slope, so that a rule which
        # nothing has fulfilled yet counts as soon as something does.
        return {None: standardise(anchor, otherwise=1.0)}, state
    if part.scaling == "group":
        if kind == "baseline":
            return dict(state.groups.get(name, {})), state
        scalings = scale_by_group(values, [group for _, group in samples])
        return scalings, replace(state, groups={**state.groups, name: scalings})
    running = state.running.get(name, Moments())
    if kind == "train":
        running = running.merge(Moments.from_values(values))
        state = replace(state, running={**state.running, name: running})
    return {None: standardise(running)}, state


def _mix_row(
    parts: Sequence[MixPart],
    columns: Mapping[str, Column],
    row: int,
    part_scores: Mapping[str, Score],
) -> Score:
    """Return the weighted sum of one rollout's scaled part scores.

    A failed part with on_failure=fail makes it a failure, and so does a rollout where no part with
    a weight has a score. Otherwise the other parts take over the weight of a failed one. A part
    that is only measured takes nothing away.
    """
    # What every score of a mixture records, failed or not.
    lost = [p for p in parts if columns[p.name].scaled[row] is None]
    of_all = Score(
        None,
        reason="; ".join(f"{n}: {s.reason}" for n, s in part_scores.items() if s.reason),
        parts=_reported_parts(parts, columns, row, part_scores),
        imputed="; ".join(f"{n}: {s.imputed}" for n, s in part_scores.items() if s.imputed),
        mixture={
            p.name: part_scores[p.name] for p in parts if part_scores[p.name] is not GATE_CLOSED
        },
    )
    scored = [p for p in parts if p not in lost]
    scored_weight = math.fsum(abs(p.weight) for p in scored)
    measured = find_measured(parts)
    counted = [p for p in lost if p not in measured]
    fatal = next((p for p in counted if p.on_failure == "fail" or not scored_weight), None)
    if fatal is not None:
        return replace(of_all, failure=f"{fatal.name}: {part_scores[fatal.name].failure}")
    # The remaining parts share the weight of the failed ones.
    share = math.fsum(abs(p.weight) for p in parts) / scored_weight if lost else 1.0
    total = math.fsum(share * p.weight * (columns[p.name].scaled[row] or 0.0) for p in scored)
    steps = tuple(
        PlacedReward(s.end, share * p.weight * columns[p.name].slopes[row] * s.value, s.unit)
        for p in scored
        for s in part_scores[p.name].steps
    )
    return replace(of_all, value=total, steps=steps)


def _reported_parts(
    parts: Sequence[MixPart],
    columns: Mapping[str, Column],
    row: int,
    part_scores: Mapping[str, Score],
) -> dict[str, Part]:
    """Return every part's raw and scaled score, and below it what the part only reports."""
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
    """Return metrics under `reward/<part>/…`.

    `share` is the part's weighted spread divided by the sum over all parts. `weight` is its weight
    divided by the sum of weights, which `share` can be compared with.
    """
    # Correlations are of raw scores: scaling does not change them.
    lengths = [float(r.policy_tokens) for r in rollouts]
    spreads = {
        n: abs(c.part.weight) * Moments.from_values(c.scaled).std for n, c in columns.items()
    }
    weights = math.fsum(abs(c.part.weight) for c in columns.values())
    total_spread = math.fsum(spreads.values())
    metrics: dict[str, float] = {}
    for name, column in columns.items():
        key = f"reward/{name}"
        raw, scaled = Moments.from_values(column.raw), Moments.from_values(column.scaled)
        if raw.count:
            metrics[f"{key}/std"] = raw.std
        if scaled.count:
            metrics |= {f"{key}/scaled_mean": scaled.mean, f"{key}/scaled_std": scaled.std}
        metrics[f"{key}/failed"] = float(column.failed)
        metrics[f"{key}/failed_share"] = column.failed / len(rollouts)
        metrics[f"{key}/weight"] = abs(column.part.weight) / weights if weights else 0.0
        if total_spread > 0:
            metrics[f"{key}/share"] = spreads[name] / total_spread
        # Only parts with a gate report how often it was closed.
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
    """One rollout, its future, and the scores that have arrived."""

    rollout: Rollout
    future: Future[Score] = field(default_factory=Future)
    scores: dict[str, Score] = field(default_factory=dict)


@dataclass(eq=False)
class _Round:
    """Rollouts that are mixed together; `kind` is None until the round has ended.

    `opened` has the gated parts to ask next; `ended`: gated parts whose round was ended.
    """

    entries: list[_Entry] = field(default_factory=list)
    kind: RoundKind | None = None
    opened: list[tuple[_Entry, str]] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)


class CompositeReward(Reward):
    """The reward that returns the weighted sum of its parts; see MixPart for the settings."""

    name = "mixture"

    def __init__(self, parts: Sequence[tuple[MixPart, Reward]]) -> None:
        self._settings = tuple(settings for settings, _ in parts)
        self._rewards = {settings.name: reward for settings, reward in parts}
        self._gates: dict[str, Condition] = {
            p.name: gate for p in self._settings if (gate := p.gate) is not None
        }
        self._scaling = ScalingState()
        self._metrics: dict[str, float] = {}
        self._open = _Round()  # the round that `submit` adds to, on the caller's thread
        self._closed = False
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Only the thread uses what follows.
        self._rounds: deque[_Round] = deque()
        self._thread = threading.Thread(target=self._work, name="mixture", daemon=True)
        self._thread.start()

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Test every part."""
        for reward in self._rewards.values():
            reward.start(prompts, patient=patient, tell=tell)

    def prompts_for_reference(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the prompts that any part needs."""
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

    def read_wishes(
        self, text: str, features: Sequence[str], tell: Tell
    ) -> Mapping[str, int] | None:
        """Ask the first judge that is asked at all."""
        wishes = (r.read_wishes(text, features, tell) for r in self._rewards.values())
        return next((answer for answer in wishes if answer is not None), None)

    def begin_run(self, length: RunLength) -> None:
        """Pass it on."""
        for reward in self._rewards.values():
            reward.begin_run(length)

    def begin_step(self, step: int) -> None:
        """Pass it on."""
        for reward in self._rewards.values():
            reward.begin_step(step)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Submit one rollout to every part without a gate; to gated parts when their gate opens."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        # `_add` is queued first, so that the round knows the entry before a result arrives.
        entry, current = _Entry(rollout), self._open
        self._inbox.put(partial(self._add, current, entry))
        for name, reward in self._rewards.items():
            if name not in self._gates:
                self._watch(current, entry, name, reward.submit(rollout))
        return entry.future

    def end_round(self, kind: RoundKind = "train") -> None:
        """End the round; a gated part's round ends once all its gates are decided."""
        done, self._open = self._open, _Round()
        for name, reward in self._rewards.items():
            if name not in self._gates:
                reward.end_round(kind)
        self._inbox.put(partial(self._end, done, kind))

    def waiting_for(self) -> str | None:
        """Return the sentence of the first part that is paused."""
        reasons = (reward.waiting_for() for reward in self._rewards.values())
        return next((text for text in reasons if text is not None), None)

    def pop_metrics(self) -> dict[str, float]:
        """Return every part's metrics, and the mixture's of the last round."""
        metrics, self._metrics = dict(self._metrics), {}
        metrics_by_part = {name: reward.pop_metrics() for name, reward in self._rewards.items()}
        for name, measured in metrics_by_part.items():
            # Of several judges, the one named `judge`, otherwise the first, reports as `judge/…`.
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
        """Pass the run's folder to every part."""
        for reward in self._rewards.values():
            reward.attach(folder)

    def state_dict(self) -> dict[str, Any]:
        """Return the moments of the scalings and the state of every part."""
        memory = self._scaling
        return {
            "parts": {name: reward.state_dict() for name, reward in self._rewards.items()},
            "running": {name: m.state_dict() for name, m in memory.running.items()},
            "anchor": {name: m.state_dict() for name, m in memory.anchor.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scalings and the parts; a new part starts from scratch.

        Open rounds are cancelled: their remaining results must not change the scalings.
        """
        for name, part_state in state.get("parts", {}).items():
            if name in self._rewards:
                self._rewards[name].load_state_dict(part_state)
        memory = ScalingState(
            running={n: Moments.from_state(m) for n, m in state.get("running", {}).items()},
            anchor={n: Moments.from_state(m) for n, m in state.get("anchor", {}).items()},
        )
        self._cancel_all(memory)

    def close(self) -> None:
        """Close every part, even if one raises; then raise the first error."""
        if self._closed:
            return
        self._closed = True
        error: Exception | None = None
        for reward in self._rewards.values():
            try:
                reward.close()
            except Exception as problem:
                error = error or problem
        self._cancel_all(self._scaling)
        self._inbox.put(None)
        self._thread.join(timeout=10.0)
        if error is not None:
            raise error

    def _watch(self, round_: _Round, entry: _Entry, name: str, future: Future[Score]) -> None:
        future.add_done_callback(
            lambda done: self._inbox.put(partial(self._arrive, round_, entry, name, done))
        )

    def _cancel_all(self, scaling: ScalingState) -> None:
        """Cancel every open round and set the state of the scalings.

        This happens on the mixture's thread, in order with other events; the caller waits for it.
        """
        done = threading.Event()

        def cancel() -> None:
            """Cancel the futures of all open rounds, drop the rounds, and set the scaling."""
            for round_ in self._rounds:
                for entry in round_.entries:
                    entry.future.cancel()
                round_.entries.clear()
            self._rounds.clear()
            self._scaling = scaling
            done.set()

        self._inbox.put(cancel)
        done.wait(timeout=60.0)

    def _work(self) -> None:
        """Handle events in their order, on the thread, until None arrives."""
        while (message := self._inbox.get()) is not None:
            try:
                message()
            except Exception as bug:  # callers must not wait for ever
                for round_ in self._rounds:
                    _fail_entries(round_, bug)
                self._rounds.clear()

    def _add(self, round_: _Round, entry: _Entry) -> None:
        if round_ not in self._rounds:
            self._rounds.append(round_)
        round_.entries.append(entry)

    def _end(self, round_: _Round, kind: RoundKind) -> None:
        round_.kind = kind
        self._advance()

    def _arrive(self, round_: _Round, entry: _Entry, name: str, done: Future[Score]) -> None:
        """Record the score of one part for a rollout, and go on with what it completes.

        An error of the part fails the whole round.
        """
        if entry.future.done():
            return
        error = CancelledError(f"{name} was closed") if done.cancelled() else done.exception()
        if error is not None:
            self._fail_round(round_, error)
            return
        self._record(round_, entry, name, done.result())
        self._advance()

    def _record(self, round_: _Round, entry: _Entry, name: str, score: Score) -> None:
        """Store a part's score, and decide the gates that depend on it."""
        entry.scores[name] = score
        for gated, gate in self._gates.items():
            if gate.part != name:
                continue
            # A closed gate closes the gates behind it; a failed one fails them.
            if score is GATE_CLOSED or (score.value is not None and not gate.holds(score.value)):
                self._record(round_, entry, gated, GATE_CLOSED)
            elif score.value is None:
                why = f"its gate {name} failed: {score.failure}"
                self._record(round_, entry, gated, Score.failed(why))
            else:
                round_.opened.append((entry, gated))

    def _advance(self) -> None:
        """Submit rollouts to parts whose gates opened, and finish complete rounds in order."""
        while self._rounds:
            head = self._rounds[0]
            opened, head.opened = head.opened, []
            # Asking may finish at once; its result arrives as a later event.
            for entry, name in opened:
                self._watch(head, entry, name, self._rewards[name].submit(entry.rollout))
            if head.kind is None:
                return
            for name, gate in self._gates.items():
                # A gated part's round ends when its gate is decided for every rollout.
                decided = all(gate.part in entry.scores for entry in head.entries)
                if decided and name not in head.ended:
                    head.ended.add(name)
                    self._rewards[name].end_round(head.kind)
            if any(len(e.scores) < len(self._settings) for e in head.entries):
                return
            self._finish(head.entries, head.kind)
            self._rounds.popleft()

    def _finish(self, entries: Sequence[_Entry], kind: RoundKind) -> None:
        """Mix entries that have the scores of all parts, and resolve their futures.

        Also updates the state of the scalings and, unless these are baselines, the metrics.
        """
        # A fixed order, so that sums do not depend on which response finished first.
        ordered = sorted(entries, key=lambda e: e.rollout.key)
        rollouts = [e.rollout for e in ordered]
        mixed = mix(self._settings, rollouts, [e.scores for e in ordered], kind, self._scaling)
        self._scaling = mixed.state
        if kind != "baseline":
            self._metrics = describe_round(mixed.columns, rollouts)
        for entry, score in zip(ordered, mixed.scores, strict=True):
            if not entry.future.done():
                entry.future.set_result(score)

    def _fail_round(self, round_: _Round, error: BaseException) -> None:
        """Handle a part's fatal error: complete rollouts get their score, the others the error."""
        memory = self._scaling
        complete = [e for e in round_.entries if len(e.scores) == len(self._settings)]
        if complete:
            self._finish(complete, round_.kind or "train")
        self._scaling = memory  # an incomplete round does not change the scalings
        _fail_entries(round_, error)
        round_.entries.clear()
        self._rounds.remove(round_)
        self._advance()


def _fail_entries(round_: _Round, error: BaseException) -> None:
    for entry in round_.entries:
        if not entry.future.done():
            entry.future.set_exception(error)
