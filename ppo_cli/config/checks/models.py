"""Checks of the models of a run: attention heads, and folders as far as their files tell."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ppo_cli.config.derived import critic_path, uses_critic, uses_reference
from ppo_cli.config.mixture import judges_of, models_of
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import folder_problem, has_template, read_config
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.models.limits import (
    attention_problem,
    column_problem,
    encoder_problem,
    length_problem,
)
from ppo_cli.config.models.weight_files import read_json
from ppo_cli.config.placement import sampler_name
from ppo_cli.config.schema.keys import Clash, table
from ppo_cli.config.schema.run import Config
from ppo_cli.digests import require_intact_model
from ppo_cli.errors import ModelError, collect_problems, command_line, replace_flag, replace_path

TENSOR = "trainer.tensor_parallel_size"


def check_heads(config: Config) -> Iterator[Clash]:
    """Yield a clash for each model whose heads cannot be split; hub names are not looked up."""
    size = config.trainer.tensor_parallel_size
    if size == 1 or config.trainer.engine == "local":
        return
    # A model that two roles share is reported once.
    checked_paths: set[str] = set()
    for key, path in _trained_models(config):
        heads = {} if path in checked_paths else _count_heads(path)
        checked_paths.add(path)
        wrong = next(((what, count) for what, count in heads.items() if count % size), None)
        if wrong is not None:
            what, count = wrong
            yield Clash(
                (TENSOR, key),
                f"{TENSOR} {size} does not divide the {count} {what} of {path}; use "
                f"--tensor_parallel_size {_list_divisors(math.gcd(*heads.values()))}.",
            )


def _trained_models(config: Config) -> Iterator[tuple[str, str]]:
    """Yield key and path of each model that this run loads for training."""
    yield "model.path", config.model.path
    if uses_critic(config):
        yield "critic.model.path", critic_path(config)
    if uses_reference(config) and config.ref.path:
        yield "ref.path", config.ref.path


def _count_heads(path: str) -> dict[str, int]:
    """Return the numbers of attention heads of a model; empty when they cannot be read here."""
    try:
        model_config = read_json(Path(model_folder(path)).expanduser() / "config.json")
    except (ModelError, RuntimeError):  # a home that is nobody's
        return {}
    attention = model_config.get("num_attention_heads")
    both: dict[str, Any] = {
        "attention heads": attention,
        "key-value heads": model_config.get("num_key_value_heads") or attention,
    }
    return both if all(type(n) is int and n > 0 for n in both.values()) else {}


def _list_divisors(count: int) -> str:
    """Return the sizes that divide a number of heads, in words: `1, 2 or 4`."""
    sizes = [str(n) for n in range(1, min(count, 1024) + 1) if count % n == 0]
    return " or ".join(part for part in (", ".join(sizes[:-1]), sizes[-1]) if part)


def broken_models(config: Config) -> list[str]:
    """Return a sentence for each model of the run whose files show that it cannot be trained."""
    problems = []
    # Each folder once, under the first key that names it.
    for path, key in {path: key for key, path in reversed([*_trained_models(config)])}.items():
        folder, flag = Path(model_folder(path)).expanduser(), table()[key].flag or key
        written = read_config(path)
        # An encoder cannot generate: nothing else about it matters.
        if problem := encoder_problem(written, path, flag):
            problems.append(problem)
            continue
        if (folder / "config.json").is_file():
            tokenizer, head = path == config.model.path, key != "critic.model.path"
            problems.append(folder_problem(folder, flag, tokenizer=tokenizer, head=head))
        problems.append(attention_problem(written, path, config.model.attn_implementation))
        problems.append(length_problem(written, path, config.data))
        if path == config.model.path and sampler_name(config) == "hf":
            problems.append(column_problem(written, path, config.data))
    return [problem for problem in problems if problem]


def damaged_models(config: Config) -> list[str]:
    """Return a sentence for each model from a checkpoint whose files changed since it was saved."""
    flags = {path: table()[key].flag or key for key, path in reversed([*_trained_models(config)])}
    # Reward models and local judges are loaded from checkpoints as well.
    rewards = [model.settings.path for model in models_of(config.reward)]
    rewards += [j.settings.model for j in judges_of(config.reward) if j.settings.type == "local"]
    paths = dict.fromkeys([*flags, *(str(path) for path in rewards if path)])
    folders = {path: Path(model_folder(path)).expanduser() for path in paths if not is_url(path)}

    def retry(path: str, other: Path) -> str:
        line = replace_path(path, str(other))
        if line or path not in flags:
            return line
        return replace_flag(command_line(), flags[path], shlex.quote(str(other)))

    # Advice for each: the same command with an intact checkpoint.
    checks = (partial(require_intact_model, folder, partial(retry, path))
              for path, folder in folders.items())  # fmt: skip
    return list(collect_problems(checks))


def template_remarks(config: Config) -> list[str]:
    """Remark that prompts of a local model are used without a chat template."""
    folder = Path(model_folder(config.model.path)).expanduser()
    if not config.data.apply_chat_template or not (folder / "config.json").is_file():
        return []
    if has_template(folder):
        return []
    return [
        f"The tokenizer in {config.model.path} has no chat template: prompts are used as plain "
        "text, and prompts that are lists of messages are refused."
    ]
