"""Checks of the models of a run and of reward models, as far as their files and addresses tell."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ppo_cli.addresses import refuse_address
from ppo_cli.config.mixture import Scorer, judges_of, models_of
from ppo_cli.config.models.bundled import MODELS, model_folder
from ppo_cli.config.models.folder import (
    check_folder,
    describe_unused_head,
    folder_problem,
    full_kl_problem,
    has_template,
    read_config,
    read_vocabulary,
    vocabulary_problem,
    vocabulary_size,
)
from ppo_cli.config.models.known_models import SERVED, choose_adapter, is_url
from ppo_cli.config.models.limits import (
    attention_problem,
    column_problem,
    encoder_problem,
    length_problem,
)
from ppo_cli.config.models.weight_files import read_json
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.keys import table
from ppo_cli.config.schema.reward import DEVICE, Reward, check_address
from ppo_cli.config.schema.run import Config
from ppo_cli.digests import require_intact_model
from ppo_cli.errors import (
    ModelError,
    UserError,
    collect_problems,
    command_line,
    is_address,
    ppo,
    replace_flag,
    replace_path,
)
from ppo_cli.machine.machine import Machine
from ppo_cli.paths import user_path
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.secrets.redact import redact_url

TENSOR = "trainer.tensor_parallel_size"


def check_heads(scene: Scene) -> Iterator[Finding]:
    """Yield a clash for each model whose heads cannot be split, as its config.json has them.

    Hub names are not looked up.
    """
    config = scene.config
    # Every rank gets the same number of heads.
    size = config.trainer.tensor_parallel_size
    if size == 1 or config.trainer.engine == "local":
        return
    # A model that two roles share is reported once.
    checked_paths: set[str] = set()
    for key, path in config.training_models.items():
        heads = {} if path in checked_paths else _count_heads(path)
        checked_paths.add(path)
        wrong = next(((what, count) for what, count in heads.items() if count % size), None)
        if wrong is not None:
            what, count = wrong
            yield Finding(
                (TENSOR, key),
                f"{TENSOR} {size} does not divide the {count} {what} of {path}; use "
                f"--tensor_parallel_size {_list_divisors(math.gcd(*heads.values()))}.",
            )


def _count_heads(path: str) -> dict[str, int]:
    """Return the numbers of `attention heads` and `key-value heads` (the keys) of a model.

    Empty when its config.json is not on this machine or does not name them.
    """
    try:
        model_config = read_json(user_path(model_folder(path)) / "config.json")
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
    for path, key in {path: key for key, path in reversed(config.training_models.items())}.items():
        folder, flag = user_path(model_folder(path)), table()[key].flag or key
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
        if path == config.model.path and config.rollout.name == "hf":
            problems.append(column_problem(written, path, config.data))
        problems.append(_describe_other_tokens(config.model.path, path, flag))
    if config.ref.path:
        sizes = vocabulary_size(config.ref.path), vocabulary_size(config.model.path)
        problems.append(
            full_kl_problem(config.ref.path, sizes[0], config.model.path, sizes[1], config.full_kls)
        )
    return [problem for problem in problems if problem]


def _describe_other_tokens(policy_path: str, path: str, flag: str) -> str:
    """Return why a local critic or reference does not go with the tokenizer of a local policy."""
    folders = [user_path(model_folder(name)) for name in (path, policy_path)]
    if path == policy_path or not all((folder / "config.json").is_file() for folder in folders):
        return ""
    try:
        (ids, _), (policy_ids, _) = map(read_vocabulary, folders)
    except ModelError:  # `folder_problem` says so
        return ""
    size, policy_size = vocabulary_size(path), vocabulary_size(policy_path)
    return vocabulary_problem(path, flag, size, ids, policy_path, policy_size, policy_ids)


def damaged_models(training: dict[str, str], reward: Reward) -> list[str]:
    """Return a sentence for each model from a checkpoint whose files changed since it was saved.

    `training` has the models to train, by the settings that name them.
    """
    flags = {path: table()[key].flag or key for key, path in reversed(training.items())}
    # Reward models and local judges are loaded from checkpoints as well.
    rewards = [model.settings.path for model in models_of(reward)]
    rewards += [j.settings.model for j in judges_of(reward) if j.settings.type == "local"]
    paths = dict.fromkeys([*flags, *(str(path) for path in rewards if path)])
    folders = {path: user_path(model_folder(path)) for path in paths if not is_url(path)}

    def retry(path: str, other: Path) -> str:
        line = replace_path(path, str(other))
        if line or path not in flags:
            return line
        return replace_flag(command_line(), flags[path], shlex.quote(str(other)))

    # Advice for each: the same command with an intact checkpoint.
    checks = (partial(require_intact_model, folder, partial(retry, path))
              for path, folder in folders.items())  # fmt: skip
    named = (partial(check_folder, model_folder(path), flag) for path, flag in flags.items())
    return list(collect_problems([*checks, *named]))


def critic_remarks(path: str | None) -> Iterator[str]:
    """Remark that the head of the critic's checkpoint, if there is a critic, is not used."""
    if path and (remark := describe_unused_head(path)):
        yield remark


