"""The reward that runs a reward model in this process: rollouts in, raw scores out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import isfinite
from typing import Any

import torch

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.errors import PpoError, RewardError, WorkerLost
from ppo_cli.records import Message, Part, Prompt, Rollout, Score
from ppo_cli.rewards.base import Host, HostMaker, InProcess, Reward, RoundKind, Tell, tell_nobody
from ppo_cli.rewards.models.base import (
    LOOKED_AT,
    TURN_OFF,
    Batch,
    Budget,
    Encoded,
    Format,
    LoadedModel,
    Row,
    TooLong,
    as_strict_as,
    body_dtype,
    check_direction,
    choose_pairs,
    conversation_of,
    encode_pairs,
    one_of_each_kind,
    score_batches,
)
from ppo_cli.rewards.models.formats import ControlToken, format_for
from ppo_cli.rewards.models.heads import HEADS, load_reward_model

Load = Callable[[ModelReward], LoadedModel]
COUNTED = ("samples", "failed", "prompts_cut", "batches", "seconds")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a score alone and in a batch


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


class ModelScorer:
    """A reward model and one round of samples at a time; see ModelReward for every setting."""

    def __init__(self, settings: ModelReward, load: Load = load_reward_model) -> None:
        self._settings = settings
        self._load = load
        self._model: tuple[LoadedModel, Format] | None = None
        self._home = torch.device("cpu")
        self._budget = Budget(settings.batch_tokens)
        self._places: list[int] = []  # of the samples of the round that can be read, as scored
        self._batches: Iterator[Batch] = iter(())

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
        dtype = str(body_dtype(loaded.network.module)).removeprefix("torch.")
        away = ", in host memory between steps" if self._settings.offload else ""
        return (
            f"Reward model {self._settings.path}: read as {loaded.adapter} ({loaded.reason}), "
            f"{dtype} on {self._home}{away}."
        )

    def try_out(self, prompts: Sequence[Prompt]) -> tuple[str, int]:
        """Test the model on these prompts; raises RewardError with what is wrong.

        Returns how it ended, in words, and the most tokens of a batch from now on.
        """
        loaded, format_ = self._ready()
        with self._breaking():
            try:
                self._move(self._home)
                summary = try_out_model(loaded, format_, prompts, self._budget)
            finally:
                format_.prompts_cut = 0
                self._rest()
        return summary, self._budget.tokens

    def begin(self, samples: Sequence[Sample], batch_tokens: int) -> Begun:
        """Encode and sort a round, whose batches have at most so many tokens.

        A round that was not scored to its end is dropped.
        """
        with self._breaking():
            loaded, format_ = self._ready()
            self._budget.lower_to(batch_tokens)
            readable: dict[int, Encoded] = {}
            failures: list[str | None] = [None] * len(samples)
            for i, sample in enumerate(samples):
                try:
                    readable[i] = format_.encode(sample.messages, sample.response)
                except (TooLong, ControlToken, RewardError) as problem:
                    failures[i] = f"not readable by the reward model: {problem}"
            # The longest first, and in one order however they arrived.
            self._places = sorted(
                readable, key=lambda i: (-len(readable[i].ids), samples[i].key, readable[i].ids)
            )
            self._move(self._home)
            ordered = [readable[i] for i in self._places]
            self._batches = score_batches(loaded, ordered, self._budget)
        cut, format_.prompts_cut = format_.prompts_cut, 0
        return Begun(loaded.adapter, tuple(failures), cut)

    def next_batch(self) -> tuple[Batch, int] | None:
        """Score the next batch of the round; None when there is none left.

        The number is the most tokens of a batch from now on.
        """
        with self._breaking():
            batch = next(self._batches, None)
        if batch is None:
            self._rest()
            return None
        places = tuple(self._places[index] for index in batch.indices)
        return replace(batch, indices=places), self._budget.tokens

    def close(self) -> None:
        """Free the model."""
        self._model = None
        self._batches = iter(())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _ready(self) -> tuple[LoadedModel, Format]:
        if self._model is None:
            loaded = self._load(self._settings)
            self._home = next(loaded.network.module.parameters()).device
            format_ = format_for(
                loaded.tokenizer, self._settings, loaded.max_length, HEADS[loaded.adapter].format
            )
            self._model = loaded, format_
        return self._model

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Say which model broke: a bare error from a network names nothing."""
        try:
            yield
        except PpoError:
            raise
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            raise RewardError(
                f"The reward model {self._settings.path} broke while scoring: "
                f"{type(error).__name__}: {message}"
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


def try_out_model(
    loaded: LoadedModel, format_: Format, prompts: Sequence[Prompt], budget: Budget
) -> str:
    """Test a reward model; raises RewardError with what is wrong, returns a line to show."""

    def encode(prompt: Prompt, answer: str) -> Encoded | None:
        try:
            return format_.encode(conversation_of(prompt), answer)
        except (TooLong, ControlToken):
            return None

    pairs, samples = encode_pairs(choose_pairs(prompts), encode, format_.max_length)
    single = [row for sample in samples for row in _score(loaded, [sample], budget)]
    for row in single:
        if bad := _not_finite(row):
            raise RewardError(
                f"The reward model gave {bad[1]} as {bad[0]} of a plain sample. Its weights may be "
                f"damaged, or too large for reward.model.dtype. {TURN_OFF}"
            )
    tolerance = TOLERANCE.get(body_dtype(loaded.network.module), 2e-2)
    for row, alone in zip(_score(loaded, samples, budget), single, strict=True):
        if not abs(row.score - alone.score) <= tolerance * max(1.0, abs(alone.score)):
            raise RewardError(
                f"The reward model scores the same sample {alone.score:.6g} alone and "
                f"{row.score:.6g} in a padded batch: it reads its padding, so its scores cannot be "
                f"trusted. {TURN_OFF}"
            )
    scores = [row.score for row in single]
    return check_direction(pairs, scores, "is the adapter right (--reward_model_adapter)")


def _score(loaded: LoadedModel, samples: Sequence[Encoded], budget: Budget) -> list[Row]:
    """Score samples in batches; the rows come in the order of the samples."""
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].ids), i))
    rows: dict[int, Row] = {}
    ordered = [samples[i] for i in order]
    for batch in score_batches(loaded, ordered, budget):
        rows |= {order[i]: row for i, row in zip(batch.indices, batch.rows, strict=True)}
    return [rows[i] for i in range(len(samples))]


