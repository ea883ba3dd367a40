"""Known models: judge providers, and how reward models are recognised.

A reward model is recognised by its config and tensor names, which are read without torch. A hub
model that is not downloaded yet is recognised by its name, and checked again once its files are
there.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.config.models.weight_files import has_weights, read_json, tensor_names
from ppo_cli.errors import ConfigError, ModelError, RewardError, did_you_mean, ppo
from ppo_cli.paths import user_path
from ppo_cli.plugins import Declarations, load
from ppo_cli.secrets.redact import redact_url


@dataclass(frozen=True)
class JudgeApi:
    """The settings of a judge provider: a row of judges.toml, which explains the fields."""

    keys: tuple[str, ...]
    url: str
    example: str
    url_variables: tuple[str, ...] = ()
    decides: str | None = None
    default: str | None = None
    keyless: bool = False
    temperature: bool = True
    listed: str | None = None
    platform: str | None = None
    needs: Mapping[str, str] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)
    signs: str | None = None
    shutdowns: Mapping[str, str] = field(default_factory=dict)


def _judges() -> dict[str, JudgeApi]:
    text = Path(__file__).with_name("judges.toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(text)
    for row in rows.values():
        row |= {name: tuple(row.get(name, ())) for name in ("keys", "url_variables")}
    return {name: JudgeApi(**row) for name, row in rows.items()}


def _declare_provider(name: str) -> JudgeApi:
    """Return the declaration of a package's provider: `declaration` of its class, named `name`."""
    provider = load("providers", name)
    declaration = getattr(provider, "declaration", None)
    if not isinstance(declaration, JudgeApi) or getattr(provider, "name", None) != name:
        raise ConfigError(
            f"The judge provider '{name}': {provider!r:.60} needs name = '{name}' and a "
            "declaration = JudgeApi(…)."
        )
    return declaration


# All providers by name; a new one is a table of judges.toml.
JUDGES = Declarations(_declare_provider, _judges())


def effective_provider(kind: str, environ: Mapping[str, str]) -> str:
    """Return the provider that is really called: some SDKs switch by an environment variable."""
    for name, row in JUDGES.items():
        for variable in row.replaces.get(kind, "").split():
            if environ.get(variable, "").strip().lower() in ("true", "1"):
                return name
    return kind


def missing_sdk_settings(
    kind: str, environ: Mapping[str, str], *, base_url: str | None, key_env: str | None
) -> list[str]:
    """Return a sentence for each variable or package, keys aside, that a judge's SDK lacks."""
    row, problems = JUDGES[kind], []
    for names, what in row.needs.items():
        variables = names.split()
        # A set base_url replaces the variables with an address.
        moved = base_url and set(variables) & set(row.url_variables)
        if not moved and not any(environ.get(name, "").strip() for name in variables):
            problems.append(f"A judge at {kind} needs {' or '.join(variables)}: {what}.")
    keys = (key_env,) if key_env else row.keys
    keyed = any(environ.get(name, "").strip() for name in keys)
    if row.signs and not keyed and importlib.util.find_spec(row.signs) is None:
        problems.append(
            f"A judge at {kind} without {keys[0]} takes the credentials that {row.signs} finds, "
            f"and that is not installed: pip install {row.signs}, or set {keys[0]}."
        )
    return problems


def shutdown_date(provider: str, model: str) -> datetime.date | None:
    """Return the day on which a provider shuts down a model; None when it is unknown."""
    # Names of models may have a suffix such as a date: the longest match wins.
    days = {
        name: day
        for day, names in JUDGES[provider].shutdowns.items()
        for name in names.split()
        if model == name or model.startswith(f"{name}-")
    }
    day = days[max(days, key=len)] if days else ""
    return datetime.date.fromisoformat(day) if day else None


# Protocol of a served reward model -> endings of its address.
SERVED = {"vllm": ("/classify", "/pooling"), "openrlhf": ("/get_reward",)}
KEY = "reward.model.adapter"
# Beginnings of tensor names that identify a head.
GATED = ("regression_layer.", "reward_transform_matrix", "gating.")
# Value heads of TRL, OpenRLHF and critics, which are refused with the advice below.
VALUE = ("v_head.summary.", "v_head.", "value_head.", "reward_head.")
VALUE_HEAD_ADVICE = (
    "A value head is not read as a reward model: save it with a sequence classifier's head "
    f"`score`, fit one with `{ppo('reward fit')}`, or serve it with OpenRLHF "
    "(--reward_model http://HOST:PORT/get_reward)."
)
# Heads of sequence classifiers: `score` on decoders, the rest on encoders.
CLASSIFIER = (
    "score.", "classifier.", "classification_head.", "pre_classifier.", "logits_proj.",
    "sequence_summary.",
)  # fmt: skip


@dataclass(frozen=True)
class AdapterChoice:
    """The name of an adapter, and why it was chosen."""

    adapter: str
    reason: str


