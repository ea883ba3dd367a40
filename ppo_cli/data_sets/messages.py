"""Check and clean the value of a prompt column: text, or a list of chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ppo_cli.data_sets.files import name_type
from ppo_cli.data_sets.plain import NotText, as_plain
from ppo_cli.data_sets.problems import RowError
from ppo_cli.errors import did_you_mean
from ppo_cli.records import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def read_plain(value: Any, column: str) -> Any:
    """Return the plain value of a column; text that is none is a RowError."""
    try:
        return as_plain(value, strict=True)
    except NotText as error:
        raise RowError(column, str(error)) from None


def read_prompt(value: Any, column: str) -> str | tuple[Message, ...]:
    """Return a prompt as text or as clean messages; anything else is a RowError."""
    plain = read_plain(value, column)
    if plain is None:
        raise RowError(column, "is missing or null")
    if isinstance(plain, str):
        return read_text_prompt(plain, column)
    if isinstance(plain, list):
        return read_messages(plain, column)
    raise RowError(column, f"is {name_type(plain)}, not text or a list of messages")


def read_text_prompt(text: str, column: str) -> str:
    """Return a text prompt that is not blank and no message list written as text."""
    if not text.strip():
        raise RowError(column, "is empty")
    if text.lstrip().startswith("[{"):
        try:
            inner = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if all(isinstance(item, dict) and "role" in item for item in inner):
            raise RowError(
                column,
                "is a message list written as text; store it as a list (text that must stay "
                "text goes into the content of one user message)",
            )
    return text


def read_messages(items: list[Any], column: str) -> tuple[Message, ...]:
    """Return the messages of a prompt: text contents, known roles, ending with the question."""
    if not items:
        raise RowError(column, "is an empty list of messages")
    messages = tuple(read_message(item, f"{column}[{i}]") for i, item in enumerate(items))
    if not any(message["role"] == "user" for message in messages):
        raise RowError(column, "has no user message")
    if messages[-1]["role"] == "assistant":
        raise RowError(
            column, "ends with an assistant message; leave the answer out, the model writes it"
        )
    return messages


def read_message(item: Any, column: str) -> Message:
    """Return one message without its null fields (parquet fills them in)."""
    if not isinstance(item, dict):
        raise RowError(column, f'is {name_type(item)}, not {{"role": …, "content": …}}')
    message = {key: value for key, value in item.items() if value is not None}
    if "role" not in message and {"from", "value"} <= set(message):
        raise RowError(column, "has from/value; rename them to role/content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        other = OTHER_ROLES.get(str(role))
        near = f" Did you mean '{other}'?" if other else did_you_mean(str(role), ROLES)
        raise RowError(f"{column}.role", f"is {role!r}, not one of {', '.join(ROLES)}.{near}")
    content = read_content(message.get("content"), f"{column}.content")
    if role == "user" and not content.strip():
        raise RowError(f"{column}.content", "is empty")
    if not content and not ({"tool_calls", "function_call"} & set(message)):
        raise RowError(f"{column}.content", "is empty")
    return {**message, "content": content}


def read_content(value: Any, column: str) -> str:
    """Return the text of a message; a list of text parts is joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError(column, f"is {name_type(value)}, not text")
    return "".join(read_part(part, column) for part in value)


def read_part(part: Any, column: str) -> str:
    """Return the text of one part; pictures and sounds are refused, never dropped."""
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else name_type(part)
    raise RowError(column, f"has a part of kind {kind!r}; only text can be trained on")


def question_of(prompt: str | tuple[Message, ...]) -> str:
    """Return what the user asked: the text, or the last user message."""
    if isinstance(prompt, str):
        return prompt
    return next(str(m["content"]) for m in reversed(prompt) if m["role"] == "user")
