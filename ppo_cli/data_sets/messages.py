"""Prompt columns: text, chat messages or HH-RLHF transcripts, checked and cleaned.

Values of parquet and hub rows become plain JSON values, so that the rollout log can hold them.
"""

from __future__ import annotations

import datetime
import decimal
import json
import re
from collections.abc import Mapping
from typing import Any

from ppo_cli.data_sets.files import RowError, name_type
from ppo_cli.errors import did_you_mean
from ppo_cli.records import Message


class NotText(ValueError):
    """A text that cannot be written as UTF-8, or bytes that are none."""


def as_plain(value: Any, *, strict: bool = False) -> Any:
    """Return a value with only dict, list, str, int, float, bool and None inside.

    With `strict`, half of a surrogate pair or bytes that are not UTF-8 raise NotText; otherwise
    such bytes become escapes.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _checked(value) if strict else value
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner, strict=strict) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(inner, strict=strict) for inner in value]
    if hasattr(value, "tolist"):  # numpy's, which need not be imported to read JSON
        return as_plain(value.tolist(), strict=strict)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            if strict:
                raise NotText(f"is not UTF-8 (byte 0x{value[error.start]:02x})") from None
            return value.decode("utf-8", errors="backslashreplace")
    return value


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise NotText(f"holds {half}, half of a surrogate pair, which is no character") from None
    return text


TURN = re.compile(r"\n\n(Human|Assistant):")
TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """Tell whether a text begins like a transcript."""
    return text.lstrip().startswith("Human:")


def split_transcript(text: str) -> tuple[Message, ...]:
    """Split a transcript into messages; two turns of one speaker in a row become one."""
    parts = TURN.split("\n\n" + text.lstrip())
    messages: list[Message] = []
    for speaker, said in zip(parts[1::2], parts[2::2], strict=True):
        role, content = TRANSCRIPT_ROLES[speaker], said.strip()
        if messages and messages[-1]["role"] == role:
            before = str(messages.pop()["content"])
            content = "\n\n".join(part for part in (before, content) if part)
        messages.append({"role": role, "content": content})
    return tuple(messages)


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
