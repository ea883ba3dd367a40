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
from collections.abc import Callable, Iterator
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
    format_end,
    format_number,
    format_step,
    format_summary,
    make_printable,
    make_screen,
)
from ppo_cli.errors import format_duration
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
next_steps = (("a purpose", "ppo try this"),)
screen.summary(Summary(2, reward, (0.5, 0.75, 1.0), Path("m"), Path("r"), 65.0,
                       verdict="Learned", next_steps=next_steps))
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
        next_steps=(("the responses with the lowest scores", "ppo show outputs --worst 5"),),
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
    seen, deadline = b"", time.monotonic() + 300
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
        command, stdout=subprocess.PIPE, env=os.environ | env, timeout=300, check=True
    )
    return done.stdout.decode(env.get("PYTHONIOENCODING", "utf-8"))


def test_on_a_terminal_bars_lines_and_a_frame() -> None:
    seen = run_on_terminal()
    assert "sampling" in seen and "updating the actor" in seen
    assert "step 1/2  reward 0.500" in seen and "step 2/2  reward 1.000" in seen
    assert "a [bold]note[/bold]" in seen
    assert "╭─ Done: learned" in seen and "▁▅█" in seen
    assert "a purpose  ppo try this\r\n" in seen  # outside of the frame, to be copied
    assert "\x1b[2J" not in seen and r"look \x1b[2J here" in seen
    assert "\x1b[33m" in seen  # a warning is yellow
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l")  # the cursor is back


VIEW = """
import sys
from ppo_cli.cli.screen import make_screen
from ppo_cli.config.settle import settle
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.config.schema.run import Config
from ppo_cli.machine.machine import Machine
screen = make_screen()
api = {"enable": True, "type": "openai", "model": "m", "budget_usd": 1.0, "budget_tokens": 90000}
config = Config.model_validate({"reward": {"api": api}})
config = fit_memory(settle(config, Machine())).config
metrics = {"kl_divergence": 0.01, "entropy": 0.5, "response_length_mean": 3.5, "value_loss": 0.1,
           "clip_fraction": 0.0, "explained_variance": 0.5, "grad_norm": 1.0,
           "response_length/clip_ratio": 0.25, "time/step_s": 10.0, "time/left_s": 65.0,
           "judge/calls": 30.0, "judge/cached": 10.0, "judge/error_rate": 0.05,
           "judge/cost_usd_total": 0.125,
           "score/failed": 2.0}
long = "two \\x1b[2J" + "wide 好 " * 100
line = {"prompt": "1 + 1 = ?\\nbe brief " + "x" * 300, "response": long, "score": 0.25,
        "failure": None, "reason": "half\\nright"}
def wait():
    print("ready", file=sys.__stderr__, flush=True)
    sys.stdin.readline()
screen.begin(config.reward, 40, [])
for step in range(1, 31):
    with screen.phase("rollout", 8) as advance:
        advance(4)
        if step in (1, 20, 30):
            wait()
        advance(4)
    screen.responses([line] * 8)
    with screen.phase("reward_wait", 8):
        if step == 2:
            wait()
    metrics |= {"reward_mean": step / 40, "val/reward_mean": 0.5, "judge/tokens_total": 1e3 * step}
    screen.step(step, 40, dict(metrics))
    if step == 10:
        screen.health("the KL is above its range, " + "and this is a long story " * 9)
screen.close()
"""


class Terminal:
    """A program on a terminal of some size: what a person sees there."""

    def __init__(self, script: str, columns: int, rows: int) -> None:
        self._master, self._slave = pty.openpty()
        self._rows = rows
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.resize(columns)
        variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=self._slave, stdin=subprocess.PIPE,
            stderr=subprocess.PIPE, env=variables | {"TERM": "xterm-256color"}, text=True,
        )  # fmt: skip
        self._chunks, self._fed_at = 0, time.monotonic()
        self._feeding = threading.Lock()
        self._reader = threading.Thread(target=self._feed, daemon=True)
        self._reader.start()

    def _feed(self) -> None:
        with contextlib.suppress(OSError):  # Linux: the other end is closed
            while chunk := os.read(self._master, 65536):
                with self._feeding:
                    self._stream.feed(chunk)
                    self._chunks, self._fed_at = self._chunks + 1, time.monotonic()

    def resize(self, columns: int) -> None:
        self._screen.resize(self._rows, columns)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", self._rows, columns, 0, 0))

    def press(self, key: bytes) -> None:
        """Type a key, which the terminal echoes where the cursor is."""
        os.write(self._master, key)

    def wait(self) -> list[str]:
        """Wait until the program is ready for the next line, and return the rows."""
        assert self.process.stderr is not None
        self.process.stderr.readline()
        return self.look()

    def look(self) -> list[str]:
        """Return the rows between two drawings, after two more of up to four chunks each."""
        least, deadline = self._chunks + 8, time.monotonic() + 20.0
        time.sleep(0.2)
        while time.monotonic() < deadline:
            with self._feeding:
                if self._chunks >= least and time.monotonic() > self._fed_at + 0.1:
                    break
            time.sleep(0.01)
        return [row.rstrip() for row in self._screen.display if row.strip()]

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> list[str]:
        """Wait for the end of the program, and return the rows that are left."""
        assert self.process.wait(300) == 0
        os.close(self._slave)
        self._reader.join(60)
        os.close(self._master)
        return [row.rstrip() for row in self._screen.display if row.strip()]


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*size: int, script: str = VIEW) -> Terminal:
        opened.append(Terminal(script, *size))
        return opened[-1]

    yield start
    for one in opened:
        one.process.kill()
        one.process.__exit__(None, None, None)


