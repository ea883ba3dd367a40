"""An engine and a reward that do what a script says, so that the loop itself can be watched.

Every response says who it is: its first token is the prompt, its second the sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.engine.base import MiniBatch, Sampling, Sums
from ppo_cli.records import FinishReason, Prompt, Rollout, Score, Scored
from ppo_cli.report.tracker import Screen as SilentScreen
from ppo_cli.report.tracker import Tracker
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.run_folder.checkpoints import CheckpointStore
from ppo_cli.step.state import Job, RunState
from tests.settings import complete

KL = 0.25  # log policy - log reference of every token
PROMPT, SAMPLE, LENGTH = 0, 1, 4  # where a response says who it is, and its tokens

Scoring = Callable[[Rollout, int], float | Score | None]
ReportSums = Callable[[MiniBatch, int], Sums]


def prompts(count: int, name: str = "t") -> list[Prompt]:
    return [Prompt(f"{name}{i}", f"{name}{i}", (), "", (1, 2, 3)) for i in range(count)]


def number(prompt: Prompt) -> int:
    return int(prompt.uid[1:])


def is_greedy(rollout: Rollout) -> bool:
    return rollout.text == "greedy"


def annotate_batch(batch: Batch, *, old: float = -1.0, ref: float) -> AnnotatedBatch:
    """Annotate with these log-probs of every token, an entropy of 1 and values of 0."""
    shape = batch.response_mask_BT.shape
    return AnnotatedBatch(
        **{name: getattr(batch, name) for name in Batch.__dataclass_fields__},
        old_logprobs_BT=torch.full(shape, old),
        entropy_BT=torch.ones(shape),
        ref_logprobs_BT=torch.full(shape, ref),
        full_kl_BT=None,
        values_BT=torch.zeros(shape),
    )


def scored(
    value: float | None, ids: Iterable[int] = (1, 2, 3), finish: FinishReason = "stop",
    thought: int = 0, source: str = "",
) -> Scored:  # fmt: skip
    """A response of these tokens and its score; None is one that failed."""
    ids = tuple(ids)
    prompt = Prompt("0", "", (), "", (1,), data_source=source)
    zeros = np.zeros(len(ids), np.float32)
    rollout = Rollout(prompt, 0, ids, zeros, "", finish, thought_tokens=thought)
    return Scored(rollout, Score.failed("timeout") if value is None else Score(value))


class Engine:
    """Keeps what each verb was asked, in order; `asked` names the verbs."""

    def __init__(self, sums: ReportSums = lambda minibatch, step: {}) -> None:
        self.calls: list[str] = []
        self.samplings: list[tuple[list[str], Sampling]] = []
        self.minibatches: list[tuple[int, MiniBatch]] = []  # with the weight version
        self.version = 0
        self.gaps: dict[int, float] = {}  # weight version -> of the trainer's log-probs
        self._sums = sums

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Rollout]:
        """The last prompt finishes first."""
        self.calls.append("generate")
        self.samplings.append(([prompt.uid for prompt in prompts], sampling))
        for prompt in reversed(prompts):
            for sample in reversed(range(sampling.n)):
                ids = (number(prompt), sample, 7, 8)
                logprobs = np.full(LENGTH, -1.0, np.float32)
                text = "sampled" if sampling.temperature else "greedy"
                yield Rollout(prompt, sample, ids, logprobs, text, "stop", self.version)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        self.calls.append("annotate")
        return annotate_batch(batch, old=-1.0 - self.gaps.get(self.version, 0.0), ref=-1.0 - KL)

    def step(self, minibatch: MiniBatch) -> Sums:
        self.calls.append("actor" * minibatch.actor + "critic" * minibatch.critic)
        self.minibatches.append((self.version, minibatch))
        return self._sums(minibatch, self.version + 1)

    def publish(self) -> None:
        self.calls.append("publish")
        self.version += 1

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        self.calls.append("last save" if last else "save")
        (directory / "engine.json").write_text(json.dumps(self.version))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, directory: Path) -> None:
        self.calls.append("load")
        self.version = json.loads((directory / "engine.json").read_text())

    def close(self) -> None:
        self.calls.append("close")

    def batches(self, role: str, step: int | None = None) -> list[TrainBatch]:
        """The mini-batches that a model was trained on, of all steps or of one."""
        return [
            minibatch.batch
            for version, minibatch in self.minibatches
            if getattr(minibatch, role) and step in (None, version + 1)
        ]

    def sampled(self, first_letter: str, greedy: bool = False) -> list[Sampling]:
        """How responses were sampled, by the kind of prompt and by whether it was greedy."""
        return [
            sampling
            for uids, sampling in self.samplings
            if uids[0][0] == first_letter and (sampling.temperature == 0) is greedy
        ]


class ScriptedReward(Reward):
    """Scores each response as the script says; remembers how many it scored, in all and lately."""

    name = "scripted"

    def __init__(self, score: Scoring) -> None:
        self.calls: list[Any] = []
        self.scored = self._lately = 0
        self._score = score
        self._step = 0

    def begin_step(self, step: int) -> None:
        self.calls.append(step)
        self._step = step

    def submit(self, rollout: Rollout) -> Future[Score]:
        self.scored += 1
        self._lately += 1
        future: Future[Score] = Future()
        try:
            result = self._score(rollout, self._step)
        except Exception as error:
            future.set_exception(error)
            return future
        plain = Score.failed("timeout") if result is None else result
        future.set_result(plain if isinstance(plain, Score) else Score(plain))
        return future

    def end_round(self, kind: RoundKind = "train") -> None:
        self.calls.append(kind)

    def pop_metrics(self) -> dict[str, float]:
        lately, self._lately = self._lately, 0
        return {"scripted/scored": float(self.scored), "scripted/lately": float(lately)}

    def state_dict(self) -> dict[str, Any]:
        return {"scored": self.scored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scored = state["scored"]

    def close(self) -> None: ...


class Screen(SilentScreen):
    """Keeps what a person would read."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def health(self, text: str, kind: str = "") -> None:
        self.warnings.append(text)


