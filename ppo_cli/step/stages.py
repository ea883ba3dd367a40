"""What the loop works with (`Job`), the state that it saves (`RunState`), and the stages of a step.

In the order of `loop.train_step`: sample responses, submit and gather their scores, update critic
and actor. Also the greedy baselines of ReMax, and checks of the reward and of vLLM's weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, TrainBatch
from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.derived import (
    critic_mini_batch,
    gen_batch,
    most_gen_batches,
    quantised,
    sampler_seed,
)
from ppo_cli.config.placement import sampler_name
from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.prompts import PromptOrder
from ppo_cli.digests import MANIFEST, NAMED_IN
from ppo_cli.engine.base import Engine, MiniBatch, Sampling
from ppo_cli.errors import Interrupted, RewardError, UserError, ppo, replace_flag
from ppo_cli.moments import Moments
from ppo_cli.records import Prompt, Rollout, Score, Scored
from ppo_cli.report.metrics import StepSums
from ppo_cli.report.tracker import Tracker
from ppo_cli.rewards.base import Reward, RoundKind, submit_rollout
from ppo_cli.run_folder.checkpoints import FORMAT, CheckpointStore, read_state
from ppo_cli.step.shaping import compute_penalties
from ppo_cli.thoughts import Detokenize

MAX_UNSCORED_STEPS = 3  # steps in a row without any score, after which the run stops


# Numbers of the random streams, a part of each seed: changing one changes every run.
TRAIN, BASELINE, VALIDATION, SHUFFLE, PRETRAIN, PRETRAIN_SHUFFLE = range(6)  # random streams


def stream_seed(*key: int) -> int:
    """Derive a seed from (run seed, stream, step, …), so that no generator state must be saved."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint32)[0])


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
    published: list[int] = field(
        default_factory=list
    )  # steps whose weights this process has published
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

    def stop_after_broken_steps(self, limit: int, resume_command: str, newest: Path | None) -> None:
        """Raise UserError when gradients were not finite in `limit` consecutive steps.

        The advice changes settings, so the command names the `newest` checkpoint explicitly.
        """
        if self.broken_steps >= limit:
            raise UserError(
                f"Gradients were not finite in {limit} steps in a row (the last is step "
                f"{self.step}); those updates were skipped. Lower --lr and --critic_lr, set "
                "actor.grad_clip or --dtype float32, then start again: "
                + (
                    replace_flag(resume_command, "--resume", str(newest))
                    if newest
                    else resume_command
                )
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


def train_sampling(config: Config, step: int, turn: int = 0, stream: int = TRAIN) -> Sampling:
    """Sampling settings of a step; `turn` is the batch number in dynamic sampling."""
    # The first batch of a step has the same seed with and without dynamic sampling.
    r, batch_key = config.rollout, (turn,) if turn else ()
    return Sampling(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        n=r.n,
        max_tokens=config.data.max_response_length,
        seed=stream_seed(sampler_seed(config), stream, step, *batch_key),
        stop=r.stop,
    )


@dataclass(frozen=True)
class StepSample:
    """The batch of a step: prompts, their responses in prompt order, pending scores, metrics."""

    prompts: list[Prompt]
    rollouts: list[Rollout]
    futures: list[Future[Score]]
    metrics: dict[str, float] = field(default_factory=dict)


def sample_step(job: Job, step: int) -> StepSample:
    """Sample the responses of a training step and submit each to the reward."""
    if job.config.algorithm.filter_groups.enable:
        return _sample_dynamically(job, step)
    prompts = [job.prompts[i] for i in job.order.take()]
    sampling = train_sampling(job.config, step)
    pairs = sample_rollouts(job, prompts, sampling, "rollout", "train", deferred=job.caller_scores)
    return StepSample(prompts, *pairs)


def sample_pretraining(job: Job, step: int) -> StepSample:
    """Sample the responses of a step of critic pretraining and submit each to the reward.

    The prompts have their own order, so that training meets its prompts as without pretraining.
    """
    config = job.config
    seed = stream_seed(config.trainer.seed, PRETRAIN)
    order = PromptOrder(len(job.prompts), config.data.train_batch_size, seed, config.data.shuffle)
    prompts = [job.prompts[i] for i in order.peek(step)]
    sampling = train_sampling(config, step, stream=PRETRAIN)
    return StepSample(prompts, *sample_rollouts(job, prompts, sampling, "rollout", "train"))


def _sample_dynamically(job: Job, step: int) -> StepSample:
    """Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2).

    Prompts whose responses are all equal in algorithm.filter_groups.metric give no gradient: they
    are dropped, and more prompts are sampled until the batch is full. Raises Interrupted if the
    allowed number of batches does not fill it.
    """
    config = job.config
    batch_size, n = config.data.train_batch_size, config.rollout.n
    max_batches = most_gen_batches(config, len(job.prompts))
    chosen, sampled, alike, unscored = StepSample([], [], []), 0, 0, 0
    for turn in range(max_batches):
        # Sample and score a batch; prompts that are in the step already are skipped.
        uids = {prompt.uid for prompt in chosen.prompts}
        prompts = [p for i in job.order.take() if (p := job.prompts[i]).uid not in uids]
        sampling = train_sampling(config, step, turn)
        rollouts, futures = sample_rollouts(job, prompts, sampling, "rollout", "train")
        scored = gather(job, rollouts, futures, "reward_wait")
        raise_if_reward_only_raises(job, scored)
        sampled += len(prompts)
        # Keep the groups with a signal, until the batch is full.
        for g, prompt in enumerate(prompts):
            group = slice(g * n, (g + 1) * n)
            unscored += not any(s.score.judged for s in scored[group])
            differs = _has_signal(config, scored[group])
            alike += not differs
            if differs and len(chosen.prompts) < batch_size:
                chosen.prompts.append(prompt)
                chosen.rollouts.extend(rollouts[group])
                chosen.futures.extend(futures[group])
        if len(chosen.prompts) == batch_size:
            chosen.metrics["filter/gen_batches"] = turn + 1.0
            chosen.metrics["filter/alike_share"] = alike / sampled
            return chosen
    raise Interrupted(
        f"Dynamic sampling found {len(chosen.prompts)} of the {batch_size} prompts of a batch in "
        f"{max_batches} batches ({sampled} prompts, {unscored} of them without any score): the "
        "responses to all others score alike. Raise algorithm.filter_groups.max_num_gen_batches "
        "or --rollout_n, take prompts that are neither too easy nor too hard, or set "
        "algorithm.filter_groups.enable=false."
    )


def _has_signal(config: Config, group: Sequence[Scored]) -> bool:
    """Whether the responses to a prompt differ in algorithm.filter_groups.metric.

    Imputed scores and parts without a value do not count.
    """
    # A missing value does not count as a difference.
    values = {_filter_value(config, sample) for sample in group if sample.score.judged}
    return len(values - {None}) > 1


def _filter_value(config: Config, sample: Scored) -> float | None:
    """Return the value by which dynamic sampling compares responses."""
    name = config.algorithm.filter_groups.metric
    # `acc` is a part where the reward returns one, and the score otherwise.
    if name in (None, "score") or (name == "acc" and name not in sample.score.parts):
        return sample.score.value
    if name in ("seq_reward", "seq_final_reward"):
        longest = config.data.max_response_length
        penalties = compute_penalties(config.reward.shaping, sample.rollout, longest).values()
        return (sample.score.value or 0.0) + sum(penalties)
    if name not in sample.score.parts:
        raise RewardError(
            f"algorithm.filter_groups.metric names '{name}', but a score has no such part; there "
            f"are {', '.join(['score', 'seq_reward', *sample.score.parts])}."
        )
    return sample.score.parts[name].raw


def sample_rollouts(
    job: Job, prompts: Sequence[Prompt], sampling: Sampling, phase: str, kind: RoundKind, *,
    deferred: bool = False,
) -> tuple[list[Rollout], list[Future[Score]]]:  # fmt: skip
    """Sample responses, submit each to the reward as it finishes; return both in prompt order.

    With `deferred` the reward gets none of them, and the caller completes the futures.
    """
    # Responses finish in any order; futures of earlier rounds may still be running.
    place = {prompt.uid: i for i, prompt in enumerate(prompts)}
    pairs: list[tuple[Rollout, Future[Score]]] = []
    job.in_flight[:] = [future for future in job.in_flight if not future.done()]
    with job.tracker.phase(phase, len(prompts) * sampling.n) as advance:
        for rollout in job.engine.generate(prompts, sampling):
            future = Future[Score]() if deferred else submit_rollout(job.reward, rollout)
            pairs.append((rollout, future))
            job.in_flight.append(future)
            advance(1)
    # All responses are submitted: rewards may now compare them with each other.
    if not deferred:
        job.reward.end_round(kind)
    pairs.sort(key=lambda pair: (place[pair[0].prompt.uid], pair[0].sample))
    return [rollout for rollout, _ in pairs], [future for _, future in pairs]


def gather(
    job: Job, rollouts: Sequence[Rollout], futures: Sequence[Future[Score]], phase: str
) -> list[Scored]:
    """Wait for the scores of `rollouts`; `phase` names the wait on the screen."""
    scored: list[Scored] = []
    with job.tracker.phase(phase, len(futures)) as advance:
        for rollout, future in zip(rollouts, futures, strict=True):
            scored.append(Scored(rollout, _wait_for_score(job, future)))
            advance(1)
    return scored


def _wait_for_score(job: Job, future: Future[Score]) -> Score:
    """Wait for one score; if the reward is stalled, show why, and let the user stop the run."""
    noted = False
    while not future.done():
        wait([future], timeout=0.5)
        reason = None if future.done() else job.reward.waiting_for()
        if reason is not None and job.stop_requested():
            raise Interrupted(f"Stopped while waiting ({job.stop_requested()}). {reason}")
        if reason is not None and not noted:
            job.tracker.screen.health(reason)
            noted = True
    return future.result()


def sample_references(job: Job) -> None:
    """Sample greedy responses of the initial model, for rewards that compare with them."""
    prompts = job.reward.prompts_for_reference(job.prompts)
    if not prompts:
        return
    # In batches as large as a training step's.
    size, references = gen_batch(job.config) * job.config.rollout.n, list[Rollout]()
    with job.tracker.phase("first responses", len(prompts)) as advance:
        for start in range(0, len(prompts), size):
            for rollout in job.engine.generate(
                prompts[start : start + size], _greedy_sampling(job, 0)
            ):
                references.append(rollout)
                advance(1)
    job.reward.set_references(references)


def _greedy_sampling(job: Job, step: int) -> Sampling:
    """Return sampling settings of one greedy response."""
    return Sampling(
        temperature=0.0,
        max_tokens=job.config.data.max_response_length,
        seed=stream_seed(job.config.trainer.seed, BASELINE, step),
        stop=job.config.rollout.stop,
    )


def submit_baselines(
    job: Job, state: RunState, prompts: Sequence[Prompt]
) -> tuple[list[Rollout], list[Future[Score]]] | None:
    """Sample and submit a greedy response per prompt, for ReMax (Li et al. 2023); else None."""
    if not ESTIMATORS[job.config.algorithm.adv_estimator].baseline:
        return None
    return sample_rollouts(
        job, prompts, _greedy_sampling(job, state.step), "baseline rollout", "baseline"
    )


def gather_baselines(
    job: Job, submitted: tuple[list[Rollout], list[Future[Score]]] | None
) -> list[Scored] | None:
    """Wait for the scores of greedy baselines; None for estimators without them."""
    return None if submitted is None else gather(job, *submitted, "baseline reward")


def baselines_by_row(
    annotated: AnnotatedBatch, greedy: Sequence[Scored] | None
) -> list[float | None] | None:
    """Return the greedy score of each row's prompt; None without baselines."""
    if greedy is None:
        return None
    return [greedy[group].score.value for group in annotated.group_B.tolist()]


def raise_if_reward_only_raises(job: Job, scored: Sequence[Scored]) -> None:
    """Raise RewardError if the reward has raised an error for every response of the run so far."""
    # A reward that has worked before, in training or validation, is not broken as a whole.
    names = ("reward_mean", "val/reward_mean")
    before = any(line.get(name) is not None for line in job.tracker.history for name in names)
    if before or not all(s.score.failure.startswith("raised ") for s in scored):
        return
    raise RewardError(f"{job.diagnose(scored)} Then start again: {job.resume_command}")


# Mean difference of log-probs, in nats per token, above which vLLM has not the trainer's weights.
# Measured: 0.001 to 0.05 in bfloat16, some tenths with one side in 4 or 8 bits, several nats with
# weights that were lost in sleep or never sent.
MAX_GAP, MAX_GAP_QUANTISED = 0.1, 1.0
CHECKED_STEPS = 2  # later growth has other causes, which health checks report


def check_sampler_weights(job: Job, metrics: Mapping[str, float]) -> None:
    """Raise UserError if the first steps show that vLLM does not have the trainer's weights.

    Updates would be meaningless. Async runs are not checked: their responses are from older
    weights, and their samplers never sleep.
    """
    config, gap = job.config, metrics.get("rollout/logprob_diff")
    # Only after the first publishes of this process, and with equal weights on both sides.
    if gap is None or len(job.published) >= CHECKED_STEPS or config.trainer.async_steps:
        return
    if sampler_name(config) != "vllm":
        return
    kwargs = config.rollout.engine_kwargs.vllm
    in_bits = quantised(config) or kwargs.keys() & {"quantization", "kv_cache_dtype"}
    # The temperature divides the logits and their rounding errors.
    limit = (MAX_GAP_QUANTISED if in_bits else MAX_GAP) / min(1, config.rollout.temperature)
    if gap > limit:
        raise UserError(
            f"vLLM does not sample with the trainer's weights: their log-probs of the same tokens "
            f"differ by {gap:.2g} on average, where rounding explains at most {limit:.2g}. Set "
            "rollout.sleep=offload, then rollout.weight_transfer=memory, then "
            "rollout.enforce_eager=true, or sample without vLLM (--rollout_name hf); "
            f"`{ppo('doctor --self-test')}` tries each way. Start again: {job.resume_command}"
        )


def explain_zero_reward(job: Job, state: RunState, scored: Sequence[Scored]) -> None:
    """Show a diagnosis when the first steps have no score, or only zeros."""
    judged = [s for s in scored if s.score.judged]
    # Without any score, explain it once, in the first such step.
    if not judged:
        text = job.diagnose(scored) if state.unscored_steps == 1 else None
        if text:
            job.tracker.screen.health(text)
        return
    if any(s.score.value for s in judged):
        state.zero_steps = 0
        return
    state.zero_steps += 1
    # After an earlier reward the task is not too hard: health checks report on the policy.
    before = any(line.get("reward_mean") for line in job.tracker.history)
    # Explained twice: at the second step of zeros, and once more if nothing has changed by the
    # 20th.
    if state.zero_steps in (2, 20) and not before:
        text = job.diagnose(judged)
        if text:
            job.tracker.screen.health(text)


def update(job: Job, state: RunState, batch: TrainBatch) -> StepSums:
    """Train critic, then actor, in epochs of mini-batches; returns sums for the metrics."""
    # The critic, unless the estimator works without one.
    sums = StepSums()
    if batch.values_BT is not None:
        update_critic(job, batch, sums, (SHUFFLE, state.step))
    # The actor, after the critic's warm-up.
    if state.step > job.config.trainer.critic_warmup:
        _update_actor(job, state, batch, sums)
    state.count_broken_steps(sums)
    return sums


def update_critic(
    job: Job, batch: TrainBatch, sums: StepSums, key: tuple[int, int], *, pretraining: bool = False
) -> None:
    """Train the critic in epochs of mini-batches; `key` is the random stream and the step."""
    config = job.config
    size, epochs = critic_mini_batch(config), config.critic.ppo_epochs
    with job.tracker.phase("update critic", epochs) as advance:
        for epoch in range(epochs):
            for rows in _mini_batches(config, key, epoch, size, batch, "critic"):
                part = batch.rows(rows)
                sums.add(job.engine.step(MiniBatch(part, False, True, pretraining)))
            advance(1)


def _update_actor(job: Job, state: RunState, batch: TrainBatch, sums: StepSums) -> None:
    """Train the actor in epochs of mini-batches, until target_kl stops it."""
    settings = job.config.actor
    size = settings.ppo_mini_batch_size
    with job.tracker.phase("update actor", settings.ppo_epochs) as advance:
        for epoch in range(settings.ppo_epochs):
            key = SHUFFLE, state.step
            for rows in _mini_batches(job.config, key, epoch, size, batch, "actor"):
                step = job.engine.step(MiniBatch(batch.rows(rows), actor=True, critic=False))
                sums.add(step)
                # Early stopping: 1.5 times the target, as in OpenAI's Spinning Up.
                moved, tokens = step.get("actor/approx_kl", (0.0, 1.0))
                if settings.target_kl is not None and moved / tokens > 1.5 * settings.target_kl:
                    sums.add({"actor/stopped_early": (1.0, 1.0)})
                    return
            advance(1)


def _mini_batches(
    config: Config, key: tuple[int, int], epoch: int, prompts: int, batch: TrainBatch, role: str
) -> Iterator[Tensor]:
    """Yield row indices of mini-batches of `prompts` times rollout.n rows; the last may be less.

    Single rows are shuffled if the settings of `role`, actor or critic, say so; `key` is the random
    stream and the step.
    """
    # Actor and critic have their own orders, each derived from the run's seed.
    settings = config.actor if role == "actor" else config.critic
    order = np.arange(len(batch))
    if settings.shuffle:
        seed = stream_seed(config.trainer.seed, *key, epoch, int(role == "actor"))
        order = np.random.default_rng(seed).permutation(order)
    size = prompts * config.rollout.n
    for start in range(0, len(order), size):
        yield torch.from_numpy(order[start : start + size])
