"""How a reward model must be read: chosen from its config and the names of its tensors.

A folder's name alone decides nothing. A hub model that was not fetched yet is chosen by its
name, and checked again when its files are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ppo_cli.config.tensor_names import has_weights, read_json, tensor_names
from ppo_cli.errors import ModelError, RewardError, did_you_mean, ppo
from ppo_cli.redact import redact

LOCAL = ("seqcls", "armorm", "starling", "pair", "value_head")
SERVED = {"vllm": ("/classify", "/pooling"), "openrlhf": ("/get_reward",), "rerank": ("/rerank",)}
KEY = "reward.model.adapter"
KNOWN = {
    "rlhflow/armorm-llama3-8b-v0.1": "armorm",
    "berkeley-nest/starling-rm-7b-alpha": "starling",
    "openassistant/reward-model-deberta-v3-large": "pair",
    "openassistant/reward-model-deberta-v3-large-v2": "pair",
    "openassistant/reward-model-deberta-v3-base": "pair",
}
SKYWORK = "skywork/skywork-reward-"
GATED = ("regression_layer.", "reward_transform_matrix", "gating.")
VALUE = ("v_head.summary.", "v_head.", "value_head.", "reward_head.")
# Heads of sequence classifiers: `score` on decoders, the rest on encoders.
CLASSIFIER = (
    "score.", "classifier.", "classification_head.", "pre_classifier.", "logits_proj.",
    "sequence_summary.",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """An adapter's name, and in a few words why it is this one."""

    adapter: str
    reason: str


@dataclass(frozen=True)
class Signs:
    """What a checkpoint shows of itself."""

    folder: Path
    config: Mapping[str, Any]
    tensors: frozenset[str]
    has_template: bool

    def heads(self, *prefixes: str) -> tuple[str, ...]:
        """Tensors of a head, by how their names begin."""
        found = [name for name in self.tensors if name.startswith(prefixes)]
        return tuple(
            sorted(found, key=lambda name: (_place(name, prefixes), name.endswith("bias"), name))
        )

    @property
    def name(self) -> str:
        """Names that the checkpoint goes by, in lower case."""
        return f"{self.folder.resolve()} {self.config.get('_name_or_path', '')}".lower()

    @property
    def architecture(self) -> str:
        """The class that wrote the checkpoint, or an empty string."""
        listed = self.config.get("architectures") or ("",)
        return str(listed[0]) if isinstance(listed, list) else ""


def is_url(path: str) -> bool:
    """Whether a reward model is named by the address of its server."""
    return path.startswith(("http://", "https://"))


def find_adapter(path: str, wanted: str | None = None) -> Found:
    """Choose how the reward model at `path` (folder, hub name or URL) is read.

    `wanted` overrides the choice where the checkpoint can be read so.
    """
    if is_url(path):
        return _served(path, wanted)
    if wanted in SERVED:
        raise RewardError(
            f"{KEY} {wanted} is for a model behind an address such as http://host:8000, and "
            f"{path} is none."
        )
    folder = find_folder(path)
    if folder is None:
        return _by_name(path, wanted)
    return _choose(read_signs(folder), wanted)