@dataclass
class Stage:
    """A run and all that can be seen of it."""

    job: Job
    engine: Engine
    reward: ScriptedReward
    screen: Screen
    state: RunState
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl without the clock."""
        text = (self.folder / "metrics.jsonl").read_text()
        return [
            {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "perf/"))}
            for line in text.splitlines()
        ]

    def column(self, name: str) -> dict[int, Any]:
        """One metric by step, where it was told."""
        return {line["step"]: line[name] for line in self.lines if name in line}


@dataclass
class Script:
    """What a run is made of; a stage of it can be built again over the same folder."""

    folder: Path
    settings: dict[str, Any]
    score: Scoring = lambda rollout, step: 1.0
    sums: ReportSums = lambda minibatch, step: {}
    steps: int = 3
    prompts: int = 12
    val_prompts: int = 0
    stop_requested: Callable[[], str | None] = lambda: None
    diagnosed: list[int] = field(default_factory=list)

    def build(self) -> Stage:
        config = complete(self.settings)
        screen = Screen()
        reward, engine = ScriptedReward(self.score), Engine(self.sums)
        tracker = Tracker(self.folder, screen, ("console",), total_steps=self.steps, config=config)
        order = PromptOrder(self.prompts, config.data.gen_batch_size, config.trainer.seed)

        def diagnose(scored: Sequence[Any]) -> str:
            self.diagnosed.append(len(scored))
            return "why there is no reward"

        job = Job(
            config=config,
            engine=engine,
            reward=reward,
            prompts=prompts(self.prompts),
            val_prompts=prompts(self.val_prompts, "v"),
            order=order,
            tracker=tracker,
            store=CheckpointStore(self.folder / "checkpoints", config.trainer.kept_checkpoints),
            pad_token_id=0,
            total_steps=self.steps,
            decode=lambda ids, context: "x" * len(ids),
            diagnose=diagnose,
            stop_requested=self.stop_requested,
            resume_command="ppo train --again",
        )
        state = RunState(kl_coef=config.algorithm.kl_ctrl.kl_coef)
        return Stage(job, engine, reward, screen, state, self.folder)


def who(batch: TrainBatch) -> list[tuple[int, int]]:
    """The prompt and the sample of each row."""
    start = batch.prompt_len_B[:, None]
    ids: Tensor = batch.input_ids_BL.gather(1, start + torch.tensor([[PROMPT, SAMPLE]]))
    return [(p, s) for p, s in ids.tolist()]
