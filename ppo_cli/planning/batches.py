"""Numbers of rows and batches that follow from the settings and the prompt files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.models.bundled import prompt_files
from ppo_cli.config.schema.algorithm import Actor, Critic, FilterGroups
from ppo_cli.config.schema.run import Config, Data, Trainer
from ppo_cli.data_sets.files import count_rows
from ppo_cli.errors import plural
from ppo_cli.planning.placement import data_ranks

DataSplit = Literal["train", "val"]


def train_rows(data: Data) -> int | None:
    """Return the number of training rows; None when a file cannot be counted."""
    return _count_rows(*split_files(data, "train"))


def val_rows(data: Data) -> int | None:
    """Return the number of validation rows; None when a file cannot be counted."""
    return _count_rows(*split_files(data, "val"))


def split_files(data: Data, split: DataSplit) -> tuple[tuple[str, ...], int]:
    """Return the files of a split, and how many of their rows are used at most; -1 is all."""
    if split == "train":
        return prompt_files(data.train_files, split), data.train_max_samples
    return prompt_files(data.val_files, split), data.val_max_samples


def most_gen_batches(groups: FilterGroups, rows: int, at_once: int) -> int:
    """Return how many batches of `at_once` prompts a step may sample.

    They are more than 1 only with dynamic sampling.
    """
    if not groups.enable:
        return 1
    return groups.max_num_gen_batches or math.ceil(rows / at_once)


def describe_missing_rows(data: Data, mini: int, rows: int) -> str | None:
    """Return why the rows cannot fill a batch of mini-batches of this size; None when they can."""
    batch, at_once = data.train_batch_size, data.gen_batch_size
    # A batch, or the larger batch of dynamic sampling.
    if rows < batch:
        batch_fits, mini_fits = fit_batches(rows, batch, mini)
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


def batch_arithmetic(config: Config, steps: int | None = None) -> dict[str, int | None]:
    """Return counts for a step and for the run of `steps`, unless these follow from the settings.

    None is a count that is unknown before the run.
    """
    batch, n, rows = config.data.train_batch_size, config.rollout.n, train_rows(config.data)
    sums: dict[str, int | None] = {
        "prompts_per_step": batch,
        "responses_per_prompt": n,
        "responses_per_step": batch * n,
        "train_rows": rows,
    }
    # Optimizer steps of each model.
    steps = steps or count_steps(config.data, config.trainer)
    sums["total_steps"] = steps
    sums |= _count_updates("actor", config.actor, batch, n)
    if config.uses_critic:
        sums |= _count_updates("critic", config.critic, batch, n)
    for who in ("actor", "critic"):
        a_step = sums.get(f"{who}_optimizer_steps_per_step")
        if a_step is not None:
            sums[f"{who}_optimizer_steps"] = multiply(a_step, steps)
    calls = _count_reward_calls(config, steps)
    if pretraining_steps := config.pretrain_steps:
        sums["pretraining_steps_at_most"] = pretraining_steps
        sums["reward_calls_pretraining"] = pretraining_steps * batch * n
    # Dynamic sampling may sample several batches for one step.
    groups = config.algorithm.filter_groups
    if groups.enable:
        max_batches = groups.max_num_gen_batches or (
            rows and most_gen_batches(groups, rows, config.data.gen_batch_size)
        )
        sums["gen_batches_per_step_at_most"] = max_batches
        sums["reward_calls_per_step_at_most"] = multiply(
            max_batches, calls["reward_calls_per_step"]
        )
        sums["reward_calls_at_most"] = multiply(sums["reward_calls_per_step_at_most"], steps)
    return sums | calls


def _count_updates(who: str, part: Actor | Critic, batch: int, n: int) -> dict[str, int]:
    """Return mini-batches, epochs and optimizer steps of one model for a step."""
    # Mini-batches are given in prompts, and a model reads responses.
    minis = batch // part.ppo_mini_batch_size
    return {
        f"{who}_mini_batches_per_epoch": minis,
        f"{who}_mini_batch_responses": part.ppo_mini_batch_size * n,
        f"{who}_epochs": part.ppo_epochs,
        f"{who}_optimizer_steps_per_step": minis * part.ppo_epochs,
    }


def count_micro_batches(config: Config) -> dict[str, int]:
    """Return the micro-batches of one rank if every response has the maximum length."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    counts = {}
    parts: dict[str, Actor | Critic] = {"actor": config.actor}
    if config.uses_critic:
        parts["critic"] = config.critic
    for who, part in parts.items():
        # Per rank: its share of the responses, in micro-batches of a fixed size or of a budget.
        rows = part.ppo_mini_batch_size * config.rollout.n
        rank_rows = math.ceil(rows / data_ranks(config))
        fits = part.ppo_micro_batch_size_per_gpu or max(
            1, part.ppo_max_token_len_per_gpu // longest
        )
        counts[f"{who}_micro_batches_at_most"] = math.ceil(rank_rows / fits)
    return counts


