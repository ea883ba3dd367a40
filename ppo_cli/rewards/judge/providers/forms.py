"""The form of a verdict on the wire: JSON schemas, and the questions of decision endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ppo_cli.rewards.judge.calls import Failure, JudgeError, Question, Reply, Scale, Usage
from ppo_cli.rewards.judge.providers.base import attribute
from ppo_cli.rewards.judge.providers.bodies import bad_body, describe

# A decision endpoint answers one question about the text with a probability for each level.
QUESTION = "verdict"


def criteria(scale: Scale) -> list[str]:
    """A label for each level, lowest first; each begins with its number."""
    labels = [f"{level} out of {scale.high}" for level in scale.levels()]
    labels[0] = f"{scale.low} (the worst)"
    labels[-1] = f"{scale.high} (the best)"
    return labels


def score_question(question: Question) -> dict[str, dict[str, object]]:
    """The question as Gemini and DashScope take it."""
    asked = {"type": "score", "criteria": criteria(question.scale)}
    return {QUESTION: {**asked, "instructions": question.system or "Score the response."}}


def read_decision(reply: Any, scale: Scale, usage: Usage | None) -> Reply:
    """Read what `score_question` is answered with: the probability of each level by its index."""
    shares = attribute(reply, "answers", QUESTION, "probabilities")
    if not isinstance(shares, dict):
        raise bad_body(describe(reply))
    return by_level([shares.get(str(i)) for i in range(len(scale.levels()))], scale, usage)


def by_level(shares: Sequence[float | None], scale: Scale, usage: Usage | None) -> Reply:
    """Turn probabilities, lowest level first, into a reply; they are made to sum to 1."""
    known = [share for share in shares if isinstance(share, int | float)]
    total = math.fsum(known)
    fits = len(known) == len(shares) == len(scale.levels())
    if not fits or not math.isfinite(total) or total <= 0 or min(known) < 0:
        text = f"The decision names {len(known)} of {len(scale.levels())} probabilities: {shares}"
        raise JudgeError(Failure.UNPARSED, "unparsed", text, usage=usage)
    levels = zip(scale.levels(), known, strict=True)
    return Reply("", usage, probabilities={level: share / total for level, share in levels})


# What errors call the form of an answer, beside the parameter's own name.
FORMAT_WORDS = (
    "json mode", "response_schema", "response_mime_type", "structured output",
    "structured outputs", "structured generation", "grammar", "guided", "constrained decoding",
)  # fmt: skip


def verdict_schema(question: Question) -> dict[str, Any]:
    """JSON schema of the answer: `{"reason": str, "score": int}`, or verdicts of another kind."""
    if question.asks is not None:
        return question.asks.schema()
    return {
        "type": "object",
        "properties": {
            "reason": {"type": "string"},
            "score": {"type": "integer", "enum": list(question.scale.levels())},
        },
        "required": ["reason", "score"],
        "additionalProperties": False,
    }


def response_format(question: Question, form: str) -> dict[str, Any]:
    """`response_format` of the OpenAI protocol, which DashScope takes too."""
    if form == "json_object":
        return {"type": "json_object"}
    schema = {"name": "verdict", "strict": True, "schema": verdict_schema(question)}
    return {"type": "json_schema", "json_schema": schema}
