"""Output of a run: progress bars on a terminal, plain lines elsewhere, formatted numbers."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ppo_cli.errors import Interrupted
from ppo_cli.redact import redact
from ppo_cli.report.metrics import format_duration, mixture_part_means
from ppo_cli.report.tracker import Advance, Screen, Summary
from ppo_cli.run_folder import plain
from ppo_cli.signals import redirect_to_devnull

# Metric -> its name on the line of a step.
COLUMNS = {
    "reward_mean": "reward",
    "kl_divergence": "kl",
    "clip_fraction": "clip",
    "policy_loss": "policy",
    "value_loss": "value",
    "entropy": "entropy",
    "response_length_mean": "length",
}
HIDDEN_COLUMNS = {"policy_loss"}  # always near 0, as advantages have mean 0
ROUNDED_TO_ZERO = 1e-6  # smaller metrics of a step are rounding errors
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"
CURVE_WIDTH = 40
# Sums of normalised numbers that should be 0 are below this.
ROUNDING = 1e-12
# Control codes of terminals but tab and newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def make_printable(text: str) -> str:
    """Return text that is safe to print: without secrets, control codes escaped as `\\x1b`.

    Models write responses, which may contain codes that change the terminal.
    """
    printable = redact(text).encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", printable)


def replace_unencodable(text: str, encoding: str | None) -> str:
    """Replace characters that an encoding does not have by question marks."""
    name = encoding or "utf-8"
    return text.encode(name, "replace").decode(name)


def can_show(text: str, encoding: str | None) -> bool:
    """Whether an encoding has all characters of the text."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def print_result(result: Any, text: Callable[[], str], *, as_json: bool) -> None:
    """Print the result of a command as JSON, or the text that `text` returns."""
    if as_json:
        print_json(result)
    else:
        print_text(text())


def print_text(text: str) -> None:
    """Print text to stdout, without secrets, control codes and unencodable characters."""
    print(replace_unencodable(make_printable(text), sys.stdout.encoding), flush=True)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as JSON without secrets; in ASCII if stdout cannot encode its characters."""
    shown = plain(value)
    text = json.dumps(shown, ensure_ascii=False, indent=indent)
    readable = can_show(text, sys.stdout.encoding)
    print(text if readable else json.dumps(shown, indent=indent), flush=True)


def format_number(value: float | None) -> str:
    """Return a number with about three significant digits; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value) if abs(value) > ROUNDING else 0.0
    value = value if size else 0.0
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def format_step(
    step: int, total_steps: int, metrics: Mapping[str, float], width: int | None = None
) -> str:
    """Return the metrics of a step as one line, without those that were not measured.

    With a `width` in characters the line is broken between fields.
    """
    # Numbers near 0 would flicker between signs.
    fields = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    # Metrics in a fixed order, then validation and times.
    for key, word in COLUMNS.items():
        if key in metrics and key not in HIDDEN_COLUMNS:
            parts = _format_parts(metrics) if key == "reward_mean" else ""
            shown = format_number(0.0 if abs(metrics[key]) < ROUNDED_TO_ZERO else metrics[key])
            fields.append(f"{word} {shown}{parts}")
    if (value := get_validation_value(metrics)) is not None:
        fields.append(f"val {format_number(value)}{_format_parts(metrics, 'val/')}")
    if "time/step_s" in metrics:
        fields.append(f"{metrics['time/step_s']:.1f} s")
    if metrics.get("time/left_s"):
        fields.append(f"{format_duration(metrics['time/left_s'])} left")
    return _wrap_fields(fields, width) if width else "  ".join(fields)


def _wrap_fields(fields: Sequence[str], width: int) -> str:
    """Join fields to lines of at most `width` characters; later lines are indented."""
    lines = [fields[0]]
    for word in fields[1:]:
        if len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(f"    {word}")
    return "\n".join(lines)


def _format_parts(metrics: Mapping[str, float], prefix: str = "") -> str:
    """Return the raw means of a mixture's parts in brackets; empty if rewards are not mixed."""
    means = mixture_part_means(metrics, prefix)
    return f" ({', '.join(f'{n} {format_number(v)}' for n, v in means.items())})" if means else ""


