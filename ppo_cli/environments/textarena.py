"""Games of TextArena for one player as environments: `textarena:ID`.

Inside the environment process, whose Python needs the package. Written for textarena 0.7.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import textarena

START_S = 60.0


class Game:
    """A game: the policy reads what is new since its last move."""

    def __init__(self, name: str, kwargs: dict[str, Any], worker: Any) -> None:
        self._worker = worker
        self._game = textarena.make(name, **kwargs)
        self._seen = ""

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin the game of a seed; returns its rules, after the row's system messages."""
        self._game.reset(num_players=1, seed=row["seed"])
        return self._worker.open_game(row, self._read())  # type: ignore[no-any-return]

    def step(self, message: dict[str, Any]) -> tuple[str, bool, float | None]:
        """Make a move."""
        done, _ = self._game.step(message["content"])
        return ("", True, self.finish()) if done else (self._read(), False, None)

    def finish(self) -> float | None:
        """Return the reward of the game, as far as it was played."""
        rewards, _ = self._game.close()
        return None if rewards is None else rewards.get(0)

    def _read(self) -> str:
        text = str(self._game.get_observation()[1])
        new = text[len(self._seen) :] if text.startswith(self._seen) else text
        self._seen = text
        return new.strip()


async def load(name: str, kwargs: dict[str, Any], worker: Any) -> Callable[[], Game]:
    """Return what begins games; raises the worker's Problems."""
    label = f"--environment textarena:{name}"
    try:
        start = functools.partial(Game(name, kwargs, worker).reset, {"seed": 0, "messages": []})
        await worker.run_call(start, timeout=START_S)
    except BaseException as error:
        text = worker.describe_error(error)
        raise worker.Problems(
            f"{label} does not begin: {text}. Name a game for one player that needs no network."
        ) from error
    return lambda: Game(name, kwargs, worker)
