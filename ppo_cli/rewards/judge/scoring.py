"""From rollouts to what a judge reads, and from verdicts to scores."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from ppo_cli.records import Part, Prompt, Score
from ppo_cli.rewards.judge.calls import Failure, JudgeError, Scale, Usage, Verdict
from ppo_cli.rewards.judge.prompt import Material

PART = "judge"
# Replies that say nothing and that weak judges reward (arXiv 2507.08794).
WORTHLESS = (":", "Solution", "Thought process:", "Let's solve this problem step by step.")


def material_of(prompt: Prompt, response: str) -> Material:
    """What a judge reads of a response: the question, or all turns of a conversation."""
    return Material(
        prompt=_whole(question_text(prompt)),
        response=_whole(response),
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
    )


def question_text(prompt: Prompt) -> str:
    """A single question as it stands; several turns as a transcript."""
    turns = [m for m in prompt.messages if m.get("role") != "system"]
    if len(turns) < 2:
        return prompt.text
    return "\n\n".join(f"{str(m['role']).capitalize()}: {m['content']}" for m in prompt.messages)


def _whole(text: str) -> str:
    """A sampler may cut a character in half; no wire takes the half."""
    return text.encode("utf-8", "replace").decode("utf-8")


def gated_score(reason: str, scale: Scale) -> Score:
    """The lowest score, given without asking."""
    return Score(
        0.0,
        reason=f"not sent to the judge: {reason}",
        parts={PART: Part(raw=float(scale.low), scaled=0.0)},
        info={"cached": False, "judge_tokens": 0, "cost_usd": 0.0},
        gated=True,
    )


def score_of(
    answers: Sequence[Verdict | BaseException], scale: Scale
) -> tuple[Score | None, JudgeError | None]:
    """Score of a response by the mean of its votes; None with the error when too few came.

    More than half of the votes must have come. Raises what must stop the run, and bugs.
    """
    verdicts = [a for a in answers if isinstance(a, Verdict)]
    errors = [a for a in answers if isinstance(a, JudgeError)]
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, JudgeError):
            raise answer
    if 2 * len(verdicts) <= len(answers):
        return None, _weightiest(errors)
    return _mean_score(verdicts, scale), None


def _weightiest(errors: Sequence[JudgeError]) -> JudgeError:
    """What may pass later outweighs what will not: then asking again has a point."""
    return min(errors, key=lambda e: e.kind is not Failure.RETRYABLE)


def _mean_score(verdicts: Sequence[Verdict], scale: Scale) -> Score:
    raw = fmean(v.value for v in verdicts)
    value = fmean(scale.scaled(v.value) for v in verdicts)
    told = min(verdicts, key=lambda v: abs(v.value - raw))
    usage = sum((v.usage for v in verdicts), Usage())
    info: dict[str, Any] = {
        "cached": all(v.cached for v in verdicts),
        "judge_tokens": usage.input + usage.output,
        "judge_calls": sum(v.calls for v in verdicts),
        "latency_s": round(max(v.latency_s for v in verdicts), 4),
        "cost_usd": sum(v.cost_usd for v in verdicts),
    }
    if len(verdicts) > 1:
        info["votes"] = [v.value for v in verdicts]
        info["vote_spread"] = pstdev(scale.scaled(v.value) for v in verdicts)
    parts = {PART: Part(raw=raw, scaled=value)}
    return Score(value, reason=told.reason, parts=parts, info=info, reply=told.text)
