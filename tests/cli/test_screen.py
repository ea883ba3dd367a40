"""Bars on a terminal, plain lines anywhere else, and nothing that repaints the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pyte
import pytest

from ppo_cli.cli.screen import (
    ASCII_BLOCKS,
    BLOCKS,
    COLUMNS,
    OutputClosed,
    PlainScreen,
    draw_sparkline,
    format_number,
    format_step,
    format_summary,
    make_printable,
    make_screen,
)
from ppo_cli.report.metrics import format_duration
from ppo_cli.report.tracker import Summary

METRICS = {"reward_mean": 0.5, "kl_divergence": 0.00012, "entropy": 1.25, "time/step_s": 2.04}
SCRIPT = """
from pathlib import Path
from ppo_cli.cli.screen import make_screen
from ppo_cli.report.tracker import Summary
screen = make_screen()
for step in (1, 2):
    for name, total in (("rollout", 4), ("update actor", None)):
        with screen.phase(name, total) as advance:
            advance(2)
            advance(2)
    screen.step(step, 2, {"reward_mean": 0.5 * step})
screen.note("a [bold]note[/bold]")
screen.health("look \\x1b[2J here")
reward = [("reward", 0.5, 1.0)]
screen.summary(Summary(2, reward, (0.5, 1.0), Path("m"), Path("r"), 65.0, ("try this",)))
screen.close()
screen.close()
"""


def summary() -> Summary:
    return Summary(
        steps=40,
        measures=[("reward", 0.1, 0.9), ("val/accuracy", 0.125, 0.875)],
        rewards=(0.1, 0.5, 0.9),
        model_dir=Path("outputs/checkpoints/latest/actor"),
        run_dir=Path("outputs"),
        wall_seconds=125.0,
        next_steps=("ppo show outputs --worst 5",),
    )


def run_on_terminal(**env: str) -> str:
    """Run the script with a terminal as stdout and return all that it wrote there."""
    program_end, terminal_end = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=terminal_end,
        stderr=terminal_end,
        env=variables | {"TERM": "xterm-256color", "COLUMNS": "100", **env},
    )
    os.close(terminal_end)
    seen, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([program_end], [], [], 1.0)[0]:
            continue
        try:
            chunk = os.read(program_end, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(program_end)
    assert process.wait(timeout=300) == 0, seen.decode()
    return seen.decode()


def run_piped(script: str, **env: str) -> str:
    """Run a script whose output is a pipe and return what it printed."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=os.environ | env, timeout=60, check=True
    )
    return done.stdout.decode(env.get("PYTHONIOENCODING", "utf-8"))


def test_on_a_terminal_bars_lines_and_a_frame() -> None:
    seen = run_on_terminal()
    assert "rollout" in seen and "update actor" in seen and "4/4" in seen
    assert "step 1/2  reward 0.500" in seen and "step 2/2  reward 1.000" in seen
    assert "a [bold]note[/bold]" in seen
    assert "╭" in seen and "▁█" in seen and "try this" in seen
    assert "\x1b[2J" not in seen and r"look \x1b[2J here" in seen
    assert "\x1b[33m" in seen  # a warning is yellow
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l")  # the cursor is back


VIEW = """
import sys
from ppo_cli.cli.screen import make_screen
screen = make_screen()
metrics = {"kl_divergence": 0.01, "entropy": 0.5, "judge/calls": 30.0, "judge/cached": 10.0,
           "judge/error_rate": 0.05, "judge/cost_usd_total": 0.125, "time/step_s": 10.0,
           "time/left_s": 65.0}
for step in range(1, 31):
    with screen.phase("rollout", 8) as advance:
        line = {"prompt": "user: 1 + 1 = ?\\n", "response": "two \\x1b[2J" + "wide 好 " * 100,
                "score": 0.25, "failure": None, "reason": "half\\nright"}
        screen.sample(line)
        advance(4)
        if step in (20, 30):
            print("ready", file=sys.__stderr__, flush=True)
            sys.stdin.readline()
        advance(4)
    screen.step(step, 40, {"reward_mean": step / 40} | metrics)
    if step == 10:
        screen.health("the KL is above its range")
screen.close()
"""


