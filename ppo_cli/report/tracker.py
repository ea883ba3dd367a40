"""Writes metrics.jsonl and the rollouts of a run, and passes them on to screen and loggers.

Everything in metrics.jsonl but the `time/` and `perf/` keys is the same, bit for bit, whether
a run was interrupted or not. A line is on the disk before `step` returns.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ppo_cli.config.schema.run import Config
from ppo_cli.errors import UserError
from ppo_cli.records import Scored
from ppo_cli.report.drift import measure_judge_drift, read_opinions
from ppo_cli.report.health import HealthWatch, make_limits
from ppo_cli.report.loggers import make_sinks
from ppo_cli.run_folder import (
    METRICS_FILE,
    append_line,
    drop_rollouts_past,
    plain,
    read_metrics,
    replace_lines,
    rollout_file,
)

Advance = Callable[[int], None]
RECENT_STEPS = 10
BETWEEN_STEPS = ("validate", "validate_reward", "save")  # phases outside of time/step_s


@dataclass(frozen=True)
class Summary:
    """What a finished run came to; a number is None where the run did not measure it.

    `measures` has what was measured, the reward first: its name, and its value before and after;
    None before where it was measured once. `wall_seconds` is of all sessions, `session` the steps
    and seconds of the last one where there were several. `declined` names what fell by more than
    noise; `warning` says that the policy has collapsed.
    """

    steps: int
    measures: Sequence[tuple[str, float | None, float]]
    rewards: tuple[float, ...]
    model_dir: Path | None
    run_dir: Path
    wall_seconds: float
    next_steps: tuple[str, ...] = ()
    session: tuple[int, float] | None = None
    judge: str = ""
    declined: frozenset[str] = frozenset()
    warning: str = ""


class Screen:
    """Where a run speaks to the person who watches it; this one shows nothing."""

    def phase(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show the progress of a phase; the function it gives takes how many more are done."""
        return nullcontext(lambda done: None)

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Show one line for a finished step."""

    def sample(self, line: Mapping[str, Any]) -> None:
        """Show one response of the step, as a line of a rollout file."""

    def note(self, text: str) -> None:
        """Show a remark."""

    def health(self, text: str) -> None:
        """Show that something looks wrong, and what to change."""

    def summary(self, summary: Summary) -> None:
        """Show what the run came to."""

    def close(self) -> None:
        """Leave the terminal as it was. Safe to call twice."""


class Tracker:
    """Writes the metrics and rollouts of one run, and passes them on to screen and loggers.

    Raises MissingPart at once when a logger's package is not installed.
    """

    def __init__(
        self,
        run_dir: Path,
        screen: Screen,
        loggers: Sequence[str],
        total_steps: int,
        config: Config,
    ) -> None:
        self.screen = screen
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._console = "console" in loggers
        self._sinks = make_sinks(loggers, run_dir, config)
        self._sinks_open = False
        self._config = config
        self._limits = make_limits(config)
        self._watch = HealthWatch(self._limits)
        self._history = read_metrics(run_dir)
        self._clock = _RunClock(self._history)
        self._seconds: dict[str, float] = defaultdict(float)
        self._validations: dict[int, dict[str, float]] = {}

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a number that was not finite is None."""
        return self._history

    @property
    def session(self) -> tuple[int, float]:
        """Steps and seconds since this process began to track the run."""
        return self._clock.steps, self._clock.seconds()

    def resume_at(self, step: int) -> None:
        """Forget what was logged past `step`: that work will be done again."""
        with self._report_disk_errors():
            self._drop_lines_after(step)
            drop_rollouts_past(self._run_dir, step)
        self._clock.resumed = bool(self._history)
        if self._sinks_open:  # opened anew, loggers pass over what they had of those steps
            for sink in self._sinks:
                sink.close()
            self._sinks_open = False

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Show and time a phase; its seconds are added to `time/<name>_s` of the next line."""
        started = time.perf_counter()
        try:
            with self.screen.phase(name, total) as advance:
                yield advance
        finally:
            key = f"time/{name.replace(' ', '_')}_s"
            self._seconds[key] += time.perf_counter() - started

    def rollouts(self, step: int, scored: Sequence[Scored], split: str = "train") -> None:
        """Write every response of a step with its score, whole or not at all."""
        lines = [make_rollout_line(step, s) for s in scored]
        with self._report_disk_errors():
            replace_lines(rollout_file(self._run_dir, step, split), lines)
        for sink in self._sinks if split == "train" else ():
            sink.rollouts(lines)
        if lines:  # another place in the batch each time
            self.screen.sample(lines[step * 7 % len(lines)])

    def show_profile(self, step: int) -> None:
        """Show what engines wrote of a step that was profiled; the tables of two processes."""
        tables = sorted((self._run_dir / "profile").glob(f"step_{step:06d}.*_0.txt"))
        for table in tables:
            self.screen.note(table.read_text(encoding="utf-8").rstrip())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finish a step: its line goes to the disk, the loggers and the screen."""
        merged = self._seconds | self._validations.pop(step, {}) | dict(metrics)
        self._seconds = defaultdict(float)
        if "time/step_s" in merged:
            merged |= self._clock.after_step(merged, self._total_steps - step)
        earlier = [line for line in self._history if line["step"] < step]
        people = read_opinions(self._run_dir, self._config)
        line = {"step": step, **merged}
        if drift := measure_judge_drift([*earlier, line], self._limits.watched, people):
            merged["judge/drift"] = drift.amount
        line = self._write_line(step, merged)
        if self._console:
            self.screen.step(step, self._total_steps, _numeric_values(line))
        saved = [int(p.name[5:]) for p in self._run_dir.glob("checkpoints/step_*")]
        for warning in self._watch.check(self._history, saved, people):
            self.screen.health(warning)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep validation metrics for the line of their step; step 0 has a line of its own."""
        if step == 0:
            line = self._write_line(step, self._seconds | dict(metrics))
            self._seconds = defaultdict(float)
            if self._console:
                self.screen.step(step, self._total_steps, _numeric_values(line))
        else:
            self._validations[step] = {**self._validations.get(step, {}), **metrics}

    def close(self) -> None:
        """Close the loggers and the screen. Safe to call twice."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        self.screen.close()

    def _write_line(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        line: dict[str, Any] = {"step": step}
        line |= plain(dict(sorted(metrics.items())))
        resumed = bool(self._history)
        with self._report_disk_errors():
            if resumed and self._history[-1]["step"] >= step:
                self._drop_lines_after(step - 1)
            append_line(self._run_dir / METRICS_FILE, line)
        self._history.append(line)
        for sink in self._sinks:
            if not self._sinks_open:
                sink.open(step, resumed=resumed)
            sink.write(step, _numeric_values(line))
        self._sinks_open = True
        return line

    def _drop_lines_after(self, last_step: int) -> None:
        self._history = [line for line in read_metrics(self._run_dir) if line["step"] <= last_step]
        replace_lines(self._run_dir / METRICS_FILE, self._history)

    @contextmanager
    def _report_disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The run folder {self._run_dir} cannot be written: {error.strerror or error}. "
                "Free some space, then run the same command again: it goes on from the last "
                "checkpoint."
            ) from error


