"""What the first steps show: a reward that never works, or a sampler without the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppo_cli.errors import RewardError, UserError, ppo
from ppo_cli.records import Scored
from ppo_cli.step.state import Job, RunState

# Mean difference of log-probs, in nats per token, above which vLLM has not the trainer's weights.
# Measured: 0.001 to 0.05 in bfloat16, some tenths with one side in 4 or 8 bits, several nats with
# weights that were lost in sleep or never sent.
MAX_GAP, MAX_GAP_QUANTISED = 0.1, 1.0
CHECKED_STEPS = 2  # later growth has other causes, which health checks report


def check_reward(job: Job, state: RunState, scored: Sequence[Scored]) -> None:
    """Stop the run if the reward only raises; show a diagnosis if it gives nothing to learn."""
    raise_if_reward_only_raises(job, scored)
    state.count_unscored_steps(scored)
    _explain_zero_reward(job, state, scored)


def raise_if_reward_only_raises(job: Job, scored: Sequence[Scored]) -> None:
    """Raise RewardError if the reward has raised an error for every response of the run so far."""
    # A reward that has worked before, in training or validation, is not broken as a whole.
    names = ("reward_mean", "val/reward_mean")
    before = any(line.get(name) is not None for line in job.tracker.history for name in names)
    if before or not all(s.score.failure.startswith("raised ") for s in scored):
        return
    raise RewardError(f"{job.diagnose(scored)} Then start again: {job.resume_command}")


def _explain_zero_reward(job: Job, state: RunState, scored: Sequence[Scored]) -> None:
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


def check_sampler_weights(job: Job, metrics: Mapping[str, float]) -> None:
    """Raise UserError if the first steps show that vLLM does not have the trainer's weights.

    Updates would be meaningless. Async runs are not checked: their responses are from older
    weights, and their samplers never sleep.
    """
    config, gap = job.config, metrics.get("rollout/logprob_diff")
    # Only after the first publishes of this process, and with equal weights on both sides.
    if gap is None or len(job.published) >= CHECKED_STEPS or config.trainer.async_steps:
        return
    if config.rollout.name != "vllm":
        return
    kwargs = config.rollout.engine_kwargs.vllm
    in_bits = config.quantised or kwargs.keys() & {"quantization", "kv_cache_dtype"}
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