def split_view(rows: list[str]) -> tuple[list[str], list[str]]:
    """Return the rows above the view and those of the view, which begins with the reward."""
    begins = max(i for i, row in enumerate(rows) if row.startswith(("reward ", "step ")))
    begins = next((i for i, row in enumerate(rows) if row.startswith("reward ")), begins)
    return rows[:begins], rows[begins:]


def check_figures(rows: list[str]) -> None:
    """What step 20 says of the judge, its cost, failures, curves and responses."""
    assert "judge     last step: 30 calls (3.0/s), 25% from the cache, 5.0% errors" in rows, rows
    # 19 steps of 1,000 tokens and two failures each.
    assert "cost      $0.12 spent, $0.88 of $1.00 left, 71,000 of 90,000 tokens left" in rows
    assert "failures  38 responses without a score" in rows
    assert any(row.startswith("reward    0.475") and "0.025 to 0.475" in row for row in rows)
    # The beginning of a prompt is shown, as its end is cut.
    assert any(row.startswith("prompt    1 + 1 = ? be brief xxx") for row in rows), rows
    assert "score 0.250  half right" in rows
    done = next(row for row in rows if row.startswith("step 20 of 40 (19 done)"))
    assert re.search(r"done about (\w{3} )?\d\d:\d\d \(1 min \d s left\)$", done), done


@pytest.mark.parametrize(
    ("columns", "rows", "later", "curves", "responses"),
    [(100, 30, 132, 7, 2), pytest.param(40, 20, 80, 4, 1, marks=pytest.mark.slow)],
)
def test_the_view_is_whole_at_any_size_and_after_a_change_of_the_width(
    terminal: Callable[..., Terminal], columns: int, rows: int, later: int, curves: int,
    responses: int,
) -> None:  # fmt: skip
    view = terminal(columns, rows)
    # The first step: which one it is of how many, and what is being done.
    first = view.wait()
    assert (first[-2].startswith("step 1 of 40") and "known after" in first[-2]) or columns < 64
    assert first[-1].startswith("sampling") and "4 of 8, " in first[-1]
    view.go_on()
    # The second: all rows are in their places, and one point is no curve.
    names = ["reward", "val", "length", "kl", "entropy", "clip", "value", "explained", "gradient",
             "cut", "seconds"]  # fmt: skip
    texts = ["prompt", "response", "score"] * responses
    order = [*names[:curves], *texts, "judge", "cost", "failures", "warning", "step", "sampling"]
    above, shown = split_view(view.wait())
    assert "█" not in "".join(shown), shown
    assert shown[-2].startswith("step 2 of 40") and shown[-1].startswith("waiting for the judge")
    view.go_on()
    for width, done in ((columns, 19), (later, 29)):
        view.resize(width)
        above, shown = split_view(view.wait())
        if width == 100:
            check_figures(shown)
        # Rows that begin otherwise go on with a response or the warning.
        words = [row.split()[0] for row in shown if row.split()[0] in {*names, *order}]
        assert words == order or width != columns, shown
        assert max(map(len, shown)) <= width - 5, shown
        # Lines above the view are whole, in order, and none of them is a leftover of the view.
        steps = [row for row in above if row.startswith("step ")]
        numbers = [int(row[5:7]) for row in steps]
        assert numbers == list(range(numbers[0], done + 1)), above
        assert all(len(row) <= width and "reward" in row for row in steps), above
        assert len([row for row in above if not row.startswith("step ")]) <= 5, above
        assert not any("━" in row or row.startswith(("judge", "prompt")) for row in above), above
        assert f"step {done + 1} of 40" in shown[-2] and "done about " in shown[-2]
        assert "4 of 8" in shown[-1]
        view.go_on()
    left = view.end()
    assert not any(row.startswith(("judge", "warning", "sampling")) for row in left), left


@pytest.mark.slow
def test_a_key_that_the_terminal_echoes_leaves_no_second_row(
    terminal: Callable[..., Terminal],
) -> None:
    view = terminal(80, 24)
    view.wait()
    view.press(b"\x03")
    view.press(b"\x03")
    rows = view.look()
    assert [row.split()[0] for row in rows] == ["failures", "step", "sampling"], rows
    for _ in range(4):
        view.go_on()
    view.end()


