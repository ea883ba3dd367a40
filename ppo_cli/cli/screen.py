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
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ppo_cli.config.mixture import judges_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Pretraining
from ppo_cli.errors import Interrupted, format_duration, plural
from ppo_cli.report.catalogue import PHASES
from ppo_cli.report.judge_card import Spent, format_dollars, list_spent
from ppo_cli.report.metrics import format_explained, is_pretrained, mixture_part_means
from ppo_cli.report.tracker import RECENT_STEPS, Advance, Screen, Summary
from ppo_cli.run_folder.lines import to_json
from ppo_cli.secrets.redact import redact
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
PRETRAINED = ("reward_mean", "value_loss")  # columns of a step of critic pretraining
HIDDEN_COLUMNS = {"policy_loss"}  # always near 0, as advantages have mean 0
# Fields that a narrow terminal leaves out of a step's line, the first one first.
DROPPED_FIELDS = ("clip", "value", "entropy", "length", "kl", "time")
VALIDATION_WIDTH = len("  val 0.000")
ROUNDED_TO_ZERO = 1e-6  # smaller metrics of a step are rounding errors
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.:-=+*#"
CURVE_WIDTH = 40
MIN_POINTS = 3  # of a curve; with fewer there is nothing to see
# Sums of normalised numbers that should be 0 are below this.
ROUNDING = 1e-12
# Marks within texts, which are no characters of Unicode, and their codes on a terminal: the page's
# colours of numbers below and above zero, bold, and the end of each.
BELOW, ABOVE, BOLD, PLAIN = "\ufdd0\ufdd1\ufdd2\ufdd3"
STYLES = {BELOW: "\x1b[38;5;208m", ABOVE: "\x1b[38;5;75m", BOLD: "\x1b[1m", PLAIN: "\x1b[0m"}
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
    """Print text to stdout, without secrets, control codes and unencodable characters.

    Its STYLES become colours on a terminal, and nothing elsewhere.
    """
    shown = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    styles = {ord(mark): code * shown for mark, code in STYLES.items()}
    printable = make_printable(text).translate(styles)
    print(replace_unencodable(printable, sys.stdout.encoding), flush=True)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as JSON without secrets; in ASCII if stdout cannot encode its characters."""
    text = to_json(value, indent=indent)
    if not can_show(text, sys.stdout.encoding):
        text = json.dumps(json.loads(text), indent=indent)
    print(text, flush=True)


def format_number(value: float | None) -> str:
    """Return a number with about three significant digits; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value) if abs(value) > ROUNDING else 0.0
    value = value if size else 0.0
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3f}"


def format_metric(value: float | None) -> str:
    """Return a number; those near 0 are 0, as they would flicker between signs."""
    return format_number(0.0 if abs(value or 1.0) < ROUNDED_TO_ZERO else value)


def format_step(
    step: int, total_steps: int, metrics: Mapping[str, float], width: int | None = None
) -> str:
    """Return the metrics of a step as one line, without those that were not measured.

    With a `width` in characters the time left is not shown, and the least important fields are left
    out until the line fits.
    """
    fields = {"step": f"step {step:>{len(str(total_steps))}}/{total_steps}"}
    # Metrics in a fixed order, then validation and times.
    for key, word in COLUMNS.items():
        if key in metrics and key not in HIDDEN_COLUMNS:
            parts = _format_parts(metrics) if key == "reward_mean" else ""
            fields[word] = f"{word} {format_metric(metrics[key])}{parts}"
    if (value := metrics.get("val/reward_mean")) is not None:
        fields["val"] = f"val {format_number(value)}{_format_parts(metrics, 'val/')}"
    if "time/step_s" in metrics:
        fields["time"] = f"{metrics['time/step_s']:.1f} s"
    if metrics.get("time/left_s") and not width:
        fields["left"] = f"{format_duration(metrics['time/left_s'])} left"
    # Steps without a validation keep its place free, so that all lines have the same fields.
    if width and "val" not in fields:
        width -= VALIDATION_WIDTH
    for name in DROPPED_FIELDS:
        if width and len("  ".join(fields.values())) > width:
            fields.pop(name, None)
    return "  ".join(fields.values())


