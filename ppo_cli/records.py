"""The frozen records that flow through a step: Prompt -> Rollout -> Scored.

Plain Python and numpy, so that every room can hold them and they pickle between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ppo_cli.thoughts import Span, find_thoughts, remove_thoughts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "unfinished"]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One data row, ready to be sampled from.

    `uid` is stable over runs and resumes (file position, not text). `text` is what the user
    asked (a string prompt, or the last user message): what a judge or a rule reads as the
    question. `rendered` is the text behind `token_ids`, chat template applied; `opened` is the
    mark of a thought that it ends with, as templates open it for the model.
    """

    uid: str
    text: str
    messages: tuple[Message, ...]
    rendered: str
    token_ids: tuple[int, ...]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    opened: str = ""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response.

    When `finish_reason` is "stop", `token_ids` ends with the end-of-sequence token, or with the
    token that completed a stop string. One that is "unfinished" has no text yet: a sampler goes on
    with it, under the weights that it has by then. `carried` counts the tokens that a response had
    when it was gone on with last, `weight_version` is that of its first token, and `seed` that of
    its stream of random numbers.
    `sampler_logprobs` has one float32 per response token, under the sampling temperature
    and before top-p/top-k truncation; `entropies` are of the same distributions, where the sampler
    gives them. `text` is what the policy wrote, without end and padding tokens.
    `thought_tokens` are the tokens up to its answer, 0 without a thought.
    """

    prompt: Prompt
    sample: int
    token_ids: tuple[int, ...]
    sampler_logprobs: NDArray[np.float32]
    text: str
    finish_reason: FinishReason
    weight_version: int = 0
    thought_tokens: int = 0
    seed: int = 0
    carried: int = 0
    entropies: NDArray[np.float32] | None = None

    @property
    def whole(self) -> str:
        """The text, with the mark of a thought that the prompt opened in front."""
        return self.prompt.opened + self.text

    @cached_property
    def thoughts(self) -> list[Span]:
        """Where the thoughts of `whole` are."""
        return find_thoughts(self.whole, cut=self.finish_reason == "length")

    @property
    def answer(self) -> str:
        """The text without thoughts; empty where it ends within its only thought."""
        return remove_thoughts(self.whole, self.thoughts)

    @property
    def unclosed(self) -> bool:
        """Whether the response ends within a thought."""
        return bool(self.thoughts) and not self.thoughts[-1].closed

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the rollout within a step."""
        return self.prompt.uid, self.sample


@dataclass(frozen=True)
class Part:
    """One component of a score: as its source gave it, and as it entered the total.

    `scaled` is None for a component that is only reported, `raw` for one that was not asked.
    """

    raw: float | None
    scaled: float | None


@dataclass(frozen=True)
class PlacedReward:
    """A share of a score that was earned at one place of the response.

    With unit "char" `end` counts characters of `Rollout.text`, and the share goes to the token
    that holds the last of the first `end` characters; with unit "token" it is the number of
    response tokens up to and including the one that gets it.
    """

    end: int
    value: float
    unit: Literal["char", "token"] = "char"


@dataclass(frozen=True)
class Score:
    """What a reward says of one rollout.

    `value` is None when scoring failed, and `failure` then says why ("timeout", "raised
    ValueError: …"); a failed score is masked out of every loss and statistic, never 0.
    `steps` places shares of `value` inside the response; what they leave of it belongs to its
    end. `reason` is the scorer's own words. `imputed` says why there was no verdict where the
    value was put in for want of one, `gated` that nobody was asked, `reply` is what a judge
    answered, and `mixture` holds the scores of the parts that were asked. `info` is free
    material for people (cached, tokens, latency_s, cost_usd …), JSON-serialisable: nothing is
    decided by it.
    """

    value: float | None
    failure: str = ""
    reason: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[PlacedReward, ...] = ()
    imputed: str = ""
    gated: bool = False
    reply: str = ""
    mixture: Mapping[str, Score] = field(default_factory=dict)

    @property
    def judged(self) -> bool:
        """Whether the value was really given: not failed, and not put in for want of one."""
        return self.value is not None and not self.imputed

    @property
    def facts(self) -> dict[str, Any]:
        """What a log has of this score beside value, failure, reason and parts."""
        found: dict[str, Any] = {"judge_reply": self.reply} if self.reply else {}
        if self.gated:
            found["gated"] = True
        if self.mixture:
            parts = {n: s.facts | s._failed for n, s in self.mixture.items()}
            found["mixture"] = {name: facts for name, facts in parts.items() if facts}
        if self.imputed:
            found["imputed"] = self.imputed
        return {**found, **self.info}

    @property
    def _failed(self) -> dict[str, str]:
        return {"failure": self.failure} if self.failure else {}

    @classmethod
    def failed(cls, failure: str, **info: Any) -> Score:
        """Build the score of a rollout that could not be judged."""
        return cls(value=None, failure=failure, info=info)


@dataclass(frozen=True, eq=False)
class Scored:
    """A rollout with its score."""

    rollout: Rollout
    score: Score
