"""The form of a verdict on the wire: JSON schemas, and the questions of decision endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppo_cli.errors import shorten
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale, Usage
from ppo_cli.rewards.judge.providers.base import attribute
from ppo_cli.rewards.judge.providers.bodies import bad_body, describe
from ppo_cli.rewards.remote.failures import MESSAGE_LIMIT, Failure

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
    indices = [str(i) for i in range(len(scale.levels()))]
    return by_level([(str(name), share) for name, share in shares.items()], indices, scale, usage)


def by_level(
    shares: Sequence[tuple[str, Any]], labels: Sequence[str], scale: Scale, usage: Usage | None
) -> Reply:
    """Turn probabilities by label into a reply; the labels must be exactly those asked for."""
    names = [name for name, _ in shares]
    right = all(isinstance(p, int | float) and not isinstance(p, bool) for _, p in shares)
    if sorted(names) != sorted(labels) or not right:
        text = f"The decision is not one probability for each of {', '.join(labels)}: {shares}"
        raise JudgeError(Failure.UNPARSED, "unparsed", shorten(text, MESSAGE_LIMIT), usage=usage)
    levels = dict(zip(labels, scale.levels(), strict=True))
    return Reply("", usage, probabilities={levels[name]: float(share) for name, share in shares})


# What errors call the form of an answer, beside the parameter's own name.
FORMAT_WORDS = (
    "json mode", "response_schema", "response_mime_type", "structured output",
    "structured outputs", "structured generation", "grammar", "guided", "constrained decoding",
)  # fmt: skip


def verdict_schema(question: Question) -> dict[str, Any]:
    """JSON schema of the answer: `{"reason": str, "score_1_to_10": int}`, or another verdict."""
    if question.answer_spec is not None:
        return question.answer_spec.schema()
    scale = question.scale
    score = {
        "type": "integer", "enum": list(scale.levels()),
        "description": f"{scale.low} is the worst, {scale.high} the best",
    }  # fmt: skip
    return {
        "type": "object",
        "properties": {"reason": {"type": "string"}, scale.key: score},
        "required": ["reason", scale.key],
        "additionalProperties": False,
    }


def response_format(question: Question, form: str) -> dict[str, Any]:
    """`response_format` of the OpenAI protocol, which DashScope takes too."""
    if form == "json_object":
        return {"type": "json_object"}
    schema = {"name": "verdict", "strict": True, "schema": verdict_schema(question)}
    return {"type": "json_schema", "json_schema": schema}
