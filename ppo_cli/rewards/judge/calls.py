"""What goes to a judge and what comes back, for all providers.

A `Question` is a rendered request, a `Reply` what a provider answered, a `Verdict` what was
read from it; every failure is a `JudgeError`. A call is booked with the usage that the provider
reports; a number that it does not report counts at its worst case. The score of a response is the
mean of its verdicts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from ppo_cli.digests import digest_text
from ppo_cli.errors import Interrupted
from ppo_cli.records import HELD_OUT, TRAINED, Part, Score
from ppo_cli.rewards.remote.failures import Failure, RemoteError
from ppo_cli.secrets.redact import redact
from ppo_cli.spending import UPPER_BOUND

if TYPE_CHECKING:
    from ppo_cli.rewards.judge.rubric import Comparison, Placing, Rubric, RubricDraft

# The form of answer that a judge is asked for.
Output = Literal["json", "text"]
CODE_LENGTH = 6  # hexadecimal digits
# Upper bound of the tokens of roles, separators and the schema of the answer.
REQUEST_OVERHEAD = 64
# HTTP libraries name a connection that was never made so (httpx 0.28, aiohttp 3.13).
_NEVER_SENT = re.compile(r"ConnectionRefused|gaierror|Connect(Error|Timeout)\b|Cannot connect")
# Causes without a bill: nothing was sent, or (`unread`) a batch is booked when it is read.
_NOT_BILLED = {"sdk", "credentials", "unread"}
# A request may time out after it was processed; Azure bills what its filter reads.
_PROCESSED_STATUSES, _FILTER = {408, 499}, "content_filter"
# Tokens have 3 to 5 characters of prose: a count of one per 8 characters or fewer is wrong.
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
        """The name of the score in a judge's answer; it repeats the scale for the model."""
        low, high = (f"minus_{-end}" if end < 0 else str(end) for end in (self.low, self.high))
        return f"score_{low}_to_{high}"

    def scaled(self, value: float) -> float:
        """Map a verdict to [0, 1]; one outside the scale raises ValueError and is never clamped."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{value:g} is outside {self}")
        return (value - self.low) / (self.high - self.low)

    def levels(self) -> range:
        """Return every level, lowest first."""
        return range(self.low, self.high + 1)


@dataclass(frozen=True)
class Question:
    """One rendered request to a judge.

    `system` and `user` go on the wire, the data in them fenced with a random nonce. `identity`
    is the same text without the nonce, a part of the key of the cache and of de-duplication.
    `vote` numbers independent verdicts on one response, `output` is the form of the answer that
    `user` asks for. `shown` has the texts to be judged, which a reply may quote. With a `rubric`
    the answer decides its criteria, and the score is in [0, 1]. With `placing` it scores the
    pieces of the response as well, with a `comparison` it says which response is better, with a
    `draft` it writes criteria.
    """

    system: str
    user: str
    identity: str
    scale: Scale
    max_tokens: int = 1024
    vote: int = 0
    output: Output = "json"
    shown: str = ""
    rubric: Rubric | None = None
    placing: Placing | None = None
    comparison: Comparison | None = None
    draft: RubricDraft | None = None

    @property
    def answer_spec(self) -> Rubric | Placing | Comparison | RubricDraft | None:
        """What is asked for in place of a score; it knows the form of the answer."""
        return self.comparison or self.rubric or self.placing or self.draft

    @property
    def code(self) -> str:
        """The code in the score line of a text verdict; see `score_code`."""
        return score_code(self.identity)


def score_code(identity: str) -> str:
    """Return the code that the score line of a text verdict has to contain.

    As a digest of the request it is the same in each process, but no response can contain it: the
    response is a part of that request. So a judge that quotes the response does not quote a score.
    """
    return digest_text(identity)[:CODE_LENGTH]


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
        """Tokens of input and output."""
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
    holds level -> probability for each question, and `text` is empty.
    """

    text: str
    usage: Usage | None = None
    truncated: bool = False
    probabilities: Sequence[Mapping[int, float]] | None = None