def format_pretraining(
    limits: Pretraining, lines: Sequence[Mapping[str, float]], width: int | None = None
) -> str:
    """Return the last step of critic pretraining as one line.

    With a `width` in characters the time left is not shown, and as few fields as fit.
    """
    (max_steps, until), last = limits, lines[-1]
    fields = [
        f"critic pretraining {len(lines):>{len(str(max_steps))}}/{max_steps}",
        f"explained {format_explained(last.get('explained_variance'))}"
        + ("" if until is None else f" (target {until:g})"),
        f"{last['time/step_s']:.1f} s",
        *(f"{COLUMNS[key]} {format_metric(last[key])}" for key in PRETRAINED if key in last),
    ]
    if not width and not is_pretrained(limits, lines):
        time_left = format_duration(_pretraining_seconds_left(max_steps, lines))
        fields.append(f"{time_left} left{'' if until is None else ' at most'}")
    while width and len("  ".join(fields)) > width and len(fields) > 1:
        fields.pop()
    return "  ".join(fields)


def _pretraining_seconds_left(max_steps: int, lines: Sequence[Mapping[str, float]]) -> float:
    """Return how long critic pretraining takes if it does not reach its target before."""
    seconds = [line["time/step_s"] for line in lines[-RECENT_STEPS:]]
    return (max_steps - len(lines)) * math.fsum(seconds) / len(seconds)


def _format_parts(metrics: Mapping[str, float], prefix: str = "") -> str:
    """Return the raw means of a mixture's parts in brackets; empty if rewards are not mixed."""
    means = mixture_part_means(metrics, prefix)
    return f" ({', '.join(f'{n} {format_number(v)}' for n, v in means.items())})" if means else ""


def draw_sparkline(
    values: Sequence[float], *, width: int = CURVE_WIDTH, ascii_only: bool = False
) -> str:
    """Return a curve as one line of block characters; long curves are averaged to the width."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    count = min(width, len(finite))
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
    return f"{first} {arrow} {last}{' (declined)' if declined and first != last else ''}"


def format_summary(summary: Summary, *, ascii_only: bool = False) -> list[str]:
    """Return the summary of a run as printable lines, without the commands to run next."""
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
        change = _format_change(before, after, arrow, name in summary.declined)
        averaged = name.startswith("reward") and before is not None and summary.averaged > 1
        rows.append((name, f"{change} (means of {summary.averaged} steps)" if averaged else change))
    rows += [(f"judge: {name}", text) for name, text in summary.judge]
    rows += [(f"episodes: {name}", text) for name, text in summary.episodes]
    if summary.critic:
        rows.append(("critic", summary.critic))
    if summary.pretraining:
        text = summary.pretraining.removeprefix("critic ")
        rows.append(("" if summary.critic else "critic", text))
    if summary.restrained:
        rows.append(("restrained", summary.restrained))
    if len(summary.rewards) >= MIN_POINTS:
        rows.append(("curve", draw_sparkline(summary.rewards, ascii_only=ascii_only)))
    if summary.model_dir is not None:
        rows.append(("model", str(summary.model_dir)))
    rows.append(("run folder", str(summary.run_dir)))
    lines = align_columns(rows)
    for warning in summary.warnings:
        lines += ["", f"warning: {warning}"]
    return [make_printable(line) for line in lines]


def format_next_steps(summary: Summary) -> list[str]:
    """Return printable lines with the commands to run next."""
    if not summary.next_steps:
        return []
    return [make_printable(line) for line in titled_table("What next:", summary.next_steps)]


class OutputClosed(Interrupted):
    """Raised when the program that reads our output has closed the pipe."""


def make_screen(file: TextIO | None = None, *, quiet: bool = False) -> Screen:
    """Return the screen for a file (default stdout): a live view on a terminal, else plain lines.

    `quiet` gives a screen that prints only warnings and the summary.
    """
    file = file or sys.stdout
    # A dumb terminal cannot move the cursor.
    live = file.isatty() and os.environ.get("TERM") != "dumb" and not quiet
    console = Console(file=file, highlight=False)
    return TerminalScreen(console) if live else PlainScreen(file, quiet=quiet)


class PlainScreen(Screen):
    """Plain lines without control codes, for files, pipes and logs.

    A quiet one prints only warnings and the summary.
    """

    def __init__(self, file: TextIO, *, quiet: bool = False) -> None:
        self._file = file
        self._quiet = quiet

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step."""
        self.note(format_step(step, total_steps, metrics))

    def pretraining(self, limits: Pretraining, lines: Sequence[Mapping[str, float]]) -> None:
        """Print the line of a step of critic pretraining."""
        self.note(format_pretraining(limits, lines))

    def note(self, text: str) -> None:
        """Print a remark."""
        if not self._quiet:
            self._print(text)

    def health(self, text: str, kind: str = "") -> None:
        """Print a warning."""
        self._print(f"warning: {text}")

    def summary(self, summary: Summary) -> None:
        """Print the summary of the run."""
        lines = format_summary(summary, ascii_only=not can_show(BLOCKS + "→", self._file.encoding))
        if next_steps := format_next_steps(summary):
            lines += ["", *next_steps]
        self._print("\n".join(["", summary.title, *(f"  {line}".rstrip() for line in lines)]))

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


