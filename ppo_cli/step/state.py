"""What the loop works with (`Job`), and the state that it saves (`RunState`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.digests import MANIFEST, NAMED_IN
from ppo_cli.engine.base import Engine
from ppo_cli.errors import UserError, replace_flag
from ppo_cli.moments import Moments
from ppo_cli.records import Prompt, Score, Scored
from ppo_cli.report.metrics import StepSums
from ppo_cli.report.tracker import Tracker
from ppo_cli.rewards.base import Reward
from ppo_cli.run_folder.checkpoints import FORMAT, CheckpointStore, read_state
from ppo_cli.thoughts import Detokenize


@dataclass(frozen=True)
class Job:
    """Everything that the loop works with, built by `run/assemble.py`."""

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
    decode: Detokenize
    diagnose: Callable[[Sequence[Scored]], str | None]
    stop_requested: Callable[[], str | None]
    resume_command: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    in_flight: list[Future[Score]] = field(default_factory=list)  # scores of the current round
    published: list[int] = field(default_factory=list)  # steps whose weights this process published
    # Whether the caller gives the scores of training steps (`run/session.py`).
    caller_scores: bool = False


@dataclass
class RunState:
    """Counters and controllers of the loop, saved in each checkpoint.

    `unfinished` has the metrics of a step that is trained but not validated: a run that stopped
    during a validation resumes with it. `stale` counts validations without a new best.
    `moments` are those of running reward normalisation. `pretraining` has the metrics of the steps
    before step 1 that trained only the critic.
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
    pretraining: list[dict[str, float]] = field(default_factory=list)

    @property
    def is_best(self) -> bool:
        """Whether the current step has the best validation so far."""
        return self.best_step == self.step

    def note_validation(self, metrics: Mapping[str, float]) -> None:
        """Compare a validation with the best one, and update `best` or `stale`."""
        value = metrics.get("val/reward_mean")
        if value is None or metrics.get("val/score/failed_share", 0.0) > 0.5:
            return  # too few scores for a comparison
        same_step = self.best_step == self.step  # a resumed run may validate its first step twice
        if self.best is None or value > self.best or same_step:
            self.best, self.best_step, self.stale = value, self.step, 0
        else:
            self.stale += 1

    def count_broken_steps(self, sums: StepSums) -> None:
        """Count consecutive steps with a gradient that was not finite."""
        skipped = sums.total("actor/skipped_steps") + sums.total("critic/skipped_steps")
        self.broken_steps = self.broken_steps + 1 if skipped else 0

    def count_unscored_steps(self, scored: Sequence[Scored]) -> None:
        """Count consecutive steps in which no response got a score."""
        none = not any(s.score.judged for s in scored)
        self.unscored_steps = self.unscored_steps + 1 if none else 0

    def stop_after_broken_steps(self, job: Job) -> None:
        """Raise UserError when gradients were not finite in too many consecutive steps."""
        limit = job.config.trainer.max_nonfinite_steps
        if self.broken_steps >= limit:
            # The advice changes settings, so the command names the newest checkpoint explicitly.
            command, newest = job.resume_command, job.store.newest()
            if newest:
                command = replace_flag(command, "--resume", str(newest))
            raise UserError(
                f"Gradients were not finite in {limit} steps in a row (the last is step "
                f"{self.step}); those updates were skipped. Lower --lr and --critic_lr, set "
                f"actor.grad_clip or --dtype float32, then start again: {command}"
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
            "digests": MANIFEST,
            "run": asdict(self),
            "order": order.state_dict(),
            "reward": reward.state_dict(),
            "fingerprint": dict(fingerprint),
        }
        (folder / "state").mkdir(exist_ok=True)
        (folder / NAMED_IN).write_text(json.dumps(state, indent=2))

    @classmethod
    def read(cls, folder: Path, *, order: PromptOrder, reward: Reward) -> RunState:
        """Restore what `write` wrote; ModelError if the checkpoint is damaged."""
        state = read_state(folder)
        # Order and reward restore themselves; unknown fields of the run are ignored.
        order.load_state_dict(state["order"])
        reward.load_state_dict(state["reward"])
        names = {f.name for f in fields(cls)}
        run = {k: v for k, v in state["run"].items() if k in names}
        return cls(**run | {"moments": Moments.from_state(run.get("moments", {}))})
