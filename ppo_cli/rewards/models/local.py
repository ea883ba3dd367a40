"""The reward that runs a local reward model, in this process or in one that a host creates."""

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
    MAX_SEARCHED_ROWS,
    TURN_OFF,
    Batch,
    Budget,
    Encoded,
    Format,
    LoadedModel,
    Row,
    TooLong,
    body_dtype,
    check_direction,
    choose_pairs,
    encode_pairs,
    first_of_each_kind,
    get_messages,
    raise_if_strict,
    score_batches,
)
from ppo_cli.rewards.models.formats import ControlToken, format_for
from ppo_cli.rewards.models.heads import HEADS, load_reward_model

Load = Callable[[ModelReward], LoadedModel]
# Metrics that are passed on as they are counted; rates are computed from the others.
COUNTS = ("samples", "failed", "prompts_cut", "batches", "seconds")
# Relative difference allowed between a sample's score alone and in a batch.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Sample:
    """A response to score; `key` orders samples of one length."""

    key: tuple[str, int]
    messages: tuple[Message, ...]
    response: str


@dataclass(frozen=True)
class EncodedRound:
    """An encoded round; `failures` has the reason of each sample that cannot be encoded."""

    adapter: str
    failures: tuple[str | None, ...]
    prompts_cut: int


class ModelScorer:
    """A reward model that scores one round of samples at a time; its settings: ModelReward."""

    def __init__(self, settings: ModelReward, load: Load = load_reward_model) -> None:
        self._settings = settings
        self._load = load
        self._model: tuple[LoadedModel, Format] | None = None
        # The device that the model was loaded on, and returns to for each round.
        self._home = torch.device("cpu")
        self._budget = Budget(settings.batch_tokens)
        self._order: list[int] = []  # indices of the round's samples, in the order of scoring
        self._batches: Iterator[Batch] = iter(())

    def load(self, prompts: Sequence[Prompt]) -> str:
        """Load the model, check that its format accepts these prompts; returns a line to show."""
        loaded, format_ = self._ready()
        # Try every kind of prompt now: a template that refuses one should stop the start, not a
        # step.
        for prompt in prompts:
            try:
                format_.encode(get_messages(prompt), "Yes.")
            except (TooLong, ControlToken):
                continue  # only this sample will fail
        # The samples of this check are not counted as cut.
        format_.prompts_cut = 0
        self._offload()
        dtype = str(body_dtype(loaded.network.module)).removeprefix("torch.")
        away = ", in host memory between steps" if self._settings.offload else ""
        return (
            f"Reward model {self._settings.path}: read as {loaded.adapter} ({loaded.reason}), "
            f"{dtype} on {self._home}{away}."
        )

    def self_test(self, prompts: Sequence[Prompt]) -> tuple[str, int]:
        """Test the model on these prompts; raises RewardError with what is wrong.

        Returns the result as a line to show, and the new limit of a batch in tokens.
        """
        loaded, format_ = self._ready()
        with self._naming_model():
            try:
                self._move_to(self._home)
                summary = run_self_test(loaded, format_, prompts, self._budget)
            finally:
                format_.prompts_cut = 0
                self._offload()
        return summary, self._budget.tokens

    def begin(self, samples: Sequence[Sample], batch_tokens: int) -> EncodedRound:
        """Encode the samples of a round, the longest first, for batches of `batch_tokens` at most.

        An earlier round that is not finished is dropped.
        """
        with self._naming_model():
            loaded, format_ = self._ready()
            self._budget.lower_to(batch_tokens)
            # A sample that cannot be encoded fails alone.
            readable: dict[int, Encoded] = {}
            failures: list[str | None] = [None] * len(samples)
            for i, sample in enumerate(samples):
                try:
                    readable[i] = format_.encode(sample.messages, sample.response)
                except (TooLong, ControlToken, RewardError) as problem:
                    failures[i] = f"not readable by the reward model: {problem}"
            # The longest first, in an order that does not depend on arrival.
            self._order = sorted(
                readable, key=lambda i: (-len(readable[i].ids), samples[i].key, readable[i].ids)
            )
            self._move_to(self._home)
            ordered = [readable[i] for i in self._order]
            self._batches = score_batches(loaded, ordered, self._budget)
        cut, format_.prompts_cut = format_.prompts_cut, 0
        return EncodedRound(loaded.adapter, tuple(failures), cut)

    def next_batch(self) -> tuple[Batch, int] | None:
        """Return the scores of the next batch of the round, and the limit of a batch in tokens.

        Returns None at the end of the round.
        """
        with self._naming_model():
            batch = next(self._batches, None)
        if batch is None:
            self._offload()
            return None
        indices = tuple(self._order[index] for index in batch.indices)
        return replace(batch, indices=indices), self._budget.tokens

    def close(self) -> None:
        """Free the model."""
        self._model = None
        self._batches = iter(())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _ready(self) -> tuple[LoadedModel, Format]:
        """Return the model and its input format, which are loaded on first use."""
        if self._model is None:
            # Loaded on first use; a new process after a loss loads the model again.
            loaded = self._load(self._settings)
            self._home = next(loaded.network.module.parameters()).device
            format_ = format_for(
                loaded.tokenizer, self._settings, loaded.max_length, HEADS[loaded.adapter].format
            )
            self._model = loaded, format_
        return self._model

    @contextmanager
    def _naming_model(self) -> Iterator[None]:
        """Turn other errors of the block into a RewardError that names the model."""
        try:
            yield
        except PpoError:
            raise
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            raise RewardError(
                f"The reward model {self._settings.path} failed while scoring: "
                f"{type(error).__name__}: {message}"
            ) from error

    def _move_to(self, device: torch.device) -> None:
        if self._model is not None and self._settings.offload:
            self._model[0].network.module.to(device)

    def _offload(self) -> None:
        """With `offload`, move the model to the CPU until the next round."""
        if self._settings.offload:
            self._move_to(torch.device("cpu"))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def run_self_test(
    loaded: LoadedModel, format_: Format, prompts: Sequence[Prompt], budget: Budget
) -> str:
    """Test a reward model on pairs of answers; returns a line to show.

    Raises RewardError if a score is not finite, differs between alone and in a batch, or if too
    few good answers score above bad ones.
    """

    def encode(prompt: Prompt, answer: str) -> Encoded | None:
        try:
            return format_.encode(get_messages(prompt), answer)
        except (TooLong, ControlToken):
            return None

    pairs, samples = encode_pairs(choose_pairs(prompts), encode, format_.max_length)
    # Alone first: a difference in a batch then shows that padding is read.
    single = [row for sample in samples for row in _score(loaded, [sample], budget)]
    for row in single:
        if bad := _not_finite(row):
            raise RewardError(
                f"The reward model gave {bad[1]} as {bad[0]} of a plain sample. Its weights may be "
                f"damaged, or too large for reward.model.dtype. {TURN_OFF}"
            )
    # bfloat16 is the coarsest precision that `dtype` offers.
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
    """Score samples in batches; returns rows in the order of the samples."""
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].ids), i))
    rows: dict[int, Row] = {}
    ordered = [samples[i] for i in order]
    for batch in score_batches(loaded, ordered, budget):
        rows |= {order[i]: row for i, row in zip(batch.indices, batch.rows, strict=True)}
    return [rows[i] for i in range(len(samples))]