# Metric -> its name in the live view, in the order of the rows.
CURVES = {
    "reward_mean": "reward", "val/reward_mean": "val", "response_length_mean": "length",
    "kl_divergence": "kl", "entropy": "entropy", "clip_fraction": "clip", "value_loss": "value",
    "explained_variance": "explained", "grad_norm": "gradient",
    "response_length/clip_ratio": "cut off", "time/step_s": "seconds",
}  # fmt: skip
FAILURES = ("score/failed", "val/score/failed")  # numbers of responses without a score
MIN_VIEW_HEIGHT = 20  # rows of a terminal below which only the bars are shown
WIDE = 64  # columns of a view below which its rows are abbreviated
MIN_WIDTH = 20  # columns of a view, for a name, a number and a curve of one character
# Columns that stay free: a terminal echoes `^C` there. In a full row the echo would begin another
# row, and rich would erase one too few.
FREE_COLUMNS = 5
MAX_TEXT_CHARS = 2000  # characters of a text in the view
KEPT_LINES = 20  # lines that are printed again after the width has changed


def format_judges(lines: Sequence[Mapping[str, float]], judges: Sequence[Spent]) -> list[str]:
    """Return rows about a run's judges: calls of the last step, dollars spent, budgets left."""
    last = lines[-1]

    def add_up(name: str) -> float:
        return math.fsum(last.get(f"{judge.name}/{name}", 0.0) for judge in judges)

    calls, cached, seconds = add_up("calls"), add_up("cached"), last.get("time/step_s")
    if not calls + cached:
        return []
    speed = f" ({calls / seconds:.1f}/s)" if seconds else ""
    errors = max(last.get(f"{judge.name}/error_rate", 0.0) for judge in judges)
    rests = []
    for judge in judges:
        whose = f" ({judge.name})" if len(judges) > 1 else ""
        if judge.max_usd is not None:
            rest = format_dollars(max(0.0, judge.max_usd - judge.usd))
            rests.append(f", {rest} of {format_dollars(judge.max_usd)} left{whose}")
        if judge.max_tokens is not None:
            left = max(0, judge.max_tokens - judge.tokens)
            rests.append(f", {left:,} of {judge.max_tokens:,} tokens left{whose}")
    spent = math.fsum(judge.usd for judge in judges)
    return [
        f"judge     last step: {plural(calls, 'call')}{speed}, "
        f"{cached / (calls + cached):.0%} from the cache, {errors:.1%} errors",
        f"cost      {format_dollars(spent)} spent{''.join(rests)}",
    ]


def format_end(seconds: float) -> str:
    """Return the clock time at which so many seconds will have passed, with another day's name."""
    end = time.localtime(time.time() + seconds)
    return time.strftime("%H:%M" if end[:3] == time.localtime()[:3] else "%a %H:%M", end)


