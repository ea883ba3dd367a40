"""The parts of a run, its state between steps, and the parts of a step.

A step is rollouts, which the reward scores as each finishes, and updates; also the greedy baselines
of ReMax, and what is said when a reward raises or is always zero. The state is written into each
checkpoint and restored from it.
"""

from __future__ import annotations

import json
import shlex
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
from ppo_cli.digests import MANIFEST
from ppo_cli.engine.base import Engine, MiniBatch, Sampling
from ppo_cli.errors import Interrupted, ModelError, RewardError, UserError, ppo, replace_flag
from ppo_cli.moments import Moments
from ppo_cli.records import Prompt, Rollout, Score, Scored
from ppo_cli.report.metrics import StepSums
from ppo_cli.report.tracker import Tracker
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.run_folder import CheckpointStore
from ppo_cli.step.shaping import penalties_of
from ppo_cli.thoughts import Detokenize

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
    decode: Detokenize
    diagnose: Callable[[Sequence[Scored]], str | None]
    stop_requested: Callable[[], str | None]
    resume_command: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    in_flight: list[Future[Score]] = field(default_factory=list)  # of the round under way
    published: list[int] = field(default_factory=list)  # steps, of this process


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

    def refuse_broken_steps(self, most: int, resume_command: str, newest: Path | None) -> None:
        """Stop the run when gradients were not finite for `most` steps in a row.

        With settings that may be other ones, only a checkpoint by name goes on: the `newest`.
        """
        if self.broken_steps >= most:
            raise UserError(
                f"Gradients were not finite in {most} steps in a row (the last is step "
                f"{self.step}); those updates were left out. Lower --lr and --critic_lr, set "
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


def train_sampling(config: Config, step: int, turn: int = 0) -> Sampling:
    """How the rollouts of a training step are sampled; `turn` counts its batches of prompts."""
    r, again = config.rollout, (turn,) if turn else ()
    return Sampling(
        temperature=r.temperature,
        top_p=r.top_p,
        top_k=r.top_k,
        n=r.n,
        max_tokens=config.data.max_response_length,
        seed=stream_seed(sampler_seed(config), TRAIN, step, *again),
        stop=r.stop,
    )


Sampled = tuple[list[Prompt], list[Rollout], list[Future[Score]], dict[str, float]]


def sample_step(job: Job, step: int) -> Sampled:
    """Sample the batch of a step: prompts, responses, their scores to come, and metrics.

    With algorithm.filter_groups this is dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476,
    section 3.2): prompts whose responses all measure alike teach nothing and are left out, and
    further prompts are sampled until the batch is full. Raises Interrupted where the most
    batches did not fill it.
    """
    config = job.config
    groups, wanted, n = (
        config.algorithm.filter_groups,
        config.data.train_batch_size,
        config.rollout.n,
    )
    if not groups.enable:
        prompts = [job.prompts[i] for i in job.order.take()]
        return (
            prompts,
            *roll_out(job, prompts, train_sampling(config, step), "rollout", "train"),
            {},
        )
    kept: dict[str, Prompt] = {}
    rollouts: list[Rollout] = []
    futures: list[Future[Score]] = []
    most, sampled, alike, unscored = most_gen_batches(config, len(job.prompts)), 0, 0, 0
    for turn in range(most):
        prompts = [p for i in job.order.take() if (p := job.prompts[i]).uid not in kept]
        more, asked = roll_out(job, prompts, train_sampling(config, step, turn), "rollout", "train")
        scored = gather(job, more, asked, "reward_wait")
        refuse_raising(job, scored)
        sampled += len(prompts)
        for g, prompt in enumerate(prompts):
            at = slice(g * n, (g + 1) * n)
            unscored += not any(s.score.judged for s in scored[at])
            differs = _differs(config, scored[at])
            alike += not differs
            if differs and len(kept) < wanted:
                kept[prompt.uid] = prompt
                rollouts += more[at]
                futures += asked[at]
        if len(kept) == wanted:
            found = {"filter/gen_batches": turn + 1.0, "filter/alike_share": alike / sampled}
            return list(kept.values()), rollouts, futures, found
    raise Interrupted(
        f"Dynamic sampling found {len(kept)} of the {wanted} prompts of a batch in {most} batches "
        f"({sampled} prompts, {unscored} of them without any score): the responses to all others "
        "score alike. Raise algorithm.filter_groups.max_num_gen_batches or --rollout_n, take "
        "prompts that are neither too easy nor too hard, or set "
        "algorithm.filter_groups.enable=false."
    )


def _differs(config: Config, group: Sequence[Scored]) -> bool:
    """Whether the responses to a prompt differ in what algorithm.filter_groups.metric names.

    Scores that were put in for want of a verdict tell nothing of it, nor does a part that was not
    asked.
    """
    found = {_measure(config, one) for one in group if one.score.judged}
    return len(found - {None}) > 1


def _measure(config: Config, one: Scored) -> float | None:
    name = config.algorithm.filter_groups.metric
    if name in (None, "score") or (name == "acc" and name not in one.score.parts):
        return one.score.value
    if name in ("seq_reward", "seq_final_reward"):
        longest = config.data.max_response_length
        taken = penalties_of(config.reward.shaping, one.rollout, longest).values()
        return (one.score.value or 0.0) + sum(taken)
    if name not in one.score.parts:
        raise RewardError(
            f"algorithm.filter_groups.metric names '{name}', but a score has no such part; there "
            f"are {', '.join(['score', 'seq_reward', *one.score.parts])}."
        )
    return one.score.parts[name].raw


def roll_out(
    job: Job, prompts: Sequence[Prompt], sampling: Sampling, phase: str, kind: RoundKind
) -> tuple[list[Rollout], list[Future[Score]]]:
    """Sample responses, each submitted to the reward as it finishes; in prompt order."""
    place = {prompt.uid: i for i, prompt in enumerate(prompts)}
    pairs: list[tuple[Rollout, Future[Score]]] = []
    job.in_flight[:] = [future for future in job.in_flight if not future.done()]
    with job.tracker.phase(phase, len(prompts) * sampling.n) as advance:
        for rollout in job.engine.generate(prompts, sampling):
            pairs.append((rollout, job.reward.submit(rollout)))
            job.in_flight.append(pairs[-1][1])
            advance(1)
    job.reward.end_round(kind)
    pairs.sort(key=lambda pair: (place[pair[0].prompt.uid], pair[0].sample))
    return [rollout for rollout, _ in pairs], [future for _, future in pairs]


def gather(
    job: Job, rollouts: Sequence[Rollout], futures: Sequence[Future[Score]], phase: str
) -> list[Scored]:
    """Wait for the scores that are still missing."""
    scored: list[Scored] = []
    with job.tracker.phase(phase, len(futures)) as advance:
        for rollout, future in zip(rollouts, futures, strict=True):
            scored.append(Scored(rollout, _wait(job, future)))
            advance(1)
    return scored


def _wait(job: Job, future: Future[Score]) -> Score:
    """Wait for one score; while a reward stands still, say why, and let the user stop."""
    noted = False
    while not future.done():
        wait([future], timeout=0.5)
        still = None if future.done() else job.reward.waiting_for()
        if still is not None and job.stop_requested():
            raise Interrupted(f"Stopped while waiting ({job.stop_requested()}). {still}")
        if still is not None and not noted:
            job.tracker.screen.health(still)
            noted = True
    return future.result()


def sample_first(job: Job) -> None:
    """Sample what the reward wants of the starting model: a greedy response to each prompt."""
    wanted = job.reward.prompts_for_reference(job.prompts)
    if not wanted:
        return
    size, found = gen_batch(job.config) * job.config.rollout.n, list[Rollout]()
    with job.tracker.phase("first responses", len(wanted)) as advance:
        for start in range(0, len(wanted), size):
            for rollout in job.engine.generate(wanted[start : start + size], _greedy(job, 0)):
                found.append(rollout)
                advance(1)
    job.reward.set_references(found)


def _greedy(job: Job, step: int) -> Sampling:
    return Sampling(
        temperature=0.0,
        max_tokens=job.config.data.max_response_length,
        seed=stream_seed(job.config.trainer.seed, BASELINE, step),
        stop=job.config.rollout.stop,
    )


def submit_baselines(
    job: Job, state: RunState, prompts: Sequence[Prompt]
) -> tuple[list[Rollout], list[Future[Score]]] | None:
    """ReMax (Li et al. 2023) subtracts the reward of the greedy response to each prompt."""
    if not ESTIMATORS[job.config.algorithm.adv_estimator].baseline:
        return None
    return roll_out(job, prompts, _greedy(job, state.step), "baseline rollout", "baseline")


def baselines_of_rows(
    annotated: AnnotatedBatch, greedy: Sequence[Scored] | None
) -> list[float | None] | None:
    """The greedy score of each row's prompt."""
    if greedy is None:
        return None
    return [greedy[group].score.value for group in annotated.group_B.tolist()]


def refuse_raising(job: Job, scored: Sequence[Scored]) -> None:
    """Raise RewardError when a reward has raised an error for every response so far."""
    names = ("reward_mean", "val/reward_mean")
    before = any(line.get(name) is not None for line in job.tracker.history for name in names)
    if before or not all(s.score.failure.startswith("raised ") for s in scored):
        return
    raise RewardError(f"{job.diagnose(scored)} Then start again: {job.resume_command}")


# Mean gap, in nats a token, above which vLLM samples with weights that are not the trainer's. In
# bfloat16 it is 0.001 to 0.05, with one side in 4 or 8 bits up to some tenths; weights that were
# lost on waking, or never came, give several nats.
FOREIGN_GAP, FOREIGN_GAP_QUANTISED = 0.1, 1.0
CHECKED_PUBLISHES = 2  # a gap that grows later has other causes: the health checks report on it


def refuse_foreign_weights(job: Job, metrics: Mapping[str, float]) -> None:
    """Raise UserError when the first steps show that vLLM lacks the trainer's weights.

    An update would be made of nonsense. Responses that were sampled ahead are of older weights, and
    their samplers never sleep.
    """
    config, gap = job.config, metrics.get("rollout/logprob_diff")
    if gap is None or len(job.published) >= CHECKED_PUBLISHES or config.trainer.async_steps:
        return
    if sampler_name(config) != "vllm":
        return
    kwargs = config.rollout.engine_kwargs.vllm
    in_bits = quantised(config) or kwargs.keys() & {"quantization", "kv_cache_dtype"}
    # The temperature divides the logits, and with them their rounding.
    limit = (FOREIGN_GAP_QUANTISED if in_bits else FOREIGN_GAP) / min(1, config.rollout.temperature)
    if gap > limit:
        raise UserError(
            f"vLLM does not sample with the trainer's weights: their log-probs of the same tokens "
            f"differ by {gap:.2g} on average, where rounding explains {limit:.2g} at most. Set "
            "rollout.sleep=offload, then rollout.weight_transfer=memory, then "
            "rollout.enforce_eager=true, or sample without vLLM (--rollout_name hf); "
            f"`{ppo('doctor --self-test')}` tries each way. Start again: {job.resume_command}"
        )


def explain_zero_reward(job: Job, state: RunState, scored: Sequence[Scored]) -> None:
    """Say why, once, when the first steps have brought no reward at all."""
    judged = [s for s in scored if s.score.judged]
    if not judged:
        text = job.diagnose(scored) if state.unscored_steps == 1 else None
        if text:
            job.tracker.screen.health(text)
        return
    if any(s.score.value for s in judged):
        state.zero_steps = 0
        return
    state.zero_steps += 1
    # A task that was rewarded before is not too hard: the health checks report on the policy.
    before = any(line.get("reward_mean") for line in job.tracker.history)
    if state.zero_steps in (2, 20) and not before:
        text = job.diagnose(judged)
        if text:
            job.tracker.screen.health(text)


def update(job: Job, state: RunState, batch: TrainBatch) -> StepSums:
    """Epochs of mini-batches: the critic first, then the actor, which may stop early on KL."""
    config, sums = job.config, StepSums()
    if batch.values_BT is not None:
        size = critic_mini_batch(config)
        with job.tracker.phase("update critic", config.critic.ppo_epochs) as advance:
            for epoch in range(config.critic.ppo_epochs):
                for rows in _mini_batches(config, state.step, epoch, size, batch, "critic"):
                    sums.add(job.engine.step(MiniBatch(batch.rows(rows), actor=False, critic=True)))
                advance(1)
    if state.step > config.trainer.critic_warmup:
        _update_actor(job, state, batch, sums)
    state.count_broken_steps(sums)
    return sums


def _update_actor(job: Job, state: RunState, batch: TrainBatch, sums: StepSums) -> None:
    settings = job.config.actor
    size = settings.ppo_mini_batch_size
    with job.tracker.phase("update actor", settings.ppo_epochs) as advance:
        for epoch in range(settings.ppo_epochs):
            for rows in _mini_batches(job.config, state.step, epoch, size, batch, "actor"):
                step = job.engine.step(MiniBatch(batch.rows(rows), actor=True, critic=False))
                sums.add(step)
                moved, tokens = step.get("actor/approx_kl", (0.0, 1.0))
                if settings.target_kl is not None and moved / tokens > 1.5 * settings.target_kl:
                    sums.add({"actor/stopped_early": (1.0, 1.0)})
                    return
            advance(1)


def _mini_batches(
    config: Config, step: int, epoch: int, prompts: int, batch: TrainBatch, role: str
) -> Iterator[Tensor]:
    """Row indices of each mini-batch; `prompts` times rollout.n rows, the last may be smaller."""
    settings = config.actor if role == "actor" else config.critic
    order = np.arange(len(batch))
    if settings.shuffle:
        seed = stream_seed(config.trainer.seed, SHUFFLE, step, epoch, int(role == "actor"))
        order = np.random.default_rng(seed).permutation(order)
    size = prompts * config.rollout.n
    for start in range(0, len(order), size):
        yield torch.from_numpy(order[start : start + size])
