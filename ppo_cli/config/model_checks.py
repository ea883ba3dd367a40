"""Checks of models: reward models, attention heads, and folders as far as their files tell."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from ppo_cli.config.bundled import EMBEDDED, model_folder
from ppo_cli.config.derived import (
    critic_path,
    engine_name,
    gpus_per_node,
    rollout_is,
    sampler_name,
    uses_critic,
    uses_reference,
)
from ppo_cli.config.gpus import has_bfloat16, list_gpus
from ppo_cli.config.keys import Clash, table
from ppo_cli.config.known_models import (
    SERVED,
    absent_folder,
    find_adapter,
    is_url,
)
from ppo_cli.config.mixture import Scorer, judges_of, models_of
from ppo_cli.config.model_limits import (
    attention_problem,
    column_problem,
    encoder_problem,
    length_problem,
)
from ppo_cli.config.processor import has_fast_bfloat16
from ppo_cli.config.reward_schema import DEVICE, check_address
from ppo_cli.config.schema import Config
from ppo_cli.config.weight_files import read_json, text_config, weights_problem
from ppo_cli.digests import require_intact_model
from ppo_cli.errors import (
    ModelError,
    UserError,
    command_line,
    failing,
    ppo,
    with_flag,
    with_path,
)
from ppo_cli.redact import redact_url

TENSOR = "trainer.tensor_parallel_size"
WIDE: Final = 320  # hidden size; the smallest that was measured to be faster in bfloat16


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
        told = read_json(Path(model_folder(path)).expanduser() / "config.json")
    except (ModelError, RuntimeError):  # a home that is nobody's
        return {}
    attention = told.get("num_attention_heads")
    both: dict[str, Any] = {
        "attention heads": attention,
        "key-value heads": told.get("num_key_value_heads") or attention,
    }
    return both if all(type(n) is int and n > 0 for n in both.values()) else {}


# Words of a config.json.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_config(path: str) -> dict[str, Any]:
    """Return a model's config.json, from a folder or as the hub gave it before; {} without one."""
    folder = Path(model_folder(path)).expanduser()
    file: object = folder / "config.json"
    try:
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(path, "config.json")
        return read_json(Path(file)) if isinstance(file, str | Path) else {}
    except (ModelError, ValueError):  # a damaged file, or what is no name for the hub
        return {}


def vocabulary_size(path: str) -> int | None:
    """Return for how many tokens a model has embeddings; None where no config.json tells it."""
    size = text_config(read_config(path)).get("vocab_size")
    return size if type(size) is int else None


def has_placeholders(folder: Path) -> bool:
    """Whether the tokenizer in a folder has added tokens that the model has no embedding for."""
    size = vocabulary_size(str(folder))
    added = read_json(folder / "tokenizer.json").get("added_tokens") or ()
    return size is not None and any(token["id"] >= size for token in added)


def compute_dtype(config: Config, gpus: int | None = None) -> Literal["float32", "bfloat16"]:
    """Return the precision of matrix products: as set, else the one that is faster.

    That is bfloat16 on a GPU that has it, and in one process on a processor with AVX512-BF16 or AMX
    for a model that is wide enough (docs/log.md).
    """
    if config.model.dtype is not None:
        return config.model.dtype
    if per_node := gpus_per_node(config, gpus):
        return "bfloat16" if has_bfloat16(list_gpus()[:per_node]) else "float32"
    if engine_name(config, gpus) != "local" or config.model.quantization or not has_fast_bfloat16():
        return "float32"
    text = text_config(read_config(config.model.path))
    width = text.get("hidden_size") or text.get("n_embd")
    return "bfloat16" if isinstance(width, int) and width >= WIDE else "float32"


def spreads_weights(config: Config, device: str) -> bool:
    """Whether trained weights are spread over what bfloat16 rounds to them, on this device.

    On GPUs it was not measured, and other trainers do not do it: there it must be asked for.
    """
    asked = config.model.spread_weights
    return device == "cpu" if asked is None else asked


def why_logprobs_again(config: Config, gpus: int | None = None) -> str:
    """Return why the actor computes old log-probs again; "" where the sampler's are taken.

    Those are the same numbers but for rounding where the sampler computes with the actor's own
    weights in float32. `bypass_mode` alone takes them in bfloat16 and from 4-bit weights, whose
    rounding differs more, and of a model with experts, which rounding may send to another one.
    """
    algorithm, asked = config.algorithm, config.algorithm.rollout_correction.bypass_mode
    if asked is False:
        return "as set"
    if engine_name(config, gpus) != "local":
        return "the sampler has weights of its own"
    if algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
        return "the full KL needs the actor's whole vocabulary"
    if rollout_is(config) or algorithm.rollout_correction.rollout_rs:
        return "rollout_is and rollout_rs compare them with the sampler's"
    if asked:
        return ""
    if compute_dtype(config, gpus) == "bfloat16":
        return "in bfloat16 sampler and trainer round differently"
    if config.model.quantization:
        return "with 4-bit weights sampler and trainer round differently"
    text = text_config(read_config(config.model.path))
    if any(text.get(name) for name in EXPERTS):
        return "rounding may send a token to another expert"
    return ""