class TerminalScreen(Screen):
    """A terminal screen: lines of steps scroll, and below them is a live view.

    Its rows, from above: curves of the steps so far, responses, the judges, failures, the last
    warning, the run, the phase. The view never shrinks, so that its last rows stay in place.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # State of the view; `_printed` are the last lines above it.
        self._width, self._height = console.width, 0
        self._steps: tuple[int, int] | None = None  # finished steps, and all
        self._pretraining: tuple[int, int] | None = None  # the same of critic pretraining
        self._ends: float | None = None  # of the run, on the monotonic clock
        self._phase: tuple[str, int | None, float] | None = None  # label, items, start
        self._done = 0  # items of the phase
        self._reward: Reward | None = None
        self._lines: list[Mapping[str, float]] = []  # metrics of the finished steps
        self._curves: dict[str, list[float]] = {}
        self._status: list[str] = []
        self._responses: Sequence[Mapping[str, Any]] = ()
        self._warning = ""
        self._printed: deque[tuple[str, str]] = deque(maxlen=KEPT_LINES)
        self._live = self._make_live()

    def _make_live(self) -> Live:
        """Return a rich Live display of the view, which disappears when it stops."""
        return Live(
            console=self._console, get_renderable=self._render_view, transient=True,
            vertical_overflow="crop",
        )  # fmt: skip

    def begin(
        self, reward: Reward, total_steps: int, history: Sequence[Mapping[str, float]]
    ) -> None:
        """Show the view of a run, of which the steps in `history` are finished."""
        self._reward, self._lines, self._ends = reward, list(history), None
        self._steps = (int(history[-1]["step"]) if history else 0, total_steps)
        self._read_lines()
        self._live.start()

    @contextmanager
    def phase(self, name: str, total: int | None) -> Iterator[Advance]:
        """Show a phase with its progress, until the next one begins."""
        # Other commands have phases whose names can be shown.
        label = PHASES.get(name.replace(" ", "_"), name)
        if self._reward is not None and judges_of(self._reward):
            label = label.replace("for rewards", "for the judge")
        self._phase, self._done = (label, total, time.monotonic()), 0

        def advance(count: int) -> None:
            self._done += count
            self._redraw_if_resized()

        self._redraw_if_resized()
        self._live.start()
        self._live.refresh()
        yield advance

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, and update the view."""
        self._steps = (step, total_steps)
        if "time/left_s" in metrics:
            self._ends = time.monotonic() + metrics["time/left_s"]
        self._lines.append(metrics)
        self._read_lines()
        self._print(format_step(step, total_steps, metrics, self._console.width))

    def pretraining(self, limits: Pretraining, lines: Sequence[Mapping[str, float]]) -> None:
        """Print the line of a step of critic pretraining, and show how far it is."""
        self._pretraining = self._ends = None
        if not is_pretrained(limits, lines):
            self._pretraining = len(lines), limits.max_steps
            self._ends = time.monotonic() + _pretraining_seconds_left(limits.max_steps, lines)
        self._print(format_pretraining(limits, lines, self._console.width))

    def _read_lines(self) -> None:
        """Update curves and status from the metrics of the finished steps."""
        # Parts of a mixture come last: there may be many.
        parts = mixture_part_means(self._lines[-1]) if self._lines else {}
        names = CURVES | {f"reward/{part}": part for part in parts}
        series = {w: [line[n] for line in self._lines if n in line] for n, w in names.items()}
        self._curves = {word: values for word, values in series.items() if values}
        failed = math.fsum(line.get(name, 0.0) for line in self._lines for name in FAILURES)
        self._status = []
        if self._lines and self._reward is not None:
            self._status = format_judges(self._lines, list_spent(self._reward, self._lines))
        self._status.append(f"failures  {plural(failed, 'response')} without a score")

    def responses(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Show responses in the view, as many as it has room for."""
        self._responses = lines

    def note(self, text: str) -> None:
        """Print a remark."""
        self._print(text, style="dim")

    def health(self, text: str, kind: str = "") -> None:
        """Print a warning, and show it in the view until the next one."""
        self._warning = text
        self._print(f"warning: {text}", style="yellow")

    def summary(self, summary: Summary) -> None:
        """Stop the view, and print the summary of the run in a frame, with commands below it."""
        self._live.stop()
        plain = not can_show(BLOCKS + "→╭", self._console.encoding)
        body = Text("\n".join(format_summary(summary, ascii_only=plain)))
        frame = box.ASCII if plain else box.ROUNDED
        panel = Panel(body, title=summary.title, title_align="left", box=frame, expand=False)
        self._console.print(panel)
        # Outside of the frame, where long commands can be copied.
        self._console.print(Text("\n".join(format_next_steps(summary))), soft_wrap=True)

    def close(self) -> None:
        """Remove the view. Safe to call twice."""
        self._live.stop()

    def _render_view(self) -> Constrain:
        """Return the view as rich renderables; rich calls this for each refresh."""
        width, bars = max(MIN_WIDTH, self._console.width - FREE_COLUMNS), self._make_bars()
        rows: list[Text] = []
        if self._steps is not None and self._console.height >= MIN_VIEW_HEIGHT:
            # A quarter of the terminal is for the lines above the view.
            room = self._console.height * 3 // 4 - bars.row_count
            status = [self._make_row(row) for row in self._status]
            if self._warning:
                text = self._make_row(f"warning   {self._warning}", "yellow")
                status += text.wrap(self._console, width, no_wrap=False)[: 1 + room // 12]
            curves = self._make_curves(width)[: (room - len(status)) // 2]
            rows = [
                *curves,
                *self._make_responses(width, room - len(status) - len(curves)),
                *status,
            ]
        self._height = max(self._height, len(rows))
        rows = [Text("")] * (self._height - len(rows)) + rows
        return Constrain(Group(*rows, bars), width)

    def _make_bars(self) -> Table:
        """Return the row of the run and that of the phase."""
        now, wide = time.monotonic(), self._console.width >= WIDE
        rows: list[tuple[str, ProgressBar | str, str]] = []
        steps = self._pretraining or self._steps
        if steps is not None:
            done, total = steps
            end = "time left: known after this step" if wide else ""
            if self._ends is not None:
                seconds_left = max(0.0, self._ends - now)
                end = f"done about {format_end(seconds_left)}"
                end += f" ({format_duration(seconds_left)} left)" if wide else ""
            unit = "pretraining" if self._pretraining else "step"
            label = f"{unit} {min(done + 1, total)} of {total}"
            label += f" ({done} done)" if wide else ""
            rows.append((label, ProgressBar(total, done), end))
        if self._phase is not None:
            label, items, began = self._phase
            took = format_duration(now - began)
            # A phase without items shows its time alone.
            several = items is not None and items > 1
            bar = ProgressBar(items, self._done) if several else ""
            if items and several and 0 < self._done < items:
                left = (now - began) * (items / self._done - 1)
                took += f", about {format_duration(left)} left"
            rows.append((label, bar, f"{self._done} of {items}, {took}" if several else took))
        bars = Table.grid(padding=(0, 2, 0, 0), expand=wide)
        for ratio in (None, 1, None) if wide else (None,):
            bars.add_column(no_wrap=True, ratio=ratio)
        for label, bar, figures in rows:
            bars.add_row(*([label, bar, figures] if wide else [f"{label}  {figures}"]))
        return bars

    def _make_curves(self, width: int) -> list[Text]:
        """Return a row for each metric: newest value, and from 3 points on its curve and range."""
        plain = not can_show(BLOCKS, self._console.encoding)
        rows = []
        for name, values in self._curves.items():
            row = f"{name[:9]:<10}{format_metric(values[-1]):<9}"
            if len(values) >= MIN_POINTS:
                span = f"  {format_metric(min(values))} to {format_metric(max(values))}"
                span = span if width >= WIDE else ""
                size = min(2 * CURVE_WIDTH, width - len(row) - len(span))
                row += draw_sparkline(values, width=size, ascii_only=plain) + span
            rows.append(self._make_row(row))
        return rows

    def _make_responses(self, width: int, room: int) -> list[Text]:
        """Return as many responses as fit into `room` rows, each with its prompt and its score."""
        count = min(len(self._responses), max(1, room // 4)) if room >= 3 else 0
        rows: list[Text] = []
        for line in self._responses[:count]:
            score = "failed" if line["score"] is None else f"score {format_number(line['score'])}"
            reply = self._make_row(f"response  {line['response']}", "dim")
            rows.append(self._make_row(f"prompt    {line['prompt']}", "dim"))
            rows += reply.wrap(self._console, width, no_wrap=False)[: max(1, room // count - 3)]
            rows.append(self._make_row(f"{score}  {line['failure'] or line['reason'] or ''}"))
        return rows

    def _make_row(self, text: str, style: str = "") -> Text:
        """Return one row of the view; long text is cut at its end, so that it does not wrap."""
        line = re.sub(r"\s*[\n\t]\s*", " ", make_printable(text[:MAX_TEXT_CHARS]))
        line = replace_unencodable(line, self._console.encoding)
        return Text(line, style, no_wrap=True, overflow="ellipsis")

    def _redraw_if_resized(self) -> None:
        """Clear and draw everything again if the width has changed, as terminals wrap old lines."""
        if self._console.width == self._width:
            return
        self._width, self._height = self._console.width, 0
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
