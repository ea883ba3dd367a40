r"""Dialogues written as one text: `\n\nHuman: …\n\nAssistant: …`, as in HH-RLHF."""

from __future__ import annotations

import re

from ppo_cli.records import Message

TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """Tell whether a text begins like a transcript."""
    return text.lstrip().startswith("Human:")


def split_transcript(text: str) -> tuple[Message, ...]:
    """Split a transcript into messages; two turns of one speaker in a row become one."""
    parts = TURN.split("\n\n" + text.lstrip())
    messages: list[Message] = []
    for speaker, said in zip(parts[1::2], parts[2::2], strict=True):
        role, content = ROLES[speaker], said.strip()
        if messages and messages[-1]["role"] == role:
            before = str(messages.pop()["content"])
            content = "\n\n".join(part for part in (before, content) if part)
        messages.append({"role": role, "content": content})
    return tuple(messages)