def _dividing(count: int) -> str:
    """Write the sizes that divide a number of heads: `1, 2 or 4`."""
    sizes = [str(n) for n in range(1, min(count, 1024) + 1) if count % n == 0]
    return " or ".join(part for part in (", ".join(sizes[:-1]), sizes[-1]) if part)


def model_clashes(config: Config, gpus: int) -> Iterator[Clash]:
    """Return every clash between the settings of a reward model."""
    for model in models_of(config.reward):
        if model.settings.path is not None:
            yield from _path(model)
            yield from _of_protocol(model)
            yield from _device(model, gpus)


def missing_models(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return one sentence for each reward model, or key of one, that is not there."""
    said = []
    for model in models_of(config.reward):
        said += [_unreadable(model), _missing_key(model, environ)]
    return [sentence for sentence in dict.fromkeys(said) if sentence]


def check_folder(path: str, flag: str) -> None:
    """Raise ModelError where a path can be no model; a name that a hub may know passes."""
    local = Path(path).expanduser()
    if local.exists() and not local.is_dir():
        raise ModelError(f"{flag} {path} is a file; give the folder that holds config.json.")
    if local.is_dir() and not (local / "config.json").exists():
        raise ModelError(
            f"The folder {path} holds no config.json, so it is no model. Give a folder written "
            "by save_pretrained, such as RUN/checkpoints/latest/actor."
        )
    if not local.exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ModelError(absent_folder(path, flag))


def _path(model: Scorer) -> Iterator[Clash]:
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
    if adapter is not None and (adapter in SERVED) is not is_url(path):
        what = "reads a server's answers" if adapter in SERVED else "reads a model in a folder"
        mend = "http://HOST:PORT" if adapter in SERVED else "vllm, openrlhf or rerank"
        yield Clash(
            model.keys("adapter", "path"),
            f"the adapter {adapter} {what}, but the reward model is {redact_url(path)}; use "
            f"{mend}, or leave --reward_model_adapter out.",
        )


def _of_protocol(model: Scorer) -> Iterator[Clash]:
    """Name settings that the protocol of a served model cannot honour."""
    settings = model.settings
    if not is_url(str(settings.path)):
        return
    try:
        adapter = find_adapter(str(settings.path), settings.adapter).adapter
    except UserError:  # `missing_models` says so
        return
    idle: dict[str, str] = {}  # setting -> why it has no effect
    if adapter == "rerank":
        idle |= {"template": "a reranker gets query and text", "tokenizer": "its server tokenises"}
    elif adapter == "openrlhf" and not (settings.tokenizer or settings.template):
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
    template = settings.template
    if adapter != "rerank" and template is not None and "{prompt}" not in template:
        yield Clash(
            model.keys("template"),
            f"{model.key}.template has no {{prompt}}; write it as '{{prompt}} {{response}}'.",
        )
    if settings.max_length is not None and settings.tokenizer is None:
        yield Clash(
            model.keys("max_length"),
            f"{model.key}.max_length counts tokens, which takes {model.key}.tokenizer for a served "
            "model; without both, the server's own limit holds.",
        )


def _device(model: Scorer, gpus: int) -> Iterator[Clash]:
    device = model.settings.device
    if device is None or is_url(str(model.settings.path)):
        return
    found = DEVICE.fullmatch(device)
    if found is None or device == "cpu" or int(found[1] or 0) < gpus:
        return
    if gpus == 0:
        said = f"is {device}, but no GPU is visible here; use cpu, or leave it out."
    else:
        said = f"is {device}, but the last of {gpus} GPU(s) is cuda:{gpus - 1}."
    yield Clash(model.keys("device"), f"{model.key}.device {said}")


def _unreadable(model: Scorer) -> str:
    """Say why a reward model cannot be read: no such folder, no head, no weights."""
    try:
        find_adapter(str(model.settings.path), model.settings.adapter)
    except UserError as error:
        return str(error)
    return ""


def _missing_key(model: Scorer, environ: Mapping[str, str]) -> str:
    name = model.settings.key_env
    served = is_url(model.settings.path or "")
    if name is None or not served or environ.get(name, "").strip():
        return ""
    return f"There is no key for {model.name}: set {name}, as key_env says."


SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "n_embd", "n_layer", "n_head",
)  # fmt: skip
# Every tokenizer but the byte-level ones keeps its vocabulary in a file of its own.
_VOCABULARY = re.compile(
    r"tokenizer\.(?!config)|vocab|spiece|sentencepiece|tekken|merges|.*\.(?:tiktoken|model|spm|bpe)$"
)
_BYTE_LEVEL = ("ByT5", "Canine", "Perceiver", "MyT5")
SAVED = "to which model and tokenizer were both saved, such as RUN/checkpoints/latest/actor"


def broken_models(config: Config) -> list[str]:
    """Return one sentence for each model of a run that cannot be trained, as its files tell."""
    problems = []
    for path, key in {path: key for key, path in reversed([*_models(config)])}.items():
        folder, flag = Path(model_folder(path)).expanduser(), table()[key].flag or key
        written = read_config(path)
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
    """Return one sentence for each model in a checkpoint of a run that is not as it was saved."""
    flags = {path: table()[key].flag or key for key, path in reversed([*_models(config)])}
    rewards = [model.settings.path for model in models_of(config.reward)]
    rewards += [j.settings.model for j in judges_of(config.reward) if j.settings.type == "local"]
    paths = dict.fromkeys([*flags, *(str(path) for path in rewards if path)])
    folders = {path: Path(model_folder(path)).expanduser() for path in paths if not is_url(path)}

    def retry(path: str, other: Path) -> str:
        line = with_path(path, str(other))
        if line or path not in flags:
            return line
        return with_flag(command_line(), flags[path], shlex.quote(str(other)))

    checks = (partial(require_intact_model, folder, partial(retry, path))
              for path, folder in folders.items())  # fmt: skip
    return list(failing(checks))


def folder_problem(
    folder: Path, flag: str, *, tokenizer: bool, weights: bool = True, head: bool = False
) -> str:
    """Say what keeps a folder with a config.json from being a model; empty when nothing is seen.

    With `tokenizer` it has to hold one, and a vocabulary that the model has room for; with
    `weights` and `head` those of a backbone, and of an output layer.
    """
    try:
        config = read_json(folder / "config.json")
        if problem := next(_size_problems(config), ""):
            return f"{problem}. Correct it, or name another folder with {flag}."
        read_json(folder / "generation_config.json")  # transformers ignores a damaged one
        if weights and (problem := weights_problem(folder, config, head=head)):
            return f"{problem}. {again(flag)}"
        if tokenizer and (problem := _tokenizer_problem(folder, config)):
            return f"{problem}. Name a folder with {flag} {SAVED}."
    except ModelError as error:
        return str(error)
    return ""


def again(flag: str) -> str:
    """What to do about the files of a checkpoint that are not as they were saved."""
    return f"Fetch or save the checkpoint again, or name another with {flag}."


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in a model's folder has a chat template."""
    files = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")]
    written = any(file.is_file() and file.stat().st_size for file in files)
    return written or bool(read_json(folder / "tokenizer_config.json").get("chat_template"))


def template_remark(config: Config) -> list[str]:
    """Tell of a local model that its prompts will go without a chat template."""
    folder = Path(model_folder(config.model.path)).expanduser()
    if not config.data.apply_chat_template or not (folder / "config.json").is_file():
        return []
    if has_template(folder):
        return []
    return [
        f"The tokenizer in {config.model.path} has no chat template: prompts are used as plain "
        "text, and prompts that are lists of messages are refused."
    ]


def _size_problems(config: Mapping[str, Any]) -> Iterator[str]:
    text = text_config(config)
    if not {"model_type", "auto_map"} & config.keys():
        yield "config.json has no model_type, which says what kind of model it is"
    for key in SIZES:
        value = text.get(key)
        if isinstance(value, int | float | str) and not (type(value) is int and value > 0):
            yield f"config.json has {key} {value!r}, which is no size: a whole number from 1 up"


def _tokenizer_problem(folder: Path, config: Mapping[str, Any]) -> str:
    told = read_json(folder / "tokenizer_config.json")
    kind = str(told.get("tokenizer_class", ""))
    named = any(_VOCABULARY.match(file.name) for file in folder.iterdir())
    if not named and not kind.startswith(_BYTE_LEVEL) and "auto_map" not in told:
        return f"There is no tokenizer in {folder}: no tokenizer.json, and no other vocabulary"
    tokenizer = read_json(folder / "tokenizer.json")
    model = tokenizer.get("model")
    words = model.get("vocab") if isinstance(model, Mapping) else None
    room = text_config(config).get("vocab_size")
    # Placeholders, of images for example, may be beyond: prompts are searched for them.
    added = {token["id"] for token in tokenizer.get("added_tokens") or ()}
    if isinstance(words, Mapping):
        ids = {i for i in words.values() if isinstance(i, int)}
    else:
        ids = set(range(len(words))) if isinstance(words, list) else set()
    last = max(ids - added, default=-1)
    if type(room) is int and last >= room:
        return (
            f"config.json has vocab_size {room}, but the tokenizer of {folder} has {last + 1} words"
        )
    return ""


def template_raises(folder: Path) -> bool | None:
    """Tell whether the chat template in a model folder raises errors; None where there is none."""
    files = [folder / "tokenizer_config.json", *folder.glob("chat_template*")]
    text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
    return "raise_exception" in text if len(files) > 1 or '"chat_template"' in text else None
