"""Writes metrics.jsonl and the rollouts of a run, and passes them to the screen and loggers.

All of metrics.jsonl but the `time/` and `perf/` keys is the same, bit for bit, whether a run was
interrupted or not. A line is on the disk before `step` returns.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config, Pretraining
from ppo_cli.errors import Interrupted, UserError
from ppo_cli.records import Rollout, Scored
from ppo_cli.report.drift import measure_judge_drift, read_opinions
from ppo_cli.report.exploits import explain_rise
from ppo_cli.report.features import Wish, read_requests
from ppo_cli.report.health import HealthWatch, make_limits
from ppo_cli.run_folder.lines import (
    CRITIC_FILE,
    METRICS_FILE,
    PRETRAINING_FILE,
    append_line,
    drop_rollouts_past,
    plain,
    read_metrics,
    read_steps,
    replace_lines,
    rollout_file,
)
from ppo_cli.signals import time_left

if TYPE_CHECKING:
    from ppo_cli.report.loggers import Sink

# Reports that so many more items of a phase are done.
Advance = Callable[[int], None]
RECENT_STEPS = 10  # whose mean time forecasts the rest of the run
SHOWN_RESPONSES = 8  # of a step, on the largest screen
BETWEEN_STEPS = ("validate", "validate_reward", "save")  # phases that time/step_s does not include


@dataclass(frozen=True)
class Summary:
    """Summary of a finished run.

    `measures` has (name, first value, last value) of each measure, the reward first; the first
    value is None if it was measured once. `wall_seconds` counts all sessions, `session` has the
    steps and seconds of the last one if there were several. `declined` names measures that fell
    by more than noise; `verdict` says in a word what the run achieved. `warnings` are the
    troubles of the last step. `restrained` says how often and where the run went back after an
    exploit. `first_step` of a fork comes after those of the run before it.
    `next_steps` are (purpose, command) pairs. Rewards, and what the `critic` explains, are means
    over `averaged` steps. `judge` has the rows of the judge's card.
    """

    steps: int
    measures: Sequence[tuple[str, float | None, float]]
    rewards: tuple[float, ...]
    model_dir: Path | None
    run_dir: Path
    wall_seconds: float
    averaged: int = 1
    next_steps: tuple[tuple[str, str], ...] = ()
    session: tuple[int, float] | None = None
    first_step: int = 1
    judge: tuple[tuple[str, str], ...] = ()
    episodes: tuple[tuple[str, str], ...] = ()
    critic: str = ""
    pretraining: str = ""
    restrained: str = ""
    declined: frozenset[str] = frozenset()
    verdict: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """`Done`, with the verdict."""
        return f"Done: {self.verdict[0].lower()}{self.verdict[1:]}" if self.verdict else "Done"


class Screen:
    """Interface through which a run shows its progress; this base class shows nothing."""

    debug = False  # whether details of how this machine computes are shown

    def begin(
        self, reward: Reward, total_steps: int, history: Sequence[Mapping[str, float]]
    ) -> None:
        """Show a run of which the steps in `history` are finished; again after a resume."""

    def phase(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show a phase; the context's value is a function to call with the number of items done."""
        return nullcontext(lambda done: None)

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Show one line for a finished step."""

    def pretraining(self, limits: Pretraining, lines: Sequence[Mapping[str, float]]) -> None:
        """Show the last of the steps of critic pretraining so far."""

    def responses(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Show a few responses of the step, as lines of a rollout file."""

    def note(self, text: str) -> None:
        """Show a note."""

    def note_all(self, texts: Iterable[str]) -> None:
        """Show several notes."""
        for text in texts:
            self.note(text)

    def health(self, text: str, kind: str = "") -> None:
        """Show a warning with advice; `kind` is that of a finding about the metrics."""

    def summary(self, summary: Summary) -> None:
        """Show the summary of the run."""

    def close(self) -> None:
        """Restore the terminal. Safe to call twice."""


