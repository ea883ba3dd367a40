"""What the loop knows of an environment: openings, replies and failures.

The pool runs environments in separate processes (`pool.py`, `worker.py`); `episodes.py` plays the
episodes with an engine. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    the seconds of each tool call by tool name, `metrics` are figures by name that are no rewards.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    tools: tuple[tuple[str, float], ...] = ()
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class EnvironmentFailure(Exception):
    """An episode cannot go on: its process died, hung, or answered what cannot be read.

    The message is one line, the reason for which the episode is masked.
    """
