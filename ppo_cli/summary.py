"""What a finished run came to: read off its history, for the last words on the screen."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_cli.config.schema import Config
from ppo_cli.step_metrics import mixture_parts
from ppo_cli.tracker import Summary


def summarise(
    history: Sequence[Mapping[str, Any]], run_dir: Path, config: Config, seconds: float
) -> Summary:
    """Compare the first and the last steps of a run; `seconds` is the wall time of training."""
    rewards = tuple(float(line["reward_mean"]) for line in history if _has(line, "reward_mean"))
    few = max(1, len(rewards) // 10)
    validations = [line for line in history if _has(line, "val/reward_mean")]
    model_dir = run_dir / "checkpoints" / "latest" / "actor"
    steps = int(history[-1]["step"]) if history else 0
    return Summary(
        steps=steps,
        reward_before=_mean(rewards[:few]),
        reward_after=_mean(rewards[-few:]),
        rewards=rewards,
        model_dir=model_dir if model_dir.exists() else None,
        run_dir=run_dir,
        wall_seconds=seconds,
        val_before=_validation(validations[:1]),
        val_after=_validation(validations[-1:]),
        next_steps=_next_steps(config, run_dir, steps),
    )


def _has(line: Mapping[str, Any], name: str) -> bool:
    return line.get(name) is not None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _validation(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in lines:
        # Of right-or-wrong scores the mean is the accuracy: one name is enough.
        name = "accuracy" if _has(line, "val/accuracy") else "reward_mean"
        found[f"validation {name}"] = float(line[f"val/{name}"])
        found |= {f"validation {n}": v for n, v in mixture_parts(line, "val/").items()}
    return found


def _next_steps(config: Config, run_dir: Path, done: int) -> tuple[str, ...]:
    """Commands that a user may want now."""
    shown = shlex.quote(str(run_dir))
    steps = [f"ppo show {shown} --worst 5    the responses with the lowest scores"]
    if config.model.path == "embedded":
        steps.append(
            "./train.sh --model PATH_OR_HUB_NAME --train_files YOUR.jsonl    your model, your data"
        )
        steps.append("./train.sh --reward_function FILE.py    your own reward")
    else:
        steps.append(f"the same command with --max_steps {2 * done}    go on from here")
    best = run_dir / "checkpoints" / "best"
    if best.exists() and best.resolve() != (run_dir / "checkpoints" / "latest").resolve():
        steps.append(f"{best / 'actor'}    the best validated model, not the last")
    return tuple(steps)
