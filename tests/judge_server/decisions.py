"""Requests and replies of decision endpoints, by the documents in the SDKs of their providers.

A request that the documents do not allow gets 400. Sources: `openai.types.decision*`,
`google.genai._gaos.types.decisions`, `dashscope.v2.resources.decision`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.judge_server.wire import Body

Answers = Any  # a list of answers (OpenAI), or a mapping from question ids to answers


@dataclass(frozen=True)
class Asked:
    """One question of a request: its id or name, its instructions and options, lowest first."""

    name: str
    instructions: str
    options: tuple[str, ...]


Decide = Callable[[str, Asked], Sequence[float]]  # the text, a question -> a share per option


def read_openai(body: Body) -> tuple[str, list[Asked]]:
    """`questions`: 1-400 of them, in a list; each score has `levels` with a label."""
    text = check_keys(body, "input model questions")["input"]
    questions = body["questions"]
    check(isinstance(text, str) and isinstance(questions, list) and 1 <= len(questions) <= 400)
    decisions = []
    for question in questions:
        check_keys(question, "type instructions levels", "name")
        check(question["type"] == "score")
        labels = [
            check_keys(level, "label", "description")["label"] for level in question["levels"]
        ]
        check(all(isinstance(label, str) for label in labels) and len(set(labels)) == len(labels))
        decisions.append(Asked(question.get("name"), question["instructions"], tuple(labels)))
    return text, decisions


def read_mapped(body: Body, text_key: str) -> tuple[str, list[Asked]]:
    """`questions`: a mapping from ids; a score has 2 to 255 texts, its `criteria`."""
    text = check_keys(body, f"{text_key} model questions")[text_key]
    check(isinstance(text, str) and isinstance(body["questions"], dict) and body["questions"])
    decisions = []
    for name, question in body["questions"].items():
        check_keys(question, "type instructions criteria")
        levels = question["criteria"]
        check(question["type"] == "score" and bool(question["instructions"]))
        check(2 <= len(levels) <= 255 and all(isinstance(i, str) and i for i in levels))
        decisions.append(Asked(name, question["instructions"], tuple(levels)))
    return text, decisions


def check(holds: Any) -> None:
    if not holds:
        raise ValueError("the documents do not allow this request")


def check_keys(value: Any, required: str, optional: str = "") -> Body:
    names = set(required.split())
    check(isinstance(value, dict) and names <= set(value) <= names | set(optional.split()))
    return dict(value)


def write_openai(question: Asked, shares: Sequence[float]) -> Body:
    rows = [
        {"label": label, "value": i, "probability": share}
        for i, (label, share) in enumerate(zip(question.options, shares, strict=True))
    ]
    score = sum(i * share for i, share in enumerate(shares))
    return {
        "type": "score", "name": question.name, "score": score, "confidence": max(shares),
        "probabilities": rows,
    }  # fmt: skip


def write_mapped(question: Asked, shares: Sequence[float]) -> Body:
    return {
        "type": "score", "score": sum(i * share for i, share in enumerate(shares)),
        "confidence": max(shares), "legend": dict(enumerate(question.options)),
        "probabilities": {str(i): share for i, share in enumerate(shares)},
    }  # fmt: skip


READERS: dict[str, Callable[[Body], tuple[str, list[Asked]]]] = {
    "openai": read_openai,
    "gemini": lambda body: read_mapped(body, "input"),
    "dashscope": lambda body: read_mapped(body, "state"),
}


def write_answers(name: str, text: str, pairs: list[tuple[Asked, Sequence[float]]]) -> Answers:
    """The answers of a reply, with a share for each option of a question."""
    if name == "openai":
        return [write_openai(question, shares) for question, shares in pairs]
    random.Random(text).shuffle(pairs)  # a mapping has no order
    return {question.name: write_mapped(question, shares) for question, shares in pairs}


def write_refusal(name: str, count: int) -> Body:
    """What a reply has where the text is refused."""
    if name == "openai":
        return {"answers": [{"type": "refusal", "name": None}] * count}
    return {"prompt_feedback": {"block_reason": "SAFETY"}}


def write_usage(name: str, tokens: int) -> Body:
    prefix = "total_" if name == "gemini" else ""
    usage: Body = {f"{prefix}input_tokens": tokens, f"{prefix}output_tokens": 0}
    if name == "openai":
        usage |= {
            "total_tokens": tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        }  # fmt: skip
    return usage


def valid_reply(name: str, reply: Body) -> Any:
    """Read a reply with the types of the provider's SDK, which are the protocol's document."""
    if name == "openai":
        from openai.types.decision import Decision

        return Decision.model_validate_json(json.dumps(reply))
    if name == "gemini":
        from google.genai._gaos.types.decisions import CreateDecisionResponse

        return CreateDecisionResponse.model_validate_json(json.dumps(reply))
    from dashscope.v2.resources.decision import DecisionResponse

    return DecisionResponse.model_validate_json(json.dumps(reply))