@dataclass(frozen=True)
class Verdict:
    """A score that was read from a reply, on the judge's scale."""

    value: float
    reason: str
    text: str
    usage: Usage = Usage()
    cost_usd: float = 0.0
    latency_s: float = 0.0
    calls: int = 1
    cached: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class JudgeError(RemoteError):
    """One failed call, or one verdict that could not be had.

    More causes than a `RemoteError` has: `refusal`, `content_filter`, `too_long`, `truncated`,
    `form` ... `usage` is billed although the call failed, `reply` is what the judge wrote.
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
        super().__init__(kind, cause, message, status=status, retry_after=retry_after)
        self.usage = usage or Usage()
        self.reply = reply

    def rewritten(
        self, message: str, *, usage: Usage | None = None, reply: str | None = None
    ) -> JudgeError:
        """Return the same error with another message, and maybe with other usage or reply."""
        return JudgeError(
            self.kind, self.cause, message, status=self.status, retry_after=self.retry_after,
            usage=self.usage if usage is None else usage,
            reply=self.reply if reply is None else reply,
        )  # fmt: skip

    def redacted(self) -> JudgeError:
        """Return the same error without secrets in its message and its reply."""
        return self.rewritten(redact(str(self)), reply=redact(self.reply))


class UnlimitedCost(Interrupted):
    """There is a budget, but the cost of a call has no upper bound."""


def estimate_tokens(text: str) -> int:
    """Return an upper estimate of a text's tokens under any of the usual tokenizers.

    A short word counts one token for two letters; capitals and long words (maybe gibberish) count
    more. Digits and signs count one each, blanks one for sixteen. Other letters count as byte-level
    tokenizers split rare ones: one token up to Cyrillic, two in the rest of the BMP (with CJK),
    four above it. The estimate for English prose is about twice the true count.
    """
    return sum(_tokens_of_piece(match.group()) for match in _PIECES.finditer(text))


@lru_cache(maxsize=256)
def worst_case(question: Question) -> Usage:
    """Return the most that one call of this question may be billed for.

    The result is cached: a long text is measured once, even if it takes several attempts.
    """
    read = estimate_tokens(question.system) + estimate_tokens(question.user) + REQUEST_OVERHEAD
    return Usage(read, question.max_tokens)


def quick_worst_case(question: Question) -> Usage:
    """Return a coarser bound than `worst_case` quickly: a token has at least one byte."""
    size = len((question.system + question.user).encode("utf-8", "replace"))
    return Usage(size + REQUEST_OVERHEAD, question.max_tokens)


def billed_usage(
    outcome: Reply | JudgeError | None, question: Question, input_ratio: float = 1.0
) -> tuple[Usage, str]:
    """Return the usage that a call is booked with, and a note if that is an upper bound.

    The outcome None is a call that was cancelled here; `input_ratio` is that of its reservation. A
    number that the provider does not report, or that is too small for the text, counts at the
    worst case. So does a failed call, unless it was never sent or was rejected unread.
    """
    if isinstance(outcome, JudgeError) and _was_not_billed(outcome):
        return Usage(), ""
    # Input: trust the count only if it can be the count of this text.
    usage = (outcome.usage if outcome else None) or Usage()
    sent = len(question.system) + len(question.user)
    read = usage.input if usage.input >= sent // _CHARACTERS_PER_TOKEN else 0
    written, is_decision = usage.output, False
    # Output: the same for what the judge wrote.
    if isinstance(outcome, Reply):
        is_decision = outcome.probabilities is not None  # these have no text
        written = written if written >= len(outcome.text) // _CHARACTERS_PER_TOKEN else 0
    if read and (written or is_decision):
        return usage, ""
    # One number is missing or wrong: assume the worst for it.
    worst = worst_case(question)
    cached = usage.cached_input if read else 0
    read = read or math.ceil(input_ratio * worst.input)
    return Usage(read, written or worst.output, cached), UPPER_BOUND


def _was_not_billed(error: JudgeError) -> bool:
    """Whether a failed call cost nothing: most 3xx and 4xx statuses, and calls never sent."""
    if error.usage.total or error.cause == _FILTER:
        return False
    if error.status is not None:
        rejected = 300 <= error.status < 500 and error.status not in _PROCESSED_STATUSES
        return rejected or error.status == 0 or error.cause == "http_429"
    # A connection that was never made cost nothing, one that broke may have.
    never_sent = error.cause == "connection" and _NEVER_SENT.search(str(error))
    return error.cause in _NOT_BILLED or bool(never_sent)


def _tokens_of_piece(piece: str) -> int:
    """Return an estimate of the tokens in a run of letters or white space, or in one character."""
    first = piece[0]
    # Letters and white space in runs, everything else one token each.
    if first.isascii():
        if piece.isalpha():
            letters_per_token = 1.3 if piece.isupper() else 2 if len(piece) <= 12 else 1.5
            return math.ceil(len(piece) / letters_per_token)
        if piece.isspace() and piece != "\n":
            return 0 if piece == " " else math.ceil(len(piece) / 16)
        return 1
    return 1 if first < "\u0590" else 2 if first <= "\uffff" else 4


def gated_score(reason: str, scale: Scale) -> Score:
    """Return the lowest score, which was given without asking the judge."""
    return Score(
        0.0,
        reason=f"not sent to the judge: {reason}",
        parts={"judge": Part(raw=float(scale.low), scaled=0.0)},
        info={"judge_tokens": 0, "cost_usd": 0.0},
        gated=True,
    )


def score_from_votes(
    answers: Sequence[Verdict | BaseException], question: Question
) -> tuple[Score | None, JudgeError | None]:
    """Return a response's mean score; None and the error unless more than half the votes came.

    Exceptions that are not JudgeErrors stop the run and are raised.
    """
    verdicts, error = split_answers(answers)
    if 2 * len(verdicts) <= len(answers):
        return None, error
    return _mean_score(verdicts, question), None


def needs_vote(answers: Sequence[Verdict | BaseException]) -> bool:
    """Return whether no value has more than half of the votes; a failed call agrees with none.

    A majority only ends further votes: the score is the mean of all.
    """
    values = Counter(answer.value for answer in answers if isinstance(answer, Verdict))
    return 2 * max(values.values(), default=0) <= len(answers)


def split_answers(
    answers: Sequence[Verdict | BaseException],
) -> tuple[list[Verdict], JudgeError | None]:
    """Return the verdicts and the main error, if any; raises what is not a JudgeError."""
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, JudgeError):
            raise answer
    errors = [answer for answer in answers if isinstance(answer, JudgeError)]
    # A temporary error is the main one: asking again may then help.
    error = min(errors, key=lambda error: error.kind is not Failure.RETRYABLE, default=None)
    return [answer for answer in answers if isinstance(answer, Verdict)], error


def merge_criteria(verdicts: Sequence[Verdict], rubric: Rubric) -> Verdict:
    """Combine the verdicts on each criterion of a rubric into one."""
    info: dict[str, Any] = {
        "grades": [grade for verdict in verdicts for grade in verdict.info["grades"]]
    }
    if rubric.quoted:
        info["quotes"] = [quote for verdict in verdicts for quote in verdict.info["quotes"]]
    if all("spread" in verdict.info for verdict in verdicts):
        info["spread"] = rubric.spread([verdict.info["spread"] for verdict in verdicts])
    return Verdict(
        rubric.value(info["grades"]),
        "\n".join(verdict.reason for verdict in verdicts),
        "\n".join(verdict.text for verdict in verdicts),
        usage=sum((verdict.usage for verdict in verdicts), Usage()),
        cost_usd=sum(verdict.cost_usd for verdict in verdicts),
        latency_s=max(verdict.latency_s for verdict in verdicts),
        calls=sum(verdict.calls for verdict in verdicts),
        cached=all(verdict.cached for verdict in verdicts),
        info=info,
    )


def list_criteria_parts(rubric: Rubric, credits: Mapping[str, float]) -> dict[str, Part]:
    """Return what of a rubric becomes a metric: the criteria that every row has, and held-out ones.

    The mean credit of held-out criteria is next to that of those that training asks about, in which
    a missed hurdle counts by its weight, though it makes the score 0.
    """
    parts = {f"rubric/{name}": Part(c, None) for name, c in credits.items() if rubric.fixed}
    held_out = [criterion.held_out for criterion in rubric.criteria]
    if any(held_out):
        earned = [credits[criterion.name] for criterion in rubric.criteria]
        trained = [criterion.weight for criterion in rubric.criteria]
        parts |= {
            HELD_OUT: Part(fmean(earned, held_out), None),
            TRAINED: Part(fmean(earned, trained), None),
        }
    return parts


def _mean_score(verdicts: Sequence[Verdict], question: Question) -> Score:
    """Return the mean of the verdicts on one response as its score.

    It has the reason of the verdict closest to the mean, and costs and calls of all verdicts.
    """
    scale = question.scale
    raw = fmean(v.value for v in verdicts)
    value = fmean(scale.scaled(v.value) for v in verdicts)
    # The reason shown is the one of the vote closest to the mean.
    typical = min(verdicts, key=lambda v: abs(v.value - raw))
    usage = sum((v.usage for v in verdicts), Usage())
    # Totals over the votes, for metrics and for the rollout's line.
    info: dict[str, Any] = {
        "cached": all(v.cached for v in verdicts),
        "judge_tokens": usage.total,
        "judge_calls": sum(v.calls for v in verdicts),
        "latency_s": round(max(v.latency_s for v in verdicts), 4),
        "cost_usd": sum(v.cost_usd for v in verdicts),
    }
    if question.placing is not None:
        info["pieces"] = [fmean(p) for p in zip(*(v.info["pieces"] for v in verdicts), strict=True)]
    spreads = [v.info["spread"] for v in verdicts if "spread" in v.info]
    if len(verdicts) > 1:
        info["votes"] = [v.value for v in verdicts]
        info["vote_spread"] = pstdev(scale.scaled(v.value) for v in verdicts)
    # Of votes that have a spread themselves: the law of total variance.
    if spreads:
        within = fmean(spread**2 for spread in spreads)
        info["spread"] = math.sqrt(within + info.get("vote_spread", 0.0) ** 2)
    parts = {"judge": Part(raw=raw, scaled=value)}
    if question.rubric is not None:
        rubric, votes = question.rubric.restore(), [v.info["grades"] for v in verdicts]
        pairs = zip(rubric.criteria, zip(*votes, strict=True), strict=True)
        info["criteria"] = {c.name: fmean(map(c.credit, grades)) for c, grades in pairs}
        if rubric.quoted:
            info["quotes"] = list(typical.info["quotes"])
        parts |= list_criteria_parts(rubric, info["criteria"])
        if any(criterion.must for criterion in rubric.criteria):
            missed = fmean(bool(rubric.missed_hurdles(grades)) for grades in votes)
            parts["rubric/hurdle_missed"] = Part(missed, None)
    return Score(value, reason=typical.reason, parts=parts, info=info, reply=typical.text)
