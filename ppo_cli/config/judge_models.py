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
# Names that begin so -> the day from which the provider answers them no more. The longest wins.
RETIRED: dict[str, dict[str, datetime.date | None]] = {
    "dashscope": {
        "qwen-max": datetime.date(2026, 7, 13),
        "qwen-turbo": datetime.date(2026, 7, 13),
    },
    "openai": {
        "gpt-4o": datetime.date(2027, 1, 14),
    },
    "gemini": {
        "gemini-1.5-": datetime.date(2025, 9, 24),
        "gemini-2.5-pro": datetime.date(2026, 12, 1),
        "gemini-2.5-flash": datetime.date(2026, 12, 1),
        "gemini-2.5-flash-lite": None,
    },
    "claude": {
        "claude-1": datetime.date(2024, 11, 6),
        "claude-2": datetime.date(2025, 7, 21),
        "claude-3-sonnet": datetime.date(2025, 7, 21),
        "claude-3-opus": datetime.date(2026, 1, 5),
        "claude-3-5-haiku": datetime.date(2026, 2, 19),
        "claude-3-7-sonnet": datetime.date(2026, 2, 19),
        "claude-3-haiku": datetime.date(2026, 4, 20),
        "claude-opus-4-0": datetime.date(2026, 6, 15),
        "claude-opus-4-2": datetime.date(2026, 6, 15),
        "claude-sonnet-4-0": datetime.date(2026, 6, 15),
        "claude-sonnet-4-2": datetime.date(2026, 6, 15),
        "claude-sonnet-4-5": datetime.date(2026, 11, 30),
    },
}


def retirement(provider: str, model: str) -> datetime.date | None:
    """Return the day on which a provider shuts a model down; None when none is known."""
    days = RETIRED.get(provider, {})
    begun = sorted((name for name in days if model.startswith(name)), key=len)
    return days[begun[-1]] if begun else None
