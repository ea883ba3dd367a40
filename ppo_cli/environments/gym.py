"""Environments of Gymnasium that can be played in text: `gym:ID`.

Inside the environment process, whose Python needs the package. The actions are texts, or numbers of
a `Discrete` space, of which the last in a message counts. The policy reads a text observation, what
the environment draws as text (`ansi`), or the observation as Python writes it, and at first which
actions there are. Colours of a drawing say what is where, such as the player: they become words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium

INT_DIGITS = 20  # no space has so large a number, and int() refuses very long ones
COLOURED = re.compile(r"\x1b\[(?:\d+;)*?(?:3|4|9|10)([0-7])(?:;\d+)*m(.*?)(?=\x1b|$)", re.S)
MARKS = re.compile(r"\x1b\[[0-9;]*m")
COLOURS = "grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white"


class Game:
    """An episode of an environment."""

    def __init__(self, name: str, kwargs: dict[str, Any], worker: Any) -> None:
        self._worker = worker
        self._env = gymnasium.make(name, **kwargs)
        if "ansi" in self._env.metadata.get("render_modes", ()) and "render_mode" not in kwargs:
            self._env = gymnasium.make(name, **kwargs, render_mode="ansi")
        self.space = self._env.action_space
        if isinstance(self.space, gymnasium.spaces.Discrete):
            first = self.space.start
            self._choices = f"a number from {first} to {first + self.space.n - 1}"
        elif isinstance(self.space, gymnasium.spaces.Text):
            sizes = f"{self.space.min_length} to {self.space.max_length}"
            self._choices = f"a text of {sizes} characters of {self.space.characters[:99]}"

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin the episode of a seed."""
        observation, _ = self._env.reset(seed=row["seed"])
        text = f"{self._read(observation)}\n\nAn action is {self._choices}."
        return self._worker.open_game(row, text)  # type: ignore[no-any-return]

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take the action of a message; one that is none is answered with the choices."""
        action: Any = message["content"].strip()
        if isinstance(self.space, gymnasium.spaces.Discrete):
            numbers = re.findall(r"-?\d+", action)
            action = int(numbers[-1]) if numbers and len(numbers[-1]) < INT_DIGITS else None
        if action is None or not self.space.contains(action):
            error = f"the message has no action; an action is {self._choices}"
            return {"messages": f"Error: {error}.", "error": error, "reward": 0.0}
        observation, reward, ended, cut, _ = self._env.step(action)
        text = self._read(observation)
        return {"messages": text, "done": bool(ended or cut), "reward": float(reward)}

    def close(self) -> None:
        """End the environment."""
        self._env.close()

    def _read(self, observation: Any) -> str:
        drawn = self._env.render() if self._env.render_mode == "ansi" else None
        text = drawn if isinstance(drawn, str) else str(observation)
        text = COLOURED.sub(lambda match: f"[{COLOURS[int(match[1])]} {match[2]}]", text)
        return MARKS.sub("", text).strip()


async def load(name: str, kwargs: dict[str, Any], worker: Any) -> Callable[[], Game]:
    """Return what begins episodes; raises the worker's Problems."""
    label = f"--environment gym:{name}"
    try:
        game = await worker.run_call(Game, name, kwargs, worker)
    except BaseException as error:
        text = worker.describe_error(error)
        raise worker.Problems(f"{label} does not begin: {text}.") from error
    if not isinstance(game.space, (gymnasium.spaces.Discrete, gymnasium.spaces.Text)):
        raise worker.Problems(
            f"{label}: its actions are {game.space}, which no text is. Name a class that plays it "
            "with messages (--environment FILE.py:NAME)."
        )
    return lambda: Game(name, kwargs, worker)
