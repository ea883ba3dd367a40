"""What goes to a judge and what comes back, whoever the provider is.

A `Question` is a rendered request, a `Reply` what a provider answered, a `Verdict` what was
read from it. Whatever goes wrong is a `JudgeError` of one of four kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

# What a judge is asked to answer with, and so what counts as an answer.
Output = Literal["json", "text"]


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
    `user` asks for.
    """

    system: str
    user: str
    identity: str
    scale: Scale
    max_tokens: int = 1024
    vote: int = 0
    output: Output = "json"

    def again(self, *, reminder: str, max_tokens: int | None = None) -> Question:
        """Ask once more after an unreadable answer; the identity stays."""
        return replace(
            self,
            user=f"{self.user}\n\n{reminder}",
            max_tokens=max_tokens or self.max_tokens,
        )


@dataclass(frozen=True)
class Usage:
    """Tokens that one call was billed for; `cached_input` is the part of `input` read cheaply."""

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

    `usage` is None when the provider did not tell it, which is not the same as no tokens.
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
