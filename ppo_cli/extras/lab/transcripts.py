"""Dialogues of HH-RLHF, which are one text: `\n\nHuman: …\n\nAssistant: …`."""

from __future__ import annotations

import re

from ppo_cli.records import Message

TURN = re.compile(r"\n\n(Human|Assistant):")
TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """Whether a text starts like an HH-RLHF transcript."""
    return text.lstrip().startswith("Human:")


def split_transcript(text: str) -> tuple[Message, ...]:
    """Split a transcript into messages; consecutive turns of a speaker become one."""
    parts = TURN.split("\n\n" + text.lstrip())
    messages: list[Message] = []
    for speaker, speech in zip(parts[1::2], parts[2::2], strict=True):
        role, content = TRANSCRIPT_ROLES[speaker], speech.strip()
        # Consecutive turns are joined with a blank line.
        if messages and messages[-1]["role"] == role:
            before = str(messages.pop()["content"])
            content = "\n\n".join(part for part in (before, content) if part)
        messages.append({"role": role, "content": content})
    return tuple(messages)
