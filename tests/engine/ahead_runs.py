"""A small real engine that keeps account of itself, and a loop that uses it as the loop does.

Its weights are a number that every update stirs. What it samples hangs on the weights that were
published, the seed, the prompt and the sample alone.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ppo_cli.algo.batch import AnnotatedBatch, Batch, build_batch
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.engine.async_rollout import AheadEngine
from ppo_cli.engine.base import Engine, MiniBatch, Sampling, Sums, extend_rollout, start_rollouts
from ppo_cli.errors import WorkerLost
from ppo_cli.records import Prompt, Rollout
from tests.engine.packed_steps import annotated
from tests.waiting import wait_until

BATCH, SAMPLES = 3, 2
PROMPTS = tuple(
    Prompt(f"row:{i}", f"What is {i}?", (), f"What is {i}?", (1, i + 2), ground_truth=i)
    for i in range(11)
)


def stir(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6)
    return int.from_bytes(digest.digest(), "big")


class SmallEngine:
    """The seven verbs over one number."""

    def __init__(self) -> None:
        self.weights = 1
        self.sampler_weights = 1
        self.version = 0
        self.calls: list[str] = []  # what happened, in order
        self.rounds_drawn = 0
        self.pause = lambda: None  # before each rollout, in the thread that samples
        self.closed = threading.Event()
        self._sampling = threading.Lock()

    @property
    def is_sampling(self) -> bool:
        return self._sampling.locked()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        assert self._sampling.acquire(blocking=False), "two rounds at a time"
        try:
            self.calls.append(f"generate {sampling.seed}")
            for rollout in (*start_rollouts(prompts, sampling), *begun):
                self.pause()
                yield self._draw(rollout, sampling)
            self.rounds_drawn += 1
        finally:
            self._sampling.release()

    def _draw(self, begun: Rollout, sampling: Sampling) -> Rollout:
        ids: list[int] = []
        stopped, before = False, len(begun.token_ids)
        while not stopped and before + len(ids) < sampling.length_limit(before):
            place = begun.seed, begun.key, before + len(ids)
            drawn = stir(self.sampler_weights, sampling.temperature, place)
            ids.append(drawn % 250)
            stopped = drawn % 7 == 0
        logprobs = np.full(len(ids), -1 / (2 + self.version), dtype=np.float32)
        return extend_rollout(
            begun, ids, logprobs, stopped=stopped, sampling=sampling, weight_version=self.version,
            detokenize=lambda text, context: f"“{text}”\ud83d",
        )  # fmt: skip

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        self.calls.append("annotate")
        return annotated(batch)

    def step(self, minibatch: MiniBatch) -> Sums:
        self.calls.append("step")
        ids, logprobs = minibatch.batch.input_ids_BL, minibatch.batch.sampler_logprobs_BT
        self.weights = stir(self.weights, ids.tolist(), logprobs.tolist())
        return {}

    def publish(self) -> None:
        assert not self.is_sampling, "new weights in the middle of a round"
        self.calls.append("publish")
        self.version += 1
        self.sampler_weights = self.weights

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        (directory / "state").mkdir(exist_ok=True)
        state = [self.weights, self.sampler_weights, self.version]
        (directory / "state" / "engine.json").write_text(json.dumps(state))
        saved: Future[None] = Future()
        saved.set_result(None)
        return saved

    def load(self, directory: Path) -> None:
        state = json.loads((directory / "state" / "engine.json").read_text())
        self.weights, self.sampler_weights, self.version = state

    def close(self) -> None:
        self.closed.set()

    def wait_in_round(self, until: threading.Event) -> Callable[[], None]:
        """Hold up sampling until something happens, or the engine is closed."""

        def hold() -> None:
            for _ in range(2000):
                if until.wait(0.005):
                    return
                if self.closed.is_set():
                    raise WorkerLost("the sampler is gone")

        return hold


@dataclass
class TrainedModel:
    """What a step was trained on."""

    step: int
    staleness: int
    rollouts: list[tuple[object, ...]]


@dataclass
class Run:
    """A run of so many steps: engine, order and what was trained."""

    async_steps: int
    partial_tokens: int | None = None
    total: int = 8
    seed: int = 0
    temperature: float = 1.0
    step: int = 0
    trained: list[TrainedModel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inner = SmallEngine()
        self.order = PromptOrder(len(PROMPTS), BATCH, self.seed)
        self.engine: Engine = self.inner
        if self.async_steps:
            options = (self.async_steps, self.partial_tokens)
            self.engine = AheadEngine(self.inner, self.upcoming, *options)

    def sampling(self, step: int) -> Sampling:
        return Sampling(self.temperature, n=SAMPLES, seed=1000 + step, max_tokens=12)

    def upcoming(self, ahead: int) -> tuple[Sequence[Prompt], Sampling] | None:
        if self.step + ahead > self.total:
            return None
        prompts = [PROMPTS[i] for i in self.order.peek(ahead)]
        return prompts, self.sampling(self.step + ahead)

    def begin_step(self, *, baselines: bool = False) -> Batch:
        """Everything up to the answers of the judges."""
        self.order_before = self.order.state_dict()
        self.step += 1
        prompts = [PROMPTS[i] for i in self.order.take()]
        rollouts = list(self.engine.generate(prompts, self.sampling(self.step)))
        if baselines:
            greedy = Sampling(temperature=0.0, seed=2000 + self.step)
            assert len(list(self.engine.generate(prompts, greedy))) == BATCH
        places = {prompt.uid: i for i, prompt in enumerate(prompts)}
        rollouts.sort(key=lambda r: (places[r.prompt.uid], r.sample))
        assert all(r.prompt is prompts[places[r.prompt.uid]] for r in rollouts)
        batch = build_batch(rollouts, 0)
        self.engine.annotate(batch)
        staleness = self.inner.version - int(batch.weight_version_B.min())
        seen: list[tuple[object, ...]] = [
            (r.key, r.token_ids, r.sampler_logprobs.tobytes(), r.text, r.finish_reason, r.carried)
            for r in rollouts
        ]
        self.trained.append(TrainedModel(self.step, staleness, seen))
        return batch

    def begin_step_and_hold(self) -> tuple[Batch, threading.Event]:
        """Hold up the round that is sampled ahead until the event is set."""
        event = threading.Event()
        self.inner.pause = self.inner.wait_in_round(event)
        batch = self.begin_step()
        wait_until(lambda: self.inner.is_sampling)
        return batch, event

    def undo_step(self) -> None:
        """What the loop does when a step cannot be finished; for runs that were not loaded."""
        self.step -= 1
        self.order.load_state_dict(self.order_before)
        del self.trained[self.step :]

    def end_step(self, batch: Batch) -> None:
        for rows in torch.arange(len(batch)).split(BATCH):
            train = batch.rows(rows)
            self.engine.step(MiniBatch(train, actor=True, critic=True))  # type: ignore[arg-type]
        self.engine.publish()

    def train(self, steps: int, *, validate: bool = False, baselines: bool = False) -> Run:
        for _ in range(steps):
            self.end_step(self.begin_step(baselines=baselines))
            if validate:
                self.validate()
        return self

    def validate(self) -> list[Rollout]:
        return list(self.engine.generate(PROMPTS[:4], Sampling(temperature=0.0, seed=3000)))

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        assert self.engine.save(folder).result(timeout=300) is None
        state = {"step": self.step, "order": self.order.state_dict()}
        (folder / "run.json").write_text(json.dumps(state))
        return folder

    def load(self, folder: Path) -> Run:
        state = json.loads((folder / "run.json").read_text())
        self.step = state["step"]
        self.order.load_state_dict(state["order"])
        self.engine.load(folder)
        return self

    def close(self) -> None:
        self.engine.close()


def fail_with(error: Exception) -> Callable[[], None]:
    """A pause that ends in an error."""

    def fail() -> None:
        raise error

    return fail
