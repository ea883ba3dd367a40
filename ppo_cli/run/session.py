"""A training step by step, for callers that score the responses themselves.

    with session(preset="embedded", output_dir="my-run") as s:
        for batch in s:
            s.update(batch, [len(r.text) / 20 for r in batch])

`sample` and `update` run the loop of `ppo train` (`loop.steps`) up to its next pause, so the same
scores give the same bits. `library.session` is the entrance.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, overload

from ppo_cli.config.derived import pretrain_steps
from ppo_cli.config.layers import Resolved
from ppo_cli.config.mixture import mixture_of
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import Interrupted, RewardError, UserError, WorkerLost, plural
from ppo_cli.loop import save, save_once, steps, wait_for_save
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import HostMaker, Reward, read_returned, submit_rollout
from ppo_cli.rewards.function import check_placed_rewards
from ppo_cli.rewards.rules import check_prompts
from ppo_cli.run.assemble import OpenRun, interrupt_run, open_run, reward_for
from ppo_cli.step.stages import StepSample, gather


class StepBatch(Sequence[Rollout]):
    """The responses of one training step, `rollout.n` in a row for each prompt.

    A row is a `Rollout`: `text` is the response, `token_ids` and `sampler_logprobs` its tokens and
    their log-probs under the policy, `prompt` has `text`, `messages`, `ground_truth`,
    `data_source` and `extra_info`; `turns` are those of an episode. `step` counts from 1.
    """

    def __init__(self, step: int, sample: StepSample) -> None:
        self.step = step
        self._sample = sample
        self._scores: list[Score] | None = None  # those of the configured reward

    @overload
    def __getitem__(self, place: int) -> Rollout: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Rollout]: ...
    def __getitem__(self, place: int | slice) -> Rollout | Sequence[Rollout]:
        return self._sample.rollouts[place]

    def __len__(self) -> int:
        return len(self._sample.rollouts)

    @property
    def prompts(self) -> list[str]:
        """The question of each response."""
        return [rollout.prompt.text for rollout in self]

    @property
    def responses(self) -> list[str]:
        """The text of each response."""
        return [rollout.text for rollout in self]

    @property
    def ground_truths(self) -> list[Any]:
        """The reference answer of each response's row, or None."""
        return [rollout.prompt.ground_truth for rollout in self]