def get_validation_value(metrics: Mapping[str, float]) -> float | None:
    """Return the main number of a validation: accuracy, else mean reward, else None."""
    for name in ("val/accuracy", "val/reward_mean"):
        if metrics.get(name) is not None:
            return metrics[name]
    return None


def draw_sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Return a curve as one line of block characters; long curves are averaged to the width."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    count = min(CURVE_WIDTH, len(finite))
    # Cut the values into groups of almost equal size, one for each character.
    cuts = [round(i * len(finite) / count) for i in range(count + 1)]
    means = [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    # Scale the means to the block heights; a flat curve gets the lowest block.
    low, high = min(means), max(means)
    marks = ASCII_BLOCKS if ascii_only else BLOCKS
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join(marks[round((v - low) * scale)] for v in means)


def align_columns(rows: Sequence[Sequence[str]], left_aligned: int = 2) -> list[str]:
    """Pad cells to their column's width; the first `left_aligned` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < left_aligned else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def titled_table(title: str, rows: Sequence[Sequence[str]], left_aligned: int = 2) -> list[str]:
    """Return a title, and below it the rows of `align_columns`, indented."""
    return [title, *(f"  {line}" for line in align_columns(rows, left_aligned))]


def _format_change(before: float | None, after: float, arrow: str, declined: bool) -> str:
    """Return a change as `0.5 → 0.9`, or one number if it was measured once."""
    first, last = format_number(before), format_number(after)
    if before is None or math.isnan(before):
        return last
    return f"{first} {arrow} {last}{' (declined)' if declined else ''}"


def format_summary(summary: Summary, *, ascii_only: bool = False) -> list[str]:
    """Return the summary of a run as printable lines."""
    arrow = "->" if ascii_only else "→"
    # A resumed run shows the time of all sessions and of this one.
    # That of a fork begins after the steps of another run.
    done = f"{summary.first_step} to {summary.steps}" if summary.first_step > 1 else summary.steps
    rows = [("steps", f"{done} in {format_duration(summary.wall_seconds)}")]
    if summary.session is not None:
        steps, seconds = summary.session
        rows[0] = ("steps", f"{rows[0][1]} (this session: {steps} in {format_duration(seconds)})")
    # What was measured, then the rows that only some runs have.
    for name, before, after in summary.measures:
        rows.append((name, _format_change(before, after, arrow, name in summary.declined)))
    if summary.judge:
        rows.append(("judge", summary.judge))
    if len(summary.rewards) > 1:
        rows.append(("curve", draw_sparkline(summary.rewards, ascii_only=ascii_only)))
    if summary.model_dir is not None:
        rows.append(("model", str(summary.model_dir)))
    rows.append(("run folder", str(summary.run_dir)))
    lines = align_columns(rows)
    # Sentences below the table.
    for warning in summary.warnings:
        lines += ["", f"warning: {warning}"]
    if summary.next_steps:
        lines += ["", "What next:", *(f"  {line}" for line in summary.next_steps)]
    return [make_printable(line) for line in lines]


class OutputClosed(Interrupted):
    """Raised when the program that reads our output has closed the pipe."""


def make_screen(file: TextIO | None = None, *, quiet: bool = False) -> Screen:
    """Return the screen for a file (default stdout): a live view on a terminal, else plain lines.

    `quiet` gives a screen that prints only warnings and the summary.
    """
    file = file or sys.stdout
    if quiet:
        return QuietScreen(file)
    # A dumb terminal cannot move the cursor.
    if file.isatty() and os.environ.get("TERM") != "dumb":
        return TerminalScreen(Console(file=file, highlight=False))
    return PlainScreen(file)


class PlainScreen(Screen):
    """Plain lines without control codes, for files, pipes and logs."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step."""
        self._print(format_step(step, total_steps, metrics))

    def note(self, text: str) -> None:
        """Print a remark."""
        self._print(text)

    def health(self, text: str) -> None:
        """Print a warning."""
        self._print(f"warning: {text}")

    def summary(self, summary: Summary) -> None:
        """Print the summary of the run."""
        lines = format_summary(summary, ascii_only=not can_show(BLOCKS + "→", self._file.encoding))
        self._print("\n".join(["", "Done", *(f"  {line}".rstrip() for line in lines)]))

    def _print(self, text: str) -> None:
        """Print text; raise OutputClosed if nobody reads it any more."""
        try:
            print(
                replace_unencodable(make_printable(text), self._file.encoding),
                file=self._file,
                flush=True,
            )
        except BrokenPipeError:
            # Python flushes stdout at exit, which would fail once more.
            redirect_to_devnull(self._file.fileno())
            raise OutputClosed(
                "The program that reads this output has closed it. Write to a file with `> FILE`."
            ) from None


class _TimeLeftColumn(TimeRemainingColumn):
    """Progress column with the time left: of a phase by its speed, of the run as estimated."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Return the time left as H:MM:SS."""
        ends = task.fields.get("ends")
        if ends is None or math.isnan(ends):
            return super().render(task)
        seconds_left = max(0, round(ends - time.monotonic()))
        minutes, seconds = divmod(seconds_left, 60)
        shown = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        return Text(shown, style="progress.remaining")


class QuietScreen(PlainScreen):
    """A plain screen that prints only warnings and the summary."""

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Print nothing."""

    def note(self, text: str) -> None:
        """Print nothing."""


# Metrics that the live view draws.
CURVES = ("reward_mean", "kl_divergence", "clip_fraction", "entropy", "response_length_mean")
MIN_VIEW_HEIGHT = 20  # rows of a terminal below which only the bars are shown
MAX_TEXT_CHARS = 400  # characters of a text in the view
KEPT_LINES = 20  # lines that are printed again after the width has changed


def format_judges(metrics: Mapping[str, float]) -> str:
    """Return a line about a step's judges: calls, cache, errors, cost; empty without judges."""

    # Several judges have prefixes such as `judge_style/`; their numbers are added up.
    def values_of(name: str) -> list[float]:
        return [v for k, v in metrics.items() if re.fullmatch(rf"judge(_[^/]+)?/{name}", k)]

    if not values_of("calls"):
        return ""
    calls, cached = math.fsum(values_of("calls")), math.fsum(values_of("cached"))
    fields = [f"judge  {calls:.0f} calls"]
    if seconds := metrics.get("time/step_s"):
        fields[0] += f" ({calls / seconds:.1f}/s)"
    if calls + cached:
        fields.append(f"from the cache {cached / (calls + cached):.0%}")
    fields.append(f"errors {max([0.0, *values_of('error_rate')]):.1%}")
    if cost := math.fsum(values_of("cost_usd_total")):
        fields.append(f"${cost:.4g} so far")
    return "  ".join(fields)


class TerminalScreen(Screen):
    """A terminal screen: lines of steps scroll, and below them is a live view.

    The view has a bar for each phase and for the run, curves of the steps so far, the judges'
    calls, one response with its score, and the last warning.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _TimeLeftColumn(),
            console=console,
            speed_estimate_period=3600.0,  # the parts of a phase may take minutes
            expand=True,
        )
        # State of the view; `_printed` are the last lines above it.
        self._width = console.width
        self._phases: dict[str, TaskID] = {}
        self._total_task: TaskID | None = None
        self._curves: dict[str, list[float]] = {}
        self._judge = ""
        self._sample: list[str] = []
        self._warning = ""
        self._printed: deque[tuple[str, str]] = deque(maxlen=KEPT_LINES)
        self._live = self._make_live()

    def _make_live(self) -> Live:
        """Return a rich Live display of the view, which disappears when it stops."""
        return Live(
            console=self._console, get_renderable=self._render_view, transient=True,
            vertical_overflow="crop",
        )  # fmt: skip

    @contextmanager
    def phase(self, name: str, total: int | None) -> Iterator[Advance]:
        """Show a progress bar for a phase; it stays until the step ends."""
        self._live.start()
        # A phase that comes again in a step, such as micro-batches, reuses its bar.
        if name in self._phases:
            task = self._phases[name]
            self._progress.reset(task, total=total)
        else:
            task = self._phases[name] = self._progress.add_task(name, total=total)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            self._progress.update(task, completed=done)
            self._redraw_if_resized()

        self._redraw_if_resized()
        self._live.refresh()
        yield advance
        # The phase is over: the bar is full even if the total was unknown.
        self._progress.update(task, total=max(total or 1, done), completed=max(total or 1, done))
        self._progress.stop_task(task)

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, and update the view."""
        self._print(format_step(step, total_steps, metrics, self._console.width))
        # The bars of this step go; the bar of the run moves on.
        for task in self._phases.values():
            self._progress.remove_task(task)
        self._phases.clear()
        if self._total_task is None:
            self._total_task = self._progress.add_task("steps", total=total_steps, completed=step)
        ends = time.monotonic() + metrics.get("time/left_s", math.nan)
        self._progress.update(self._total_task, completed=step, ends=ends)
        # Extend the curves.
        for name in CURVES:
            if name in metrics:
                self._curves.setdefault(COLUMNS[name], []).append(metrics[name])
        if (value := get_validation_value(metrics)) is not None:
            self._curves.setdefault("val", []).append(value)
        self._judge = format_judges(metrics)

    def sample(self, line: Mapping[str, Any]) -> None:
        """Show one response in the view."""
        self._sample = format_sample(line)

    def note(self, text: str) -> None:
        """Print a remark."""
        self._print(text, style="dim")

    def health(self, text: str) -> None:
        """Print a warning, and show it in the view until the next one."""
        self._warning = text
        self._print(f"warning: {text}", style="yellow")

    def summary(self, summary: Summary) -> None:
        """Stop the view and print the summary of the run in a frame."""
        self._live.stop()
        plain = not can_show(BLOCKS + "→╭", self._console.encoding)
        body = Text("\n".join(format_summary(summary, ascii_only=plain)))
        frame = box.ASCII if plain else box.ROUNDED
        self._console.print(Panel(body, title="Done", title_align="left", box=frame, expand=False))

    def close(self) -> None:
        """Remove the view. Safe to call twice."""
        self._live.stop()

    def _render_view(self) -> Group:
        """Return the view as rich renderables; rich calls this for each refresh."""
        bars = self._progress.get_renderable()
        if self._console.height < MIN_VIEW_HEIGHT or not self._curves:
            return Group(bars)
        plain = not can_show(BLOCKS, self._console.encoding)
        rows = [
            f"{name:<8}{draw_sparkline(values, ascii_only=plain)} {format_number(values[-1])}"
            for name, values in self._curves.items()
            if len(values) > 1
        ]
        # Above the bars: curves, judges, a response, the last warning.
        lines = [self._make_row(row) for row in rows]
        if self._judge:
            lines.append(self._make_row(self._judge))
        if self._sample:
            lines += [self._make_row(text, "dim") for text in self._sample]
        if self._warning:
            lines.append(self._make_row(f"warning: {self._warning}", "yellow"))
        return Group(*lines, bars)

    def _make_row(self, text: str, style: str = "") -> Text:
        """Return one row of the view; long text is cut, so that it does not wrap."""
        line = re.sub(r"\s*[\n\t]\s*", " ", make_printable(text))
        return Text(
            replace_unencodable(line, self._console.encoding),
            style,
            no_wrap=True,
            overflow="ellipsis",
        )

    def _redraw_if_resized(self) -> None:
        """Clear and draw everything again if the width has changed, as terminals wrap old lines."""
        if self._console.width == self._width:
            return
        self._width = self._console.width
        self._live.stop()
        self._console.clear()
        for text, style in list(self._printed):
            self._console.print(Text(text, style=style))
        self._live = self._make_live()  # the old one would erase its old number of lines
        self._live.start()

    def _print(self, text: str, style: str = "") -> None:
        """Print text above the view, and remember it for a redraw."""
        self._redraw_if_resized()
        self._printed.append((make_printable(text), style))
        self._console.print(Text(make_printable(text), style=style), soft_wrap=True)


def format_sample(line: Mapping[str, Any]) -> list[str]:
    """Return three lines: the end of a prompt, the response, its score with the reason."""
    score = "failed" if line["score"] is None else f"score {format_number(line['score'])}"
    why = line["failure"] or line["reason"] or ""
    prompt = " ".join(str(line["prompt"])[-MAX_TEXT_CHARS:].split())
    return [
        f"prompt    {prompt[-60:]}",
        f"response  {line['response'][:MAX_TEXT_CHARS]}",
        f"{score:<9} {why[:MAX_TEXT_CHARS]}",
    ]