def test_clock_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.mktime((2026, 11, 26, 17, 40, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "localtime", lambda at=now, real=time.localtime: real(at))
    assert format_end(130) == "17:42" and format_end(8 * 3600) == "Fri 01:40"


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
    assert "curve       ▁▅█" in text and "1 min 5 s" in text


def test_an_output_that_knows_only_ascii_gets_ascii() -> None:
    text = run_piped(SCRIPT.replace("note(", "note('é' + "), PYTHONIOENCODING="ascii")
    assert "?a [bold]" in text and "0.500 -> 1.000" in text and "curve       _=#" in text


def test_a_screen_that_nobody_reads_ends_the_run() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        screen = PlainScreen(file)
        with pytest.raises(OutputClosed, match="has closed it"):
            screen.note("words")
        screen.note("more words")  # lead nowhere, as what is left at the end does


def test_step_line() -> None:
    line = format_step(7, 120, METRICS | {"val/reward_mean": 0.25, "val/accuracy": 0.25})
    assert line == "step   7/120  reward 0.500  kl 1.2e-04  entropy 1.250  val 0.250  2.0 s"
    assert format_step(0, 5, {"val/reward_mean": 0.3}) == "step 0/5  val 0.300"
    assert (
        format_step(1, 5, {"policy_loss": 7.5e-08, "kl_divergence": 7.5e-08, "time/left_s": 90})
        == "step 1/5  kl 0.000  1 min 30 s left"
    )


PRETRAINING = """
from ppo_cli.cli.screen import make_screen
from ppo_cli.config.settle import settle
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.config.schema.run import Config
from ppo_cli.machine.machine import Machine
import sys
screen = make_screen()
config = Config.model_validate({"critic": {"pretrain_steps": 12, "pretrain_until": 0.5}})
config = fit_memory(settle(config, Machine())).config
lines = [{"time/step_s": 7.0, "explained_variance": 0.1 * i, "reward_mean": 0.4, "value_loss": 0.1}
         for i in range(6)]
screen.begin(config.reward, 40, [])
for count in (3, 6):
    screen.pretraining(config.pretraining, lines[:count])
    with screen.phase("update critic", 1):
        print("ready", file=sys.__stderr__, flush=True)
        sys.stdin.readline()
screen.close()
"""


@pytest.mark.slow
def test_pretraining_shows_its_step_the_explained_variance_and_the_time_left(
    terminal: Callable[..., Terminal],
) -> None:
    view = terminal(80, 24, script=PRETRAINING)
    rows = view.wait()
    assert "critic pretraining  3/12  explained 0.20 (target 0.5)  7.0 s" in rows[0], rows
    assert re.match(r"pretraining 4 of 12 \(3 done\) .*done about .*\(1 min \d+ s left\)", rows[-2])
    view.go_on()
    rows = view.wait()  # the target is reached: the run's steps come next
    assert rows[-2].startswith("step 1 of 40") and "known after this step" in rows[-2], rows
    view.go_on()
    seen = run_piped(PRETRAINING.replace("sys.stdin.readline()", "pass"))
    assert seen.split("\n")[:2] == [
        "critic pretraining  3/12  explained 0.20 (target 0.5)  7.0 s  reward 0.400  value 0.100  "
        "1 min 3 s left at most",
        "critic pretraining  6/12  explained 0.50 (target 0.5)  7.0 s  reward 0.400  value 0.100",
    ]


def test_a_step_line_fits_into_a_terminal() -> None:
    metrics = dict.fromkeys(COLUMNS, -0.123) | {"time/step_s": 39.0, "time/left_s": 4000.0}
    fields = "step   7/120  reward -0.123  kl -0.123  entropy -0.123  length -0.123"
    # Steps with and without a validation have the same fields.
    assert format_step(7, 120, metrics, 80) == (
        "step   7/120  reward -0.123  kl -0.123  length -0.123  39.0 s"
    )
    assert format_step(7, 120, metrics, 100) == f"{fields}  39.0 s"
    line = format_step(7, 120, metrics | {"val/reward_mean": 0.5}, 100)
    assert line == f"{fields}  val 0.500  39.0 s"


def test_a_summary_says_one_number_once_and_a_decline_as_such() -> None:
    lines = "\n".join(
        format_summary(
            Summary(
                12,
                [("reward", 0.453, 0.0), ("validation accuracy", 0.5, 0.6), ("once", None, 0.617)],
                (0.453, 0.0), None, Path("r"), 400.0, averaged=4,
                session=(2, 8.0), judge=(("qwen-plus", "3 calls, $0.0021"),),
                critic="explained variance 0.37", declined=frozenset({"reward"}),
                warnings=("The policy has collapsed.",),
            )
        )
    )  # fmt: skip
    for fragment in (
        "12 in 6 min 40 s (this session: 2 in 8 s)", "0.453 → 0.000 (declined) (means of 4 steps)",
        "validation accuracy  0.500 → 0.600\n", "once                 0.617\n",
        "judge: qwen-plus     3 calls, $0.0021\n", "critic               explained variance 0.37\n",
        "warning: The policy has collapsed.",
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