@pytest.mark.parametrize(("columns", "rows", "later"), [(80, 40, 50), (80, 24, 132), (60, 12, 40)])
def test_the_view_is_whole_at_any_width_and_after_a_change_of_it(
    columns: int, rows: int, later: int
) -> None:
    program_end, terminal_end = pty.openpty()

    def feed() -> None:
        with contextlib.suppress(OSError):  # Linux: the other end is closed
            while chunk := os.read(program_end, 65536):
                stream.feed(chunk)

    size = lambda width: struct.pack("HHHH", rows, width, 0, 0)  # noqa: E731
    fcntl.ioctl(terminal_end, termios.TIOCSWINSZ, size(columns))
    terminal = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(terminal)
    variables = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    reader = threading.Thread(target=feed, daemon=True)
    reader.start()
    with subprocess.Popen(
        [sys.executable, "-c", VIEW], stdout=terminal_end,
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        env=variables | {"TERM": "xterm-256color"}, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stderr is not None
        for width, done in ((columns, 19), (later, 29)):
            terminal.resize(rows, width)
            fcntl.ioctl(terminal_end, termios.TIOCSWINSZ, size(width))
            process.stderr.readline()
            time.sleep(1.0)  # four times the time between two drawings
            shown = [row.rstrip() for row in terminal.display if row.strip()]
            view = ["steps", "rollout"]
            if rows >= 20:
                texts = ["reward", "kl", "entropy", "judge", "prompt", "response", "score"]
                view = [*texts, "warning:", *view]
            above, below = shown[: -len(view)], shown[-len(view) :]
            assert [row.split()[0] for row in below] == view, shown
            repeated_rows = [
                row for row in above if "━" in row or row.startswith(("judge", "prompt"))
            ]
            assert "4/8" in below[-1] and not repeated_rows, shown
            steps = [int(row[5:7]) for row in above if row.startswith("step ")]
            assert steps == list(range(steps[0], done + 1)), shown
            if rows >= 20:
                assert below[3].startswith("judge  30 calls (3.0/s)  from the cache 25%")
                assert width < 60 or "errors 5.0%  $0.125 so far" in below[3]
                assert below[6] == "score 0.250 half right"
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(60) == 0
    os.close(terminal_end)
    reader.join(10)
    os.close(program_end)
    remaining_rows = [row.split()[0] for row in terminal.display if row.strip()]
    assert (
        "judge" not in remaining_rows and "steps" not in remaining_rows and "step" in remaining_rows
    )


def test_quiet_prints_warnings_and_the_summary() -> None:
    out = io.StringIO()
    screen = make_screen(out, quiet=True)
    screen.note("a remark")
    screen.step(1, 2, {"reward_mean": 0.5})
    screen.health("look here")
    screen.summary(summary())
    assert out.getvalue().startswith("warning: look here\n\nDone\n")


def test_no_color_is_respected() -> None:
    seen = run_on_terminal(NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-7]|38|9[0-7])[0-9;]*m", seen)
    assert "warning: look" in seen


def test_a_dumb_terminal_and_a_pipe_get_plain_lines() -> None:
    seen = run_on_terminal(TERM="dumb")
    assert "\x1b" not in seen and "step 2/2  reward 1.000" in seen
    text = run_piped(SCRIPT, FORCE_COLOR="1")
    assert "\x1b" not in text and "\r" not in text
    assert text.splitlines()[:4] == [
        "step 1/2  reward 0.500",
        "step 2/2  reward 1.000",
        "a [bold]note[/bold]",
        r"warning: look \x1b[2J here",
    ]
    assert "curve       ▁█" in text and "1 min 5 s" in text


def test_an_output_that_knows_only_ascii_gets_ascii() -> None:
    text = run_piped(SCRIPT.replace("note(", "note('é' + "), PYTHONIOENCODING="ascii")
    assert "?a [bold]" in text and "0.500 -> 1.000" in text and "curve       _#" in text


