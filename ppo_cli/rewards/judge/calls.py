"""What goes to a judge and what comes back, whoever the provider is.

A `Question` is a rendered request, a `Reply` what a provider answered, a `Verdict` what was
read from it. Whatever goes wrong is a `JudgeError` of one of four kinds. A call is booked with
what the provider reports; a number that it does not report counts at its worst case. Several
verdicts on one response make its score.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from ppo_cli.errors import Interrupted
from ppo_cli.records import Part, Score
from ppo_cli.redact import redact
from ppo_cli.spending import UPPER_BOUND

if TYPE_CHECKING:
    from ppo_cli.rewards.judge.rubric import Comparison, Rubric, RubricDraft

# What a judge is asked to answer with, and so what counts as an answer.
Output = Literal["json", "text"]
# Roles, separators and the schema of the answer, whatever the provider makes of them.
REQUEST_OVERHEAD = 64
# Words of the transports for a connection that was never made.
_NEVER_SENT = re.compile(r"ConnectionRefused|gaierror|Connect(Error|Timeout)\b|Cannot connect")
_NO_CALL = {"sdk", "credentials", "unread"}  # causes of failures before any call
# A request may time out after it was processed; a filter reads it, and Azure bills that.
_PROCESSED_STATUSES, _FILTER = {408, 499}, "content_filter"
# A count below this is not a count of the text: tokens have 3 to 5 characters of prose.
_CHARACTERS_PER_TOKEN = 8
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\n|[^\S\n]+|[!-~]|[^\x00-\x7f]|.", re.S)


@dataclass(frozen=True)
class Scale:
    """The whole numbers that a judge may give, both ends included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"a scale goes from a lower to a higher number, not {self}")

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"

    @property
    def key(self) -> str:
        """What a score on it is called in a judge's answer, so that the scale goes with it."""
        low, high = (f"minus_{-end}" if end < 0 else str(end) for end in (self.low, self.high))
        return f"score_{low}_to_{high}"

    def scaled(self, value: float) -> float:
        """Map a verdict to [0, 1]; one outside the scale raises ValueError, never clamped."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{value:g} is outside {self}")
        return (value - self.low) / (self.high - self.low)

    def levels(self) -> range:
        """Every level, lowest first."""
        return range(self.low, self.high + 1)


@dataclass(frozen=True)
class Question:
    """One rendered request to a judge.

    `system` and `user` go on the wire, the data in them fenced with a random nonce. `identity`
    is the same text with the nonce left out: what the cache and the de-duplication go by.
    `vote` numbers independent verdicts on one response, `output` is the form of the answer that
    `user` asks for. With a `rubric` the answer decides its criteria, and the score is in [0, 1].
    With a `comparison` it says which response is better, with a `draft` it writes criteria.
    """

    system: str
    user: str
    identity: str
    scale: Scale
    max_tokens: int = 1024
    vote: int = 0
    output: Output = "json"
    rubric: Rubric | None = None
    comparison: Comparison | None = None
    draft: RubricDraft | None = None

    @property
    def answer_spec(self) -> Rubric | Comparison | RubricDraft | None:
        """What is asked for in place of a score; it knows the form of the answer."""
        return self.comparison or self.rubric or self.draft


@dataclass(frozen=True)
class Usage:
    """Tokens that one call was billed for; `cached_input` is the part of `input` read cheaply.

    What a provider reports has 0 for a number that is missing.
    """

    input: int = 0
    output: int = 0
    cached_input: int = 0

    @property
    def total(self) -> int:
        """Tokens read and written."""
        return self.input + self.output

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input,
            self.output + other.output,
            self.cached_input + other.cached_input,
        )


@dataclass(frozen=True)
class Reply:
    """What a provider answered with.

    `usage` is None when the provider did not report it, which is not the same as no tokens.
    `truncated` says that the answer was cut at `max_tokens`. In decision mode `probabilities`
    holds level -> probability, and `text` is empty.
    """

    text: str
    usage: Usage | None = None
    truncated: bool = False
    probabilities: Mapping[int, float] | None = None


@dataclass(frozen=True)
class Verdict:
    """A score that was read from a reply, on the judge's own scale."""

    value: float
    reason: str
    text: str
    usage: Usage = Usage()
    cost_usd: float = 0.0
    latency_s: float = 0.0
    calls: int = 1
    cached: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Failure(Enum):
    """The four ways in which asking a judge goes wrong."""

    FATAL = "fatal"  # no later call will do better: key, model, account, request form
    RETRYABLE = "retryable"  # transport, overload, limits: the same call may pass later
    REFUSED = "refused"  # the judge will not judge this text
    UNPARSED = "unparsed"  # it answered, but no score can be read


