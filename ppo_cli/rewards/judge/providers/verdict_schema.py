"""The form of a verdict: the reason first, then a whole number that is on the scale."""

from __future__ import annotations

from typing import Any

from ppo_cli.rewards.judge.exchange import Scale

# What errors call the form of an answer, beside the parameter's own name.
FORMAT_WORDS = (
    "json mode", "response_schema", "response_mime_type", "structured output",
    "structured outputs", "structured generation", "grammar", "guided", "constrained decoding",
)  # fmt: skip


def verdict_schema(scale: Scale) -> dict[str, Any]:
    """JSON schema of `{"reason": str, "score": int}`, the score one of the scale's levels."""
    return {
        "type": "object",
        "properties": {
            "reason": {"type": "string"},
            "score": {"type": "integer", "enum": list(scale.levels())},
        },
        "required": ["reason", "score"],
        "additionalProperties": False,
    }


def response_format(scale: Scale, form: str) -> dict[str, Any]:
    """`response_format` of the OpenAI protocol, which DashScope takes too."""
    if form == "json_object":
        return {"type": "json_object"}
    schema = {"name": "verdict", "strict": True, "schema": verdict_schema(scale)}
    return {"type": "json_schema", "json_schema": schema}
