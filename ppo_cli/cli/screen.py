"""What a run shows: progress bars and lines on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

from rich import box
from rich.console import Console
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

from ppo_cli.cli.wording import BLOCKS, can_show, clean, fit, step_line, summary_lines
from ppo_cli.errors import Interrupted
from ppo_cli.report.tracker import Advance, Screen, Summary
from ppo_cli.signals import lead_nowhere


class Unread(Interrupted):
    """Nobody is there any more to read what is printed."""


def make_screen(*, quiet: bool = False) -> Screen:
    """Build the screen that fits where stdout goes; `quiet` leaves warnings and the end."""
    on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if quiet or not on_terminal:
        return PlainScreen(sys.stdout, quiet=quiet)
    return TerminalScreen(Console(file=sys.stdout, highlight=False))


class PlainScreen:
    """Plain lines without control codes, for files, pipes and logs."""

    def __init__(self, file: TextIO, *, quiet: bool = False) -> None:
        self._file = file
        self._quiet = quiet

    def phase(self, name: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show nothing: bars belong on a terminal."""
        return nullcontext(lambda done: None)

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step."""
        if not self._quiet:
            self._print(step_line(step, total_steps, metrics))

    def note(self, text: str) -> None:
        """Print a remark."""
        if not self._quiet:
            self._print(text)

    def health(self, text: str) -> None:
        """Print a warning."""
        self._print(f"warning: {text}")

    def summary(self, summary: Summary) -> None:
        """Print what the run came to."""
        lines = summary_lines(summary, ascii_only=not can_show(BLOCKS + "→", self._file.encoding))
        self._print("\n".join(["", "Done", *(f"  {line}".rstrip() for line in lines)]))

    def close(self) -> None:
        """Do nothing: nothing was opened."""

    def _print(self, text: str) -> None:
        try:
            print(fit(clean(text), self._file.encoding), file=self._file, flush=True)
        except BrokenPipeError:
            # What is still to be written would fail once more as the program ends.
            lead_nowhere(self._file.fileno())
            raise Unread(
                "Nobody reads what is printed here any more. Write it into a file with `> FILE`."
            ) from None


class _TimeLeft(TimeRemainingColumn):
    """The time left of a phase as its speed tells it, of the run as the run itself tells it."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        ends = task.fields.get("ends")
        if ends is None or math.isnan(ends):
            return super().render(task)
        left = max(0, round(ends - time.monotonic()))
        minutes, seconds = divmod(left, 60)
        shown = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        return Text(shown, style="progress.remaining")


class TerminalScreen:
    """A bar for the run and one for each phase of the present step, lines above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _TimeLeft(),
            console=console,
            speed_estimate_period=3600.0,  # of a phase: its parts may take minutes
            transient=True,
            expand=True,
        )
        self._phases: dict[str, TaskID] = {}
        self._whole: TaskID | None = None

    @contextmanager
    def phase(self, name: str, total: int | None) -> Iterator[Advance]:
        """Show a bar that stays, full, until the step is over."""
        self._progress.start()
        if name in self._phases:
            task = self._phases[name]
            self._progress.reset(task, total=total)
        else:
            task = self._phases[name] = self._progress.add_task(name, total=total)
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            self._progress.update(task, completed=done)

        yield advance
        self._progress.update(task, total=max(total or 1, done), completed=max(total or 1, done))
        self._progress.stop_task(task)

    def step(self, step: int, total_steps: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step and move the bar of the run."""
        self._print(step_line(step, total_steps, metrics, self._console.width))
        for task in self._phases.values():
            self._progress.remove_task(task)
        self._phases.clear()
        if self._whole is None:
            self._whole = self._progress.add_task("steps", total=total_steps, completed=step)
        ends = time.monotonic() + metrics.get("time/left_s", math.nan)
        self._progress.update(self._whole, completed=step, ends=ends)

    def note(self, text: str) -> None:
        """Print a remark."""
        self._print(text, style="dim")

    def health(self, text: str) -> None:
        """Print a warning."""
        self._print(f"warning: {text}", style="yellow")

    def summary(self, summary: Summary) -> None:
        """Show what the run came to, in a frame."""
        self._progress.stop()
        plain = not can_show(BLOCKS + "→╭", self._console.encoding)
        body = Text("\n".join(summary_lines(summary, ascii_only=plain)))
        frame = box.ASCII if plain else box.ROUNDED
        self._console.print(Panel(body, title="Done", title_align="left", box=frame, expand=False))

    def close(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(clean(text), style=style), soft_wrap=True)


__all__ = ["PlainScreen", "TerminalScreen", "Unread", "make_screen"]