class JudgeError(Exception):
    """One failed call, or one verdict that could not be had.

    `cause` is a short word for metrics and rollouts: `timeout`, `connection`, `http_429`,
    `http_503`, `bad_body`, `http_401`, `refusal`, `content_filter`, `truncated`, `form` …
    `retry_after` is what the provider asked for, in seconds. `usage` is billed all the same.
    """

    def __init__(
        self,
        kind: Failure,
        cause: str,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
        usage: Usage | None = None,
        reply: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.cause = cause
        self.status = status
        self.retry_after = retry_after
        self.usage = usage or Usage()
        self.reply = reply

    @property
    def said(self) -> str:
        """Cause and message, without secrets."""
        return f"{self.cause}: {redact(str(self))}"

    def redacted(self) -> JudgeError:
        """The same error without secrets in its message and its reply."""
        return JudgeError(
            self.kind, self.cause, redact(str(self)), status=self.status,
            retry_after=self.retry_after, usage=self.usage, reply=redact(self.reply),
        )  # fmt: skip


class UnlimitedCost(Interrupted):
    """There is a budget, and no upper bound for what a call may cost."""


def estimate_tokens(text: str) -> int:
    """Return an upper estimate of a text's tokens under any of the usual tokenizers.

    A short word counts a token for each two letters, a long one (it may be gibberish) and
    capitals more, digits and signs one each, runs of blanks one for sixteen. Beyond ASCII it goes
    by what byte-level tokenizers make of letters they know little of: one up to Cyrillic, two for
    the rest of the BMP, CJK included, four above it. English prose comes out at about twice its
    true length.
    """
    return sum(_piece(found.group()) for found in _PIECES.finditer(text))


@lru_cache(maxsize=256)
def worst_case(question: Question) -> Usage:
    """Return the most that one call of this question may be billed for.

    It is kept: a long text is measured once, however many tries and calls it takes.
    """
    read = estimate_tokens(question.system) + estimate_tokens(question.user) + REQUEST_OVERHEAD
    return Usage(read, question.max_tokens)


def quick_worst_case(question: Question) -> Usage:
    """Return a coarser bound than `worst_case` at no cost: a token has at least one byte."""
    size = len((question.system + question.user).encode("utf-8", "replace"))
    return Usage(size + REQUEST_OVERHEAD, question.max_tokens)


def bill(
    outcome: Reply | JudgeError | None, question: Question, input_ratio: float = 1.0
) -> tuple[Usage, str]:
    """Return what a call is booked with, and a note where that is an upper bound.

    `None` stands for a call that was cut off here, `input_ratio` is that of its reservation. A
    number that the provider does not report, or that is too small for the text, counts at the
    worst case. So does a call that failed, unless it never left or was turned away unread.
    """
    if isinstance(outcome, JudgeError) and _turned_away(outcome):
        return Usage(), ""
    usage = (outcome.usage if outcome else None) or Usage()
    sent = len(question.system) + len(question.user)
    read = usage.input if usage.input >= sent // _CHARACTERS_PER_TOKEN else 0
    written, decided = usage.output, False
    if isinstance(outcome, Reply):
        decided = outcome.probabilities is not None  # no text is written for these
        written = written if written >= len(outcome.text) // _CHARACTERS_PER_TOKEN else 0
    if read and (written or decided):
        return usage, ""
    worst = worst_case(question)
    cached = usage.cached_input if read else 0
    read = read or math.ceil(input_ratio * worst.input)
    return Usage(read, written or worst.output, cached), UPPER_BOUND


def _turned_away(error: JudgeError) -> bool:
    """Whether nothing was billed: 3xx and most 4xx statuses, and what never reached the judge."""
    if error.usage.total or error.cause == _FILTER:
        return False
    if error.status is not None:
        rejected = 300 <= error.status < 500 and error.status not in _PROCESSED_STATUSES
        return rejected or error.status == 0 or error.cause == "http_429"
    never_sent = error.cause == "connection" and _NEVER_SENT.search(str(error))
    return error.cause in _NO_CALL or bool(never_sent)


def _piece(piece: str) -> int:
    first = piece[0]
    if first.isascii():
        if piece.isalpha():
            a_token = 1.3 if piece.isupper() else 2 if len(piece) <= 12 else 1.5
            return math.ceil(len(piece) / a_token)
        if piece.isspace() and piece != "\n":
            return 0 if piece == " " else math.ceil(len(piece) / 16)
        return 1
    return 1 if first < "\u0590" else 2 if first <= "\uffff" else 4


def gated_score(reason: str, scale: Scale) -> Score:
    """The lowest score, given without asking."""
    return Score(
        0.0,
        reason=f"not sent to the judge: {reason}",
        parts={"judge": Part(raw=float(scale.low), scaled=0.0)},
        info={"cached": False, "judge_tokens": 0, "cost_usd": 0.0},
        gated=True,
    )


def score_of(
    answers: Sequence[Verdict | BaseException], question: Question
) -> tuple[Score | None, JudgeError | None]:
    """Score of a response by the mean of its votes; None with the error when too few came.

    More than half of the votes must have come. Raises what must stop the run, and bugs.
    """
    verdicts, error = sort_out(answers)
    if 2 * len(verdicts) <= len(answers):
        return None, error
    return _mean_score(verdicts, question), None


def sort_out(
    answers: Sequence[Verdict | BaseException],
) -> tuple[list[Verdict], JudgeError | None]:
    """The verdicts, and the error that counts if one does; raises what is no JudgeError."""
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, JudgeError):
            raise answer
    errors = [answer for answer in answers if isinstance(answer, JudgeError)]
    # What may pass later outweighs what will not: then asking again has a point.
    error = min(errors, key=lambda error: error.kind is not Failure.RETRYABLE, default=None)
    return [answer for answer in answers if isinstance(answer, Verdict)], error