class Tracker:
    """Writes the metrics and rollouts of one run, and passes them to the screen and loggers."""

    def __init__(
        self,
        run_dir: Path,
        screen: Screen,
        loggers: Sequence[str],
        total_steps: int,
        config: Config,
        wishes: Iterable[Wish] = (),
    ) -> None:
        self.screen = screen
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._console = "console" in loggers
        self._sinks: list[Sink] = []
        if set(loggers) - {"console"}:
            from ppo_cli.report.loggers import SINKS

            self._sinks = [SINKS[name](run_dir, config) for name in SINKS if name in loggers]
        self._sinks_open = False
        self._config = config
        self._limits = make_limits(config)
        self._watch = HealthWatch(self._limits)
        # What form responses shall have, by words and as a judge has named it.
        self._requests, self._wishes = read_requests(config.reward), tuple(wishes)
        # What is on the disk, and what waits for the next line.
        self._history = read_metrics(run_dir)
        self._pretraining_steps = 0
        self._clock = _RunClock(self._history)
        self._seconds: dict[str, float] = defaultdict(float)
        self._validations: dict[int, dict[str, float]] = {}
        self._compared = False  # whether the line of a step has had a validation in it
        self._begin_screen()

    def _begin_screen(self) -> None:
        if self._console:
            finished = [_numeric_values(line) for line in self._history]
            self.screen.begin(self._config.reward, self._total_steps, finished)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; numbers that were not finite are None."""
        return self._history

    @property
    def session(self) -> tuple[int, float]:
        """Steps and seconds since this process started to track the run."""
        return self._clock.steps, self._clock.seconds()

    def resume_at(self, step: int, pretraining: Sequence[Mapping[str, float]] = ()) -> None:
        """Drop metrics and rollouts after `step`, as the run repeats these steps.

        `pretraining` has the steps of critic pretraining that the checkpoint has.
        """
        with self._report_disk_errors():
            self._drop_lines_after(step)
            self._write_pretraining(pretraining)
            self._pretraining_steps = len(pretraining)
            drop_rollouts_past(self._run_dir, step)
            critic = self._run_dir / CRITIC_FILE
            if critic.exists():
                replace_lines(critic, [x for x in read_steps(critic) if x["step"] <= step])
        self._begin_screen()
        self._clock.resumed = bool(self._history)
        if self._sinks_open:  # after a new `open`, loggers skip steps that they already have
            for sink in self._sinks:
                sink.close()
            self._sinks_open = False

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """Show and time a phase; its seconds go to `time/<name>_s` of the next step."""
        started = time.perf_counter()
        try:
            with self.screen.phase(name, total) as advance:
                yield advance
        finally:
            # A phase may come several times in a step, and an error must not lose its time.
            key = f"time/{name.replace(' ', '_')}_s"
            self._seconds[key] += time.perf_counter() - started

    def rollouts(
        self,
        step: int,
        scored: Sequence[Scored],
        split: str = "train",
        tokens: Mapping[int, Mapping[str, Any]] | None = None,
        critic: Mapping[str, Any] | None = None,
    ) -> None:
        """Write all responses of a step with their scores to a file, in one piece.

        `tokens` has details of tokens by row, `critic` the sums of `measure_critic`.
        """
        lines = [make_rollout_line(step, s) for s in scored]
        add_token_details(lines, tokens or {})
        with self._report_disk_errors():
            replace_lines(rollout_file(self._run_dir, step, split), lines)
            if critic:
                append_line(self._run_dir / CRITIC_FILE, {"step": step, **critic})
        for sink in self._sinks if split == "train" else ():
            sink.rollouts(lines)
        if lines:  # from different places in the batch at each step
            stride = max(1, len(lines) // SHOWN_RESPONSES)
            places = range(step * 7, step * 7 + len(lines), stride)
            self.screen.responses([lines[i % len(lines)] for i in places])

    def show_profile(self, step: int) -> None:
        """Show the profiler's tables of a step, if it was profiled."""
        tables = sorted((self._run_dir / "profile").glob(f"step_{step:06d}.*_0.txt"))
        for table in tables:
            self.screen.note(table.read_text(encoding="utf-8").rstrip())

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finish a step: write its metrics to disk, loggers and screen, and check their health."""
        # All that belongs to the line of this step.
        merged = self._seconds | self._validations.pop(step, {}) | dict(metrics)
        self._seconds = defaultdict(float)
        # Steps that only validate have no time.
        if "time/step_s" in merged:
            merged |= self._clock.after_step(merged, self._total_steps - step)
        # The judge's drift needs the earlier steps and people's labels, which may be new.
        earlier = [line for line in self._history if line["step"] < step]
        people = read_opinions(self._run_dir, self._config.reward)
        line = {"step": step, **merged}
        if drift := measure_judge_drift([*earlier, line], self._limits.watched, people):
            merged["judge/drift"] = drift.amount
        if self._limits.can_be_gamed:
            steps = [line["step"] for line in (*earlier, line) if line["step"] > 0]
            merged |= explain_rise(self._run_dir, steps, self._requests, self._wishes)
        self._write_line(step, merged)
        # Health checks; checkpoints are called step_NNNNNN.
        saved = [int(p.name[5:]) for p in self._run_dir.glob("checkpoints/step_*")]
        for kind, warning in self._watch.check(self._history, saved, people).items():
            self.screen.health(warning, kind)

    def pretraining(self, lines: Sequence[Mapping[str, float]]) -> None:
        """Write the steps of critic pretraining to their own file, and show the last one."""
        with self._report_disk_errors():
            self._write_pretraining(lines)
        self._pretraining_steps = len(lines)
        numbers = _numeric_values(plain(dict(lines[-1])))
        metrics = {f"pretrain/{name}": number for name, number in numbers.items()}
        self._write_sinks(len(lines), metrics, resumed=bool(self._history) or len(lines) > 1)
        # The phases of these steps are not part of step 1.
        self._seconds = defaultdict(float)
        if self._console:
            self.screen.pretraining(self._config.pretraining, lines)

    def _write_pretraining(self, lines: Sequence[Mapping[str, float]]) -> None:
        file = self._run_dir / PRETRAINING_FILE
        if lines or file.exists():
            replace_lines(file, [{"step": i, **line} for i, line in enumerate(lines, 1)])

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add validation metrics to the line of their step; step 0 gets its own line."""
        if step == 0:
            self._write_line(step, self._seconds | dict(metrics))
            self._seconds = defaultdict(float)
        else:
            self._validations[step] = {**self._validations.get(step, {}), **metrics}

    def close(self) -> None:
        """Close the loggers and the screen. Safe to call twice."""
        sinks, self._sinks = self._sinks, []
        with ExitStack() as closing:  # each, even when another one does not answer
            closing.callback(self.screen.close)
            for sink in sinks:
                closing.callback(self._close_sink, sink)

    def _close_sink(self, sink: Sink) -> None:
        try:
            sink.close()
        except Interrupted as late:
            if math.isinf(time_left()):
                raise
            self.screen.note(str(late))  # the run says why it ends, and how to go on

    def _write_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step to metrics.jsonl, and pass it to the loggers and the screen."""
        line: dict[str, Any] = {"step": step}
        line |= plain(dict(sorted(metrics.items())))
        resumed = bool(self._history)
        with self._report_disk_errors():
            # A step that is repeated replaces its old line.
            if resumed and self._history[-1]["step"] >= step:
                self._drop_lines_after(step - 1)
            append_line(self._run_dir / METRICS_FILE, line)
        self._history.append(line)
        # On the axis of the loggers, which only goes up, critic pretraining is before step 1.
        before = self._pretraining_steps if step else 0
        self._write_sinks(step + before, _numeric_values(line), resumed=resumed or before > 0)
        if not self._console:
            return
        self.screen.step(step, self._total_steps, _numeric_values(line))
        # The two numbers differ a lot, so say why when the first of them appears.
        if "val/reward_mean" in line and not self._compared:
            self._compared = True
            if self._config.rollout.val_kwargs.temperature == 0:
                self.screen.note(
                    "val is of greedy responses to the validation prompts, reward of sampled ones "
                    "to the training prompts"
                )

    def _write_sinks(self, step: int, metrics: Mapping[str, float], *, resumed: bool) -> None:
        """Add a point to each logger; the first one opens it, for a run that it may know."""
        for sink in self._sinks:
            if not self._sinks_open:
                sink.open(step, resumed=resumed)
            sink.write(step, metrics)
        self._sinks_open = True

    def _drop_lines_after(self, last_step: int) -> None:
        """Remove the lines of later steps from metrics.jsonl and from the history."""
        self._history = [line for line in read_metrics(self._run_dir) if line["step"] <= last_step]
        replace_lines(self._run_dir / METRICS_FILE, self._history)

    @contextmanager
    def _report_disk_errors(self) -> Iterator[None]:
        """Turn OSErrors of writing into UserErrors with advice."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"The run folder {self._run_dir} cannot be written: {error.strerror or error}. "
                "Free some space, then run the same command again: it resumes from the last "
                "checkpoint."
            ) from error


