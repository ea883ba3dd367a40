"""Commands print what the golden file tests/messages.txt says."""

from __future__ import annotations

import pytest

from tests.golden import MESSAGES, Entry, read_entries, run_command

ENTRIES = read_entries(MESSAGES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.commands[0])
def test_a_command_prints_what_the_golden_file_says(entry: Entry) -> None:
    for command in entry.commands:
        assert run_command(command) == entry.outcome, (
            f"`{command}` prints something else now. `python scripts/write_messages.py` rewrites "
            "tests/messages.txt: review the diff."
        )
