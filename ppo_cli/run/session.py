"""A training step by step, for callers with their own scores; `library.session` is the entrance.

`sample` and `update` call the parts of the loop of `ppo train`, so the same scores give the same
bits.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ppo_cli import loop
from ppo_cli.config.mixture import mixture_of
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted, RewardError, UserError, WorkerLost, plural
from ppo_cli.planning.run_plan import RunPlan
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import HostMaker, Reward, read_returned, submit_rollout
from ppo_cli.rewards.function import check_placed_rewards
from ppo_cli.rewards.rules import check_prompts
from ppo_cli.run.assemble import interrupt_run, open_run, reward_for
from ppo_cli.step.sampling import StepSample, gather
from ppo_cli.step.saving import Snapshot, make_resumable, save_last_step, undone_on_stop


class Session:
    """A run that its caller drives: `sample`, then `update`, until it is `done`.

    It is opened when it is made, and closed by the end of a `with` block or by `close`.
    """

    def __init__(self, plan: RunPlan, screen: Screen) -> None:
        self._rewarded: list[Score] = []  # the batch's scores of the configured reward
        self._batch: tuple[Rollout, ...] = ()
        # The batch that waits for its scores, and the state before it was sampled.
        self._waiting: tuple[StepSample, Snapshot] | None = None
        with ExitStack() as closing:
            make_reward = partial(_make_reward, plan.settings.pretrain_steps)
            job, load_state, self._stop, _ = closing.enter_context(
                open_run(plan, screen, make_reward=make_reward)
            )
            if isinstance(job.reward, NoReward) and job.val_prompts:
                text = f"This session does not validate, as it has no reward. {job.reward.why}"
                warnings.warn(text, stacklevel=3)
                job = replace(job, val_prompts=())
            self._job, self.total_steps = replace(job, caller_scores=True), job.total_steps
            self._state = load_state(self._job)
            closing.enter_context(self._job.store.open())
            with self._in_loop():
                self._over = loop.begin(self._job, self._state)
            self._closing = closing.pop_all()
        # A program that ends without `close` cannot save any more: threads have ended by then.
        atexit.register(self._closing.close)

    @property
    def step(self) -> int:
        """The number of trained steps, of `total_steps`."""
        return self._state.step - (self._waiting is not None)

    @property
    def done(self) -> bool:
        """Whether there is no further step: all are trained, or the session has ended early."""
        return self._over

    def __iter__(self) -> Iterator[Sequence[Rollout]]:
        """Sample batch after batch until the run is done; `update` each of them."""
        while not self.done:
            yield self.sample()

    def sample(self) -> Sequence[Rollout]:
        """Sample the batch of the next step: `rollout.n` responses in a row to each prompt.

        Raises UserError before an `update` with the last batch and after the last step, Interrupted
        when a signal has asked the run to stop.
        """
        if self.done:
            raise UserError(
                f"This session is over, {self.step} of {self.total_steps} steps are trained: open "
                "another one to go on, for more steps with a higher max_steps."
            )
        if self._waiting is not None:
            raise UserError("The last batch has no scores: call update(batch, scores) first.")
        job, state = self._job, self._state
        with self._in_loop():
            before = Snapshot.take(job, state)
            if reason := job.stop_requested():
                save_last_step(job, state)
                stop = Interrupted(f"Stopped after step {state.step} ({reason}).")
                raise make_resumable(job, state, stop)
            step_sample = loop.sample(job, state, before)
        self._waiting = step_sample, before
        self._batch = tuple(step_sample.rollouts)
        self._rewarded.clear()
        return self._batch

    def reward(self, batch: Sequence[Rollout]) -> list[Score]:
        """Return the scores of the configured reward for the last batch, to use or to mix.

        A score has `value` (None if it failed, `failure` says why), `parts` and `reason`.
        """
        step_sample, before = self._require_batch(batch)
        job = self._job
        if isinstance(job.reward, NoReward):
            raise UserError(f"This session has no reward. {job.reward.why}")
        # Once for each batch, which running statistics must not count twice.
        if not self._rewarded:
            futures = [submit_rollout(job.reward, rollout) for rollout in batch]
            job.reward.end_round("train")
            with self._in_loop(), undone_on_stop(job, self._state, before):
                scored = gather(job, step_sample.rollouts, futures, "reward_wait")
            self._rewarded += [s.score for s in scored]
        return list(self._rewarded)

    def update(self, batch: Sequence[Rollout], scores: Iterable[Any]) -> dict[str, Any]:
        """Train on the last batch with these scores; return the line of metrics.jsonl.

        A score is what a reward function may return, or a `Score` of `reward`; None, NaN and what
        is not a number are failed scores. Raises UserError for another batch or another number of
        scores, Interrupted when the run stops early.
        """
        step_sample, before = self._require_batch(batch)
        try:
            if isinstance(scores, str | Mapping):  # letters and keys are not scores
                raise TypeError
            pending = iter(scores)
        except TypeError:  # also numbers, None, arrays without a dimension
            kind = type(scores).__name__
            raise UserError(
                f"update() got a {kind}; give a list with a score per response."
            ) from None
        values = list(pending)
        if len(values) != len(batch):
            raise UserError(
                f"update() got {plural(len(values), 'score')} for {plural(len(batch), 'response')}"
                ": give one for each, and None for one that could not be scored."
            )
        read = [_read_score(r, value) for r, value in zip(batch, values, strict=True)]
        for future, score in zip(step_sample.futures, read, strict=True):
            future.set_result(score)
        self._waiting = None
        with self._in_loop():
            self._over = loop.learn(self._job, self._state, step_sample, before)
        return dict(self._job.tracker.history[-1])

    def close(self) -> None:
        """Save the last trained step, and free everything. Safe to call twice."""
        atexit.unregister(self._closing.close)
        try:
            if self.step and not self._over:
                self._undo_batch()
                save_last_step(self._job, self._state)
        finally:
            self._over = True
            self._closing.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _undo_batch(self) -> None:
        """Undo the step of a batch that gets no scores."""
        if self._waiting is not None:
            _, before = self._waiting
            before.restore(self._job, self._state)
            self._waiting = None

    @contextmanager
    def _in_loop(self) -> Iterator[None]:
        """Run a part of the loop: an error ends the session."""
        # Ctrl-C asks the run to stop; between two calls it is the caller's.
        self._stop.at_once = False
        try:
            yield
        except BaseException as error:
            self._over, self._waiting = True, None
            if isinstance(error, WorkerLost):
                raise interrupt_run(self._job, str(error)) from error
            raise
        finally:
            self._stop.at_once = True

    def _require_batch(self, batch: Sequence[Rollout]) -> tuple[StepSample, Snapshot]:
        """Return the sample of the last batch; UserError if `batch` is another one."""
        if self.done or self._waiting is None or batch is not self._batch:
            raise UserError("This is not the batch of the last sample(), or it has its scores.")
        return self._waiting


class NoReward(Reward):
    """In place of the reward of a session that has none; `why` says what is missing."""

    name = "none"

    def __init__(self, why: str) -> None:
        self.why = why

    def submit(self, rollout: Rollout) -> Future[Score]:
        """Refuse to score."""
        raise RewardError(self.why)

    def close(self) -> None:
        """Nothing to free."""


def _make_reward(
    pretrain_steps: int, settings: RewardSettings, prompts: Sequence[Prompt], host: HostMaker | None
) -> Reward:
    """Return the reward of the settings, or none where the default (rules by data_source) fails.

    Raises RewardError for a reward that was chosen, or that critic pretraining needs.
    """
    named = settings.api.enable, settings.model.path, settings.function, settings.rule
    if mixture_of(settings) or any(named):
        return reward_for(settings, prompts, host)
    try:
        check_prompts(None, settings.function_kwargs, prompts)
        return reward_for(settings, prompts, host)
    except RewardError as error:
        if pretrain_steps:
            raise RewardError(f"Critic pretraining needs a reward. {error}") from error
        return NoReward(str(error))


def _read_score(rollout: Rollout, value: Any) -> Score:
    """Return the score of a rollout from what the caller gave for it."""
    if rollout.failure:
        return Score.failed(rollout.failure)
    if not isinstance(value, Score):
        return check_placed_rewards(rollout, read_returned(value))
    if value.value is None:
        return value
    number = read_returned(value.value)  # the caller may have changed it
    return replace(value, value=number.value) if number.judged else number