class _RunClock:
    """Measures the seconds of a run over all its sessions, and estimates how many are left."""

    def __init__(self, history: Sequence[Mapping[str, Any]]) -> None:
        # Earlier sessions, from the last line.
        self._before = float(history[-1].get("time/run_s") or 0.0) if history else 0.0
        self._started = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._others = 0.0
        self.steps = 0
        self.resumed = bool(history)  # until the first step of this session

    def seconds(self) -> float:
        """Return the seconds of this session."""
        return time.monotonic() - self._started

    def after_step(self, metrics: Mapping[str, float], steps_left: int) -> dict[str, float]:
        """Record the times of a step; return `time/run_s` and an estimate `time/left_s`."""
        self.steps += 1
        self._recent.append(metrics["time/step_s"])
        self._others += sum(metrics.get(f"time/{name}_s", 0.0) for name in BETWEEN_STEPS)
        # Validations and saves come at some steps only, so they are averaged over all.
        a_step = fmean(self._recent) + self._others / self.steps
        resumed = {"perf/resumed": 1.0} if self.resumed else {}
        self.resumed = False
        return resumed | {
            "time/run_s": self._before + self.seconds(),
            "time/left_s": steps_left * a_step,
        }


def make_rollout_line(step: int, scored: Scored) -> dict[str, Any]:
    """Return a response with its score and the scorer's facts as a line of a rollout file."""
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
        "tokens": rollout.policy_tokens,
        "finish_reason": rollout.finish_reason,
    }
    if score.steps:
        line["places"] = [[step.end, step.value] for step in score.steps]
    # Only models that think have these fields.
    if prompt.opened:
        line["opened"] = prompt.opened
    if rollout.thoughts:
        line |= {"thought_tokens": rollout.thought_tokens, "unclosed": rollout.unclosed}
    line |= make_episode_fields(rollout)
    # A scorer's facts may have our names (a judge has tokens too): both are kept.
    for name, value in score.facts.items():
        line[f"reward_{name}" if name in line else name] = value
    return line