def _not_finite(row: Row) -> tuple[str, float] | None:
    """Return name and value of the first number of a row that is not finite, or None."""
    values = {"score": row.score, **row.objectives}
    return next(((name, value) for name, value in values.items() if not isfinite(value)), None)


@dataclass(eq=False)
class _Entry:
    """A rollout and the future of its score."""

    rollout: Rollout
    future: Future[Score] = field(default_factory=Future)


class LocalModelReward(Reward):
    """Scores with a reward model in a process created by `host`; its settings: ModelReward."""

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
        self._budget = Budget(settings.batch_tokens)  # as in the host, whose process may be lost
        self._pending: list[_Entry] = []
        self._rounds: list[list[_Entry]] = []  # ended, but not scored completely
        self._tally: dict[str, float] = defaultdict(float)  # since the last `pop_metrics`
        self._closed = False
        # One thread: batches run in order, and the tokenizer is not used concurrently.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{name}")

    def start(
        self, prompts: Sequence[Prompt], *, patient: bool = False, tell: Tell = tell_nobody
    ) -> None:
        """Load the model, check that its format accepts the prompts, and run the self-test."""
        host = self._ready()
        tell(host.call("load", first_of_each_kind(prompts)))
        if self._settings.self_test == "off":
            return
        # The host may have lowered its batch limit during the test.
        with raise_if_strict(self._settings.self_test, tell):
            summary, batch_tokens = host.call("self_test", tuple(prompts[:MAX_SEARCHED_ROWS]))
            self._budget.lower_to(batch_tokens)
            tell(summary)

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Store a rollout until its round ends."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        entry = _Entry(rollout)
        self._pending.append(entry)
        return entry.future

    def end_round(self, kind: RoundKind = "train") -> None:
        """Start scoring the submitted rollouts in the background."""
        entries, self._pending = self._pending, []
        if entries:
            self._rounds.append(entries)
            self._thread.submit(self._score, entries)

    def pop_metrics(self) -> dict[str, float]:
        """Return `NAME/…` metrics since the last call."""
        done, self._tally = self._tally, defaultdict(float)
        if not done["samples"]:
            return {}
        # Rates are of the scoring time, not of the step.
        metrics = {key: done[key] for key in COUNTS}
        metrics["tokens_per_s"] = done["tokens"] / max(done["seconds"], 1e-9)
        metrics["padding_share"] = 1.0 - done["tokens"] / done["padded"] if done["padded"] else 0.0
        return {f"{self.name}/{key}": float(value) for key, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return a lowered batch limit: other batches would give other bits."""
        lowered = self._budget.tokens < self._settings.batch_tokens
        return {"batch_tokens": self._budget.tokens} if lowered else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the batch limit, and cancel everything submitted before.

        A repeated step submits its rollouts again; together with remaining ones from the first
        time they would form other batches.
        """
        self._budget.lower_to(int(state.get("batch_tokens", self._settings.batch_tokens)))
        self._cancel_all()
        self._tally.clear()

    def close(self) -> None:
        """Finish the current batch, cancel the rest and free the model."""
        # Closing twice is allowed.
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._cancel_all()
        self._close_host()

    def _ready(self) -> Host:
        """Return the host; after a loss a new one, which loads the model again."""
        # A lost host is closed, so that its process is reaped.
        if self._host is not None and not self._host.alive:
            self._close_host()
        if self._host is None:
            self._host = self._make_host()
        return self._host

    def _close_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _cancel_all(self) -> None:
        pending, self._pending = self._pending, []
        for entry in chain(pending, *self._rounds):
            entry.future.cancel()

    def _score(self, entries: list[_Entry]) -> None:
        """Set the futures of a round to its scores, or all to the error that ended it."""
        try:
            self._score_batches(entries)
        except Exception as error:
            for entry in entries:
                if not entry.future.done():
                    entry.future.set_exception(error)
            # The process is gone: close its host now, so that the next round starts another one.
            if isinstance(error, WorkerLost):
                self._close_host()
        finally:
            for entry in entries:  # not scored, because the reward was closed
                entry.future.cancel()
            self._rounds.remove(entries)

    def _score_batches(self, entries: list[_Entry]) -> None:
        """Score a round batch by batch, until its end, or until it is cancelled or closed."""
        if _is_cancelled(entries):
            return
        started, host = time.perf_counter(), self._ready()
        rollouts = [entry.rollout for entry in entries]
        samples = [Sample(r.key, get_messages(r.prompt), r.text) for r in rollouts]
        # Encode the whole round, and fail what cannot be encoded.
        encoded: EncodedRound = host.call("begin", samples, self._budget.tokens)
        self._tally["prompts_cut"] += encoded.prompts_cut
        for entry, failure in zip(entries, encoded.failures, strict=True):
            if failure is not None:
                self._resolve(entry, Score.failed(failure))
        # Ask for batches until the host has no more, or nobody waits for the round any longer.
        while not self._closed and not _is_cancelled(entries):
            reply: tuple[Batch, int] | None = host.call("next_batch")
            if reply is None:
                return
            batch, batch_tokens = reply
            self._budget.lower_to(batch_tokens)
            # Count before resolving: the caller reads the metrics right after the last future.
            now = time.perf_counter()
            tally = self._tally
            tally["batches"] += 1
            tally["tokens"] += batch.tokens
            tally["padded"] += batch.padded
            tally["seconds"] += now - started
            started = now
            for index, row in zip(batch.indices, batch.rows, strict=True):
                self._resolve(entries[index], self._build_score(row, encoded.adapter))

    def _build_score(self, row: Row, adapter: str) -> Score:
        """Return the score of a row; failed if a number of it is not finite."""
        # A score that is not finite fails alone; the adapter may know a usual cause.
        if bad := _not_finite(row):
            reasons = (f"the reward model gave {bad[1]} as {bad[0]}", HEADS[adapter].not_finite)
            return Score.failed("; ".join(filter(None, reasons)))
        parts = {self.name: Part(row.score, row.score)}
        parts |= {key: Part(v, None) for key, v in row.objectives.items()}
        return Score(row.score, parts=parts)

    def _resolve(self, entry: _Entry, score: Score) -> None:
        """Set the result of a future and count it, unless the future was cancelled."""
        if entry.future.done():
            return  # cancelled meanwhile
        self._tally["samples"] += 1
        self._tally["failed"] += score.value is None
        entry.future.set_result(score)


def _is_cancelled(entries: Sequence[_Entry]) -> bool:
    """Whether a round was cancelled, so that scoring can stop."""
    return any(entry.future.cancelled() for entry in entries)