class _RunClock:
    """The seconds of a run over all its sessions, and how many are left."""

    def __init__(self, history: Sequence[Mapping[str, Any]]) -> None:
        self._before = float(history[-1].get("time/run_s") or 0.0) if history else 0.0
        self._started = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._others = 0.0
        self.steps = 0
        self.resumed = bool(history)  # and no step since

    def seconds(self) -> float:
        """Seconds of this session."""
        return time.monotonic() - self._started

    def after_step(self, metrics: Mapping[str, float], steps_left: int) -> dict[str, float]:
        """Record the times of a step; the newest steps are the best estimate for the next."""
        self.steps += 1
        self._recent.append(metrics["time/step_s"])
        self._others += sum(metrics.get(f"time/{name}_s", 0.0) for name in BETWEEN_STEPS)
        a_step = fmean(self._recent) + self._others / self.steps
        resumed = {"perf/resumed": 1.0} if self.resumed else {}
        self.resumed = False
        return resumed | {
            "time/run_s": self._before + self.seconds(),
            "time/left_s": steps_left * a_step,
        }


def make_rollout_line(step: int, scored: Scored) -> dict[str, Any]:
    """One response, its score and all that the scorer said of it, as a line of a rollout file."""
    rollout, score, prompt = scored.rollout, scored.score, scored.rollout.prompt
    line: dict[str, Any] = {
        "step": step,
        "uid": prompt.uid,
        "sample": rollout.sample,
        "prompt": prompt.text,
        "response": rollout.text,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "score": score.value,
        "failure": score.failure,
        "reason": score.reason,
        "parts": {n: {"raw": p.raw, "scaled": p.scaled} for n, p in score.parts.items()},
        "tokens": len(rollout.token_ids),
        "finish_reason": rollout.finish_reason,
    }
    if prompt.opened:
        line["opened"] = prompt.opened
    if rollout.thoughts:
        line |= {"thought_tokens": rollout.thought_tokens, "unclosed": rollout.unclosed}
    # A scorer may name its own things like ours (a judge has tokens too): both are kept.
    for name, value in score.facts.items():
        line[f"reward_{name}" if name in line else name] = value
    return line


def _numeric_values(line: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in line.items() if v is not None and k != "step"}
