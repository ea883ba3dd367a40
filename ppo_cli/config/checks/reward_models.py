"""Checks of reward models: path, protocol, device, files and key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppo_cli.config.mixture import Scorer, models_of
from ppo_cli.config.models.bundled import EMBEDDED
from ppo_cli.config.models.known_models import SERVED, choose_adapter, is_url
from ppo_cli.config.schema.keys import Clash
from ppo_cli.config.schema.reward import DEVICE, check_address
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import UserError, ppo
from ppo_cli.redact import redact_url


def check_reward_models(config: Config, gpus: int) -> Iterator[Clash]:
    """Return every clash between the settings of a reward model."""
    for model in models_of(config.reward):
        if model.settings.path is not None:
            yield from _check_path(model)
            yield from _check_protocol(model)
            yield from _check_device(model, gpus)


def missing_models(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reward model, or key of one, that is missing."""
    problems = []
    for model in models_of(config.reward):
        problems += [_describe_unreadable(model), _missing_served_key(model, environ)]
    return [sentence for sentence in dict.fromkeys(problems) if sentence]


def _check_path(model: Scorer) -> Iterator[Clash]:
    """Check that the path is a folder or an address, and that the adapter reads that kind."""
    path, adapter = str(model.settings.path), model.settings.adapter
    if path == EMBEDDED:
        yield Clash(
            model.keys("path"),
            "'embedded' is a small model to train, not a reward model; "
            f"`{ppo('reward fit')}` makes one from it.",
        )
    elif "://" in path:
        try:
            check_address(path)
        except ValueError as error:
            yield Clash(model.keys("path"), f"{model.key}.path {error}.")
    # Adapters of servers need an address, those of heads a folder.
    if adapter is not None and (adapter in SERVED) is not is_url(path):
        what = "reads a server's answers" if adapter in SERVED else "reads a model in a folder"
        mend = "http://HOST:PORT" if adapter in SERVED else "vllm or openrlhf"
        yield Clash(
            model.keys("adapter", "path"),
            f"the adapter {adapter} {what}, but the reward model is {redact_url(path)}; use "
            f"{mend}, or leave --reward_model_adapter out.",
        )


def _check_protocol(model: Scorer) -> Iterator[Clash]:
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
            yield Clash(
                model.keys(name),
                f"{model.key}.{name} has no effect on a reward model served as {adapter}: {why}; "
                "leave it out.",
            )
    # A template for a server must place the prompt itself.
    template = settings.template
    if template is not None and "{prompt}" not in template:
        yield Clash(
            model.keys("template"),
            f"{model.key}.template has no {{prompt}}; write it as '{{prompt}} {{response}}'.",
        )
    # Tokens can only be counted with a tokenizer.
    if settings.max_length is not None and settings.tokenizer is None:
        yield Clash(
            model.keys("max_length"),
            f"{model.key}.max_length counts tokens, which takes {model.key}.tokenizer for a served "
            "model; without both, the server's own limit holds.",
        )


def _check_device(model: Scorer, gpus: int) -> Iterator[Clash]:
    """Check that the GPU of a local reward model exists."""
    device = model.settings.device
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
    yield Clash(model.keys("device"), f"{model.key}.device {problem}")


def _describe_unreadable(model: Scorer) -> str:
    """Return why a reward model cannot be read (folder, head, weights); empty when it can."""
    try:
        choose_adapter(str(model.settings.path), model.settings.adapter)
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
