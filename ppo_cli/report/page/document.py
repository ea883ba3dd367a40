"""The page itself: one HTML text with its scripts, styles and data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from ppo_cli import __version__
from ppo_cli.redact import redact
from ppo_cli.report.page.rollouts import SAMPLE_TEXT, Rollouts, labels_of, sample
from ppo_cli.report.page.run_data import RunData
from ppo_cli.run_folder import plain

MOST_BYTES = 12_000_000  # of responses in a report, for all its runs
SCRIPTS = ("base.js", "curves.js", "rollouts.js")


def report(runs: Sequence[RunData], most_bytes: int = MOST_BYTES) -> str:
    """The page as one file: it needs no server, no network and no other file."""
    rows, notes = [], []
    for run in runs:
        rollouts = Rollouts(run.folder)
        total = len(rollouts.rows())
        chosen = sample(rollouts, most_bytes // len(runs))
        rows.append(rollouts.read(chosen, SAMPLE_TEXT))
        notes.append(
            f"{len(chosen):,} of {total:,} responses are in this file: whole histories of the "
            "prompts that changed most, the best, worst, most disputed and failed, and some of "
            f"every part of the run. All are in `ppo view {run.name}`."
            if len(chosen) < total
            else ""
        )
    return page({
        "live": False,
        "runs": [run.read() for run in runs],
        "rows": rows,
        "notes": notes,
        "labels": [labels_of(run.folder) for run in runs],
    })  # fmt: skip


def page(data: Mapping[str, Any]) -> str:
    """The HTML of the page for this data; text of the data stays text."""
    here = files("ppo_cli.report.page")
    # The pictures of the overview come before Bokeh is read, which takes a moment.
    scripts = [here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    ours, later = scripts[0], "\n".join(scripts[1:])
    blocks = [ours, *(path.read_text(encoding="utf-8") for path in bokeh_files()), later]
    told = {"version": __version__} | dict(data)
    values = {
        "CSP": policy(blocks, live=bool(data["live"])),
        "STYLE": here.joinpath("page.css").read_text(encoding="utf-8"),
        "DATA": as_json(told),
        "SCRIPTS": "\n".join(f"<script>{block}</script>" for block in blocks),
    }
    text = here.joinpath("page.html").read_text(encoding="utf-8")
    head, *rest = text.split("{{")
    return head + "".join(
        values[name] + tail for name, _, tail in (part.partition("}}") for part in rest)
    )


def as_json(value: Any) -> str:
    """JSON that is safe within a script element: without `<`, `>`, `&` and line separators."""
    # What a run writes is without secrets already; this holds for any other file too.
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a line of another program may hold a NaN
        text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"))
    text = redact(text)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # A character that a sampler cut in half has no UTF-8: as \udXXX it is JSON all the same.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def policy(blocks: Sequence[str], *, live: bool) -> str:
    """The Content-Security-Policy: these scripts and nothing else run, nothing is loaded."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}'"
        for block in blocks
    )
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def bokeh_files() -> list[Path]:
    """The JavaScript of the installed Bokeh: the library and its plotting interface."""
    from bokeh.util.paths import bokehjs_path

    folder = Path(bokehjs_path()) / "js"
    return [folder / "bokeh.min.js", folder / "bokeh-api.min.js"]
