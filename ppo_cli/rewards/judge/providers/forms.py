"""The form of a verdict in requests: JSON schemas, and the questions of decision endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_cli.errors import shorten
from ppo_cli.rewards.judge.calls import JudgeError, Question, Reply, Scale, Usage
from ppo_cli.rewards.judge.providers.replies import (
    TokenFields,
    get_path,
    raise_body,
    read_usage,
    refusal,
    refuse_blocked,
)
from ppo_cli.rewards.remote.failures import MESSAGE_LIMIT, Failure

# Name of the question: a decision endpoint answers it with a probability for each level.
QUESTION = "verdict"


def level_labels(scale: Scale) -> list[str]:
    """Return a label for each level, lowest first; each begins with its number."""
    labels = [f"{level} out of {scale.high}" for level in scale.levels()]
    labels[0] = f"{scale.low} (the worst)"
    labels[-1] = f"{scale.high} (the best)"
    return labels


def decision_question(question: Question) -> dict[str, dict[str, object]]:
    """Return the question as Gemini and DashScope take it."""
    task = {"type": "score", "criteria": level_labels(question.scale)}
    return {QUESTION: {**task, "instructions": question.system or "Score the response."}}


def read_decision(
    reply: Any, scale: Scale, tokens: TokenFields, labels: Sequence[str] | None = None
) -> Reply:
    """Return a reply with the probability of each level, and no score.

    Without labels of the question's levels, the answer names them by their index. Raises JudgeError
    unless it has one number for each level.
    """
    usage = read_usage(get_path(reply, "usage"), tokens)
    refuse_blocked(reply, usage)
    answer = get_path(reply, "answers.0") or get_path(reply, f"answers.{QUESTION}")
    if get_path(answer, "type") == "refusal":
        raise refusal("refusal", "The judge declined to decide.", usage)
    # Gemini and DashScope send an object, OpenAI a list of rows.
    shares = get_path(answer, "probabilities")
    if isinstance(shares, dict):
        pairs = [(str(name), share) for name, share in shares.items()]
    elif isinstance(shares, list):
        pairs = [(str(get_path(row, "label")), get_path(row, "probability")) for row in shares]
    else:
        raise_body(reply)
    indices = [str(i) for i in range(len(scale.levels()))]
    return reply_from_probabilities(pairs, labels or indices, scale, usage)


def reply_from_probabilities(
    shares: Sequence[tuple[str, Any]], labels: Sequence[str], scale: Scale, usage: Usage | None
) -> Reply:
    """Return the reply with a probability per level; the labels must be those of the question."""
    # A label that is missing, unknown or doubled makes the answer useless.
    names = [name for name, _ in shares]
    are_numbers = all(isinstance(p, int | float) and not isinstance(p, bool) for _, p in shares)
    if sorted(names) != sorted(labels) or not are_numbers:
        text = f"The decision is not one probability for each of {', '.join(labels)}: {shares}"
        raise JudgeError(Failure.UNPARSED, "unparsed", shorten(text, MESSAGE_LIMIT), usage=usage)
    levels = dict(zip(labels, scale.levels(), strict=True))
    return Reply("", usage, probabilities={levels[name]: float(share) for name, share in shares})


# Names in error messages for the form of an answer, next to the parameter's name.
FORMAT_WORDS = (
    "json mode", "response_schema", "response_mime_type", "structured output",
    "structured outputs", "structured generation", "grammar", "guided", "constrained decoding",
)  # fmt: skip


# Names in error messages for the system message, next to the parameter's name.
SYSTEM_WORDS = (
    "developer instruction", "system instruction", "system prompt", "system role",
    "system message", "role 'system'", 'role "system"',
)  # fmt: skip


def chat_messages(question: Question, *, apart: bool = True) -> list[Mapping[str, str]]:
    """Return system and user message, or both in one; no empty system message."""
    if not question.system or not apart:
        return [{"role": "user", "content": join_texts(question)}]
    return [
        {"role": "system", "content": question.system},
        {"role": "user", "content": question.user},
    ]


def join_texts(question: Question) -> str:
    """Return system and user text in one, for models that take no system message."""
    return f"{question.system}\n\n{question.user}" if question.system else question.user


def verdict_schema(question: Question) -> dict[str, Any]:
    """Return the JSON schema of the answer: `{"reason": str, "score_1_to_10": int}`, or another."""
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
    """Return the `response_format` of the OpenAI protocol, which DashScope takes too."""
    if form == "json_object":
        return {"type": "json_object"}
    schema = {"name": "verdict", "strict": True, "schema": verdict_schema(question)}
    return {"type": "json_schema", "json_schema": schema}
