"""What the loop knows of an environment: openings, replies, failures, and the pool's interface.

The pool runs environments in separate processes (`pool.py`, `worker.py`); `episodes.py` plays the
episodes with an engine. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ppo_cli.records import Message

Schema = Mapping[str, Any]  # of a tool, as chat templates take it: {"type": "function", …}


@dataclass(frozen=True)
class Opening:
    """The messages with which an episode begins."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Reply:
    """What an environment returned for a message of the policy.

    `messages` come after the policy's (role tool or user); none are needed when it is `done`.
    `rewards` are the parts of this turn's reward by name. `error` says what was wrong with the
    message, if the environment could not act on it; the messages then tell the policy. `tools` has
    the seconds of each tool call by tool name.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    tools: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0


class EnvironmentFailure(Exception):
    """An episode cannot go on: its process died, hung, or answered what cannot be read.

    The message is one line, the reason for which the episode is masked.
    """


class Chat(Protocol):
    """Renders conversations with the chat template, and reads what the policy wrote."""

    end_ids: frozenset[int]  # that end a turn

    def open(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """Return the text and the tokens of a conversation up to where the policy writes.

        Raises ValueError, in one line, for messages that the template refuses.
        """
        ...

    def continue_after(
        self, turn: Sequence[int], replies: Sequence[Message], opening: Sequence[Message]
    ) -> tuple[int, ...]:
        """Return the tokens from the end of a turn to where the policy writes again.

        `turn` has the tokens that the policy wrote; if it was cut they begin with the mark that
        ends a turn. `opening` has the episode's first messages, whose system message may decide
        about thoughts. Raises ValueError for replies that the template refuses.
        """
        ...

    def parse(self, turn: Sequence[int]) -> Message:
        """Return what the policy wrote as a message: content, reasoning, tool_calls.

        Its `error`, if it has one, says why its tool calls cannot be read.
        """
        ...


class Environments(Protocol):
    """Plays many episodes side by side; a future resolves to an answer or an EnvironmentFailure."""

    tools: tuple[Schema, ...]

    def start(self) -> None:
        """Start the processes and read the tools; UserError says what is wrong."""
        ...

    def reset(self, episode: str, row: Mapping[str, Any]) -> Future[Opening]:
        """Begin an episode.

        `row` has prompt, messages, ground_truth, data_source, extra_info, and a seed.
        """
        ...

    def step(self, episode: str, message: Message) -> Future[Reply]:
        """Give the policy's message to an episode.

        Its `error`, if it has one, says why its tool calls cannot be read.
        """
        ...

    def release(self, episodes: Sequence[str]) -> None:
        """End episodes that are not needed any longer."""
        ...

    def pop_metrics(self) -> dict[str, float]:
        """Return restarts, timeouts and the like since the last call."""
        ...

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        ...