@dataclass(frozen=True)
class CheckpointSigns:
    """The config and tensor names by which a checkpoint is recognised."""

    folder: Path
    config: Mapping[str, Any]
    tensors: frozenset[str]
    has_template: bool

    def heads(self, *prefixes: str) -> tuple[str, ...]:
        """Return the tensors whose names start with one of the prefixes, in the order of these."""
        tensors = [name for name in self.tensors if name.startswith(prefixes)]
        return tuple(
            sorted(tensors, key=lambda name: (_place(name, prefixes), name.endswith("bias"), name))
        )

    @property
    def name(self) -> str:
        """The model's folder and the `_name_or_path` in its config.json, in lower case."""
        return f"{self.folder.resolve()} {self.config.get('_name_or_path', '')}".lower()

    @property
    def gives_each_token_a_value(self) -> bool:
        """Whether a token classifier wrote the checkpoint, which scores each token."""
        listed = self.config.get("architectures")
        return isinstance(listed, list) and str([*listed, ""][0]).endswith("ForTokenClassification")


def is_url(path: str) -> bool:
    """Return whether a reward model is named by the address of its server."""
    return path.startswith(("http://", "https://"))


def choose_adapter(path: str, adapter: str | None = None) -> AdapterChoice:
    """Return how the reward model at `path` (folder, hub name or URL) is read.

    A set `adapter` wins if it can read the checkpoint; planning/findings/models.py checks that it
    fits the kind of path.
    """
    if is_url(path):
        return _choose_protocol(path, adapter)
    folder = find_model_folder(path)
    if folder is None:
        if adapter is not None:
            return AdapterChoice(adapter, f"{KEY} says so; its files are not here yet")
        for name, head in HEADS.items():
            if any(fnmatchcase(path.lower(), pattern) for pattern in head.hub_names):
                return AdapterChoice(name, f"known by the name {path}; its files are not here yet")
        return AdapterChoice("seqcls", "by default; its files are not here yet")
    return _choose_head(read_signs(folder), adapter)


def find_model_folder(path: str) -> Path | None:
    """Return the folder `path`, or else the cached snapshot of the hub model `owner/name`.

    Returns None if that model is not downloaded. Raises ModelError for a file, and for a missing
    path that cannot be a hub name.
    """
    local = user_path(path)
    if local.is_dir():
        return local
    if local.exists():
        raise ModelError(f"--reward_model {path} is a file; give the folder that contains it.")
    # Only `owner/name` can be a hub model.
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(describe_missing_folder(path, "--reward_model"))
    # The newest complete snapshot of a hub model in the local cache.
    repo = hub_cache() / f"models--{path.replace('/', '--')}"
    main = repo / "refs" / "main"
    snapshots = sorted((repo / "snapshots").glob("*"), key=lambda p: p.stat().st_mtime)
    if main.is_file():
        snapshots.append(repo / "snapshots" / main.read_text(encoding="utf-8").strip())
    return next((folder for folder in reversed(snapshots) if has_weights(folder)), None)


def describe_missing_folder(path: str, flag: str) -> str:
    """Return the message about a missing model folder, with the nearest existing one."""
    local = user_path(path)
    parent = local.parent
    names = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    return f"{flag}: there is no model folder {path}.{did_you_mean(local.name, names)}"


def read_signs(folder: Path) -> CheckpointSigns:
    """Return config and tensor names of a checkpoint; ModelError when it is not a model."""
    config = read_json(folder / "config.json")
    if not config and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} is a LoRA adapter, not a whole model: merge it into its base model first."
        )
    tensors = tensor_names(folder)
    if not tensors:
        raise ModelError(
            f"{folder} holds no weights (*.safetensors, *.bin or *.pt), so it is not a model."
        )
    if not (folder / "config.json").is_file() and "v_head.weight" not in tensors:
        raise ModelError(
            f"{folder} holds no config.json, which describes its weights: copy "
            "the matching one there."
        )
    # A chat template tells a decoder with a score head from an encoder of pairs.
    template = (folder / "chat_template.jinja").is_file() or bool(
        read_json(folder / "tokenizer_config.json").get("chat_template")
    )
    return CheckpointSigns(folder, config, tensors, template)


def _choose_head(signs: CheckpointSigns, adapter: str | None) -> AdapterChoice:
    """Return the adapter of a checkpoint's reward head and the reason for it.

    Raises ModelError if there is no reward head, or none that the set `adapter` can read.
    """
    # The first kind that recognises the checkpoint.
    reasons = ((name, head.recognise(signs)) for name, head in HEADS.items())
    choice = next((AdapterChoice(name, reason) for name, reason in reasons if reason), None)
    if choice is None:
        if names := signs.heads(*VALUE, *CLASSIFIER):
            raise ModelError(
                f"{signs.folder} has a value head ({_shorten_list(names)}). {VALUE_HEAD_ADVICE}"
            )
        raise ModelError(
            f"{signs.folder} has no reward head: its {len(signs.tensors)} tensors hold "
            f"no {', '.join(prefix.rstrip('.') for prefix in ('score', 'classifier', 'v_head'))} "
            f"or the like; fit one with `{ppo('reward fit')}`."
        )
    # A set adapter must find tensors of its head.
    if adapter is None or adapter == choice.adapter:
        return choice
    if not signs.heads(*HEADS[adapter].tensors):
        raise ModelError(
            f"{KEY} {adapter} cannot read {signs.folder}: {choice.reason}. Leave {KEY} out "
            f"to read it as {choice.adapter}."
        )
    return AdapterChoice(adapter, f"{KEY} says so (by itself: {choice.adapter}, {choice.reason})")


