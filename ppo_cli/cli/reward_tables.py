"""The results of `ppo reward` as text for a terminal.

Each function takes the facts that `--json` prints; `cli/reward.py` calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.cli.screen import format_number, titled_table
from ppo_cli.errors import format_duration, plural

# Characters of the longest bar in a histogram.
BAR = 30
Facts = Mapping[str, Any]
Pairs = Sequence[tuple[str, str]]
# Key of a cost -> its name in tables.
COST_COLUMNS = {
    "calls": "calls", "cached": "from the cache", "cost_usd": "cost", "tokens": "tokens",
    "tokens_in": "tokens in", "tokens_out": "tokens out",
}  # fmt: skip
# Columns of the table about parts of a mixture: key -> heading.
PART_COLUMNS = {
    "weight": "weight", "share": "of the spread", "scored": "scored", "failed": "failed",
    "gated": "not asked", "mean": "mean", "std": "std", "min": "min", "max": "max",
    "length": "with length",
}  # fmt: skip


def format_scores(summary: Facts) -> list[str]:
    """Return the result of `ppo reward score` as lines: statistics, histogram, examples."""
    rows = count_rows(summary)
    if summary["scored"]:
        rows += [(name, format_number(summary[name])) for name in ("mean", "std", "min", "max")]
    # Numbers first, then remarks, then the histogram and examples.
    lines = [*titled_table("Scores", [*rows, *cost_rows(summary)]), *format_parts(summary)]
    if summary["remarks"]:
        lines += ["", *(f"  - {sentence}" for sentence in summary["remarks"])]
    lines += format_histogram(summary["histogram"])
    # If the file already had scores, show how much the order has changed.
    if summary["rankings"] is not None:
        lines += ["", *format_rankings(summary["rankings"])]
    for title in ("best", "worst"):
        if summary[title]:
            lines += ["", title.capitalize()]
        for example in summary[title]:
            score = format_number(example["score"])
            lines.append(f"  {score}  {example['row']}: {example['response']}")
            lines += [f"         because: {example['reason']}"] if example["reason"] else []
    return [*lines, "", f"Written: {summary['out']}"]


def format_rankings(facts: Facts) -> list[str]:
    """Return the result of `compare_rankings` as a table, with rows for steps if several."""
    of_prompts = f"among responses to one prompt ({plural(facts['groups'], 'prompt')})"
    pairs = [
        (f"rank correlation, {plural(facts['rows'], 'row')}", format_number(facts["agreement"])),
        (of_prompts, format_number(facts["within"])),
        ("pairs in reversed order", _format_percent(facts["turned"])),
    ]
    # One row for each step of a run, if there are several.
    for step in facts["steps"] if len(facts["steps"]) > 1 else ():
        means = f"{format_number(step['before'])} -> {format_number(step['now'])}, "
        pairs.append(
            (f"step {step['step']}, mean", f"{means}rank {format_number(step['agreement'])}")
        )
    return titled_table("Compared with the earlier scores", pairs)


def format_parts(facts: Facts) -> list[str]:
    """Return tables of a mixture's parts and correlations; else only the values it reports."""
    parts, mixed = facts["parts"], len(facts["parts"]) > 1
    lines = ["", *parts_table("Parts (raw scores)", parts, PART_COLUMNS)] if mixed else []
    if facts["reported"]:
        lines += ["", *parts_table("Reported only", facts["reported"], PART_COLUMNS)]
    pairs = [(" with ".join(c["parts"]), format_number(c["value"])) for c in facts["correlations"]]
    if mixed:
        pairs.append(("total with length", format_number(facts["length"])))
        lines += format_section("Correlations", pairs)
    # Affine scalings with these numbers keep the scores comparable in later runs.
    scales = [f"  {n}: {{{f['affine']}}}" for n, f in parts.items() if f["affine"] is not None]
    if scales and (mixed or "model" in parts):
        lines += [
            "",
            "To keep these scales in later runs, put below composite_reward: parts:",
            *scales,
        ]
    return lines


def parts_table(title: str, rows: Mapping[str, Facts], columns: Mapping[str, str]) -> list[str]:
    """Return a table with a row for each part; columns without any value are left out."""
    present = {key: word for key, word in columns.items() if any(key in r for r in rows.values())}
    cells = [["", *present.values()]]
    for name, row in rows.items():
        cells.append([name, *(_format_cell(key, row.get(key)) for key in present)])
    return titled_table(title, cells, left_aligned=1)


def _format_cell(key: str, value: Any) -> str:
    """Return a value as its column shows it: a percentage, a count or a number."""
    # An estimate with an interval: the table shows only its value.
    if isinstance(value, Mapping):
        value = value["value"]
    if key in ("weight", "share", "agree", "credited too much", "credited too little"):
        return _format_percent(value)
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def _format_percent(value: float | None) -> str:
    """Return a share as a whole percentage, or a dash."""
    return "-" if value is None else f"{value:.0%}"


def format_section(title: str, rows: Pairs) -> list[str]:
    """Return an empty line and a table."""
    return ["", *titled_table(title, rows)]


def count_rows(summary: Facts) -> list[tuple[str, str]]:
    """Return table rows with the numbers of rows, of scores, and of failures by cause."""
    rows = [("rows", f"{summary['rows']:,}"), ("scored", f"{summary['scored']:,}")]
    failed = summary["failed"].items()
    return rows + [(f"failed: {cause}", f"{count:,}") for cause, count in failed]


def cost_rows(facts: Facts) -> Pairs:
    """Return table rows with time, calls, tokens and cost; what is unknown is left out."""
    rows = [("time", format_duration(facts["seconds"]))]
    for key, word in COST_COLUMNS.items():
        value = facts.get(key)
        if value is not None:
            rows.append((word, f"${value:.4f}" if key == "cost_usd" else f"{value:,.0f}"))
    return rows


def format_histogram(histogram: Sequence[Facts]) -> list[str]:
    """Return a bar of `#` for each level of a histogram, highest first; empty without levels."""
    if not histogram:
        return []
    names = []
    for level in histogram:
        low, high = format_number(level["from"]), format_number(level["to"])
        names.append(low if level["from"] == level["to"] else f"{low} to {high}")
    width = max(map(len, names))
    largest = max(level["count"] for level in histogram)
    lines = ["", "Scores by level"]
    for name, level in zip(names, histogram, strict=True):
        size = round(BAR * level["count"] / largest)
        # A level with any score has at least one character.
        bar = "#" * (size or bool(level["count"]))
        lines.append(f"  {name:>{width}}  {bar:<{BAR}} {level['count']:,}")
    return lines
