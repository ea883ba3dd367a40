"""The parts of a run, its state between steps, and its restore from a checkpoint."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ppo_cli.config.schema import Config
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.engine.base import Engine
from ppo_cli.errors import ModelError, UserError, ppo
from ppo_cli.moments import Moments
from ppo_cli.records import Prompt, Score, Scored
from ppo_cli.report.metrics import StepSums
from ppo_cli.report.tracker import Tracker
from ppo_cli.rewards.base import Reward
from ppo_cli.run_folder import CheckpointStore

STATE_FILE = "run.json"
# Of all that a checkpoint's `state/` holds: raise it when any of it is written in another form.
FORMAT = 2
UNNUMBERED = 1  # what wrote no number yet
MOST_UNSCORED = 3  # steps in a row without any score, after which going on has no point


TRAIN, BASELINE, VALIDATION, SHUFFLE = range(4)  # random streams, one for each use


def stream_seed(*key: int) -> int:
    """One seed for each use of randomness: nothing to save, nothing to fall out of step."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])


@dataclass(frozen=True)
class Job:
    """All that the loop works with, built by `assemble`."""

    config: Config
    engine: Engine
    reward: Reward
    prompts: Sequence[Prompt]
    val_prompts: Sequence[Prompt]
    order: PromptOrder
    tracker: Tracker
    store: CheckpointStore
    pad_token_id: int
    total_steps: int
    decode: Callable[[Sequence[int]], str]
    diagnose: Callable[[Sequence[Scored]], str | None]
    stop_requested: Callable[[], str | None]
    resume_command: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    in_flight: list[Future[Score]] = field(default_factory=list)  # of the round under way


@dataclass
class RunState:
    """Counters and controllers of the loop.

    `unfinished` holds the metrics of a step that is trained and not yet validated: a run that
    had to stop in a validation begins again with it. `moments` are those of running reward
    normalisation.
    """

    kl_coef: float
    step: int = 0
    best: float | None = None
    best_step: int | None = None
    stale: int = 0
    zero_steps: int = 0
    broken_steps: int = 0
    unscored_steps: int = 0
    unfinished: dict[str, float] | None = None
    moments: Moments = field(default_factory=Moments)

    @property
    def is_best(self) -> bool:
        """Whether the present step holds the best validation so far."""
        return self.best_step == self.step

    def note_validation(self, metrics: Mapping[str, float]) -> None:
        """Compare a validation with the best one; `stale` counts those without a new best."""
        value = metrics.get("val/reward_mean")
        if value is None or metrics.get("val/score/failed_share", 0.0) > 0.5:
            return  # too few scores to choose a best one
        again = self.best_step == self.step  # a resumed run may validate its first step twice
        if self.best is None or value > self.best or again:
            self.best, self.best_step, self.stale = value, self.step, 0
        else:
            self.stale += 1

    def count_broken_steps(self, sums: StepSums) -> None:
        """Count the steps in a row in which some gradient was not finite."""
        skipped = sums.total("actor/skipped_steps") + sums.total("critic/skipped_steps")
        self.broken_steps = self.broken_steps + 1 if skipped else 0

    def count_unscored_steps(self, scored: Sequence[Scored]) -> None:
        """Count the steps in a row in which no response got a score."""
        none = not any(s.score.judged for s in scored)
        self.unscored_steps = self.unscored_steps + 1 if none else 0

    def refuse_broken_steps(self, most: int, resume_command: str) -> None:
        """Stop the run when gradients were not finite for `most` steps in a row."""
        if self.broken_steps >= most:
            raise UserError(
                f"Gradients were not finite in {most} steps in a row (the last is step "
                f"{self.step}); those updates were left out. Lower --lr and --critic_lr, set "
                "actor.grad_clip or --dtype float32, then start again from the last checkpoint, "
                f"if there is one: {resume_command}"
            )

    def write(
        self,
        folder: Path,
        *,
        order: PromptOrder,
        reward: Reward,
        fingerprint: Mapping[str, Any],
    ) -> None:
        """Write the state of loop, order and reward into a checkpoint folder."""
        state = {
            "format": FORMAT,
            "run": asdict(self),
            "order": order.state_dict(),
            "reward": reward.state_dict(),
            "fingerprint": dict(fingerprint),
        }
        (folder / "state").mkdir(exist_ok=True)
        (folder / "state" / STATE_FILE).write_text(json.dumps(state, indent=2))

    @classmethod
    def read(cls, folder: Path, *, order: PromptOrder, reward: Reward) -> RunState:
        """Read what `write` wrote; raises ModelError when the checkpoint is damaged."""
        state = read_state(folder)
        order.load_state_dict(state["order"])
        reward.load_state_dict(state["reward"])
        known = {f.name for f in fields(cls)}
        run = {k: v for k, v in state["run"].items() if k in known}
        return cls(**run | {"moments": Moments.from_state(run.get("moments", {}))})


def read_state(folder: Path) -> dict[str, Any]:
    """The saved state of a checkpoint; raises ModelError when it cannot be resumed.

    Every resume calls this before anything of the checkpoint is loaded.
    """
    path = folder / "state" / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        found = state.get("format", UNNUMBERED)
        if found == FORMAT:
            state["run"]["step"], state["order"], state["reward"], state["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"The checkpoint {folder} is damaged: {path.name} cannot be read ({error}). Name "
            "another one with --resume PATH, or start afresh with --resume never."
        ) from error
    if found != FORMAT:
        export = ppo(f"export {shlex.quote(str(folder))} --out DIR")
        raise ModelError(
            f"The checkpoint {folder} has format {found}, and this version of ppo-cli goes on "
            f"with format {FORMAT} only: start afresh in another --output_dir, or use the version "
            f"that wrote it. `{export}` still makes a model for --model of it."
        )
    return state
