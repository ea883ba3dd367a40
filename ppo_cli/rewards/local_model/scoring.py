"""The work of a reward model, wherever it is hosted: load, encode, test, score in batches.

It takes and gives plain records that pickle, and knows no rollouts, futures or metrics. Its
factory is `partial(ModelScorer, settings)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import PpoError, RewardError
from ppo_cli.records import Message, Prompt
from ppo_cli.rewards.local_model.base import Encoded, LoadedModel, TooLong
from ppo_cli.rewards.local_model.batches import Budget, Row, Work, body_dtype, score_batches
from ppo_cli.rewards.local_model.formats import CountingFormat, format_for
from ppo_cli.rewards.local_model.load import load_reward_model
from ppo_cli.rewards.local_model.plain_text import ControlToken
from ppo_cli.rewards.local_model.self_test import conversation_of, try_out_model

Load = Callable[[ModelReward], LoadedModel]


@dataclass(frozen=True)
class Sample:
    """A response to be scored; `key` orders samples of one length."""

    key: tuple[str, int]
    messages: tuple[Message, ...]
    response: str


@dataclass(frozen=True)
class Begun:
    """A round that is encoded; `failures` has a reason for each sample that cannot be read."""

    adapter: str
    failures: tuple[str | None, ...]
    prompts_cut: int


@dataclass(frozen=True)
class ScoredBatch:
    """Rows of the samples at `indices`, the work they were, and the budget from now on."""

    indices: tuple[int, ...]
    rows: tuple[Row, ...]
    work: Work
    batch_tokens: int


@dataclass(frozen=True)
class Tested:
    """How the self-test ended, in words, and the budget from now on."""

    told: str
    batch_tokens: int


class ModelScorer:
    """A reward model and one round of samples at a time; see ModelReward for every setting."""

    def __init__(self, settings: ModelReward, load: Load = load_reward_model) -> None:
        self._settings = settings
        self._load = load
        self._model: tuple[LoadedModel, CountingFormat] | None = None
        self._home = torch.device("cpu")
        self._budget = Budget(settings.batch_tokens)
        self._places: list[int] = []  # of the samples of the round that can be read, as scored
        self._work = Work()
        self._batches: Iterator[tuple[list[int], list[Row]]] = iter(())

    def load(self, prompts: Sequence[Prompt]) -> str:
        """Load the model, see that its format takes these prompts; returns a line to show."""
        loaded, format_ = self._ready()
        for prompt in prompts:
            try:
                format_.encode(conversation_of(prompt), "Yes.")
            except (TooLong, ControlToken):
                continue  # this one fails alone, when its turn comes
        format_.prompts_cut = 0
        self._rest()
        return self._describe(loaded)

    def try_out(self, prompts: Sequence[Prompt]) -> Tested:
        """Test the model on these prompts; raises RewardError with what is wrong."""
        loaded, format_ = self._ready()
        with self._breaking():
            try:
                self._move(self._home)
                told = try_out_model(loaded, format_, prompts, self._budget)
            finally:
                format_.prompts_cut = 0
                self._rest()
        return Tested(told, self._budget.tokens)

    def begin(self, samples: Sequence[Sample], batch_tokens: int) -> Begun:
        """Encode and sort a round, whose batches have at most so many tokens.

        A round that was not scored to its end is dropped.
        """
        with self._breaking():
            loaded, format_ = self._ready()
            self._budget.lower_to(batch_tokens)
            encoded, failures = [], []
            for sample in samples:
                ids, failure = _encode(format_, sample)
                encoded.append(ids)
                failures.append(failure)
            readable = {i: ids for i, ids in enumerate(encoded) if ids is not None}
            # The longest first, and in one order however they arrived.
            self._places = sorted(
                readable, key=lambda i: (-len(readable[i].ids), samples[i].key, readable[i].ids)
            )
            self._move(self._home)
            self._work = Work()
            self._batches = score_batches(
                loaded, [readable[i] for i in self._places], self._budget, self._work
            )
        cut, format_.prompts_cut = format_.prompts_cut, 0
        return Begun(loaded.adapter, tuple(failures), cut)

    def next_batch(self) -> ScoredBatch | None:
        """Score the next batch of the round; None when there is none left."""
        with self._breaking():
            found = next(self._batches, None)
        if found is None:
            self._rest()
            return None
        indices, rows = found
        done = Work(self._work.batches, self._work.tokens, self._work.padded)
        self._work.batches = self._work.tokens = self._work.padded = 0
        places = tuple(self._places[index] for index in indices)
        return ScoredBatch(places, tuple(rows), done, self._budget.tokens)

    def close(self) -> None:
        """Free the model."""
        self._model = None
        self._batches = iter(())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _ready(self) -> tuple[LoadedModel, CountingFormat]:
        if self._model is None:
            loaded = self._load(self._settings)
            self._home = next(loaded.network.module.parameters()).device
            self._model = loaded, format_for(loaded, self._settings)
        return self._model

    def _describe(self, loaded: LoadedModel) -> str:
        dtype = str(body_dtype(loaded.network.module)).removeprefix("torch.")
        away = ", in host memory between steps" if self._settings.offload else ""
        return (
            f"Reward model {self._settings.path}: read as {loaded.adapter} ({loaded.reason}), "
            f"{dtype} on {self._home}{away}."
        )

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Say which model broke: a bare error from a network names nothing."""
        try:
            yield
        except PpoError:
            raise
        except Exception as error:
            told = (str(error).splitlines() or [""])[0]
            raise RewardError(
                f"The reward model {self._settings.path} broke while scoring: "
                f"{type(error).__name__}: {told}"
            ) from error

    def _move(self, device: torch.device) -> None:
        if self._model is not None and self._settings.offload:
            self._model[0].network.module.to(device)

    def _rest(self) -> None:
        """Leave the device to the policy until the next round."""
        if self._settings.offload:
            self._move(torch.device("cpu"))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def one_of_each_kind(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The first prompt of each order of roles: a template may refuse some."""
    kinds = {tuple(m["role"] for m in conversation_of(p)): p for p in reversed(prompts)}
    return tuple(kinds.values())


def _encode(format_: CountingFormat, sample: Sample) -> tuple[Encoded | None, str | None]:
    """Turn a sample into ids; one that the model cannot read has failed."""
    try:
        return format_.encode(sample.messages, sample.response), None
    except (TooLong, ControlToken, RewardError) as problem:
        return None, f"not readable by the reward model: {problem}"
