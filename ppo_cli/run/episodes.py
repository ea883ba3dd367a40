"""Starts what a run's episodes need: the environment processes and the chat format of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.weight_files import read_json
from ppo_cli.config.schema.environment import Environment
from ppo_cli.config.schema.run import Config, Data
from ppo_cli.data_sets.files import count_episodes
from ppo_cli.engine.pretrained import load_config, load_tokenizer
from ppo_cli.engine.samplers.text import decode_text, run_end_ids
from ppo_cli.environments.base import Schema
from ppo_cli.environments.chat import Chat
from ppo_cli.environments.pool import EnvironmentPool, check_environment
from ppo_cli.errors import UserError
from ppo_cli.paths import user_path

if TYPE_CHECKING:
    from ppo_cli.environments.episodes import Episodes


def start_episodes(
    config: Config, tokenizer: Any, logs: Path | None, closing: ExitStack
) -> Episodes:
    """Start the environments, which `closing` ends.

    Raises UserError for an environment that does not start, and for a model whose chat template
    cannot render its episodes.
    """
    from ppo_cli.engine.models import read_stop_token_ids
    from ppo_cli.environments.episodes import Episodes

    pool = EnvironmentPool(config.environment, logs)
    closing.callback(pool.close)
    pool.start(opens=_opens_episodes(config.data))
    path = model_folder(config.model.path)
    model_config = load_config(path, "--model", config.model.trust_remote_code)
    end_ids = run_end_ids(read_stop_token_ids(path, model_config, tokenizer), config, tokenizer)
    arguments = config.data.apply_chat_template_kwargs
    chat = _make_chat(config.environment, arguments, tokenizer, pool.tools, end_ids)
    longest = config.data.max_prompt_length
    return Episodes(
        pool, chat, config.environment, longest, partial(decode_text, tokenizer, end_ids=end_ids)
    )


def check_episodes(config: Config) -> None:
    """Raise UserError for what `start_episodes` would refuse, without loading a model."""
    if not config.environment.is_set:
        return
    tools = check_environment(config.environment, opens=_opens_episodes(config.data))
    # A model of the hub is not downloaded for a check.
    folder = user_path(model_folder(config.model.path))
    if folder.is_dir():
        trust = config.model.trust_remote_code
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=trust)
        arguments = config.data.apply_chat_template_kwargs
        end_ids = _read_end_ids(folder, tokenizer)
        _make_chat(config.environment, arguments, tokenizer, tools, end_ids)


def _opens_episodes(data: Data) -> bool:
    """Whether the environment opens episodes, of training or validation, without a row."""
    return any(map(count_episodes, (*data.train_files, *data.val_files)))


def _read_end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response; GenerationConfig, which knows them, imports torch."""
    listed: Any = None
    for name in ("generation_config.json", "config.json"):
        listed = read_json(folder / name).get("eos_token_id") if listed is None else listed
    ids = {*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id}
    return frozenset(ids - {None})


def _make_chat(
    environment: Environment, arguments: Mapping[str, Any], tokenizer: Any,
    tools: Sequence[Schema], end_ids: frozenset[int],
) -> Chat:  # fmt: skip
    """Return the chat format; UserError if its template would rewrite what was sampled.

    `arguments` are those of the template.
    """
    chat = Chat(tokenizer, arguments, tools, end_ids)
    # Functions and MCP servers answer with results alone, after which Qwen3 keeps its thoughts.
    roles = ("tool", "user") if environment.path else ("tool",)
    rewritten = chat.rewrites_history(roles) if environment.history == "refuse" else ""
    if rewritten:
        raise UserError(
            f"The chat template changes earlier turns: {rewritten}. Set environment.history=split, "
            "which trains each turn with the text that the model read, or environment.history=keep "
            "to go on from what was sampled."
        )
    return chat
