"""Rewards with behaviour to order, and rows to score."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from ppo_cli.records import Rollout, Score
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import Reward, RoundKind


class Scripted(Reward):
    """Answers each rollout by a function; what that raises, the future raises."""

    name = "scripted"

    def __init__(self, score: Callable[[Rollout], Score | None]) -> None:
        self.submitted: list[str] = []
        self.settled = 0
        self._score = score

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Answer at once; None leaves the future open."""
        self.submitted.append(rollout.text)
        future: Future[Score] = Future()
        try:
            answer = self._score(rollout)
        except Exception as error:
            future.set_exception(error)
        else:
            if answer is not None:
                future.set_result(answer)
        return future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Count."""
        self.settled += 1

    def close(self) -> None:
        """Nothing to free."""


class Remarks(Screen):
    """A screen that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a remark."""
        self.notes.append(text)


def write_rows(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)
