"""Whether --tensor_parallel_size divides the heads of models whose config.json lies here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from ppo_cli.config.bundled import model_folder
from ppo_cli.config.clash import Clash
from ppo_cli.config.effective import critic_path, uses_critic, uses_reference
from ppo_cli.config.schema import Config

TENSOR = "trainer.tensor_parallel_size"


def head_clashes(config: Config) -> Iterator[Clash]:
    """Return a clash for each model whose heads cannot be split; hub names are not looked up."""
    size = config.trainer.tensor_parallel_size
    if size == 1 or config.trainer.engine == "local":
        return
    told: set[str] = set()
    for key, path in _models(config):
        heads = {} if path in told else _heads(path)
        told.add(path)
        wrong = next(((what, count) for what, count in heads.items() if count % size), None)
        if wrong is not None:
            what, count = wrong
            yield Clash(
                (TENSOR, key),
                f"{TENSOR} {size} does not divide the {count} {what} of {path}; use "
                f"--tensor_parallel_size {_dividing(math.gcd(*heads.values()))}.",
            )


def _models(config: Config) -> Iterator[tuple[str, str]]:
    yield "model.path", config.model.path
    if uses_critic(config):
        yield "critic.model.path", critic_path(config)
    if uses_reference(config) and config.ref.path:
        yield "ref.path", config.ref.path


def _heads(path: str) -> dict[str, int]:
    """Return how many heads a model has; empty where that cannot be read here."""
    try:
        text = (Path(model_folder(path)).expanduser() / "config.json").read_text(encoding="utf-8")
        told = json.loads(text)
        attention = told["num_attention_heads"]
        both = {
            "attention heads": attention,
            "key-value heads": told.get("num_key_value_heads") or attention,
        }
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError):
        return {}
    return both if all(type(n) is int and n > 0 for n in both.values()) else {}


def _dividing(count: int) -> str:
    """Write the sizes that divide a number of heads: `1, 2 or 4`."""
    sizes = [str(n) for n in range(1, min(count, 1024) + 1) if count % n == 0]
    return " or ".join(part for part in (", ".join(sizes[:-1]), sizes[-1]) if part)
