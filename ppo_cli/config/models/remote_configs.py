"""The config.json of a model: in its folder, of the hub's cache, fetched, or from a bundled table.

A plan counts memory with it. Fetched files are kept in the cache folder; weights are not fetched.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.weight_files import LAYERS, read_json, text_config
from ppo_cli.errors import ModelError, shorten
from ppo_cli.machine.device_record import cache_folder
from ppo_cli.paths import load_json, read_text, user_path

DEADLINE_S = 3.0  # of the only attempt: names may take long to resolve behind a firewall
HUB, TABLE = "the hub", "the bundled table"
SIZE_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "n_embd", "n_layer", "n_head",
)  # fmt: skip
MAX_SIZE, MAX_LAYERS = (
    10**7,
    10**4,
)  # ten times what the widest vocabularies and deepest models have
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Addresses that did not answer in this process: not tried again for the next model.
_silent: set[str] = set()


def config_problem(config: Mapping[str, Any]) -> str:
    """Return what is wrong with the kind and the sizes in a config.json; "" for nothing."""
    text = text_config(config)
    if not isinstance(config.get("model_type", "" if "auto_map" in config else None), str):
        return "config.json has no model_type, which says what kind of model it is"
    for key in ("architectures", "layer_types"):
        names = text.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return f"config.json has {key} {shorten(repr(names), 40)}, which is not a list of names"
    for key in SIZE_KEYS:
        value = text.get(key)
        sizes = [] if value is None else value if isinstance(value, list) else [value]
        largest = MAX_LAYERS if key in LAYERS else MAX_SIZE
        if not all(type(size) is int and 0 < size <= largest for size in sizes):
            return (
                f"config.json has {key} {shorten(repr(value), 40)}, which is not a size: a whole "
                f"number from 1 to {largest:,}"
            )
    return ""


def find_config(path: str) -> tuple[dict[str, Any], str]:
    """Return a model's config.json and where it is from, if it is not on this machine.

    It is that of the folder, else of the hub's cache, else what `remote_config` returns.
    """
    folder = user_path(model_folder(path))
    file: object = folder / "config.json"
    try:
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(path, "config.json")
        if not isinstance(file, str | Path):
            return remote_config(path)
        config = read_json(Path(file))
        return ({} if config_problem(config) else config), ""
    except (ModelError, ValueError):  # a damaged file, or what is no name for the hub
        return {}, ""


@cache
def remote_config(name: str) -> tuple[dict[str, Any], str]:
    """Return the fields of a hub model's config.json, and their source: HUB or TABLE.

    Both are empty for a model that neither has. Fine-tunes are not guessed by their names.
    """
    if _NAME.fullmatch(name):
        folder = cache_folder()
        cached = folder and folder / "configs" / f"{name.replace('/', '--')}.json"
        with suppress(OSError, ValueError, TypeError):  # not fetched yet, or damaged
            if cached:
                return dict(load_json(read_text(cached))), HUB
        if fields := _fetch(name):
            with suppress(OSError):  # the next plan fetches it again
                if cached:
                    cached.parent.mkdir(parents=True, exist_ok=True)
                    with atomic_replace(cached) as unfinished:
                        unfinished.write_text(json.dumps(fields), encoding="utf-8")
            return fields, HUB
    fields = read_table().get(name, {})
    return fields, TABLE if fields else ""


@cache
def read_table() -> dict[str, dict[str, Any]]:
    """Return the fields of the known models by name."""
    text = Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8")
    return {name: row["config"] for row in tomllib.loads(text)["model"] for name in row["names"]}


def _fetch(name: str) -> dict[str, Any]:
    """Fetch config.json from the hub; empty if the hub does not give it in time."""
    import httpx
    from huggingface_hub import get_token, hf_hub_url
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode() or ENDPOINT in _silent:
        return {}
    token = get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url, fields = hf_hub_url(name, "config.json"), dict[str, Any]()

    def download() -> None:
        """Fill in the fields; those of a missing, private or gated model stay empty."""
        try:
            reply = httpx.get(url, headers=headers, timeout=DEADLINE_S, follow_redirects=True)
            if reply.status_code == httpx.codes.OK:
                fields.update(reply.json())
        except httpx.TransportError:
            _silent.add(ENDPOINT)
        except (ValueError, TypeError):  # not JSON, as from a page that asks to sign in
            pass

    # A thread, because no timeout of a client bounds the resolution of a name.
    thread = Thread(target=download, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        _silent.add(ENDPOINT)
        return {}
    return fields