def _seqcls(signs: CheckpointSigns) -> str | None:
    """Return why a checkpoint is a sequence classifier, None if it is not one."""
    head = signs.heads(*CLASSIFIER)
    if not head or signs.heads(*GATED) or signs.gives_each_token_a_value:
        return None
    if head[0].startswith("score."):
        return f"its head {_shorten_list(head)} is a sequence classifier's"
    chat = f"its head {_shorten_list(head)} is a sequence classifier's, with a chat"
    return chat if signs.has_template else None


def _armorm(signs: CheckpointSigns) -> str | None:
    gated = signs.heads(*GATED)
    return f"its tensors {_shorten_list(gated)} are ArmoRM's" if gated else None


def _starling(signs: CheckpointSigns) -> str | None:
    """Starling: a head named `v_head.weight`, on a body with the names of its class."""
    if "v_head.weight" not in signs.tensors or signs.heads(*CLASSIFIER, "v_head.summary."):
        return None
    for stem in ("transformer", "model.model"):
        if f"{stem}.embed_tokens.weight" in signs.tensors:
            return f"its tensors v_head.weight and {stem}.* are Starling's"
    named = "starling" in signs.name
    return "its tensor v_head.weight and its name are Starling's" if named else None


def _pair(signs: CheckpointSigns) -> str | None:
    head = signs.heads(*CLASSIFIER)
    if not head or signs.gives_each_token_a_value:
        return None
    kind = signs.config.get("model_type", "unknown")
    return f"its head {_shorten_list(head)} is an encoder's ({kind}), without a chat template"


@dataclass(frozen=True)
class HeadPattern:
    """How a kind of reward model is recognised before it is loaded.

    `recognise` returns the reason why a checkpoint is of this kind, or None; the first kind with a
    reason reads it. `rewards/models/heads.py` has the network of each kind, by the same name.
    """

    recognise: Callable[[CheckpointSigns], str | None]
    tensors: tuple[str, ...]  # beginnings of names, one of which a checkpoint needs to be read so
    hub_names: tuple[str, ...] = ()  # patterns in lower case
    max_length: int = 16384  # tokens, Skywork's; no model here was trained on longer samples


# In the order in which they are tried.
HEADS = {
    "seqcls": HeadPattern(_seqcls, CLASSIFIER, ("skywork/skywork-reward-*",)),
    "armorm": HeadPattern(_armorm, GATED, ("rlhflow/armorm-llama3-8b-v0.1",), 4096),
    "starling": HeadPattern(
        _starling, ("v_head.weight",), ("berkeley-nest/starling-rm-7b-alpha",), 2048
    ),
    "pair": HeadPattern(_pair, CLASSIFIER[1:], ("openassistant/reward-model-deberta-v3-*",), 512),
}


def _choose_protocol(url: str, protocol: str | None) -> AdapterChoice:
    """Return the protocol of a reward server: as set, else by the end of its address.

    Raises RewardError if neither decides.
    """
    if protocol is not None:
        return AdapterChoice(protocol, f"{KEY} says so")
    # Servers have fixed paths.
    path = urlsplit(url).path.rstrip("/")
    for adapter, endings in SERVED.items():
        for ending in endings:
            if path.endswith(ending):
                return AdapterChoice(adapter, f"its address ends in {ending}")
    raise RewardError(
        f"{redact_url(url)} does not name the protocol of the server; name it with "
        "--reward_model_adapter: vllm or openrlhf (or let the address end in /classify or "
        "/get_reward)."
    )


def hub_cache() -> Path:
    """Return the download folder of the Hugging Face hub client."""
    env = os.environ
    if folder := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(os.path.expandvars(folder)))
    cache = env.get("XDG_CACHE_HOME") or "~/.cache"
    home = env.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(os.path.expandvars(home)), "hub")


@cache
def announce_download(name: str) -> None:
    """Say once that the hub is asked for a model or a data set, which may take long.

    With HF_HUB_OFFLINE the client answers at once, from its cache.
    """
    from huggingface_hub.constants import is_offline_mode

    if not is_offline_mode():
        print(f"asking the hub for '{name}' …", file=sys.stderr, flush=True)


def _place(name: str, prefixes: tuple[str, ...]) -> int:
    return next(i for i, prefix in enumerate(prefixes) if name.startswith(prefix))


def _shorten_list(names: tuple[str, ...]) -> str:
    """Return the first names and the number of the others."""
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return (", ".join(names[:2]) if rest else " and ".join(names)) + rest
