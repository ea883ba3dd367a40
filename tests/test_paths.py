"""Paths that a user writes: unknown homes, and texts that are no path."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.errors import UserError
from ppo_cli.paths import user_path


def test_the_home_of_an_unknown_user_stays_as_it_is() -> None:
    assert user_path("~no-such-user/a") == Path("~no-such-user/a")
    assert user_path("~/a") == Path.home() / "a"


@pytest.mark.parametrize("text", ["a" * 256, "é" * 128, "b/" * 2048, "a\0b", "\ud800"])
def test_a_text_that_no_file_can_have_as_its_name_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a path"):
        user_path(text)


def test_links_in_a_circle_are_no_path(tmp_path: Path) -> None:
    for name, target in (("here", "there"), ("there", "here"), ("gone", "nowhere")):
        (tmp_path / name).symlink_to(target)
    for path in (tmp_path / "here", tmp_path / "here" / "rows.jsonl"):
        with pytest.raises(UserError, match="symbolic links lead in a circle"):
            user_path(path)
    assert user_path(tmp_path / "gone") == tmp_path / "gone"
