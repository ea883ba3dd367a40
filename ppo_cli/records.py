"""The frozen records that flow through a step: Prompt -> Rollout -> Scored.

Plain Python and numpy: every room can use them, and they are pickled between processes.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ppo_cli.thoughts import Span, find_thoughts, remove_thoughts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# "unfinished": a partial rollout that a later step continues.
FinishReason = Literal["stop", "length", "unfinished"]
Message = Mapping[str, Any]


def text_of(message: Message) -> str:
    """Return the text of a message; other content is written as JSON."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def format_call(call: Mapping[str, Any]) -> str:
    """Return a tool call as `name(argument=value, …)`, its values as JSON."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{function.get('name')}({arguments})"
    if not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"": arguments}
    values = [f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items()]
    return f"{function.get('name')}({', '.join(values)})"


def format_tool(schema: Mapping[str, Any]) -> str:
    """Return a tool's schema on one line: `name(argument: type, …): description`."""
    function = schema.get("function") or schema
    parameters = function.get("parameters") or {}
    arguments = [
        f"{name}: {' or '.join(map(str, fields.get('enum', [fields.get('type', 'any')])))}"
        for name, fields in (parameters.get("properties") or {}).items()
    ]
    description = " ".join(str(function.get("description") or "").split())
    return f"{function['name']}({', '.join(arguments)}): {description}"


@dataclass(frozen=True)
class Prompt:
    """One data row, ready to be sampled from.

    `uid` is stable over runs and resumes (file position, not text). `text` is the question that a
    judge or a rule reads (a string prompt, or the last user message). `rendered` is the text of
    `token_ids`, chat template applied; `opened` is the mark of a thought at its end, if the
    template opens one for the model. `tools` has a line for each tool that the model may call.
    `columns` has those of the row as they are, for functions that read them. A `validation` prompt
    is only measured: a judge is asked about held-out criteria too.
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
    tools: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    validation: bool = False


def mark_validation(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as those of a validation."""
    return [replace(prompt, validation=True) for prompt in prompts]


class LargePrompts(Sequence[Prompt]):
    """Prompts that are not built before they are read."""

    @abstractmethod
    def data_sources(self) -> set[str]:
        """Return the data_sources of all prompts, without reading them."""


def data_sources(prompts: Sequence[Prompt]) -> set[str]:
    """Return the data_sources of all prompts."""
    if isinstance(prompts, LargePrompts):
        return prompts.data_sources()
    return {prompt.data_source for prompt in prompts}