def test_a_screen_that_nobody_reads_ends_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        screen = PlainScreen(file)
        with pytest.raises(OutputClosed, match="has closed it"):
            screen.note("words")
        screen.note("more words")  # lead nowhere, as what is left at the end does


def test_the_summary_says_what_came_out() -> None:
    out = io.StringIO()
    PlainScreen(out).summary(summary())
    shown = out.getvalue()
    for fragment in (
        "40 in 2 min 5 s", "0.100", "0.900", "val/accuracy", "checkpoints/latest/actor",
        "What next:", "ppo show outputs --worst 5",
    ):  # fmt: skip
        assert fragment in shown


def test_a_summary_of_little() -> None:
    out = io.StringIO()
    PlainScreen(out).summary(Summary(0, (), (), None, Path("r"), 0.2))
    assert "0 in 0 s" in out.getvalue() and "reward" not in out.getvalue()


def test_step_line() -> None:
    line = format_step(7, 120, METRICS | {"val/reward_mean": 0.3, "val/accuracy": 0.25})
    assert line == "step   7/120  reward 0.500  kl 1.2e-04  entropy 1.250  val 0.250  2.0 s"
    assert format_step(0, 5, {"val/reward_mean": 0.3}) == "step 0/5  val 0.300"
    assert (
        format_step(1, 5, {"policy_loss": 7.5e-08, "kl_divergence": 7.5e-08, "time/left_s": 90})
        == "step 1/5  kl 0.000  1 min 30 s left"
    )


def test_a_step_line_breaks_between_fields() -> None:
    metrics = dict.fromkeys(COLUMNS, -0.123) | {"time/step_s": 39.0, "time/left_s": 4000.0}
    line = format_step(7, 120, metrics)
    broken = format_step(7, 120, metrics, 80)
    assert "\n" not in line and max(map(len, broken.split("\n"))) <= 80
    assert broken.replace("\n    ", "  ") == line and "\n" in broken


def test_a_summary_says_one_number_once_and_a_decline_as_such() -> None:
    lines = "\n".join(
        format_summary(
            Summary(
                12,
                [("reward", 0.453, 0.0), ("validation accuracy", 0.5, 0.6), ("once", None, 0.617)],
                (0.453, 0.0), None, Path("r"), 400.0,
                session=(2, 8.0), judge="3 calls, $0.0021", declined=frozenset({"reward"}),
                warnings=("The policy has collapsed.",),
            )
        )
    )  # fmt: skip
    for fragment in (
        "12 in 6 min 40 s (this session: 2 in 8 s)", "0.453 → 0.000 (declined)",
        "validation accuracy  0.500 → 0.600\n", "once                 0.617\n",
        "judge                3 calls, $0.0021", "warning: The policy has collapsed.",
    ):  # fmt: skip
        assert fragment in lines, fragment
    assert lines.count("declined") == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (float("nan"), "-"), (0.0, "0.000"), (-0.25, "-0.250"), (0.0004, "4.0e-04"),
        (12.3456, "12.346"), (123.456, "123.5"), (4321.0, "4321"), (2.5e6, "2.5e+06"),
    ],
)  # fmt: skip
def test_numbers(value: float | None, shown: str) -> None:
    assert format_number(value) == shown


def test_sparkline() -> None:
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BLOCKS
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7], ascii_only=True) == ASCII_BLOCKS
    assert draw_sparkline([1.0, float("nan"), 1.0]) == "▁▁"
    assert draw_sparkline([]) == ""
    long = draw_sparkline([float(n) for n in range(1003)])
    assert len(long) == 40 and long[0] == "▁" and long[-1] == "█" and list(long) == sorted(long)


def test_durations() -> None:
    assert [format_duration(s) for s in (0.4, 59.6, 61, 3600, 7800)] == [
        "0 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "2 h 10 min",
    ]  # fmt: skip


def test_shown_text_has_no_control_codes_secrets_or_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "top-secret-1")
    assert make_printable("a\x1b[31m\x07\r\x9b\tb\nc") == "a\\x1b[31m\\x07\\x0d\\x9b\tb\nc"
    assert make_printable("key top-secret-1") == "key ***"
    assert make_printable("half \ud83d") == "half ?"