def count_steps(data: Data, trainer: Trainer) -> int | None:
    """Return the number of training steps; None while the rows are unknown."""
    # As set, else the whole batches of all epochs.
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    rows = train_rows(data)
    return None if rows is None else trainer.total_epochs * (rows // data.gen_batch_size)


def _count_reward_calls(config: Config, steps: int | None) -> dict[str, int | None]:
    """Return the reward calls of a step, of validation, and of the run."""
    n = config.rollout.n
    a_step = config.data.gen_batch_size * n
    # remax also scores a greedy response to each prompt.
    if ESTIMATORS[config.algorithm.adv_estimator].baseline:
        a_step += config.data.train_batch_size
    # Validation calls.
    rounds = _count_validations(config.trainer, steps) if config.data.val_files else 0
    rows = val_rows(config.data)
    a_round = multiply(config.rollout.val_kwargs.n, rows)
    validation = multiply(a_round, rounds) if rounds != 0 else 0
    training = multiply(a_step, steps)
    total = None
    if training is not None and validation is not None:
        total = training + validation + config.pretrain_steps * config.data.train_batch_size * n
    return {
        "reward_calls_per_step": a_step,
        "validation_rows": rows,
        "validation_rounds": rounds,
        "reward_calls_validation": validation,
        "reward_calls": total,
    }


def _count_validations(trainer: Trainer, steps: int | None) -> int | None:
    """Return how often the run validates: at the start, every test_freq steps, at the end."""
    if steps is None:
        return None
    start = int(trainer.val_before_train)
    freq = trainer.test_freq
    # A last step that test_freq does not divide is validated too.
    return start + (math.ceil(steps / freq) if freq > 0 else freq + 1)


def multiply(a: int | None, b: int | None) -> int | None:
    """Return the product; None if one of them is unknown."""
    return None if a is None or b is None else a * b


def describe_arithmetic(sums: dict[str, int | None]) -> list[str]:
    """Return the counts as sentences, from prompts to optimizer steps."""
    lines = [
        "a step: {prompts_per_step} prompts x {responses_per_prompt} = "
        "{responses_per_step} responses = {reward_calls_per_step} reward calls",
    ]
    if "gen_batches_per_step_at_most" in sums:
        lines.append(
            "dynamic sampling: a step samples 1 to {gen_batches_per_step_at_most} batches of "
            "prompts, so up to {reward_calls_per_step_at_most} reward calls; the run up to "
            "{reward_calls_at_most}"
        )
    for who in ("actor", "critic"):
        if f"{who}_epochs" in sums:
            lines.append(
                f"{who}: {{{who}_mini_batches_per_epoch}} mini-batches of "
                f"{{{who}_mini_batch_responses}} responses x {{{who}_epochs}} epochs = "
                f"{{{who}_optimizer_steps_per_step}} optimizer steps a step, each in at most "
                f"{{{who}_micro_batches_at_most}} micro-batches"
            )
    if "pretraining_steps_at_most" in sums:
        lines.append(
            "critic pretraining: up to {pretraining_steps_at_most} steps before the first one, "
            "{reward_calls_pretraining} reward calls"
        )
    lines.append(
        "the run: {train_rows} training rows, {total_steps} steps, "
        "{actor_optimizer_steps} actor optimizer steps"
    )
    # Reward calls, with those of validation.
    validations = (
        "{reward_calls_validation} of them for {validation_rounds} validations of "
        "{validation_rows} rows"
    )
    none = "none of them for validation (--val_files)"
    lines.append(
        "reward: {reward_calls} calls in all, "
        + (none if sums["validation_rounds"] == 0 else validations)
    )
    # Counts that are unknown before the run say so.
    texts = {k: "unknown" if v is None else f"{v:,}" for k, v in sums.items()}
    return [_singular(line.format(**texts)) for line in lines]


def _singular(line: str) -> str:
    """Write `1 epoch` for `1 epochs`."""
    things = "prompt|response|mini-batch|micro-batch|epoch|step|validation|row|optimizer step"
    return re.sub(rf"(?<![\d,])1 ((?:actor |training )?(?:{things}))(?:es|s)\b", r"1 \1", line)
