"""Values that follow from several settings: fallbacks of unset ones, row counts, precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.models.bundled import prompt_files
from ppo_cli.config.models.folder import EXPERT_KEYS, read_config
from ppo_cli.config.models.weight_files import text_config
from ppo_cli.config.placement import engine_name, gpus_per_node, learner_ranks
from ppo_cli.config.schema.algorithm import DEFAULT_PRETRAIN_STEPS
from ppo_cli.config.schema.run import Config
from ppo_cli.data_sets.files import count_rows
from ppo_cli.errors import plural
from ppo_cli.machine.device_record import is_proven
from ppo_cli.machine.gpus import has_bfloat16, list_gpus
from ppo_cli.machine.processor import has_fast_bfloat16

DataSplit = Literal["train", "val"]


def critic_mini_batch(config: Config) -> int:
    """Return the prompts in a critic mini-batch: the actor's unless set."""
    mini_batch = config.critic.ppo_mini_batch_size
    return config.actor.ppo_mini_batch_size if mini_batch is None else mini_batch


def critic_path(config: Config) -> str:
    """Return the critic's backbone: the actor's model unless set."""
    return config.critic.model.path or config.model.path


def uses_critic(config: Config) -> bool:
    """Return whether a critic is trained: only for an estimator that reads values."""
    return ESTIMATORS[config.algorithm.adv_estimator].critic


def pretrain_steps(config: Config) -> int:
    """Return how many steps pretrain the critic at most; 0 for none."""
    default = 0 if config.critic.pretrain_until is None else DEFAULT_PRETRAIN_STEPS
    return (config.critic.pretrain_steps or default) if uses_critic(config) else 0


def uses_reference(config: Config) -> bool:
    """Return whether a reference policy is needed, for the reward or for the loss."""
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss


def sampler_seed(config: Config) -> int:
    """Return the sampler's seed: the run's unless set."""
    return config.trainer.seed if config.rollout.seed is None else config.rollout.seed


def rollout_is(config: Config) -> Literal["token", "sequence"] | None:
    """Return the level of the importance weights; with stale responses, token unless it is set."""
    set_level = config.algorithm.rollout_correction.rollout_is
    return "token" if set_level is None and config.trainer.async_steps else set_level


