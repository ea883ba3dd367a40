"""Replies of judges are read as a careful human would read them, or not at all."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from ppo_cli.rewards.judge.exchange import Failure, JudgeError, Reply, Scale, Usage
from ppo_cli.rewards.judge.parse import read_verdict

CORPUS: list[dict[str, Any]] = [
    entry | {"group": group}
    for group, entries in yaml.safe_load(
        (Path(__file__).parent / "replies.yaml").read_text(encoding="utf-8")
    ).items()
    for entry in entries
]
TEN = Scale(1, 10)
CAUSES = {"empty", "truncated", "unparsed", "ambiguous", "out_of_range"}


def scale_of(text: str) -> Scale:
    low, high = re.fullmatch(r"(-?\d+)-(\d+)", text).groups()  # type: ignore[union-attr]
    return Scale(int(low), int(high))


def test_the_corpus_is_large_and_every_entry_says_what_is_expected() -> None:
    assert len(CORPUS) >= 180
    assert all(("score" in entry) != ("fails" in entry) for entry in CORPUS)


@pytest.mark.parametrize("entry", CORPUS, ids=lambda e: f"{e['group']}: {e['reply'][:50]!r}")
def test_reply(entry: dict[str, Any]) -> None:
    reply = Reply(entry["reply"], Usage(5, 3), truncated=entry.get("truncated", False))
    if "score" in entry:
        value, _ = read_verdict(reply, scale_of(entry["scale"]))
        assert value == entry["score"]
        return
    with pytest.raises(JudgeError) as caught:
        read_verdict(reply, scale_of(entry["scale"]))
    assert caught.value.kind is Failure.UNPARSED
    assert caught.value.cause in CAUSES
    assert entry["fails"] in (True, caught.value.cause)
    assert caught.value.usage == Usage(5, 3)
    assert caught.value.reply == entry["reply"]