class Session:
    """A run that its caller drives: `sample`, then `update`, until it is `done`.

    It is opened when it is made, and closed by the end of a `with` block or by `close`, which saves
    the last trained step, also after an exception. The same call goes on from there.
    """

    def __init__(self, resolved: Resolved, screen: Screen) -> None:
        with ExitStack() as closing:
            make_reward = partial(_make_reward, resolved.config)
            opened = closing.enter_context(open_run(resolved, screen, make_reward=make_reward))
            self._begin(opened)
            self._closing = closing.pop_all()

    def _begin(self, opened: OpenRun) -> None:
        """Load the state, and do what comes before the first sample: validation, pretraining."""
        self._job = replace(opened.job, own_scores=True)
        if isinstance(self._job.reward, NoReward) and self._job.val_prompts:
            warnings.warn(
                f"This session does not validate, as it has no reward. {self._job.reward.why}",
                stacklevel=4,
            )
            self._job = replace(self._job, val_prompts=())
        self._stop = opened.stop
        self._batch: StepBatch | None = None
        self._state = opened.begin(self._job)
        self._steps = steps(self._job, self._state)
        self._trained = 0
        self._advance()

    @property
    def step(self) -> int:
        """The number of trained steps."""
        return self._trained

    @property
    def total_steps(self) -> int:
        """The number of steps of the run."""
        return self._job.total_steps

    @property
    def done(self) -> bool:
        """Whether there is no further step: all are trained, or the session has ended early."""
        return getgeneratorstate(self._steps) == GEN_CLOSED

    def __iter__(self) -> Iterator[StepBatch]:
        """Sample batch after batch until the run is done; `update` each of them."""
        while not self.done:
            yield self.sample()

    def sample(self) -> StepBatch:
        """Sample the responses to the next prompts.

        Raises UserError before the last batch is updated and after the last step, Interrupted when
        the run was asked to stop.
        """
        self._require_step()
        if self._batch is not None:
            raise UserError(
                f"The batch of step {self._batch.step} has no scores yet: call update(batch, "
                "scores) before sample()."
            )
        if reason := self._job.stop_requested():
            self.close()
            raise interrupt_run(self._job, f"Stopped after step {self.step} ({reason}).")
        sample = self._advance()
        assert sample is not None
        self._batch = StepBatch(self._state.step, sample)
        return self._batch

    def reward(self, batch: StepBatch) -> list[Score]:
        """Return the scores of the configured reward for a batch, to use or to mix.

        A score has `value` (None if it failed, `failure` says why), `parts` and `reason`.
        """
        self._require_batch(batch, "reward")
        if isinstance(self._job.reward, NoReward):
            raise UserError(f"This session has no reward. {self._job.reward.why}")
        # Once for each batch: running statistics must not count a batch twice.
        if batch._scores is None:
            job, sample = self._job, batch._sample
            futures = [submit_rollout(job.reward, rollout) for rollout in batch]
            job.reward.end_round("train")
            try:
                scored = gather(job, sample.rollouts, futures, "reward_wait")
            except Interrupted as stop:
                self._steps.throw(stop)  # which undoes the step, saves, and says how to go on
                raise
            batch._scores = [s.score for s in scored]
        return list(batch._scores)

    def update(self, batch: StepBatch, scores: Iterable[Any]) -> dict[str, Any]:
        """Train on a batch with these scores; return the step's line of metrics.jsonl.

        A score is what a reward function may return, or a `Score` of `reward`. None, NaN and what
        is not a number are failed scores, which are masked. Raises UserError for a batch that is
        not the last one, or another number of scores, and Interrupted when the run stops early.
        """
        self._require_batch(batch, "update")
        values = list(scores)
        if len(values) != len(batch):
            raise UserError(
                f"update() got {plural(len(values), 'score')} for {plural(len(batch), 'response')}"
                ": give one for each, and None for one that could not be scored."
            )
        read = [_read_score(r, value) for r, value in zip(batch, values, strict=True)]
        for future, score in zip(batch._sample.futures, read, strict=True):
            future.set_result(score)
        self._batch = None
        self._advance()
        return dict(self._job.tracker.history[-1])

    def save(self) -> None:
        """Save a checkpoint now, besides those of save_freq; UserError before an `update`."""
        self._require_step()
        if self._batch is not None:
            raise UserError("save() is for a trained step: call update(batch, scores) first.")
        save(self._job, self._state, last=False)
        wait_for_save(self._job)

    def close(self) -> None:
        """Save the last trained step, and free everything. Safe to call twice."""
        with self._closing.pop_all(), self._deferred_signals():
            if self.done or not self.step:
                self._steps.close()
            elif self._batch is not None:
                # Undo the step that has no scores, as if the run had been asked to stop.
                with suppress(Interrupted):
                    self._steps.throw(Interrupted("The session was closed."))
            else:
                save_once(self._job, self._state)
                wait_for_save(self._job)
                self._steps.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> StepSample | None:
        """Run the loop up to its next pause; return the sample if it waits for scores."""
        with self._deferred_signals():
            try:
                sample = next(self._steps, None)
            except WorkerLost as lost:
                raise interrupt_run(self._job, str(lost)) from lost
        if sample is None:
            self._trained = self._state.step
        return sample

    @contextmanager
    def _deferred_signals(self) -> Iterator[None]:
        """Let Ctrl-C end the step first; between steps it is the caller's."""
        self._stop.at_once = False
        try:
            yield
        finally:
            self._stop.at_once = True

    def _require_step(self) -> None:
        if self.done:
            raise UserError(
                f"This session is over, {self.step} of {self.total_steps} steps are trained: open "
                "another one to go on, for more steps with a higher max_steps."
            )

    def _require_batch(self, batch: StepBatch, method: str) -> None:
        self._require_step()
        if batch is not self._batch:
            raise UserError(
                f"{method}() takes the batch of the last sample(), once: "
                + ("sample() the next one." if self._batch is None else "this is another one.")
            )


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
    config: Config, settings: RewardSettings, prompts: Sequence[Prompt], host: HostMaker | None
) -> Reward:
    """Return the reward of a session: that of the settings, or none if there is none.

    Rules by data_source are the default reward, and not every row has a rule. Raises RewardError
    for a reward that was chosen, or if the critic is to be pretrained without one.
    """
    named = settings.api.enable, settings.model.path, settings.function, settings.rule
    if mixture_of(settings) or any(named):
        return reward_for(settings, prompts, host)
    try:
        reward = reward_for(settings, prompts, host)
        check_prompts(None, settings.function_kwargs, prompts)
    except RewardError as error:
        if pretrain_steps(config):
            raise RewardError(
                "Critic pretraining scores responses before the first sample(), and there is no "
                f"reward for it: {error}"
            ) from error
        return NoReward(str(error))
    return reward


def _read_score(rollout: Rollout, value: Any) -> Score:
    """Return the score of a rollout from what the caller gave for it."""
    if rollout.failure:
        return Score.failed(rollout.failure)
    if not isinstance(value, Score):
        return check_placed_rewards(rollout, read_returned(value))
    # The caller may have changed its value.
    number = read_returned(value.value)
    changed = replace(value, value=number.value) if number.judged else number
    return value if value.value is None else changed
