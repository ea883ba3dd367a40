"""What a judge sees of a response: its text, or the passages of an episode of several turns.

A passage is what one author wrote in a turn, or one of its tool calls. Each gets its own fence, so
that a tool's result cannot pretend to be another author. A limit of characters holds for all
passages together, and the longest ones are cut in the middle first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.records import Rollout, format_call, text_of
from ppo_cli.rewards.judge.sanitise import clean, cut_middle
from ppo_cli.thoughts import strip_reasoning

Piece = tuple[str, int, str]  # head, number of omitted characters, tail
TURN_CUT = "The turn reached its limit of tokens and stops here."
WRITTEN = ("assistant", "call", "piece")  # what the judged model wrote


class Passage(NamedTuple):
    """A part of an episode: its author or kind, its turn and text.

    The kinds are assistant, thought, call, tool, user, tools (that the model may call), and limit;
    piece for the pieces of a response whose rewards a judge places.
    """

    kind: str
    turn: int
    text: str


Response = str | tuple[Passage, ...]


def visible_text(response: str, reasoning: str = "strip") -> str:
    """Return what a judge sees of a text before it is shortened; also used by the gate."""
    shown = clean(response)
    return strip_reasoning(shown) if reasoning == "strip" else shown


def visible_response(rollout: Rollout, api: ApiReward) -> Response:
    """Return what a judge sees of a response or an episode, before it is shortened."""
    if rollout.turns and api.scope == "episode":
        return tuple(_list_passages(rollout, api.reasoning))
    text = rollout.answer if api.reasoning == "strip" else rollout.full_text
    return visible_text(text, api.reasoning)


def _list_passages(rollout: Rollout, reasoning: str) -> Iterator[Passage]:
    if rollout.prompt.tools:
        yield Passage("tools", 0, clean(rollout.prompt.tools))
    for number, turn in enumerate(rollout.turns, start=1):
        content = visible_text(text_of(turn.message), reasoning)
        thought = turn.message.get("reasoning_content")
        if thought and reasoning == "keep":
            yield Passage("thought", number, clean(thought))
        calls = turn.message.get("tool_calls") or ()
        if content or not calls:
            yield Passage("assistant", number, content)
        for call in calls:
            yield Passage("call", number, clean(format_call(call)))
        last_is_cut = rollout.finish_reason == "length" and turn is rollout.turns[-1]
        if turn.cut or last_is_cut:
            yield Passage("limit", number, TURN_CUT)
        for reply in turn.replies:
            kind = "tool" if reply["role"] == "tool" else "user"
            yield Passage(kind, number, clean(text_of(reply)))


def written_text(response: Response) -> str:
    """Return what the judged model wrote: the text, or its turns and calls in an episode."""
    if isinstance(response, str):
        return response
    return "\n".join(passage.text for passage in response if passage.kind in WRITTEN)


def restore_response(value: Any) -> Response:
    """Return a response that was saved as JSON."""
    return value if isinstance(value, str) else tuple(Passage(*passage) for passage in value)


def cut_passages(passages: Sequence[Passage], max_chars: int) -> list[tuple[str, Piece]]:
    """Return the fence's name and the text of each passage, with `max_chars` characters in all."""
    # Passages below an equal share leave the rest of it to the longer ones.
    limit, room = max_chars, max_chars
    lengths = sorted(len(passage.text) for passage in passages)
    for place, length in enumerate(lengths):
        limit = room // (len(lengths) - place)
        if length > limit:
            break
        room -= length
        limit = max_chars
    return [(f"{p.kind}-{p.turn}", cut_middle(p.text, limit)) for p in passages]
