"""The results of `ppo reward` as text for a terminal: scores, calibrations and audits.

Each function takes the facts that `--json` prints; `cli/reward.py` calls them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.cli.screen import format_number, titled_table
from ppo_cli.errors import plural
from ppo_cli.report.metrics import format_duration

# Characters of the longest bar in a histogram.
BAR = 30
Facts = Mapping[str, Any]
Pairs = Sequence[tuple[str, str]]
# Key of a cost -> its name in tables.
COST_COLUMNS = {
    "calls": "calls", "cached": "from the cache", "cost_usd": "cost", "tokens": "tokens",
    "tokens_in": "tokens in", "tokens_out": "tokens out",
}  # fmt: skip
# Columns of the tables about parts of a mixture and about criteria: key -> heading.
PART_COLUMNS = {
    "weight": "weight", "share": "of the spread", "scored": "scored", "failed": "failed",
    "gated": "not asked", "mean": "mean", "std": "std", "min": "min", "max": "max",
    "length": "with length",
}  # fmt: skip
CRITERIA = {
    "rows": "rows", "mean": "mean", "with the rest": "with the rest",
    "with the label": "with the label", "labelled": "labelled", "agree": "agree",
    "kappa": "kappa", "credited too much": "too kind", "credited too little": "too harsh",
}  # fmt: skip


def format_scores(summary: Facts) -> list[str]:
    """Return the result of `ppo reward score` as lines: statistics, histogram, examples."""
    rows = _count_rows(summary)
    if summary["scored"]:
        rows += [(name, format_number(summary[name])) for name in ("mean", "std", "min", "max")]
    # Numbers first, then remarks, then the histogram and examples.
    lines = [*titled_table("Scores", [*rows, *_cost_rows(summary)]), *format_parts(summary)]
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
    lines = ["", *_parts_table("Parts (raw scores)", parts, PART_COLUMNS)] if mixed else []
    if facts["reported"]:
        lines += ["", *_parts_table("Reported only", facts["reported"], PART_COLUMNS)]
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


def _parts_table(title: str, rows: Mapping[str, Facts], columns: Mapping[str, str]) -> list[str]:
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


def _count_rows(summary: Facts) -> list[tuple[str, str]]:
    """Return table rows with the numbers of rows, of scores, and of failures by cause."""
    rows = [("rows", f"{summary['rows']:,}"), ("scored", f"{summary['scored']:,}")]
    failed = summary["failed"].items()
    return rows + [(f"failed: {cause}", f"{count:,}") for cause, count in failed]


def _cost_rows(facts: Facts) -> Pairs:
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


def format_calibration(result: Facts) -> list[str]:
    """Return the result of `ppo reward calibrate` as lines: tables, then advice."""
    counts, spent = _count_rows(result), _cost_rows(result["spent"])
    cascades = [line for facts in result["cascade"].values() for line in _format_cascade(facts)]
    if "labels" not in result:
        return [*titled_table("Rows", [*counts, *spent]), *cascades]
    lines = titled_table("Rows", [*counts, ("labels", result["labels"]), *spent])
    agreement = list_estimate_rows(result["agreement"])
    lines += format_section("Compared with the labels (95 % interval)", agreement)
    for name, facts in result["parts"].items():
        if "agreement" in facts:
            lines += format_section(f"Part {name} alone", list_estimate_rows(facts["agreement"]))
    lines += format_parts(result)
    if result["criteria"]:
        lines += ["", *_parts_table("Criteria (credits from 0 to 1)", result["criteria"], CRITERIA)]
    lines += format_section(
        "Bias (rank correlation with the score)", list_estimate_rows(result["bias"])
    )
    # How much the verdicts vary when the judge is asked again.
    if result["repeated"] is not None:
        lines += format_section("Repeated verdicts", _repeated_rows(result["repeated"]))
    for name, facts in result["parts"].items():
        if facts.get("repeated") is not None:
            lines += format_section(
                f"Repeated verdicts of {name}", _repeated_rows(facts["repeated"])
            )
    lines += cascades
    # What a run would pay; cached verdicts cost nothing, so nothing can be extrapolated from them.
    paid = {word: result["per_1000"].get(key) for key, word in COST_COLUMNS.items()}
    costs = [
        (word, f"${value:.3f}" if word == "cost" else format_number(value))
        for word, value in {"seconds": result["per_1000"].get("seconds"), **paid}.items()
        if value is not None
    ]
    unknown = [("unknown", "every verdict came from the cache")]
    lines += format_section("For 1,000 responses", costs if result["per_1000"] else unknown)
    return [*lines, "", "Advice", *(f"  - {line}" for line in result["advice"])]


def _format_cascade(facts: Facts) -> list[str]:
    """Return what a cascade's best rule keeps and saves, and the flags that set it."""
    if "why" in facts:
        return format_section("Cascade", [("not measured", facts["why"])])
    rows = [*list_estimate_rows(facts["figures"])]
    if (cost := facts["cost"]) is not None:
        alone, cascade = cost["judge_usd"], cost["cascade_usd"]
        saved = f"${cascade:.3f} instead of ${alone:.3f}: {1 - cascade / alone:.0%} less"
        rows.append(("cost of 1,000 responses", saved))
    others = plural(facts["measured_on"], "row")
    title = f"Cascade: agreement on {others} that the rule was not chosen on (95 % interval)"
    return [*format_section(title, rows), "", f"Set {facts['flags']}"]