def make_episode_fields(rollout: Rollout) -> dict[str, Any]:
    """Return the conversation of an episode as fields of a line; {} for a single response.

    `opening` has the messages before the first turn, `tools` a line for each tool, `turns` the
    policy's messages with the replies to them, `ended` the limit that ended the episode. Empty
    fields of a turn are left out.
    """
    if not rollout.turns and not rollout.failure:
        return {}
    turns = []
    for turn in rollout.turns:
        fields = {
            "message": dict(turn.message), "replies": [dict(m) for m in turn.replies],
            "rewards": dict(turn.rewards), "tokens": turn.end - turn.start,
            "seconds": round(turn.seconds, 3),
            "tools": [[name, round(seconds, 3)] for name, seconds in turn.tools],
            "error": turn.error, "cut": turn.cut, "metrics": dict(turn.metrics),
        }  # fmt: skip
        turns.append({name: value for name, value in fields.items() if value})
    ended = {"ended": rollout.ended} if rollout.ended else {}
    prompt = rollout.prompt
    tools = {"tools": prompt.tools} if prompt.tools else {}
    return {"opening": [dict(m) for m in prompt.messages], **tools, "turns": turns, **ended}


def add_token_details(
    lines: Sequence[dict[str, Any]], tokens: Mapping[int, Mapping[str, Any]]
) -> None:
    """Add the details of tokens to their lines, as many as fit into a fifth of all lines.

    Times do not count, so that a resumed run keeps the details of the same responses.
    """
    if not tokens:
        return
    # Characters, of which each has a byte or more in the file.
    dump = partial(json.dumps, ensure_ascii=False, skipkeys=True, default=str)
    room = sum(len(dump(_drop_times(line))) for line in lines) / 5
    for row, details in tokens.items():
        size = len(dump({"token_details": details}))
        if size <= room:
            lines[row]["token_details"] = details
            room -= size


def _drop_times(value: Any) -> Any:
    """Return a value of a line without how long calls took."""
    if isinstance(value, dict):
        timed = ("latency_s", "seconds", "tools")
        return {k: _drop_times(v) for k, v in value.items() if not str(k).endswith(timed)}
    return [_drop_times(v) for v in value] if isinstance(value, list) else value


def _numeric_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line without missing ones and the step."""
    return {k: float(v) for k, v in line.items() if v is not None and k != "step"}