@dataclass(frozen=True, eq=False)
class Turn:
    """A turn of an episode: what the policy wrote, and what the environment replied.

    The policy's tokens are [start, end) of the episode's `token_ids`; those from there to the next
    turn are the rendered replies. With a split history there are no such tokens, and `context` has
    all tokens that the model read before this turn. `message` is the policy's text as the chat
    template reads it (content, tool_calls); `rewards` are the environment's, by name. `error` says
    what was wrong with its tool calls, `cut` that the turn reached its limit of tokens. `tools` has
    the seconds of each tool call by tool name, in order, `metrics` figures of the environment.
    """

    start: int
    end: int
    text: str
    message: Message
    replies: tuple[Message, ...] = ()
    rewards: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    tools: tuple[tuple[str, float], ...] = ()
    error: str = ""
    cut: bool = False
    context: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response, or an episode of several turns.

    When `finish_reason` is "stop", `token_ids` ends with the end-of-sequence token, or with the
    token that completed a stop string. An "unfinished" one has no text yet: a sampler continues it
    later, with the weights of that time. `carried` counts the tokens that it had when it was last
    continued, `weight_version` is that of its first token, `seed` that of its random numbers.
    `sampler_logprobs` has one float32 per response token, at the sampling temperature and before
    top-p/top-k truncation; `entropies` are of the same distributions, if the sampler computes
    them. `text` is the decoded response without end and padding tokens. `thought_tokens` counts
    the tokens before its answer, 0 without a thought.

    An episode has `turns`: its `token_ids` hold the policy's and the environment's tokens, the last
    of them the policy's; `text` is that of its last turn. Log-probs and entropies are 0 at the
    environment's tokens. `failure` says why an environment could not finish it (it is masked then,
    and has no tokens if it never began), `ended` which limit ended it ("turns", "tokens"; "" if
    the environment did).
    """

    # Which sample of the prompt it is, and what was sampled.
    prompt: Prompt
    sample: int
    token_ids: tuple[int, ...]
    sampler_logprobs: NDArray[np.float32]
    text: str
    finish_reason: FinishReason
    # Where it comes from: the weights, the thought, the random numbers and earlier steps.
    weight_version: int = 0
    thought_tokens: int = 0
    seed: int = 0
    carried: int = 0
    entropies: NDArray[np.float32] | None = None
    # An episode's turns, and how it ended.
    turns: tuple[Turn, ...] = ()
    failure: str = ""
    ended: str = ""

    @property
    def policy_ids(self) -> tuple[int, ...]:
        """The tokens that the policy wrote."""
        if not self.turns:
            return self.token_ids
        return tuple(token for t in self.turns for token in self.token_ids[t.start : t.end])

    @property
    def policy_tokens(self) -> int:
        """The number of tokens that the policy wrote."""
        return sum(t.end - t.start for t in self.turns) if self.turns else len(self.token_ids)

    @property
    def policy_chars(self) -> int:
        """The number of characters that the policy wrote."""
        return sum(len(turn.text) for turn in self.turns) if self.turns else len(self.text)

    @property
    def messages(self) -> list[Message]:
        """The conversation of an episode: its opening, then each turn with the replies to it."""
        return [*self.prompt.messages, *(m for t in self.turns for m in (t.message, *t.replies))]

    @property
    def lacks_reward(self) -> bool:
        """Whether a limit ended the episode before its environment gave a reward."""
        return bool(self.ended) and not any(turn.rewards for turn in self.turns)

    @property
    def turn_start(self) -> int:
        """Where the turn that an unfinished episode continues with begins in `token_ids`."""
        return len(self.token_ids) if self.turns else 0

    @property
    def full_text(self) -> str:
        """The text, after the mark of a thought that the prompt opened."""
        return self.prompt.opened + self.text

    @cached_property
    def thoughts(self) -> list[Span]:
        """Where the thoughts of `full_text` are."""
        return find_thoughts(self.full_text, cut=self.finish_reason == "length")

    @property
    def answer(self) -> str:
        """The text without thoughts; empty if it ends within its only thought."""
        return remove_thoughts(self.full_text, self.thoughts)

    @property
    def unclosed(self) -> bool:
        """Whether the response ends within a thought."""
        return bool(self.thoughts) and not self.thoughts[-1].closed

    @property
    def key(self) -> tuple[str, int]:
        """Identity of the rollout within a step."""
        return self.prompt.uid, self.sample


# Parts of a validation's score: mean credits of held-out criteria, and of those trained on.
HELD_OUT, TRAINED = "held_out_criteria", "trained_criteria"


@dataclass(frozen=True)
class Part:
    """One component of a score: as its source returned it, and as it was added to the total.

    `scaled` is None for a component that is only reported, `raw` for one that was not computed.
    """

    raw: float | None
    scaled: float | None


@dataclass(frozen=True)
class PlacedReward:
    """A share of a score for one position of the response.

    With unit "char", `end` counts characters of `Rollout.text`, and the token with the last of
    these characters gets the share. With unit "token", `end` is the number of response tokens up to
    and including the one that gets it.
    """

    end: int
    value: float
    unit: Literal["char", "token"] = "char"


@dataclass(frozen=True)
class Score:
    """A reward's score of one rollout.

    `value` is None if scoring failed, and `failure` says why ("timeout", "raised ValueError: …").
    A failed score is masked out of every loss and statistic, never 0. `steps` assigns shares of
    `value` to positions in the response; the rest belongs to its end. `reason` is the scorer's
    explanation. `imputed` says why there was no verdict if the value is a substitute; `gated`: a
    gate of a mixture skipped the scorer; `reply` is a judge's reply; `mixture` has the scores of
    the parts. `info` is for people (cached, tokens, latency_s, cost_usd …) and for the
    next hand of a judge (its pieces, its spread); JSON-serialisable.
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
        """Whether the value is a real verdict: not failed, and not a substitute."""
        return self.value is not None and not self.imputed

    @property
    def number(self) -> float:
        """The value of a score that did not fail."""
        assert self.value is not None, self.failure
        return float(self.value)

    @property
    def facts(self) -> dict[str, Any]:
        """What a log contains of this score besides value, failure, reason and parts."""
        # Facts of the whole score first; people's `info` comes last.
        facts: dict[str, Any] = {"judge_reply": self.reply} if self.reply else {}
        if self.gated:
            facts["gated"] = True
        if self.mixture:
            # Parts without facts are left out.
            parts = {n: s.facts | s._failed for n, s in self.mixture.items()}
            facts["mixture"] = {name: facts for name, facts in parts.items() if facts}
        if self.imputed:
            facts["imputed"] = self.imputed
        return {**facts, **self.info}

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