def together(verdicts: Sequence[Verdict], rubric: Rubric) -> Verdict:
    """The verdict of a rubric from those on each of its criteria."""
    grades = [grade for verdict in verdicts for grade in verdict.info["grades"]]
    return Verdict(
        rubric.value(grades),
        "\n".join(verdict.reason for verdict in verdicts),
        "\n".join(verdict.text for verdict in verdicts),
        usage=sum((verdict.usage for verdict in verdicts), Usage()),
        cost_usd=sum(verdict.cost_usd for verdict in verdicts),
        latency_s=max(verdict.latency_s for verdict in verdicts),
        calls=sum(verdict.calls for verdict in verdicts),
        cached=all(verdict.cached for verdict in verdicts),
        info={"grades": grades},
    )


def _mean_score(verdicts: Sequence[Verdict], question: Question) -> Score:
    scale = question.scale
    raw = fmean(v.value for v in verdicts)
    value = fmean(scale.scaled(v.value) for v in verdicts)
    told = min(verdicts, key=lambda v: abs(v.value - raw))
    usage = sum((v.usage for v in verdicts), Usage())
    info: dict[str, Any] = {
        "cached": all(v.cached for v in verdicts),
        "judge_tokens": usage.total,
        "judge_calls": sum(v.calls for v in verdicts),
        "latency_s": round(max(v.latency_s for v in verdicts), 4),
        "cost_usd": sum(v.cost_usd for v in verdicts),
    }
    if len(verdicts) > 1:
        info["votes"] = [v.value for v in verdicts]
        info["vote_spread"] = pstdev(scale.scaled(v.value) for v in verdicts)
    parts = {"judge": Part(raw=raw, scaled=value)}
    if question.rubric is not None:
        parts |= _graded(question.rubric, [v.info["grades"] for v in verdicts], info)
    return Score(value, reason=told.reason, parts=parts, info=info, reply=told.text)


def _graded(
    rubric: Rubric, votes: Sequence[Sequence[float]], info: dict[str, Any]
) -> dict[str, Part]:
    """The mean credit of each criterion: all in `info`, those that every row has as metrics."""
    pairs = zip(rubric.criteria, zip(*votes, strict=True), strict=True)
    named = {one.name: fmean(map(one.credit, grades)) for one, grades in pairs}
    info["criteria"] = named
    parts = {f"rubric/{name}": Part(mean, None) for name, mean in named.items() if rubric.fixed}
    if any(one.must for one in rubric.criteria):
        missed = fmean(bool(rubric.missed_hurdles(grades)) for grades in votes)
        parts["rubric/hurdle_missed"] = Part(missed, None)
    return parts
