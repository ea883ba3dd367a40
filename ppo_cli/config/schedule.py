"""Learning rates over a run, and how they change when a run gets more steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ppo_cli.config.schema.algorithm import Optim

LEAST_CHANGE = 1e-6  # relative; metrics.jsonl holds rates as they were computed


def lr_factor(step: int, total_steps: int, optim: Optim) -> float:
    """Return the share of the peak learning rate in training step `step` (from 0).

    A linear warm-up that starts above zero, then constant, or a half cosine or a line down to
    `min_lr_ratio` after the last step.
    """
    # Warm-up in steps, or -1 for a share of the run.
    warmup = optim.lr_warmup_steps
    if warmup < 0:
        warmup = math.ceil(optim.lr_warmup_steps_ratio * total_steps)
    # The first step already trains.
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if optim.lr_scheduler_type == "constant":
        return 1.0
    # From 1 to 0 over the steps after the warm-up, scaled to end at the minimum.
    share = 1 - min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if optim.lr_scheduler_type == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * (1 - share)))
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share


def describe_lr_jumps(
    actor: Optim, critic: Optim, last_line: Mapping[str, Any], total_steps: int
) -> Iterator[str]:
    """Yield a sentence for each model whose learning rate jumps after the step of `last_line`.

    `last_line` is a line of metrics.jsonl. A rate jumps when the schedule over `total_steps` is not
    the one that set the rate of that step.
    """
    step = int(last_line["step"])
    for name, optim in (("actor", actor), ("critic", critic)):
        rate = last_line.get(f"{name}/lr")
        # The rates of the last step and of the next one by the schedule that is to be used now.
        before, after = (optim.lr * lr_factor(i, total_steps, optim) for i in (step - 1, step))
        if rate is None or step >= total_steps:
            continue
        rates = f"{rate:.2g}", f"{after:.2g}"
        # The last rate does not follow from this schedule, and the change is visible.
        if not math.isclose(rate, before, rel_tol=LEAST_CHANGE) and rates[0] != rates[1]:
            verb = "rises" if after > rate else "falls"
            yield (
                f"the {name}'s learning rate {verb} from {rates[0]} at step {step} to {rates[1]} "
                f"at step {step + 1}, as its schedule is {optim.lr_scheduler_type} with at most "
                f"{optim.lr:.2g}, over {total_steps} steps"
            )
