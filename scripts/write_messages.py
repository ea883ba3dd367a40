"""Runs the commands of tests/messages.txt again and rewrites what they print.

python scripts/write_messages.py [--only WORD]    # the commands that contain WORD
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.golden import MESSAGES, Entry, read_entries, run_command


def rewrite_entry(entry: Entry, only: str) -> str:
    """Return the text of an entry; commands that no longer print the same become two entries."""
    outcomes = [
        (run_command(command) if only in command else entry.outcome, command)
        for command in entry.commands
    ]
    parts = []
    for outcome, group in groupby(outcomes, key=lambda pair: pair[0]):
        parts.append("\n".join([*(f"$ {command}" for _, command in group), outcome]))
    return entry.comments + "\n\n".join(parts)


def main() -> None:
    """Rewrite the golden file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="Only commands with this word.")
    only = parser.parse_args().only
    entries = read_entries(MESSAGES.read_text(encoding="utf-8"))
    text = "\n\n".join(rewrite_entry(entry, only) for entry in entries) + "\n"
    MESSAGES.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
