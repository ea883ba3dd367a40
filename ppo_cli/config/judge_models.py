"""What is known of providers and model names: key variables, an example, retirement dates.

Names are only configuration: an old one is remarked on, never refused.
"""

from __future__ import annotations

import datetime

# Where a key is looked for, in this order.
KEY_VARIABLES: dict[str, tuple[str, ...]] = {
    "dashscope": ("DASHSCOPE_API_KEY",),
    "openai": ("OPENAI_API_KEY",),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "claude": ("ANTHROPIC_API_KEY", "CLAUDE_API_KEY"),
}
EXAMPLES = {
    "dashscope": "qwen-plus",
    "openai": "gpt-6-luna",
    "gemini": "gemini-3.5-flash-lite",
    "claude": "claude-haiku-5-5",
}
# Only a name that stays while the weights behind it change can be a default.
DEFAULT_MODELS = {"dashscope": "qwen-plus"}
# Names (and what follows them after a dash) by the day of their shutdown, as the providers
# announced it until November 2026; no day: it stays, although a shorter name of its line goes.
SHUTDOWNS: dict[str, dict[str, str]] = {
    "dashscope": {"2026-07-13": "qwen-max qwen-turbo"},
    "openai": {
        "2025-07-28": "o1-preview",
        "2025-10-27": "o1-mini",
        "2026-02-17": "chatgpt-4o-latest",
        "2026-07-23": "gpt-5-chat-latest gpt-5.1-chat-latest gpt-5.1-codex",
        "2026-08-10": "gpt-5.2-chat-latest gpt-5.3-chat-latest",
        "2026-10-23": "gpt-3.5-turbo gpt-4 gpt-4-turbo gpt-4.1-nano gpt-4o-2024-05-13 o1 o3-mini "
        "o4-mini",
        "2026-12-11": "gpt-5 o3",
        "2027-01-14": "gpt-4.1 gpt-4o",
        "2027-04-01": "gpt-5.1 gpt-5.4-nano",
    },
    "gemini": {
        "2025-09-24": "gemini-1.5",
        "2026-12-01": "gemini-2.5-flash gemini-2.5-pro",
        "": "gemini-2.5-flash-lite",
    },
    "claude": {
        "2024-11-06": "claude-1.3 claude-instant-1.1 claude-instant-1.2",
        "2025-07-21": "claude-2.0 claude-2.1 claude-3-sonnet",
        "2026-01-05": "claude-3-opus",
        "2026-02-19": "claude-3-5-haiku claude-3-7-sonnet",
        "2026-04-20": "claude-3-haiku",
        "2026-06-15": "claude-opus-4-0 claude-opus-4-20250514 claude-sonnet-4-0 "
        "claude-sonnet-4-20250514",
        "2026-11-30": "claude-sonnet-4-5",
    },
}


def retirement(provider: str, model: str) -> datetime.date | None:
    """Return the day on which a provider shuts a model down; None when none is known."""
    days = {
        name: day
        for day, names in SHUTDOWNS.get(provider, {}).items()
        for name in names.split()
        if model == name or model.startswith(f"{name}-")
    }
    day = days[max(days, key=len)] if days else ""
    return datetime.date.fromisoformat(day) if day else None
