"""The form of a verdict in requests: JSON schemas, and the questions of decision endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

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
from ppo_cli.rewards.judge.verdict import build_reminder, score_format
from ppo_cli.rewards.remote.failures import MESSAGE_LIMIT, Failure


class Decision(NamedTuple):
    """One question of a decision endpoint, answered with a probability for each level."""

    name: str
    instructions: str
    labels: list[str]  # of the levels, lowest first
    lowest: int = 0

    def read(self, answer: Any, usage: Usage | None) -> dict[int, float]:
        """Return level -> probability; raises JudgeError unless there is one for each level."""
        if get_path(answer, "type") == "refusal":
            raise refusal("refusal", f"The judge declined to decide {self.name}.", usage)
        # Gemini and DashScope name the levels by their index, OpenAI by their label.
        shares, names = get_path(answer, "probabilities"), self.labels
        if isinstance(shares, Mapping):
            names = [str(index) for index in range(len(self.labels))]
            pairs = [(str(name), share) for name, share in shares.items()]
        else:
            rows = shares if isinstance(shares, list) else []
            pairs = [(str(get_path(row, "label")), get_path(row, "probability")) for row in rows]
        # A label that is missing, unknown or doubled makes the answer useless.
        are_numbers = all(isinstance(p, int | float) and not isinstance(p, bool) for _, p in pairs)
        if sorted(name for name, _ in pairs) != sorted(names) or not are_numbers:
            text = f"{self.name} is not one probability for each of {', '.join(names)}: {shares}"
            raise _unread(text, usage)
        return {self.lowest + names.index(name): float(share) for name, share in pairs}


def level_labels(scale: Scale) -> list[str]:
    """Return a label for each level, lowest first; each begins with its number."""
    labels = [f"{level} out of {scale.high}" for level in scale.levels()]
    labels[0] = f"{scale.low} (the worst)"
    labels[-1] = f"{scale.high} (the best)"
    return labels


def decisions(question: Question) -> list[Decision]:
    """Return the questions of one request: one for each criterion, or one for the score."""
    if (rubric := question.rubric) is None:
        task = question.system or "Score the response."
        return [Decision("verdict", task, level_labels(question.scale), question.scale.low)]
    return [
        Decision(key, criterion.question, criterion.options)
        for key, criterion in zip(rubric.keys, rubric.criteria, strict=True)
    ]


def decision_input(question: Question) -> str:
    """Return the text that the questions are about, without the form of a written answer."""
    text = question.user
    form = score_format(question.output, question.scale, question.code)
    if question.rubric is not None:  # criteria have their own questions
        text, form = join_texts(question), question.rubric.instructions()
    return text.removesuffix(f"\n\n{build_reminder(question)}").removesuffix(form).rstrip()


def decision_questions(question: Question) -> dict[str, dict[str, object]]:
    """Return the questions as Gemini and DashScope take them."""
    return {
        name: {"type": "score", "criteria": labels, "instructions": instructions}
        for name, instructions, labels, _ in decisions(question)
    }


def read_decision(reply: Any, question: Question, tokens: TokenFields) -> Reply:
    """Return a reply with the probability of each level of each question, and no score.

    Raises JudgeError unless exactly these questions are answered, with one number for each level.
    """
    usage = read_usage(get_path(reply, "usage"), tokens)
    refuse_blocked(reply, usage)
    answers, requested = get_path(reply, "answers"), decisions(question)
    if not answers:
        raise_body(reply)
    # OpenAI answers with a list in the order of the questions, which may leave out their names.
    if isinstance(answers, list):
        pairs = zip_longest([decision.name for decision in requested], answers)
        answers = {get_path(answer, "name") or name: answer for name, answer in pairs}
    names = [decision.name for decision in requested]
    if not isinstance(answers, Mapping) or sorted(map(str, answers)) != sorted(names):
        raise _unread(f"not one answer for each of {', '.join(names)}: {answers}", usage)
    shares = tuple(decision.read(answers[decision.name], usage) for decision in requested)
    return Reply("", usage, probabilities=shares)


def _unread(problem: str, usage: Usage | None) -> JudgeError:
    """Return the error for an answer of a decision endpoint that cannot be used."""
    text = shorten(f"The decision cannot be read: {problem}", MESSAGE_LIMIT)
    return JudgeError(Failure.UNPARSED, "unparsed", text, usage=usage)


# Names in error messages for the form of an answer, next to the parameter's name.
FORMAT_WORDS = (
    "json mode", "response_schema", "response_mime_type", "structured output",
    "structured outputs", "structured generation", "grammar", "guided", "constrained decoding",
)  # fmt: skip


# Names in error messages for the system message, next to the parameter's name.
SYSTEM_WORDS = (
    "developer instruction", "system instruction", "system prompt", "system role",
    "system message", "role 'system'", 'role "system"', "roles must alternate",
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