def _not_finite(row: Row) -> tuple[str, float] | None:
    """The first of a row's numbers that is none, by name."""
    values = {"score": row.score, **row.objectives}
    return next(((name, value) for name, value in values.items() if not isfinite(value)), None)


@dataclass(eq=False)
class _Entry:
    """A rollout on its way to its score."""

    rollout: Rollout
    future: Future[Score] = field(default_factory=Future)


class LocalModelReward(Reward):
    """Scores with a reward model that `host` gives a place; see ModelReward for every setting."""

    def __init__(
        self,
        settings: ModelReward,
        *,
        name: str = "model",
        load: Load = load_reward_model,
        host: HostMaker = InProcess,
    ) -> None:
        self.name = name
        self._settings = settings
        self._make_host = partial(host, partial(ModelScorer, settings, load), name)
        self._host: Host | None = None
        self._budget = Budget(settings.batch_tokens)  # the host's, and kept when that is lost
        self._pending: list[_Entry] = []
        self._rounds: list[list[_Entry]] = []  # settled, and not scored to their end
        self._tally: dict[str, float] = defaultdict(float)  # since the metrics were taken
        self._closed = False
        # One thread: batches run in their order, and the tokenizer has one user at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}")

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Load the model, see that its format takes the prompts, and test it."""
        host = self._ready()
        tell(host.call("load", one_of_each_kind(prompts)))
        if self._settings.self_test == "off":
            return
        with as_strict_as(self._settings.self_test, tell):
            summary, batch_tokens = host.call("try_out", tuple(prompts[:LOOKED_AT]))
            self._budget.lower_to(batch_tokens)
            tell(summary)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Keep a rollout until its round is settled."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        entry = _Entry(rollout)
        self._pending.append(entry)
        return entry.future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Score what was submitted, in the background."""
        entries, self._pending = self._pending, []
        if entries:
            self._rounds.append(entries)
            self._thread.submit(self._score, entries)

    def pop_metrics(self) -> dict[str, float]:
        """`NAME/…` metrics since the last call."""
        done, self._tally = self._tally, defaultdict(float)
        if not done["samples"]:
            return {}
        metrics = {key: done[key] for key in COUNTED}
        metrics["tokens_per_s"] = done["tokens"] / max(done["seconds"], 1e-9)
        metrics["padding_share"] = 1.0 - done["tokens"] / done["padded"] if done["padded"] else 0.0
        return {f"{self.name}/{key}": float(value) for key, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Keep a batch size that running out of memory has lowered; other batches, other bits."""
        lowered = self._budget.tokens < self._settings.batch_tokens
        return {"batch_tokens": self._budget.tokens} if lowered else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, and give up what was submitted before.

        A step that is taken again submits its rollouts anew; beside what is left of the first
        time they would stand in other batches.
        """
        self._budget.lower_to(int(state.get("batch_tokens", self._settings.batch_tokens)))
        self._give_up_all()
        self._tally.clear()

    def close(self) -> None:
        """Let the batch under way finish, drop the rest and free the model."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._give_up_all()
        self._leave_host()

    def _ready(self) -> Host:
        """The host; a new one when the last was lost, with the model to be loaded again."""
        if self._host is not None and not self._host.alive:
            self._leave_host()
        if self._host is None:
            self._host = self._make_host()
        return self._host

    def _leave_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _give_up_all(self) -> None:
        pending, self._pending = self._pending, []
        for entry in chain(pending, *self._rounds):
            entry.future.cancel()

    def _score(self, entries: list[_Entry]) -> None:
        """Bring the futures of a round to their scores; what breaks the round breaks them all."""
        try:
            self._score_batches(entries)
        except Exception as error:
            for entry in entries:
                if not entry.future.done():
                    entry.future.set_exception(error)
            if isinstance(error, WorkerLost):
                self._leave_host()
        finally:
            for entry in entries:  # closed half-way
                entry.future.cancel()
            self._rounds.remove(entries)

    def _score_batches(self, entries: list[_Entry]) -> None:
        if _given_up(entries):
            return
        started, host = time.perf_counter(), self._ready()
        rollouts = [entry.rollout for entry in entries]
        samples = [Sample(r.key, conversation_of(r.prompt), r.text) for r in rollouts]
        begun: Begun = host.call("begin", samples, self._budget.tokens)
        self._tally["prompts_cut"] += begun.prompts_cut
        for entry, failure in zip(entries, begun.failures, strict=True):
            if failure is not None:
                self._resolve(entry, Score.failed(failure))
        while not self._closed and not _given_up(entries):
            reply: tuple[Batch, int] | None = host.call("next_batch")
            if reply is None:
                return
            batch, batch_tokens = reply
            self._budget.lower_to(batch_tokens)
            # Counted first: whoever waits for the last future asks for the metrics next.
            now = time.perf_counter()
            tally = self._tally
            tally["batches"] += 1
            tally["tokens"] += batch.tokens
            tally["padded"] += batch.padded
            tally["seconds"] += now - started
            started = now
            for index, row in zip(batch.indices, batch.rows, strict=True):
                self._resolve(entries[index], self._score_of(row, begun.adapter))

    def _score_of(self, row: Row, adapter: str) -> Score:
        if bad := _not_finite(row):
            reasons = (f"the reward model gave {bad[1]} as {bad[0]}", HEADS[adapter].not_finite)
            return Score.failed("; ".join(filter(None, reasons)))
        parts = {self.name: Part(row.score, row.score)}
        parts |= {key: Part(v, None) for key, v in row.objectives.items()}
        return Score(row.score, parts=parts)

    def _resolve(self, entry: _Entry, score: Score) -> None:
        if entry.future.done():
            return  # given up meanwhile
        self._tally["samples"] += 1
        self._tally["failed"] += score.value is None
        entry.future.set_result(score)


def _given_up(entries: Sequence[_Entry]) -> bool:
    """Whether nobody waits for a round any more; it is not scored to its end."""
    return any(entry.future.cancelled() for entry in entries)