def template_remarks(path: str) -> Iterator[str]:
    """Remark that prompts of a local model are used without a chat template."""
    folder = user_path(model_folder(path))
    if (folder / "config.json").is_file() and not has_template(folder):
        yield (
            f"The tokenizer in {path} has no chat template: prompts are used as plain "
            "text, and prompts that are lists of messages are refused."
        )


def check_reward_models(scene: Scene) -> Iterator[Finding]:
    """Return every clash of the reward models that score with their files, servers and GPUs."""
    for model in models_of(scene.config.reward):
        if model.settings.path is not None:
            yield from _check_path(model)
            yield from _check_protocol(model)
    # What nobody has set is on a GPU if the run uses some, wherever they are.
    for model in models_of(scene.requested.reward):
        yield from _check_device(model, scene.machine)


def missing_models(reward: Reward, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reward model, or key of one, that is missing."""
    problems = []
    for model in models_of(reward):
        problems += [_describe_unreadable(model), _missing_served_key(model, environ)]
    return [sentence for sentence in dict.fromkeys(problems) if sentence]


def _check_path(model: Scorer) -> Iterator[Finding]:
    """Check that the path is a folder or an address, and that the adapter reads that kind."""
    path, adapter = str(model.settings.path), model.settings.adapter
    if path in MODELS:
        yield Finding(
            model.keys("path"),
            f"'{path}' is a small model to train, not a reward model; "
            f"`{ppo('reward fit')}` makes one from it.",
        )
    elif is_address(path):
        try:
            (check_address if is_url(path) else refuse_address)(path)
        except ValueError as error:
            yield Finding(model.keys("path"), f"{model.key}.path {error}.")
    # Adapters of servers need an address, those of heads a folder.
    if adapter is not None and (adapter in SERVED) is not is_url(path):
        what = "reads a server's answers" if adapter in SERVED else "reads a model in a folder"
        mend = "http://HOST:PORT" if adapter in SERVED else "vllm or openrlhf"
        yield Finding(
            model.keys("adapter", "path"),
            f"the adapter {adapter} {what}, but the reward model is {redact_url(path)}; use "
            f"{mend}, or leave --reward_model_adapter out.",
        )


def _check_protocol(model: Scorer) -> Iterator[Finding]:
    """Name settings that the protocol of a served model cannot honour."""
    settings = model.settings
    if not is_url(str(settings.path)):
        return
    try:
        adapter = choose_adapter(str(settings.path), settings.adapter).adapter
    except UserError:  # `missing_models` says so
        return
    # What each protocol has no field for.
    idle: dict[str, str] = {}  # setting -> why it has no effect
    if adapter == "openrlhf" and not (settings.tokenizer or settings.template):
        idle |= dict.fromkeys(("system_prompt", "turns"), "no template is applied here")
    if adapter != "vllm":
        idle["outputs"] = "its server sends one score"
    for name, why in idle.items():
        if getattr(settings, name) != type(settings).model_fields[name].default:
            yield Finding(
                model.keys(name),
                f"{model.key}.{name} has no effect on a reward model served as {adapter}: {why}; "
                "leave it out.",
            )
    # A template for a server must place the prompt itself.
    template = settings.template
    if template is not None and "{prompt}" not in template:
        yield Finding(
            model.keys("template"),
            f"{model.key}.template has no {{prompt}}; write it as '{{prompt}} {{response}}'.",
        )
    # Tokens can only be counted with a tokenizer.
    if settings.max_length is not None and settings.tokenizer is None:
        yield Finding(
            model.keys("max_length"),
            f"{model.key}.max_length counts tokens, which takes {model.key}.tokenizer for a served "
            "model; without both, the server's own limit holds.",
        )


def _check_device(model: Scorer, machine: Machine) -> Iterator[Finding]:
    """Check that the GPU of a local reward model exists."""
    device, gpus = model.settings.device, len(machine.gpus)
    if device is None or is_url(str(model.settings.path)):
        return
    # `cuda` without a number is the first GPU.
    match = DEVICE.fullmatch(device)
    if match is None or device == "cpu" or int(match[1] or 0) < gpus:
        return
    if gpus == 0:
        problem = f"is {device}, but no GPU is visible here; use cpu, or leave it out."
    else:
        problem = f"is {device}, but the last of {gpus} GPU(s) is cuda:{gpus - 1}."
    yield Finding(model.keys("device"), f"{model.key}.device {problem}")


def _describe_unreadable(model: Scorer) -> str:
    """Return why a reward model cannot be read (folder, head, weights); empty when it can."""
    try:
        choose_adapter(str(model.settings.path), model.settings.adapter)
        if model.settings.tokenizer is not None:
            check_folder(model.settings.tokenizer, f"{model.key}.tokenizer")
    except UserError as error:
        return str(error)
    return ""


def _missing_served_key(model: Scorer, environ: Mapping[str, str]) -> str:
    """Return a sentence when the variable with the key of a served model is empty."""
    name = model.settings.key_env
    served = is_url(model.settings.path or "")
    if name is None or not served or environ.get(name, "").strip():
        return ""
    return f"There is no key for {model.name}: set {name}, as key_env says."