def find_folder(path: str) -> Path | None:
    """The folder of a model on this machine: itself, or the hub's cache; None when not here."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise ModelError(f"--reward_model {path} is a file; give the folder that it lies in.")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        parent = local.parent
        names = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
        near = did_you_mean(local.name, names)
        raise ModelError(f"--reward_model: there is no model folder {path}.{near}")
    return _cached(path)


def read_signs(folder: Path) -> Signs:
    """Read the config and the tensor names of a checkpoint; refuse what is no model."""
    config = read_json(folder / "config.json")
    if not config and (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} is a LoRA adapter, not a whole model: merge it into its base model first."
        )
    tensors = tensor_names(folder)
    if not tensors:
        raise ModelError(
            f"{folder} holds no weights (*.safetensors, *.bin or *.pt), so it is no model."
        )
    if not (folder / "config.json").is_file() and "v_head.weight" not in tensors:
        raise ModelError(
            f"{folder} holds no config.json, so nobody can say what its weights are: copy the "
            "one that belongs to them there."
        )
    template = (folder / "chat_template.jinja").is_file() or bool(
        read_json(folder / "tokenizer_config.json").get("chat_template")
    )
    return Signs(folder, config, tensors, template)


def _choose(signs: Signs, wanted: str | None) -> Found:
    found = _by_tensors(signs)
    if found is None:
        raise ModelError(
            f"{signs.folder} has no reward head: its {len(signs.tensors)} tensors hold "
            f"no {', '.join(prefix.rstrip('.') for prefix in ('score', 'classifier', 'v_head'))} "
            f"or the like; fit one with `{ppo('reward fit')}`."
        )
    if wanted is None or wanted == found.adapter:
        return found
    return _override(signs, found, wanted)


def _by_tensors(signs: Signs) -> Found | None:
    if gated := signs.heads(*GATED):
        return Found("armorm", f"its tensors {_some(gated)} are ArmoRM's")
    if classifier := signs.heads(*CLASSIFIER):
        return _classifier(signs, classifier)
    if summary := signs.heads("v_head.summary."):
        return Found("value_head", f"its tensors {_some(summary)} are a value head's")
    if "v_head.weight" in signs.tensors:
        return _bare_value_head(signs)
    if value := signs.heads(*VALUE):
        return Found("value_head", f"its tensors {_some(value)} are a value head's")
    return None


def _classifier(signs: Signs, head: tuple[str, ...]) -> Found:
    if signs.architecture.endswith("ForTokenClassification"):
        return Found("value_head", f"its head {_some(head)} gives each token a value")
    if head[0].startswith("score."):
        return Found("seqcls", f"its head {_some(head)} is a sequence classifier's")
    if signs.has_template:
        return Found("seqcls", f"its head {_some(head)} is a sequence classifier's, with a chat")
    kind = signs.config.get("model_type", "unknown")
    return Found(
        "pair", f"its head {_some(head)} is an encoder's ({kind}), without a chat template"
    )


def _bare_value_head(signs: Signs) -> Found:
    """`v_head.weight` alone is Starling's class, where the body has that class's names."""
    for stem in ("transformer", "model.model"):
        if f"{stem}.embed_tokens.weight" in signs.tensors:
            return Found("starling", f"its tensors v_head.weight and {stem}.* are Starling's")
    if "starling" in signs.name:
        return Found("starling", "its tensor v_head.weight and its name are Starling's")
    return Found("value_head", "its tensor v_head.weight is a value head's")


def _override(signs: Signs, found: Found, wanted: str) -> Found:
    needs = {
        "seqcls": signs.heads(*CLASSIFIER),
        "pair": tuple(n for n in signs.heads(*CLASSIFIER) if not n.startswith("score.")),
        "armorm": signs.heads(*GATED),
        "starling": tuple(signs.heads("v_head.weight")),
        "value_head": signs.heads(*VALUE, "score.", "classifier."),
    }
    if wanted not in needs:
        raise RewardError(f"{KEY}: there is no adapter {wanted}.{did_you_mean(wanted, LOCAL)}")
    if not needs[wanted]:
        raise ModelError(
            f"{KEY} {wanted} cannot read {signs.folder}: {found.reason}. Leave {KEY} out "
            f"to read it as {found.adapter}."
        )
    return Found(wanted, f"{KEY} says so (by itself: {found.adapter}, {found.reason})")


def _by_name(path: str, wanted: str | None) -> Found:
    if wanted is not None:
        if wanted not in LOCAL:
            raise RewardError(f"{KEY}: there is no adapter {wanted}.{did_you_mean(wanted, LOCAL)}")
        return Found(wanted, f"{KEY} says so; its files are not here yet")
    name = path.lower()
    if name in KNOWN:
        return Found(KNOWN[name], f"known by the name {path}; its files are not here yet")
    if name.startswith(SKYWORK):
        return Found("seqcls", "known by the name Skywork-Reward; its files are not here yet")
    return Found("seqcls", "by default; its files are not here yet")


def _served(url: str, wanted: str | None) -> Found:
    shown = redact(url)
    if wanted is not None:
        if wanted not in SERVED:
            known = ", ".join(SERVED)
            raise RewardError(f"{KEY} {wanted} does not go with {shown}; a server's are {known}.")
        return Found(wanted, f"{KEY} says so")
    path = urlsplit(url).path.rstrip("/")
    for adapter, endings in SERVED.items():
        for ending in endings:
            if path.endswith(ending):
                return Found(adapter, f"its address ends in {ending}")
    raise RewardError(
        f"{shown} does not say how the server is asked; say it with --reward_model_adapter: vllm, "
        "openrlhf or rerank (or let the address end in /classify, /get_reward or /rerank)."
    )


def _cached(name: str) -> Path | None:
    """The newest complete snapshot of a hub model in the local cache."""
    repo = hub_cache() / f"models--{name.replace('/', '--')}"
    main = repo / "refs" / "main"
    snapshots = sorted((repo / "snapshots").glob("*"), key=lambda p: p.stat().st_mtime)
    if main.is_file():
        snapshots.append(repo / "snapshots" / main.read_text(encoding="utf-8").strip())
    return next((folder for folder in reversed(snapshots) if has_weights(folder)), None)


def hub_cache() -> Path:
    """Where the hub's client keeps what it fetched."""
    env = os.environ
    if found := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expanduser(os.path.expandvars(found)))
    cache = env.get("XDG_CACHE_HOME") or "~/.cache"
    home = env.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expanduser(os.path.expandvars(home)), "hub")


def _place(name: str, prefixes: tuple[str, ...]) -> int:
    return next(i for i, prefix in enumerate(prefixes) if name.startswith(prefix))


def _some(names: tuple[str, ...]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return (", ".join(names[:2]) if more else " and ".join(names)) + more