# Level of the sum, and estimator of the divergence (algo/losses.py).
REJECTIONS: Final = (
    *(f"{level}_k{k}" for level in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)


def rejections(config: Config) -> list[tuple[str, float | None, float]]:
    """Return name, lowest and highest value of each rejection; ValueError says what is wrong.

    Names and limits are two comma-separated lists: `token_k1,seq_mean_k3` and `0.5_2.0,0.1`. A k1
    rejection bounds a ratio from both sides, others have a highest value.
    """
    # Two lists in one text each, as verl writes them.
    settings, key = config.algorithm.rollout_correction, "algorithm.rollout_correction.rollout_rs"
    names = [word.strip() for word in (settings.rollout_rs or "").split(",") if word.strip()]
    limits = [w.strip() for w in (settings.rollout_rs_threshold or "").split(",") if w.strip()]
    if unknown := [name for name in names if name not in REJECTIONS]:
        raise ValueError(f"{key}: '{unknown[0]}' is not one of {', '.join(REJECTIONS)}.")
    if bool(names) != bool(limits):
        raise ValueError(f"{key} and {key}_threshold belong together; set both, or none.")
    # One limit for all names, or one for each.
    limits = limits * len(names) if len(limits) == 1 else limits
    if len(limits) != len(names):
        raise ValueError(f"{key}_threshold has {len(limits)} values for {len(names)} of {key}.")
    # Read each limit in the form that its name allows, and refuse the others with an example.
    limits_of: list[tuple[str, float | None, float]] = []
    for name, limit in zip(names, limits, strict=True):
        try:
            numbers = [float(word) for word in limit.split("_")]
        except ValueError:
            numbers = []
        # A pair of limits is for ratios (k1); one ratio r means 1/r to r.
        two = len(numbers) == 2 and name.endswith("k1") and numbers[0] <= numbers[1]
        if not (two or len(numbers) == 1) or min(numbers) <= 0:
            form = "0.5_2.0 or 2.0" if name.endswith("k1") else "one number, such as 0.1"
            raise ValueError(f"{key}_threshold: '{limit}' is not a limit of {name}; write {form}.")
        low = numbers[0] if two else 1 / numbers[0] if name.endswith("k1") else None
        if low is not None and low > numbers[-1]:
            raise ValueError(f"{key}_threshold: {limit} must be 1 or more; or write 0.5_2.0.")
        limits_of.append((name, low, numbers[-1]))
    return limits_of


def quantised(config: Config) -> list[str]:
    """Return the settings that hold a model's frozen weights in 4 bits."""
    bits_of = {
        "model.quantization": config.model.quantization,
        "critic.model.quantization": uses_critic(config) and config.critic.model.quantization,
    }
    return [key for key, bits in bits_of.items() if bits]


def shares_prompts(config: Config, *, on_gpu: bool) -> bool:
    """Return whether packed rows compute a shared prompt once; on GPUs only once it is proven."""
    unset = not on_gpu or is_proven("shared_prompts")
    return unset if config.model.share_prompts is None else config.model.share_prompts


def is_profiled(config: Config, step: int) -> bool:
    """Return whether `trainer.profile_steps` contains a training step."""
    spans = (word.partition("-") for word in config.trainer.profile_steps)
    return any(int(first) <= step <= int(last or first) for first, _, last in spans)


def loads_reference_once(config: Config) -> bool:
    """Return whether a reference in host memory stays on the device for all of a step."""
    return config.ref.param_offload and not config.actor.fsdp_config.param_offload


def micro_batch_tokens(config: Config, configured: int | None) -> int:
    """Return the token budget of a micro-batch: as configured, else what keeps a device busy.

    On the CPU, small batches are as fast and need less memory for activations (notes/lab_book.md),
    unless weights are gathered for each micro-batch.
    """
    if configured is not None:
        # With several ranks, each micro-batch gathers the weights, so a larger one costs less time.
        return configured
    gathered_once = learner_ranks(config) == 1 or config.actor.fsdp_config.stays_whole
    return 2048 if gathered_once and not gpus_per_node(config) else 16384


def train_rows(config: Config) -> int | None:
    """Return the number of training rows; None when a file cannot be counted."""
    return _count_rows(*split_files(config, "train"))


def val_rows(config: Config) -> int | None:
    """Return the number of validation rows; None when a file cannot be counted."""
    return _count_rows(*split_files(config, "val"))


def split_files(config: Config, split: DataSplit) -> tuple[tuple[str, ...], int]:
    """Return the files of a split, and how many of their rows are used at most; -1 is all."""
    data = config.data
    if split == "train":
        return prompt_files(data.train_files, split), data.train_max_samples
    return prompt_files(data.val_files, split), data.val_max_samples


def gen_batch(config: Config) -> int:
    """Return the prompts sampled at once: the batch, unless dynamic sampling sets more."""
    return config.data.gen_batch_size or config.data.train_batch_size


def most_gen_batches(config: Config, rows: int) -> int:
    """Return how many batches a step may sample; more than 1 only with dynamic sampling."""
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return 1
    return groups.max_num_gen_batches or math.ceil(rows / gen_batch(config))


def describe_missing_rows(config: Config, rows: int) -> str | None:
    """Return why the rows cannot fill a batch; None when they can."""
    batch, at_once = config.data.train_batch_size, gen_batch(config)
    # A batch, or the larger batch of dynamic sampling.
    if rows < batch:
        batch_fits, mini_fits = fit_batches(rows, batch, config.actor.ppo_mini_batch_size)
        return (
            f"{rows} prompts cannot fill a batch of {batch}. Use --batch_size {batch_fits} "
            f"--mini_batch_size {mini_fits}, or give more prompts."
        )
    if rows < at_once:
        return (
            f"{rows} prompts cannot fill data.gen_batch_size {at_once}. Use "
            f"data.gen_batch_size={rows} or less, or give more prompts."
        )
    return None


def fit_batches(rows: int, batch: int, mini: int) -> tuple[int, int]:
    """Return batch and mini-batch for few rows; the number of mini-batches stays if possible."""
    # Keep the number of mini-batches where there is at least one row for each.
    smaller = max(1, rows // (parts := max(1, batch // mini)))
    return (min(rows, smaller * parts), smaller) if rows >= parts else (rows, 1)


def describe_lowered_batches(rows: int, batch: int, mini: int) -> str:
    """Return the note that both batch sizes are lowered to the number of training rows."""
    batch_fits, mini_fits = fit_batches(rows, batch, mini)
    verb = "is" if rows == 1 else "are"
    return (
        f"There {verb} {plural(rows, 'training row')}: --batch_size is lowered to {batch_fits} and "
        f"--mini_batch_size to {mini_fits}."
    )


def _count_rows(names: Sequence[str], max_rows: int) -> int | None:
    """Return the rows of these files, `max_rows` at most (-1: all); None if unknown."""
    counts = [count_rows(name) for name in names]
    if not counts or None in counts:
        return None
    total = sum(count for count in counts if count is not None)
    return total if max_rows < 0 else min(total, max_rows)


# Hidden size of the smallest model that was measured to train faster in bfloat16 on a CPU.
MIN_BFLOAT16_WIDTH: Final = 320


def compute_dtype(config: Config, gpus: int | None = None) -> Literal["float32", "bfloat16"]:
    """Return the precision of matrix products: as set, else the faster one.

    That is bfloat16 on a GPU that has it, and in one process on a processor with AVX512-BF16 or AMX
    for a model that is wide enough (notes/lab_book.md).
    """
    if config.model.dtype is not None:
        return config.model.dtype
    if per_node := gpus_per_node(config, gpus):
        return "bfloat16" if has_bfloat16(list_gpus()[:per_node]) else "float32"
    # On the CPU: one process, whole weights, a processor with bfloat16 units.
    if engine_name(config, gpus) != "local" or config.model.quantization or not has_fast_bfloat16():
        return "float32"
    text = text_config(read_config(config.model.path))
    width = text.get("hidden_size") or text.get("n_embd")
    return "bfloat16" if isinstance(width, int) and width >= MIN_BFLOAT16_WIDTH else "float32"


def spreads_weights(config: Config, device: str) -> bool:
    """Return whether noise below bfloat16's precision is added to trained weights.

    By default only on the CPU: on GPUs it was not measured, and other trainers do not do it.
    """
    configured = config.model.spread_weights
    return device == "cpu" if configured is None else configured


def why_recompute_logprobs(config: Config, gpus: int | None = None) -> str:
    """Return why the actor computes old log-probs again; "" when the sampler's are used.

    They are equal up to rounding when the sampler uses the actor's weights in float32. Only
    `bypass_mode` uses them in bfloat16, with 4-bit weights or with experts: there rounding differs
    more, and may send a token to another expert.
    """
    algorithm, bypass = config.algorithm, config.algorithm.rollout_correction.bypass_mode
    # The configured choice, then what makes them unusable, then what makes them inexact.
    if bypass is False:
        return "as set"
    if engine_name(config, gpus) != "local":
        return "the sampler has separate weights"
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
        return "the full KL needs the actor's whole vocabulary"
    if rollout_is(config) or algorithm.rollout_correction.rollout_rs:
        return "rollout_is and rollout_rs compare them with the sampler's"
    if bypass:
        return ""
    if compute_dtype(config, gpus) == "bfloat16":
        return "in bfloat16 sampler and trainer round differently"
    if config.model.quantization:
        return "with 4-bit weights sampler and trainer round differently"
    text = text_config(read_config(config.model.path))
    if any(text.get(name) for name in EXPERT_KEYS):
        return "rounding may send a token to another expert"
    return ""
