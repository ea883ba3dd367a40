"""Runs pytest, then each failed test once more alone, and counts the skipped ones by reason.

    python scripts/run_tests.py [--outcome FILE] PYTEST-ARGUMENTS

For scripts/check and scripts/check_anywhere, which reads the figures from FILE (JSON). The exit
code is that of pytest; 0 too where every failed test passes alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

# One file in one process: tests of a file share what they start.
TOGETHER = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
ALONE = ("-q", "-n", "0", "-p", "no:cacheprovider")
MOST_RERUNS = 20  # more failures have one cause
REASON_LINES = 9


def run_pytest(*arguments: str) -> int:
    """Run pytest in a process; return its exit code."""
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def node_id(case: ElementTree.Element) -> str:
    """Return the name by which pytest runs a test of a report."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def print_skips(reasons: Counter[str]) -> None:
    """Print the most frequent reasons of skipped tests, in at most ten lines below a heading."""
    print(f"== {reasons.total()} skipped tests, by reason")
    common = reasons.most_common(REASON_LINES)
    for reason, count in common:
        print(f"{count:5}  {reason.splitlines()[0][:110]}")
    if rest := reasons.total() - sum(count for _, count in common):
        print(f"{rest:5}  for {len(reasons) - len(common)} other reasons")


def run_alone(failures: list[str], marks: list[str]) -> list[str]:
    """Return the failed tests that fail alone too: others may only be late on a busy machine."""
    if len(failures) > MOST_RERUNS:
        print(f"{len(failures)} tests failed: too many to run them again")
        return failures
    print(f"== {len(failures)} failed tests once more, each alone")
    alone = [test for test in failures if run_pytest(*ALONE, *marks, test)]
    for test in failures:
        print("fails:" if test in alone else "passes alone:", test)
    return alone


def main() -> int:
    """Run the tests, rerun those that fail, write the outcome, and return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--outcome", type=Path)
    parser.add_argument("-m", dest="marks", default="")
    options, arguments = parser.parse_known_args()
    marks = ["-m", options.marks]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = run_pytest(*TOGETHER, *marks, f"--junitxml={report}", *arguments)
        if code not in (0, 1):
            return code
        cases = list(ElementTree.parse(report).iter("testcase"))
    skips = [skip for case in cases for skip in case.findall("skipped")]
    if skips:
        print_skips(Counter(skip.get("message", "") for skip in skips))
    # A test whose teardown fails as well is in the report twice.
    broken = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    failures = list(dict.fromkeys(map(node_id, broken)))
    alone = run_alone(failures, marks) if failures else []
    if options.outcome:
        passed = len(cases) - len(skips) - len(broken)
        counts = {"passed": passed, "skipped": len(skips), "failed": failures, "alone": alone}
        options.outcome.write_text(json.dumps(counts))
    return int(bool(alone))


if __name__ == "__main__":
    sys.exit(main())