def list_estimate_rows(estimates: Mapping[str, Facts]) -> Pairs:
    """Return table rows of estimates with their intervals; without a value they say why."""
    rows = []
    for name, facts in estimates.items():
        if facts["value"] is None:
            rows.append((name, f"- ({facts['why']})"))
            continue
        interval = ""
        if facts["low"] is not None:
            interval = f"  [{format_number(facts['low'])}, {format_number(facts['high'])}]"
        # Agreement with yes-no labels depends on a threshold: show it.
        at = f"  at {format_number(facts['at'])}" if facts.get("at") is not None else ""
        rows.append((name, f"{format_number(facts['value'])}{interval}{at}"))
    return rows


def _repeated_rows(facts: Facts) -> Pairs:
    """Return table rows on how much repeated verdicts on the same rows differ."""
    return [
        ("rows", f"{facts['rows']:,} x {facts['verdicts']}"),
        ("exactly the same", f"{facts['same']:.0%} of pairs"),
        ("mean difference", format_number(facts["mean_gap"])),
        ("largest difference", format_number(facts["largest_gap"])),
    ]


def format_audit(result: Facts) -> list[str]:
    """Return the result of `ppo reward audit` as lines: each check with its worst case."""
    # Checks that do not apply to this reward are skipped.
    verdicts = {True: "PASS", False: "FAIL", None: "skip"}
    lines = [f"Audit of {result['reward']}", ""]
    for check in result["checks"]:
        lines.append(f"{verdicts[check['passed']]}  {check['name']}: {check['said']}")
        # The worst case: all facts of it if the check failed, else what was the closest.
        worst = check["worst"] or {}
        if check["passed"] is False:
            facts = {name: value for name, value in worst.items() if value != ""}
            lines += [f"      {name}: {_format_value(value)}" for name, value in facts.items()]
        elif worst:
            got, sent = _format_value(worst["got"]), _format_value(worst["sent"])
            lines.append(f"      closest: {got} for {sent}")
    spent = ", ".join(f"{word} {value}" for word, value in _cost_rows(result["spent"]))
    return [*lines, "", f"{plural(result['asked'], 'verdict')}; {spent}."]


def _format_value(value: Any) -> str:
    """Return a number with three digits, a text as it is, anything else as JSON."""
    if isinstance(value, float):
        return format_number(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
